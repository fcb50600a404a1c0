"""Several step sizes at once (OnlineSPEC's Ens, arXiv 2603.12617): what is served is the average of their weights.

    served = Σ_i p_i w_i
    hedge: all start each block from what is served; p = softmax(-loss_i / τ), over the block after learning from it
    ens:   each goes on from its own weights; p_i ∝ exp(-ε Σ_s loss_i(s)), over each block before learning from it

Losses are means over predictions, so τ and ε carry over between drafts. What is recorded for regret is each base
learner's loss over a block before it learns from it, at the weights that the block before left it with: of ens one
step size all along, of hedge one step size for one block from what was served.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from tracedraft.adapters.background import placed
from tracedraft.adapters.blocks import BlockSpec
from tracedraft.adapters.lessons import Classroom
from tracedraft.adapters.steps import Optimizer, Steps
from tracedraft.adapters.transaction import Learnt, Rule, Weights, copied, put
from tracedraft.interfaces import Draft, OuterAdapter, Student, Target
from tracedraft.types import Lesson


class Meta(Enum):
    hedge = "hedge"
    ens = "ens"


class Combine(Enum):
    average = "average"
    best = "best"


@dataclass(frozen=True)
class EnsembleSpec(BlockSpec):
    """A base learner for each step size.

    Attributes:
        lrs: their step sizes.
        meta: hedge or ens, as above.
        tau, epsilon: of hedge's softmax, and of ens's weights.
        combine: average: of all by p; best: the likeliest alone.
        optimizer, momentum, beta1, beta2, weight_decay, epochs, batch: of every base learner; see ``steps.Steps``.
    """

    lrs: list[float]
    meta: Meta
    tau: float
    epsilon: float
    combine: Combine
    optimizer: Optimizer
    momentum: float
    beta1: float
    beta2: float
    weight_decay: float
    epochs: int
    batch: int | None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check(
            ("lrs", len(self.lrs) >= 2, "two step sizes or more; adapter=osd learns with one"),
            ("lrs", len(set(self.lrs)) == len(self.lrs), "different step sizes"),
            ("tau", self.tau > 0, "above 0"),
            ("epsilon", self.epsilon > 0, "above 0"),
        )
        for lr in self.lrs:
            self.steps(lr).check("adapter.outer")

    def steps(self, lr: float) -> Steps:
        return Steps(
            self.optimizer, lr, self.momentum, self.beta1, self.beta2, self.weight_decay, self.epochs, self.batch,
            self.clip,
        )  # fmt: skip

    @property
    def copies(self) -> int:
        """The masters, those of the start and of the block before; and twice, for a roll-back, each base learner."""
        return 3 + 2 * len(self.lrs) * (1 + self.steps(self.lrs[0]).moments)

    def build(self, draft: Draft, target: Target, seed: int) -> OuterAdapter:
        return placed(self.learner(self.student(draft), target, seed), target)

    def rule(self, student: Student) -> Rule:
        return EnsembleRule(self, student)


class EnsembleRule(Rule):
    """The student's weights are lent to one base learner after another, and hold what is served at the end."""

    def __init__(self, spec: EnsembleSpec, student: Student):
        self.spec, self.student = spec, student
        self.base = [copied(student.weights) for _ in spec.lrs]
        self.optimizers = [spec.steps(lr).build(student.weights) for lr in spec.lrs]
        self.cumulative = [0.0] * len(spec.lrs)

    def learn(self, room: Classroom, lessons: Sequence[Lesson]) -> Learnt:
        served, loss = copied(self.student.weights), room.loss(lessons)
        if loss is None or math.isnan(loss):
            return Learnt(loss, 0, {})
        before, after, steps = [], [], 0
        for i, lr in enumerate(self.spec.lrs):
            put(self.student.weights, self.base[i])
            before.append(room.loss(lessons))
            if self.spec.meta is Meta.hedge:
                put(self.student.weights, served)
            losses, _ = self.spec.steps(lr).take(self.optimizers[i], room, lessons)
            steps += len(losses)
            self.base[i] = copied(self.student.weights)
            if self.spec.meta is Meta.hedge:
                after.append(room.loss(lessons))
        self.cumulative = [total + each for total, each in zip(self.cumulative, before, strict=True)]
        p = self._weigh(after)
        put(self.student.weights, self._combined(p))
        totals = [total if math.isfinite(total) else math.inf for total in self.cumulative]
        best = self.spec.lrs[totals.index(min(totals))]
        seen = {"lrs": list(self.spec.lrs), "p": p, "losses": before, "after": after, "best_lr_so_far": best}
        return Learnt(loss, steps, {"learners": seen})

    def refuse(self, kept: dict[str, Any]) -> None:
        """What was measured stands, and ens's learners go on, or one that spoils the average would keep its share.
        Hedge's start anew from what is served, and their optimisers with them."""
        if self.spec.meta is Meta.hedge:
            self._restore(kept["optimizers"])

    def _weigh(self, after: list[float]) -> list[float]:
        """p of each base learner; one whose weights broke gets none."""
        if self.spec.meta is Meta.hedge:
            scores = [-loss / self.spec.tau for loss in after]
        else:
            scores = [-self.spec.epsilon * total for total in self.cumulative]
        whole = [all(bool(w.isfinite().all()) for w in base.values()) for base in self.base]
        scores = [
            score if ok and math.isfinite(score) else -math.inf for score, ok in zip(scores, whole, strict=True)
        ]
        if max(scores) == -math.inf:
            return [math.nan] * len(scores)
        return torch.tensor(scores, dtype=torch.float64).softmax(0).tolist()

    def _combined(self, p: list[float]) -> Weights:
        if self.spec.combine is Combine.best:
            p = [float(i == p.index(max(p))) for i in range(len(p))]
        used = [(share, base) for share, base in zip(p, self.base, strict=True) if share]
        return {name: sum((share * base[name] for share, base in used), torch.zeros(())) for name in self.base[0]}

    def state(self) -> dict[str, Any]:
        return {
            "base": [copied(base) for base in self.base],
            "optimizers": [copy.deepcopy(optimizer.state_dict()) for optimizer in self.optimizers],
            "cumulative": list(self.cumulative),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        self.base = [copied(base) for base in state["base"]]
        self._restore(state["optimizers"])
        self.cumulative = list(state["cumulative"])

    def _restore(self, states: list[dict[str, Any]]) -> None:
        for optimizer, state in zip(self.optimizers, states, strict=True):
            optimizer.load_state_dict(state)
