"""One block as a transaction: weights that got worse or broke are not served, and the last good ones stay."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from tracedraft.adapters.lessons import Classroom
from tracedraft.types import Lesson

Weights = dict[str, Tensor]
HELD_OUT = 4  # the guard holds out one turn in this many, and at least one


class Guard(Enum):
    """Whose loss must not rise: no one's, that of the block which was learnt, that of turns held out from it."""

    none = "none"
    block = "block"
    held_out = "held_out"


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


def learn(rule: Rule, room: Classroom, lessons: Sequence[Lesson], guard: Guard, initial: Weights) -> dict[str, Any]:
    """Learn from a block. The student's weights and the rule are as before unless ``committed``.

    Args:
        guard: what keeps weights from being served.
        initial: the weights of the start, from which ``drift`` is counted.
    """
    weights, kept = copied(room.student.weights), rule.state()
    held = max(1, len(lessons) // HELD_OUT) if guard is Guard.held_out and len(lessons) > 1 else 0
    taught, held_out = lessons[: len(lessons) - held], lessons[len(lessons) - held :]
    before = room.loss(held_out)
    learnt = rule.learn(room, taught)
    reason, after = _broken(learnt, room.student.weights), math.nan
    if not reason and guard is Guard.block:
        after = room.loss(taught)
        reason = "" if after <= learnt.loss else "the loss over the block rose"
    unseen = math.nan if reason else room.loss(held_out)
    if not reason and guard is Guard.held_out and not unseen <= before:
        reason = "no held-out turn to judge by" if math.isnan(before) else "the loss over held-out turns rose"
    if reason:
        put(room.student.weights, weights)
        rule.load_state(kept)
    return {
        "lessons": len(taught),
        "predictions": room.count(taught),
        "steps": learnt.steps,
        "loss": _finite(learnt.loss),
        "loss_after": _finite(after),
        "held_out": {"lessons": held, "loss": _finite(before), "loss_after": _finite(unseen)} if held else None,
        "committed": not reason,
        "reason": reason,
        "drift": _distance(room.student.weights, initial),
        **learnt.seen,
    }


def _broken(learnt: Learnt, weights: Weights) -> str:
    """Why what was learnt can't be served whatever the guard; "" if it can."""
    if math.isnan(learnt.loss) and not learnt.steps:
        return "nothing to learn"
    if not math.isfinite(learnt.loss):
        return "non-finite loss"
    return "" if all(bool(weight.isfinite().all()) for weight in weights.values()) else "non-finite weights"


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
