"""A draft's work over constant buffers: what it usually does, and nothing in it that only Python knows.

``make_fx`` stands in for a CUDA graph, as in ``test_graphs``. Attention here runs over the whole cache, and usually
over the rows that are filled, so its sums have another order: up to 2e-5 was seen, of features of size 1 to 5.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from conftest import CPU, chain, tree
from decode_cases import FIXED, PROMPT, adapter_spec, lm
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from tracedraft.decode import respond
from tracedraft.drafts.eagle3 import Eagle3Draft
from tracedraft.drafts.lm import LmDraft
from tracedraft.drafts.static import StaticRolls, StaticWork
from tracedraft.meter import Meter
from tracedraft.types import Proposal

CHAIN, TREE = (5,), (8, 3, 3)


Drafts = tuple[Eagle3Draft | LmDraft, Eagle3Draft | LmDraft]


@pytest.fixture(params=["eagle3", "lm"])
def make_pair(request, golden_target, golden_draft) -> Callable[[], Drafts]:
    """The same weights twice: as usual, and over buffers."""

    def pair() -> Drafts:
        made = [golden_draft("eagle3_e2e") if request.param == "eagle3" else lm(golden_target)] * 2
        usual, static = (copy.deepcopy(draft) for draft in made)
        static.static = StaticRolls(static.allocate, captured=False)
        return usual, static

    return pair


def given(draft: Eagle3Draft | LmDraft, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Taps, which a draft LM does not look at, and tokens."""
    model, own = draft.model, isinstance(draft, LmDraft)
    width, count = (3, len(model.embed_tokens.weight)) if own else (model.fc.in_features, len(draft.embedding))
    return torch.randn(size, width, generator=generator), torch.randint(count, (size,), generator=generator)


def proposed(draft: Eagle3Draft | LmDraft, shape: tuple[int, ...]) -> Proposal:
    return draft.propose(*shape) if shape == CHAIN else draft.propose_tree(*shape)


def parts(made: Proposal) -> list[Tensor]:
    tree = (made.tree.parents, made.tree.ancestors, made.tree.depths) if made.tree else ()
    return [made.tokens, *tree]


@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
def test_slots_and_proposals_are_the_usual_ones(make_pair, shape):
    """After extensions of every size, short of a bucket, beyond it and too long for one; over caches used before."""
    generator = torch.Generator().manual_seed(0)
    both = make_pair()
    for capacity in (192, 256, 192):
        for draft in both:
            draft.begin(capacity, 7)
        for size in (70, 1, 6, 8, 11):
            taps, tokens = given(both[0], size, generator)
            usual, static = (draft.extend(taps, tokens) for draft in both)
            torch.testing.assert_close(static, usual, rtol=0, atol=1e-4)
            made = [proposed(draft, shape) for draft in both]
            assert all(torch.equal(*each) for each in zip(*map(parts, made), strict=True))
            torch.testing.assert_close(made[1].features, made[0].features, rtol=0, atol=1e-4)


@pytest.mark.parametrize("shape", [chain, tree])
@pytest.mark.parametrize("adapter", ["fixed", "reset", "reset_lowrank"])
def test_responses_are_the_same_while_the_head_learns(golden_target, make_pair, shape, adapter):
    """In place, which a captured product sees; or by factors, which are copied to where it looks."""
    answers = []
    for draft in make_pair():
        learner = (FIXED if adapter == "fixed" else adapter_spec(adapter)).build(draft.head, 0)
        made = [
            respond(golden_target, draft, learner, PROMPT, shape(max_new_tokens=40), 0, Meter(CPU)) for _ in range(2)
        ]
        answers.append([(each.tokens, each.accepted_per_round, len(each.updates)) for each in made])
    assert answers[0] == answers[1]
    assert (answers[0][0][2] > 0) == (adapter != "fixed")


def test_after_other_weights_are_served_so_is_what_they_say(golden_target, make_pair):
    """Learnt between requests: work over the buffers of the old ones is let go, and known for the next cache."""
    both, answers = make_pair(), []
    for draft in both:
        said = []
        for scale in (1.0, 0.5):
            student = draft.student()
            with torch.no_grad():
                for weight in student.weights.values():
                    weight.mul_(scale)
            student.serve()
            for limit in (40, 200):  # two capacities
                made = respond(
                    golden_target, draft, FIXED.build(None, 0), PROMPT, chain(max_new_tokens=limit), 0, Meter(CPU)
                )
                said.append((made.tokens, made.accepted_per_round))
        answers.append(said)
    assert answers[0] == answers[1]
    assert answers[0][1] != answers[0][3]


@pytest.mark.parametrize("what", ["extend", "chain", "tree", "factors", "an int is caught"])
def test_recorded_once_and_replayed_over_other_contents_it_is_still_right(make_pair, monkeypatch, what):
    """A roll whose start Python holds is right only where it was recorded."""
    usual, static = make_pair()
    generator = torch.Generator().manual_seed(1)
    shape = TREE if what == "tree" else CHAIN
    recorded, right, seen = None, [], {}
    call = StaticWork.__call__

    def spy(work, *contents, start):
        seen["work"] = work
        return call(work, *contents, start=start)

    monkeypatch.setattr(StaticWork, "__call__", spy)
    for length in (20, 33, 9):
        size = 3
        if what == "factors":  # others each time, of 65 to 128 rows, by as many of which they are served
            wide, rows = usual.head.weight.shape, 2 * length + 50
            factors = tuple(torch.randn(rows, n, generator=generator) / 30 for n in wide)
            usual.head.low_rank = static.head.low_rank = factors
        for draft in (usual, static):
            draft.begin(128, 7)
        taps, tokens = given(usual, length, generator)
        for draft in (usual, static):
            draft.extend(taps, tokens)
        if what == "extend":
            expected = [usual.extend(taps[:size], tokens[:size])]
            static.extend(taps[:size], tokens[:size])
        else:
            made = proposed(usual, shape)
            expected = [made.tokens, made.features, *parts(made)[1:]]
            proposed(static, shape)
        work, rows = seen["work"], static.cache.rows.clone()

        def operators(rows: Tensor, *buffers: Tensor, work=work) -> tuple[Tensor, ...]:
            static.cache = copy.copy(static.cache)
            static.cache._hold(rows)
            where = buffers[:-1] + ((20,) if what == "an int is caught" else buffers[-1:])
            return work.operators(*where)

        with torch.no_grad():
            inputs = rows, *work.buffers
            recorded = recorded or make_fx(operators)(*inputs)
            got = [part[:size] if what == "extend" else part for part in recorded(*inputs)]
        close = [torch.allclose(a.float(), b.float(), rtol=0, atol=1e-4) for a, b in zip(got, expected, strict=True)]
        right.append(all(close))
    assert right == [True, *2 * [what != "an int is caught"]]


def test_what_is_made_beforehand_goes_over_the_cache_that_will_be_served(golden_target, make_pair, monkeypatch):
    """A capture holds the memory that it went over: over the cache before, it would draft from another response."""
    static, over = make_pair()[1], []

    def answer(limit: int) -> None:
        respond(golden_target, static, FIXED.build(None, 0), PROMPT, chain(max_new_tokens=limit), 0, Meter(CPU))

    answer(40)
    first, made = static.cache, StaticWork.made

    def spy(work: StaticWork) -> tuple[Tensor, ...]:
        over.append(static.cache)
        return made(work)

    monkeypatch.setattr(StaticWork, "made", spy)
    static.prepare(1024)
    prepared = list(over)
    static.begin(1024, 0)
    assert len(prepared) >= 2
    assert all(cache is static.cache is not first for cache in prepared)


def test_a_cpu_keeps_to_the_usual_way(make_pair):
    assert make_pair()[0].static is None
