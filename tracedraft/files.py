"""Files that are whole or not there."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Run ``write(temporary path)`` and move the file or folder into place, on the disk, whole or not at all.

    Raises:
        OSError: the disk refused it; nothing temporary stays.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}."))
    try:
        write(scratch / path.name)
        if (scratch / path.name).is_file():
            with open(scratch / path.name, "rb+") as file:
                os.fsync(file.fileno())
        os.replace(scratch / path.name, path)
    except OSError:
        if not path.is_dir():  # another process moved the same folder into place first
            raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
