"""What a sweep shows: a live table on a terminal, one line an event elsewhere."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from tracedraft.launch.ledger import State
from tracedraft.records import CONVERSATIONS
from tracedraft.report import number
from tracedraft.summary import Sums

STATES = ("running", "queued", "elsewhere", "done", "failed", "excluded")
LISTED = 12  # runs of one state that the live table lists: it must fit a screen


class Tail:
    """Sums over the records of a run in progress, each read once."""

    def __init__(self, folder: Path):
        self.path, self.at, self.conversations, self.sums = folder / CONVERSATIONS, 0, 0, Sums("adapted")

    def read(self) -> Tail:
        try:
            with open(self.path, "rb") as file:
                file.seek(self.at)
                data = file.read()
        except OSError:
            return self
        whole = data[: data.rfind(b"\n") + 1]
        self.at += len(whole)
        for line in whole.splitlines():
            self.conversations += 1
            self.sums.add(json.loads(line))
        return self


class Pace:
    """How long runs take, from those that finished."""

    def __init__(self, states: Iterable[State]):
        self._sums: dict[tuple[str, ...], list[float]] = {}
        for state in states:
            self.add(state)

    def add(self, state: State) -> None:
        count = state.facts.get("conversations")
        if state.state == "done" and state.seconds is not None and count:
            for key in self._keys(state.facts):
                sums = self._sums.setdefault(key, [0.0, 0.0])
                sums[0] += state.seconds
                sums[1] += count

    def seconds(self, facts: dict[str, Any]) -> float | None:
        """An estimate for a run, by what is most like it; None where nothing is."""
        for key in self._keys(facts):
            if key in self._sums:
                seconds, count = self._sums[key]
                return seconds / count * facts.get("conversations", 0)
        return None

    @staticmethod
    def _keys(facts: dict[str, Any]) -> list[tuple[str, ...]]:
        told = [str(facts.get(name)) for name in ("target", "workload", "adapter")]
        return [tuple(told[:size]) for size in (3, 2, 1)]


def remaining(states: Iterable[State], pace: Pace, workers: int, now: float) -> float | None:
    """Seconds until all are through, an estimate; None where a run is like none that finished."""
    total = longest = 0.0
    for state in states:
        if state.state in ("queued", "running", "elsewhere"):
            seconds = pace.seconds(state.facts)
            if seconds is None:
                return None
            left = max(0.0, seconds - (now - state.since)) if state.state == "running" else seconds
            total, longest = total + left, max(longest, left)
    return max(longest, total / workers)


def counts(states: Iterable[State]) -> str:
    """``3 running, 5 done (2 earlier), 1 failed``."""
    states = list(states)
    tally = Counter(state.state for state in states)
    earlier = sum(state.reused for state in states)
    parts = []
    for name in STATES:
        if tally[name]:
            parts.append(f"{tally[name]} {name}" + (f" ({earlier} earlier)" if name == "done" and earlier else ""))
    return ", ".join(parts) or "nothing"


def duration(seconds: float | None) -> str:
    if seconds is None:
        return "—"
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 6000:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


def table(states: Iterable[State], tails: dict[str, Tail], now: float, listed: int | None = None) -> Table:
    """A row a run, running ones first.

    Args:
        tails: numbers of the running ones.
        listed: at most so many of a state; None: all.
    """
    shown = Table(box=None, pad_edge=False)
    shown.add_column("state")
    shown.add_column("run", overflow="fold")
    for title in ("conv.", "tau", "tok/s", "time"):
        shown.add_column(title, justify="right", no_wrap=True)
    shown.add_column("", overflow="fold")
    by_state: dict[str, list[State]] = {name: [] for name in STATES}
    for state in states:
        by_state[state.state].append(state)
    for name in STATES:
        here = by_state[name]
        # Of what is over, the last ones.
        cut = here if listed is None else (here[:listed] if name in ("running", "queued") else here[-listed:])
        for state in cut:
            shown.add_row(*map(Text, _cells(state, tails.get(state.run), now)))
        if len(cut) < len(here):
            shown.add_row("", f"and {len(here) - len(cut)} more {name}")
    return shown


def _cells(state: State, tail: Tail | None, now: float) -> list[str]:
    total = state.facts.get("conversations")
    of = "—" if total is None else str(total)
    took = now - state.since if state.state == "running" else state.seconds
    note = {"running": state.where, "done": "; ".join(state.drift), "queued": state.reason}.get(
        state.state, state.reason
    )
    if state.state == "done" and state.reused:
        note = f"earlier, {note}" if note else "earlier"
    if state.attempt > 1:
        note = f"attempt {state.attempt}: {note}" if note else f"attempt {state.attempt}"
    numbers = ["—", "—"] if tail is None else [number(tail.sums.tau, 2), number(tail.sums.tokens_per_s, 1)]
    so_far = f"{tail.conversations}/{of}" if tail is not None else of
    return [state.state, state.run, so_far, *numbers, duration(took), note]


class Board:
    """Shows a sweep while it goes on, on stderr.

    Args:
        folder: of the sweep, where running runs' records are looked at.
    """

    def __init__(self, folder: Path, workers: int, pace: Pace):
        self.folder, self.workers, self.pace = folder, workers, pace
        self.console = Console(stderr=True)
        self.tails: dict[str, Tail] = {}
        self.states: dict[str, State] = {}
        self._live = Live(console=self.console, auto_refresh=False, transient=True)
        self._due = 0.0

    def __enter__(self) -> Board:
        if self.console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def say(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def event(self, state: State, event: dict[str, Any]) -> None:
        """A run's state changed."""
        self.states[state.run] = state
        if state.state != "running":
            self.tails.pop(state.run, None)
        if state.state == "done" and not state.reused:
            self.pace.add(state)
        if text := _line(state, event["event"]):
            over = sum(other.state in ("done", "failed", "excluded") for other in self.states.values())
            self.say(f"[{over}/{len(self.states)}] {text}")

    def refresh(self) -> None:
        """Redraw about once a second."""
        if not self.console.is_terminal or time.monotonic() < self._due:
            return
        now = time.time()
        for state in self.states.values():
            if state.state == "running":
                self.tails.setdefault(state.run, Tail(self.folder / state.run)).read()
        left = remaining(self.states.values(), self.pace, self.workers, now)
        head = Text(counts(self.states.values()) + ("" if left is None else f"; about {duration(left)} left"))
        shown = [state for state in self.states.values() if not (state.state == "done" and state.reused)]
        self._live.update(Group(head, table(shown, self.tails, now, LISTED)), refresh=True)
        self._due = time.monotonic() + 1.0


def _line(state: State, event: str) -> str | None:
    if event == "started":
        again = f", attempt {state.attempt}" if state.attempt > 1 else ""
        return f"{state.run}: started on {state.where}{again}"
    if event == "finished":
        return f"{state.run}: done in {duration(state.seconds)}"
    if event == "reused" and state.drift:
        return f"{state.run}: done earlier by {'; '.join(state.drift)}"
    if event == "retried":
        return f"{state.run}: will be tried again: {state.reason}"
    if event in ("failed", "excluded"):
        return f"{state.run}: {event}: {state.reason}"
    if event == "interrupted":
        return f"{state.run}: interrupted"
    if event == "elsewhere":
        return f"{state.run}: another command is at it"
    return None


def dry_table(states: Sequence[State], pace: Pace) -> Table:
    """The runs that a command asks for, their fingerprints, what is done, and how long the others will take."""
    shown = Table()
    shown.add_column("run", overflow="fold")
    shown.add_column("fingerprint", no_wrap=True)
    shown.add_column("state", overflow="fold")
    shown.add_column("about", justify="right", no_wrap=True)
    for state in states:
        note = "; ".join(filter(None, (state.reason, *state.drift)))
        word = "to run" if state.state == "queued" else "done earlier" if state.reused else state.state
        about = duration(pace.seconds(state.facts)) if state.state == "queued" else ""
        cells = (state.run, state.facts.get("fingerprint") or "—", f"{word}: {note}" if note else word, about)
        shown.add_row(*map(Text, cells))
    return shown
