"""The EAGLE-3 draft: golden outputs, the whole loop against the published one, its cache, its checkpoints."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from conftest import GOLDEN, chain, golden_folder, golden_json, golden_tensors, recompute, tiny
from safetensors.torch import load_file, save_file
from training_cases import SPEC

from tracedraft.adapters.fixed import FixedSpec
from tracedraft.decode import respond
from tracedraft.drafts.eagle3 import Eagle3Draft, Eagle3Spec, LogitLensSpec, check_fit
from tracedraft.errors import UserError
from tracedraft.models import eagle3
from tracedraft.training.eagle3 import new_draft

CLOSE = {"rtol": 0, "atol": 1e-4}  # the reference's own tolerance, at logits of size ~10


# Golden outputs


def test_golden_slots_and_chain(golden_draft):
    draft, expected = golden_draft("eagle3_tiny"), golden_tensors("eagle3_tiny")
    draft.begin(64)
    features = draft.extend(expected["features"], expected["input_tokens"][1:])
    torch.testing.assert_close(features, expected["step0_hidden"], **CLOSE)
    torch.testing.assert_close(draft.head.logits(features), expected["step0_logits"], **CLOSE)
    for length in range(1, 6):
        assert torch.equal(draft.propose(length).tokens, expected["chain_tokens_target"][:length])


def test_golden_chain_hidden_states(golden_draft, monkeypatch):
    """Tokens alone could agree by luck: the fed-back states themselves."""
    draft, expected = golden_draft("eagle3_tiny"), golden_tensors("eagle3_tiny")
    draft.begin(64)
    states = [draft.extend(expected["features"], expected["input_tokens"][1:])[-1:]]
    plain = draft._slots

    def spy(*args):
        states.append(plain(*args))
        return states[-1]

    monkeypatch.setattr(draft, "_slots", spy)
    draft.propose(5)
    hidden = torch.cat(states)
    torch.testing.assert_close(hidden, expected["chain_hidden"], **CLOSE)
    torch.testing.assert_close(draft.head.logits(hidden), expected["chain_logits"], **CLOSE)


def test_golden_rope_base_is_the_drafts_own(golden_decoder, tmp_path):
    """10000 where the config says nothing, although the target's is 50000; and what the config says."""
    expected = golden_tensors("eagle3_tiny")
    folder = golden_folder("eagle3_tiny", tmp_path / "draft")
    for theta, name in ((None, "step0_logits"), (1e6, "step0_logits_rope_theta_1e6")):
        if theta:
            config = json.loads((folder / "config.json").read_text()) | {"rope_theta": theta}
            (folder / "config.json").write_text(json.dumps(config))
        draft = Eagle3Draft(eagle3.load(folder, torch.float32, "cpu"), golden_decoder.embed_tokens.weight)
        draft.begin(64)
        features = draft.extend(expected["features"], expected["input_tokens"][1:])
        torch.testing.assert_close(draft.head.logits(features), expected[name], **CLOSE)


@pytest.mark.parametrize("case", golden_json("eagle3_e2e")["prompts"], ids=["seen", "seen_too", "unseen"])
def test_golden_loop(golden_target, golden_draft, meter, case):
    """EAGLE's own loop with one beam and five drafted tokens, round by round; ties are far from the noise."""
    run = next(run for run in case["runs"] if run["name"] == "chain")
    # the golden loop leaves out the last bonus token, ours the one that follows it
    size = 1 + sum(accepted + 1 for accepted in run["accepted_per_round"])
    fixed = FixedSpec("fixed").build(None, 0)
    made = respond(
        golden_target, golden_draft("eagle3_e2e"), fixed, case["prompt"], chain(max_new_tokens=size), 0, meter
    )
    assert made.tokens == [*run["tokens"], run["next_root"]]
    assert made.tokens == case["hf_greedy"][:size]
    assert made.accepted_per_round == run["accepted_per_round"]
    assert (made.accepted + made.rounds) / made.rounds == pytest.approx(run["tau_with_bonus"], abs=1e-6)


# The cache holds true slots only


@pytest.fixture(params=["golden", "lens"])
def fed(request, golden_draft, golden_target):
    """A draft, and the taps [n, 96] and next tokens [n] of a text to feed it."""
    text = golden_json("eagle3_e2e")["prompts"][0]
    tokens = text["prompt"] + text["hf_greedy"][:30]
    taps, _, _ = recompute(golden_target, tokens)
    if request.param == "golden":
        return golden_draft("eagle3_e2e"), taps[:-1], torch.tensor(tokens[1:])
    return LogitLensSpec("lens", 100, 0).build(golden_target)[0], taps[:-1], torch.tensor(tokens[1:])


def test_proposing_leaves_no_trace(fed):
    """Bit for bit: the same products on the same rows."""
    draft, taps, tokens = fed
    pieces = [(0, 9), (9, 10), (10, 14), (14, 20), (20, 36)]

    def run(propose: bool) -> list:
        draft.begin(64)
        kept = []
        for start, stop in pieces:
            kept.append(draft.extend(taps[start:stop], tokens[start:stop]))
            if propose:
                first = draft.propose(5).tokens
                draft.propose(9)
                assert torch.equal(draft.propose(5).tokens, first)
        kept.append(draft.propose(5).tokens)
        return kept

    assert all(torch.equal(a, b) for a, b in zip(run(True), run(False), strict=True))


def test_extending_in_pieces_equals_extending_at_once(fed):
    """Up to the float32 noise of products of other shapes, some 1e-6 at states of size ~10."""
    draft, taps, tokens = fed
    draft.begin(64)
    whole = draft.extend(taps, tokens)
    proposal = draft.propose(5).tokens
    draft.begin(64)
    pieces = [draft.extend(taps[i : i + 3], tokens[i : i + 3]) for i in range(0, len(tokens), 3)]
    torch.testing.assert_close(torch.cat(pieces), whole, **CLOSE)
    assert torch.equal(draft.propose(5).tokens, proposal)


def test_a_longer_proposal_starts_with_the_shorter_one(fed):
    draft, taps, tokens = fed
    draft.begin(64)
    draft.extend(taps, tokens)
    long = draft.propose(12).tokens
    assert torch.equal(draft.propose(4).tokens, long[:4])
    assert bool(torch.isin(long, draft.head.vocab).all())


# Checkpoints


def test_published_naming_survives_loading_and_saving(tmp_path):
    """Tensor by tensor, bit for bit, the golden file in SafeAILab's layout."""
    folder = golden_folder("eagle3_tiny", tmp_path / "a")
    eagle3.save(eagle3.load(folder, torch.float32, "cpu"), tmp_path / "b", torch.float32)
    before, after = load_file(GOLDEN / "eagle3_tiny.safetensors"), load_file(tmp_path / "b/model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert eagle3.read_config(tmp_path / "b") == eagle3.read_config(folder)


@pytest.mark.parametrize("taps", [(2, 4, 5), (3,), (1, 2, 4, 6)])
def test_own_draft_survives_saving(tmp_path, taps):
    """Norms of the taps included, and any number of taps."""
    target = tiny("float32").target
    target = type(target)(target.model, taps, target.eos_ids, target.context)
    model = new_draft(target, torch.arange(3, 140), dataclasses.replace(SPEC, draft_vocab_size=137))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(generator=generator)
    eagle3.save(model, tmp_path / "draft", torch.float32)
    names = load_file(tmp_path / "draft/model.safetensors").keys()
    assert {f"fc_norm.{i}.weight" for i in range(len(taps))} <= names
    assert {"midlayer.self_attn.q_proj.weight", "midlayer.mlp.up_proj.weight", "d2t", "t2d", "norm.weight"} <= names
    again = eagle3.load(tmp_path / "draft", torch.float32, "cpu")
    assert again.config == model.config
    state, expected = again.state_dict(), model.state_dict()
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], expected[name]) for name in expected)
    served, _ = Eagle3Spec("eagle3", str(tmp_path / "draft"), None, str(tmp_path)).build(target)
    assert torch.equal(served.head.vocab, torch.arange(3, 140))


def test_whole_vocabulary_needs_no_map(tmp_path):
    """Checkpoints whose draft vocabulary is the target's leave d2t and t2d out."""
    folder = golden_folder("eagle3_tiny", tmp_path / "draft")
    state = load_file(folder / "model.safetensors")
    del state["d2t"], state["t2d"]
    state["lm_head.weight"] = torch.randn(128, 32)
    save_file(state, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text()) | {"draft_vocab_size": 128}
    (folder / "config.json").write_text(json.dumps(config))
    model = eagle3.load(folder, torch.float32, "cpu")
    assert torch.equal(model.vocab, torch.arange(128))
    assert bool(model.t2d.all())


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        (None, {"target_hidden_size": 48}, "its hidden size is 48, the target's 32"),
        ("layer", {"hidden_size": 64}, "its embedding size is 64, the target's 32"),
        ("layer", {"vocab_size": 127}, "its vocabulary is 127, the target's 128"),
        (None, {"taps": 4}, "its number of tapped layers is 4, the target's 3"),
    ],
)
def test_a_draft_made_for_another_target_is_refused(golden_target, tmp_path, part, change, message):
    config = eagle3.read_config(golden_folder("eagle3_tiny", tmp_path / "draft"))
    check_fit(config, golden_target.shape, tmp_path)
    if part:
        change = {part: dataclasses.replace(getattr(config, part), **change)}
    with pytest.raises(UserError, match=message):
        check_fit(dataclasses.replace(config, **change), golden_target.shape, tmp_path)


def test_a_draft_of_another_target_is_refused_when_built(tmp_path):
    folder = golden_folder("eagle3_tiny", tmp_path / "draft")
    with pytest.raises(UserError, match="its vocabulary is 128, the target's 258"):
        Eagle3Spec("eagle3", str(folder), None, str(tmp_path)).build(tiny("float32").target)
    with pytest.raises(UserError, match=r"no such folder .*tracedraft.train makes one"):
        Eagle3Spec("eagle3", str(tmp_path / "none"), None, str(tmp_path)).build(tiny("float32").target)


@pytest.mark.parametrize("offset", [200, -200])
def test_map_outside_the_target_vocabulary_is_refused(tmp_path, offset):
    folder = golden_folder("eagle3_tiny", tmp_path / "draft")
    state = load_file(folder / "model.safetensors")
    state["d2t"][40] += offset
    save_file(state, folder / "model.safetensors")
    with pytest.raises(UserError, match="d2t maps outside the target vocabulary of 128"):
        eagle3.load(folder, torch.float32, "cpu")


@pytest.mark.parametrize("key", ["hidden_size", "draft_vocab_size", "rms_norm_eps"])
def test_incomplete_config_names_the_key(tmp_path, key):
    folder = golden_folder("eagle3_tiny", tmp_path / "draft")
    config = json.loads((folder / "config.json").read_text())
    del config[key]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=f"lacks the key '{key}'"):
        eagle3.load(folder, torch.float32, "cpu")


def test_missing_tensor_of_a_draft_is_named(tmp_path):
    folder = golden_folder("eagle3_tiny", tmp_path / "draft")
    state = load_file(folder / "model.safetensors")
    del state["midlayer.hidden_norm.weight"]
    save_file(state, folder / "model.safetensors")
    with pytest.raises(UserError, match=r"tensor 'midlayer\.hidden_norm\.weight' is missing"):
        eagle3.load(folder, torch.float32, "cpu")


# The untrained draft


@pytest.mark.usefixtures("unpacked")
def test_lens_without_its_layer_is_the_targets_own_head(golden_target):
    """What pass-through means: with fc the identity on the last tap and the layer silent, the target's
    norm and head read that tap, up to float32 noise."""
    draft, _ = LogitLensSpec("lens", 100, 0).build(golden_target)
    model, target = draft.model, golden_target.model
    model.fc.weight.zero_()
    model.fc.weight[:, -32:] = torch.eye(32)
    model.midlayer.self_attn.o_proj.weight.zero_()
    model.midlayer.mlp.down_proj.weight.zero_()
    tokens = golden_json("target_tiny")["prompt"]
    taps, _, _ = recompute(golden_target, tokens)
    draft.begin(64)
    got = draft.head.logits(draft.extend(taps[:-1], torch.tensor(tokens[1:])))
    expected = target.lm_head(target.norm(taps[:-1, -32:]))[:, :100]
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)
