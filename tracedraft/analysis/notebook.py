"""What a notebook of ``analysis/`` starts from and leaves.

Its options are environment variables, so that the same file runs as a script, in Jupyter and under make.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tracedraft.analysis import figures, rendering
from tracedraft.analysis.runs import load_runs
from tracedraft.analysis.schema import Runs
from tracedraft.analysis.tables import MIXTURES, Missing, Table, finished
from tracedraft.errors import UserError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HERE = Path("analysis")
SOURCES = ("wandb-offline", "wandb-api", "records")


@dataclass(frozen=True)
class Options:
    """What to read, and how to show it.

    Attributes:
        paths: folders of runs, of sweeps or of packed records; for the source wandb-api names of projects.
        source: of folders of runs, what to read: W&B's files there, its server, or the records.
        records: of the source wandb-api: folders of records at hand, to check against what the server has.
        out: folder of ``tables/`` and ``figures/``.
        strict: fail on cells without a value.
        allow: what may be mixed in one table, of ``MIXTURES``.
        mark: stands behind what is significant.
    """

    paths: tuple[str, ...]
    source: Any
    records: tuple[str, ...]
    out: Path
    strict: bool
    allow: tuple[str, ...]
    mark: str

    @classmethod
    def from_environment(cls) -> Options:
        """From SOURCE, DIR, RECORDS, OUT, STRICT, ALLOW and MARK, where they are set; lists with spaces between.

        Raises:
            UserError: a value that is none of those there are.
        """
        source = os.environ.get("SOURCE") or "wandb-offline"
        allow = tuple((os.environ.get("ALLOW") or "").replace(",", " ").split())
        if source not in SOURCES:
            raise UserError(f"SOURCE={source}: expected one of {', '.join(SOURCES)}")
        if unknown := set(allow) - set(MIXTURES):
            raise UserError(f"ALLOW={' '.join(sorted(unknown))}: expected some of {', '.join(MIXTURES)}")
        paths = tuple((os.environ.get("DIR") or str(HERE / "records")).split())
        records = tuple((os.environ.get("RECORDS") or "").split())
        if records and source != "wandb-api":
            raise UserError(
                f"RECORDS={' '.join(records)}: only SOURCE=wandb-api is checked against other folders, "
                f"SOURCE={source} against the records in DIR: leave it out"
            )
        out = Path(os.environ.get("OUT") or HERE)
        strict = (os.environ.get("STRICT") or "0") not in ("0", "false")
        return cls(paths, source, records, out, strict, allow, os.environ.get("MARK") or rendering.SIGNIFICANT)


def load() -> Runs:
    """The runs that the options name, read once for all notebooks of a process; what is wrong with some is said."""
    options = Options.from_environment()
    return _load(options.paths, options.source, options.records)


@cache
def _load(paths: tuple[str, ...], source: Any, records: tuple[str, ...]) -> Runs:
    kept = os.environ.get("TRACEDRAFT_CACHE") or Path.home() / ".cache" / "tracedraft"
    data = load_runs(paths, source=source, records=records, cache=Path(kept) / "frames")
    for path, problem in data.problems:
        print(f"warning: {path}: {problem}", file=sys.stderr)
    print(f"{len(data.runs)} runs, {len(data.conversations)} conversations", file=sys.stderr)
    return data


failed: list[str] | None = None  # what could not be made so far, while several notebooks run; else it is raised


@dataclass(frozen=True)
class Shown:
    """A table, as Jupyter shows it."""

    table: Table
    mark: str

    def _repr_html_(self) -> str:
        return rendering.as_html(self.table, self.mark)


def table(name: str, make: Callable[..., Table], data: Runs, *args: Any) -> Shown | None:
    """Make a table, finish it and write it, in all forms.

    While several notebooks run, what goes wrong is noted in ``failed``, and the result is None.

    Args:
        name: of its files.
        make: given ``data`` and ``args``.

    Raises:
        UserError: see ``make``, ``tables.finished`` and ``rendering.write``.
    """
    options = Options.from_environment()
    folder = options.out / "tables"
    with _alone(name, folder, rendering.ENDINGS):
        done = finished(dataclasses.replace(make(data, *args), name=name), options.allow)
        rendering.write(done, folder, data.left_out, options.mark, options.strict)
        return Shown(done, options.mark)


def figure(
    name: str, draw: Callable[..., Figure], select: Callable[..., Any], data: Runs, *args: Any
) -> Figure | None:
    """Draw what ``select`` picks of ``data``, given ``args``, and write it in all forms; see ``table``."""
    folder = Options.from_environment().out / "figures"
    with _alone(name, folder, [f".{ending}" for ending in figures.UNDATED]):
        made = draw(select(data, *args))
        figures.save(made, folder, name)
        return made


@contextmanager
def _alone(name: str, folder: Path, endings: Iterable[str]) -> Iterator[None]:
    """What fails in here leaves no older files, which would pass for its own, and does not stop what comes next."""
    try:
        yield
    except UserError as error:
        if not isinstance(error, Missing):  # its files were written
            for ending in endings:
                (folder / f"{name}{ending}").unlink(missing_ok=True)
        if failed is None:
            raise
        failed.append(f"{name}: {error}")
