"""Learning between requests, block by block: when, from what, and what becomes of it. How: a ``Rule``."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tracedraft.adapters.lessons import Classroom, Fault, Loss, Taught, Teaching
from tracedraft.adapters.own_tokens import OwnTokens, Tokens
from tracedraft.errors import UserError
from tracedraft.interfaces import Draft, OuterAdapter, OuterAdapterSpec, Student, Target
from tracedraft.types import Conversation, Lesson

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


@dataclass(frozen=True)
class BlockSpec(OuterAdapterSpec):
    """What all learners between requests share.

    Attributes:
        update_interval: conversations a block.
        warm_up: conversations of the first block; 0: as many as of the others.
        objective: learn where the draft was refused, or from all of the answer.
        loss: forward_kl, reverse_kl, jsd, or label, the target's token alone.
        unroll, decay: objective=all only: chain steps from each slot, and the weight of each after the one before.
        temperature: of the target's distribution in the loss.
        tokens: text that is learnt from: teacher, the answer; student, what the draft would say where it was refused,
            at one more pass of the target for each turn; mixed, either.
        student_tokens: student and mixed only: how many the draft says.
        fault: of a negative control: wrong_shift, each prediction is taught what follows the next one;
            shuffled_teacher, what follows a random one of the turn.
        clip: bound on the norm of a gradient; None: off.
        guard: roll back a block after which the loss over it is higher than before.
        buffer_mib: bound on the memory of a block's turns, beyond which the oldest are dropped.
        budget: most of the wall time that learning may take, beyond which a block waits; None: no bound.
        schedule: learn after these numbers of conversations, whatever else is said: how a run whose decisions hung on
            the clock is repeated. None: as the other keys say.
    """

    name: str
    update_interval: int
    warm_up: int
    objective: Taught
    loss: Loss
    unroll: int
    decay: float
    temperature: float
    tokens: Tokens
    student_tokens: int
    fault: Fault
    clip: float | None
    guard: bool
    buffer_mib: float
    budget: float | None
    schedule: list[int] | None

    def __post_init__(self) -> None:
        self._check(
            ("update_interval", self.update_interval >= 1, "at least 1"),
            ("warm_up", self.warm_up >= 0, "at least 0"),
            ("unroll", self.unroll >= 1, "at least 1"),
            ("decay", 0 < self.decay <= 1, "above 0, at most 1"),
            ("student_tokens", self.student_tokens >= 1, "at least 1"),
            ("objective", self.tokens is Tokens.teacher or self.objective is Taught.rejected, "rejected; see tokens"),
            ("temperature", 0 < self.temperature < math.inf, "above 0"),
            ("clip", self.clip is None or self.clip > 0, "above 0, or null"),
            ("buffer_mib", self.buffer_mib > 0, "above 0"),
            ("budget", self.budget is None or 0 < self.budget < 1, "a share above 0 and below 1, or null"),
        )

    def _check(self, *rules: tuple[str, bool, str]) -> None:
        for key, works, want in rules:
            if not works:
                raise UserError(f"adapter.outer.{key}={getattr(self, key)!r}: expected {want}")

    @property
    def teaching(self) -> Teaching:
        return Teaching(self.objective, self.loss, self.unroll, self.decay, self.temperature, self.fault)

    def check_stream(self, conversations: int, timed: bool) -> None:
        first = self.warm_up or self.update_interval
        if self.schedule is None and first > conversations:
            key = "warm_up" if self.warm_up else "update_interval"
            raise UserError(
                f"adapter.outer.{key}={first}: the stream has {conversations} conversations, so nothing would "
                "ever be learnt; lower it, or raise workload.limit"
            )
        if self.budget is not None and not timed and self.schedule is None:
            raise UserError(
                f"adapter.outer.budget={self.budget}: expected null with measure=acceptance, which times nothing"
            )

    @abstractmethod
    def rule(self, student: Student) -> Rule: ...

    @property
    @abstractmethod
    def copies(self) -> int:
        """Times the draft's parameters that learning holds in fp32, what is served and gradients left out."""

    def student(self, draft: Draft) -> Student:
        """Raises UserError without parameters to learn, or memory for it."""
        student = draft.student()
        if student is None:
            raise UserError(f"adapter.outer={self.name}: this draft has no parameters to learn; use an inner adapter")
        self._check_memory(student)
        return student

    def learner(self, student: Student, draft: Draft, target: Target, seed: int) -> BlockLearner:
        own = OwnTokens(draft, target, self.tokens, self.student_tokens, torch.Generator().manual_seed(seed))
        return BlockLearner(self, student, Classroom(student, self.teaching, target.logits), own)

    def _check_memory(self, student: Student) -> None:
        """Raises UserError when what is to be held can't fit."""
        import psutil

        if any(weight.is_cuda for weight in student.weights.values()):
            free = torch.cuda.mem_get_info()[0]
        else:
            free = psutil.virtual_memory().available
        size = sum(weight.nbytes for weight in student.weights.values())
        needed = size * (self.copies + 2) + self.buffer_mib * 2**20
        if needed > free:
            gib = f"{needed / 2**30:.1f} GiB and {free / 2**30:.1f} are free"
            raise UserError(
                f"adapter.outer.buffer_mib={self.buffer_mib:g}: with {self.copies} fp32 copies of the draft, "
                f"{size / 2**20:,.0f} MiB each, learning needs {gib}"
            )


class BlockLearner(OuterAdapter):
    """Collects turns, and learns from them between two conversations when a block is full."""

    def __init__(self, spec: BlockSpec, student: Student, room: Classroom, own: OwnTokens):
        self.spec, self.student, self.room, self.own = spec, student, room, own
        self.rule = spec.rule(student)
        self.initial = copied(student.weights)
        self.lessons: list[Lesson] = []
        self.conversations = self.since = self.blocks = self.dropped = 0
        self.served_seconds = self.learning_seconds = self.last_seconds = 0.0

    def begin_conversation(self, conversation: Conversation) -> bool:
        return False

    def observe(self, lesson: Lesson) -> None:
        self.lessons.append(lesson)
        while sum(kept.nbytes for kept in self.lessons) > self.spec.buffer_mib * 2**20 and len(self.lessons) > 1:
            self.lessons.pop(0)
            self.dropped += 1

    def end_conversation(self, seconds: float | None) -> dict[str, Any] | None:
        self.conversations += 1
        self.since += 1
        self.served_seconds += seconds or 0.0
        if not self._due():
            return None
        if self._over_budget():
            return not_learnt("over budget", seconds)
        began = time.perf_counter()
        found = self._learn()
        self.last_seconds = time.perf_counter() - began
        self.learning_seconds += self.last_seconds
        timed = {"seconds": self.last_seconds} if seconds is not None else {"seconds": None}
        return found | timed

    def _due(self) -> bool:
        if self.spec.schedule is not None:
            return self.conversations in self.spec.schedule
        first = self.blocks == 0 and self.spec.warm_up
        return self.since >= (first or self.spec.update_interval)

    def _over_budget(self) -> bool:
        """Whether one more block, as long as the last one, would take too much of the time until now."""
        if self.spec.budget is None or self.spec.schedule is not None:
            return False
        spent = self.learning_seconds + self.last_seconds
        return spent > self.spec.budget * (self.served_seconds + spent)

    def _learn(self) -> dict[str, Any]:
        """One block, as a transaction: a draft that got worse or broke is not served, and the last good one stays."""
        lessons, self.lessons, self.since = self.lessons, [], 0
        self.blocks += 1
        dropped, self.dropped = self.dropped, 0
        lessons = self.own.rewrite(lessons)
        weights, kept = copied(self.student.weights), self.rule.state()
        learnt = self.rule.learn(self.room, lessons)
        reason, after = self._judge(learnt, lessons)
        if reason:
            put(self.student.weights, weights)
            self.rule.load_state(kept)
        sha = None if reason else self.student.serve()
        return {
            "block": self.blocks,
            "lessons": len(lessons),
            "dropped": dropped,
            "predictions": self.room.count(lessons),
            "steps": learnt.steps,
            "loss": _finite(learnt.loss),
            "loss_after": _finite(after),
            "committed": not reason,
            "reason": reason,
            "served": not reason,
            "weights_sha256": sha,
            "drift": _distance(self.student.weights, self.initial),
            **learnt.seen,
        }

    def _judge(self, learnt: Learnt, lessons: Sequence[Lesson]) -> tuple[str, float]:
        """Why what was learnt must not be served ("" if it may), and the loss over the block at it."""
        if math.isnan(learnt.loss) and not learnt.steps:
            return "nothing to learn", math.nan
        if not math.isfinite(learnt.loss):
            return "non-finite loss", math.nan
        if not all(bool(weight.isfinite().all()) for weight in self.student.weights.values()):
            return "non-finite weights", math.nan
        if not self.spec.guard:
            return "", math.nan
        after = self.room.loss(lessons)
        return ("" if after <= learnt.loss else "the loss over the block rose"), after

    def state(self) -> dict[str, Any]:
        counts = ("conversations", "since", "blocks", "dropped", "served_seconds", "learning_seconds", "last_seconds")
        lessons = [vars(lesson) for lesson in self.lessons]
        kept = {name: getattr(self, name) for name in counts}
        return {"lessons": lessons, "draws": self.own.draws.get_state(), "counts": kept}

    def weights(self) -> dict[str, Any]:
        return {"weights": copied(self.student.weights), "rule": self.rule.state()}

    def load_state(self, state: dict[str, Any], weights: dict[str, Any] | None) -> None:
        self.lessons = [Lesson(**lesson) for lesson in state["lessons"]]
        self.own.draws.set_state(state["draws"])
        for name, value in state["counts"].items():
            setattr(self, name, value)
        if weights is not None:
            put(self.student.weights, weights["weights"])
            self.rule.load_state(weights["rule"])
            self.student.serve()


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
