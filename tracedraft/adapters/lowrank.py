"""The head as its initial weights plus factors: what plain SGD on the head alone comes to.

A step adds Σ_i a_i R_iᵀ x_i to W, with a_i = -lr·scale·c_i·T (see ``objective``). The norm is frozen, so x_i is the
same at each update: overlapping windows add to the same position's row,

    W = W₀ + Σ_i left_iᵀ · right_i,  right_i = fade_i·x_i,  left_i = Σ over updates of a_i R_i / fade_i,

where fade_i is the pull towards the initial weights since the row began. No copy of W is needed, forgetting is
emptying the rows, and no small step is lost to bf16. In return each drafted token pays for the rows; when there is
no room for another update they are folded into dense weights.
"""

from __future__ import annotations

import copy
from typing import Any

import torch

from tracedraft.adapters.form import Form
from tracedraft.adapters.objective import Batch, Factors, factors, kl_gradient, residual_dtype
from tracedraft.adapters.optim import Master, Rule
from tracedraft.types import OutputHead

ROUNDED = 64  # rows are served in multiples of this many, the last ones empty: few shapes of products


class LowRank(Form):
    """The weight alone. Tensors of ``head`` are written only when rows are folded."""

    def __init__(
        self, head: OutputHead, lr: float, temperature: float, max_rows: int, positions: int, undo: bool
    ) -> None:
        """
        Args:
            temperature: T of the loss.
            max_rows: at most this many positions are kept as factors.
            positions: at most this many are in an update.
            undo: a transaction may be dropped after it has written.
        """
        assert positions <= max_rows
        self._head, self._lr, self._temperature = head, lr, temperature
        self._positions, self._undo = positions, undo
        size, hidden = head.weight.shape
        blank = torch.zeros(0, device=head.weight.device)
        capacity = max_rows + -max_rows % ROUNDED
        self._left, self._right = blank.new_zeros(capacity, size), blank.new_zeros(capacity, hidden)
        self._fade = blank.new_ones(capacity, 1)
        self._max_rows = max_rows
        dtype = head.weight.dtype
        # As the draft reads them; the same tensors where the head is fp32.
        self._served = tuple(x if x.dtype == dtype else x.to(dtype) for x in (self._left, self._right))
        norm = torch.linalg.vector_norm(head.weight, dtype=torch.float32).item()
        self.initial_norms = {"weight": norm}
        self._reach, self._path = norm, 0.0  # a bound on ‖W‖, as Master has it
        self._master: Master | None = None  # of what was folded
        self._count = 0
        self._at: dict[int, int] = {}  # row of each position of this response
        self._before: tuple[dict[str, Any], dict[int, int]] | None = None

    def begin_response(self) -> None:
        """Its positions are new ones; the rows of the last response stay as they are."""
        self._at = {}

    def gradients(self, batch: Batch) -> tuple[float, dict[str, Factors]]:
        dtype = self._head.weight.dtype
        loss, residual, normed, _ = kl_gradient(
            batch,
            self._head.norm,
            self._head.eps,
            self._temperature,
            lambda x: self._head.project(x.to(dtype)),
            residual_dtype(self._head),
        )
        self._batch, self._normed = batch, normed
        return loss, {"weight": factors(residual, normed * batch.scale(self._temperature), 0.0)}

    def prepare(self, gradients: dict[str, Factors], scale: float, count: int) -> None:
        self._residual, self._size = gradients["weight"].left, self._lr * scale
        self._path += self._size * gradients["weight"].norm

    def drift(self) -> dict[str, float]:
        norm = self.initial_norms["weight"]
        return {"weight": self._path / norm if norm else float("inf")}

    def finite(self) -> bool:
        return self._reach + self._path <= torch.finfo(self._head.weight.dtype).max

    def write(self, keep: float) -> None:
        if self._undo and self._before is None:
            self._before = copy.deepcopy(self.state()), dict(self._at)
        if keep < 1:
            self._right.mul_(keep)
            self._fade.mul_(keep)
            if self._master is not None:
                self._master.pull(keep)
        real = int((self._batch.weights > 0).sum())  # padding comes last
        rows = self._place(real)
        amount = self._batch.scale(self._temperature)[:real] * -self._size / self._fade[rows]
        self._left.index_add_(0, rows, self._residual[:real] * amount)
        self._publish(rows)

    def _place(self, real: int) -> torch.Tensor:
        """Rows [real] of the batch's positions, new ones at the end."""
        ids = self._batch.rows.ids
        assert ids is not None
        first, rows = self._count, []
        for position, x in zip(ids[:real].tolist(), self._normed, strict=False):
            if position not in self._at:
                self._at[position] = self._count
                self._right[self._count] = x
                self._count += 1
            rows.append(self._at[position])
        self._fade[first : self._count] = 1.0
        return torch.tensor(rows, device=self._left.device)

    def _publish(self, rows: torch.Tensor) -> None:
        """Serve the rows [m] whose left changed, and all of right."""
        left, right = self._served
        if left is not self._left:
            left.index_copy_(0, rows, self._left.index_select(0, rows).to(left.dtype))
            right[: self._count].copy_(self._right[: self._count])
        served = self._count + -self._count % ROUNDED
        self._head.low_rank = (left[:served], right[:served]) if served else None

    def settle(self, keep: bool) -> None:
        if keep:
            self._reach += self._path
            if self._count + self._positions > self._max_rows:
                self._fold()
        elif self._before is not None:
            state, at = self._before
            self.load_state(state)
            self._at = at
        self._before, self._path = None, 0.0

    def _fold(self) -> None:
        """Move what the rows hold, as it is served, into dense weights."""
        if self._master is None:
            self._master = Master(self._head.weight, Rule(False, 1.0, 0.0, 0.0, 1.0), in_place=True)
        left, right = self._served
        self._master.prepare(Factors(left[: self._count], right[: self._count].float(), 0.0), -1.0, 0)
        self._master.write(1.0)
        self._master.settle(True)
        self._empty()

    def _empty(self) -> None:
        for x in (self._left, self._right, *self._served):
            x[: self._count] = 0
        self._count, self._at = 0, {}
        self._head.low_rank = None

    def restore(self) -> None:
        self._empty()
        if self._master is not None:
            self._master.restore()
        self._reach = self.initial_norms["weight"]

    def state(self) -> dict[str, Any]:
        rows = {"left": self._left, "right": self._right, "fade": self._fade}
        folded = self._master.state() if self._master is not None and self._master.moved else None
        return {**{key: x[: self._count].clone() for key, x in rows.items()}, "folded": folded, "reach": self._reach}

    def load_state(self, state: dict[str, Any]) -> None:
        self.restore()
        self._count, self._reach = len(state["left"]), state["reach"]
        for key, x in (("left", self._left), ("right", self._right), ("fade", self._fade)):
            x[: self._count] = state[key]
        if state["folded"] is not None:
            if self._master is None:
                self._master = Master(self._head.weight, Rule(False, 1.0, 0.0, 0.0, 1.0), in_place=True)
            self._master.load_state(state["folded"])
        self._publish(torch.arange(self._count, device=self._left.device))

    def distance(self) -> dict[str, float]:
        left, right = self._left[: self._count], self._right[: self._count]
        if self._master is None:
            moved = factors(left, right, 0.0).norm if self._count else 0.0
        else:
            folded = self._master.weights.live - self._master.initial
            moved = torch.linalg.vector_norm(folded.addmm_(left.t(), right)).item()
        norm = self.initial_norms["weight"]
        return {"weight": moved / norm if norm else float("inf")}
