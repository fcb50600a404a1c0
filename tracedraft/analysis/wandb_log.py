"""The files that W&B leaves on disk, ``run-ID.wandb``: the one place that knows their format.

They are read as they are, in a millisecond: LevelDB's log of W&B's own protocol buffers. Where the installed client
has no such buffers, its command ``wandb leet inspect --json`` reads them, at a second a file.
"""

from __future__ import annotations

import json
import struct
import subprocess
import sys
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tracedraft.errors import UserError

LOGS = "wandb/*run-*/run-*.wandb"  # in a run folder, without the link latest-run
HEADER = b":W&B\xe1\xbe\x00"  # a sign, the client's magic number, and the format's version
BLOCK = 32768
CHUNK = struct.Struct("<IHB")  # CRC of what follows it, length of the payload, kind
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


class Damaged(Exception):
    """The rest of a file can't be read."""


@dataclass
class Log:
    """One W&B run as its file has it.

    Attributes:
        id: of the W&B run.
        config: as logged.
        history: the logged rows, in order.
        exit_code: of a run that ended; None: it did not, or that part is lost.
        damage: why the file was read in part only; None: it is whole as far as it goes.
    """

    id: str | None = None
    config: dict[str, Any] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    exit_code: int | None = None
    damage: str | None = None


def log_files(folder: Path) -> list[Path]:
    """The files of a run folder, one an attempt."""
    return sorted(folder.glob(LOGS))


def read_log(file: Path) -> Log:
    """Read as much of a file as is whole.

    Raises:
        UserError: it can't be opened, or holds no run.
    """
    try:
        data = file.read_bytes()
    except OSError as error:
        raise UserError(f"{file} can't be read ({error.strerror})") from error
    try:
        log = _folded(_by_format(data))
    except (ImportError, KeyError):  # of a client that keeps its buffers elsewhere, or others
        log = _by_command(file)
    if log.id is None:
        raise UserError(f"{file} holds no run ({log.damage or 'nothing was written'})")
    return log


def payloads(data: bytes) -> Iterator[bytes]:
    """The records of a LevelDB log: chunks in blocks of 32 KiB, a record in one or several.

    Raises:
        Damaged: from here on.
    """
    if data[: len(HEADER)] != HEADER:
        raise Damaged("it does not begin as a W&B file does")
    at, parts = len(HEADER), []
    while at < len(data):
        if (room := BLOCK - at % BLOCK) < CHUNK.size:
            at += room
            continue
        if at + CHUNK.size > len(data):
            raise Damaged("cut short")
        checksum, size, kind = CHUNK.unpack_from(data, at)
        payload = data[at + CHUNK.size : at + CHUNK.size + size]
        if len(payload) < size:
            raise Damaged("cut short")
        if zlib.crc32(payload, zlib.crc32(bytes([kind]))) != checksum or (kind in (FULL, FIRST)) == bool(parts):
            raise Damaged(f"damaged at byte {at}")
        parts.append(payload)
        at += CHUNK.size + size
        if kind in (FULL, LAST):
            yield b"".join(parts)
            parts = []
    if parts:
        raise Damaged("cut short")


Event = tuple[str, Any]  # "run" (id), "config" or "row" (a dict), "exit" (a code), "damage" (why)


def _folded(events: Iterable[Event]) -> Log:
    log = Log()
    for kind, value in events:
        if kind == "run":
            log.id = value
        elif kind == "config":
            log.config |= value
        elif kind == "row":
            log.history.append(value)
        elif kind == "exit":
            log.exit_code = value
        else:
            log.damage = value
    return log


def _by_format(data: bytes) -> Iterator[Event]:
    from google.protobuf.message import DecodeError
    from wandb.proto import wandb_internal_pb2

    parse = vars(wandb_internal_pb2)["Record"].FromString  # a name that it makes as it loads
    try:
        for payload in payloads(data):
            record: Any = parse(payload)
            kind = record.WhichOneof("record_type")
            if kind == "run":
                yield "run", record.run.run_id
                yield "config", _items(record.run.config.update)
            elif kind == "config":
                yield "config", _items(record.config.update)
            elif kind == "history":
                yield "row", _items(record.history.item)
            elif kind == "exit":
                yield "exit", record.exit.exit_code
    except (Damaged, DecodeError) as reason:
        yield "damage", str(reason)


def _items(items: Any) -> dict[str, Any]:
    return {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items}


def _by_command(file: Path) -> Log:
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8")
    if done.returncode:
        raise UserError(f"{file}: wandb leet inspect failed: {' '.join(done.stderr.split())[:200]}")
    log = _folded(event for line in done.stdout.split("\n") if line for event in _told(json.loads(line)))
    log.damage = " ".join(done.stderr.split()) or None
    return log


def _told(line: dict[str, Any]) -> Iterator[Event]:
    kind = line["type"]
    told = line.get(kind) or {}
    if kind == "run":
        yield "run", told["run_id"]
    if kind in ("run", "config"):
        yield "config", (told.get("config") or told).get("update", {})
    elif kind == "history":
        yield "row", told["item"]
    elif kind == "exit":
        yield "exit", told.get("exit_code", 0)
