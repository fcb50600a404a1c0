"""What a notebook of ``analysis/`` starts from and leaves.

Its options are environment variables, so that the same file runs as a script, in Jupyter and under make.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tracedraft.analysis import figures, rendering
from tracedraft.analysis.runs import load_runs
from tracedraft.analysis.schema import Runs
from tracedraft.analysis.tables import MIXTURES, Missing, Refused, Table, finished
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
        out: folder of ``tables/`` and ``figures/``.
        strict: fail on cells without a value.
        allow: what may be mixed in one table, of ``MIXTURES``.
        mark: stands behind what is significant.
    """

    paths: tuple[str, ...]
    source: Any
    out: Path
    strict: bool
    allow: tuple[str, ...]
    mark: str

    @classmethod
    def from_environment(cls) -> Options:
        """From SOURCE, DIR, OUT, STRICT, ALLOW and MARK, where they are set; lists with spaces between.

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
        out = Path(os.environ.get("OUT") or HERE)
        strict = (os.environ.get("STRICT") or "0") not in ("0", "false")
        return cls(paths, source, out, strict, allow, os.environ.get("MARK") or rendering.SIGNIFICANT)


def load() -> Runs:
    """The runs that the options name, read once for all notebooks of a process; what is wrong with some is said."""
    options = Options.from_environment()
    return _load(options.paths, options.source)


@cache
def _load(paths: tuple[str, ...], source: Any) -> Runs:
    kept = os.environ.get("TRACEDRAFT_CACHE") or Path.home() / ".cache" / "tracedraft"
    data = load_runs(paths, source=source, cache=Path(kept) / "frames")
    for path, problem in data.problems:
        print(f"warning: {path}: {problem}", file=sys.stderr)
    print(f"{len(data.runs)} runs, {len(data.conversations)} conversations", file=sys.stderr)
    return data


failed: list[str] | None = None  # what went wrong with tables so far, while several notebooks run; else it is raised


def table(made: Table) -> Table:
    """Finish a table and write it, in all forms.

    Raises:
        UserError: see ``tables.finished`` and ``rendering.write``.
    """
    options = Options.from_environment()
    try:
        done = finished(made, options.allow)
        problems = load().problems
        rendering.write(done, options.out / "tables", options.source, problems, options.mark, options.strict)
        return done
    except (Refused, Missing) as error:
        if failed is None:
            raise
        failed.append(str(error))
        return made


def figure(made: Figure, name: str) -> Figure:
    """Write a figure, in all forms."""
    figures.save(made, Options.from_environment().out / "figures", name)
    return made
