"""Where supervised positions are kept: one response's window per source, and the replay across responses."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from tracedraft.adapters.objective import Rows, negentropy, teacher_rows
from tracedraft.types import Evidence, OutputHead


class Window:
    """At most ``capacity`` positions of one source of one response: the latest, or a uniform sample.

    Each position draws a key (its age, or a random number) and the smallest keys stay, which for random
    keys is a reservoir that is exact however the positions arrive in pieces.

    Teachers are asked when rows are first needed, once for each position, and for many at a time: softmaxes
    over the target's vocabulary cost more than an update if each round makes its own, and the positions after
    the last update need none. Until then a position holds on to its evidence, which may keep the logits
    [K+1, V] of its whole round alive: at most ``capacity`` such tensors, and none beyond an update.
    """

    def __init__(
        self, head: OutputHead, capacity: int, recent: bool, temperature: float, numbers: Iterator[int]
    ) -> None:
        """
        Args:
            numbers: where each position gets its id from.
        """
        self._rows = Rows.blank(capacity, head)
        self._numbers = numbers
        self._carries = torch.zeros(capacity, dtype=torch.bool)
        self._mass = torch.zeros(capacity)
        self._vocab = head.vocab
        self._capacity = capacity
        self._recent = recent
        self._temperature = temperature
        self.clear()

    def clear(self) -> None:
        self._seen = 0
        self._kept: list[tuple[float, int]] = []  # a heap of (-key, slot): the first to go comes first
        self._waiting: dict[int, tuple[Evidence, int]] = {}  # slot → whose teacher is still to be asked, for its row

    def observe(self, evidence: Evidence, draws: torch.Generator) -> None:
        """Choose among the new positions, asking no teacher yet."""
        count = evidence.features.shape[0]
        if self._recent:
            ages = range(self._seen, self._seen + count)
        else:
            ages = torch.rand(count, dtype=torch.float64, generator=draws).neg_().tolist()
        self._seen += count
        for row, age in enumerate(ages):
            slot = len(self._kept)
            if slot < self._capacity:
                heapq.heappush(self._kept, (age, slot))
            elif age > self._kept[0][0]:
                slot = self._kept[0][1]
                heapq.heapreplace(self._kept, (age, slot))
            else:
                continue
            self._waiting[slot] = evidence, row

    def _fill(self) -> None:
        """Ask the teachers of the positions that still wait for it."""
        if not self._waiting:
            return
        pieces: dict[int, tuple[Evidence, list[int], list[int]]] = {}
        for slot, (evidence, row) in self._waiting.items():
            _, rows, slots = pieces.setdefault(id(evidence), (evidence, [], []))
            rows.append(row)
            slots.append(slot)
        self._waiting = {}
        asked = [evidence for evidence, _, _ in pieces.values()]
        slots = [slot for _, _, some in pieces.values() for slot in some]
        rows = [row for _, some, _ in pieces.values() for row in some]
        # One way to the device for all of it and one back: for each a GPU's host waits.
        numbers = torch.tensor(
            [rows, slots, list(itertools.islice(self._numbers, len(slots)))], device=self._rows.features.device
        )
        indices = numbers[0].split([len(some) for _, some, _ in pieces.values()])
        logits = torch.cat([evidence.teacher(index) for evidence, index in zip(asked, indices, strict=True)])
        p, negent, carries, mass = teacher_rows(logits, self._vocab, self._temperature)
        features = [evidence.features.index_select(0, index) for evidence, index in zip(asked, indices, strict=True)]
        at = numbers[1]
        self._rows.features[at] = torch.cat(features).float()
        self._rows.teacher[at] = p
        self._rows.negentropy[at] = negent
        self._rows.ids[at] = numbers[2]
        known = torch.stack((carries.to(mass.dtype), mass)).cpu()
        self._carries[slots], self._mass[slots] = known[0].bool(), known[1]

    def index(self) -> Tensor:
        """Slots [m] of the positions that carry loss, on the CPU."""
        self._fill()
        return self._carries[: len(self._kept)].nonzero().flatten()

    def take(self, index: Tensor) -> Rows:
        """The positions in the slots ``index`` [m]."""
        return self._rows.take(index.to(self._rows.features.device))

    def mass(self) -> Tensor:
        """[k] target probability inside the draft vocabulary at every kept position, loss or none."""
        self._fill()
        return self._mass[: len(self._kept)]


class Replay:
    """Positions of earlier responses, first in first out, within a bound on bytes.

    Kept are the features and the teacher's distribution over the draft vocabulary, in the head's dtype:
    probabilities rather than logits, since bf16 rounds a logit of 20 by 0.06 but a probability by 0.4 %.
    """

    def __init__(self, head: OutputHead, mebibytes: float, numbers: Iterator[int]) -> None:
        self._numbers = numbers
        size, hidden = head.weight.shape
        self.capacity = int(mebibytes * 2**20) // ((size + hidden) * head.weight.element_size())
        self._features = head.weight.new_empty(self.capacity, hidden, requires_grad=False)
        self._teacher = head.weight.new_empty(self.capacity, size, requires_grad=False)
        self.clear()

    def clear(self) -> None:
        self._next = 0
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def state(self) -> dict[str, Any]:
        kept = {"features": self._features[: self._size].clone(), "teacher": self._teacher[: self._size].clone()}
        return {**kept, "next": self._next}

    def load_state(self, state: dict[str, Any]) -> None:
        self._next, self._size = state["next"], len(state["features"])
        self._features[: self._size] = state["features"]
        self._teacher[: self._size] = state["teacher"]

    def push(self, rows: Rows) -> None:
        """Append positions, overwriting the oldest."""
        count = min(len(rows), self.capacity)
        if not count:
            return
        at = (self._next + torch.arange(count, device=self._features.device)) % self.capacity
        self._features[at] = rows.features[-count:].to(self._features.dtype)
        self._teacher[at] = rows.teacher[-count:].to(self._teacher.dtype)
        self._next = (self._next + count) % self.capacity
        self._size = min(self._size + count, self.capacity)

    def sample(self, count: int, draws: torch.Generator) -> Rows:
        """At most ``count`` positions, uniformly without replacement."""
        at = torch.randperm(self._size, generator=draws)[:count].to(self._features.device)
        teacher = self._teacher[at].float()
        # Rounding to the head's dtype leaves a sum a little off 1.
        teacher /= teacher.sum(-1, keepdim=True)
        ids = torch.tensor(list(itertools.islice(self._numbers, len(at))), dtype=torch.long, device=at.device)
        return Rows(self._features[at].float(), teacher, negentropy(teacher), ids)
