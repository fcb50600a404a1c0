"""One block as a transaction: weights that got worse or broke are not served, and the last good ones stay."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tracedraft.adapters.lessons import Classroom
from tracedraft.types import Lesson

Weights = dict[str, Tensor]


@dataclass
class Learnt:
    """What a rule made of a block.

    Attributes:
        loss: mean over the block at the weights that were served, before learning from it.
        steps: gradient steps.
        seen: what else the record shows.
    """

    loss: float
    steps: int
    seen: dict[str, Any]


class Rule(ABC):
    """How a student learns from a block of lessons. It owns what it needs beside the weights that are served."""

    @abstractmethod
    def learn(self, room: Classroom, lessons: Sequence[Lesson]) -> Learnt:
        """Leave in the student's weights what shall be served next, starting from what is served now."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """All that outlasts a block, for ``torch.save``."""

    @abstractmethod
    def load_state(self, state: dict[str, Any]) -> None: ...


def learn(rule: Rule, room: Classroom, lessons: Sequence[Lesson], guard: bool, initial: Weights) -> dict[str, Any]:
    """Learn from a block. The student's weights and the rule are as before unless ``committed``.

    Args:
        guard: weights that raise the loss over the block must not be served.
        initial: the weights of the start, from which ``drift`` is counted.
    """
    weights, kept = copied(room.student.weights), rule.state()
    learnt = rule.learn(room, lessons)
    reason, after = _judge(learnt, room, lessons, guard)
    if reason:
        put(room.student.weights, weights)
        rule.load_state(kept)
    return {
        "lessons": len(lessons),
        "predictions": room.count(lessons),
        "steps": learnt.steps,
        "loss": _finite(learnt.loss),
        "loss_after": _finite(after),
        "committed": not reason,
        "reason": reason,
        "drift": _distance(room.student.weights, initial),
        **learnt.seen,
    }


def _judge(learnt: Learnt, room: Classroom, lessons: Sequence[Lesson], guard: bool) -> tuple[str, float]:
    """Why what was learnt must not be served ("" if it may), and the loss over the block at it."""
    if math.isnan(learnt.loss) and not learnt.steps:
        return "nothing to learn", math.nan
    if not math.isfinite(learnt.loss):
        return "non-finite loss", math.nan
    if not all(bool(weight.isfinite().all()) for weight in room.student.weights.values()):
        return "non-finite weights", math.nan
    if not guard:
        return "", math.nan
    after = room.loss(lessons)
    return ("" if after <= learnt.loss else "the loss over the block rose"), after


def not_learnt(reason: str, seconds: float | None) -> dict[str, Any]:
    """What the record says of a conversation after which nothing was learnt."""
    spent = None if seconds is None else 0.0
    return {"block": None, "committed": False, "reason": reason, "served": False, "seconds": spent}


@torch.no_grad()
def copied(weights: Weights) -> Weights:
    """Copies without a gradient."""
    return {name: weight.detach().clone() for name, weight in weights.items()}


@torch.no_grad()
def put(into: Weights, weights: Weights) -> None:
    """Write values in place."""
    for name, weight in into.items():
        weight.copy_(weights[name])


@torch.no_grad()
def _distance(weights: Weights, initial: Weights) -> float | None:
    """‖w - w₀‖ / ‖w₀‖ over all weights."""
    moved = math.hypot(*(float((weight - initial[name]).norm()) for name, weight in weights.items()))
    return _finite(moved / math.hypot(*(float(weight.norm()) for weight in initial.values())))


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
