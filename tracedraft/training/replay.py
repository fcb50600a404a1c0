"""What a chain of drafts would have had accepted on text that the target wrote: tau without serving anything.

A drafted token is accepted when it equals the target's own next one, so what stands in the text decides,
at any temperature. And since every token before an accepted one was accepted too, the chain may be rolled
out from all slots at once over the given tokens, as training-time test does.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tracedraft.models.eagle3 import Eagle3
from tracedraft.models.unroll import chain, every_slot


@dataclass
class Tally:
    """Counts of replayed answers; see ``Response`` for the same names."""

    depths: int
    rounds: int = 0
    accepted: int = 0
    tokens: int = 0
    sayable: int = 0
    trials: list[int] = field(init=False)
    survivals: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.trials, self.survivals = [0] * self.depths, [0] * self.depths

    @property
    def tau(self) -> float | None:
        return (self.accepted + self.rounds) / self.rounds if self.rounds else None

    @property
    def acceptance(self) -> list[float | None]:
        return [s / t if t else None for s, t in zip(self.survivals, self.trials, strict=True)]

    @property
    def coverage(self) -> float | None:
        """Share of answer tokens that the draft vocabulary holds."""
        return self.sayable / self.tokens if self.tokens else None

    def add(self, other: Tally) -> None:
        self.rounds += other.rounds
        self.accepted += other.accepted
        self.tokens += other.tokens
        self.sayable += other.sayable
        self.trials = [a + b for a, b in zip(self.trials, other.trials, strict=True)]
        self.survivals = [a + b for a, b in zip(self.survivals, other.survivals, strict=True)]


def hits(model: Eagle3, embedding: Tensor, tokens: Tensor, taps: Tensor, depths: int) -> Tensor:
    """[K, B, T] whether the chain from slot i says token i+2+k at step k; past the end of a row, no."""
    right = torch.zeros(depths, *tokens.shape, dtype=torch.bool)
    slots = every_slot(tokens, depths)
    for k, features in enumerate(chain(model, embedding, tokens, taps, slots)):
        said = model.vocab[model.lm_head(model.norm(features)).argmax(dim=-1)]
        n = features.shape[1] - 1
        right[k, :, :n] = (said[:, :n] == tokens[:, 2 + k :]).cpu()
    return right


def spans(flags: list[bool]) -> Iterator[tuple[int, int]]:
    """First and past-the-last index of each run of True."""
    start = None
    for i, flag in enumerate([*flags, False]):
        if flag and start is None:
            start = i
        elif not flag and start is not None:
            yield start, i
            start = None


def replay(right: Tensor, answer: list[bool]) -> Tally:
    """Serve each answer of one row in rounds: the first token comes from the prefill, as in decoding.

    Args:
        right: [K, T] of :func:`hits`.
    """
    run = right.int().cumprod(dim=0).sum(dim=0).tolist()
    tally = Tally(len(right))
    for start, stop in spans(answer):
        at = max(start, 1)  # a row may begin inside an answer
        while at + 1 < stop:
            room = stop - 1 - at
            accepted = min(run[at - 1], room)
            for depth in range(min(accepted + (accepted < room), tally.depths)):
                tally.trials[depth] += 1
                tally.survivals[depth] += depth < accepted
            tally.accepted += accepted
            tally.rounds += 1
            at += accepted + 1
    return tally
