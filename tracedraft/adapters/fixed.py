"""The control: a draft that never changes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tracedraft.interfaces import InnerAdapter, InnerAdapterSpec
from tracedraft.types import Evidence, OutputHead, Update


@dataclass(frozen=True)
class FixedSpec(InnerAdapterSpec):
    name: str

    def build(self, head: OutputHead | None, seed: int) -> FixedAdapter:
        """Works with any draft, one without a head included."""
        return FixedAdapter()


class FixedAdapter(InnerAdapter):
    """Does nothing, and never asks for a teacher, so that an arm with it costs what plain drafting costs."""

    def begin_conversation(self) -> None:
        pass

    def begin_response(self) -> None:
        pass

    def observe(self, evidence: Evidence) -> None:
        pass

    def maybe_update(self, round: int) -> Update | None:
        return None

    def end_response(self) -> None:
        pass

    def state(self) -> None:
        return None

    def load_state(self, state: dict[str, Any]) -> None:
        raise ValueError("a fixed draft has no state")

    def drift(self) -> dict[str, float]:
        """No tensor is trained."""
        return {}

    def anchor_lambda(self) -> dict[str, float]:
        return {}
