"""Learning inside a response, and between requests: any inner adapter over any outer one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class BothSpec:
    """Attributes:
    inner: an InnerAdapterSpec; ``fixed`` for an outer learner alone.
    outer: an OuterAdapterSpec.
    """

    name: str
    inner: Any
    outer: Any
