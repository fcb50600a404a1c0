"""Negative controls: learners that are told something wrong, or nothing any more.

A gain that a control shares comes from something else than learning what the target says: from sharpening
the draft in general, from its repetitions, or from a fault of the measurement.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from tracedraft.errors import UserError
from tracedraft.interfaces import InnerAdapter, InnerAdapterSpec
from tracedraft.types import Evidence, OutputHead, Source, Update


class Control(Enum):
    wrong_shift = "wrong_shift"
    shuffled_teacher = "shuffled_teacher"
    frozen = "frozen"


@dataclass(frozen=True)
class ControlSpec(InnerAdapterSpec):
    """A learner and what is wrong with it.

    Attributes:
        control: "wrong_shift", each position is taught what follows the next one; "shuffled_teacher", what
            follows a random other one of the positions seen with it; "frozen", learning ends for good.
        after: "frozen" only: conversations after which it ends.
        pool: "shuffled_teacher" only: earlier positions of the response to choose from.
        inner: the learner.
    """

    name: str
    control: Control
    after: int
    pool: int
    inner: Any  # an InnerAdapterSpec; OmegaConf merges no frozen spec into a typed field

    def __post_init__(self) -> None:
        for key, least in (("after", 0), ("pool", 2)):
            if getattr(self, key) < least:
                raise UserError(f"adapter.{key}={getattr(self, key)}: expected at least {least}")

    def build(self, head: OutputHead | None, seed: int) -> ControlAdapter:
        """Raises UserError if the draft has no head."""
        return ControlAdapter(self, self.inner.build(head, seed), seed)


class ControlAdapter(InnerAdapter):
    """Wraps a learner; what it passes on differs, nothing else does."""

    def __init__(self, spec: ControlSpec, inner: InnerAdapter, seed: int):
        self.spec, self.inner = spec, inner
        self.draws = torch.Generator().manual_seed(seed)
        self.conversations = 0
        self._last: dict[Source, Tensor] = {}
        self._pool: dict[Source, Tensor] = {}

    @property
    def learning(self) -> bool:
        return self.spec.control is not Control.frozen or self.conversations <= self.spec.after

    def begin_conversation(self) -> None:
        self.conversations += 1
        self.inner.begin_conversation()

    def begin_response(self) -> None:
        self._last, self._pool = {}, {}
        self.inner.begin_response()

    def observe(self, evidence: Evidence) -> None:
        if not self.learning:
            return
        if self.spec.control is Control.wrong_shift:
            evidence = self._shifted(evidence)
        elif self.spec.control is Control.shuffled_teacher:
            evidence = self._shuffled(evidence)
        if len(evidence.features):
            self.inner.observe(evidence)

    def _shifted(self, evidence: Evidence) -> Evidence:
        """Features of the position before, of the round before where need be; the first has none and is left out."""
        last = self._last.get(evidence.source)
        self._last[evidence.source] = evidence.features[-1:]
        if last is None:
            return Evidence(evidence.source, evidence.features[:-1], lambda rows: evidence.teacher(rows + 1))
        return Evidence(evidence.source, torch.cat((last, evidence.features[:-1])), evidence.teacher)

    def _shuffled(self, evidence: Evidence) -> Evidence:
        """Teachers of random other positions: of the same prompt, or of the response's last ones up to now."""
        count = len(evidence.features)
        if evidence.source == "prompt":
            order = torch.randperm(count, generator=self.draws)
            other = torch.empty_like(order)
            other[order] = order.roll(1)
            return self._with(evidence, count > 1, lambda rows: evidence.teacher(other.to(rows)[rows]))
        fresh = evidence.teacher(torch.arange(count, device=evidence.features.device))
        pool = torch.cat((self._pool[evidence.source], fresh)) if evidence.source in self._pool else fresh
        self._pool[evidence.source] = pool[-self.spec.pool :]
        own = torch.arange(len(pool) - count, len(pool))
        drawn = (own + torch.randint(1, max(len(pool), 2), (count,), generator=self.draws)) % len(pool)
        return self._with(evidence, len(pool) > 1, pool[drawn.to(pool.device)].__getitem__)

    @staticmethod
    def _with(evidence: Evidence, several: bool, teacher: Callable[[Tensor], Tensor]) -> Evidence:
        """Of a lone position nothing: there is no teacher but its own."""
        return Evidence(evidence.source, evidence.features if several else evidence.features[:0], teacher)

    def maybe_update(self, round: int) -> Update | None:
        return self.inner.maybe_update(round) if self.learning else None

    def end_response(self) -> None:
        if self.learning:
            self.inner.end_response()

    def state(self) -> dict[str, Any] | None:
        inner = self.inner.state()
        if inner is None and self.spec.control is Control.wrong_shift:
            return None
        return {"inner": inner, "draws": self.draws.get_state(), "conversations": self.conversations}

    def load_state(self, state: dict[str, Any]) -> None:
        if state["inner"] is not None:
            self.inner.load_state(state["inner"])
        self.draws.set_state(state["draws"])
        self.conversations = state["conversations"]

    def drift(self) -> dict[str, float]:
        return self.inner.drift()

    def anchor_lambda(self) -> dict[str, float]:
        return self.inner.anchor_lambda()
