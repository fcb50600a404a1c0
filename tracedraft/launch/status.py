"""``tracedraft status DIR`` and ``tracedraft logs DIR RUN``: a sweep seen from outside, at any time."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from tracedraft import report
from tracedraft.errors import UserError
from tracedraft.files import is_held
from tracedraft.launch.board import Pace, Tail, counts, duration, remaining, table
from tracedraft.launch.ledger import CLAIM, State, read_ledger
from tracedraft.launch.worker import LOG

LISTED = 50  # of a state


def status(folder: Path) -> None:
    """Print where each run of a sweep stands.

    Raises:
        UserError: no sweep there.
    """
    states, others = read_ledger(folder)
    now = time.time()
    lost = {name: _lost(state, folder) for name, state in states.items()}
    shown = [
        replace(state, state="queued", reason="interrupted") if lost[n] else state for n, state in states.items()
    ]
    tails = {state.run: Tail(folder / state.run).read() for state in shown if state.state == "running"}
    report.show(table(shown, tails, now, LISTED))
    workers = next((event["workers"] for event in reversed(others) if event["event"] == "sweep"), 1)
    line = f"{counts(shown)}: {folder}"
    if any(state.state == "running" for state in shown):
        left = remaining(shown, Pace(states.values()), workers, now)
        line += "" if left is None else f"; about {duration(left)} left"
    elif any(state.state == "queued" for state in shown):
        line += "; nothing is at it: the same command goes on"
    print(line)


def _lost(state: State, folder: Path) -> bool:
    """Whether a run that should be in progress has no command behind it any more, as after a crash."""
    return state.state in ("running", "elsewhere") and not is_held(folder / state.run / CLAIM)


def logs(folder: Path, run: str) -> None:
    """Print what a run said.

    Args:
        run: its name, or any part of it that no other run of the sweep has.

    Raises:
        UserError: none, or several, or one that hasn't said anything yet.
    """
    names = list(read_ledger(folder)[0])
    found = [name for name in names if name == run] or [name for name in names if run in name]
    if len(found) != 1:
        some = ", ".join((found or names)[:8])
        which = f"stands for {len(found)} runs" if found else "is no run"
        raise UserError(f"{run!r} {which} of {folder}: give one of {some}{', …' if len(found or names) > 8 else ''}")
    try:
        text = (folder / found[0] / LOG).read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise UserError(
            f"{folder / found[0] / LOG} can't be read ({error.strerror}): it may not have begun"
        ) from error
    Console(file=sys.stdout, soft_wrap=True).out(text, end="", highlight=False)
