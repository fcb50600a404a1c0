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

    def prepare(self, capacity: int) -> None:
        self._kept.prepare(capacity)

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
        self, shape: tuple[int, ...], roll: Callable[[Tensor, Tensor], Proposal], last: Tensor, start: int
    ) -> Proposal:
        """``roll``, a proposal of one shape, of last [1, H] and start [1]."""

        def operators(last: Tensor, start: Tensor) -> tuple[Tensor, ...]:
            made = roll(last, start)
            assert made.features is not None
            linked = (made.tree.parents, made.tree.ancestors, made.tree.depths) if made.tree else ()
            return made.tokens, made.features, *linked

        work = self._of(("roll", *shape), lambda: (torch.zeros_like(last),), operators)
        tokens, features, *linked = work(last, start=start)
        return Proposal(tokens, features=features, tree=Tree(*linked) if linked else None)

    def _of(self, key: tuple, buffers: Callable[[], tuple[Tensor, ...]], operators: Operators) -> StaticWork:
        def make(cache: KVCache, rope: Rope) -> StaticWork:
            at = torch.zeros(1, dtype=torch.long, device=cache.rows.device)
            return StaticWork((*buffers(), at), operators, self._captured)

        return self._kept.of(key, make)


def rolled(
    static: StaticRolls | None,
    head: OutputHead,
    shape: tuple[int, ...],
    roll: Callable[[Tensor, int | Tensor], Proposal],
    last: Tensor,
    start: int,
    alone: bool,
) -> Proposal:
    """``roll`` of last [1, H] and start, over constant buffers where that can be.

    Args:
        alone: nothing outside is asked on the way. Factors of a head come and go, so they are not captured.
    """
    if static is None or not alone or head.low_rank is not None:
        return roll(last, start)
    return static.roll(shape, roll, last, start)
