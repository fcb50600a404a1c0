"""Tables as Markdown, LaTeX, CSV and HTML, and the provenance beside them. The same table gives the same bytes."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
from collections.abc import Callable, Sequence
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

from tracedraft import statistics
from tracedraft.analysis.tables import Cell, Column, Kind, Missing, Table, name_of
from tracedraft.files import write_atomically
from tracedraft.report import MISSING, markdown

DIGITS = 6  # significant, in CSV
ENDINGS = (".md", ".tex", ".csv", ".html", ".provenance.json")
SIGNIFICANT = "*"


def _percent(ratio: float) -> str:
    return f"{round(100 * ratio - 100, 1) + 0.0:+.1f}"  # adding zero: no -0.0


_FORMATS: dict[Kind, Callable[[Any], str]] = {
    "text": str,
    "tau": "{:.3f}".format,
    "gain": lambda ratio: f"{_percent(ratio)} %",
    "ratio": "{:.3f}×".format,  # noqa: RUF001
    "rate": "{:.1f}".format,
    "share": lambda share: f"{100 * share:.1f} %",
    "milliseconds": "{:.2f}".format,
    "seconds": "{:.1f}".format,
    "count": "{:,.0f}".format,
    "bytes": lambda size: f"{size / 2**20:,.1f} MiB",
}
_BOUNDS: dict[Kind, Callable[[float], str]] = {
    "gain": lambda ratio: _percent(ratio),
    "ratio": "{:.3f}".format,
}


def shown(cell: Cell, column: Column, mark: str = SIGNIFICANT) -> str:
    """A cell's text: value, mark if significant, spread, interval; a dash and its n where there is none."""
    if cell.value is None:
        return f"{MISSING} ({cell.n})"
    if isinstance(cell.value, str):
        return cell.value
    parts = [_FORMATS[column.kind](cell.value) + (mark if cell.significant else "")]
    if cell.spread is not None:
        parts.append(f"± {_FORMATS[column.kind](cell.spread)}")
    if cell.low is not None and cell.high is not None:
        bounds = _BOUNDS.get(column.kind, _FORMATS[column.kind])
        parts.append(f"[{bounds(cell.low)}, {bounds(cell.high)}]" + ("°" if cell.caveat else ""))
    return " ".join(parts)


def shorter(table: Table) -> Table:
    """Without labels that all rows share, which become a note: for readers, not for programs."""
    values = [{row.labels[i] for row in table.rows} for i in range(len(table.labels))]
    kept = [i for i, of in enumerate(values) if len(of) != 1 or i == len(values) - 1]
    said = [f"{table.labels[i]}: {of.pop()}" for i, of in enumerate(values) if i not in kept and of != {MISSING}]
    rows = tuple(dataclasses.replace(row, labels=tuple(row.labels[i] for i in kept)) for row in table.rows)
    notes = ((f"{', '.join(said)}.",) if said else ()) + table.notes
    return dataclasses.replace(table, labels=tuple(table.labels[i] for i in kept), rows=rows, notes=notes)


def as_markdown(table: Table, mark: str = SIGNIFICANT) -> str:
    table = shorter(table)
    header = [*table.labels, *map(name_of, table.columns)]
    body = [
        [*row.labels, *(_bold(shown(c, k, mark), c.best) for c, k in zip(row.cells, table.columns, strict=True))]
        for row in table.rows
    ]
    names = (*table.labels, *(name_of(column) for column in table.columns if column.kind == "text"))
    warnings = "".join(f"**{warning}**\n\n" for warning in table.warnings)
    notes = "".join(f"\n{note}\n" for note in table.notes)
    return f"# {table.title}\n\n{warnings}{markdown([header, *body], names)}{notes}"


def _bold(text: str, best: bool) -> str:
    value, _, rest = text.partition(" [")
    return (f"**{value}**" + (f" [{rest}" if rest else "")) if best else text


def as_csv(table: Table) -> str:
    """Values at six digits, with n and, where there are any, bounds and p-value in columns of their own."""
    header: list[str] = list(table.labels)
    wanted = [_fields([row.cells[i] for row in table.rows]) for i in range(len(table.columns))]
    for column, fields in zip(table.columns, wanted, strict=True):
        header += [name_of(column), *(f"{name_of(column)}, {field}" for field in fields)]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(header)
    for row in table.rows:
        values = [
            getattr(cell, field)
            for cell, fields in zip(row.cells, wanted, strict=True)
            for field in ("value", *fields)
        ]
        writer.writerow([*row.labels, *map(_digits, values)])
    return out.getvalue()


def _fields(cells: Sequence[Cell]) -> list[str]:
    return [field for field in ("n", "spread", "low", "high", "p") if any(getattr(cell, field) for cell in cells)]


def _digits(value: Any) -> Any:
    return f"{value:.{DIGITS}g}" if isinstance(value, float) else value


def as_html(table: Table, mark: str = SIGNIFICANT) -> str:
    """A fragment: ``<figure class="table">``."""
    return _template("table.html").render(_context(table, mark))


def as_latex(table: Table, mark: str = SIGNIFICANT) -> str:
    """A ``table`` environment; needs the packages booktabs and graphicx."""
    return _template("table.tex").render(_context(table, mark))


def _context(table: Table, mark: str) -> dict[str, Any]:
    table = shorter(table)
    groups = [(name, len(list(same))) for name, same in groupby(column.group for column in table.columns)]
    rows = [
        {
            "labels": row.labels,
            "first_of_group": i > 0 and row.group != table.rows[i - 1].group,
            "cells": [
                {"text": shown(c, k, mark), "cell": c, "number": k.kind != "text"}
                for c, k in zip(row.cells, table.columns, strict=True)
            ],
        }
        for i, row in enumerate(table.rows)
    ]
    return {"table": table, "groups": groups if any(name for name, _ in groups) else [], "rows": rows}


@cache
def _template(name: str) -> Any:
    return environment(latex=name.endswith(".tex")).get_template(name)


def environment(latex: bool = False) -> Any:
    """Templates of this folder, with what is put into them escaped."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    loader = PackageLoader("tracedraft.analysis")
    if not latex:
        made = Environment(
            loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
        )
        made.filters["cell"] = _html_cell
        return made
    # Braces and percent signs are LaTeX's own.
    brackets = ("<%", "%>", "<<", ">>", "<#", "#>")
    names = ("block_start_string", "block_end_string", "variable_start_string", "variable_end_string",
             "comment_start_string", "comment_end_string")  # fmt: skip
    made = Environment(
        loader=loader, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
        **dict(zip(names, brackets, strict=True)),
    )  # fmt: skip
    made.filters |= {"tex": latex_escape, "cell": latex_cell}
    return made


_LATEX = str.maketrans({
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}",
    "\N{MULTIPLICATION SIGN}": r"$\times$", "\N{GREEK SMALL LETTER ALPHA}": r"$\alpha$", "Σ": r"$\Sigma$",
    "±": r"$\pm$", "°": r"$^\circ$", "—": "---", "→": r"$\to$", "…": r"\dots{}",
    "†": r"\textdagger{}", "‡": r"\textdaggerdbl{}", "τ": r"$\tau$",
})  # fmt: skip


def _html_cell(text: str) -> Any:
    from markupsafe import Markup

    value, _, interval = text.partition(" [")
    below = Markup('<span class="interval">[{}</span>').format(interval) if interval else ""
    return Markup("{}{}").format(value, below)


def latex_cell(text: str, best: bool) -> str:
    """A value over its interval: beside it, a row of a dozen would not be readable."""
    value, _, interval = text.partition(" [")
    shown = f"\\textbf{{{latex_escape(value)}}}" if best else latex_escape(value)
    return f"\\shortstack[r]{{{shown}\\\\{{\\scriptsize [{latex_escape(interval)}}}}}" if interval else shown


def latex_escape(text: Any) -> str:
    return str(text).translate(_LATEX)


def provenance(table: Table, left_out: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """What the table was made from: runs, what they ran on, and what is not in it."""
    shown = [
        "run", "fingerprint", "experiment", "name", "target", "draft", "adapter", "workload", "temperature", "seed",
        "order", "split", "measure", "source", "conversations", "lossless", "audited", "mismatches", "near_ties",
        "hardware", "threads", "workers", "code", "versions",
    ]  # fmt: skip
    runs = table.runs.sort_values(["experiment", "name", "run"])[shown]
    contents = [_contents(attempts) for attempts in table.runs.loc[runs.index, "attempts"]]
    return {
        "table": table.name,
        "runs": [
            {key: _plain(value) for key, value in row.items()} | {"sha256": hashes}
            for row, hashes in zip(runs.to_dict("records"), contents, strict=True)
        ],
        "missing": table.missing(),
        "left_out": [{"run": run, "reason": reason} for run, reason in left_out],
        "warnings": list(table.warnings),
        "statistics": {
            "interval": "Student's t on the logarithm, standard error by bootstrap",
            "resamples": statistics.RESAMPLES,
            "level": statistics.LEVEL,
            "tests": sum(cell.p is not None for _, _, cell in table.cells()),
            "correction": "Holm",
        },
    }


def _contents(attempts: list[dict[str, Any]]) -> dict[str, str | None]:
    """Hashes of the weights and the prompts; all attempts at a run have the same, or they would be another run."""
    names = ("target_weights", "draft_weights", "data")
    return {name: (attempts[0].get(name) or {}).get("sha256") for name in names}


def _plain(value: Any) -> Any:
    """JSON has no NaN, and no numpy numbers."""
    value = value.item() if hasattr(value, "item") else value
    return None if isinstance(value, float) and value != value else value


def write(
    table: Table,
    folder: Path,
    left_out: Sequence[tuple[str, str]] = (),
    mark: str = SIGNIFICANT,
    strict: bool = False,
) -> list[Path]:
    """Write ``NAME`` with each of ``ENDINGS``.

    Args:
        left_out: (path or id of a run, why it is not in the table).

    Raises:
        Missing: ``strict``, and a cell has no value; the files are written all the same, to see which.
    """
    made = (
        as_markdown(table, mark),
        as_latex(table, mark),
        as_csv(table),
        as_html(table, mark),
        json.dumps(provenance(table, left_out), indent=1, ensure_ascii=False) + "\n",
    )
    files = []
    for ending, content in zip(ENDINGS, made, strict=True):
        file = folder / f"{table.name}{ending}"
        write_atomically(file, lambda path: path.write_text(content, encoding="utf-8"), "choose another OUT")  # noqa: B023
        files.append(file)
    if strict and (missing := table.missing()):
        first = missing[0]
        raise Missing(
            f"table {table.name}: {len(missing)} cells without a value, {' '.join(first['row'])} {first['column']} "
            f"among them ({first['reason']}); run what is missing, or leave out STRICT=1"
        )
    return files
