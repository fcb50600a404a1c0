"""The draft LM: aligned, its own cache right in every shape of proposal, its head its own, and learning."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from conftest import CPU, chain, golden_folder, option, recompute, tiny
from decode_cases import FIXED, PROMPT, adapter_spec, lm, respond_with
from run_cases import composed, conversations
from safetensors.torch import load_file, save_file
from test_rejection import pvalue
from test_verify import PROMPT as SHORT_PROMPT
from test_verify import VOCAB, conversation, law_of_three, small_target

from tracedraft.config import ASSETS
from tracedraft.decode import respond
from tracedraft.drafts.lm import FirstLayersSpec, LmDraft, LmSpec
from tracedraft.errors import UserError
from tracedraft.measure import measure
from tracedraft.meter import Meter
from tracedraft.models import weights
from tracedraft.models.architectures import read_decoder_config
from tracedraft.models.losses import forward_kl
from tracedraft.types import Lesson, Predictions
from tracedraft.verify import noise_key


def said(draft: LmDraft, tokens: list[int]) -> torch.Tensor:
    """Logits [T, V] after each token, of the whole row at once."""
    with torch.no_grad():
        return draft.head.logits(draft.model.whole(torch.tensor(tokens)[None])[0])


def test_the_target_itself_as_a_draft_is_always_right(golden_target):
    """Alignment, positions and cache: a slot shifted by one would hardly ever be."""
    draft = lm(golden_target, golden_target.model.config.layers)
    for limit in (40, 61):
        made = respond_with(golden_target, draft, FIXED.build(None, 0), max_new_tokens=limit)
        assert set(made.accepted_per_round[:-1]) == {5}


def test_a_chain_is_its_own_greedy_text_and_leaves_no_trace(golden_target):
    """Against passes over whole rows, without any cache; again after a proposal that was rejected."""
    draft = lm(golden_target)
    draft.begin(64, PROMPT[0])
    text = PROMPT[:9]
    draft.extend(torch.empty(8, 0), torch.tensor(text[1:]))
    for following in ([3], [5, 1, 4], [2]):
        rows = draft.rows(len(text) - 1).clone()
        proposal = draft.propose(4)
        draft.propose_tree(9, 3, 2)
        assert torch.equal(draft.propose(4).tokens, proposal.tokens)
        assert torch.equal(draft.rows(len(text) - 1), rows)
        expected = list(text)
        for _ in range(4):
            expected.append(int(said(draft, expected)[-1].argmax()))
        assert proposal.tokens.tolist() == expected[len(text) :]
        text = text + following
        slots = draft.extend(torch.empty(len(following), 0), torch.tensor(following))
        torch.testing.assert_close(draft.head.logits(slots), said(draft, text)[-len(following) :], rtol=0, atol=1e-4)


def test_a_tree_says_at_each_node_what_a_chain_would(golden_target):
    """Features of every node with children, against a pass over its path. fp32 noise is 1e-5."""
    draft = lm(golden_target)
    draft.begin(64, PROMPT[0])
    draft.extend(torch.empty(len(PROMPT) - 1, 0), torch.tensor(PROMPT[1:]))
    proposal = draft.propose_tree(16, 4, 3)
    made = proposal.tree
    parents, tokens = made.parents.tolist(), [None, *proposal.tokens.tolist()]
    assert int(made.depths.max()) == 4
    for node in set(parents):
        path, at = [], node
        while at:
            path, at = [tokens[at], *path], parents[at]
        expected = draft.model.whole(torch.tensor([PROMPT + path]))[0, -1]
        torch.testing.assert_close(proposal.features[node], expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("tied", [True, False])
def test_the_head_is_untied_so_that_updates_leave_the_embeddings(golden_target, golden_decoder, tmp_path, tied):
    folder = golden_folder("target_tiny", tmp_path / "lm")
    if tied:
        config = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": True}
        (folder / "config.json").write_text(json.dumps(config))
        state = load_file(folder / "model.safetensors")
        del state["lm_head.weight"]
        save_file(state, folder / "model.safetensors")
    spec = LmSpec("lm", str(folder), None, str(tmp_path), None)
    draft, origin = spec.build(golden_target)
    assert origin == spec.provenance()
    embedding = draft.model.embed_tokens.weight.clone()
    assert torch.equal(draft.head.weight, embedding) == tied
    before = draft.head.weight.clone()
    adapter = adapter_spec("persistent").build(draft.head, 0)
    adapter.begin_conversation()
    made = respond_with(golden_target, draft, adapter, max_new_tokens=40)
    assert (
        made.tokens == respond_with(golden_target, lm(golden_target), FIXED.build(None, 0), max_new_tokens=40).tokens
    )
    assert any(update.committed for update in made.updates)
    assert not torch.equal(draft.head.weight, before)
    assert torch.equal(draft.model.embed_tokens.weight, embedding)
    other, _ = spec.build(golden_target)
    assert torch.equal(other.head.weight, before), "another arm's draft is its own"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"path": None}, "draft.path is not set, and the target names no lm draft.*draft=lm_tiny"),
        ({"path": "nowhere-at-all"}, "draft.path='nowhere-at-all': no such folder"),
        ({"dtype": "int8"}, "draft.dtype='int8': expected one of"),
    ],
)
def test_what_can_not_be_had_is_named(golden_target, tmp_path, change, says):
    spec = LmSpec("lm", str(golden_folder("target_tiny", tmp_path / "lm")), None, str(tmp_path), None)
    spec.check(golden_target.shape)
    with pytest.raises(UserError, match=says):
        dataclasses.replace(spec, **change).check(golden_target.shape)


def test_another_vocabulary_is_refused(golden_target, tmp_path):
    spec = LmSpec("lm", str(golden_folder("target_tiny", tmp_path / "lm")), None, str(tmp_path), None)
    with pytest.raises(UserError, match=r"has a vocabulary of 128 tokens, the target one of 129: .*tokenizer"):
        spec.check(dataclasses.replace(golden_target.shape, vocab_size=129))
    with pytest.raises(UserError, match=r"draft\.layers=9: expected 1 to 8"):
        FirstLayersSpec("lm_tiny", 9).check(golden_target.shape)


def test_the_one_that_ships_is_small_and_of_the_targets_vocabulary(tmp_path):
    path = option("target", "smollm2-135m").drafts.lm
    spec = LmSpec("lm", path, None, str(tmp_path), None)
    spec.check(dataclasses.replace(tiny("float32").target.shape, vocab_size=49_152))
    folder = ASSETS / path
    assert sum(file.stat().st_size for file in folder.iterdir()) < 15 * 2**20
    assert read_decoder_config(folder).tied
    weights.load_decoder(folder, read_decoder_config(folder), torch.bfloat16, "cpu")


def test_a_draft_lm_that_samples_keeps_the_targets_law_while_it_learns():
    """First three tokens of 800 responses against full enumeration, by rejection sampling."""
    target = small_target()
    spec = chain(chain_length=2, max_new_tokens=4, temperature=0.9, prefill_chunk=8, cache_bucket=8,
                 acceptance="rejection")  # fmt: skip
    draft = lm(target, 3)
    learner = adapter_spec("persistent", every=1, lr=0.3, drift_cap=None, replay_mib=0).build(draft.head, 0)
    learner.begin_conversation()
    counts, before, accepted = torch.zeros(VOCAB, VOCAB, VOCAB), draft.head.weight.clone(), 0
    for i in range(800):
        key = noise_key(5, conversation(str(i)), 0)
        made = respond(target, draft, learner, SHORT_PROMPT, spec, key, Meter(CPU))
        counts[tuple(made.tokens[:3])] += 1
        accepted += made.accepted
    assert not torch.equal(draft.head.weight, before)
    assert accepted > 100
    assert pvalue(counts.flatten(), law_of_three(target, spec.sampling(0)).flatten()) > 1e-4


# Learning between requests


@pytest.mark.parametrize("changes", [{}, {"adapter.outer.tokens": "mixed"}])
def test_a_run_is_lossless_while_both_loops_teach_it(tmp_path, changes):
    often = {
        "adapter.inner.every": 2,
        "adapter.inner.min_positions": 1,
        "adapter.outer.update_interval": 1,
        "adapter.outer.guard": "none",
    }
    cfg = composed("draft=lm_tiny", "adapter=osd_persistent", *(f"{k}={v}" for k, v in (often | changes).items()))
    summary = measure(cfg, tmp_path / "run", None)
    assert summary["lossless"] is True
    assert summary["outer"]["committed"] == 2
    assert summary["updates"]["committed"] > 0
    assert len({record["outer"]["weights_sha256"] for record in conversations(tmp_path / "run")}) == 2


def test_the_loss_is_that_of_the_draft_as_it_serves():
    """Prediction by prediction, at any step; the prefix of each is the text itself."""
    target, tokens = tiny("float32").target, list(b"Why is the sky so blue?")
    taps, hidden, logits = recompute(target, tokens[:-1])
    slots, steps = torch.tensor([2, 2, 9, 12]), torch.tensor([0, 3, 1, 2])
    weights = torch.tensor([1.0, 0.5, 0.25, 0.125])
    lesson = Lesson(torch.tensor(tokens), taps, hidden, 4, torch.stack((slots, steps), dim=1), "toy")
    teacher = logits[slots + steps + 1].softmax(dim=1)
    asked = Predictions(slots, steps, weights, teacher, torch.arange(4))
    draft = lm(target, 4)
    expected = 0.0
    for i in range(4):
        q = said(draft, tokens[: int(slots[i] + steps[i]) + 2])[-1].log_softmax(dim=0)
        expected += float(weights[i] * (teacher[i] * (teacher[i].log() - q)).sum())
    assert float(draft.student().loss(lesson, asked, forward_kl).detach()) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_step_on_one_rejected_position_raises_the_correction_at_that_prefix(dtype):
    """The prediction at step 1 from slot 6 comes after token 8. Teachers of the position before or after do worse."""
    served = tiny(dtype)
    tokens = list(b"Why is the sky so blue?")
    slot, step = 6, 1
    prefix, gains = tokens[: slot + step + 2], {}
    for shift in (0, 1, -1):
        draft = lm(served.target, 4)
        student = draft.student()
        taps, hidden, logits = recompute(served.target, tokens[:-1])
        lesson = Lesson(torch.tensor(tokens), taps, hidden, 4, torch.tensor([[slot, step]]), "toy")
        teacher = logits.float().softmax(dim=1)
        correction = int(teacher[slot + step + 1].argmax())
        before = said(draft, prefix)[-1].float().log_softmax(dim=0)[correction]
        row = teacher[slot + step + 1 + shift][None].to(hidden.dtype)
        asked = Predictions(torch.tensor([slot]), torch.tensor([step]), torch.ones(1), row, torch.tensor([0]))
        student.loss(lesson, asked, forward_kl).backward()
        with torch.no_grad():
            for weight in student.weights.values():
                weight -= 1e-2 * weight.grad
        student.serve()
        gains[shift] = float(said(draft, prefix)[-1].float().log_softmax(dim=0)[correction] - before)
    assert gains[0] > 0.01
    assert max(gains[1], gains[-1]) < gains[0] / 2


def test_what_is_served_changes_with_the_masters_alone(golden_target):
    draft = lm(golden_target)
    student = draft.student()
    same = student.serve()
    state = {name: tensor.clone() for name, tensor in draft.model.state_dict().items()}
    draft.head.weight.mul_(1.5)  # what an inner adapter may do
    assert student.serve() == same
    assert all(torch.equal(draft.model.state_dict()[name], tensor) for name, tensor in state.items())
    with torch.no_grad():
        student.weights["layers.0.mlp.down_proj.weight"].mul_(1.01)
    assert student.serve() != same
    assert len(student.vocab) == golden_target.vocab_size
