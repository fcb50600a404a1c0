"""What ``tracedraft check``, ``pack`` and ``sync`` print; each returns its exit status."""

from __future__ import annotations

from pathlib import Path

from tracedraft.analysis import check as gate
from tracedraft.analysis import sync as uploads
from tracedraft.analysis.frames import Counted
from tracedraft.analysis.packed import ENDING, write_packed
from tracedraft.analysis.runs import load_runs
from tracedraft.analysis.sources import from_record, missing_runs, run_folders
from tracedraft.errors import UserError


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def check(paths: list[str], conversations: int, orders: int) -> int:
    """Print what runs fall short of publishing.

    Raises:
        UserError: no run there.
    """
    runs = load_runs(paths)
    found = gate.findings(runs, conversations, orders)
    for path, reason in gate.notes(runs):
        print(f"note: {path}: {reason}")
    print(gate.report(found, len(runs.runs)), end="")
    verdict = _count(len(found), "finding") if found else "nothing falls short"
    print(f"{_count(len(runs.runs), 'run')}, {_count(len(runs.conversations), 'conversation')}: {verdict}")
    return 1 if found else 0


def pack(folder: Path, into: Path) -> int:
    """Write the records of a sweep as one file for a commit, and say what it holds.

    Raises:
        UserError: no run there, one whose record can't be read, or the disk refused it.
    """
    folders = run_folders(folder)
    runs: list[Counted] = [from_record(each) for each in folders]
    if not runs:
        raise UserError(f"{folder}: no run there: give the folder of a sweep")
    missing = [(Path(path).name, why) for path, why in missing_runs(folder, folders)]
    file = into / f"{folder.resolve().name}{ENDING}"
    write_packed(runs, missing, file)
    conversations, size = sum(len(run.rows) for run in runs), file.stat().st_size
    print(f"{file}: {_count(len(runs), 'run')}, {_count(conversations, 'conversation')}, {size / 1000:.0f} kB")
    for name, why in [*((r.header["folder"], "did not finish") for r in runs if not r.complete), *missing]:
        print(f"note: {name}: {why}")
    return 0


def sync(folder: Path, timeout: float) -> int:
    """Upload the offline W&B runs under a folder, each reported as it is done.

    Raises:
        UserError: none there.
    """
    files, failed = uploads.offline_files(folder), []
    for number, (file, state, trouble) in enumerate(uploads.sync(files, timeout), 1):
        name = file.parents[2].name
        print(f"[{number}/{len(files)}] {name}: {state}" + (f": {trouble}" if trouble else ""), flush=True)
        failed += [name] if trouble else []
    lost = f"; failed: {', '.join(failed)}" if failed else ""
    print(f"{len(files) - len(failed)} of {len(files)} uploaded{lost}")
    return 1 if failed else 0
