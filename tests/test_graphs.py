"""Passes over constant buffers: the same bits as usual ones, and nothing in them that only Python knows.

CUDA graphs can't be captured here. ``make_fx`` stands in: it records the operators of one call, with every number
that Python held written into them, and runs them again over other contents, as a graph's replay would.
"""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from conftest import CPU, chain, tiny, tree
from decode_cases import FIXED, lens
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from tracedraft.decode import respond, respond_plainly
from tracedraft.meter import Meter
from tracedraft.models import graphs
from tracedraft.models.graphs import StaticPass, StaticPasses
from tracedraft.models.tree import linked
from tracedraft.target import LlamaTarget
from tracedraft.types import TargetPass, Tree

PROMPT = list(b"Name three rivers that flow north.")


def pair(dtype: str) -> tuple[LlamaTarget, LlamaTarget]:
    """The same weights twice: passes as usual, and over buffers."""
    usual = tiny(dtype).target
    static = LlamaTarget(usual.model, usual.taps, usual.eos_ids, usual.context)
    static.static = StaticPasses(static.model, static.taps, captured=False)
    return usual, static


def random_tree(rows: int, generator: torch.Generator) -> Tree:
    parents = [0] + [int(torch.randint(i, (1,), generator=generator)) for i in range(1, rows)]
    return linked(torch.tensor(parents), rows)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("branching", [False, True])
def test_the_bits_are_those_of_the_usual_pass(dtype, branching):
    """Over passes of every size, of which some rows are kept, and their caches."""
    generator = torch.Generator().manual_seed(0)
    usual, static = pair(dtype)
    for capacity in (64, 96, 64):
        for target in (usual, static):
            target.begin(capacity, 8, 16)
            target.prefill(PROMPT)
        for size in (8, 1, 5, 8, 3):
            tokens = torch.randint(usual.vocab_size, (size,), generator=generator)
            shape = random_tree(size, generator) if branching else None
            seen = [target.verify(tokens, shape) for target in (usual, static)]
            for name in ("taps", "hidden", "logits"):
                assert torch.equal(*(getattr(passed, name) for passed in seen)), (name, capacity, size)
            rows = torch.tensor([0, size - 1])[: min(size, 2)] if branching else None
            for target in (usual, static):
                target.commit(min(size, 2), rows)
        kept = usual.length
        assert torch.equal(usual.cache.rows[..., :kept, :], static.cache.rows[..., :kept, :])


@pytest.mark.parametrize("shape", [chain, tree])
def test_whole_responses_are_the_same_again_and_again(shape):
    """The second starts on the cache that the first has filled."""
    usual, static = pair("bfloat16")
    spec = shape(max_new_tokens=60)
    answers = []
    for target in (usual, static, static):
        made = respond(target, lens(target), FIXED.build(None, 0), PROMPT, spec, 0, Meter(CPU))
        plainly = respond_plainly(target, PROMPT, spec, 0, Meter(CPU))
        answers.append((made.tokens, made.accepted_per_round, plainly.tokens))
    assert answers[0] == answers[1] == answers[2]


def test_what_a_pass_yielded_outlives_the_next():
    """A learner asks for teachers many rounds later."""
    _, static = pair("float32")
    static.begin(64, 8, 16)
    static.prefill(PROMPT)
    first = static.verify(torch.arange(8))
    before = [part.clone() for part in (first.taps, first.hidden, first.logits)]
    static.commit(3)
    static.verify(torch.arange(8) + 100)
    assert all(torch.equal(a, b) for a, b in zip(before, (first.taps, first.hidden, first.logits), strict=True))


@pytest.mark.parametrize(
    ("branching", "held"), [(False, False), (True, False), (False, True)], ids=["chain", "tree", "an int is caught"]
)
def test_recorded_once_and_replayed_over_other_contents_it_is_still_right(branching, held):
    """And a pass whose start Python holds is not."""
    usual, static = pair("float32")
    generator = torch.Generator().manual_seed(1)

    def begin(length: int) -> StaticPass:
        for target in (usual, static):
            target.begin(64, 8, 16)
            target.prefill((PROMPT * 2)[:length])
        return static.static.of(8, branching)

    made = begin(20)

    def operators(tokens: Tensor, start: Tensor, rows: Tensor, *shape: Tensor) -> tuple[Tensor, ...]:
        cache = copy.copy(made.cache)
        cache._hold(rows)
        where = 20 if held else start
        hidden, taps = made.model(tokens, where, cache, made.rope, made.taps, shape or None)
        return taps[0], hidden[0], made.model.lm_head(hidden[0])

    recorded, right = None, []
    for length, size in ((20, 8), (33, 8), (9, 5), (50, 1)):
        begin(length)
        tokens = torch.randint(usual.vocab_size, (size,), generator=generator)
        shape = random_tree(size, generator) if branching else None
        expected = usual.verify(tokens, shape)
        rows = static.cache.rows.clone()
        static.verify(tokens, shape)  # fills the buffers
        inputs = (made.tokens, made.start, rows, *(made.tree or ()))
        with torch.no_grad():
            if recorded is None:
                recorded = make_fx(operators)(*inputs)
                rows.copy_(usual.cache.rows)  # as recording has run it
            got = TargetPass(*(part[:size] for part in recorded(*inputs)))
        parts = [(getattr(got, name), getattr(expected, name)) for name in ("taps", "hidden", "logits")]
        parts.append(tuple(kept[..., length : length + 8, :] for kept in (rows, usual.cache.rows)))
        right.append(all(torch.equal(a, b) for a, b in parts))
    assert right == [True, *3 * [not held]]


def test_as_many_capacities_are_kept_as_is_said(monkeypatch):
    monkeypatch.setattr(graphs, "KEPT", 2)
    _, static = pair("float32")

    def begun(capacity: int) -> tuple[int, int]:
        static.begin(capacity, 8, 16)
        return static.cache.rows.data_ptr(), id(static.static.of(8, False))

    first = [begun(64), begun(96)]
    assert [begun(64), begun(96)] == first, "a graph is bound to this memory"
    assert begun(64) == first[0]
    begun(128)  # 96 makes room
    assert begun(64) == first[0]
    assert len(static.static._kept._kept) == 2


def test_where_memory_is_short_other_capacities_make_room(monkeypatch):
    """What they held is free at once, not when cycles are next collected."""
    _, static = pair("float32")
    held = []
    for capacity in (64, 96):
        static.begin(capacity, 8, 16)
        static.static.of(8, False)
        held.append(weakref.ref(static.cache))
    make = static.model.cache

    def cache(batch, capacity):
        if static.static._kept._kept:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return make(batch, capacity)

    monkeypatch.setattr(static.model, "cache", cache)
    gc.disable()
    try:
        static.begin(128, 8, 16)
        assert [each() for each in held] == [None, None]
    finally:
        gc.enable()
    assert static.cache.capacity == 128
    assert list(static.static._kept._kept) == [128]


def test_what_one_capacity_was_used_for_is_made_for_the_next_before_it_is_timed(monkeypatch):
    _, static = pair("float32")
    done = []
    made = StaticPass.made
    monkeypatch.setattr(StaticPass, "made", lambda work: done.append(work.cache.capacity) or made(work))
    static.begin(64, 8, 16)
    static.prefill(PROMPT)
    static.verify(torch.tensor([1, 2]))
    static.verify(torch.tensor([1, 2]), linked(torch.tensor([0, 0]), 2))
    assert done == [64, 64]
    for _ in range(2):
        static.prepare(96)
    assert done == [64, 64, 96, 96]
    static.prepare(64)
    static.begin(96, 8, 16)
    assert done == [64, 64, 96, 96]
    assert not static.cache.rows.any(), "of what was done in vain nothing is left"


def test_on_a_gpu_passes_are_captured_once_and_replayed(monkeypatch):
    """The order of calls, against a stand-in for torch.cuda."""
    told = []

    class Stream:
        def wait_stream(self, other):
            told.append("wait")

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

    class Graph(Stream):
        def __enter__(self):
            told.append("capture")

        def replay(self):
            told.append("replay")

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph: graph)
    out = (torch.zeros(1),)
    monkeypatch.setattr(torch.cuda, "device", lambda device: told.append(str(device)) or Stream())
    work = graphs.Captured(torch.device("cuda:1"))
    assert [work(lambda: told.append("work") or out) is out for _ in range(3)] == [True] * 3
    warm = ["wait", *["work"] * graphs.WARM_UPS, "wait"]
    assert told == ["cuda:1", *warm, "capture", "work", "replay", "cuda:1", "replay", "cuda:1", "replay"]


def test_a_cpu_keeps_to_the_usual_pass():
    assert tiny("float32").target.static is None
