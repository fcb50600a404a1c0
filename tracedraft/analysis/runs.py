"""``load_runs``: the one way from logs and records to frames."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from omegaconf import OmegaConf

from tracedraft import counts, records
from tracedraft.analysis.frames import Counted, frames
from tracedraft.analysis.schema import Runs
from tracedraft.errors import UserError

Source = Literal["wandb-offline", "wandb-api", "records"]


def load_runs(paths: str | Path | Iterable[str | Path], source: Source = "records") -> Runs:
    """Read runs into frames.

    Args:
        paths: folders of runs or of sweeps.

    Raises:
        UserError: none of them holds a run.
    """
    given = [Path(paths)] if isinstance(paths, str | Path) else [Path(path) for path in paths]
    problems: list[tuple[str, str]] = []
    counted = []
    for folder in (run for path in given for run in run_folders(path)):
        try:
            counted.append(from_record(folder))
        except UserError as error:
            problems.append((str(folder), str(error)))
    return frames(counted, problems)


def run_folders(path: Path) -> list[Path]:
    """The runs at or under a folder, by name."""
    if (path / records.ATTEMPTS).exists():
        return [path]
    return sorted(file.parent for file in path.glob(f"**/{records.ATTEMPTS}"))


def from_record(folder: Path) -> Counted:
    """A run as its own record has it."""
    attempts = records.read_attempts(folder)
    config: Any = OmegaConf.to_container(OmegaConf.load(folder / records.CONFIG))
    group = config["wandb"]["group"] or folder.parent.name
    rows = [counts.conversation(record) for record in records.read_conversations(folder)]
    header = counts.header(config, attempts, folder, group)
    return Counted(header, rows, str(folder), "records", (folder / records.SUMMARY).exists())
