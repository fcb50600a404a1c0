"""A round's shape by what it is worth: draft on while a further level is expected to pay for its time.

Rounds are a renewal process: a policy yields E[tokens] / E[seconds] of a round, and the policy with the best such
rate r drafts a further level exactly where the tokens that it is expected to add exceed r times its seconds
(fractional programming, Dinkelbach 1967). Here r and the shares of levels that survive are running counts, the
draft's own log-probabilities say how likely the paths at hand still stand (as EAGLE-2 found, arXiv 2406.16858), and
seconds are those of a plan that was measured once, not the clock's. So with the same plan and the same tokens the
decisions are the same.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import Any

import torch
from torch import Tensor

from tracedraft.decode import DecodeSpec, Proposer
from tracedraft.errors import UserError
from tracedraft.interfaces import Draft, More, Pick
from tracedraft.types import Proposal, Verdict

PRIOR = 8.0  # rounds that the plan counts for in a response
STEADY = 64.0  # the same where ways are compared: rates differ by less than a few rounds can tell
GOING = 0.25  # of a probability: what paths that went on are taken to have had in those


@dataclass(frozen=True)
class Way:
    """What it costs and brings to draft with so many beams: 1, a chain; more, a tree that fills the pass.

    Attributes:
        seconds: of a round, by levels drafted, up to as many as a pass can verify. A level costs more than its own
            products: what it reads of the draft takes the place of the target's weights in the processor's cache.
        survival: by depth, how often the target's token was drafted there after it was one level before.
    """

    beams: int
    seconds: list[float]
    survival: list[float]


@dataclass(frozen=True)
class Plan:
    """What a round costs and brings on one machine; see ``calibrate``.

    Attributes:
        width: tokens of every verification pass, chosen for its rate.
    """

    width: int
    ways: list[Way]

    @classmethod
    def read(cls, data: dict[str, Any]) -> Plan:
        """From a record.

        Raises:
            UserError: it is not a plan.
        """
        try:
            made = cls(**{**data, "ways": [Way(**way) for way in data["ways"]]})
            if not all(0 < share <= 1 for way in made.ways for share in way.survival):
                raise ValueError("survival: expected shares above 0, at most 1")
            if not all(seconds > 0 for way in made.ways for seconds in way.seconds):
                raise ValueError("seconds: expected above 0")
        except (TypeError, KeyError, ValueError) as error:
            raise UserError(
                f"decode.plan: not a plan ({error}); give provenance.plan of a summary, or null"
            ) from error
        return made

    def best(self, way: Way) -> tuple[float, float]:
        """Tokens and seconds of a round that always drafts as deep as has the best rate."""
        tokens = [1 + sum(accumulate(way.survival[:levels], mul)) for levels in range(len(way.survival) + 1)]
        return max(zip(tokens[1:], way.seconds, strict=True), key=lambda of: of[0] / of[1])

    @property
    def rate(self) -> float:
        """Tokens a second of its best way."""
        return max(tokens / seconds for tokens, seconds in map(self.best, self.ways))


@dataclass(frozen=True)
class AutoSpec(DecodeSpec):
    """Chains and trees as they pay, in passes of one width, which the first look at the machine chooses.

    Attributes:
        most_levels: drafted tokens on the longest path.
        beams: each way to draft: 1, a chain; more, a tree of so many beams that fills the pass.
        widths: of passes, to choose from; multiples of 8.
        confident: ask the draft's probabilities whether to go on, which reads from the device once a level; else
            the running shares alone decide.
        probe_every: rounds after which the way that seems worse is tried again.
        plan: what to go by, a ``Plan`` as records hold it; None: measured at start, or read from ``cache`` where that
            was done.
        cache: folder of measured plans.
    """

    most_levels: int
    beams: list[int]
    widths: list[int]
    confident: bool
    probe_every: int
    plan: dict[str, Any] | None
    cache: str

    def __post_init__(self) -> None:
        super().__post_init__()
        self._exact_only()
        self._at_least_one("most_levels")
        if not self.beams or min(self.beams) < 1 or len(set(self.beams)) < len(self.beams):
            raise UserError(f"decode.beams={list(self.beams)}: expected different numbers from 1, as [1,6]")
        if not self.widths or any(width < 8 or width % 8 for width in self.widths):
            raise UserError(f"decode.widths={list(self.widths)}: expected multiples of 8, as [8,16]")
        if self.probe_every < 2:
            raise UserError(f"decode.probe_every={self.probe_every}: expected at least 2")
        if self.plan is not None:
            self._fits(Plan.read(self.plan))

    def levels(self, width: int) -> int:
        """Most that passes of that width can verify: each takes a row, and the root one."""
        return min(self.most_levels, width - 1)

    def _fits(self, plan: Plan) -> None:
        made = {"beams": [way.beams for way in plan.ways] == list(self.beams), "widths": plan.width in self.widths}
        most = self.levels(plan.width)
        made["most_levels"] = all(len(way.survival) == len(way.seconds) == most for way in plan.ways)
        if wrong := [key for key, fits in made.items() if not fits]:
            value = getattr(self, wrong[0])
            raise UserError(f"decode.plan: not made for decode.{wrong[0]}={value}; give null to measure anew")

    @property
    def rows(self) -> int:
        return self.plan["width"] if self.plan else max(self.widths)

    @property
    def depth(self) -> int:
        return self.most_levels

    @property
    def loose(self) -> int:
        return (self.most_levels - 1) * max(self.beams)

    def proposer(self) -> Proposer:
        assert self.plan is not None, "measured before anything is served"
        return Auto(self, Plan.read(self.plan))


class _Shown:
    """What the rounds of one way have shown, beginning with what the plan says of it."""

    def __init__(self, plan: Plan, way: Way):
        self.way, depth = way, len(way.survival)
        tokens, seconds = plan.best(way)
        self.planned, self.tokens, self.seconds = (tokens, seconds), 0.0, 0.0
        self.tested, self.survived = [0.0] * depth, [0.0] * depth
        # In probabilities that the draft stated: of all that it drafted, and what came of it; by level, of the paths
        # that went on to it, and what it added to the whole.
        self.stated = self.stood = PRIOR * (tokens - 1)
        self.going, self.brought = [0.0] * depth, [0.0] * depth

    def rate(self, prior: float) -> float:
        """Tokens a second, the plan counted as so many rounds."""
        tokens, seconds = self.planned
        return (self.tokens + prior * tokens) / (self.seconds + prior * seconds)

    def gain(self, level: int, going: float) -> float:
        """Tokens that a level after ``level`` is expected to add, if the draft states ``going`` of its paths."""
        added = self._shares(self.brought, self.going, PRIOR * GOING)[level]
        return self.stood / self.stated * added * going

    def blind_gain(self, level: int) -> float:
        """The same without asking the draft."""
        return math.prod(self._shares(self.survived, self.tested, PRIOR)[: level + 1])

    def _shares(self, parts: list[float], wholes: list[float], prior: float) -> list[float]:
        """By level. Where little was seen so far, the plan's, corrected as the others turned out to need it."""
        expected = sum(whole * share for whole, share in zip(wholes, self.way.survival, strict=True))
        right = (prior + sum(parts)) / (prior + expected)
        seen = zip(parts, wholes, self.way.survival, strict=True)
        return [(part + prior * min(right * share, 1.0)) / (whole + prior) for part, whole, share in seen]

    def learn(self, accepted: int, levels: int, seconds: float) -> None:
        self.tokens += accepted + 1
        self.seconds += seconds
        for depth in range(min(accepted + 1, levels)):
            self.tested[depth] += 1
            self.survived[depth] += depth < accepted


class Auto(Proposer):
    """Owns the statistics of one response, so that arms and conversations share none."""

    def __init__(self, spec: AutoSpec, plan: Plan):
        self.spec, self.plan, self.shapes = spec, plan, []
        self.ways = [_Shown(plan, way) for way in plan.ways]

    def propose(self, draft: Draft, pick: Pick | None) -> Proposal:
        self.rate = max(shown.rate(PRIOR) for shown in self.ways)
        self.shown, self.levels = self._choose(), 1
        self.masses: list[tuple[float, float]] = []
        self.most = self.spec.levels(self.plan.width)
        if self.spec.confident:
            return self._drafted(draft, self.most, self._more)
        while self.levels < self.most and self._pays(self.levels, self.shown.blind_gain(self.levels)):
            self.levels += 1
        return self._drafted(draft, self.levels, None)  # asked for nothing on the way, it can be captured

    def _drafted(self, draft: Draft, levels: int, more: More | None) -> Proposal:
        beams = self.shown.way.beams
        if beams == 1:
            return draft.propose(levels, None, more)
        return draft.propose_tree(self.plan.width, levels, beams, more)

    def _pays(self, level: int, gain: float) -> bool:
        """Whether so many tokens are worth the time of a level after ``level``."""
        before, after = self.shown.way.seconds[level - 1 : level + 1]
        return gain >= self.rate * (after - before)

    def learn(self, verdict: Verdict) -> None:
        assert self.shapes is not None
        shown = self.shown
        self.shapes.append([shown.way.beams, self.levels])
        shown.learn(verdict.accepted, self.levels, shown.way.seconds[self.levels - 1])
        if self.masses:
            shown.stated += self.masses[-1][0]
            shown.stood += verdict.accepted

    def _choose(self) -> _Shown:
        """The way of the best rate; now and then, the one longest untried."""
        assert self.shapes is not None
        if len(self.shapes) % self.spec.probe_every < self.spec.probe_every - 1:
            return max(self.ways, key=lambda shown: shown.rate(STEADY))
        last = {beams: number for number, (beams, _) in enumerate(self.shapes)}
        return min(self.ways, key=lambda shown: last.get(shown.way.beams, -1))

    def _more(self, level: int, kept: Tensor, going: Tensor) -> bool:
        shown = self.shown
        whole, going_on = torch.stack((kept.exp().sum(), going.exp().sum())).tolist()
        before, went = self.masses[-1] if self.masses else (0.0, 1.0)
        shown.brought[level - 1] += whole - before
        shown.going[level - 1] += went
        self.masses.append((whole, going_on))
        pays = level < self.most and self._pays(level, shown.gain(level, going_on))
        self.levels += pays
        return pays
