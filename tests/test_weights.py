"""Weight files of every format, torch's own read without running them, and what loading holds in memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from checkpoints import assert_same_logits_and_taps, edit_config, load, saved, spec
from gguf import GGUFWriter
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from tracedraft import chat
from tracedraft.errors import UserError
from tracedraft.models import architectures, weights
from tracedraft.models import gguf as ours
from tracedraft.models.decoder import Decoder
from tracedraft.models.tiny import byte_tokenizer

ATOL = 2e-4


def as_torch_files(folder: Path, shards: int, zipped: bool = True) -> None:
    """Turn a saved checkpoint into ``pytorch_model.bin``, in one piece or more."""
    file = folder / "model.safetensors"
    state, names = load_file(file), {}
    file.unlink()
    for i in range(shards):
        part = {n: state[n] for n in sorted(state)[i::shards]}
        name = "pytorch_model.bin" if shards == 1 else f"pytorch_model-{i + 1:05d}-of-{shards:05d}.bin"
        torch.save(part, folder / name, _use_new_zipfile_serialization=zipped)
        names |= dict.fromkeys(part, name)
    if shards > 1:
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": names}))


# torch files


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("shards", [1, 3])
def test_torch_files_equal_transformers(tmp_path, shards, zipped):
    reference = saved(tmp_path)
    as_torch_files(tmp_path, shards, zipped)
    assert_same_logits_and_taps(load(tmp_path), reference, ATOL)


def test_frequencies_that_old_checkpoints_carry_are_ignored(tmp_path):
    reference = saved(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file(load_file(file) | {"model.layers.3.self_attn.rotary_emb.inv_freq": torch.zeros(4)}, file)
    assert_same_logits_and_taps(load(tmp_path), reference, ATOL)


def test_safetensors_come_first(tmp_path):
    reference = saved(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"nothing")
    assert_same_logits_and_taps(load(tmp_path), reference, ATOL)


class Planted:
    def __reduce__(self):
        return os.mkdir, (str(self.folder),)

    def __init__(self, folder: Path):
        self.folder = folder


@pytest.mark.parametrize("zipped", [True, False])
def test_a_torch_file_is_never_run(tmp_path, zipped):
    saved(tmp_path)
    as_torch_files(tmp_path, 1)
    trace = tmp_path / "ran"
    file = tmp_path / "pytorch_model.bin"
    torch.save({"a": Planted(trace)}, file, _use_new_zipfile_serialization=zipped)
    with pytest.raises(UserError, match=r"pytorch_model\.bin: .*more than tensors in it, which is not run") as caught:
        load(tmp_path)
    assert "\n" not in str(caught.value)
    assert not trace.exists()
    torch.load(file, weights_only=False)
    assert trace.exists(), "the file would have done nothing anyway"


@pytest.mark.parametrize("kept", [0, 4, 200, -1])
def test_truncated_torch_file(tmp_path, kept):
    saved(tmp_path)
    as_torch_files(tmp_path, 1)
    file = tmp_path / "pytorch_model.bin"
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(UserError, match=r"pytorch_model\.bin: corrupt or truncated"):
        load(tmp_path)


def test_a_torch_file_of_something_else(tmp_path):
    saved(tmp_path)
    as_torch_files(tmp_path, 1)
    file = tmp_path / "pytorch_model.bin"
    torch.save({"state_dict": {}, "epoch": 3}, file)
    with pytest.raises(UserError, match=r"pytorch_model\.bin: 'state_dict' is no tensor"):
        load(tmp_path)
    torch.save(torch.zeros(3), file)
    with pytest.raises(UserError, match=r"pytorch_model\.bin: corrupt"):
        load(tmp_path)


def test_missing_torch_shard_and_unreadable_index(tmp_path):
    saved(tmp_path)
    as_torch_files(tmp_path, 3)
    file = tmp_path / "pytorch_model-00002-of-00003.bin"
    file.unlink()
    with pytest.raises(UserError, match=rf"{file.name}: named in pytorch_model\.bin\.index\.json but missing"):
        load(tmp_path)
    (tmp_path / "pytorch_model.bin.index.json").write_text("{")
    with pytest.raises(UserError, match=r"pytorch_model\.bin\.index\.json: no readable index"):
        load(tmp_path)


# Memory

PEAK = """
    import json, sys
    from pathlib import Path
    import torch
    from tracedraft.models import architectures, weights
    from tracedraft.models.decoder import Decoder
    folder, careful = Path(sys.argv[1]), sys.argv[2] == "careful"
    config = architectures.read_decoder_config(folder)
    with torch.device("meta"):
        model = Decoder(config)  # torch loads modules of its own for it
    def highest():
        status = Path("/proc/self/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) * 1024
    Path("/proc/self/clear_refs").write_text("5")  # the highest so far becomes the present
    before = highest()
    if careful:
        model = weights.load_decoder(folder, config, torch.bfloat16, "cpu")
    else:
        state = {name.removeprefix("model."): tensor.clone() for name, tensor in weights.tensors(folder)}
        weights.load_module(model, weights.fuse(state, folder), folder)
    print(json.dumps({"held": sum(p.nbytes for p in model.parameters()), "peak": highest() - before}))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_loading_holds_one_copy_and_one_shard(tmp_path, kind):
    """128 MiB in eight shards; the mapped pages of a file count as held."""
    shard = write_zeros(tmp_path, kind)
    seen = peak(tmp_path, "careful")
    assert seen["held"] > 120 * 2**20
    most = seen["held"] + shard + 12 * 2**20  # the last is the interpreter's
    assert seen["peak"] < most, seen
    if kind == "safetensors":
        whole = peak(tmp_path, "whole")
        assert whole["held"] == seen["held"]
        assert whole["peak"] > 1.2 * most, "the measurement would not have seen a second copy"


def peak(folder: Path, how: str) -> dict[str, int]:
    command = [sys.executable, "-c", textwrap.dedent(PEAK), str(folder), how]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    return json.loads(done.stdout)


def write_zeros(folder: Path, kind: str) -> int:
    """A checkpoint of one layer a shard, in bf16; bytes of the largest."""
    saved(folder)
    (folder / "model.safetensors").unlink()
    shape = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 4, "head_dim": 128}
    edit_config(folder, **shape, num_attention_heads=8, num_key_value_heads=8)
    config = architectures.read_decoder_config(folder)
    with torch.device("meta"):
        plain = weights.unfused(Decoder(config).state_dict(), config)
    names, sizes = {}, []
    chunks = [sorted(plain)[i::8] for i in range(8)]
    for i, chunk in enumerate(chunks):
        part = {n if n == "lm_head.weight" else f"model.{n}": torch.zeros(plain[n].shape).bfloat16() for n in chunk}
        file = f"shard-{i}.{kind}"
        save_file(part, folder / file) if kind == "safetensors" else torch.save(part, folder / file)
        names |= dict.fromkeys(part, file)
        sizes.append(sum(t.nbytes for t in part.values()))
    whole = "model.safetensors" if kind == "safetensors" else "pytorch_model.bin"
    (folder / f"{whole}.index.json").write_text(json.dumps({"weight_map": names}))
    return max(sizes)


@pytest.mark.usefixtures("unpacked")
def test_parameters_are_made_once_and_tied_ones_shared(tmp_path):
    saved(tmp_path, tie_word_embeddings=True)
    model = load(tmp_path).model
    assert model.lm_head.weight.data_ptr() == model.embed_tokens.weight.data_ptr()
    assert all(p.is_contiguous() and not p.requires_grad for p in model.parameters())


# GGUF

FREQUENCIES = {"rope_theta": 500000.0, "rope_type": "llama3", "factor": 8.0, **ours.LLAMA3}


def as_gguf(folder: Path, model: PreTrainedModel, arch: str, name: str = "random", **fields) -> Path:
    """Write the model as llama.cpp's converter does, with its byte tokenizer and ``fields`` of other keys."""
    config, tokenizer = model.config, byte_tokenizer()
    path = folder / "model.gguf"
    writer = GGUFWriter(path, arch)
    writer.add_name(name)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if arch == "llama":
        writer.add_rope_dimension_count(config.head_dim)
    else:
        writer.add_key_length(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    writer.add_vocab_size(config.vocab_size)
    tokens = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * len(tokens))  # in place of merges
    kinds = dict.fromkeys(tokenizer.all_special_tokens, gguf.TokenType.CONTROL)
    writer.add_token_types([kinds.get(token, gguf.TokenType.NORMAL) for token in tokens])
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_chat_template(tokenizer.chat_template)
    for key, value in fields.items():
        getattr(writer, f"add_{key}")(value)
    add_tensors(writer, model, arch)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_tensors(writer: GGUFWriter, model: PreTrainedModel, arch: str) -> None:
    config = model.config
    known = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == arch)
    names = gguf.get_tensor_name_map(known, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for full, tensor in model.state_dict().items():
        if full == "lm_head.weight" and config.tie_word_embeddings:
            continue
        stem, _, suffix = full.rpartition(".")
        values = tensor
        for part, count in heads.items():
            if arch == "llama" and stem.endswith(part):
                values = interleaved(tensor, count)
        writer.add_tensor(f"{names.get_name(stem)}.{suffix}", values.numpy().astype(np.float32))
    if config.rope_parameters["rope_type"] == "llama3":
        theirs = model.model.rotary_emb.inv_freq
        plain = 1.0 / 500000.0 ** (torch.arange(0, config.head_dim, 2) / config.head_dim)
        writer.add_tensor("rope_freqs.weight", (plain / theirs).numpy().astype(np.float32))


def interleaved(tensor: Tensor, heads: int) -> Tensor:
    """Rows of each head as llama.cpp rotates them: pairs side by side."""
    return tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(tensor.shape)


GGUFS = {
    "llama": ("llama", "llama", {"head_dim": 8}),
    "llama_tied": ("llama", "llama", {"tie_word_embeddings": True, "head_dim": 8}),
    "llama_scaled": ("llama", "llama", {"rope_parameters": FREQUENCIES, "head_dim": 16}),
    "mistral": ("mistral", "llama", {"sliding_window": None, "head_dim": 8}),
    "qwen2": ("qwen2", "qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", "qwen3", {"head_dim": 16}),
}


@pytest.mark.parametrize("case", GGUFS)
def test_gguf_equals_transformers(tmp_path, monkeypatch, case):
    """A conversion of many shards, each read back."""
    monkeypatch.setattr(ours, "SHARD", 60_000)
    architecture, arch, changes = GGUFS[case]
    reference = saved(tmp_path / "plain", architecture=architecture, **changes)
    path = as_gguf(tmp_path, reference, arch)
    built = spec(path, tmp_path / "cache").build()
    assert_same_logits_and_taps(built.target, reference, ATOL)
    assert len(list((tmp_path / "cache").rglob("*.safetensors"))) > 3
    question = [{"role": "user", "content": "Hi <|im_end|>"}]
    assert chat.encode(built.tokenizer, question) == chat.encode(byte_tokenizer(), question)
    assert built.target.eos_ids == {byte_tokenizer().eos_token_id}
    assert built.provenance["origin"] == str(path)
    again = spec(path, tmp_path / "cache", sha256=built.provenance["sha256"]).build()
    assert again.provenance == built.provenance


def test_every_end_token_of_a_gguf_ends_a_response(tmp_path):
    reference = saved(tmp_path / "plain", head_dim=8)
    path = as_gguf(tmp_path, reference, "llama", eot_token_id=11, eom_token_id=12)
    built = spec(path, tmp_path / "cache").build()
    assert built.target.eos_ids == {byte_tokenizer().eos_token_id, 11, 12}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rope_scaling_type": gguf.RopeScalingType.YARN, "rope_scaling_factor": 4.0}, "rope scaling 'yarn'"),
        ({"rope_scaling_type": gguf.RopeScalingType.NONE}, None),
    ],
)
def test_scaling_that_a_gguf_names(tmp_path, fields, message):
    path = as_gguf(tmp_path, saved(tmp_path / "plain", head_dim=8), "llama", **fields)
    if message is None:
        spec(path, tmp_path / "cache").build()
    else:
        with pytest.raises(UserError, match=message):
            spec(path, tmp_path / "cache").build()


def test_gguf_of_linear_scaling(tmp_path):
    linear = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
    reference = saved(tmp_path / "plain", head_dim=8, rope_parameters=linear)
    fields = {"rope_scaling_type": gguf.RopeScalingType.LINEAR, "rope_scaling_factor": 4.0}
    built = spec(as_gguf(tmp_path, reference, "llama", **fields), tmp_path / "cache").build()
    assert_same_logits_and_taps(built.target, reference, ATOL)


def test_gguf_of_frequencies_that_are_not_llamas(tmp_path):
    other = FREQUENCIES | {"original_max_position_embeddings": 64}
    path = as_gguf(tmp_path, saved(tmp_path / "plain", head_dim=16, rope_parameters=other), "llama")
    with pytest.raises(UserError, match=r"rope_freqs\.weight is not Llama 3's scaling"):
        spec(path, tmp_path / "cache").build()
    assert list((tmp_path / "cache" / "gguf").iterdir()) == []


def test_gguf_of_another_architecture_and_no_gguf(tmp_path):
    path = tmp_path / "model.gguf"
    with pytest.raises(UserError, match=r"target\.path='.*model\.gguf': no such file"):
        spec(path, tmp_path / "cache").build()
    path.write_bytes(b"no GGUF at all")
    with pytest.raises(UserError, match=r"model\.gguf: no readable GGUF file"):
        spec(path, tmp_path / "cache").build()
    writer = GGUFWriter(path, "gemma2")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UserError, match=r"architecture 'gemma2' is not supported \(supported: llama, mistral, qwen2"):
        spec(path, tmp_path / "cache").build()
