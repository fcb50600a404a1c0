"""The trained tensors as dense fp32 masters, for SGD and Adam."""

from __future__ import annotations

from typing import Any

from tracedraft.adapters.form import Form
from tracedraft.adapters.objective import Batch, Factors, factors, gain_gradient, kl_gradient, residual_dtype
from tracedraft.adapters.optim import Master, Rule
from tracedraft.types import OutputHead


class Dense(Form):
    """Norm and head, or one of them."""

    def __init__(
        self, head: OutputHead, trained: set[str], rule: Rule, temperature: float, skip: float, in_place: bool
    ) -> None:
        """
        Args:
            trained: of "norm" and "weight".
            temperature: T of the loss.
            skip: see ``objective.factors``; Adam, whose steps do not shrink with the gradient, leaves nothing out.
            in_place: no transaction is ever dropped once it has written.
        """
        tensors = {"norm": head.norm, "weight": head.weight}
        self.masters = {key: Master(tensors[key], rule, in_place) for key in tensors if key in trained}
        self.initial_norms = {key: master.initial_norm for key, master in self.masters.items()}
        self._head = head
        self._temperature = temperature
        self._skip = 0.0 if rule.adam else skip
        self._wrote = False

    def begin_response(self) -> None:
        pass

    def gradients(self, batch: Batch) -> tuple[float, dict[str, Factors]]:
        """At the weights as served, for the first step: in bf16 the products with the head cost a third of what
        fp32 masters cost, and it is the served draft that should improve. At the masters for later ones."""
        at = {"norm": self._head.norm, "weight": self._head.weight}
        if self._wrote:
            at |= {key: master.weights.latest for key, master in self.masters.items()}
        gain, weight, scale = at["norm"].flatten(), at["weight"], batch.scale(self._temperature)
        loss, residual, normed, unit = kl_gradient(
            batch,
            gain,
            self._head.eps,
            self._temperature,
            lambda x: x.to(weight.dtype) @ weight.t(),
            residual_dtype(self._head),
        )
        gradients = {}
        if "weight" in self.masters:
            gradients["weight"] = factors(residual, normed * scale, self._skip)
        if "norm" in self.masters:
            # Of the whole residual: small entries that all point one way do matter to a sum over the vocabulary.
            row = gain_gradient(residual, weight, unit * scale).unsqueeze(0)
            gradients["norm"] = factors(row.new_ones(1, 1), row, 0.0)
        return loss, gradients

    def prepare(self, gradients: dict[str, Factors], scale: float, count: int) -> None:
        for key, master in self.masters.items():
            master.prepare(gradients[key], scale, count)

    def drift(self) -> dict[str, float]:
        return {key: master.drift() for key, master in self.masters.items()}

    def finite(self) -> bool:
        return all(master.finite() for master in self.masters.values())

    def write(self, keep: float) -> None:
        self._wrote = True
        for master in self.masters.values():
            master.write(keep)

    def settle(self, keep: bool) -> None:
        self._wrote = False
        for master in self.masters.values():
            master.settle(keep)

    def restore(self) -> None:
        for master in self.masters.values():
            master.restore()

    def state(self) -> dict[str, Any]:
        return {key: master.state() for key, master in self.masters.items()}

    def load_state(self, state: dict[str, Any]) -> None:
        for key, master in self.masters.items():
            master.load_state(state[key])

    def distance(self) -> dict[str, float]:
        return {key: master.distance() for key, master in self.masters.items()}
