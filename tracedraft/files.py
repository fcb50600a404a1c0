"""Files that are whole or not there, and folders that one process at a time may write."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tracedraft.errors import UserError

SCRATCH = ".scratch"
# How torch.save and safetensors word what the disk refused them: neither raises OSError.
REFUSALS = ("inline_container.cc", "PytorchStreamWriter", "iostream error", "I/O error")


class Busy(UserError):
    """Another process is writing there."""


def write_atomically(path: Path, write: Callable[[Path], object], instead: str) -> None:
    """Run ``write(temporary path)`` and move the file or folder into place, on the disk, whole or not at all.

    Args:
        instead: what the user can choose when the disk has no room, ``choose another KEY``.

    Raises:
        UserError: the disk refused it; what was there before stays, and nothing temporary.
    """
    scratch = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}.", suffix=SCRATCH))
        write(scratch / path.name)
        if (scratch / path.name).is_file():
            with open(scratch / path.name, "rb+") as file:
                os.fsync(file.fileno())
        os.replace(scratch / path.name, path)
    except Exception as error:
        lost = isinstance(error, OSError) and error.errno in (errno.ENOTEMPTY, errno.EEXIST)
        if lost and scratch is not None and (scratch / path.name).is_dir():
            return  # another process moved the same folder into place first
        if isinstance(error, OSError) or any(words in str(error) for words in REFUSALS):
            raise unwritable(path, error, instead) from error
        raise
    finally:
        if scratch is not None:
            shutil.rmtree(scratch, ignore_errors=True)


def unwritable(path: Path, error: Exception, instead: str) -> UserError:
    reason = error.strerror or error if isinstance(error, OSError) else "the disk took a part of it only"
    return UserError(f"{path} can't be written ({reason}): free space there, or {instead}")


def exclusive(path: Path, instead: str, wait: bool = False) -> Any:
    """Open ``path`` to append bytes, locked until it is closed; what a killed owner of its folder left is removed.

    Args:
        wait: until no other process holds it.

    Raises:
        Busy: another process holds it.
        UserError: the disk refused it.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = open(path, "ab+", buffering=0)  # noqa: SIM115 - the caller's to close
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except OSError:
            file.close()
            raise
    except BlockingIOError:
        raise Busy(f"{path.parent}: another process is writing there: wait for it, or {instead}") from None
    except OSError as error:
        raise unwritable(path.parent, error, instead) from error
    remove_scratch(path.parent)
    return file


def is_held(path: Path) -> bool:
    """Whether another process has ``path`` open by ``exclusive``."""
    try:
        with open(path, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False
    return False


def remove_scratch(folder: Path) -> None:
    """Remove what a killed ``write_atomically`` left in a folder that no other process writes."""
    for left in folder.glob(f".*{SCRATCH}"):
        shutil.rmtree(left, ignore_errors=True)
