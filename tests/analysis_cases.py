"""Runs of the tiny pair with their W&B logs, and a server that holds what such logs say."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from run_cases import composed, interrupted

from tracedraft.analysis.wandb_log import Log, log_files, read_log
from tracedraft.errors import UserError
from tracedraft.measure import measure

SAMPLED = ("decode.temperature=0.7", "decode.top_p=0.95", "adapter.every=4")
OFFLINE = "wandb.mode=offline"


def make_sweep(folder: Path) -> None:
    """A sweep of every kind of run: several turns, a learner between requests, two attempts, no log, no times."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("CONFIG_DIR", "CACHE_DIR", "DATA_DIR"):
            patch.setenv(f"WANDB_{name}", str(folder.parent / "wandb-home"))
        both = ("adapter=osd_persistent", "adapter.outer.update_interval=2", "adapter.inner.every=4", "plain=true")
        chat = ("workload=sample_chat", "workload.limit=3")
        measure(composed(*both, *chat, SAMPLED[0], OFFLINE), folder / "both", "s")
        stopped = composed(*SAMPLED, OFFLINE, "adapter=reset", "workload.limit=3")
        interrupted(stopped, folder / "stopped", 1, "s")
        measure(stopped, folder / "stopped", "s")
        measure(composed("adapter=fixed"), folder / "untracked", "s")
        rejecting = ("decode.acceptance=rejection", "decode.temperature=0.7", "adapter.every=4")
        measure(composed(*rejecting, OFFLINE, "adapter=persistent"), folder / "unpaired", "s")
        replayed = ("measure=acceptance", f"paths.recordings={folder.parent / 'recordings'}")
        measure(composed(*SAMPLED, *replayed, "adapter=persistent", OFFLINE), folder / "untimed", "s")
    for file in folder.glob("*/wandb/*run-*/*.wandb"):
        ended(file)


def ended(file: Path) -> Log:
    """The log once the client's own process has written it, which may take longer than the run."""
    deadline = time.monotonic() + 20
    while True:
        try:
            log = read_log(file)
            if log.exit_code is not None:
                return log
        except UserError:
            pass
        assert time.monotonic() < deadline, file
        time.sleep(0.05)


class Server:
    """Stands in for ``wandb.Api()``: the runs of a project as the server has them once the logs are there."""

    def __init__(self, folder: Path):
        files = [file for run in sorted(folder.iterdir()) for file in log_files(run)]
        self.found = [Served(read_log(file)) for file in files]
        self.asked: list[str] = []

    def runs(self, path: str, lazy: bool) -> list[Served]:
        assert not lazy  # else a request for each run's config
        self.asked.append(path)
        return self.found


class Served:
    heartbeat_at = "2026-01-01"

    def __init__(self, log: Log):
        self.id, self.log = log.id, log
        self.config = {key: value for key, value in log.config.items() if not key.startswith("_")}
        self.state = "finished" if log.exit_code == 0 else "failed"
        self.history_line_count = len(log.history)

    def scan_history(self, keys: list[str]) -> list[dict[str, Any]]:
        return [{key: row[key] for key in keys} for row in self.log.history if all(key in row for key in keys)]
