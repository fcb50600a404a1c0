"""EAGLE-3 checkpoints as they are published: every naming, and every place that engines read differently."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import GOLDEN, golden_folder, golden_json, golden_tensors
from safetensors.torch import load_file, save_file
from test_training_objective import golden_batch

from tracedraft.drafts.eagle3 import Eagle3Draft, check_fit
from tracedraft.errors import UserError
from tracedraft.models import eagle3
from tracedraft.models.decoder import DecoderConfig
from tracedraft.models.eagle3_layouts import Eagle3Config, Layout, Reading, TapIds, VocabMap
from tracedraft.models.unroll import chain, every_slot

CLOSE = {"rtol": 0, "atol": 1e-4}  # the golden files' own tolerance, at logits of size ~10
NAMINGS = ("safeailab", "safeailab.bin", "speculators", "vllm")
OTHER_TAPS = [1, 3, 4]  # as outputs: 2, 4, 5


def published(naming: str, folder: Path) -> Path:
    """The golden draft as published in a naming."""
    golden_folder("eagle3_tiny", folder)
    if naming == "safeailab.bin":
        torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
        (folder / "model.safetensors").unlink()
    elif naming != "safeailab":
        shutil.copy(GOLDEN / f"eagle3_tiny.{naming}.safetensors", folder / "model.safetensors")
    if naming == "speculators":
        (folder / "config.json").write_text(json.dumps(golden_json("eagle3_tiny")["config_speculators"]))
    return folder


def changed(folder: Path, change: Callable[[dict], object] | None = None, **config) -> Path:
    """The checkpoint with its tensors changed in place, and config keys set, or dropped where None."""
    raw = json.loads((folder / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps({k: v for k, v in raw.items() if v is not None}))
    if change:
        state = load_file(folder / "model.safetensors")
        change(state)
        save_file(state, folder / "model.safetensors")
    return folder


def read(folder: Path, **reading) -> Eagle3Config:
    return eagle3.read_config(folder, Reading(**reading))


def load(folder: Path, **reading) -> eagle3.Eagle3:
    return eagle3.load(folder, torch.float32, "cpu", Reading(**reading)).requires_grad_(False)


def slots(model: eagle3.Eagle3, decoder) -> tuple[Eagle3Draft, torch.Tensor]:
    """The golden prompt, consumed: the draft, and its logits [12, 64] at every slot."""
    expected = golden_tensors("eagle3_tiny")
    draft = Eagle3Draft(model, decoder.embed_tokens.weight)
    draft.begin(64)
    return draft, draft.head.logits(draft.extend(expected["features"], expected["input_tokens"][1:]))


# Namings


@pytest.mark.parametrize("naming", NAMINGS)
def test_every_naming_is_the_same_draft(naming, golden_decoder, tmp_path):
    draft, logits = slots(load(published(naming, tmp_path / "draft")), golden_decoder)
    expected = golden_tensors("eagle3_tiny")
    torch.testing.assert_close(logits, expected["step0_logits"], **CLOSE)
    assert torch.equal(draft.propose(5).tokens, expected["chain_tokens_target"])


def test_every_naming_gives_the_same_tensors(tmp_path):
    models = [load(published(naming, tmp_path / naming)).state_dict() for naming in NAMINGS]
    for state in models:
        state.pop("embed_tokens.weight", None)
        assert state.keys() == models[0].keys()
        assert all(torch.equal(state[name], models[0][name]) for name in state)


def test_a_tensor_in_two_namings_is_refused(tmp_path):
    def twice(state: dict) -> None:
        state["layers.0.hidden_norm.weight"] = state["midlayer.hidden_norm.weight"].clone()

    folder = changed(published("safeailab", tmp_path / "draft"), twice)
    with pytest.raises(UserError, match=r"'midlayer\.hidden_norm\.weight' in two namings"):
        load(folder)


def test_a_pickle_that_holds_more_than_tensors_is_refused(tmp_path):
    folder = published("safeailab.bin", tmp_path / "draft")
    torch.save({"fc.weight": Path("x")}, folder / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"pytorch_model\.bin: corrupt .*more than tensors in it"):
        load(folder)
    torch.save({"fc.weight": 3}, folder / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"pytorch_model\.bin: 'fc\.weight' is no tensor"):
        load(folder)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"num_hidden_layers": 2}, "num_hidden_layers=2 is not supported"),
        ({"layer_types": ["sliding_attention"]}, "layer_types=.'sliding_attention'. is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported"),
        ({"speculators_model_type": "dflash"}, "kind 'dflash', not eagle3"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope scaling 'yarn' is not supported"),
        ({"target_hidden_size": 40}, "fc takes 96 features, no multiple of the target's hidden size 40"),
        ({"num_attention_heads": 3}, "q_proj has 32 rows and k_proj 16, .*set draft.head_dim"),
        ({"fc_norm": True}, "config.json says fc_norm=True, and the file lacks such norms"),
        ({"eagle_config": {"norm_before_fc": True}}, "says norm_before_fc=True, and the file lacks such norms"),
    ],
)
def test_what_is_not_supported_is_named(tmp_path, config, says):
    folder = changed(published("safeailab", tmp_path / "draft"), **config)
    with pytest.raises(UserError, match=says):
        load(folder)


def test_an_eagle_1_checkpoint_is_not_taken_for_one(tmp_path):
    folder = changed(published("safeailab", tmp_path / "draft"), lambda state: state.pop("lm_head.weight"))
    with pytest.raises(UserError, match=r"'lm_head\.weight' is missing: not an EAGLE-3 draft"):
        load(folder)


# Where engines differ


@pytest.mark.parametrize("naming", ["safeailab", "speculators"])
def test_rope_theta_of_the_config_or_the_key(naming, golden_decoder, tmp_path):
    """In either place of a config, and over it by the key; golden outputs for 1e6."""
    other = golden_tensors("eagle3_tiny")["step0_logits_rope_theta_1e6"]
    folder = published(naming, tmp_path / "draft")
    torch.testing.assert_close(slots(load(folder, rope_theta=1e6), golden_decoder)[1], other, **CLOSE)
    raw = json.loads((folder / "config.json").read_text())
    layer = raw.get("transformer_layer_config", raw)
    layer["rope_parameters"] = {"rope_theta": 1e6, "rope_type": "default"}
    (folder / "config.json").write_text(json.dumps(raw))
    torch.testing.assert_close(slots(load(folder), golden_decoder)[1], other, **CLOSE)
    plain = golden_tensors("eagle3_tiny")["step0_logits"]
    torch.testing.assert_close(slots(load(folder, rope_theta=1e4), golden_decoder)[1], plain, **CLOSE)


def test_rope_scaling_in_either_place(tmp_path):
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling |= {"original_max_position_embeddings": 64, "rope_type": "llama3"}
    folder = published("safeailab", tmp_path / "draft")
    old = read(changed(folder, rope_scaling=scaling, rope_theta=5e5))
    both = scaling | {"rope_theta": 5e5}
    new = read(changed(folder, rope_scaling=None, rope_theta=None, rope_parameters=both))
    assert old == new
    assert (new.layer.rope_theta, new.layer.rope_scaling) == (5e5, scaling)


@pytest.mark.parametrize("naming", ["safeailab", "speculators"])
def test_norm_before_residual(naming, golden_decoder, tmp_path):
    """Every step of the reference's training chain, and the served slots; by the config, and by the key."""
    expected = golden_tensors("eagle3_tiny")["ttt_logits_norm_before_residual"]
    folder = published(naming, tmp_path / "draft")
    forced = load(folder, norm_before_residual=True)
    for model in (forced, load(changed(folder, norm_before_residual=True))):
        batch = golden_batch(model)
        embedding = golden_decoder.embed_tokens.weight
        for k, hidden in enumerate(chain(model, embedding, batch.tokens, batch.taps, every_slot(batch.tokens, 3))):
            logits = model.lm_head(model.norm(hidden))[0]
            torch.testing.assert_close(logits, expected[k, : 23 - k], **CLOSE)
        # the golden training rows begin with the golden prompt
        torch.testing.assert_close(slots(model, golden_decoder)[1], expected[0, :12], **CLOSE)
    plain = golden_tensors("eagle3_tiny")["step0_logits"]
    torch.testing.assert_close(slots(load(folder, norm_before_residual=False), golden_decoder)[1], plain, **CLOSE)


def test_speculators_must_say_norm_before_residual(tmp_path):
    folder = changed(published("speculators", tmp_path / "draft"), norm_before_residual=None)
    with pytest.raises(UserError, match=r"lacks norm_before_residual.*set draft\.norm_before_residual.*eval_draft"):
        read(folder)
    assert read(folder, norm_before_residual=True).norm_before_residual


def test_norm_output_feeds_the_chain_normed_outputs(golden_decoder, tmp_path):
    """Against the draft written out: the first token is the same, later slots read the norm's output."""
    folder = changed(published("speculators", tmp_path / "draft"), norm_output=True)
    draft, _ = slots(load(folder), golden_decoder)
    expected = golden_tensors("eagle3_tiny")
    fed, said = [], draft.propose(3)
    draft, _ = slots(load(folder), golden_decoder)
    plain = draft._slots
    draft._slots = lambda features, *rest: fed.append(features) or plain(features, *rest)
    assert torch.equal(draft.propose(3).tokens, said.tokens)
    assert said.tokens[0] == expected["chain_tokens_target"][0]
    for before, after in zip(said.features, fed, strict=False):
        scale = before.pow(2).mean().add(1e-5).rsqrt()
        torch.testing.assert_close(after[0], before * scale * draft.model.norm.weight, **CLOSE)
    assert not torch.allclose(said.features[1], expected["chain_hidden"][1], atol=0.1)


def test_training_chains_as_drafting_does_with_normed_outputs(golden_decoder, tmp_path):
    model = load(published("safeailab", tmp_path / "draft"), norm_output=True, norm_before_residual=True)
    draft, _ = slots(model, golden_decoder)
    proposal, expected = draft.propose(3), golden_tensors("eagle3_tiny")
    tokens = torch.cat((expected["input_tokens"], proposal.tokens))[None]
    taps = torch.cat((expected["features"], torch.zeros(4, 96)))[None]
    for k, hidden in enumerate(chain(model, golden_decoder.embed_tokens.weight, tokens, taps, every_slot(tokens, 3))):
        torch.testing.assert_close(hidden[0, 11], proposal.features[k], **CLOSE)


def test_a_tree_of_one_beam_is_the_chain_with_normed_outputs(golden_decoder, tmp_path):
    draft, _ = slots(load(published("safeailab", tmp_path / "draft"), norm_output=True), golden_decoder)
    said = draft.propose(4)
    tree = draft.propose_tree(5, 4, 1)
    assert torch.equal(tree.tokens, said.tokens)
    torch.testing.assert_close(tree.features[:4], said.features, **CLOSE)


def test_norm_output_outside_speculators_means_two_things(tmp_path):
    folder = changed(published("safeailab", tmp_path / "draft"), norm_output=True)
    with pytest.raises(UserError, match=r"norm_output=True.*SpecForge.*set draft\.norm_output"):
        read(folder)
    assert read(folder, norm_output=True).norm_output
    assert not read(folder, norm_output=False).norm_output


@pytest.mark.parametrize("kind", ["fc_norm", "input_norm"])
def test_norms_before_fc(kind, tmp_path):
    """One a tap, or one over all: what the file holds, where the config doesn't contradict it."""
    gains = torch.rand(96, generator=torch.Generator().manual_seed(0)) + 0.5
    names = {"fc_norm": [f"fc_norm.{i}.weight" for i in range(3)], "input_norm": ["input_norm.weight"]}[kind]

    def add(state: dict) -> None:
        state |= dict(zip(names, (part.clone() for part in gains.chunk(len(names))), strict=True))

    model = load(changed(published("safeailab", tmp_path / "draft"), add))
    taps = golden_tensors("eagle3_tiny")["features"]
    parts = taps.unflatten(-1, (len(names), -1))
    normed = (parts * parts.pow(2).mean(-1, keepdim=True).add(1e-5).rsqrt()).flatten(1) * gains
    torch.testing.assert_close(model.fuse(taps), normed @ model.fc.weight.T, **CLOSE)
    if kind == "fc_norm":
        assert torch.equal(load(tmp_path / "draft", fc_norm=False).fuse(taps), taps @ model.fc.weight.T)
    changed(tmp_path / "draft", **{"norm_before_fc" if kind == "input_norm" else kind: False})
    with pytest.raises(UserError, match="=False, and the file holds such norms"):
        load(tmp_path / "draft")


def test_head_dim_follows_the_weights(tmp_path):
    """Some models' heads are wider than hidden size over heads, and not every config says so."""
    layer = DecoderConfig(128, 32, 64, 1, 4, 2, 16, 1e-5, 1e4, None, False, 512)
    model = eagle3.Eagle3(Eagle3Config(layer, 128, 32, 3, fc_norm=False))
    eagle3.save(model, tmp_path, torch.float32)
    assert json.loads((tmp_path / "config.json").read_text())["head_dim"] == 16
    assert read(changed(tmp_path, head_dim=None)).layer == layer
    again = read(tmp_path, head_dim=8).layer
    assert (again.head_dim, again.heads, again.kv_heads) == (8, 8, 4)


def test_a_missing_map(tmp_path):
    """Either map gives the other; without both, nothing but the key says which tokens are meant."""
    whole = load(published("safeailab", tmp_path / "draft"))
    for missing in ("t2d", "d2t"):
        folder = changed(published("safeailab", tmp_path / missing), lambda state, name=missing: state.pop(name))
        model = load(folder)
        assert torch.equal(model.vocab, whole.vocab)
        assert torch.equal(model.t2d, whole.t2d)
    folder = changed(tmp_path / "d2t", lambda state: state.pop("t2d"))
    with pytest.raises(UserError, match=r"neither d2t nor t2d.*set draft\.d2t=identity"):
        load(folder)
    assert torch.equal(load(folder, d2t=VocabMap.identity).vocab, torch.arange(64))


def test_a_map_that_names_a_token_twice_is_refused(tmp_path):
    """No draft has one, but a map in another meaning may look like it."""
    folder = changed(published("safeailab", tmp_path / "draft"), lambda state: state["d2t"].copy_(-torch.arange(64)))
    with pytest.raises(UserError, match="the head has 64 tokens, d2t or t2d names 1"):
        load(folder)


# Tapped layers


def test_speculators_list_inputs(golden_target, tmp_path):
    config = read(published("speculators", tmp_path / "draft"))
    assert config.tapped == (2, 4, 5)
    check_fit(config, golden_target.shape, tmp_path)


@pytest.mark.parametrize("nested", [False, True])
def test_layer_ids_may_name_inputs_or_outputs(golden_target, tmp_path, nested):
    listed = {"eagle_aux_hidden_state_layer_ids": OTHER_TAPS}
    folder = changed(published("safeailab", tmp_path / "draft"), **({"eagle_config": listed} if nested else listed))
    with pytest.raises(UserError, match=r"layers \[1, 3, 4\].*vLLM.*SGLang.*draft\.tap_ids=inputs or outputs"):
        read(folder)
    check_fit(read(folder, tap_ids=TapIds.outputs), golden_target.shape, folder)
    with pytest.raises(UserError, match=r"inputs of .*\[1, 3, 4\], .*target.taps=\[1, 3, 4\]"):
        check_fit(read(folder, tap_ids=TapIds.inputs), golden_target.shape, folder)


def test_as_many_layers_as_fc_takes(tmp_path):
    folder = changed(published("speculators", tmp_path / "draft"), eagle_aux_hidden_state_layer_ids=[2, 4])
    with pytest.raises(UserError, match="lists 2 tapped layers, fc takes 3"):
        read(folder)


def test_own_drafts_say_which_layers_they_read(golden_target, tmp_path):
    layer = DecoderConfig(128, 32, 64, 1, 4, 2, 8, 1e-5, 1e4, None, False, 512)
    model = eagle3.Eagle3(Eagle3Config(layer, 128, 32, 3, fc_norm=False, tapped=(1, 4, 6)))
    eagle3.save(model, tmp_path, torch.float32)
    with pytest.raises(UserError, match=r"set target.taps=\[1, 4, 6\]"):
        check_fit(read(tmp_path), golden_target.shape, tmp_path)


# Writing


@pytest.mark.parametrize("layout", list(Layout))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_written_is_read_as_it_was(layout, dtype, tmp_path):
    """All that a config can say, in both layouts; an unusual draft, bit for bit."""
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling |= {"original_max_position_embeddings": 64, "rope_type": "llama3"}
    layer = DecoderConfig(128, 16, 64, 1, 2, 1, 16, 1e-6, 5e5, scaling, False, 512)
    flags = {"norm_before_residual": True, "norm_output": True, "own_embedding": True}
    model = eagle3.Eagle3(Eagle3Config(layer, 50, 32, 2, fc_norm=True, tapped=(3, 4), **flags)).to(dtype)
    model.set_vocab(torch.arange(7, 57))
    eagle3.save(model, tmp_path, None, layout)
    raw = json.loads((tmp_path / "config.json").read_text())
    assert raw["torch_dtype"] == str(dtype).removeprefix("torch.")
    if layout is Layout.speculators:
        changed(tmp_path, eagle_aux_hidden_state_layer_ids=[3, 4])  # tracedraft export's affair
    again = eagle3.load(tmp_path, None, "cpu")
    assert again.config == model.config
    state, expected = again.state_dict(), model.state_dict()
    assert state.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(state[name], tensor)
        assert state[name].dtype == tensor.dtype
