"""Sweeps of the tiny pair for the tests of the launcher: in this process on a stand-in for the pool, or on Ray."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hydra.core.global_hydra import GlobalHydra

from tracedraft import cli, records
from tracedraft.launch.ledger import LEDGER, State, read_ledger
from tracedraft.launch.plan import Run
from tracedraft.launch.pool import Hand
from tracedraft.launch.spec import Division, Node
from tracedraft.launch.worker import Worker, serve

TINY = (
    "target=tiny",
    "draft=tiny",
    "wandb.mode=disabled",
    "measure=acceptance",
    "workload.limit=1",
    "decode.max_new_tokens=8",
)


class Here:
    """A pool whose workers are this process. ``on_wait`` is called before each run."""

    on_wait: Callable[[Here], None] | None = None
    served: list[str]
    made: list[Here]

    def __init__(self, machines: Sequence[Node], division: Division):
        self.division, self.hands = division, []
        self.tasks: dict[int, dict[str, Any]] = {}
        self.made.append(self)

    def start(self) -> None:
        pass

    def close(self) -> None:
        pass

    def fill(self, wanted: int) -> None:
        while len(self.hands) < min(wanted, self.division.workers):
            self.hands.append(Hand(len(self.hands), None, None, "here"))

    def submit(self, hand: Hand, run: Run, task: dict[str, Any]) -> None:
        hand.run, hand.warm, hand.since, hand.pending = run, run.warm, time.monotonic(), True
        self.tasks[hand.number] = task

    def wait(self, seconds: float) -> list[tuple[Hand, dict[str, Any]]]:
        if self.on_wait is not None:
            type(self).on_wait(self)
        for hand in self.hands:
            if hand.pending:
                hand.pending = None
                type(self).served.append(Path(self.tasks[hand.number]["folder"]).name)
                return [(hand, self.answer(self.tasks[hand.number]))]
        return []

    def answer(self, task: dict[str, Any]) -> dict[str, Any]:
        return serve(task)

    def kill(self, hand: Hand) -> None:
        self.hands.remove(hand)


class Faulty(Worker):
    """Seeds that harm: 1 kills its worker, 2 raises what can't be unpickled, 3 hangs, 4 kills at first."""

    def run(self, task: dict[str, Any]) -> dict[str, Any]:
        seed, log = task["config"]["seed"], Path(task["folder"]) / "tried"
        first = not log.exists()
        if seed in (1, 3, 4):
            log.parent.mkdir(exist_ok=True)
            log.touch()
        if seed == 1 or (seed == 4 and first):
            os.kill(os.getpid(), signal.SIGKILL)
        if seed == 3:
            time.sleep(600)
        with pytest.MonkeyPatch.context() as patch:
            if seed == 2:
                patch.setattr("tracedraft.measure.measure", _raise_odd)
            return super().run(task)


class Odd(Exception):
    def __init__(self, one: int, two: int):
        super().__init__(f"odd {one} {two}")


def _raise_odd(*_: Any) -> None:
    raise Odd(1, 2)


def states(folder: Path) -> dict[str, State]:
    return read_ledger(folder)[0] if (folder / LEDGER).exists() else {}


def command(*arguments: str) -> int:
    """``python -m tracedraft.run -m`` in this process: its exit status."""
    GlobalHydra.instance().clear()
    before = sys.argv
    sys.argv = ["run", "-m", *TINY, *arguments]
    try:
        cli.run()
        return 0
    except SystemExit as left:
        return int(left.code or 0)
    finally:
        sys.argv = before


def runs_in(folder: Path) -> set[str]:
    return {path.parent.name for path in folder.glob(f"*/{records.SUMMARY}")}


def said(run: Path) -> bytes:
    """All that a run found out: nothing in an acceptance run's records depends on the clock."""
    return (run / records.CONVERSATIONS).read_bytes()


def failing(pool: type[Here], seeds: set[int], status: str) -> None:
    def answer(self, task):
        if task["config"]["seed"] in seeds:
            return {"status": status, "reason": "lost to a test", "retry": True}
        return Here.answer(self, task)

    pool.answer = answer
