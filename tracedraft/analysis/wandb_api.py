"""Runs on a W&B server, by the name of their project."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tracedraft.analysis.sources import Found, Item, digest, item_digest, merged, settle
from tracedraft.errors import UserError
from tracedraft.mirror import COUNTS


def api_items(project: str, folders: Iterable[Path]) -> list[Item]:
    """The runs of a project, the W&B runs of their attempts together.

    Args:
        project: ENTITY/PROJECT, or PROJECT of the default entity.
        folders: run folders at hand, to check them against.

    Raises:
        UserError: the server can't be asked, or knows no such project.
    """
    import wandb

    groups: dict[tuple[str, ...], list[Any]] = {}
    try:
        for run in wandb.Api().runs(project, lazy=False):
            groups.setdefault(_identity(run), []).append(run)
    except Exception as error:  # whatever the client raises
        raise UserError(
            f"W&B project {project}: {_line(error)}: give ENTITY/PROJECT, and have WANDB_API_KEY set"
        ) from error
    at_hand = {folder.name: folder for folder in folders}
    return [_item(project, runs, at_hand.get(names[-1])) for names, runs in sorted(groups.items())]


def _identity(run: Any) -> tuple[str, ...]:
    """Experiment, fingerprint and folder: the same for all attempts at a run."""
    names = [run.config.get(key) for key in ("experiment", "fingerprint", "folder")]
    return tuple(names) if all(isinstance(name, str) for name in names) else ("", "", run.id)


def _item(project: str, runs: list[Any], folder: Path | None) -> Item:
    _, fingerprint, name = _identity(runs[0])
    runs = sorted(runs, key=lambda run: len(run.config.get("attempts", ())))
    facts = [[run.id, run.state, str(run.heartbeat_at), run.history_line_count, run.config] for run in runs]
    key = digest([project, facts, item_digest(folder, []) if folder else None])
    path = f"{project}/{runs[-1].id}"
    return Item(path, (fingerprint, name), key, _reader(path, runs, folder))


def _reader(path: str, runs: list[Any], folder: Path | None) -> Callable[[], Found]:
    def read() -> Found:
        attempts, trouble = [], None
        for run in runs:
            trouble = None if run.state == "finished" else f"{run.id} is {run.state}"
            try:
                history = list(run.scan_history(keys=[COUNTS]))
                attempts.append((run.config, history, run.state == "finished"))
            except Exception as error:  # whatever the client raises
                trouble = f"{run.id}: {_line(error)}"
        return settle(*merged(attempts, path, "wandb-api", trouble), folder)

    return read


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}".removesuffix(": ")
