"""``tracedraft sync``: offline W&B runs to their server, one by one.

``wandb sync`` of many stops sending at the first broken file and still returns 0: each is sent and checked alone.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tracedraft.analysis.sources import run_folders
from tracedraft.analysis.wandb_log import log_files, read_log
from tracedraft.errors import UserError
from tracedraft.files import is_held
from tracedraft.records import ATTEMPTS

OFFLINE = "offline-"  # how the client names such folders


def offline_files(folder: Path) -> list[Path]:
    """The files of the offline W&B runs of the runs under a folder.

    Raises:
        UserError: none there.
    """
    files = [file for run in run_folders(folder) for file in log_files(run) if file.parent.name.startswith(OFFLINE)]
    if not files:
        raise UserError(f"{folder}: no offline W&B run there: give the folder of a sweep run with wandb.mode=offline")
    return files


def sync(files: list[Path], timeout: float) -> Iterator[tuple[Path, str, str | None]]:
    """Send what was not sent before.

    Args:
        timeout: seconds that one may take: a server that does not answer is asked again and again.

    Yields:
        the file, what became of it, and why it was not sent; None if it was.
    """
    for file in files:
        if _sent(file):
            yield file, "uploaded before", None
            continue
        trouble = _unfit(file) or _send(file, timeout)
        yield file, "failed" if trouble else "uploaded", trouble


def _sent(file: Path) -> bool:
    return file.with_suffix(".wandb.synced").exists()  # which the client leaves when the server has it all


def _unfit(file: Path) -> str | None:
    """Why a file should not be sent."""
    if is_held(file.parents[2] / ATTEMPTS):
        return "the run is still at work"
    try:
        damage = read_log(file).damage
    except UserError as error:
        return str(error)
    return damage and f"{file.name} is {damage}; the run's record is not touched by that"


def _send(file: Path, timeout: float) -> str | None:
    wandb = shutil.which("wandb")
    command = [wandb] if wandb else [sys.executable, "-m", "wandb"]
    environment = {key: value for key, value in os.environ.items() if key != "WANDB_MODE"}
    process = subprocess.Popen(
        [*command, "sync", str(file.parent)],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # with the client's own service
        process.communicate()
        return f"no answer within timeout={timeout:g} seconds"
    if process.returncode == 0 and _sent(file):
        return None
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower()]
    return next(reversed(errors or lines), f"wandb sync returned {process.returncode} and sent nothing")
