"""Tables of finished runs, for the terminal and as Markdown. Reads summaries only: cheap to import."""

from __future__ import annotations

import atexit
import contextlib
import re
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from tracedraft.errors import UserError
from tracedraft.files import write_atomically
from tracedraft.records import CONFIG, SUMMARY, read_summary

MISSING = "—"


def row(summary: dict[str, Any]) -> dict[str, Any]:
    """The numbers of one table row, from a run's summary. What the summary lacks is None."""
    fixed = summary.get("fixed") or {}
    updates = summary.get("updates") or {}
    names = ("workload", "adapter", "draft", "target", "conversations", "tokens", "lossless", "near_ties")
    numbers = ("tau", "tokens_per_s")
    paired = ("speedup", "speedup_interval")
    return (
        {name: summary.get(name) for name in (*names, *paired)}
        | {name: summary.get(name) for name in numbers}
        | {f"fixed_{name}": fixed.get(name) for name in numbers}
        | {"committed": updates.get("committed"), "attempted": updates.get("attempted")}
    )


def result_table(rows: list[dict[str, Any]]) -> Table:
    """A table of ``row`` values. Names may fold on a narrow terminal, numbers never; print it by ``show``."""
    table = Table()
    for (title, _), texts in zip(_columns(rows), zip(*_cells(rows), strict=True), strict=True):
        if title in _NAMES:
            table.add_column(title, overflow="fold", min_width=len(title))
        else:
            width = max(map(len, texts))
            table.add_column(title, justify="right", no_wrap=True, min_width=width)
    for cells in _cells(rows)[1:]:
        # As Text, since brackets in a plain string would be read as markup.
        table.add_row(*map(Text, cells))
    return table


def result_markdown(rows: list[dict[str, Any]]) -> str:
    """The same table in GitHub Markdown, ending in a newline."""
    return markdown(_cells(rows), _NAMES)


def markdown(lines: list[list[str]], names: tuple[str, ...]) -> str:
    """A table in GitHub Markdown, its titles first; columns of numbers, all but ``names``, lean to the right."""
    header, *body = [[cell.replace("|", "\\|") for cell in cells] for cells in lines]
    rule = ["---" if title in names else "---:" for title in header]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in [header, rule, *body])


def show(table: Table, file: TextIO | None = None, width: int | None = None) -> None:
    """Print a table with every number whole, whatever the terminal.

    Args:
        file: where to; None: stdout.
        width: columns to fit into; None: those of the terminal, or any number where there is none. A table
            whose numbers need more runs over it.
    """
    out = sys.stdout if file is None else file
    console = Console(file=out, width=width)
    borders = 3 * len(table.columns) + 1
    needed = borders + sum(column.min_width or 0 for column in table.columns)
    if width is None and not console.is_terminal:
        needed = max(needed, Measurement.get(console, console.options.update(width=10_000), table).maximum)
    console.width = max(console.width, needed)
    with console.capture() as capture:
        console.print(table)
    _write(capture.get(), out)


class SweepTable(Callback):
    """Hydra callback: makes the folder of a sweep, and concludes one that ran in this process."""

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        folder = Path(config.hydra.sweep.dir)
        _make(folder, "hydra.sweep.dir")
        # Hydra leaves on_multirun_end out when a job has failed, which is when the list of failures matters.
        atexit.register(self.on_multirun_end, config)

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        atexit.unregister(self.on_multirun_end)
        sweep = Path(config.hydra.sweep.dir)
        # The pool knows which of the folder's runs were asked for, and concludes itself.
        pooled = OmegaConf.select(config, "launcher") and config.hydra.runtime.choices["hydra/launcher"] == "pool"
        if sweep.is_dir() and not pooled:
            conclude(sweep, runs_of(sweep), [])


def conclude(sweep: Path, runs: list[Path], failed: list[tuple[str, str]]) -> None:
    """Print the table of finished runs and the (name, reason) of failed ones, and keep both as ``table.md``.

    A run without a readable summary counts as failed.
    """
    rows, unreadable = read_runs(runs)
    failed = failed + unreadable
    if rows:
        show(result_table(rows))
    for name, reason in failed:
        _write(f"failed: {name} ({reason})\n", sys.stdout)
    text = result_markdown(rows)
    if failed:
        text += "\nFailed:\n\n" + "".join(f"- {name} ({reason})\n" for name, reason in failed)
    instead = "choose another hydra.sweep.dir"
    try:
        write_atomically(sweep / "table.md", lambda path: path.write_text(text, encoding="utf-8"), instead)
    except UserError as error:
        _write(f"warning: {error}\n", sys.stderr)


class RunFolder(Callback):
    """Hydra callback: makes a single run's folder."""

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        _make(Path(config.hydra.run.dir), "hydra.run.dir")


_made: list[Path] = []  # by this process, innermost first


def _make(folder: Path, key: str) -> None:
    """Hydra makes the folder before any code of ours runs, and meets a refusal with a traceback."""
    _made[:] = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        print(f"error: {key}={folder} can't be made ({error.strerror}): choose another", file=sys.stderr)
        raise SystemExit(2) from None


def unmake() -> None:
    """Take back the folders made for a run that left nothing in them."""
    with contextlib.suppress(OSError):  # not empty
        for folder in _made:
            folder.rmdir()


def runs_of(sweep: Path) -> list[Path]:
    """The folders of a sweep's runs, in natural order."""
    runs = [path for path in sweep.iterdir() if path.is_dir() and not path.name.startswith(".")]
    return sorted(runs, key=lambda path: _natural(path.name))


def read_runs(runs: list[Path]) -> tuple[list[dict[str, Any]], list[tuple[str, str]]]:
    """The rows of finished runs, and (name, reason) of the others."""
    rows, failed = [], []
    for run in runs:
        if not (run / SUMMARY).exists():
            failed.append((run.name, f"no {SUMMARY}"))
            continue
        try:
            rows.append(row(read_summary(run)) | {"config": settings_of(run)})
        except UserError as error:
            failed.append((run.name, str(error)))
    for each, settings in zip(rows, varied(rows), strict=True):
        each["settings"] = settings
    return rows, failed


def settings_of(run: Path) -> dict[str, Any]:
    """A run's config by dotted key, without what only says where things lie; empty where there is none."""

    def flat(node: dict[Any, Any], above: str) -> dict[str, Any]:
        pairs = {}
        for key, value in node.items():
            pairs |= flat(value, f"{above}{key}.") if isinstance(value, dict) else {f"{above}{key}": value}
        return pairs

    if not (run / CONFIG).exists():
        return {}
    config = OmegaConf.to_container(OmegaConf.load(run / CONFIG))
    assert isinstance(config, dict)
    return flat(
        {key: value for key, value in config.items() if key not in ("paths", "wandb", "launcher", "hydra")}, ""
    )


def varied(rows: list[dict[str, Any]]) -> list[str]:
    """What tells each row from others of its workload and adapter: the keys whose values differ, as ``key=value``.

    Of a group whose options differ, the option, and no key that is the same wherever it is chosen; nor one that goes
    with its namesake further up, as the seed of a stream's sources does.

    Args:
        rows: with their run's ``config`` by dotted key.
    """
    alike: dict[tuple[Any, Any], list[dict[str, Any]]] = {}
    for each in rows:
        alike.setdefault((each["workload"], each["adapter"]), []).append(each["config"])
    differ = {
        key
        for configs in alike.values()
        for key in set().union(*configs)
        if len({repr(config.get(key)) for config in configs}) > 1
    }
    configs = [r["config"] for r in rows]
    told = {key for key in differ if _told_by_option(key, differ, configs) or _told_above(key, differ, configs)}
    keys = sorted(differ - told)
    short = Counter(key.rpartition(".")[2] for key in keys)
    names = {key: key if short[key.rpartition(".")[2]] > 1 else key.rpartition(".")[2] for key in keys}
    names |= {key: key.removesuffix(".name") for key in keys if key.endswith(".name")}
    return [" ".join(f"{names[key]}={r['config'][key]}" for key in keys if key in r["config"]) for r in rows]


def _told_by_option(key: str, differ: set[str], configs: list[dict[str, Any]]) -> bool:
    name = f"{key.partition('.')[0]}.name"
    if name not in differ or key == name:
        return False
    values: dict[Any, set[str]] = {}
    for config in configs:
        values.setdefault(config.get(name), set()).add(repr(config.get(key)))
    return all(len(found) == 1 for found in values.values())


def _told_above(key: str, differ: set[str], configs: list[dict[str, Any]]) -> bool:
    above, _, name = key.rpartition(".")
    return any(
        all(config.get(key) == config.get(other) for config in configs)
        for other in differ
        if other != key and other.rpartition(".")[2] == name and above.startswith(other.removesuffix(name))
    )


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"([0-9]+)", name)]


def _write(text: str, file: TextIO) -> None:
    # A terminal without these signs must not end a run with an error.
    encoding = getattr(file, "encoding", None) or "utf-8"
    file.write(text.encode(encoding, "replace").decode(encoding))
    file.flush()


def _text(value: Any) -> str:
    return MISSING if value is None else str(value)


def number(value: float | None, digits: int, unit: str = "") -> str:
    return MISSING if value is None else f"{value:.{digits}f}{unit}"


def _interval(bounds: list[float] | None) -> str:
    return "" if bounds is None else f" [{bounds[0]:.2f}, {bounds[1]:.2f}]"


def _ties(count: int | None) -> str:
    return f" ({count} near-tie{'s' * (count > 1)})" if count else ""


def _both_arms(name: str, digits: int) -> Callable[[dict[str, Any]], str]:
    return lambda r: f"{number(r[f'fixed_{name}'], digits)} → {number(r[name], digits)}"


_NAMES = ("workload", "adapter", "settings")
_COLUMNS: tuple[tuple[str, Callable[[dict[str, Any]], str]], ...] = (
    ("workload", lambda r: _text(r["workload"])),
    ("adapter", lambda r: _text(r["adapter"])),
    ("settings", lambda r: r.get("settings", "")),
    ("conv.", lambda r: _text(r["conversations"])),
    ("tokens", lambda r: _text(r["tokens"])),
    ("fixed → tau", _both_arms("tau", 3)),
    ("fixed → tok/s", _both_arms("tokens_per_s", 1)),
    ("speedup", lambda r: number(r["speedup"], 3, "×") + _interval(r["speedup_interval"])),  # noqa: RUF001
    ("updates", lambda r: f"{_text(r['committed'])}/{_text(r['attempted'])}"),
    ("lossless", lambda r: {None: MISSING, True: "✓", False: "✗"}[r["lossless"]] + _ties(r["near_ties"])),
)


def _columns(rows: list[dict[str, Any]]) -> tuple[tuple[str, Callable[[dict[str, Any]], str]], ...]:
    """All but those that no row has anything for."""
    return tuple(column for column in _COLUMNS if column[0] != "settings" or any(r.get("settings") for r in rows))


def _cells(rows: list[dict[str, Any]]) -> list[list[str]]:
    columns = _columns(rows)
    return [[title for title, _ in columns], *([cell(r) for _, cell in columns] for r in rows)]
