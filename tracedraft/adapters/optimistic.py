"""Optimistic online learning (OnlineSPEC, arXiv 2603.12617): the next block is met with a guess of its gradient.

    ŵ_{t+1} = ŵ_t - η g_t,   w_{t+1} = ŵ_{t+1} - η M_{t+1},   M_{t+1} = g_t

g_t is the mean gradient over block t at the served w_t, one step a block: the optimistic gradient step of online
learning, since the published code does otherwise. Its hint is SGD's momentum over the steps of a block:
``hint=momentum``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from tracedraft.adapters.background import placed
from tracedraft.adapters.blocks import BlockSpec
from tracedraft.adapters.lessons import Classroom
from tracedraft.adapters.osd import StepRule
from tracedraft.adapters.steps import Optimizer, Steps, clipped
from tracedraft.adapters.transaction import Learnt, Rule, copied
from tracedraft.errors import UserError
from tracedraft.interfaces import Draft, OuterAdapter, Student, Target
from tracedraft.types import Lesson


class Hint(Enum):
    gradient = "gradient"
    momentum = "momentum"


@dataclass(frozen=True)
class OptimisticSpec(BlockSpec):
    """Plain gradient steps with a hint.

    Attributes:
        hint: gradient: the last block's, as the algorithm has it; momentum: SGD's, as the published code has it.
        lr: η.
        momentum, epochs, batch: hint=momentum only, of SGD over the steps of a block.
        keep_momentum: hint=momentum only: it outlasts the block. False: it starts anew, as in the published code.
    """

    hint: Hint
    lr: float
    momentum: float
    epochs: int
    batch: int | None
    keep_momentum: bool

    def __post_init__(self) -> None:
        super().__post_init__()
        self.steps.check("adapter.outer")
        if self.hint is Hint.gradient and (self.epochs != 1 or self.batch is not None):
            raise UserError(
                f"adapter.outer.epochs={self.epochs} adapter.outer.batch={self.batch}: expected 1 and null with "
                "hint=gradient, which takes one step a block"
            )

    @property
    def steps(self) -> Steps:
        return Steps(Optimizer.sgd, self.lr, self.momentum, 0.0, 0.0, 0.0, self.epochs, self.batch, self.clip)

    @property
    def copies(self) -> int:
        """The masters, those of the start and of the block before, and ŵ with the hint, or the momentum."""
        return 5

    def build(self, draft: Draft, target: Target, seed: int) -> OuterAdapter:
        return placed(self.learner(self.student(draft), target, seed), target)

    def rule(self, student: Student) -> Rule:
        if self.hint is Hint.momentum:
            return StepRule(self.steps, student, self.keep_momentum)
        return HintRule(self.lr, self.clip, student)


class HintRule(Rule):
    """ŵ apart from the student's weights, which hold w."""

    def __init__(self, lr: float, clip: float | None, student: Student):
        self.lr, self.clip, self.student = lr, clip, student
        self.unhinted = copied(student.weights)

    @torch.no_grad()
    def learn(self, room: Classroom, lessons: Sequence[Lesson]) -> Learnt:
        with torch.enable_grad():
            loss = room.gradient(lessons)
        if loss is None or not math.isfinite(loss):
            return Learnt(loss, 0, {"grad_norms": []})
        norm = clipped(self.student.weights, self.clip)
        for name, weight in self.student.weights.items():
            if weight.grad is not None:
                self.unhinted[name].sub_(weight.grad, alpha=self.lr)
                weight.copy_(self.unhinted[name]).sub_(weight.grad, alpha=self.lr)
        return Learnt(loss, 1, {"grad_norms": [norm]})

    def refuse(self, kept: dict[str, Any]) -> None:
        self.load_state(kept)

    def state(self) -> dict[str, Any]:
        return {name: weight.clone() for name, weight in self.unhinted.items()}

    def load_state(self, state: dict[str, Any]) -> None:
        self.unhinted = {name: weight.clone() for name, weight in state.items()}
