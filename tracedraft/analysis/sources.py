"""Where runs are read: W&B's files on disk, its server, run records, and records packed for a commit.

A W&B run is one attempt at a run, and shows all conversations of the run so far. Where the run's own record is at
hand, what W&B has is checked against it, and gives way to it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple
from warnings import catch_warnings, simplefilter

from omegaconf import OmegaConf
from yaml import YAMLError

from tracedraft import counts, records
from tracedraft.analysis.frames import Counted
from tracedraft.analysis.packed import ENDING, read_packed
from tracedraft.analysis.wandb_log import LOGS, log_files, read_log
from tracedraft.errors import UserError
from tracedraft.launch.ledger import LEDGER, read_ledger
from tracedraft.mirror import COUNTS

STRANGE = (AttributeError, LookupError, TypeError, ValueError, YAMLError)  # what files of another shape raise
Source = Literal["wandb-offline", "wandb-api", "records"]


class Found(NamedTuple):
    """A run, if it could be read, and what was wrong with where it was read."""

    run: Counted | None
    problem: str | None


@dataclass(frozen=True)
class Item:
    """A run that is there to be read.

    Attributes:
        path: for people.
        identity: fingerprint and folder name, alike wherever the run is read.
        key: a hash of all that ``read`` reads.
        packed: in a packed file, which serves where the run itself is not there.
    """

    path: str
    identity: tuple[str, str]
    key: str
    read: Callable[[], Found]
    packed: bool = False


def items_at(path: Path, source: Source) -> list[Item]:
    """The runs of a run folder, of the folder of a sweep or of several, or of a packed file or a folder of them.

    Raises:
        UserError: nothing there.
    """
    if not path.exists():
        raise UserError(f"{path}: no such file or folder: give the folder of a run or of a sweep")
    files = [path] if path.is_file() else sorted(path.glob(f"*{ENDING}"))
    folders = [] if path.is_file() else run_folders(path)
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # hashing lets other threads run
        found = list(pool.map(lambda folder: _folder_item(folder, source), folders))
    found += [_missing_item(name, why) for name, why in missing_runs(path, folders)]
    for file in files:
        try:
            found += _packed_items(file)
        except UserError as error:
            found.append(_missing_item(str(file), str(error)))
    return found


def run_folders(path: Path) -> list[Path]:
    """The run folders at most two levels under a folder, by name."""
    levels = ("", "*/", "*/*/")
    recorded = {file.parent for below in levels for file in path.glob(f"{below}{records.ATTEMPTS}")}
    logged = {file.parents[2] for below in levels for file in path.glob(f"{below}{LOGS}")}
    return sorted(recorded | logged)


def _folder_item(folder: Path, source: Source) -> Item:
    logs = log_files(folder) if source == "wandb-offline" else []
    recorded = (folder / records.ATTEMPTS).exists()

    def read() -> Found:
        logged, trouble = from_logs(folder, logs)
        return settle(logged, trouble, folder if recorded else None)

    identity = _fingerprint(folder, logs), folder.name
    return Item(str(folder), identity, digest([source, item_digest(folder, logs)]), read)


def _fingerprint(folder: Path, logs: list[Path]) -> str:
    with suppress(UserError, LookupError):
        return str(records.read_attempts(folder)[0]["fingerprint"])
    return next((_id(log)[0] for log in logs), "")


def item_digest(folder: Path, logs: list[Path]) -> str:
    """Of all that a record, and W&B's files beside it, say."""
    names = (records.ATTEMPTS, records.CONFIG, records.CONVERSATIONS, records.SUMMARY)
    kept = [folder / name for name in names]
    return digest([str(folder), (folder.parent / LEDGER).exists(), *(file_digest(file) for file in (*kept, *logs))])


def missing_runs(path: Path, folders: Iterable[Path]) -> list[tuple[str, str]]:
    """(folder, why) of runs that the ledgers at and below a folder know and that left nothing."""
    there = {folder.resolve() for folder in folders}
    found = []
    for ledger in sorted([*path.glob(LEDGER), *path.glob(f"*/{LEDGER}")]):
        states, others = read_ledger(ledger.parent)
        last = next((event["sweep"] for event in reversed(others) if event["event"] == "sweep"), "")
        for state in states.values():
            absent = (ledger.parent / state.run).resolve() not in there
            # What could not even be identified is no run any more once a later command asks for others.
            gone = state.facts.get("fingerprint") is None and state.sweep != last
            if absent and not (state.reused or gone or state.state == "excluded"):
                why = f"{state.state}: {state.reason}".removesuffix(": ")
                found.append((str(ledger.parent / state.run), f"left no record ({why})"))
    return found


def _missing_item(path: str, why: str) -> Item:
    return Item(path, ("", path), digest([path, why]), lambda: Found(None, why))


def _packed_items(file: Path) -> Iterator[Item]:
    content = file_digest(file)
    for path, run in read_packed(file):
        if isinstance(run, str):
            yield _missing_item(path, run)
        else:
            identity = run.header["fingerprint"], run.header["folder"]
            yield Item(path, identity, digest([path, content]), _known(run), packed=True)


def _known(run: Counted) -> Callable[[], Found]:
    return lambda: Found(run, None)


def digest(facts: Iterable[Any]) -> str:
    return hashlib.sha256(json.dumps(list(facts)).encode()).hexdigest()


def file_digest(file: Path) -> str:
    """Of its bytes; empty without the file."""
    try:
        with open(file, "rb") as data:
            return hashlib.file_digest(data, "sha256").hexdigest()
    except OSError:
        return ""


def from_record(folder: Path) -> Counted:
    """A run as its own record has it.

    Raises:
        UserError: it can't be read.
    """
    attempts, ended = records.read_attempts(folder), (folder / records.SUMMARY).exists()
    if not attempts or not (folder / records.CONFIG).exists():
        raise UserError(f"{folder} has no {records.ATTEMPTS} or no {records.CONFIG}: restore the run")
    with catch_warnings():
        # Of a run at work, or that a crash ended, the last line may be cut; a finished one has lost it.
        simplefilter("error" if ended else "ignore", records.TruncatedRecord)
        try:
            config: Any = OmegaConf.to_container(OmegaConf.load(folder / records.CONFIG))
            swept = folder.parent.name if (folder.parent / LEDGER).exists() else "single"
            experiment = attempts[-1].get("experiment") or config["wandb"]["group"] or swept
            rows = [counts.conversation(record) for record in records.read_conversations(folder)]
            header = counts.header(config, attempts, folder, experiment)
            if ended and len(rows) != (whole := records.read_summary(folder)["conversations"]):
                raise ValueError(f"{len(rows)} of {whole} conversations")
        except (records.TruncatedRecord, *STRANGE) as error:
            raise UserError(f"{folder}: not a whole record of this version ({error!r}): restore it") from error
    return Counted(header, rows, str(folder), "records", ended)


def from_logs(folder: Path, logs: list[Path]) -> tuple[Counted | None, str | None]:
    """A run as W&B's files have it, and what is wrong with the newest of them."""
    attempts, trouble = [], None
    for file in sorted(logs, key=_id):
        trouble = None
        try:
            log = read_log(file)
            attempts.append((log.config, log.history, log.exit_code == 0))
            trouble = log.damage or ("stopped before the run ended" if log.exit_code is None else None)
            trouble = trouble and f"{file.name} is {trouble}"
        except UserError as error:
            trouble = str(error)
    return merged(attempts, str(folder), "wandb-offline", trouble)


def _id(file: Path) -> tuple[str, int]:
    """Fingerprint and number of the attempt, from run-FINGERPRINT-aNUMBER-…"""
    parts = file.stem.split("-")
    number = parts[2].removeprefix("a") if len(parts) > 2 else ""
    return parts[1] if len(parts) > 1 else "", int(number) if number.isdigit() else 0


Attempt = tuple[dict[str, Any], Iterable[dict[str, Any]], bool]  # config, history, whether it ended well


def merged(
    attempts: list[Attempt], path: str, source: Source, trouble: str | None
) -> tuple[Counted | None, str | None]:
    """One run from its W&B runs, the oldest first: the newest counts, where it says anything.

    Args:
        trouble: what is wrong with the newest.
    """
    header, rows, complete, unreadable = None, {}, False, None
    for config, history, ended in attempts:
        try:
            header, complete, unreadable = counts.header_of(config), ended, None
            rows |= {row["index"]: row for row in (json.loads(each[COUNTS]) for each in history if COUNTS in each)}
        except (KeyError, ValueError) as error:
            unreadable = f"what W&B has can't be read ({error})"
    trouble = trouble or unreadable
    if header is None:
        return None, trouble
    if sorted(rows) != list(range(len(rows))):
        trouble = trouble or "W&B lacks conversations in between"
    return Counted(header, [rows[i] for i in sorted(rows)], path, source, complete and not trouble), trouble


def settle(logged: Counted | None, trouble: str | None, folder: Path | None) -> Found:
    """What W&B has, if it agrees with the record; else the record.

    Args:
        logged: None: W&B has nothing, or nothing readable.
        folder: of the record; None: not at hand.
    """
    if folder is None:
        return Found(logged, trouble)
    try:
        record = from_record(folder)
    except UserError as error:
        return Found(logged, trouble or str(error))
    if logged is None and trouble is None:
        return Found(record, None)
    difference = differ(logged, record) if logged is not None else "W&B has nothing of it"
    if difference is None:
        return Found(logged, None)
    return Found(record, f"taken from its record: {trouble or difference}")


def differ(logged: Counted, record: Counted) -> str | None:
    """In what W&B's account of a run differs from the record; None: in nothing."""
    if logged.header != record.header:
        names = [key for key in record.header if logged.header.get(key) != record.header[key]]
        return f"W&B has another {', '.join(names)}"
    for ours, theirs in zip(record.rows, logged.rows, strict=False):
        if ours != theirs:
            return f"W&B has other counts of conversation {ours['index']}"
    if len(logged.rows) != len(record.rows):
        return f"W&B has {len(logged.rows)} of {len(record.rows)} conversations"
    return None if logged.complete == record.complete else "W&B does not know that it ended"
