"""A draft's extensions, chains and trees as CUDA graphs; see ``models.graphs``.

A chain of five runs five layers of a dozen kernels, each of which a fast card is done with before the host has
launched the next: of all that a round does, drafting waits for the host most.

This has never run on a GPU, as ``models.graphs`` says of itself.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tracedraft.models.decoder import KVCache, Rope
from tracedraft.models.graphs import Captured, Kept
from tracedraft.types import OutputHead, Proposal, Tree

BUCKET = 8  # tokens by whose multiples extensions are padded
WIDEST = 16  # longer extensions are of prompts: each would be captured to be run once

# What is made of buffers, of which the last says where to start: int64 [1].
Operators = Callable[..., tuple[Tensor, ...]]
LowRank = tuple[Tensor, Tensor]  # of an OutputHead
Roll = Callable[[LowRank | None, Tensor, int | Tensor], Proposal]  # of a head's factors, last [1, H] and start


class StaticWork:
    """Work on buffers that each call fills; ``captured`` as a CUDA graph, else operator by operator."""

    def __init__(self, buffers: tuple[Tensor, ...], operators: Operators, captured: bool):
        self.buffers, self.operators = buffers, operators
        self._graph = Captured(buffers[-1].device) if captured else None

    def made(self) -> tuple[Tensor, ...]:
        """Of whatever the buffers hold."""
        return self._graph(self._operators) if self._graph else self._operators()

    def _operators(self) -> tuple[Tensor, ...]:
        return self.operators(*self.buffers)

    def __call__(self, *contents: Tensor, start: int) -> tuple[Tensor, ...]:
        """Of contents that fill the first rows of their buffers."""
        *given, at = self.buffers
        for buffer, content in zip(given, contents, strict=True):
            buffer.zero_()
            buffer[: len(content)] = content
        at.fill_(start)
        return tuple(part.clone() for part in self.made())  # which the next call writes over


class StaticRolls:
    """What a draft does over caches that are kept, piece by piece.

    Args:
        cache: makes a cache of so many rows, and its rotations.
    """

    def __init__(self, cache: Callable[[int], tuple[KVCache, Rope]], captured: bool = True):
        self._kept: Kept[StaticWork] = Kept(cache)
        self._captured = captured
        self._factors: dict[int, LowRank] = {}  # shared by all work over so many of them

    def prepare(self, capacity: int, begin: Callable[[], object]) -> None:
        """``begin``: the draft's own, since what it does goes over the cache that it holds."""
        self._kept.prepare(capacity, begin)

    def forget(self) -> None:
        self._kept.forget()

    def begin(self, capacity: int) -> tuple[KVCache, Rope]:
        return self._kept.begin(capacity)

    def extend(
        self, extend: Callable[[Tensor, Tensor, Tensor], Tensor], taps: Tensor, tokens: Tensor, start: int
    ) -> Tensor:
        """``extend``, [n, H] of taps [n, taps*H], tokens [n] and start [1]; cache rows up to the next bucket are
        written in vain."""
        width = -(-len(tokens) // BUCKET) * BUCKET

        def buffers() -> tuple[Tensor, ...]:
            return taps.new_zeros(width, taps.shape[1]), tokens.new_zeros(width)

        work = self._of(("extend", width, taps.dtype), buffers, lambda *given: (extend(*given),))
        return work(taps, tokens, start=start)[0][: len(tokens)]

    def roll(
        self,
        shape: tuple[int, ...],
        roll: Roll,
        low_rank: LowRank | None,
        last: Tensor,
        start: int,
    ) -> Proposal:
        """``roll``, a proposal of one shape, of a head's factors, last [1, H] and start [1]."""
        rows = 0 if low_rank is None else 1 << (len(low_rank[0]) - 1).bit_length()
        factors = None if low_rank is None else self._filled(low_rank, rows)

        def operators(last: Tensor, start: Tensor) -> tuple[Tensor, ...]:
            made = roll(factors, last, start)
            assert made.features is not None
            linked = (made.tree.parents, made.tree.ancestors, made.tree.depths) if made.tree else ()
            return made.tokens, made.features, *linked

        work = self._of(("roll", rows, *shape), lambda: (torch.zeros_like(last),), operators)
        tokens, features, *linked = work(last, start=start)
        return Proposal(tokens, features=features, tree=Tree(*linked) if linked else None)

    def _filled(self, factors: LowRank, rows: int) -> LowRank:
        """Buffers of ``rows`` factors that hold these, which come and go elsewhere; the others are zero."""
        if rows not in self._factors:
            left, right = (factor.new_zeros(rows, factor.shape[1]) for factor in factors)
            self._factors[rows] = left, right
        for buffer, factor in zip(self._factors[rows], factors, strict=True):
            buffer[: len(factor)] = factor
            buffer[len(factor) :] = 0
        return self._factors[rows]

    def _of(self, key: tuple, buffers: Callable[[], tuple[Tensor, ...]], operators: Operators) -> StaticWork:
        def make(cache: KVCache, rope: Rope) -> StaticWork:
            at = torch.zeros(1, dtype=torch.long, device=cache.rows.device)
            return StaticWork((*buffers(), at), operators, self._captured)

        return self._kept.of(key, make)


def rolled(
    static: StaticRolls | None, head: OutputHead, shape: tuple[int, ...], roll: Roll, last: Tensor, start: int
) -> Proposal:
    """``roll`` of last [1, H] and start, over constant buffers where they are."""
    if static is None:
        return roll(head.low_rank, last, start)
    return static.roll(shape, roll, head.low_rank, last, start)
