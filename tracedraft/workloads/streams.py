"""Streams: several workloads one after the other, in turn, or fading into each other; or one, again and again."""

from __future__ import annotations

import hashlib
import json
import random
from abc import abstractmethod
from collections import Counter
from dataclasses import asdict, dataclass, replace
from itertools import cycle, pairwise
from typing import Any

from tracedraft.errors import UserError
from tracedraft.interfaces import WorkloadSpec
from tracedraft.types import Conversation


@dataclass(frozen=True)
class StreamSpec(WorkloadSpec):
    """Conversations drawn from other workloads. A record's ``index`` is its place in the stream.

    Attributes:
        sources: workloads by names of your choice, whose order counts.
        repeat: a source that runs out begins again; ``occurrence`` then tells the showings of a conversation apart,
            and so does the sampling noise. Otherwise no conversation comes twice.
        limit: the stream ends after so many conversations; None: where it ends by itself.
        seed: of the mixture, and of the order of each source that says no other.
        split: of each source that says no other.
        note: a caveat about the stream, shown with its provenance.
    """

    name: str
    sources: dict[str, Any]  # of WorkloadSpec; OmegaConf merges no frozen spec into a typed field
    repeat: bool
    limit: int | None
    seed: int
    split: str
    note: str

    def __post_init__(self) -> None:
        """Raises UserError, so that a bad key is named when the spec is built, before any prompt is read."""
        if not self.sources:
            raise UserError("workload.sources={}: expected one or more, as `gsm8k@sources.a` in the YAML's defaults")
        for name, source in self.sources.items():
            if not isinstance(source, WorkloadSpec):
                raise UserError(f"workload.sources.{name}: expected a workload, as `gsm8k@sources.{name}` makes one")
        if self.limit is not None and self.limit < 1:
            raise UserError(f"workload.limit={self.limit}: expected 1 or more, or null for the whole stream")

    @abstractmethod
    def order(self, sizes: dict[str, int]) -> list[str]:
        """The source of each place of the stream, given how many conversations each has."""

    @abstractmethod
    def switches(self, order: list[str]) -> list[int] | None:
        """The places where the stream leaves a source for the next; None where it has no such place."""

    def load(self) -> tuple[list[Conversation], dict[str, Any]]:
        """The conversations in order, and their provenance.

        Returns:
            The conversations; ``path`` (names of the sources), ``sha256`` of all that is served, ``switches``, and
            under ``sources`` the provenance of each.

        Raises:
            UserError: a source can't be had, or has too few conversations for a stream without ``repeat``.
        """
        loaded = {name: source.load() for name, source in self.sources.items()}
        order = self.order({name: len(conversations) for name, (conversations, _) in loaded.items()})[: self.limit]
        if not self.repeat:
            for name, wanted in Counter(order).items():
                self._check_supply(name, wanted, len(loaded[name][0]))
        supply = {name: cycle(conversations) for name, (conversations, _) in loaded.items()}
        conversations = _numbered([next(supply[name]) for name in order])
        again = next((c for c in conversations if c.occurrence), None)
        if again and not self.repeat:
            raise UserError(
                f"workload.repeat=false: {again.id} stands in two of the sources; take one, or repeat=true"
            )
        served = json.dumps([asdict(conversation) for conversation in conversations])
        return conversations, {
            "source": "stream",
            "path": ", ".join(source.name for source in self.sources.values()),
            "revision": None,
            "sha256": hashlib.sha256(served.encode()).hexdigest(),
            "note": self.note or None,
            "switches": self.switches(order),
            "sources": {name: provenance for name, (_, provenance) in loaded.items()},
        }

    def _check_supply(self, name: str, wanted: int, size: int) -> None:
        if wanted > size:
            raise UserError(
                f"workload {self.name} draws {wanted} conversations from sources.{name}, which has {size} "
                f"({self.sources[name].name}, as set): draw fewer, or set workload.repeat=true"
            )

    def _check_keys(self, key: str, given: dict[str, Any]) -> None:
        if given.keys() != self.sources.keys():
            raise UserError(
                f"workload.{key}: has {', '.join(given)}; expected the sources, {', '.join(self.sources)}"
            )


@dataclass(frozen=True)
class PortionsSpec(StreamSpec):
    """A stream of so many conversations from each source.

    Attributes:
        lengths: by source; null: all that it has.
    """

    lengths: dict[str, int | None]

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_keys("lengths", self.lengths)
        for name, length in self.lengths.items():
            if length is not None and length < 1:
                raise UserError(f"workload.lengths.{name}={length}: expected 1 or more, or null for all")

    def portions(self, sizes: dict[str, int]) -> dict[str, int]:
        return {name: self.lengths[name] or sizes[name] for name in self.sources}


@dataclass(frozen=True)
class SharpSpec(PortionsSpec):
    """One source after the other; of a single one, more often than it is long if it repeats."""

    def order(self, sizes: dict[str, int]) -> list[str]:
        return [name for name, count in self.portions(sizes).items() for _ in range(count)]

    def switches(self, order: list[str]) -> list[int] | None:
        return [place for place, (last, name) in enumerate(pairwise(order), 1) if name != last]


@dataclass(frozen=True)
class InterleavedSpec(PortionsSpec):
    """The sources in turn, each spread evenly over the whole stream."""

    def order(self, sizes: dict[str, int]) -> list[str]:
        portions = self.portions(sizes)
        names = list(portions)
        due = [((n + 0.5) / count, names.index(name), name) for name, count in portions.items() for n in range(count)]
        return [name for _, _, name in sorted(due)]

    def switches(self, order: list[str]) -> list[int] | None:
        return None


@dataclass(frozen=True)
class SmoothSpec(StreamSpec):
    """Each conversation's source is drawn, with chances that move linearly from the first to the last.

    Attributes:
        length: conversations.
        first, last: relative chance of each source at either end; they need not sum to 1.
    """

    length: int
    first: dict[str, float]
    last: dict[str, float]

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.length < 2:
            raise UserError(f"workload.length={self.length}: expected 2 or more")
        for key, chances in (("first", self.first), ("last", self.last)):
            self._check_keys(key, chances)
            for name, chance in chances.items():
                if not 0 <= chance < float("inf"):
                    raise UserError(f"workload.{key}.{name}={chance}: expected a chance, 0 or more")
            if not sum(chances.values()):
                raise UserError(f"workload.{key}: all chances are 0; raise one")

    def chances(self, place: int) -> list[float]:
        """Of each source, in order, at a place of the stream; they sum to 1."""
        moved = place / (self.length - 1)
        ends = [
            [chances[name] / sum(chances.values()) for name in self.sources] for chances in (self.first, self.last)
        ]
        return [(1 - moved) * first + moved * last for first, last in zip(*ends, strict=True)]

    def order(self, sizes: dict[str, int]) -> list[str]:
        draws = random.Random(f"mixture {self.seed}")
        names = list(self.sources)
        return [draws.choices(names, self.chances(place))[0] for place in range(self.length)]

    def switches(self, order: list[str]) -> list[int] | None:
        return None


def _numbered(conversations: list[Conversation]) -> list[Conversation]:
    """The same, each with the number of its earlier showings."""
    seen: Counter[str] = Counter()
    numbered = []
    for conversation in conversations:
        numbered.append(replace(conversation, occurrence=seen[conversation.id]))
        seen[conversation.id] += 1
    return numbered
