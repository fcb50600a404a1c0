"""The loop with a learner in it: what an update touches, that it repeats itself, and what learners are shown."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from conftest import CPU, auto, chain, recompute, tiny, tree
from decode_cases import FIXED, PROMPT, adapter_spec, conversation, lm, respond_with
from torch import Tensor

from tracedraft import measure
from tracedraft.adapters.fixed import FixedAdapter
from tracedraft.drafts.eagle3 import LogitLensSpec
from tracedraft.interfaces import InnerAdapter
from tracedraft.meter import Meter
from tracedraft.target import LlamaTarget
from tracedraft.types import Conversation, Evidence, Update


def evidence_of(adapter: InnerAdapter) -> list[tuple[str, Tensor, Tensor]]:
    """Source, features and every row's teacher of what ``adapter`` is given from now on."""
    noted, observe = [], adapter.observe

    def noting(evidence: Evidence) -> None:
        rows = torch.arange(len(evidence.features))
        noted.append((evidence.source, evidence.features.clone(), evidence.teacher(rows).clone()))
        observe(evidence)

    adapter.observe = noting
    return noted


def updates_of(adapter: InnerAdapter, look: Callable[[], dict[str, Tensor]]) -> list[tuple[dict, dict]]:
    """What ``look`` sees before and after each update that ``adapter`` commits from now on."""
    noted, maybe_update = [], adapter.maybe_update

    def noting(round: int) -> Update | None:
        before = look()
        update = maybe_update(round)
        if update and update.committed:
            noted.append((before, look()))
        return update

    adapter.maybe_update = noting
    return noted


# Contract 3: what an update may touch


def everything(target: LlamaTarget, draft) -> dict[str, Tensor]:
    """Every weight and every cache row of both."""
    state = {f"target.{n}": t for n, t in target.model.state_dict().items()}
    state |= {f"draft.{n}": t for n, t in draft.model.state_dict().items()}
    for owner, cache in (("target", target.cache), ("draft", draft.cache)):
        state |= {f"{owner}.keys.{i}": t for i, t in enumerate(cache.keys)}
        state |= {f"{owner}.values.{i}": t for i, t in enumerate(cache.values)}
    return {name: tensor.clone() for name, tensor in state.items()}


def changed(before: dict[str, Tensor], after: dict[str, Tensor]) -> set[str]:
    assert before.keys() == after.keys()
    return {name for name in before if not torch.equal(before[name], after[name])}


def test_fixed_leaves_every_weight_bit_identical(golden_target, golden_draft):
    draft = golden_draft("eagle3_e2e")
    before = {name: tensor.clone() for name, tensor in draft.model.state_dict().items()}
    respond_with(golden_target, draft, FIXED.build(draft.head, 0))
    assert changed(before, draft.model.state_dict()) == set()


NORM, HEAD = "draft.norm.weight", "draft.lm_head.weight"


@pytest.mark.parametrize("kind", ["eagle3_e2e", "lm"])
@pytest.mark.parametrize(
    ("name", "train", "moved"),
    [
        ("reset", "both", {NORM, HEAD}),
        ("persistent", "both", {NORM, HEAD}),
        ("reset_published", "both", {NORM, HEAD}),
        ("reset", "head", {HEAD}),
        ("persistent", "head", {HEAD}),
        ("reset_lowrank", "head", set()),
    ],
)
def test_an_update_changes_what_it_trains_and_nothing_else(golden_target, golden_draft, kind, name, train, moved):
    """The low-rank form keeps what it learns beside every tensor."""
    draft = lm(golden_target) if kind == "lm" else golden_draft(kind)
    adapter = adapter_spec(name, train=train).build(draft.head, 0)
    around = updates_of(adapter, lambda: everything(golden_target, draft))
    respond_with(golden_target, draft, adapter)
    assert len(around) >= 2
    assert all(changed(before, after) == moved for before, after in around)
    assert (draft.head.low_rank is not None) == (not moved)


# Contract 5: repeatable


def without_seconds(record: dict) -> dict:
    for turn in record["turns"]:
        for arm in turn["arms"].values():
            arm.pop("seconds")
    return record


@pytest.mark.parametrize(
    ("name", "temperature"),
    [("fixed", 0.7), ("reset", 0.0), ("reset", 0.7), ("persistent", 0.7), ("reset_published", 0.0),
     ("reset_lowrank", 0.7)],
)  # fmt: skip
def test_same_seed_same_record_whatever_ran_before(name, temperature):
    served = tiny("bfloat16")
    spec = chain(max_new_tokens=16, temperature=temperature)
    bench = measure.Bench(served, spec, 3, Meter(CPU))
    specs = {"draft": LogitLensSpec("lens", 200, 0), "adapter": adapter_spec(name, selection="reservoir")}
    a, b = conversation("bees"), conversation("seas")

    def fresh() -> list[measure.Arm]:
        return measure.build_arms(specs, served, 3)[0]

    def run(arms: list[measure.Arm], which: Conversation) -> dict:
        return without_seconds(measure.converse(bench, arms, which, 0, lambda arm, answer: None))

    arms = fresh()
    first = run(arms, a)
    assert len(first["turns"]) == 2
    assert all(turn["lossless"]["mismatches"] == 0 for turn in first["turns"])
    assert bool(first["turns"][0]["arms"]["adapted"]["updates"]) == (name != "fixed")
    other = run(arms, b)
    assert other["turns"][0]["arms"]["fixed"]["tokens"] != first["turns"][0]["arms"]["fixed"]["tokens"]
    again = run(arms, a)
    if name != "persistent":  # what persistent has learnt stays, by design
        assert again == first
    assert run(fresh(), a) == first


# Contract 6: supervision is aligned


@pytest.mark.parametrize("kind", ["eagle3_e2e", "lm"])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("shape", [chain, tree, auto])
def test_evidence_is_the_targets_answer_to_the_token_each_slot_consumed(
    golden_target, golden_draft, shape, temperature, kind
):
    """Slot i holds (H_i, x_{i+1}); its teacher is z_{i+1}, and its features are what the draft makes of true
    features. Against full recomputation: float32 noise is 1e-5, a shift by one is off by several units."""
    adapter, draft = FIXED.build(None, 0), lm(golden_target) if kind == "lm" else golden_draft(kind)
    evidence = evidence_of(adapter)
    changes = {"temperature": temperature, "max_new_tokens": 50}
    made = respond_with(golden_target, draft, adapter, key=1, shape=shape, **changes)
    text = PROMPT + made.tokens
    evidence = [piece for piece in evidence if piece[0] != "chain"]
    taps, _, logits = recompute(golden_target, text)
    draft.begin(128, text[0])
    slots = draft.extend(taps[:-1], torch.tensor(text[1:]))

    assert [source for source, _, _ in evidence] == ["prompt"] + ["response"] * made.rounds
    assert len(evidence[0][1]) == len(PROMPT) - 1
    assert [len(features) - 1 for _, features, _ in evidence[1:-1]] == made.accepted_per_round[:-1]
    features = torch.cat([f for _, f, _ in evidence])
    teacher = torch.cat([t for _, _, t in evidence])
    size = len(features)
    assert size == len(text) - 2  # all but the last token, which the target was never fed
    torch.testing.assert_close(features, slots[:size], rtol=0, atol=1e-3)
    torch.testing.assert_close(teacher, logits[1 : size + 1], rtol=0, atol=1e-3)
    for wrong in (logits[:size], logits[2 : size + 2]):
        gap = (teacher[: len(wrong)] - wrong).abs().amax(dim=1)
        # neighbours in a loop of the text may be alike; nearly all are not
        assert (gap > 1).float().mean() > 0.9


# What learners are shown


def test_chain_evidence_is_what_the_chain_was_and_what_the_target_says_there(golden_target, golden_draft):
    """Row k: the output that the k-th drafted token was chosen from, with the target's logits at that prefix,
    recomputed; up to the first rejected token, whose teacher prefers another."""
    draft, seen = golden_draft("eagle3_e2e"), []

    class Spy(FixedAdapter):
        def observe(self, evidence):
            if evidence.source == "chain":
                rows = torch.arange(len(evidence.features))
                seen.append((evidence.features.clone(), evidence.teacher(rows)))

    made = respond_with(golden_target, draft, Spy(), max_new_tokens=30)
    assert len(seen) == made.rounds
    at, deep = 1, 0
    for accepted, (features, teachers) in zip(made.accepted_per_round[:-1], seen[:-1], strict=True):
        assert len(features) == min(accepted + 1, 5)
        said = draft.head.vocab[draft.head.logits(features).argmax(dim=1)].tolist()
        assert said[:accepted] == made.tokens[at : at + accepted]
        _, _, logits = recompute(golden_target, PROMPT + made.tokens[: at + accepted + 1])
        expected = logits[len(PROMPT) + at - 1 :][: len(features)]
        torch.testing.assert_close(teachers, expected, rtol=0, atol=1e-3)
        if accepted < 5:
            assert said[accepted] != made.tokens[at + accepted] == int(teachers[accepted].argmax())
        deep += len(features) > 1
        at += accepted + 1
    assert deep > 2
