"""The loop of a sweep: hand out runs, take them back, replace what dies, and write down what happened."""

from __future__ import annotations

import contextlib
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from tracedraft import records
from tracedraft.files import Busy, exclusive, is_held, write_atomically
from tracedraft.launch.board import Board
from tracedraft.launch.ledger import CLAIM, Ledger, State, step
from tracedraft.launch.plan import Run
from tracedraft.launch.pool import Hand
from tracedraft.launch.queue import Queue
from tracedraft.launch.spec import PoolSpec
from tracedraft.launch.worker import LOG

WEIGHTS = {int(signal.SIGINT): 1, int(signal.SIGTERM): 2}
TICK = 0.5  # seconds between looks at the clock, at Ctrl-C and at runs of other commands
INSTEAD = "choose another hydra.sweep.dir"


class Workers(Protocol):
    """What the loop asks of a pool; see ``Pool``."""

    hands: list[Hand]

    def fill(self, wanted: int) -> None: ...
    def submit(self, hand: Hand, run: Run, task: dict[str, Any]) -> None: ...
    def wait(self, seconds: float) -> list[tuple[Hand, dict[str, Any]]]: ...
    def kill(self, hand: Hand) -> None: ...


class Presses:
    """Of Ctrl-C: after one, runs in progress end; after two, they are killed. SIGTERM counts as two.

    Counted where the signals arrive: Python's own handlers see two of them as one while Ray waits.
    """

    def __init__(self) -> None:
        self.count = 0
        self._in, self._out = socket.socketpair()
        for end in (self._in, self._out):
            end.setblocking(False)

    def look(self) -> int:
        """How many there were so far."""
        with contextlib.suppress(BlockingIOError):
            for number in self._in.recv(64):
                self.count += WEIGHTS.get(number, 0)
        return self.count

    def __enter__(self) -> Presses:
        self._before = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGINT, signal.SIGTERM)}
        self._woken = signal.set_wakeup_fd(self._out.fileno(), warn_on_full_buffer=False)
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(self._woken)
        for number, handler in self._before.items():
            # None stands for a handler that was not set from Python and can't be set again.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._in.close()
        self._out.close()


class Sweep:
    """Runs what a plan leaves to do.

    Attributes:
        states: of every run of this command, by name.
        returned: what finished runs returned, by name.
    """

    def __init__(
        self, runs: Sequence[Run], spec: PoolSpec, folder: Path, side_by_side: int, pool: Workers, ledger: Ledger
    ):
        self.spec, self.folder, self.side_by_side = spec, folder, side_by_side
        self.pool, self.ledger = pool, ledger
        self.queue = Queue(runs)
        self.elsewhere: list[Run] = []
        self.claims: dict[str, Any] = {}
        self.states: dict[str, State] = {}
        self.returned: dict[str, float | None] = {}
        self.marker = folder / f".sweep-{ledger.sweep}"

    def note(self, board: Board | None, event: str, run: str, **facts: Any) -> None:
        """Write an event down, and show it."""
        self.ledger.add(event, run, **facts)
        said = {"event": event, "time": time.time(), "run": run, **facts}
        self.states[run] = step(self.states.get(run) or State(run, "queued"), said)
        if board is not None:
            board.event(self.states[run], said)

    def go(self, board: Board) -> bool:
        """Until nothing is left, or a second Ctrl-C. Returns whether all was tried."""
        self.board = board
        self.marker.touch()
        try:
            with Presses() as pressed:
                return self._loop(pressed)
        finally:
            for name in list(self.claims):
                self._release(name)
            self.marker.unlink(missing_ok=True)

    def _loop(self, pressed: Presses) -> bool:
        told = False
        while True:
            count = pressed.look()
            failed = any(state.state == "failed" for state in self.states.values())
            stop = bool(count) or (self.spec.fail_fast and failed)
            waiting = len(self.queue) + len(self.elsewhere)
            if not self._busy() and (stop or not waiting):
                return not waiting
            if count > 1:
                for hand in self._busy():
                    assert hand.run is not None
                    self.pool.kill(hand)
                    self.note(self.board, "interrupted", hand.run.name)
                return False
            if count and not told:
                told = True
                self.board.say(f"stopping: {len(self._busy())} in progress go on to their end; Ctrl-C again kills")
            if not stop:
                self.pool.fill(len(self.queue) + len(self._busy()))
                self._hand_out()
            for hand, answer in self.pool.wait(TICK):
                if answer["status"] != "ready" and hand.run is not None:
                    self._take_back(hand, answer)
            self._end_hanging()
            self._look_elsewhere()
            self.board.refresh()

    def _busy(self) -> list[Hand]:
        return [hand for hand in self.pool.hands if hand.run is not None]

    def _hand_out(self) -> None:
        for hand in self.pool.hands:
            while hand.idle and self.queue:
                others = [other.warm for other in self.pool.hands if other is not hand]
                run = self.queue.take(hand.warm, others)
                if not self._claim(run):
                    self.note(self.board, "elsewhere", run.name)
                    self.elsewhere.append(run)
                    continue
                assert run.fingerprint is not None
                if records.finished(self.folder / run.name, run.fingerprint):
                    self.note(self.board, "reused", run.name)
                    self._release(run.name)
                    continue
                attempt = self.states[run.name].attempt + 1
                self.note(self.board, "started", run.name, attempt=attempt, where=hand.where)
                task = {"config": run.config, "folder": str(self.folder / run.name), "sweep": self.folder.name}
                task |= {"argv": sys.argv, "workers": self.side_by_side, "marker": str(self.marker)}
                self.pool.submit(hand, run, task)

    def _take_back(self, hand: Hand, answer: dict[str, Any]) -> None:
        run, hand.run = hand.run, None
        assert run is not None
        folder = self.folder / run.name
        for name in sorted(answer.get("files", ()), key=lambda name: name == records.SUMMARY):
            data = answer["files"][name]
            write_atomically(folder / name, lambda path, data=data: path.write_bytes(data), INSTEAD)
        seconds = round(time.monotonic() - hand.since, 3)
        if answer["status"] == "done":
            self.returned[run.name] = answer["speedup"]
            facts = {"seconds": seconds, "work": answer["work"], "loads": answer["loads"], "worker": hand.number}
            self.note(self.board, "finished", run.name, **facts)
        elif answer["status"] == "busy":
            self.note(self.board, "elsewhere", run.name)
            self.elsewhere.append(run)
        else:
            if answer["status"] == "failed" and answer["retry"]:
                self.pool.kill(hand)  # after some errors no later run of its process could go well
            self._failed(run, answer)
        self._release(run.name)

    def _failed(self, run: Run, answer: dict[str, Any]) -> None:
        if answer["status"] == "died":
            with open(self.folder / run.name / LOG, "a", encoding="utf-8") as log:
                log.write(f"the worker was lost: {answer['reason']}\n")
        attempt = self.states[run.name].attempt
        if answer["retry"] and attempt < self.spec.max_attempts:
            self.note(self.board, "retried", run.name, attempt=attempt, reason=answer["reason"])
            self.queue.add(run)
        else:
            self.note(self.board, "failed", run.name, attempt=attempt, reason=answer["reason"])

    def _end_hanging(self) -> None:
        limit = self.spec.run_timeout_s
        for hand in self._busy():
            if limit is not None and time.monotonic() - hand.since > limit:
                self.pool.kill(hand)
                reason = f"no result after launcher.run_timeout_s={limit:g}"
                self._take_back(hand, {"status": "died", "reason": reason, "retry": True})

    def _look_elsewhere(self) -> None:
        for run in list(self.elsewhere):
            held = is_held(self.folder / run.name / records.ATTEMPTS)
            if held or not self._claim(run):
                continue
            self.elsewhere.remove(run)
            self._release(run.name)
            self.queue.add(run)  # finished or not: that is looked at when it is handed out

    def _claim(self, run: Run) -> bool:
        """Take a run for this command, which holds it until it is through."""
        try:
            self.claims[run.name] = exclusive(self.folder / run.name / CLAIM, INSTEAD)
        except Busy:
            return False
        return True

    def _release(self, name: str) -> None:
        if claim := self.claims.pop(name, None):
            claim.close()
