"""The decoder against transformers' own Llama, and checkpoints that are broken in every usual way."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoints import LLAMA3, assert_same_logits_and_taps, load, saved
from conftest import recompute
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from tracedraft.errors import UserError
from tracedraft.models import architectures, weights
from tracedraft.models.decoder import Rope, rope_frequencies
from tracedraft.models.tiny import byte_tokenizer

PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
CASES = {
    "untied": {"tie_word_embeddings": False},
    "tied": {"tie_word_embeddings": True},
    "linear": {"tie_word_embeddings": False, "rope_parameters": LINEAR},
    "llama3": {"tie_word_embeddings": False, "rope_parameters": LLAMA3},
    "wide_heads": {"tie_word_embeddings": False, "head_dim": 16},
    "one_group": {"tie_word_embeddings": True, "num_key_value_heads": 6},
}
# float32 carries 1.2e-7 of relative error a sum; through 7 layers, logits of size ~10 end up 1e-5 apart.
ATOL = 2e-4


# Rotary embeddings


@pytest.mark.parametrize("head_dim", [8, 64, 128])
@pytest.mark.parametrize("rope", [PLAIN, LINEAR, LLAMA3, LLAMA3 | {"factor": 32.0}])
def test_rope_is_transformers_own(head_dim, rope):
    config = LlamaConfig(head_dim=head_dim, max_position_embeddings=512, rope_parameters=rope)
    theirs = LlamaRotaryEmbedding(config)
    ours = rope_frequencies(head_dim, rope["rope_theta"], None if rope is PLAIN else rope)
    # a handful of float32 operations, each right to 6e-8
    torch.testing.assert_close(ours, theirs.inv_freq, rtol=1e-6, atol=0)
    cos, sin = theirs(torch.zeros(1), torch.arange(500)[None])
    table = Rope(ours, 500, torch.float32)
    # an angle of 500 radians is itself only known to 500 * 1e-7
    torch.testing.assert_close(table.cos, cos[0], rtol=0, atol=2e-4)
    torch.testing.assert_close(table.sin, sin[0], rtol=0, atol=2e-4)


def test_llama3_scaling_keeps_stretches_and_blends():
    """The case above would say little if all wavelengths fell into one band."""
    plain, scaled = rope_frequencies(64, 500000.0, None), rope_frequencies(64, 500000.0, LLAMA3)
    share = plain / scaled
    assert bool((share == 1).any())
    assert bool(((share > 1.01) & (share < 7.9)).any())
    assert bool(torch.isclose(share, torch.tensor(8.0)).any())


# Against transformers


@pytest.mark.parametrize("shard", ["1GB", "60KB"])
@pytest.mark.parametrize("case", CASES)
def test_logits_and_taps_equal_transformers(tmp_path, case, shard):
    reference = saved(tmp_path, shard, **CASES[case])
    assert len(list(tmp_path.glob("*.safetensors"))) == 1 or shard != "1GB"
    assert len(list(tmp_path.glob("*.safetensors"))) > 3 or shard == "1GB"
    target = load(tmp_path)
    assert target.taps == (2, 3, 4)  # 2, L // 2 and L - 3 of 7
    assert_same_logits_and_taps(target, reference, ATOL)
    tokens = torch.randint(target.vocab_size, (70,), generator=torch.Generator().manual_seed(2))
    with torch.inference_mode():
        expected = reference(tokens[None]).logits[0]
    torch.testing.assert_close(recompute(target, tokens.tolist())[2], expected, rtol=0, atol=ATOL)


def test_split_fused_undoes_fuse(tmp_path):
    saved(tmp_path)
    plain = load_file(tmp_path / "model.safetensors")
    config = architectures.read_decoder_config(tmp_path)
    fused = weights.fuse(plain, tmp_path)
    assert len(fused) == len(plain) - 3 * config.layers
    back = weights.split_fused(fused, config)
    assert back.keys() == plain.keys()
    assert all(torch.equal(back[name], plain[name]) for name in plain)


# Broken checkpoints: each is refused with the file, the tensor or the fix


@pytest.mark.parametrize("kept", [0, 4, 200, -1])
def test_truncated_weights(tmp_path, kept):
    saved(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(UserError, match=r"model\.safetensors: corrupt or truncated"):
        load(tmp_path)


def test_truncated_shard_is_named(tmp_path):
    saved(tmp_path, "60KB")
    file = sorted(tmp_path.glob("*.safetensors"))[2]
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(UserError, match=file.name):
        load(tmp_path)


def test_missing_shard(tmp_path):
    saved(tmp_path, "60KB")
    file = sorted(tmp_path.glob("*.safetensors"))[1]
    file.unlink()
    with pytest.raises(UserError, match=rf"{file.name}: named in model\.safetensors\.index\.json but missing"):
        load(tmp_path)


def test_no_weights_at_all(tmp_path):
    saved(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"no \*\.safetensors file"):
        load(tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        "norm.weight",
        "embed_tokens.weight",
        "layers.3.mlp.down_proj.weight",
        "layers.3.self_attn.q_proj.weight",
        "layers.3.self_attn.k_proj.weight",
        "layers.3.mlp.up_proj.weight",
    ],
)
def test_missing_tensor_is_named(tmp_path, name):
    saved(tmp_path)
    file = tmp_path / "model.safetensors"
    state = load_file(file)
    del state[f"model.{name}"]
    save_file(state, file, {"format": "pt"})
    with pytest.raises(UserError, match=f"tensor '{name}' is missing"):
        load(tmp_path)


def test_unexpected_and_misshapen_tensors_are_named(tmp_path):
    saved(tmp_path)
    file = tmp_path / "model.safetensors"
    state = load_file(file)
    save_file(state | {"model.extra.weight": torch.zeros(1)}, file)
    with pytest.raises(UserError, match=r"unexpected tensor 'extra\.weight'"):
        load(tmp_path)
    save_file(state | {"model.norm.weight": torch.zeros(47)}, file)
    with pytest.raises(UserError, match=r"'norm\.weight' is \(47,\), expected \(48,\)"):
        load(tmp_path)


def test_no_config(tmp_path):
    with pytest.raises(UserError, match="no readable model config"):
        load(tmp_path)


def test_no_tokenizer_and_no_chat_template(tmp_path):
    saved(tmp_path)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = None
    (tmp_path / "chat_template.jinja").unlink()
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(UserError, match="no chat template"):
        load(tmp_path)
    for file in tmp_path.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(UserError, match="no readable tokenizer"):
        load(tmp_path)


def test_gguf_of_another_content_is_refused(tmp_path):
    gguf = tmp_path / "model.gguf"
    gguf.write_bytes(b"GGUF not the one")
    with pytest.raises(UserError, match=r"model\.gguf: sha256 .* is not the expected 000000000000"):
        weights.converted_gguf(gguf, "0" * 64, tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_no_such_folder_and_unset_path(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UserError, match=r"target\.path='.*nowhere': no such folder"):
        load(tmp_path / "nowhere")


def test_content_hash_sees_every_file_and_every_change(tmp_path):
    files = [tmp_path / "a", tmp_path / "b"]
    for file in files:
        file.write_bytes(b"x" * 10)
    first = weights.sha256_of(files, tmp_path / "cache")
    assert weights.sha256_of(files, tmp_path / "cache") == first
    files[1].write_bytes(b"y" * 11)
    assert weights.sha256_of(files, tmp_path / "cache") != first


def test_failed_write_leaves_nothing(tmp_path):
    def write(path: Path) -> None:
        path.write_text("half")
        raise RuntimeError("full")

    (tmp_path / "kept").write_text("old")
    with pytest.raises(RuntimeError):
        weights.write_atomically(tmp_path / "kept", write, "")
    assert [p.name for p in tmp_path.iterdir()] == ["kept"]
    assert (tmp_path / "kept").read_text() == "old"
