"""``sweep.jsonl``: what happened in a sweep's folder, one event a line, and the state of its runs read back.

Events: ``sweep`` (a command starts), ``queued``, ``reused``, ``excluded``, ``started``, ``retried``, ``interrupted``,
``finished``, ``failed``, ``elsewhere`` (another command is at it), ``ended``. A run's numbers are in its own folder.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tracedraft.errors import UserError
from tracedraft.files import unwritable

LEDGER = "sweep.jsonl"
CLAIM = ".claim"  # in a run's folder: what the command that is at it holds locked


class Ledger:
    """Appends events. Several commands may have one open."""

    def __init__(self, folder: Path, sweep: str):
        """
        Raises:
            UserError: the folder can't be written.
        """
        self.path, self.sweep = folder / LEDGER, sweep
        try:
            self._file = open(self.path, "ab+", buffering=0)  # noqa: SIM115 - open as long as the sweep
            size = self._file.seek(0, os.SEEK_END)
            self._file.seek(max(0, size - 1))
            if self._file.read() not in (b"", b"\n"):  # a line that a crash cut short
                self._file.write(b"\n")
        except OSError as error:
            raise unwritable(self.path, error, "choose another hydra.sweep.dir") from error

    def add(self, event: str, run: str | None = None, **facts: Any) -> None:
        """One event, in one write: lines of commands at work in the same folder don't mix."""
        record = {"event": event, "time": round(time.time(), 3), "sweep": self.sweep}
        record |= ({"run": run} if run else {}) | facts
        self._file.write((json.dumps(record, separators=(",", ":")) + "\n").encode())

    def close(self) -> None:
        self._file.close()


@dataclass(frozen=True)
class State:
    """Where a run stands.

    Attributes:
        state: queued, running, done, failed, excluded or elsewhere.
        sweep: the last command that asked for it.
        facts: what it is: fingerprint, overrides, conversations, and the names of its parts.
        since: when that state began.
        seconds: of the attempt that finished.
        failing: it failed when it was last tried to the end.
        reused: finished by an earlier command; ``drift`` says in what its surroundings differ from now.
    """

    run: str
    state: str
    facts: dict[str, Any] = field(default_factory=dict)
    attempt: int = 0
    since: float = 0.0
    seconds: float | None = None
    where: str = ""
    reason: str = ""
    reused: bool = False
    drift: tuple[str, ...] = ()
    sweep: str = ""
    failing: bool = False


def read_ledger(folder: Path) -> tuple[dict[str, State], list[dict[str, Any]]]:
    """The state of each run that the folder's sweeps knew, in order, and the events that are no run's.

    Raises:
        UserError: there is no ledger.
    """
    states: dict[str, State] = {}
    others = []
    for event in _events(folder / LEDGER):
        if run := event.get("run"):
            states[run] = step(states.get(run) or State(run, "queued"), event)
        else:
            others.append(event)
    return states, others


_COMMON = ("event", "time", "sweep", "run")


def step(before: State, event: dict[str, Any]) -> State:
    """A run's state after an event."""
    kind, at = event["event"], event["time"]
    if kind == "queued":
        facts = {key: value for key, value in event.items() if key not in _COMMON}
        kept = {"seconds": before.seconds, "failing": before.failing}
        return State(before.run, "queued", facts, since=at, sweep=event.get("sweep", ""), **kept)
    if kind == "reused":
        drift = tuple(event.get("drift", ()))
        return replace(before, state="done", since=at, reused=True, drift=drift, failing=False)
    if kind == "started":
        return replace(before, state="running", since=at, attempt=event["attempt"], where=event.get("where", ""))
    if kind == "finished":
        return replace(before, state="done", since=at, seconds=event["seconds"], reused=False, failing=False)
    if kind in ("retried", "interrupted"):
        return replace(before, state="queued", since=at, reason=event.get("reason", kind))
    if kind in ("failed", "excluded"):
        failing = before.failing or kind == "failed"
        return replace(before, state=kind, since=at, reason=event["reason"], failing=failing)
    return replace(before, state=kind, since=at)


def _events(path: Path) -> Iterator[dict[str, Any]]:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path} can't be read ({error.strerror}): give the folder of a sweep") from error
    for line in data.split(b"\n"):
        try:
            event = json.loads(line)
        except ValueError:
            continue  # cut short by a crash
        if isinstance(event, dict) and "event" in event:
            yield event
