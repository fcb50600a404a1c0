"""Lessons on what the draft itself would say, at a pass of the target (OSD's student tokens, arXiv 2310.07177).

Acceptance fails where the draft has left the target's text; here it is shown how to go on from its own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

import torch
from torch import Tensor

from tracedraft.interfaces import Student, Target
from tracedraft.types import Lesson

CHUNK = 64  # tokens of a pass of the target


class Tokens(Enum):
    teacher = "teacher"
    student = "student"
    mixed = "mixed"


@dataclass(frozen=True)
class OwnTokens:
    """Rewrites lessons.

    Attributes:
        tokens: student: every turn; mixed: every other one, at random.
        length: tokens that the draft says after one of the places where it was refused, sampled at temperature 1.
        draws: which turn and place, and what is said.
    """

    student: Student
    target: Target
    tokens: Tokens
    length: int
    draws: torch.Generator

    @torch.no_grad()
    def rewrite(self, lessons: list[Lesson]) -> list[Lesson]:
        """Turns without a refusal stay as they are."""
        return [self._rewritten(lesson) if self._chosen() and len(lesson.rejected) else lesson for lesson in lessons]

    def _chosen(self) -> bool:
        if self.tokens is Tokens.mixed:
            return bool(torch.rand((), generator=self.draws) < 0.5)
        return self.tokens is Tokens.student

    def _rewritten(self, lesson: Lesson) -> Lesson:
        """The turn up to a refusal and then the draft's own words; each of its predictions is to be learnt."""
        at = int(torch.randint(len(lesson.rejected), (), generator=self.draws))
        slot = int(lesson.rejected[at, 0])
        true = lesson.tokens[: slot + 2]
        # By the student, since the served head holds what an inner adapter learnt.
        said = self.student.say(lesson, slot, self.length, self.draws)
        text = torch.cat((true, said.to(true.device)))
        seen = self._seen(text)
        steps = torch.arange(self.length, device=true.device)
        rejected = torch.stack((torch.full_like(steps, slot), steps), 1)
        return replace(lesson, tokens=text, taps=seen[0], hidden=seen[1], rejected=rejected)

    def _seen(self, text: Tensor) -> tuple[Tensor, Tensor]:
        """Taps and hidden states [n-1, …] of the target along ``text`` [n]."""
        self.target.begin((len(text) // CHUNK + 2) * CHUNK, CHUNK, CHUNK)
        passed = self.target.prefill(text[:-1].tolist())
        return passed.taps.clone(), passed.hidden.clone()
