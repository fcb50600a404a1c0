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
        loss: mean over the block at the weights that were served, before learning from it; None where nothing of
            it can be learnt, NaN where it broke on the way.
        steps: gradient steps.
        seen: what else the record shows.
    """

    loss: float | None
    steps: int
    seen: dict[str, Any]


class Rule(ABC):
    """How a student learns from a block of lessons. It owns what it needs beside the weights that are served."""

    @abstractmethod
    def learn(self, room: Classroom, lessons: Sequence[Lesson]) -> Learnt:
        """Leave in the student's weights what shall be served next, starting from what is served now."""

    @abstractmethod
    def refuse(self, kept: dict[str, Any]) -> None:
        """What ``learn`` left in the student's weights is sound, but a guard keeps it from being served.

        Args:
            kept: the state before ``learn``.
        """

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """All that outlasts a block, for ``torch.save``."""

    @abstractmethod
    def load_state(self, state: dict[str, Any]) -> None: ...


def learn(rule: Rule, room: Classroom, lessons: Sequence[Lesson], guard: Guard, initial: Weights) -> dict[str, Any]:
    """Learn from a block. Unless ``committed`` the student's weights are as before, and the rule as well, but for
    what its ``refuse`` says.

    Args:
        guard: what keeps weights from being served.
        initial: the weights of the start, from which ``drift`` is counted.
    """
    weights, kept = copied(room.student.weights), rule.state()
    held = max(1, len(lessons) // HELD_OUT) if guard is Guard.held_out and len(lessons) > 1 else 0
    taught, held_out = lessons[: len(lessons) - held], lessons[len(lessons) - held :]
    before = room.loss(held_out)
    learnt = rule.learn(room, taught)
    broken = _broken(learnt, room.student.weights)
    after = room.loss(taught) if guard is Guard.block and not broken else None
    unseen = None if broken else room.loss(held_out)
    refused = ""
    if guard is Guard.block and _rose(learnt.loss, after):
        refused = "the loss over the block rose"
    elif guard is Guard.held_out and before is None:
        refused = "no held-out turn to judge by"
    elif guard is Guard.held_out and _rose(before, unseen):
        refused = "the loss over held-out turns rose"
    if broken:
        rule.load_state(kept)
    elif refused:
        rule.refuse(kept)
    if broken or refused:
        put(room.student.weights, weights)
    return _finite(
        {
            "lessons": len(taught),
            "predictions": room.count(taught),
            "steps": learnt.steps,
            "loss": learnt.loss,
            "loss_after": after,
            "held_out": {"lessons": held, "loss": before, "loss_after": unseen} if held else None,
            "committed": not (broken or refused),
            "reason": broken or refused,
            "drift": _distance(room.student.weights, initial),
            **learnt.seen,
        }
    )


def _broken(learnt: Learnt, weights: Weights) -> str:
    """Why what was learnt can't be served whatever the guard; "" if it can."""
    if learnt.loss is None:
        return "nothing to learn"
    if not math.isfinite(learnt.loss):
        return "non-finite loss"
    return "" if all(bool(weight.isfinite().all()) for weight in weights.values()) else "non-finite weights"


def _rose(before: float | None, after: float | None) -> bool:
    """A loss that is no number rose."""
    return before is None or after is None or not after <= before


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
def _distance(weights: Weights, initial: Weights) -> float:
    """‖w - w₀‖ / ‖w₀‖ over all weights."""
    moved = math.hypot(*(float((weight - initial[name]).norm()) for name, weight in weights.items()))
    return moved / math.hypot(*(float(weight.norm()) for weight in initial.values()))


def _finite(value: Any) -> Any:
    """The same with None for each NaN and infinity inside, which a record can't hold."""
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
