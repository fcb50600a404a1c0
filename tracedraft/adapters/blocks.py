"""Learning between requests, block by block: when, from what, and what becomes of it. How: a ``Rule``."""

from __future__ import annotations

import copy
import math
import time
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from tracedraft.adapters.lessons import Classroom, Fault, Loss, Taught, Teaching
from tracedraft.adapters.own_tokens import OwnTokens, Tokens
from tracedraft.adapters.transaction import Guard, Rule, copied, learn, not_learnt, put
from tracedraft.errors import UserError
from tracedraft.interfaces import Draft, OuterAdapter, OuterAdapterSpec, Student, Target
from tracedraft.types import Conversation, Lesson


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
        guard: roll back a block after which a loss is higher than before: block, that over it; held_out, that over
            the fourth part of its turns, which are not learnt; none, never.
        buffer_mib: bound on the memory of a block's turns, beyond which the oldest are dropped.
        budget: most of the wall time that learning may take. The first block shows what a token costs; a later one
            that would take more waits, and keeps the turns of its newest conversations, as many as a block has.
            None: no bound.
        background: learn in a process of its own while requests are served, and swap weights between two of them.
        background_threads: of that process, on a CPU.
        schedule: pairs of conversations after which to learn and to serve what was learnt, whatever else is said: how
            a run whose decisions hung on the clock is repeated, its other keys as they were. None: as those say.
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
    guard: Guard
    buffer_mib: float
    budget: float | None
    background: bool
    background_threads: int
    schedule: list[list[int]] | None

    def __post_init__(self) -> None:
        self._check(
            ("update_interval", self.update_interval >= 1, "at least 1"),
            ("warm_up", self.warm_up >= 0, "at least 0"),
            ("unroll", self.unroll >= 1, "at least 1"),
            ("decay", 0 < self.decay <= 1, "above 0, at most 1"),
            ("student_tokens", self.student_tokens >= 1, "at least 1"),
            ("objective", self.tokens is Tokens.teacher or self.objective is Taught.rejected, "rejected; see tokens"),
            (
                "update_interval",
                self.guard is not Guard.held_out or self.update_interval > 1,
                "at least 2 with guard=held_out, which keeps a turn from learning",
            ),
            ("temperature", 0 < self.temperature < math.inf, "above 0"),
            ("clip", self.clip is None or self.clip > 0, "above 0, or null"),
            ("buffer_mib", self.buffer_mib > 0, "above 0"),
            ("background_threads", self.background_threads >= 1, "at least 1"),
            (
                "schedule",
                all(map(self._possible, self.schedule or [])),
                "pairs, equal without background: [[8,8],[16,16]]",
            ),
            ("budget", self.budget is None or 0 < self.budget < 1, "a share above 0 and below 1, or null"),
        )

    def _possible(self, pair: list[int]) -> bool:
        return len(pair) == 2 and (pair[0] < pair[1] if self.background else pair[0] == pair[1])

    def _check(self, *rules: tuple[str, bool, str]) -> None:
        for key, works, want in rules:
            if not works:
                raise UserError(f"adapter.outer.{key}={getattr(self, key)!r}: expected {want}")

    @property
    def teaching(self) -> Teaching:
        return Teaching(self.objective, self.loss, self.unroll, self.decay, self.temperature, self.fault)

    def check_stream(self, conversations: Sequence[Conversation], timed: bool) -> None:
        """Raises UserError where nothing would ever be learnt, or by a clock that does not run."""
        self._check_length(len(conversations), "the stream")
        if self.budget is not None and not timed and self.schedule is None:
            raise UserError(
                f"adapter.outer.budget={self.budget}: expected null with measure=acceptance, which times nothing"
            )
        if self.background and not timed and self.schedule is None:
            raise UserError("adapter.outer.background=true: expected false with measure=acceptance, or a schedule")

    def _check_length(self, conversations: int, of: str) -> None:
        first = self.warm_up or self.update_interval
        if self.schedule is None and first > conversations:
            key = "warm_up" if self.warm_up else "update_interval"
            raise UserError(
                f"adapter.outer.{key}={first}: {of} has {conversations} conversations, so nothing would "
                "ever be learnt; lower it, or raise workload.limit"
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

    def learner(self, student: Student, target: Target, seed: int) -> BlockLearner:
        """In this process."""
        own = OwnTokens(student, target, self.tokens, self.student_tokens, torch.Generator().manual_seed(seed))
        return BlockLearner(self, student, Classroom(student, self.teaching, target.logits), own)

    def _check_memory(self, student: Student) -> None:
        """Raises UserError when what is to be held can't fit."""
        import psutil

        device = next(iter(student.weights.values())).device
        free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available
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
        self.initial = copied(student.weights)
        self.lessons: list[Lesson] = []
        self.answered_in: list[int] = []  # which conversation, of each lesson
        self.conversations = self.since = self.blocks = self.dropped = self.taken_dropped = self.last_tokens = 0
        self.served_seconds = self.learning_seconds = self.last_seconds = 0.0

    @cached_property
    def rule(self) -> Rule:
        """Made when it is needed: it may hold many times the draft."""
        return self.spec.rule(self.student)

    def begin_conversation(self, conversation: Conversation) -> bool:
        return False

    def observe(self, lesson: Lesson) -> None:
        self.lessons.append(lesson)
        self.answered_in.append(self.conversations)
        while sum(kept.nbytes for kept in self.lessons) > self.spec.buffer_mib * 2**20 and len(self.lessons) > 1:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        del self.lessons[0], self.answered_in[0]
        self.dropped += 1

    def end_conversation(self, seconds: float | None) -> dict[str, Any] | None:
        self.count(seconds)
        if not self.due():
            return None
        if waits := self.waits():
            return not_learnt(waits, seconds)
        began = time.perf_counter()
        found = learn(self.rule, self.room, self.take(), self.spec.guard, self.initial)
        found = self.report(found)
        self.spend(time.perf_counter() - began)
        return found | {"seconds": None if seconds is None else self.last_seconds}

    def count(self, seconds: float | None) -> None:
        """One more conversation was served."""
        self.conversations += 1
        self.since += 1
        self.served_seconds += seconds or 0.0
        # A block that waits for the budget would cost ever more, and wait ever longer.
        while self.spec.budget and self.lessons and self.answered_in[0] < self.conversations - self.length:
            self._drop_oldest()

    def spend(self, seconds: float) -> None:
        self.last_seconds = seconds
        self.learning_seconds += seconds

    def rest(self, resting: bool) -> None:
        pass

    def close(self) -> None:
        pass

    @property
    def length(self) -> int:
        """Conversations of the block to come."""
        return self.spec.warm_up if self.blocks == 0 and self.spec.warm_up else self.spec.update_interval

    def due(self) -> bool:
        if self.spec.schedule is not None:
            return self.conversations in (learnt for learnt, _ in self.spec.schedule)
        return self.since >= self.length

    def waits(self) -> str:
        """Why a block that is due is not learnt; "" if it is."""
        if not self.lessons:
            return "nothing to learn"
        return "over budget" if self._over_budget() else ""

    def _over_budget(self) -> bool:
        """Whether the block, at the last one's time a token, would take too much of the time until now."""
        if self.spec.budget is None or self.spec.schedule is not None:
            return False
        forecast = self.last_seconds / self.last_tokens * self._tokens() if self.last_tokens else 0.0
        spent = self.learning_seconds + forecast
        return spent > self.spec.budget * (self.served_seconds + spent)

    def _tokens(self) -> int:
        return sum(len(lesson.tokens) for lesson in self.lessons)

    def take(self) -> list[Lesson]:
        """The block to learn from, which is over with that."""
        self.last_tokens = self._tokens()
        lessons, self.lessons, self.answered_in, self.since = self.lessons, [], [], 0
        self.blocks += 1
        self.taken_dropped, self.dropped = self.dropped, 0
        return self.own.rewrite(lessons)

    def report(self, found: dict[str, Any]) -> dict[str, Any]:
        """What was made of the last block taken, served if it may be."""
        sha = self.student.serve() if found["committed"] else None
        place = {"block": self.blocks, "dropped": self.taken_dropped}
        return place | found | {"served": found["committed"], "weights_sha256": sha}

    def state(self) -> dict[str, Any]:
        counts = (
            "conversations", "since", "blocks", "dropped", "taken_dropped", "last_tokens", "answered_in",
            "served_seconds", "learning_seconds", "last_seconds",
        )  # fmt: skip
        lessons = [vars(lesson) for lesson in self.lessons]
        kept = {name: copy.copy(getattr(self, name)) for name in counts}
        return {"lessons": lessons, "draws": self.own.draws.get_state(), "counts": kept}

    def weights(self) -> dict[str, Any]:
        return {"weights": copied(self.student.weights), "rule": self.rule.state()}

    def load_state(self, state: dict[str, Any], weights: dict[str, Any] | None) -> None:
        self.lessons = [Lesson(**lesson) for lesson in state["lessons"]]
        self.own.draws.set_state(state["draws"])
        for name, value in state["counts"].items():
            setattr(self, name, copy.copy(value))
        if weights is not None:
            put(self.student.weights, weights["weights"])
            self.rule.load_state(weights["rule"])
            self.student.serve()
