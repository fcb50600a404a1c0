"""What an update asks of the trained tensors, however they are held."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from tracedraft.adapters.objective import Batch, Factors


class Form(ABC):
    """The trained tensors of one draft's head, as a transaction sees them.

    Between two ``settle`` calls: ``gradients``, ``prepare`` and, if what they say is good, ``write``; once for
    each training step. What ``write`` has written is served at once.

    Attributes:
        initial_norms: ‖W₀‖ by trained tensor.
    """

    initial_norms: dict[str, float]

    @abstractmethod
    def begin_response(self) -> None: ...

    @abstractmethod
    def gradients(self, batch: Batch) -> tuple[float, dict[str, Factors]]:
        """Loss and gradients at the weights as served, or at what the transaction has written."""

    @abstractmethod
    def prepare(self, gradients: dict[str, Factors], scale: float, count: int) -> None:
        """Measure a step, writing none of it yet.

        Args:
            scale: factor of the gradients (clipping).
            count: the step's number, from 1.
        """

    @abstractmethod
    def drift(self) -> dict[str, float]:
        """Length of the transaction's steps over ‖W₀‖, an upper bound of ‖ΔW‖/‖W₀‖ if several."""

    @abstractmethod
    def finite(self) -> bool:
        """Whether every weight stays within the served dtype."""

    @abstractmethod
    def write(self, keep: float) -> None:
        """W ← W₀ + keep·(W - W₀) + the step prepared."""

    @abstractmethod
    def settle(self, keep: bool) -> None:
        """End the transaction: what was written stands, or everything is as before, bit by bit."""

    @abstractmethod
    def restore(self) -> None:
        """Back to the initial weights and optimiser; free where nothing was ever committed."""

    @abstractmethod
    def state(self) -> dict[str, Any]: ...

    @abstractmethod
    def load_state(self, state: dict[str, Any]) -> None: ...

    @abstractmethod
    def distance(self) -> dict[str, float]:
        """‖W - W₀‖ / ‖W₀‖ of each trained tensor."""
