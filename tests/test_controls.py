"""Negative controls: what they pass on, and that they do no better than a fixed draft where learning does."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from adapter_cases import BASE, D, H, V, evidence, make_head
from torch import Tensor

from tracedraft.adapters.choices import Inputs, Scope
from tracedraft.adapters.controls import Control, ControlSpec
from tracedraft.adapters.fixed import FixedSpec
from tracedraft.adapters.trace import TraceSpec
from tracedraft.errors import UserError
from tracedraft.interfaces import InnerAdapter
from tracedraft.types import Evidence, OutputHead, Source

LEARNER = dataclasses.replace(BASE, scope=Scope.stream, every=4, window=32, lr=0.1)
WORLDS, POSITIONS = 40, 192


SOURCES = {"response": Inputs.slots, "chain": Inputs.chain}


def learner(source: str) -> TraceSpec:
    return dataclasses.replace(LEARNER, inputs=SOURCES[source])


def control(kind: str, after: int = 0, pool: int = 64, source: str = "response") -> ControlSpec:
    return ControlSpec(f"control_{kind}", Control(kind), after, pool, learner(source))


class Spy(InnerAdapter):
    """Notes what it is shown."""

    def __init__(self):
        self.seen: list[tuple[str, Tensor, Tensor]] = []
        self.updates = 0

    def observe(self, evidence: Evidence) -> None:
        rows = torch.arange(len(evidence.features))
        self.seen.append((evidence.source, evidence.features, evidence.teacher(rows)))

    def begin_conversation(self) -> None: ...

    def begin_response(self) -> None: ...

    def maybe_update(self, round: int) -> None:
        self.updates += 1

    def end_response(self) -> None: ...

    def state(self):
        return {"seen": len(self.seen)}

    def load_state(self, state) -> None: ...

    def drift(self):
        return {}

    def anchor_lambda(self):
        return {}


def shown(kind: str, pieces: list[Evidence], **settings) -> list[tuple[str, Tensor, Tensor]]:
    spec, spy = control(kind, **settings), Spy()
    adapter = spec.build(make_head(), 0)
    adapter.inner = spy
    adapter.begin_conversation()
    adapter.begin_response()
    for piece in pieces:
        adapter.observe(piece)
    return spy.seen


@pytest.mark.parametrize("source", SOURCES)
def test_a_wrong_shift_teaches_each_position_what_follows_the_next(source):
    """Also across rounds, one-token ones included, and for each source apart."""
    head = make_head()
    whole, prompt = evidence(10, head, source, seed=1), evidence(6, head, "prompt", seed=2)
    pieces = [prompt, *(_piece(whole, a, b) for a, b in ((0, 3), (3, 4), (4, 5), (5, 10)))]
    seen = shown("wrong_shift", pieces)
    logits = whole.teacher(torch.arange(10))
    features = torch.cat([f for kind, f, _ in seen if kind == source])
    teachers = torch.cat([t for kind, _, t in seen if kind == source])
    assert torch.equal(features, whole.features[:9])
    assert torch.equal(teachers, logits[1:])
    assert seen[0][0] == "prompt"
    assert torch.equal(seen[0][1], prompt.features[:5])
    assert torch.equal(seen[0][2], prompt.teacher(torch.arange(1, 6)))


@pytest.mark.parametrize("source", SOURCES)
def test_a_shuffled_teacher_is_another_of_those_seen_up_to_now(source):
    head = make_head()
    whole, prompt = evidence(40, head, source, seed=1), evidence(20, head, "prompt", seed=2)
    pieces = [prompt, *(_piece(whole, a, a + 2) for a in range(0, 40, 2))]
    seen = shown("shuffled_teacher", pieces, pool=8)
    assert torch.equal(seen[0][1], prompt.features)
    assert sorted(map(tuple, seen[0][2].tolist())) == sorted(map(tuple, prompt.teacher(torch.arange(20)).tolist()))
    assert not (seen[0][2] == prompt.teacher(torch.arange(20))).all(dim=1).any()
    logits = whole.teacher(torch.arange(40))
    for at, (_, features, teachers) in zip(range(0, 40, 2), seen[1:], strict=True):
        assert torch.equal(features, whole.features[at : at + 2])
        for row, teacher in enumerate(teachers):
            (found,) = (logits == teacher).all(dim=1).nonzero().flatten().tolist()
            assert max(0, at - 8) <= found < at + 2
            assert found != at + row


@pytest.mark.parametrize("source", ["prompt", *SOURCES])
def test_a_lone_position_has_no_teacher_but_its_own_and_is_left_out(source):
    head = make_head()
    whole = evidence(3, head, source, seed=1)
    seen = shown("shuffled_teacher", [_piece(whole, 0, 1)], pool=8)
    assert sum(len(features) for _, features, _ in seen) == 0


def test_a_frozen_learner_learns_from_the_first_conversations_only():
    spec, spy = control("frozen", after=2), Spy()
    adapter = spec.build(make_head(), 0)
    adapter.inner = spy
    for conversation in range(1, 5):
        adapter.begin_conversation()
        adapter.begin_response()
        adapter.observe(evidence(3, make_head()))
        adapter.maybe_update(1)
        adapter.end_response()
        assert len(spy.seen) == spy.updates == min(conversation, 2)
    again = spec.build(make_head(), 0)
    again.load_state(adapter.state() | {"inner": None})
    assert not again.learning


def _piece(whole: Evidence, start: int, stop: int) -> Evidence:
    return Evidence(whole.source, whole.features[start:stop], lambda rows: whole.teacher(rows + start))


def accepted(adapter: InnerAdapter, head: OutputHead, initial: OutputHead, world: int, source: Source) -> int:
    """Positions of a conversation, each predicted before it is taught, at which the draft's choice is the target's.

    Twelve contexts come back in random order; the target says what the initial draft says, disturbed, so that
    the draft is right at about half of them and something is there to lose.
    """
    g = torch.Generator().manual_seed(world)
    contexts = 3 * torch.randn(12, H, generator=g)
    logits = torch.full((12, V), -20.0)
    logits[:, head.vocab] = 6 * (initial.logits(contexts) + 0.9 * torch.randn(12, D, generator=g))
    order, right = torch.randint(12, (POSITIONS,), generator=g), 0
    adapter.begin_conversation()
    adapter.begin_response()
    # Pieces of one position, as most chains are, up to three.
    sizes = torch.randint(1, 4, (POSITIONS,), generator=g)
    sizes = sizes[sizes.cumsum(0) < POSITIONS].tolist()
    for round, at in enumerate(order.split([*sizes, POSITIONS - sum(sizes)]), 1):
        features, taught = contexts[at], logits[at]
        said = head.vocab[head.logits(features).argmax(dim=1)]
        right += int((said == taught.argmax(dim=1)).sum())
        adapter.observe(Evidence(source, features, taught.__getitem__))
        adapter.maybe_update(round)
    adapter.end_response()
    return right


def wins(spec, source: Source) -> int:
    """Worlds in which the adapter, after one conversation elsewhere, has more accepted than a fixed draft."""
    more = 0
    for world in range(WORLDS):
        counts = []
        for each in (FixedSpec("fixed"), spec):
            head, initial = make_head(seed=world), make_head(seed=world)
            adapter = each.build(head, 0)
            accepted(adapter, head, initial, 1000 + world, source)
            counts.append(accepted(adapter, head, initial, world, source))
        more += counts[1] > counts[0]
    return more


@pytest.mark.parametrize("source", SOURCES)
def test_the_learner_itself_wins(source):
    """A sign test: 31 of 40 by chance has p = 0.0003."""
    assert wins(learner(source), source) >= 31


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("kind", ["wrong_shift", "shuffled_teacher", "frozen"])
def test_a_control_does_no_better_than_fixed(kind, source):
    """Were control and fixed equally good, 31 or more wins of 40 would come with p = 0.0003: a false alarm."""
    assert wins(control(kind, after=1, source=source), source) < 31


@pytest.mark.parametrize("change", [{"after": -1}, {"pool": 1}])
def test_bad_settings_are_named(change):
    (key,) = change
    with pytest.raises(UserError, match=f"adapter.{key}="):
        control("frozen", **change)
