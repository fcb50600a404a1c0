"""Records for a commit: a sweep's counts, config and provenance in one small file, without texts and token ids.

``EXPERIMENT.jsonl.gz`` has a line a run, by name. The same records make the same bytes.
"""

from __future__ import annotations

import gzip
import io
import json
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from tracedraft import counts
from tracedraft.analysis.frames import Counted
from tracedraft.errors import UserError
from tracedraft.files import write_atomically

ENDING = ".jsonl.gz"


def write_packed(runs: Iterable[Counted], file: Path) -> None:
    """Write a packed file, whole or not at all.

    Raises:
        UserError: the disk refused it.
    """
    buffer = io.BytesIO()
    # No name and no time in its header.
    with gzip.GzipFile("", "wb", 9, buffer, mtime=0) as packed:
        for run in sorted(runs, key=lambda run: (run.header["folder"], run.header["fingerprint"])):
            line = {"header": run.header, "complete": run.complete, "rows": run.rows}
            packed.write(json.dumps(line, separators=(",", ":"), allow_nan=False).encode() + b"\n")
    write_atomically(file, lambda path: path.write_bytes(buffer.getvalue()), "choose another place")


def packed_lines(file: Path) -> Iterator[str]:
    """The runs of a packed file, each as its line.

    Raises:
        UserError: it can't be read, or is damaged.
    """
    try:
        data = gzip.decompress(file.read_bytes())
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{file} can't be read ({error}): restore it") from error
    return (line.decode() for line in data.split(b"\n") if line)


def unpacked(line: str, file: Path) -> Counted:
    """A run from its line.

    Raises:
        UserError: it is no such line, or of another version.
    """
    try:
        run = json.loads(line)
        if run["header"]["counts"] != counts.VERSION:
            raise ValueError(f"version {run['header']['counts']}, expected {counts.VERSION}")
        path = f"{file}:{run['header']['folder']}"
        return Counted(run["header"], run["rows"], path, "records", run["complete"])
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{file}: not a packed record ({error}): tracedraft pack makes them") from error
