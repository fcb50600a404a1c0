"""Work of constant shape as CUDA graphs, captured once and replayed: the target's verification passes here, a draft's
extensions, chains and trees in ``drafts.static``.

A pass launches a dozen kernels a layer. In eager mode the host takes longer to launch them than a fast card to run
them; a replay launches all at once. What is captured can't depend on a number that Python holds, so tokens, start and
tree lie in buffers that each call fills.

This has never run on a GPU: it was written where there was none. What tests show on a CPU is that a pass over
buffers gives the same bits as the usual one, that its recorded operators, replayed over other contents, do too, and
that whole responses stay the same over a device that is pretended, which refuses much of what can not be captured.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from tracedraft.models.decoder import Decoder, KVCache, Rope
from tracedraft.types import TargetPass, Tree

WARM_UPS = 3  # before a capture, in which libraries may still allocate and choose their kernels
KEPT = 8  # capacities that keep their cache and graphs; the one used longest ago makes room


class StaticPass:
    """A verification of up to ``width`` tokens over one cache.

    Args:
        branching: over a tree; else over a chain.
        captured: as a CUDA graph; else operator by operator.
    """

    def __init__(
        self,
        model: Decoder,
        cache: KVCache,
        rope: Rope,
        taps: tuple[int, ...],
        width: int,
        branching: bool,
        captured: bool,
    ):
        device = rope.cos.device
        self.model, self.cache, self.rope, self.taps = model, cache, rope, taps
        self.tokens = torch.zeros(1, width, dtype=torch.long, device=device)
        self.start = torch.zeros(1, dtype=torch.long, device=device)
        self.tree = None
        if branching:
            depths = torch.zeros(width, dtype=torch.long, device=device)
            self.tree = depths, torch.zeros(width, width, dtype=torch.bool, device=device)
        self._graph = Captured(device) if captured else None

    def operators(self) -> tuple[Tensor, Tensor, Tensor]:
        """taps [width, taps*H], hidden [width, H] and logits [width, V] of what the buffers hold."""
        hidden, taps = self.model(self.tokens, self.start, self.cache, self.rope, self.taps, self.tree)
        return taps[0], hidden[0], self.model.lm_head(hidden[0])

    def __call__(self, tokens: Tensor, start: int, tree: Tree | None) -> TargetPass:
        """Of T tokens after ``start`` committed ones."""
        size = len(tokens)
        self.tokens.zero_()
        self.tokens[0, :size] = tokens
        self.start.fill_(start)
        if self.tree is not None:
            assert tree is not None
            depths, sees = self.tree
            depths.zero_()
            depths[:size] = tree.depths
            sees.zero_()
            sees[:size, :size] = tree.ancestors
        # learners keep what a pass yields, and the next replay writes over it
        return TargetPass(*(part[:size].clone() for part in self.made()))

    def made(self) -> tuple[Tensor, ...]:
        """Of whatever the buffers hold."""
        return self._graph(self.operators) if self._graph else self.operators()


class Captured:
    """Work on constant buffers, captured when first asked for and replayed from then on.

    Args:
        device: where the buffers lie, which need not be the current one.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._made: tuple[torch.cuda.CUDAGraph, tuple[Tensor, ...]] | None = None

    def __call__(self, work: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """``work`` is the same each time: held here it would hold its buffers in a cycle after they were let go."""
        with torch.cuda.device(self._device):
            if self._made is None:
                self._made = _capture(work)
            graph, out = self._made
            graph.replay()
        return out


def _capture(work: Callable[[], tuple[Tensor, ...]]) -> tuple[torch.cuda.CUDAGraph, tuple[Tensor, ...]]:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UPS):  # it writes the same cache rows each time
            work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = work()
    return graph, out


class Makes(Protocol):
    def made(self) -> tuple[Tensor, ...]:
        """Do it over what the buffers hold."""
        ...


Work = TypeVar("Work", bound=Makes)


class Kept(Generic[Work]):
    """Caches that outlive a response, by capacity, each with the work over it: a graph is bound to its memory.

    Args:
        make: a cache of so many rows, and its rotations.
    """

    def __init__(self, make: Callable[[int], tuple[KVCache, Rope]]):
        self._make = make
        self._kept: OrderedDict[int, tuple[KVCache, Rope, dict[tuple, Work]]] = OrderedDict()
        self._known: dict[tuple, Callable[[KVCache, Rope], Work]] = {}

    def prepare(self, capacity: int, begin: Callable[[], object]) -> None:
        """Do over a new cache once what was done over any, so that no capture falls into what is timed.

        Args:
            begin: the owner's way to begin a cache of ``capacity`` rows, after which its work goes over that one.
        """
        if capacity not in self._kept:
            begin()
            with torch.inference_mode():
                for key, make in self._known.items():
                    self.of(key, make).made()

    def forget(self) -> None:
        """Let all caches go, for other weights; what work there is stays known."""
        self._kept.clear()

    def begin(self, capacity: int) -> tuple[KVCache, Rope]:
        """A zeroed cache of ``capacity`` rows, and its rotations."""
        if capacity not in self._kept:
            while len(self._kept) >= KEPT:
                self._kept.popitem(last=False)
            self._kept[capacity] = *self._fitted(capacity), {}
        self._kept.move_to_end(capacity)
        cache, rope, _ = self._kept[capacity]
        cache.rows.zero_()
        return cache, rope

    def _fitted(self, capacity: int) -> tuple[KVCache, Rope]:
        with suppress(torch.OutOfMemoryError):
            return self._make(capacity)
        # One was found to fit; several need not. Not in a handler, whose traceback would hold what was made so far.
        self._kept.clear()
        return self._make(capacity)

    def of(self, key: tuple, make: Callable[[KVCache, Rope], Work]) -> Work:
        """The work of that key over the cache that was begun last."""
        cache, rope, made = next(reversed(self._kept.values()))
        if key not in made:
            made[key] = make(cache, rope)
            self._known[key] = make
        return made[key]


class StaticPasses:
    """Verifications over caches that are kept."""

    def __init__(self, model: Decoder, taps: tuple[int, ...], captured: bool = True):
        self._model, self._taps, self._captured = model, taps, captured
        self._kept: Kept[StaticPass] = Kept(lambda capacity: (model.cache(1, capacity), model.rope(capacity)))

    def prepare(self, capacity: int) -> None:
        self._kept.prepare(capacity, lambda: self.begin(capacity))

    def begin(self, capacity: int) -> tuple[KVCache, Rope]:
        return self._kept.begin(capacity)

    def of(self, width: int, branching: bool) -> StaticPass:
        """The pass over the cache that was begun last."""
        return self._kept.of(
            (width, branching),
            lambda cache, rope: StaticPass(self._model, cache, rope, self._taps, width, branching, self._captured),
        )
