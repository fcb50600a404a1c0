"""The W&B mirror of a run and its null twin. Run records are the truth: a mirror may break, a run not."""

from __future__ import annotations

import signal
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

FINISH_TIMEOUT = 120.0  # seconds
SAMPLING = 15.0  # seconds between system metrics: both arms share what it costs


class Tracker(ABC):
    """Mirrors rows of a run elsewhere.

    Attributes:
        error: the first failure of the mirror, in one line; None while it works. After one, every call
            does nothing.
    """

    error: str | None

    @abstractmethod
    def log(self, row: dict[str, Any], step: int) -> None:
        """Mirror one row; nested dicts become dotted keys. ``step`` grows from row to row."""

    @abstractmethod
    def table(self, name: str, columns: Sequence[str], rows: Any) -> None:
        """Mirror a whole table, a list of rows."""

    @abstractmethod
    def finish(self, summary: dict[str, Any], exit_code: int) -> None:
        """Mirror the summary, flush everything and end. ``exit_code`` 0 marks success."""


class NullTracker(Tracker):
    """Mirrors nothing."""

    def __init__(self) -> None:
        self.error = None

    def log(self, row: dict[str, Any], step: int) -> None:
        pass

    def table(self, name: str, columns: Sequence[str], rows: Any) -> None:
        pass

    def finish(self, summary: dict[str, Any], exit_code: int) -> None:
        pass


class WandbTracker(Tracker):
    """Mirrors to one W&B run.

    Args:
        mode: "online" or "offline".
        hidden: keys that programs read, so that nothing shows them.
        of_rows: keys, or beginnings with *, of which the last row would otherwise stand for the whole run.
        init: further arguments of ``wandb.init``.
    """

    def __init__(
        self, mode: Literal["online", "offline"], hidden: Sequence[str] = (), of_rows: Sequence[str] = (), **init: Any
    ):
        self.error = None
        self._run: Any = None

        def start() -> None:
            import wandb

            settings = wandb.Settings(
                quiet=True,
                silent=True,
                console="off",
                disable_git=True,  # ours is in the config, for the right checkout
                disable_code=True,
                x_stats_sampling_interval=SAMPLING,
                finish_timeout=FINISH_TIMEOUT,  # by default a lost network holds the process for hours
                finish_timeout_raises=True,
            )
            # "create_new", since a process may hold several runs, one after another or side by side.
            self._run = wandb.init(mode=mode, reinit="create_new", settings=settings, **init)
            for key in hidden:
                self._run.define_metric(key, summary="none", hidden=True)
            for key in of_rows:
                self._run.define_metric(key, summary="none")

        self._try("init", start)

    def log(self, row: dict[str, Any], step: int) -> None:
        self._try("log", lambda: self._run.log(flatten(row), step=step))

    def table(self, name: str, columns: Sequence[str], rows: Any) -> None:
        def add() -> None:
            import wandb

            self._run.log({name: wandb.Table(columns=list(columns), data=rows)})

        if rows:
            self._try("table", add)

    def finish(self, summary: dict[str, Any], exit_code: int) -> None:
        run, self._run = self._run, None

        def end() -> None:
            run.summary.update(flatten(summary))
            run.finish(exit_code=exit_code)

        if run is not None:
            self._try("finish", end, always=True)

    def _try(self, name: str, action: Callable[[], None], always: bool = False) -> None:
        if self.error is not None and not always:
            return
        try:
            action()
        except Exception as error:  # whatever the client raises, the run goes on
            text = next(iter(str(error).splitlines()), "")
            self.error = self.error or f"wandb {name}: {type(error).__name__}: {text}".removesuffix(": ")


def open_tracker(
    mode: Literal["online", "offline", "disabled"],
    project: str,
    entity: str | None,
    group: str | None,
    job_type: str | None,
    tags: Sequence[str],
    config: dict[str, Any],
    run_dir: Path,
    run_id: str,
    hidden: Sequence[str] = (),
    of_rows: Sequence[str] = (),
) -> Tracker:
    """Open the mirror of one run. A client that fails to start is recorded in ``error``, not raised.

    Args:
        mode: "online", "offline" (files under ``run_dir``/wandb, to be synced later) or "disabled".
        config: what the mirror shows as the run's config.
        run_dir: an existing folder, whose name the mirror shows.
        run_id: unique in the project; never one that was used before.
        hidden: keys of rows that programs read, so that the mirror does not show them.
        of_rows: keys of rows, or beginnings with *, that say nothing of the whole run.
    """
    if mode == "disabled":
        return NullTracker()
    return WandbTracker(
        mode,
        hidden,
        of_rows,
        name=run_dir.name,
        project=project,
        entity=entity,
        group=group,
        job_type=job_type,
        tags=list(tags),
        config=config,
        dir=str(run_dir),
        id=run_id,
    )


def flatten(row: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dicts as one level of dotted keys; other values stay as they are."""
    flat: dict[str, Any] = {}
    for key, value in row.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


@contextmanager
def sigterm_as_exit() -> Iterator[None]:
    """Turn SIGTERM into ``SystemExit(143)``, so that ``finally`` blocks run and a mirror is flushed.

    Only the first one: while the run winds down, further ones are ignored. Outside the main thread, where
    Python allows no handlers, this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise SystemExit(128 + signal.SIGTERM)

    previous = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        # None stands for a handler that was not set from Python and can't be set again.
        signal.signal(signal.SIGTERM, signal.SIG_DFL if previous is None else previous)
