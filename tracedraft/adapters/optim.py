"""fp32 masters of the draft's trained tensors, and the steps that move them.

A step reads the live buffer and writes the spare one; committing swaps the two. So a rollback costs nothing
and is exact, and no step allocates a matrix the size of the head. ``r``: rows (D for the head, 1 for the
gain, which is held as a [1, H] matrix so that one code serves both).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tracedraft.adapters.objective import Factors


@dataclass(frozen=True)
class Rule:
    """How a gradient becomes a step: plain SGD, or Adam (Kingma & Ba 2015, bias-corrected, no decay)."""

    adam: bool
    lr: float
    beta1: float
    beta2: float
    eps: float


class Double:
    """A tensor and the spare into which its next value is written."""

    def __init__(self, live: Tensor) -> None:
        self.live = live
        self._spare = torch.empty_like(live)
        self._written = False

    @property
    def latest(self) -> Tensor:
        """The candidate where there is one."""
        return self._spare if self._written else self.live

    def advance(self) -> tuple[Tensor, Tensor]:
        """(what to read, what to write): the same tensor once a candidate exists."""
        old, self._written = self.latest, True
        return old, self._spare

    def settle(self, keep: bool) -> None:
        if keep and self._written:
            self.live, self._spare = self._spare, self.live
        self._written = False


class Master:
    """One trained tensor: its published copy, the fp32 master, Adam's moments and the initial value."""

    def __init__(self, published: Tensor, rule: Rule) -> None:
        """
        Args:
            published: [r, H] or [H], the tensor that the draft reads; written in place.
            rule: the optimiser.
        """
        self.published = published.detach().view(-1, published.shape[-1])
        # In the head's own dtype: exact, and half the memory of an fp32 copy.
        self.initial = self.published.clone()
        self.weights = Double(self.published.to(torch.float32, copy=True))
        self.moments = [Double(torch.zeros_like(self.weights.live)) for _ in range(2 if rule.adam else 0)]
        self._scratch = torch.empty_like(self.weights.live) if rule.adam else None
        self._rule = rule
        self._moved = False
        self.initial_norm = self.norm = self._candidate_norm = _norm(self.weights.live)
        self.path = 0.0

    def pull(self, keep: float) -> None:
        """W ← W₀ + keep·(W - W₀), as the start of a candidate."""
        old, new = self.weights.advance()
        assert old is not new, "the pull towards the initial weights comes before the steps"
        # lerp from W₀ is exact where W = W₀, so weights that never moved stay bit-identical.
        new.copy_(self.initial).lerp_(old, keep)

    def step(self, gradient: Factors, norm: float, scale: float, count: int) -> None:
        """Write one step into the candidate.

        Args:
            gradient: of [r, H].
            norm: its Frobenius norm.
            scale: factor of the gradient (clipping).
            count: Adam's step number, from 1.
        """
        if self._rule.adam:
            self.path += self._adam(gradient, scale, count)
            return
        old, new = self.weights.advance()
        torch.addmm(old, gradient.left.t(), gradient.right, alpha=-self._rule.lr * scale, out=new)
        self.path += self._rule.lr * scale * norm

    def _adam(self, gradient: Factors, scale: float, count: int) -> float:
        """One Adam step; returns its length."""
        rule, g = self._rule, self._scratch
        assert g is not None
        (old, new), (mean, new_mean), (square, new_square) = (
            double.advance() for double in (self.weights, *self.moments)
        )
        torch.addmm(g, gradient.left.t(), gradient.right, beta=0, alpha=scale, out=g)
        torch.lerp(mean, g, 1 - rule.beta1, out=new_mean)
        torch.mul(square, rule.beta2, out=new_square).addcmul_(g, g, value=1 - rule.beta2)
        # eps is scaled rather than the second moment: the same formula with one pass over memory less.
        correction = math.sqrt(1 - rule.beta2**count)
        torch.sqrt(new_square, out=g).add_(rule.eps * correction)
        torch.div(new_mean, g, out=g)
        size = rule.lr * correction / (1 - rule.beta1**count)
        torch.add(old, g, alpha=-size, out=new)
        return size * _norm(g)

    def drift(self) -> float:
        """Length of the candidate's steps over ‖W‖ before them (an upper bound of ‖ΔW‖/‖W‖ if several)."""
        return self.path / self.norm if self.norm else math.inf

    def finite(self) -> bool:
        """Whether the candidate can be published: no entry exceeds the norm, nor the norm the dtype."""
        self._candidate_norm = _norm(self.weights.latest)
        return self._candidate_norm <= torch.finfo(self.published.dtype).max

    def publish(self) -> None:
        """Make the draft read the candidate, or the live weights where there is none."""
        self.published.copy_(self.weights.latest)

    def settle(self, keep: bool) -> None:
        """End a transaction: the candidate, if found finite, becomes live, or it is dropped."""
        for double in (self.weights, *self.moments):
            double.settle(keep)
        self.path = 0.0
        if keep:
            self.norm = self._candidate_norm
            self._moved = True

    def restore(self) -> None:
        """Back to the initial weights and moments; free where nothing was ever committed."""
        if not self._moved:
            return
        self.weights.live.copy_(self.initial)
        self.published.copy_(self.initial)
        for moment in self.moments:
            moment.live.zero_()
        self.norm = self.initial_norm
        self._moved = False

    def state(self) -> dict[str, Any]:
        return {"weights": self.weights.live, "moments": [m.live for m in self.moments], "moved": self._moved}

    def load_state(self, state: dict[str, Any]) -> None:
        self.weights.live.copy_(state["weights"])
        for moment, kept in zip(self.moments, state["moments"], strict=True):
            moment.live.copy_(kept)
        self._moved = state["moved"]
        self.norm = _norm(self.weights.live)
        self.publish()

    def distance(self) -> float:
        """‖W - W₀‖ / ‖W₀‖ of the masters."""
        return _norm(self.weights.live - self.initial) / self.initial_norm if self.initial_norm else math.inf


def _norm(x: Tensor) -> float:
    return torch.linalg.vector_norm(x).item()
