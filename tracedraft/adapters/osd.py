"""Online speculative decoding (OSD, arXiv 2310.07177): the whole draft learns where it was refused.

With ``objective=all`` it is what the OnlineSPEC repository calls OSD-EAGLE: the draft's offline loss over a block.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tracedraft.adapters.background import placed
from tracedraft.adapters.blocks import BlockLearner, BlockSpec
from tracedraft.adapters.lessons import Classroom
from tracedraft.adapters.routing import ClassifierRouter, LabelRouter, RoutedLearner, Routing
from tracedraft.adapters.steps import Optimizer, Steps
from tracedraft.adapters.transaction import Learnt, Rule, copied, put
from tracedraft.interfaces import Draft, OuterAdapter, Student, Target
from tracedraft.types import Conversation, Lesson


@dataclass(frozen=True)
class OsdSpec(BlockSpec):
    """Gradient steps on each block.

    Attributes:
        optimizer, lr, momentum, beta1, beta2, weight_decay, epochs, batch: see ``steps.Steps``.
        keep_optimizer: its state outlasts the block, as in OSD; the OnlineSPEC code loses it.
        routing: a draft for each domain: none; label, as the workload says; classifier, which learns from labels.
        router_warm_up: classifier only: conversations whose labels it learns from, and that are routed by them.
    """

    optimizer: Optimizer
    lr: float
    momentum: float
    beta1: float
    beta2: float
    weight_decay: float
    epochs: int
    batch: int | None
    keep_optimizer: bool
    routing: Routing
    router_warm_up: int

    def __post_init__(self) -> None:
        super().__post_init__()
        self.steps.check("adapter.outer")
        self._check(
            ("router_warm_up", self.router_warm_up >= 1, "at least 1"),
            ("routing", self.routing is Routing.none or not self.background, "none with background=true"),
            # Each draft counts its own conversations: a schedule of the stream's would mean others.
            (
                "routing",
                self.routing is Routing.none or (self.budget is None and self.schedule is None),
                "none with a budget or a schedule",
            ),
        )

    def check_stream(self, conversations: Sequence[Conversation], timed: bool) -> None:
        """Raises UserError where nothing would ever be learnt, of one domain too that has a draft of its own."""
        super().check_stream(conversations, timed)
        if self.routing is not Routing.none:
            for domain, count in sorted(Counter(conversation.domain for conversation in conversations).items()):
                self._check_length(count, f"domain {domain} of the stream")

    @property
    def steps(self) -> Steps:
        return Steps(
            self.optimizer, self.lr, self.momentum, self.beta1, self.beta2, self.weight_decay, self.epochs,
            self.batch, self.clip,
        )  # fmt: skip

    @property
    def copies(self) -> int:
        """The masters, those of the start and of the block before, and what the optimiser keeps."""
        return 3 + self.steps.moments

    def build(self, draft: Draft, target: Target, seed: int) -> OuterAdapter:
        first = self.student(draft)
        if self.routing is Routing.none:
            return placed(self.learner(first, target, seed), target)
        start = copied(first.weights)

        def new() -> BlockLearner:
            student = self.student(draft)
            put(student.weights, start)
            return self.learner(student, target, seed)

        label = self.routing is Routing.label
        return RoutedLearner(new, LabelRouter() if label else ClassifierRouter(self.router_warm_up))

    def rule(self, student: Student) -> Rule:
        return StepRule(self.steps, student, self.keep_optimizer)


class StepRule(Rule):
    """One optimiser over the student's weights."""

    def __init__(self, steps: Steps, student: Student, keep_optimizer: bool):
        self.steps, self.student, self.keep = steps, student, keep_optimizer
        self.optimizer = steps.build(student.weights)

    def learn(self, room: Classroom, lessons: Sequence[Lesson]) -> Learnt:
        if not self.keep:
            self.optimizer = self.steps.build(self.student.weights)
        # The first step of a whole block measures the same on its way.
        loss = None if self.steps.batch is None else room.loss(lessons)
        losses, norms = self.steps.take(self.optimizer, room, lessons)
        if self.steps.batch is None and losses:
            loss = losses[0]
        if any(map(math.isnan, losses)):
            loss = math.nan
        return Learnt(loss, len(losses), {"grad_norms": norms})

    def refuse(self, kept: dict[str, Any]) -> None:
        self.load_state(kept)

    def state(self) -> dict[str, Any]:
        return copy.deepcopy(self.optimizer.state_dict())

    def load_state(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state)
