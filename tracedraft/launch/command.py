"""What ``-m`` does: plan, run what is missing, report, and fail if any run did."""

from __future__ import annotations

import sys
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn, JobStatus, setup_globals
from omegaconf import DictConfig
from rich.console import Console

from tracedraft import records, report
from tracedraft.config import build_spec
from tracedraft.errors import UserError
from tracedraft.launch import plan as plans
from tracedraft.launch.board import Board, Pace, counts, dry_table, duration, remaining
from tracedraft.launch.ledger import LEDGER, Ledger, State, read_ledger
from tracedraft.launch.pool import Pool, connect
from tracedraft.launch.prefetch import everywhere
from tracedraft.launch.spec import Division, Node, PoolSpec, Resume, divide, excluded
from tracedraft.launch.sweep import Sweep
from tracedraft.launch.worker import LOG


@dataclass(frozen=True)
class Asked:
    """What a command asks for, where, and what there is to do it with.

    Attributes:
        history: what the folder's ledger knows.
        spent: seconds of planning so far, of which Hydra's own composition apart.
    """

    plan: plans.Plan
    spec: PoolSpec
    folder: Path
    machines: list[Node]
    division: Division
    history: dict[str, State]
    spent: dict[str, Any]


def launch(config: DictConfig, loader: Any, job_overrides: Sequence[Sequence[str]], first: int) -> list[JobReturn]:
    """The jobs of ``-m``, each done or found done.

    Raises:
        SystemExit: some failed (1), bad input (2), or interrupted (130). Hydra would add lines to other exceptions.
    """
    setup_globals()
    before = HydraConfig.instance().cfg
    try:
        spec = build_spec(config.launcher, "launcher")
        asked = _asked(spec, config, loader, job_overrides, first)
        if spec.dry_run:
            _show_plan(asked)
            report.unmake()
            return []
        return _run(asked)
    except UserError as error:
        report.unmake()
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:  # before there was anything to wind down, or after
        print("interrupted: the same command goes on", file=sys.stderr)
        raise SystemExit(130) from None
    finally:
        HydraConfig.instance().cfg = before


def _asked(
    spec: PoolSpec, config: DictConfig, loader: Any, job_overrides: Sequence[Sequence[str]], first: int
) -> Asked:
    from tracedraft.measure import ALL_THREADS
    from tracedraft.provenance import provenance

    known: dict[str, Any] = {}
    began, composing, runs = time.monotonic(), 0.0, []
    for number, given in enumerate(job_overrides, first):
        at = time.monotonic()
        composed = plans.compose(config, loader, given, number)
        composing += time.monotonic() - at
        runs.append(plans.describe(composed, spec.affinity, known))
    devices = [str(run.config["target"]["device"]) for run in runs if not run.bad]
    if chosen := [device for device in devices if device.startswith("cuda:")]:
        raise UserError(f"target.device={chosen[0]}: in a sweep the pool chooses the GPU of a run: give cuda")
    machines = connect(spec)
    timed = any(run.config["measure"] == "time" for run in runs if not run.bad)
    threads = max(node.cpus for node in machines) if spec.address else ALL_THREADS
    division = divide(spec, machines, "cuda" in devices, timed, threads)
    plan = plans.unique([plans.settle(run, division) for run in runs])
    for run in plan.runs:
        if not run.bad and (rule := excluded(spec.exclude, run.config)):
            plan.excluded[run.name] = rule
    folder = Path(config.hydra.sweep.dir)
    plan = plans.compare(plan, folder, provenance(), spec.resume is Resume.fresh)
    history = read_ledger(folder)[0] if (folder / LEDGER).exists() else {}
    spent = {"composing": round(composing, 3), "planning": round(time.monotonic() - began - composing, 3)}
    return Asked(plan, spec, folder, machines, division, history, spent)


def _show_plan(asked: Asked) -> None:
    plan, division, states = asked.plan, asked.division, []
    names = {run.name for run in _queue(asked)}
    for run in plan.runs:
        state = State(run.name, "queued", run.facts)
        if run.name in plan.excluded:
            state = State(run.name, "excluded", run.facts, reason=plan.excluded[run.name])
        elif run.bad:
            state = State(run.name, "failed", run.facts, reason=run.bad)
        elif run.name in plan.done:
            state = State(run.name, "done", run.facts, reused=True, drift=plan.done[run.name].drift)
        elif run.name not in names:
            state = State(run.name, "excluded", run.facts, reason="did not fail before")
        states.append(state)
    pace = Pace(asked.history.values())
    report.show(dry_table(states, pace))
    to_run = sum(state.state == "queued" for state in states)
    took = duration(remaining(states, pace, division.workers, 0.0))
    about = f", about {took}" if took != "—" else ", for how long no earlier run in this folder says"
    workers = f"{division.workers} workers of {division.threads} threads"
    print(f"{len(states)} runs, {to_run} to run on {workers}{about if to_run else ''}: {asked.folder}")


def _run(asked: Asked) -> list[JobReturn]:
    plan, folder, division = asked.plan, asked.folder, asked.division
    ledger = Ledger(folder, f"{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:6]}")
    pool = Pool(asked.machines, division)
    board = Board(folder, division.workers, Pace(asked.history.values()))
    size = {"runs": len(plan.runs), "workers": division.workers, "threads": division.threads}
    ledger.add("sweep", argv=sys.argv, **size, **asked.spent)
    todo = _queue(asked)
    sweep = Sweep(todo, asked.spec, folder, division.side_by_side, pool, ledger)
    whole = True
    try:
        with board:
            _note_known(sweep, board, plan, todo)
            if todo:
                pool.start()
                if asked.spec.address is not None:
                    everywhere([run.config for run in todo])  # what fails here fails its run, which says so
                whole = sweep.go(board)
    finally:
        pool.close()
        ledger.add("ended", counts=counts(sweep.states.values()))
        ledger.close()
    return _report(plan, sweep, folder, whole)


def _queue(asked: Asked) -> list[plans.Run]:
    plan, history = asked.plan, asked.history
    waiting = [r for r in plan.runs if not r.bad and r.name not in plan.done and r.name not in plan.excluded]
    if asked.spec.resume is Resume.retry_failed:
        return [run for run in waiting if run.name in history and history[run.name].failing]
    return waiting


def _note_known(sweep: Sweep, board: Board, plan: plans.Plan, todo: Sequence[plans.Run]) -> None:
    """Write down every run, and at once what is known of it without running it."""
    names = {run.name for run in todo}
    for run in plan.runs:
        sweep.note(None, "queued", run.name, **run.facts)
    board.states = dict(sweep.states)
    for run in plan.runs:
        if run.name in plan.excluded:
            sweep.note(board, "excluded", run.name, reason=plan.excluded[run.name])
        elif run.bad:
            (sweep.folder / run.name).mkdir(exist_ok=True)
            (sweep.folder / run.name / LOG).write_text(f"error: {run.bad}\n", encoding="utf-8")
            sweep.note(board, "failed", run.name, attempt=0, reason=run.bad)
        elif run.name in plan.done:
            drift = list(plan.done[run.name].drift)
            sweep.note(board, "reused", run.name, folder=plan.done[run.name].folder.name, drift=drift)
        elif run.name not in names:
            sweep.note(board, "excluded", run.name, reason="did not fail before")


def _report(plan: plans.Plan, sweep: Sweep, folder: Path, whole: bool) -> list[JobReturn]:
    """The table, one line of counts, and what Hydra wants to know."""
    states = sweep.states
    names = [run.name for run in plan.runs]
    places = {name: plan.done[name].folder if name in plan.done else folder / name for name in names}
    done = [places[name] for name in names if states[name].state == "done"]
    failed = [(name, states[name].reason) for name in names if states[name].state == "failed"]
    left = [name for name in names if states[name].state in ("queued", "running", "elsewhere")]
    report.conclude(folder, done, failed)
    Console(stderr=True).print(f"{counts(states.values())}: {folder}", highlight=False, soft_wrap=True)
    if failed:
        print(
            f"error: {len(failed)} of {len(names)} runs failed: tracedraft logs {folder} {failed[0][0]} says more; "
            "the same command tries them again",
            file=sys.stderr,
        )
        raise SystemExit(1)
    if not whole:
        fresh = sweep.spec.resume is Resume.fresh
        again = "the same command does all of them again" if fresh else "the same command goes on"
        print(f"interrupted with {len(left)} of {len(names)} runs left: {again}", file=sys.stderr)
        raise SystemExit(130)
    values = {
        name: sweep.returned[name] if name in sweep.returned else records.read_summary(places[name]).get("speedup")
        for name in names
        if states[name].state == "done"
    }
    overrides = {run.name: run.facts["overrides"] for run in plan.runs}
    return [
        JobReturn(overrides=overrides[name], status=JobStatus.COMPLETED, _return_value=values.get(name))
        for name in plan.jobs
    ]
