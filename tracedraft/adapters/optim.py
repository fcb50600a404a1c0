"""fp32 masters of the draft's trained tensors, and the steps that move them.

A pass over the head costs a millisecond or two, so there are few: a step is measured before it is made (its
length from the gradient's factors, and whether it can overflow from that length), then made in place and
published in one sweep. Only where a step may have to be taken back after it was made does it go to a spare.
``r``: rows (D for the head, 1 for the gain, which is held as a [1, H] matrix so that one code serves both).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tracedraft.adapters.objective import Factors

BLOCK = 1024  # rows of a sweep: a few MB, so that what follows a product finds it in a CPU's cache
LAUNCHED = 8192  # the same where each operator is a launch, and all rows at once would be a copy of the head


@dataclass(frozen=True)
class Rule:
    """How a gradient becomes a step: plain SGD, or Adam (Kingma & Ba 2015, bias-corrected, no decay)."""

    adam: bool
    lr: float
    beta1: float
    beta2: float
    eps: float


class Double:
    """A tensor and where its next value is written: a spare, or itself."""

    def __init__(self, live: Tensor, in_place: bool = False) -> None:
        self.live = live
        self._spare = live if in_place else torch.empty_like(live)
        self._written = False

    @property
    def latest(self) -> Tensor:
        """The candidate where there is one."""
        return self._spare if self._written else self.live

    def advance(self) -> tuple[Tensor, Tensor]:
        """(what to read, what to write): the same tensor once a candidate exists, or in place."""
        old, self._written = self.latest, True
        return old, self._spare

    def settle(self, keep: bool) -> bool:
        """End a transaction; returns whether a candidate was dropped."""
        written, self._written = self._written, False
        if keep and written:
            self.live, self._spare = self._spare, self.live
        return written and not keep


class Master:
    """One trained tensor: its published copy, the fp32 master, Adam's moments and the initial value."""

    def __init__(self, published: Tensor, rule: Rule, in_place: bool) -> None:
        """
        Args:
            published: [r, H] or [H], the tensor that the draft reads; written in place.
            rule: the optimiser.
            in_place: no step is ever taken back once it is written.
        """
        self.published = published.detach().view(-1, published.shape[-1])
        # In the head's own dtype: exact, and half the memory of an fp32 copy.
        self.initial = self.published.clone()
        self.weights = Double(self.published.to(torch.float32, copy=True), in_place)
        self.moments = [Double(torch.zeros_like(self.weights.live)) for _ in range(2 if rule.adam else 0)]
        self._step = torch.empty_like(self.weights.live) if rule.adam else None
        self._rule = rule
        self.moved = False
        self.initial_norm = _norm(self.weights.live)
        self.reach = self.initial_norm  # a bound on ‖W‖, and so on each entry: ‖W₀‖ and the length of all steps
        self.path = 0.0

    def prepare(self, gradient: Factors, scale: float, count: int) -> None:
        """Measure one step; see ``Form.prepare``."""
        self._gradient, self._size, norm = gradient, self._rule.lr * scale, gradient.norm
        if self._rule.adam:
            self._size, norm = self._adam(gradient, scale, count)
        self.path += self._size * norm

    def _adam(self, gradient: Factors, scale: float, count: int) -> tuple[float, float]:
        """Adam's direction into the scratch; returns its factor and its norm."""
        rule, g = self._rule, self._step
        assert g is not None
        (mean, new_mean), (square, new_square) = (double.advance() for double in self.moments)
        torch.addmm(g, gradient.left.t().float(), gradient.right, beta=0, alpha=scale, out=g)
        torch.lerp(mean, g, 1 - rule.beta1, out=new_mean)
        torch.mul(square, rule.beta2, out=new_square).addcmul_(g, g, value=1 - rule.beta2)
        # eps is scaled rather than the second moment: the same formula with one pass over memory less.
        correction = math.sqrt(1 - rule.beta2**count)
        torch.sqrt(new_square, out=g).add_(rule.eps * correction)
        torch.div(new_mean, g, out=g)
        return rule.lr * correction / (1 - rule.beta1**count), _norm(g)

    def drift(self) -> float:
        return self.path / self.initial_norm if self.initial_norm else math.inf

    def finite(self) -> bool:
        return self.reach + self.path <= torch.finfo(self.published.dtype).max

    def write(self, keep: float) -> None:
        """Pull, step and publish; see ``Form.write``."""
        old, new = self.weights.advance()
        if new is not old:
            new.copy_(old)
        if keep < 1:
            self._pull(new, keep)
        left, right, rows = self._gradient.left, self._gradient.right, self._gradient.rows
        right = right.to(left.dtype)
        if rows is not None:
            moved = new.index_select(0, rows).sub_((left.t() @ right).float(), alpha=self._size)
            new.index_copy_(0, rows, moved)
            self.published.index_copy_(0, rows, moved.to(self.published.dtype))
            return
        for some in _blocks(new):
            direction = (left[:, some].t() @ right).float() if self._step is None else self._step[some]
            self.published[some].copy_(new[some].sub_(direction, alpha=self._size))

    def pull(self, keep: float) -> None:
        """W ← W₀ + keep·(W - W₀), in place and for good."""
        self._pull(self.weights.live, keep)

    def _pull(self, weights: Tensor, keep: float) -> None:
        """As ``pull``, and published."""
        for some in _blocks(weights):
            # lerp is exact where W = W₀, so weights that never moved stay bit-identical.
            self.published[some].copy_(weights[some].lerp_(self.initial[some].float(), 1 - keep))

    def settle(self, keep: bool) -> None:
        """End a transaction: the candidate becomes live, or it is dropped."""
        for moment in self.moments:
            moment.settle(keep)
        if self.weights.settle(keep):
            self.published.copy_(self.weights.live)
        if keep:
            self.reach += self.path
            self.moved = True
        self.path = 0.0

    def restore(self) -> None:
        """Back to the initial weights and moments; free where nothing was ever committed."""
        if not self.moved:
            return
        self.weights.live.copy_(self.initial)
        self.published.copy_(self.initial)
        for moment in self.moments:
            moment.live.zero_()
        self.reach = self.initial_norm
        self.moved = False

    def state(self) -> dict[str, Any]:
        moments = [m.live for m in self.moments]
        return {"weights": self.weights.live, "moments": moments, "moved": self.moved, "reach": self.reach}

    def load_state(self, state: dict[str, Any]) -> None:
        self.weights.live.copy_(state["weights"])
        for moment, kept in zip(self.moments, state["moments"], strict=True):
            moment.live.copy_(kept)
        self.moved, self.reach = state["moved"], state["reach"]
        self.published.copy_(self.weights.live)

    def distance(self) -> float:
        """‖W - W₀‖ / ‖W₀‖ of the masters."""
        return _norm(self.weights.live - self.initial) / self.initial_norm if self.initial_norm else math.inf


def _blocks(x: Tensor) -> list[slice]:
    rows = BLOCK if x.device.type == "cpu" else LAUNCHED
    return [slice(start, start + rows) for start in range(0, len(x), rows)]


def _norm(x: Tensor) -> float:
    return torch.linalg.vector_norm(x).item()
