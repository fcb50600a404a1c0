"""Learning in a process of its own while requests are served: weights are swapped between two requests, whole."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from typing import Any

import torch
from torch import Tensor

from tracedraft.adapters.blocks import BlockLearner, BlockSpec
from tracedraft.adapters.lessons import Classroom
from tracedraft.adapters.transaction import Weights, copied, learn, not_learnt, put
from tracedraft.interfaces import OuterAdapter, Student, Target
from tracedraft.types import Conversation, Lesson

PR_SET_PDEATHSIG = 1  # of linux/prctl.h
ENDING = 10.0  # seconds that a process which hung up is given to end by itself


def placed(learner: BlockLearner, target: Target) -> OuterAdapter:
    """Where its spec says: in this process, or in one of its own."""
    return BackgroundLearner(learner, target) if learner.spec.background else learner


class BackgroundLearner(OuterAdapter):
    """One block at a time is learnt elsewhere; what comes meanwhile waits for the next.

    Args:
        learner: collects, decides when, and serves, all in this process; it learns nothing itself.
    """

    def __init__(self, learner: BlockLearner, target: Target):
        self.learner, self.spec, self.target = learner, learner.spec, target
        self.process: Any = None
        self.pipe: Any = None
        self.flying: list[Lesson] | None = None
        self.submitted = 0
        self.rests: list[tuple[float, float]] = []  # from when to when it was stopped, of the block it is at
        self.stopped: float | None = None
        self.memory: dict[str, Any] | None = None  # the rule's, as the last block left it

    def begin_conversation(self, conversation: Conversation) -> bool:
        return False

    def observe(self, lesson: Lesson) -> None:
        self.learner.observe(lesson)

    def end_conversation(self, seconds: float | None) -> dict[str, Any] | None:
        began = time.perf_counter()
        self.learner.count(seconds)
        found = self._collect()
        if self.flying is None and self.learner.due():
            waits = self.learner.waits()
            if not waits:
                self._submit(self.learner.take())
            found = found or not_learnt(waits, seconds)
        if found is None:
            return None
        spent = time.perf_counter() - began
        self.learner.learning_seconds += spent
        return found | {"seconds": None if seconds is None else spent}

    def _submit(self, lessons: list[Lesson]) -> None:
        if self.process is None or not self.process.is_alive():
            self._start(lessons[0].hidden)
        self.flying, self.submitted = lessons, self.learner.conversations
        self.rests, self.stopped = [], None
        with contextlib.suppress(ConnectionError):  # of a process that has ended: collecting from it says so
            self.pipe.send(lessons)

    def _start(self, like: Tensor) -> None:
        from torch import multiprocessing

        # Of the identity, the logits are the head itself; the process needs no other part of the target.
        head = self.target.logits(torch.eye(self.target.hidden_size, dtype=like.dtype, device=like.device)).clone()

        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        student, memory = self.learner.student.apart(), self.memory
        args = (theirs, self.spec, student, head, memory, self.learner.initial)
        self.process = context.Process(target=_work, args=args, daemon=True)
        self.process.start()
        theirs.close()  # or its end could not be seen from here

    def _collect(self) -> dict[str, Any] | None:
        """What the process made of its block, served from now on; None while it is at it."""
        if self.flying is None or not self._ready():
            return None
        lessons, self.flying = self.flying, None
        try:
            found, weights, self.memory, began, ended = self.pipe.recv()
        except (EOFError, OSError):
            return self._lost(len(lessons))
        seconds = ended - began - sum(max(0.0, min(ended, to) - max(began, since)) for since, to in self.rests)
        if found["committed"]:
            put(self.learner.student.weights, weights)
        self.learner.spend(seconds)
        return self.learner.report(found) | {"background_seconds": seconds, "submitted": self.submitted}

    def _lost(self, lessons: int) -> dict[str, Any]:
        """The process ended before it had learnt the block, as for want of memory. The next one starts another."""
        self.process.join(ENDING)
        reason = f"the process that learnt ended with code {self.process.exitcode}"
        self.close()
        found = {"lessons": lessons, "committed": False, "reason": reason}
        return self.learner.report(found) | {"background_seconds": None, "submitted": self.submitted}

    def _ready(self) -> bool:
        if self.spec.schedule is not None:
            return [self.submitted, self.learner.conversations] in self.spec.schedule
        return self.pipe.poll()

    def rest(self, resting: bool) -> None:
        if self.flying is None or resting == (self.stopped is not None) or not self.process.is_alive():
            return
        os.kill(self.process.pid, signal.SIGSTOP if resting else signal.SIGCONT)
        if self.stopped is not None:
            self.rests.append((self.stopped, time.monotonic()))
        self.stopped = time.monotonic() if resting else None

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.join()
            self.process = None

    def state(self) -> dict[str, Any]:
        flying = None if self.flying is None else [vars(lesson) for lesson in self.flying]
        return {"learner": self.learner.state(), "flying": flying, "submitted": self.submitted}

    def weights(self) -> dict[str, Any]:
        return {"weights": copied(self.learner.student.weights), "rule": self.memory}

    def load_state(self, state: dict[str, Any], weights: dict[str, Any] | None) -> None:
        """A block that was being learnt is learnt again from its start."""
        self.learner.load_state(state["learner"], None)
        if weights is not None:
            put(self.learner.student.weights, weights["weights"])
            self.memory = weights["rule"]
            self.learner.student.serve()
        if state["flying"] is not None:
            conversations, self.learner.conversations = self.learner.conversations, state["submitted"]
            self._submit([Lesson(**lesson) for lesson in state["flying"]])
            self.learner.conversations = conversations


def _work(
    pipe: Any, spec: BlockSpec, student: Student, head: Tensor, memory: dict[str, Any] | None, initial: Weights
) -> None:
    """The process: one block after another, until it is ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the run that started it says when to end
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # or one that rests would outlast a killed run
    torch.set_num_threads(spec.background_threads)
    room, rule = Classroom(student, spec.teaching, lambda hidden: hidden @ head), spec.rule(student)
    if memory is not None:
        rule.load_state(memory)
    while True:
        lessons = pipe.recv()
        began = time.monotonic()  # which the process that started this one reads alike
        found = learn(rule, room, lessons, spec.guard, initial)
        ended = time.monotonic()
        pipe.send((found, copied(student.weights), rule.state(), began, ended))
