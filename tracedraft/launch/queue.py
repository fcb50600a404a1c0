"""Which run a free worker takes next."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterable

from tracedraft.launch.plan import Run


class Queue:
    """Runs in order, handed out so that models are loaded rarely."""

    def __init__(self, runs: Iterable[Run]):
        self._runs = deque(runs)

    def __len__(self) -> int:
        return len(self._runs)

    def add(self, run: Run) -> None:
        """At the end."""
        self._runs.append(run)

    def clear(self) -> list[Run]:
        """What was waiting."""
        waiting = list(self._runs)
        self._runs.clear()
        return waiting

    def take(self, warm: str | None, others: Collection[str | None]) -> Run:
        """The first run of what the worker has loaded, else of the largest group that no other worker has, else of
        the largest.

        Args:
            warm: what the worker has loaded; None: nothing yet.
            others: what the other workers have loaded.
        """
        sizes = Counter(run.warm for run in self._runs)
        if warm not in sizes:
            free = {key: size for key, size in sizes.items() if key not in others}
            warm = max(free or sizes, key=lambda key: sizes[key])
        run = next(run for run in self._runs if run.warm == warm)
        self._runs.remove(run)
        return run
