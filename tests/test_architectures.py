"""Every supported architecture against transformers and golden outputs; variants that would be served wrongly."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from checkpoints import assert_same_logits_and_taps, edit_config, load, saved, spec
from conftest import GOLDEN, chain, golden_folder, golden_json, golden_tensors
from omegaconf import OmegaConf
from safetensors.torch import load_file, save_file
from transformers import LlamaTokenizer

from tracedraft import chat, target
from tracedraft.config import shipped_dir
from tracedraft.drafts.eagle3 import LogitLensSpec
from tracedraft.errors import UserError
from tracedraft.models import architectures, weights
from tracedraft.models.tiny import byte_tokenizer
from tracedraft.target import LlamaTarget, default_taps, end_tokens, load_tokenizer

CASES = {
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral_wide_heads": ("mistral", {"sliding_window": None, "head_dim": 16}),
    "mistral_window_of_its_context": ("mistral", {"sliding_window": 512}),
    "qwen2": ("qwen2", {}),
    "qwen2_tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2_window_not_used": ("qwen2", {"sliding_window": 8, "use_sliding_window": False}),
    "qwen3": ("qwen3", {"head_dim": 8}),
    "qwen3_wide_heads_tied": ("qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen3_biased": ("qwen3", {"head_dim": 8, "attention_bias": True}),
    "llama_biased": ("llama", {"attention_bias": True}),
}
# float32 carries 1.2e-7 of relative error a sum; through 7 layers, logits of size ~10 end up 1e-5 apart.
ATOL = 2e-4


@pytest.mark.parametrize("case", CASES)
def test_logits_and_taps_equal_transformers(tmp_path, case):
    architecture, changes = CASES[case]
    reference = saved(tmp_path, architecture=architecture, **changes)
    assert_same_logits_and_taps(load(tmp_path), reference, ATOL)


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3"])
def test_what_an_architecture_adds_matters(tmp_path, architecture):
    """A comparison that biases or norms of ones and zeros would pass too shows nothing."""
    reference = saved(tmp_path, architecture=architecture, head_dim=8)
    file = tmp_path / "model.safetensors"
    state = load_file(file)
    kind = "k_proj.bias" if architecture == "qwen2" else "k_norm.weight"
    plain = torch.zeros if architecture == "qwen2" else torch.ones
    save_file({n: plain(t.shape) if n.endswith(kind) else t for n, t in state.items()}, file)
    with pytest.raises(AssertionError, match="Tensor-likes are not close"):
        assert_same_logits_and_taps(load(tmp_path), reference, ATOL)


# Golden outputs; the tolerance is the reference's own


@pytest.mark.parametrize("layout", ["config", "config_transformers5"])
@pytest.mark.parametrize("name", ["target_tiny", "target_qwen2_tiny", "target_qwen3_tiny"])
def test_golden(tmp_path, name, layout):
    golden, expected = golden_json(name), golden_tensors(name)
    folder = golden_folder(name, tmp_path)
    (folder / "config.json").write_text(json.dumps(golden[layout]))
    model = weights.load_decoder(folder, architectures.read_decoder_config(folder), torch.float32, "cpu")
    served = LlamaTarget(model, default_taps(model.config.layers), frozenset(), 512)
    assert list(served.taps) == golden["tap_layer_inputs"]
    served.begin(128, chain().width, 16)
    seen = served.prefill(golden["prompt"])
    torch.testing.assert_close(seen.hidden, expected["last_hidden"], rtol=0, atol=2e-4)
    torch.testing.assert_close(served.logits(seen.hidden), expected["logits"], rtol=0, atol=2e-4)
    taps = seen.taps.unflatten(1, (3, 32)).transpose(0, 1)
    torch.testing.assert_close(taps, expected["tap_hidden"], rtol=0, atol=2e-4)
    assert golden["greedy_min_top1_top2_margin"] > 1e-3
    tokens = [int(seen.logits.argmax())]
    while len(tokens) < 48:
        tokens.append(int(served.verify(torch.tensor(tokens[-1:])).logits.argmax()))
        served.commit(1)
    assert tokens == golden["greedy_48"]


def test_all_golden_targets_are_here():
    assert len(list(GOLDEN.glob("target_*.expected.safetensors"))) == 3


def test_a_draft_for_any_target_is_a_plain_llama_layer(tmp_path):
    """EAGLE-3's published layout knows no biases and no norms of heads."""
    saved(tmp_path, architecture="qwen3", head_dim=8, attention_bias=True)
    draft, _ = LogitLensSpec("tiny", 64, 0).build(load(tmp_path))
    assert [n for n in draft.model.state_dict() if "bias" in n or "q_norm" in n or "k_norm" in n] == []


# Sliding windows


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("mistral", {"sliding_window": 40}),
        ("qwen2", {"sliding_window": 40, "use_sliding_window": True, "max_window_layers": 3}),
        ("qwen3", {"sliding_window": 40, "use_sliding_window": True, "max_window_layers": 0, "head_dim": 8}),
    ],
)
def test_the_context_ends_where_a_window_begins_to_slide(tmp_path, architecture, changes):
    reference = saved(tmp_path, architecture=architecture, **changes)
    served = load(tmp_path)
    assert served.context == 40
    assert load(tmp_path, context=30).context == 30
    with pytest.raises(UserError, match=r"target\.context=41: .*last 40 tokens only.*at most 40, or null"):
        load(tmp_path, context=41)
    tokens = torch.randint(served.vocab_size, (41,), generator=torch.Generator().manual_seed(1))
    served.begin(64, 6, 48)
    with torch.inference_mode():
        expected = reference(tokens[None]).logits[0]
        got = served.logits(served.prefill(tokens.tolist()).hidden)
    torch.testing.assert_close(got[:40], expected[:40], rtol=0, atol=ATOL)
    assert (got[40] - expected[40]).abs().max() > 0.01, "the window was no window"


def test_windows_that_never_slide_do_not_bind(tmp_path):
    saved(tmp_path, architecture="qwen2", sliding_window=40, use_sliding_window=True, max_window_layers=7)
    assert load(tmp_path).context == 512


# Refusals


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"]}, r"'gemma2' \(Gemma2ForCausalLM\)"),
        ({"model_type": "unheard", "architectures": ["UnheardModel"]}, r"'unheard' \(UnheardModel\)"),
        ({"model_type": None, "architectures": None}, r"None \(not stated\)"),
        ({"architectures": ["LlamaForSequenceClassification"]}, r"'llama' \(LlamaForSequenceClassification\)"),
    ],
)
def test_another_architecture_is_named_with_the_supported_ones(tmp_path, changes, message):
    saved(tmp_path)
    edit_config(tmp_path, **changes)
    known = "llama: LlamaForCausalLM, mistral: .*qwen2: .*qwen3: Qwen3ForCausalLM"
    with pytest.raises(UserError, match=rf"architecture {message} is not supported \(supported: {known}\)"):
        load(tmp_path)


def test_the_first_llamas_spelling_is_read(tmp_path):
    saved(tmp_path)
    edit_config(tmp_path, architectures=["LLaMAForCausalLM"])
    assert load(tmp_path).context == 512


YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 128}


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        ("qwen2", {"rope_parameters": YARN}, r"rope scaling 'yarn' is not supported \(default, linear, llama3\)"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "'dynamic'"),
        ("llama", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ("llama", {"mlp_bias": True}, "mlp_bias=true"),
        ("qwen3", {"layer_types": ["chunked_attention"] * 7}, "layer_types: chunked_attention"),
        ("mistral", {"quantization_config": {"quant_method": "fp8"}}, "quantised"),
    ],
)
def test_variants_that_would_be_served_wrongly(tmp_path, architecture, changes, message):
    saved(tmp_path, architecture=architecture)
    edit_config(tmp_path, **changes)
    with pytest.raises(UserError, match=message) as caught:
        load(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_an_old_rope_scaling_of_another_spelling_is_read(tmp_path):
    saved(tmp_path)
    edit_config(tmp_path, rope_theta=10000.0, rope_scaling={"type": "linear", "factor": 2.0}, rope_parameters=None)
    scaling = architectures.read_decoder_config(tmp_path).rope_scaling
    assert scaling is not None
    assert (scaling["rope_type"], scaling["factor"]) == ("linear", 2.0)


# Ends and templates


@pytest.mark.parametrize(
    ("generation", "config", "ends"),
    [(None, 7, {7}), (None, [7, 8], {7, 8}), (9, 7, {7, 9}), ([9, 10], [7, 9], {7, 9, 10}), (None, None, set())],
)
def test_every_stated_end_token_ends_a_response(tmp_path, generation, config, ends):
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": config}))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    tokenizer = byte_tokenizer()
    assert end_tokens(tmp_path, tokenizer) == ends | {tokenizer.eos_token_id}


def template(name: str) -> str:
    return OmegaConf.load(shipped_dir("conf") / "target" / f"{name}.yaml").chat_template


def test_a_template_of_our_own(tmp_path):
    saved(tmp_path)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = None
    (tmp_path / "chat_template.jinja").unlink()
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"no chat template: give the model's in target\.chat_template"):
        load_tokenizer(tmp_path, None)
    built = spec(tmp_path, tmp_path / "cache", chat_template=template("vicuna-7b")).build()
    assert chat.decode(built.tokenizer, chat.encode(built.tokenizer, [USER])).endswith(" USER: Hi there ASSISTANT:")


USER, REPLY = {"role": "user", "content": "Hi there"}, {"role": "assistant", "content": "Yes."}
SYSTEM = "A chat between a curious user and an artificial intelligence assistant. The assistant gives helpful, "
SYSTEM += "detailed, and polite answers to the user's questions."


def words(legacy: bool) -> LlamaTokenizer:
    """A tokenizer of Llama's kind: one token a word, the space that SentencePiece puts before it included."""
    text = f"{SYSTEM} USER: Hi there ASSISTANT: Yes. Be brief."
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    merges = []
    for letter in sorted({*text.replace(" ", "▁"), "▁"}):
        vocab[letter] = len(vocab)
    for word in text.split():
        for end in range(1, len(word) + 1):
            if ("▁" + word[:end]) not in vocab:
                vocab["▁" + word[:end]] = len(vocab)
                merges.append(("▁" + word[: end - 1], word[end - 1]))
    return LlamaTokenizer(vocab=vocab, merges=merges, legacy=legacy)


@pytest.mark.parametrize("legacy", [True, False])
@pytest.mark.parametrize("name", ["vicuna-7b", "vicuna-13b"])
def test_vicunas_prompt_is_the_one_it_was_trained_with(name, legacy):
    """FastChat's: SYSTEM USER: … ASSISTANT: …</s>USER: … ASSISTANT:, each word with its space."""
    tokenizer = words(legacy)
    tokenizer.chat_template = template(name)
    tokens = tokenizer.convert_ids_to_tokens(chat.encode(tokenizer, [USER, REPLY, USER]))
    prompt = ["<s>", *(f"▁{word}" for word in f"{SYSTEM} USER: Hi there ASSISTANT: Yes.".split()), "</s>"]
    assert tokens == [*prompt, "▁USER:", "▁Hi", "▁there", "▁ASSISTANT:"]
    own = tokenizer.convert_ids_to_tokens(chat.encode(tokenizer, [{"role": "system", "content": "Be brief."}, USER]))
    assert own == ["<s>", "▁Be", "▁brief.", "▁USER:", "▁Hi", "▁there", "▁ASSISTANT:"]


def test_a_tokenizer_that_needs_a_package_says_which(tmp_path, monkeypatch):
    monkeypatch.setattr(target.importlib.util, "find_spec", lambda name: None)
    (tmp_path / "tokenizer.model").write_bytes(b"")
    with pytest.raises(UserError, match=r"tokenizer\.model needs a package: pip install sentencepiece"):
        load_tokenizer(tmp_path, None)
    saved(tmp_path)  # with a tokenizer.json beside it
    assert load_tokenizer(tmp_path, None).chat_template


# Hub


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_torch_files_are_fetched_only_where_there_are_no_safetensors(tmp_path, monkeypatch, kind):
    asked = []

    def snapshot(repo: str, revision: str, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        asked.append(allow_patterns[-1])
        if allow_patterns[-1].endswith(kind):
            (tmp_path / f"pytorch_model.{kind}").touch()
        assert (repo, revision) == ("some/model", "abc")
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    assert target.download("some/model", "abc") == Path(tmp_path)
    assert asked == ["*.safetensors", "pytorch_model*.bin"][: 1 if kind == "safetensors" else 2]
