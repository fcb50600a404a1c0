"""From overrides to runs: composed, identified, named, and compared with what the folder already holds."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf, open_dict

from tracedraft import records
from tracedraft.errors import UserError
from tracedraft.identity import identify, timing
from tracedraft.launch.spec import Division

SHOWN = ("workload", "adapter", "draft", "target")


@dataclass(frozen=True)
class Run:
    """One run of a sweep.

    Attributes:
        name: its folder inside the sweep's.
        config: resolved.
        warm: what a worker that ran it has loaded.
        facts: for the ledger: fingerprint, overrides, number of conversations, names of its parts.
        bad: why it can't run at all.
    """

    name: str
    config: dict[str, Any]
    warm: str
    facts: dict[str, Any]
    bad: str | None = None

    @property
    def fingerprint(self) -> str | None:
        return self.facts["fingerprint"]


@dataclass(frozen=True)
class Found:
    """A finished run in the sweep's folder, and in what its surroundings differ from now."""

    folder: Path
    drift: tuple[str, ...] = ()


@dataclass
class Plan:
    """What a command asks for.

    Attributes:
        runs: each distinct run once, in the order of their jobs.
        jobs: the name of each job's run.
        done: finished earlier, by name.
        excluded: the rule that leaves a run out, by name.
    """

    runs: list[Run] = field(default_factory=list)
    jobs: list[str] = field(default_factory=list)
    done: dict[str, Found] = field(default_factory=dict)
    excluded: dict[str, str] = field(default_factory=dict)


ID = "@id@"  # stands in a name until the run's identity is known


def compose(config: DictConfig, loader: Any, overrides: Sequence[str], number: int) -> DictConfig:
    """The config of one job, as Hydra's own launchers make it, but for its id."""
    composed = loader.load_sweep_config(config, list(overrides))
    with open_dict(composed):
        composed.hydra.job.id = ID
        composed.hydra.job.num = number
    return composed


def describe(composed: DictConfig, affinity: Sequence[str], known: dict[str, Any]) -> Run:
    """Which run a composed job is; not yet by what timing.

    Args:
        known: see ``identify``.
    """
    HydraConfig.instance().set_config(composed)
    name = str(composed.hydra.sweep.subdir)
    facts: dict[str, Any] = {"fingerprint": None, "overrides": list(composed.hydra.overrides.task)}
    facts |= {group: OmegaConf.select(composed, f"{group}.name") for group in SHOWN}
    try:
        found = identify(composed, known)
    except UserError as error:
        return Run(name.replace(ID, str(composed.hydra.job.num)), {}, "", facts, str(error))
    named = {str(key): _plain(composed[key]) for key in composed if key != "hydra"}
    facts |= {"fingerprint": found.fingerprint, "conversations": len(found.conversations)}
    return Run(name, named, json.dumps([named[group] for group in affinity], sort_keys=True), facts)


def _plain(node: Any) -> Any:
    return OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node


def settle(run: Run, division: Division) -> Run:
    """The same run with its timing's identity, and its name."""
    if run.bad:
        return run
    assert run.fingerprint is not None
    timed = timing(run.config, division.threads, division.side_by_side)
    id = run.fingerprint[:8] + (f"_t{timed[0]}w{timed[1]}" if timed else "")
    return replace(run, name=run.name.replace(ID, id), facts={**run.facts, "timing": timed})


def unique(runs: Sequence[Run]) -> Plan:
    """Each run once, however many jobs ask for it.

    Raises:
        UserError: two different runs would share a folder.
    """
    plan, by_name = Plan(), {}
    for run in runs:
        other = by_name.setdefault(run.name, run)
        if other is run:
            plan.runs.append(run)
        elif (run.fingerprint, run.facts.get("timing")) != (other.fingerprint, other.facts.get("timing")):
            raise UserError(
                f"hydra.sweep.subdir gives two runs the folder {run.name}: put ${{hydra.job.id}} into it, "
                "which differs from run to run"
            )
        plan.jobs.append(run.name)
    return plan


def finished_runs(folder: Path) -> dict[tuple[str, tuple[int, int] | None], list[Path]]:
    """The finished runs in a folder by fingerprint and timing (threads, workers), and by fingerprint and None."""
    found: dict[tuple[str, tuple[int, int] | None], list[Path]] = {}
    for summary in sorted(folder.glob(f"*/{records.SUMMARY}")):
        attempts = records.read_attempts(summary.parent)
        if not attempts:
            continue
        fingerprint = attempts[0]["fingerprint"]
        found.setdefault((fingerprint, None), []).append(summary.parent)
        timings = {(attempt["torch_threads"], attempt.get("workers", 1)) for attempt in attempts}
        if len(timings) == 1:  # a run that went on with other threads is a timing of neither
            found.setdefault((fingerprint, timings.pop()), []).append(summary.parent)
    return found


def compare(plan: Plan, folder: Path, here: dict[str, Any], fresh: bool) -> Plan:
    """Mark what is finished already, or, for ``fresh``, give it a folder beside the finished one."""
    finished = finished_runs(folder)
    names: dict[str, str] = {}
    for place, run in enumerate(plan.runs):
        timed = run.facts.get("timing")
        folders = finished.get((run.fingerprint or "", tuple(timed) if timed else None), [])
        # Its own folder, if it is among them: another command may have left the same run elsewhere.
        folders = sorted(folders, key=lambda path: path.name != run.name)
        if folders and not fresh:
            differs = drift(records.read_attempts(folders[0])[-1], here)
            plan.done[run.name] = Found(folders[0], (*differs, *_lost(run, folders[0])))
        elif folders or (folder / run.name / records.SUMMARY).exists():
            names[run.name] = _free(folder, run.name)
            plan.runs[place] = replace(run, name=names[run.name])
    plan.jobs = [names.get(name, name) for name in plan.jobs]
    return plan


def _lost(run: Run, folder: Path) -> tuple[str, ...]:
    """What a finished run is asked for now and did not keep."""
    kept = not run.config["keep_learner"] or records.last_learner(folder) is not None
    return () if kept else ("without its learner: launcher.resume=fresh does it again and keeps it",)


def _free(folder: Path, name: str) -> str:
    number = 2
    while (folder / f"{name}_{number}" / records.SUMMARY).exists():
        number += 1
    return f"{name}_{number}"


def drift(attempt: dict[str, Any], here: dict[str, Any]) -> tuple[str, ...]:
    """In what a run's provenance differs from that of this process, in words."""
    found = []
    if attempt["git"]["commit"] != here["git"]["commit"]:
        found.append(f"code {_short(attempt['git']['commit'])}, now {_short(here['git']['commit'])}")
    elif attempt["git"]["dirty"] or here["git"]["dirty"]:
        found.append("code with uncommitted changes")
    then, now = attempt["versions"], here["versions"]
    found += [f"{name} {then.get(name)}, now {now[name]}" for name in now if then.get(name) != now[name]]
    for key in ("cpu", "instructions", "logical_cores", "gpus"):
        after = here["hardware"][key]
        before = attempt["hardware"].get(key, after)  # instructions were not recorded once
        if key == "gpus" and set(before) == set(after):  # a worker is shown its own of several
            continue
        found += [f"{key} {_few(before)}, now {_few(after)}"] if before != after else []
    return tuple(found)


def _short(commit: str | None) -> str:
    return commit[:8] if commit else "unknown"


def _few(value: Any) -> str:
    if not isinstance(value, list):
        return str(value)
    return " + ".join(f"{count} x {name}" for name, count in Counter(value).items()) or "none"
