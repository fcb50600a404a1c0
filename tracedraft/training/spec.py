"""What a kind of draft brings to its training, and how any is trained."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from torch import Tensor, nn

from tracedraft.errors import UserError
from tracedraft.target import LlamaTarget
from tracedraft.training.objective import OBJECTIVES

DRAFT = "draft"  # the best one, in a training's folder

Model = TypeVar("Model", bound=nn.Module)


class Pupil(ABC, Generic[Model]):
    """A draft while it is trained.

    Attributes:
        model: all that is trained, in fp32, on the target's device.
    """

    model: Model

    @abstractmethod
    def loss(self, raw: dict[str, Tensor]) -> Tensor:
        """Of rows of the corpus as they are in a shard, on the model's device."""

    @abstractmethod
    def hits(self, raw: dict[str, Tensor], depths: int) -> Tensor:
        """[K, B, T] on the CPU: whether the chain from slot i says token i+2+k at step k; past a row's end, no."""

    @abstractmethod
    def sayable(self, tokens: Tensor) -> Tensor:
        """Which of ``tokens`` the draft vocabulary holds."""

    @abstractmethod
    def save(self, folder: Path) -> None: ...

    @abstractmethod
    def resumed(self) -> None:
        """The model was given other weights."""


@dataclass(frozen=True)
class TrainingSpec(ABC):
    """How to train.

    Attributes:
        init: a trained draft to go on from, with its vocabulary and, unless it is widened, its shape; None: a new
            one.
        after: the folder of an earlier training, whose last weights and moments to go on from instead.
        loss: "ce", soft cross-entropy, or "lk", -log of the mass that rejection sampling accepts.
        epochs, batch, length: passes over the corpus; rows of ``length`` tokens an optimiser step.
        answers_only: learn what the target answers, and not what stands between answers.
        lr, warmup_steps, final_lr: AdamW's, peak of a cosine schedule, and the share of it that it ends at.
        average: decay a step of a running average of the weights, judged and kept in their place; None: none.
        evaluate_every: optimiser steps between held-out checks and checkpoints.
        held_out_tokens: replayed at each check.
        patience: checks without a better tau before training stops; None: never.
    """

    init: str | None
    after: str | None
    loss: str
    answers_only: bool
    epochs: int
    batch: int
    length: int
    lr: float
    warmup_steps: int
    final_lr: float
    average: float | None
    betas: tuple[float, float]
    clip: float
    weight_decay: float
    evaluate_every: int
    held_out_tokens: int
    patience: int | None
    seed: int

    def __post_init__(self) -> None:
        counts = ("epochs", "batch", "length", "warmup_steps", "evaluate_every", "held_out_tokens")
        self._at_least_one(*counts)
        ranges = {
            "lr": (self.lr > 0, "above 0"),
            "final_lr": (0 <= self.final_lr <= 1, "a share from 0 to 1"),
            "average": (self.average is None or 0 <= self.average < 1, "a decay from 0 to below 1, or null"),
            "betas": (all(0 <= beta < 1 for beta in self.betas), "two from 0 to below 1"),
            "clip": (self.clip > 0, "above 0"),
            "weight_decay": (self.weight_decay >= 0, "0 or more"),
            "length": (self.length > 1, "at least 2"),
        }
        for key, (fits, what) in ranges.items():
            if not fits:
                raise UserError(f"training.{key}={getattr(self, key)}: expected {what}")
        if self.init is not None and self.after is not None:
            raise UserError(f"training.after={self.after}: expected null beside training.init={self.init}")
        if self.loss not in OBJECTIVES:
            raise UserError(f"training.loss={self.loss}: expected one of {', '.join(OBJECTIVES)}")
        if self.patience is not None and self.patience < 1:
            raise UserError(f"training.patience={self.patience}: expected at least 1, or null for no early stop")

    def _at_least_one(self, *keys: str) -> None:
        for key in keys:
            if getattr(self, key) < 1:
                raise UserError(f"training.{key}={getattr(self, key)}: expected at least 1")

    @property
    def start(self) -> Path | None:
        """The draft that gives shape and vocabulary."""
        if self.after is not None:
            return Path(self.after) / DRAFT
        return None if self.init is None else Path(self.init)

    @abstractmethod
    def check(self, target: LlamaTarget) -> None:
        """Raises UserError for what cannot be trained for this target, before any text is made."""

    @abstractmethod
    def count(self, target: LlamaTarget) -> int:
        """How many weights are trained."""

    @abstractmethod
    def pupil(self, target: LlamaTarget, files: list[Path]) -> Pupil:
        """A new draft, or the one to go on from, given the shards that it will be trained on."""
