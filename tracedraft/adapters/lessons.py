"""What outer learners learn from: which predictions of answered turns, and what the target says of them.

Shapes: ``M`` consumed tokens of a turn, ``L`` of them its prompt, ``n`` predictions, ``D`` draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from tracedraft.adapters.objective import teacher_rows
from tracedraft.interfaces import Objective, Student
from tracedraft.models.losses import cross_entropy, forward_kl, jsd, reverse_kl
from tracedraft.types import Lesson, Predictions

ROWS = 256  # of the target's logits at a time


class Taught(Enum):
    rejected = "rejected"
    all = "all"


class Fault(Enum):
    """Of a negative control, which must not help."""

    none = "none"
    wrong_shift = "wrong_shift"
    shuffled_teacher = "shuffled_teacher"


class Loss(Enum):
    forward_kl = "forward_kl"
    reverse_kl = "reverse_kl"
    jsd = "jsd"
    label = "label"


OBJECTIVES: dict[Loss, Objective] = {
    Loss.forward_kl: forward_kl,
    Loss.reverse_kl: reverse_kl,
    Loss.jsd: jsd,
    Loss.label: cross_entropy,  # of the token itself
}


@dataclass(frozen=True)
class Teaching:
    """What is taught.

    Attributes:
        objective: predictions that verification refused, or all of the answer.
        loss: label: the target's token alone.
        unroll, decay: objective=all only: chain steps from each slot, and the weight of each after the one before.
        temperature: of the target's distribution.
        fault: teachers of the next position, or of random other ones of the turn.
    """

    objective: Taught
    loss: Loss
    unroll: int
    decay: float
    temperature: float
    fault: Fault = Fault.none

    @property
    def shift(self) -> int:
        """Positions that teachers are taken too late."""
        return int(self.fault is Fault.wrong_shift)


def asked(lesson: Lesson, teaching: Teaching) -> tuple[Tensor, Tensor]:
    """(slots, steps) [n] of the predictions to learn.

    The prediction at step k from slot i has the target's distribution at position i+k+1 for its teacher.
    """
    if teaching.objective is Taught.rejected:
        slots, steps = lesson.rejected.unbind(1)
    else:
        # From the slot whose prediction is the answer's second token: the first one is the prefill's.
        grid = torch.cartesian_prod(
            torch.arange(lesson.prompt - 1, len(lesson.hidden) - 1), torch.arange(teaching.unroll)
        )
        slots, steps = grid.to(lesson.tokens.device).unbind(1)
    there = slots + steps + 1 + teaching.shift < len(lesson.hidden)
    return slots[there], steps[there]


def predictions(lesson: Lesson, teaching: Teaching, logits: Callable[[Tensor], Tensor], vocab: Tensor) -> Predictions:
    """What of a lesson is to learn. Weights are not normalised: 1 of each refusal, decay^k with objective=all, and
    nothing of what can't be taught: where the teacher's first choice is none of the draft's tokens, or where
    fault=shuffled_teacher finds no other teacher in the turn.

    Args:
        logits: of the target, [n, V] of final hidden states [n, H].
    """
    slots, steps = asked(lesson, teaching)
    positions, rows = (slots + steps + 1 + teaching.shift).unique(return_inverse=True)
    parts = [_taught(lesson, some, teaching, logits, vocab) for some in positions.split(ROWS)]
    teacher, carries = (torch.cat(part) for part in zip(*parts, strict=True))
    if teaching.fault is Fault.shuffled_teacher:
        carries = carries & (len(positions) > 1)
        rows = _others(len(positions), seed=len(lesson.tokens)).to(rows.device)[rows]
    each = torch.ones_like(steps) if teaching.objective is Taught.rejected else teaching.decay ** steps.float()
    return Predictions(slots, steps, each * carries[rows], teacher, rows)


def _others(count: int, seed: int) -> Tensor:
    """[count] a random permutation of one cycle: none stays where it is, but a single one."""
    cycle = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    return torch.empty_like(cycle).index_copy(0, cycle, cycle.roll(1))


def _taught(
    lesson: Lesson, positions: Tensor, teaching: Teaching, logits: Callable[[Tensor], Tensor], vocab: Tensor
) -> tuple[Tensor, Tensor]:
    """Teacher [m, D] at ``positions`` [m], and whether it carries loss [m]."""
    if teaching.loss is Loss.label:
        tokens = lesson.tokens[positions + 1]
        at = torch.searchsorted(vocab, tokens).clamp_max(len(vocab) - 1)
        return torch.nn.functional.one_hot(at, len(vocab)).to(lesson.hidden.dtype), vocab[at] == tokens
    p, _, carries, _ = teacher_rows(logits(lesson.hidden[positions]), vocab, teaching.temperature)
    return p.to(lesson.hidden.dtype), carries


class Classroom:
    """A student and what it is taught: losses and gradients over lessons, as means over their predictions."""

    def __init__(self, student: Student, teaching: Teaching, logits: Callable[[Tensor], Tensor]):
        self.student, self.teaching, self.logits = student, teaching, logits

    def count(self, lessons: Sequence[Lesson]) -> int:
        """Predictions to learn."""
        return sum(len(asked(lesson, self.teaching)[0]) for lesson in lessons)

    def gradient(self, lessons: Sequence[Lesson]) -> float | None:
        """Fill the gradients of the student's weights. Returns the mean loss; None where nothing can be learnt."""
        for weight in self.student.weights.values():
            weight.grad = None
        total, mass = self._sum(lessons, lambda loss: loss.backward())
        for weight in self.student.weights.values():
            if weight.grad is not None:
                weight.grad /= mass
        return total / mass if mass else None

    @torch.no_grad()
    def loss(self, lessons: Sequence[Lesson]) -> float | None:
        """The mean loss at the student's weights as they are; None where nothing can be learnt."""
        total, mass = self._sum(lessons, lambda loss: None)
        return total / mass if mass else None

    def _sum(self, lessons: Sequence[Lesson], use: Callable[[Tensor], object]) -> tuple[float, float]:
        """Weighted losses, and weights, summed lesson by lesson, so that memory holds one at a time."""
        total = mass = 0.0
        for lesson in lessons:
            if not self.count([lesson]):
                continue
            with torch.no_grad():
                wanted = predictions(lesson, self.teaching, self.logits, self.student.vocab)
            weight = float(wanted.weights.sum())
            if not weight:
                continue
            loss = self.student.loss(lesson, wanted, OBJECTIVES[self.teaching.loss])
            use(loss)
            total += loss.item()
            mass += weight
        return total, mass
