"""The run directory: what a run leaves on disk, how it goes on after a crash, and how it is read back.

A run directory holds ``config.yaml`` (resolved), ``attempts.jsonl`` (provenance of each process that worked on
it, the file that the one at work locks), ``conversations.jsonl`` (one record a line, in order), while it goes on
the learner's state (what one between requests made of the draft, apart), and at the end ``summary.json`` and, if
asked for, that state as ``learner.pt`` and ``draft.pt``. This is the source of truth; everything else that shows a
run is made from it.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from yaml import YAMLError

from tracedraft.config import differing, identifying
from tracedraft.errors import UserError
from tracedraft.files import exclusive, unwritable, write_atomically

CONFIG, CONVERSATIONS, SUMMARY = "config.yaml", "conversations.jsonl", "summary.json"
ATTEMPTS, LEARNER, DRAFT = "attempts.jsonl", "learner.pt", "draft.pt"


class TruncatedRecord(UserWarning):
    """The last line of a file was cut short, as a crash leaves it, and was dropped."""


class RunDir:
    """One run's folder, owned by one process while open. Made by ``open``; use it as a context manager.

    Attributes:
        done: the records that earlier attempts left, in order.
        attempt: this process's number, from 1.
    """

    def __init__(self, path: Path, lines: Any, lock: Any, done: list[dict[str, Any]], attempt: int):
        self.path, self.done, self.attempt = path, done, attempt
        self._lines, self._lock = lines, lock

    @classmethod
    def open(cls, path: Path, config: dict[str, Any], origin: dict[str, Any]) -> RunDir:
        """Start a run in ``path``, or go on with the same run where a crash left it.

        Args:
            config: the composed config; interpolations are resolved.
            origin: this attempt's provenance, with its ``fingerprint``.

        Raises:
            UserError: the folder holds another run, a finished one or one in progress, or can't be written.
        """
        path = Path(path)
        text = OmegaConf.to_yaml(OmegaConf.create(config), resolve=True)
        settled: Any = OmegaConf.to_container(OmegaConf.create(text))
        refuse_other(path, origin["fingerprint"], settled)
        try:
            lock = exclusive(path / ATTEMPTS, _CHOOSE)
            # What was there before the lock may have been another process's start.
            earlier = refuse_other(path, origin["fingerprint"], settled)
            _whole_lines(lock, path / ATTEMPTS)
            if not earlier:
                write_atomically(path / CONFIG, lambda file: file.write_text(text, encoding="utf-8"), _CHOOSE)
            lines = open(path / CONVERSATIONS, "ab+", buffering=0)  # noqa: SIM115
            done = _whole_lines(lines, path / CONVERSATIONS)
            for file in path.glob("*-[0-9]*.pt"):  # of a conversation whose record a crash lost
                if file.stem.partition("-")[2] > f"{len(done):05d}":
                    file.unlink()
            _add_line(lock, {"attempt": earlier + 1, "from": len(done), **origin})
        except OSError as error:
            raise unwritable(path, error, _CHOOSE) from error
        return cls(path, lines, lock, done, earlier + 1)

    def append(self, record: dict[str, Any]) -> None:
        """Add one record to ``conversations.jsonl``; it is on the disk when this returns.

        Raises:
            ValueError: the record holds NaN or infinity, which JSON has not; nothing is written.
            UserError: the disk refused it; what it took of the line is cut off again.
        """
        try:
            _add_line(self._lines, record)
        except ValueError as error:
            raise ValueError(f"{self.path / CONVERSATIONS}: record {record.get('id')!r}: {error}") from error
        except OSError as error:
            raise unwritable(self.path / CONVERSATIONS, error, _CHOOSE) from error

    def keep_learner(self, count: int, write: Callable[[Path], object]) -> None:
        """Keep what a learner knows after ``count`` conversations, before the last one's record is appended.

        A crash between the two finds the state of the record before; older ones are dropped.

        Raises:
            UserError: the disk refused it.
        """
        write_atomically(self._learner(count), write, _CHOOSE)
        for number in range(count - 1):
            self._learner(number).unlink(missing_ok=True)

    def keep_draft(self, count: int, write: Callable[[Path], object]) -> None:
        """Keep the draft that serves after ``count`` conversations, before ``keep_learner`` does the rest.

        A crash before the last record is appended finds the draft before; older ones are dropped.

        Raises:
            UserError: the disk refused it.
        """
        write_atomically(self.path / f"draft-{count:05d}.pt", write, _CHOOSE)
        for file in sorted(self.path.glob("draft-*.pt"))[:-2]:
            file.unlink()

    def learner(self) -> Path | None:
        """The file that belongs to the last record of ``done``; None without one."""
        file = self._learner(len(self.done))
        return file if file.exists() else None

    def draft(self) -> Path | None:
        """The draft that served after the last record of ``done``; None: the one of the start."""
        upto = f"draft-{len(self.done):05d}.pt"
        return max((file for file in self.path.glob("draft-*.pt") if file.name <= upto), default=None)

    def _learner(self, count: int) -> Path:
        return self.path / f"learner-{count:05d}.pt"

    def write_summary(self, summary: dict[str, Any], keep_learner: bool = False) -> None:
        """Write ``summary.json``: a reader finds all of it or none.

        Args:
            keep_learner: leave the learner's last state as ``learner.pt``; otherwise it is dropped.

        Raises:
            ValueError: the summary holds NaN or infinity.
            UserError: the disk refused it; an earlier summary stays as it was.
        """
        text = json.dumps(summary, allow_nan=False, indent=1) + "\n"
        write_atomically(self.path / SUMMARY, lambda file: file.write_text(text, encoding="utf-8"), _CHOOSE)
        # After the summary: a run that is cut off before it must find the state under its number.
        for pattern, kept in (("learner-*.pt", LEARNER), ("draft-*.pt", DRAFT)):
            states = sorted(self.path.glob(pattern))
            if keep_learner and states:
                states.pop().replace(self.path / kept)
            for file in states:
                file.unlink()

    def close(self) -> None:
        self._lines.close()
        self._lock.close()

    def __enter__(self) -> RunDir:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _add_line(file: Any, record: dict[str, Any]) -> None:
    """Append one line, on the disk or not at all."""
    data = (json.dumps(record, allow_nan=False, separators=(",", ":")) + "\n").encode()
    before = os.fstat(file.fileno()).st_size
    try:
        if file.write(data) != len(data):
            raise OSError(None, "the disk took a part of the line only")
        os.fsync(file.fileno())
    except OSError:
        file.truncate(before)
        raise


def _whole_lines(file: Any, path: Path) -> list[dict[str, Any]]:
    """The records of an open file; a last line that a crash cut short is cut off."""
    file.seek(0)
    data = file.read()
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) < len(data):
        file.truncate(len(whole))
    return _parse_lines(whole, path)


_SETTINGS = ("target", "draft", "adapter", "workload", "decode", "seed", "measure")


def refuse_other(path: Path, fingerprint: str, config: dict[str, Any]) -> int:
    """How many attempts at this very run ``path`` holds.

    Raises:
        UserError: what is there is something else, or a finished run.
    """
    if path.exists() and not path.is_dir():
        raise UserError(f"{path} is not a folder: {_CHOOSE}")
    attempts = read_attempts(path)
    # In this order: a run that starts this moment makes its attempts file first.
    unknown = any((path / name).exists() for name in (CONVERSATIONS, CONFIG)) and not (path / ATTEMPTS).exists()
    if unknown:
        raise UserError(f"{path} already holds a run that doesn't say which: {_CHOOSE}")
    if attempts and attempts[0]["fingerprint"] != fingerprint:
        raise UserError(
            f"{path} already holds another run ({attempts[0]['fingerprint']}, this one is {fingerprint}; "
            f"{_apart(path / CONFIG, config) or f'{CONFIG} there says how it was started'}): {_CHOOSE}"
        )
    if (path / SUMMARY).exists():
        raise UserError(f"{path} already holds a finished run: {_CHOOSE}")
    return len(attempts)


def _apart(file: Path, config: dict[str, Any]) -> str:
    """In which settings that may change a result the run there differs, in words."""
    try:
        there: Any = OmegaConf.to_container(OmegaConf.load(file))
        then, now = ({key: identifying(of.get(key)) for key in _SETTINGS} for of in (there, config))
        return ", ".join(differing(then, now))
    except (OSError, AttributeError, YAMLError):
        return ""


def read_attempts(path: Path) -> list[dict[str, Any]]:
    """Provenance of each attempt at a run, in order; a line cut short is no attempt."""
    try:
        data = (path / ATTEMPTS).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return []
    return _parse_lines(data[: data.rfind(b"\n") + 1], path / ATTEMPTS)


def last_learner(path: Path) -> Path | None:
    """The learner's last state that a run in ``path`` left: kept at its end, or of its last conversation."""
    return _last(path, LEARNER)


def last_draft(path: Path) -> Path | None:
    """The same of the draft that a learner between requests made."""
    return _last(path, DRAFT)


def _last(path: Path, name: str) -> Path | None:
    files = [*sorted(path.glob(name.replace(".", "-*."))), path / name]
    return next((file for file in reversed(files) if file.exists()), None)


def finished(path: Path, fingerprint: str) -> dict[str, Any] | None:
    """The summary of this very run, if ``path`` holds it whole."""
    attempts = read_attempts(path) if path.is_dir() else []
    if (path / SUMMARY).exists() and attempts and attempts[0]["fingerprint"] == fingerprint:
        return read_summary(path)
    return None


_CHOOSE = "choose another hydra.run.dir (hydra.sweep.dir in a sweep)"


def _parse_lines(data: bytes, path: Path) -> list[dict[str, Any]]:
    records = []
    for number, line in enumerate(data.split(b"\n")[:-1], 1):
        try:
            records.append(_parse_object(line))
        except ValueError as error:
            raise UserError(f"{path}:{number}: not a record ({error}): restore the run") from error
    return records


def read_conversations(path: Path) -> list[dict[str, Any]]:
    """Read the records of a run directory (or of the JSONL file itself), in order.

    A last line that a crash cut short is dropped with a ``TruncatedRecord`` warning.

    Raises:
        UserError: no such file, or a line that is not one JSON object; the message names file and line.
    """
    path = Path(path)
    file = path / CONVERSATIONS if path.is_dir() else path
    data = _read_bytes(file)
    whole = data[: data.rfind(b"\n") + 1]
    records = _parse_lines(whole, file)
    if len(whole) < len(data):
        try:
            records.append(_parse_object(data[len(whole) :]))
        except ValueError:
            number = len(records) + 1
            warnings.warn(f"{file}:{number}: cut short, dropped", TruncatedRecord, stacklevel=2)
    return records


def read_summary(path: Path) -> dict[str, Any]:
    """Read ``summary.json`` of a run directory (or the file itself).

    Raises:
        UserError: no such file, or not one JSON object.
    """
    path = Path(path)
    file = path / SUMMARY if path.is_dir() else path
    try:
        return _parse_object(_read_bytes(file))
    except ValueError as error:
        raise UserError(f"{file}: not a summary ({error}): restore the run") from error


def _read_bytes(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise UserError(f"{file} can't be read ({error.strerror}): give the folder of a run") from error


def _parse_object(text: bytes) -> dict[str, Any]:
    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    value = json.loads(text, parse_constant=refuse)
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    return value
