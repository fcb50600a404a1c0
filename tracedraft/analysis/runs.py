"""``load_runs``: the one way from logs and records to frames."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tracedraft.analysis import cache as caches
from tracedraft.analysis.frames import frames
from tracedraft.analysis.schema import Runs
from tracedraft.analysis.sources import Item, Source, items_at, run_folders
from tracedraft.errors import UserError

Paths = str | Path | Iterable[str | Path]


def load_runs(paths: Paths, source: Source = "wandb-offline", records: Paths = (), cache: Path | None = None) -> Runs:
    """Read runs into frames.

    What W&B has is checked against the run's own record where that is at hand, and gives way to it; ``problems``
    says where it had to. A run that W&B has nothing of, as with ``wandb.mode=disabled``, is read from its record.

    Args:
        paths: folders of runs, of sweeps or of several; packed records, which serve where none of the folders
            holds the run, or a folder of them. For the source wandb-api names of projects, ENTITY/PROJECT.
        source: what to read of folders.
        records: folders of records to check what a server has against.
        cache: a folder in which to keep what was read, which is what makes thousands of runs quick.

    Raises:
        UserError: no such folder or project, or no run in all of them that can be read.
    """
    try:
        import pandas  # noqa: F401
        import pyarrow  # noqa: F401
    except ImportError as error:
        raise UserError(f"{error.name} is not installed: pip install 'tracedraft[analysis]'") from error
    given = [paths] if isinstance(paths, str | Path) else list(paths)
    if source == "wandb-api":
        from tracedraft.analysis.wandb_api import api_items

        beside = [records] if isinstance(records, str | Path) else list(records)
        folders = [folder for path in beside for folder in run_folders(Path(path))]
        items = [item for project in given for item in api_items(str(project), folders)]
    else:
        items = [item for path in given for item in items_at(Path(path), source)]
    if not items:
        raise UserError(f"{', '.join(map(str, given))}: no run there: give the folder of a sweep")
    tables, lost = caches.read(_distinct(items), cache)
    if not len(tables.runs):
        raise UserError(f"{lost[0][0]}: {lost[0][1]}; none of {len(lost)} could be read")
    return frames(tables, lost)


def _distinct(items: list[Item]) -> list[Item]:
    """Without packed records of runs that are there themselves, and without what was named twice."""
    found: dict[str, Item] = {}
    there = {item.identity for item in items if not item.packed}
    for item in items:
        if not (item.packed and item.identity in there):
            found.setdefault(item.path, item)
    return list(found.values())
