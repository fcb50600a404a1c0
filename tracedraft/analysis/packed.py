"""Records for a commit: a sweep's counts, config and provenance in one small file, without texts and token ids.

``EXPERIMENT.jsonl.gz`` has a line a run, by name, and one for each that left nothing. The same records make the same
bytes.
"""

from __future__ import annotations

import gzip
import io
import json
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tracedraft import counts
from tracedraft.analysis.frames import Counted
from tracedraft.errors import UserError
from tracedraft.files import write_atomically

ENDING = ".jsonl.gz"


def write_packed(runs: Iterable[Counted], missing: Iterable[tuple[str, str]], file: Path) -> None:
    """Write a packed file, whole or not at all.

    Args:
        missing: (name, why) of runs that left nothing.

    Raises:
        UserError: the disk refused it.
    """
    lines: list[dict[str, Any]] = [
        {"header": run.header, "complete": run.complete, "rows": run.rows}
        for run in sorted(runs, key=lambda run: (run.header["folder"], run.header["fingerprint"]))
    ]
    lines += [{"missing": name, "why": why} for name, why in sorted(missing)]
    buffer = io.BytesIO()
    # No name and no time in its header.
    with gzip.GzipFile("", "wb", 9, buffer, mtime=0) as packed:
        for line in lines:
            packed.write(json.dumps(line, separators=(",", ":"), allow_nan=False).encode() + b"\n")
    write_atomically(file, lambda path: path.write_bytes(buffer.getvalue()), "choose another place")


def read_packed(file: Path) -> list[tuple[str, Counted | str]]:
    """(path of a run, the run, or why there is none), in the file's order.

    Raises:
        UserError: it can't be read, or is of another version.
    """
    try:
        data = gzip.decompress(file.read_bytes())
        if not data:
            raise ValueError("empty")
        lines = [json.loads(line) for line in data.split(b"\n") if line]
        return [_run(line, file) for line in lines]
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{file} can't be read ({error}): restore it") from error
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{file}: not packed records ({error}): tracedraft pack makes them") from error


def _run(line: dict[str, Any], file: Path) -> tuple[str, Counted | str]:
    if "missing" in line:
        return f"{file}:{line['missing']}", line["why"]
    header = line["header"]
    if header["counts"] != counts.VERSION:
        raise ValueError(f"version {header['counts']}, expected {counts.VERSION}")
    path = f"{file}:{header['folder']}"
    return path, Counted(header, line["rows"], path, "records", line["complete"])
