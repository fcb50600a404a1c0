"""Gradient steps over a block's lessons, which every learner between requests takes in one way or another."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from tracedraft.adapters.lessons import Classroom
from tracedraft.errors import UserError
from tracedraft.types import Lesson


class Optimizer(Enum):
    sgd = "sgd"
    adamw = "adamw"


@dataclass(frozen=True)
class Steps:
    """How a block is gone through.

    Attributes:
        optimizer, lr, momentum, beta1, beta2, weight_decay: of torch's SGD or AdamW.
        epochs: times that a block is gone through.
        batch: turns a gradient step; None: the whole block.
        clip: bound on the norm of a gradient; None: off.
    """

    optimizer: Optimizer
    lr: float
    momentum: float
    beta1: float
    beta2: float
    weight_decay: float
    epochs: int
    batch: int | None
    clip: float | None

    def check(self, key: str) -> None:
        """Raises UserError for settings that cannot work, which stand under ``key``."""
        rules = [
            ("lr", 0 <= self.lr < math.inf, "a finite number, at least 0"),
            ("momentum", 0 <= self.momentum < 1, "in [0, 1)"),
            ("beta1", 0 <= self.beta1 < 1, "in [0, 1)"),
            ("beta2", 0 <= self.beta2 < 1, "in [0, 1)"),
            ("weight_decay", self.weight_decay >= 0, "at least 0"),
            ("epochs", self.epochs >= 1, "at least 1"),
            ("batch", self.batch is None or self.batch >= 1, "at least 1, or null for the whole block"),
        ]
        for name, works, want in rules:
            if not works:
                raise UserError(f"{key}.{name}={getattr(self, name)!r}: expected {want}")

    @property
    def moments(self) -> int:
        """Tensors that the optimiser keeps for each weight."""
        return 2 if self.optimizer is Optimizer.adamw else int(self.momentum > 0)

    def build(self, weights: dict[str, Tensor]) -> torch.optim.Optimizer:
        if self.optimizer is Optimizer.sgd:
            return torch.optim.SGD(weights.values(), self.lr, momentum=self.momentum, weight_decay=self.weight_decay)
        betas = (self.beta1, self.beta2)
        return torch.optim.AdamW(weights.values(), self.lr, betas=betas, weight_decay=self.weight_decay)

    def take(
        self, optimizer: torch.optim.Optimizer, room: Classroom, lessons: Sequence[Lesson]
    ) -> tuple[list[float], list[float]]:
        """Losses before each step, and norms of the gradients. Stops at the first that is not finite."""
        losses, norms = [], []
        for some in self._batches(lessons):
            loss = room.gradient(some)
            if loss is None:
                continue
            losses.append(loss)
            norms.append(clipped(room.student.weights, self.clip))
            if not math.isfinite(loss) or not math.isfinite(norms[-1]):
                losses[-1] = math.nan
                break
            optimizer.step()
        return losses, norms

    def _batches(self, lessons: Sequence[Lesson]) -> Iterator[Sequence[Lesson]]:
        size = self.batch or len(lessons)
        for _ in range(self.epochs):
            for start in range(0, len(lessons), size):
                yield lessons[start : start + size]


def clipped(weights: dict[str, Tensor], clip: float | None) -> float:
    """Norm of the gradients before they were clipped to ``clip``."""
    gradients = [weight for weight in weights.values() if weight.grad is not None]
    return float(torch.nn.utils.clip_grad_norm_(gradients, clip if clip is not None else math.inf))
