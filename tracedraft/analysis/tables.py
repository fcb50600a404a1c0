"""A table as data: cells that know their interval and how many conversations they rest on, and their runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import pandas as pd

from tracedraft import statistics
from tracedraft.analysis.check import sharing
from tracedraft.analysis.frames import BETWEEN
from tracedraft.errors import UserError
from tracedraft.statistics import Estimate

Kind = Literal["text", "tau", "gain", "ratio", "rate", "share", "milliseconds", "seconds", "count", "bytes"]
MIXTURES = ("hardware", "versions", "lossless")


class Refused(UserError):
    """Runs that do not belong into one table."""


class Missing(UserError):
    """Cells without a value where all were asked for."""


@dataclass(frozen=True)
class Cell:
    """One value, a number or a text. Without one ``value`` is None and ``reason`` says why.

    Attributes:
        n: conversations.
        p: two-sided, that a ratio is 1; None: not tested. Corrected once the table is finished.
        spread: standard deviation over runs, where that is what the layout shows.
        caveat: the interval stands for less than it seems to (see ``Table.notes``).
    """

    value: float | str | None
    low: float | None = None
    high: float | None = None
    n: int = 0
    p: float | None = None
    spread: float | None = None
    reason: str | None = None
    caveat: bool = False
    best: bool = False
    significant: bool = False


@dataclass(frozen=True)
class Column:
    """``group`` stands above the titles of neighbours. The best of ``compare`` columns of a row is marked."""

    title: str
    kind: Kind = "text"
    group: str = ""
    compare: str = ""


@dataclass(frozen=True)
class Row:
    """``group``: rows of one are set apart from the next, and their best is marked where the table says so."""

    labels: tuple[str, ...]
    cells: tuple[Cell, ...]
    group: str = ""


@dataclass(frozen=True)
class Table:
    """What a writer needs.

    Attributes:
        labels: titles of the columns that name a row.
        notes: sentences below it.
        runs: the frame of the runs that it was made from.
        warnings: what was asked to be let in, though it spoils comparisons.
        best_down: the best of a column inside a group of rows is marked, instead of the best of a row.
    """

    name: str
    title: str
    labels: tuple[str, ...]
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    runs: pd.DataFrame
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    best_down: bool = False

    def cells(self) -> Iterable[tuple[Row, Column, Cell]]:
        return (
            (row, column, cell) for row in self.rows for column, cell in zip(self.columns, row.cells, strict=True)
        )

    def missing(self) -> list[dict[str, Any]]:
        """Cells without a value: labels of the row, title of the column, conversations, and why."""
        return [
            {"row": list(row.labels), "column": name_of(column), "n": cell.n, "reason": cell.reason}
            for row, column, cell in self.cells()
            if cell.value is None
        ]


CAVEAT = (
    f"°: fewer than {statistics.ORDERS} orders of the stream; the interval is over what there is, says little of "
    "others, and is not tested."
)


def name_of(column: Column) -> str:
    return f"{column.group}: {column.title}" if column.group else column.title


def cell(found: Estimate) -> Cell:
    """A cell of an estimate."""
    missing = found.value is None
    return Cell(
        found.value, found.low, found.high, found.n, found.p,
        reason=found.reason if missing else None, caveat=found.low is not None and found.p is None,
    )  # fmt: skip


def text(value: Any) -> Cell:
    return Cell(str(value))


def finished(table: Table, allow: Sequence[str] = ()) -> Table:
    """The table with its best and its significant cells marked, after a look at what it was made from.

    Args:
        allow: of ``MIXTURES``, what may be mixed; the table then says so.

    Raises:
        Refused: runs on different hardware, of different versions, or whose audit failed, that were not allowed.
    """
    warnings = guard(table, allow)
    tested = [cell.p for _, _, cell in table.cells() if cell.p is not None]
    corrected = iter(statistics.holm(tested))
    rows = []
    for row in table.rows:
        cells = (_corrected(cell, next(corrected)) if cell.p is not None else cell for cell in row.cells)
        rows.append(dataclasses.replace(row, cells=tuple(cells)))
    marked = (
        _best_down(table.columns, rows) if table.best_down else [_best_across(table.columns, row) for row in rows]
    )
    notes = list(table.notes)
    if tested:
        notes.append(
            "95 % intervals by Student's t on the logarithm, its standard error by bootstrap over conversations; "
            f"significant at 5 % after Holm's correction over the {len(tested)} tests of this table."
        )
    if any(cell.caveat for _, _, cell in table.cells()):
        notes.append(CAVEAT)
    if any(cell.value is None for _, _, cell in table.cells()):
        notes.append("— (n): no value, with the number of conversations there are.")
    return dataclasses.replace(table, rows=tuple(marked), notes=tuple(notes), warnings=warnings)


def guard(table: Table, allow: Sequence[str]) -> tuple[str, ...]:
    """Warnings to be shown; see ``finished``."""
    warnings = []
    timed = table.runs[table.runs["measure"] == "time"]
    rows: list[Any] = timed.to_dict("records")
    for what, name, values in (
        ("hardware", "hardware", _values(timed["hardware"])),
        ("hardware", "threads or workers", sorted({sharing(row) for row in rows})),
        ("versions", "versions", _values(table.runs["versions"])),
    ):
        if len(values) > 1 or any(BETWEEN in value for value in values):
            _refuse_unless(what in allow, table, what, f"runs of different {name}: {' | '.join(values)}")
            warnings.append(f"Mixed {name}: {' | '.join(values)}.")
    if len(timed) < len(table.runs) and len(machines := _values(table.runs["hardware"])) > 1:
        warnings.append(f"Counts from several machines: {' | '.join(machines)}.")
    if len(commits := _values(table.runs["code"])) > 1:
        warnings.append(f"Mixed code: {' | '.join(commits)} (+: with uncommitted changes).")
    elif any(commit.endswith("+") for commit in commits):
        warnings.append(f"Code with uncommitted changes: {commits[0]}.")
    failed = table.runs[table.runs["lossless"].map(lambda value: value is False)]
    if len(failed):
        names = ", ".join(
            f"{r.experiment}/{r.name}" for r in failed[["experiment", "name"]].itertuples(index=False, name="R")
        )
        _refuse_unless("lossless" in allow, table, "lossless", f"runs whose output was not the target's: {names}")
        warnings.append(f"Not lossless: {names}.")
    return tuple(warnings)


def _values(column: pd.Series) -> list[str]:
    """What runs had, and each of their attempts."""
    return sorted({value for values in column for value in values.split(BETWEEN)})


def _refuse_unless(allowed: bool, table: Table, what: str, why: str) -> None:
    if not allowed:
        raise Refused(f"table {table.name}: {why}: leave some out, or show them side by side by ALLOW={what}")


def _corrected(cell: Cell, p: float) -> Cell:
    return dataclasses.replace(cell, p=p, significant=p < 1 - statistics.LEVEL)


def _best_across(columns: Sequence[Column], row: Row) -> Row:
    cells = list(row.cells)
    for group in {column.compare for column in columns if column.compare}:
        places = [i for i, column in enumerate(columns) if column.compare == group]
        for i in _best([cells[i] for i in places], columns[places[0]].kind):
            cells[places[i]] = dataclasses.replace(cells[places[i]], best=True)
    return dataclasses.replace(row, cells=tuple(cells))


def _best_down(columns: Sequence[Column], rows: Sequence[Row]) -> list[Row]:
    cells = [list(row.cells) for row in rows]
    for at in [i for i, column in enumerate(columns) if column.compare]:
        for group in dict.fromkeys(row.group for row in rows):
            places = [i for i, row in enumerate(rows) if row.group == group]
            for i in _best([cells[i][at] for i in places], columns[at].kind):
                cells[places[i]][at] = dataclasses.replace(cells[places[i]][at], best=True)
    return [dataclasses.replace(row, cells=tuple(of)) for row, of in zip(rows, cells, strict=True)]


def _best(cells: Sequence[Cell], kind: Kind) -> list[int]:
    """Where the highest value stands, as far as three digits tell, among two or more.

    Of ratios only one above 1: otherwise the best is what they are taken over.
    """
    values = {i: round(cell.value, 3) for i, cell in enumerate(cells) if isinstance(cell.value, float)}
    if len(values) < 2 or len(set(values.values())) < 2:
        return []
    highest = max(values.values())
    return [i for i, value in values.items() if value == highest and (kind not in ("gain", "ratio") or highest > 1)]
