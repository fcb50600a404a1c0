"""The arms of a run: the draft that never changes, and the one that learns inside requests, between them, or both."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from tracedraft import records
from tracedraft.adapters.both import BothSpec
from tracedraft.adapters.fixed import FixedSpec
from tracedraft.errors import UserError
from tracedraft.interfaces import Draft, InnerAdapter, InnerAdapterSpec, OuterAdapter
from tracedraft.target import Served
from tracedraft.types import Conversation


@dataclass
class Arm:
    """One (adapters, draft state) under measurement. Arms share the target and nothing else.

    Attributes:
        inner: what ``adapter`` is built anew from whenever ``outer`` brings another draft into service.
    """

    name: str
    draft: Draft
    inner: InnerAdapterSpec
    adapter: InnerAdapter
    outer: OuterAdapter | None = None

    def rebuild(self, seed: int) -> None:
        """On the draft that is served now: what was learnt on the one before does not fit it."""
        self.adapter = self.inner.build(self.draft.head, seed)

    def begin_conversation(self, conversation: Conversation, seed: int) -> None:
        if self.outer and self.outer.begin_conversation(conversation):
            self.rebuild(seed)
        self.adapter.begin_conversation()

    def rest(self, resting: bool) -> None:
        if self.outer:
            self.outer.rest(resting)

    def close(self) -> None:
        if self.outer:
            self.outer.close()

    def end_conversation(self, seconds: float | None, seed: int) -> dict[str, Any] | None:
        """Learn between requests, where that is due; what the record says of it.

        What learns in the background does so while its own arm serves, and at no other time.
        """
        self.rest(False)
        learnt = self.outer.end_conversation(seconds) if self.outer else None
        self.rest(True)
        if learnt and learnt["served"]:
            self.rebuild(seed)
        return learnt

    def state(self) -> dict[str, Any] | None:
        """What must outlast a restart, but for an outer learner's weights."""
        inner = self.adapter.state()
        return {"inner": inner, "outer": self.outer.state()} if self.outer else inner

    def load_state(self, state: dict[str, Any], weights: dict[str, Any] | None, seed: int) -> None:
        if self.outer:
            self.outer.load_state(state["outer"], weights)
            self.rest(True)
            self.rebuild(seed)
            state = state["inner"]
        if state is not None:
            self.adapter.load_state(state)


def build_arms(specs: dict[str, Any], served: Served, seed: int) -> tuple[list[Arm], dict[str, str | None]]:
    fixed, both = FixedSpec("fixed"), specs["adapter"]
    inner, outer = (both.inner, both.outer) if isinstance(both, BothSpec) else (both, None)
    arms, origin = [], {}
    for name, spec, learner in (("fixed", fixed, None), ("adapted", inner, outer)):
        draft, origin = specs["draft"].build(served.target)
        between = learner.build(draft, served.target, seed) if learner else None
        arms.append(Arm(name, draft, spec, spec.build(draft.head, seed), between))
    return arms, origin


def keep(arms: list[Arm], run: records.RunDir, count: int, learnt: dict[str, Any] | None) -> None:
    """Put on disk what the arms know after ``count`` conversations, before the last one's record is.

    Args:
        learnt: what an outer learner did after it.
    """
    for arm in arms:
        # What a block that was rolled back left in the learner must outlast a restart as well.
        if arm.outer and learnt and learnt["block"] is not None:
            run.keep_draft(count, partial(torch.save, arm.outer.weights()))
        if state := arm.state():
            run.keep_learner(count, partial(torch.save, state))


def resume(arms: list[Arm], run: records.RunDir, seed: int) -> None:
    """Give the learner back what it knew after the last record.

    Raises:
        UserError: its state is gone, so that the stream can't go on.
    """
    for arm in arms:
        if run.done and arm.state():
            file, draft = run.learner(), run.draft()
            if file is None:
                raise UserError(f"{run.path}: the learner's state after conversation {len(run.done)} is missing")
            weights = torch.load(draft, weights_only=True) if draft else None
            arm.load_state(torch.load(file, weights_only=True), weights, seed)
