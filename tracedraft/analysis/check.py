"""The gate before publishing: what a set of runs falls short of."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from tracedraft.analysis.frames import BETWEEN
from tracedraft.analysis.schema import Runs
from tracedraft.statistics import ORDERS
from tracedraft.workloads.prompts import is_dev

CONVERSATIONS = 20  # different ones, behind each number
LISTED = 20  # names

Row = dict[str, Any]  # of the frame of runs


@dataclass(frozen=True)
class Finding:
    """One thing that falls short.

    Attributes:
        kind: unread, incomplete, duplicate, lossless, versions, code, hardware, split, orders or conversations.
        text: what it is, and what to do about it where that is not plain.
        runs: names of the runs that it concerns.
    """

    kind: str
    text: str
    runs: tuple[str, ...]


def findings(runs: Runs, conversations: int = CONVERSATIONS, orders: int = ORDERS) -> list[Finding]:
    """All that these runs fall short of, nothing if they may be published together.

    Args:
        conversations: fewest different ones that a workload and adapter need.
        orders: fewest orders of the stream (``workload.seed``) that an adapter needs which keeps what it learns.
    """
    rows = _records(runs.runs)
    answered: dict[str, set[str]] = {row["run"]: set() for row in rows}
    for row in _records(runs.conversations[["run", "id", "turns"]]):
        if row["turns"]:
            answered[row["run"]].add(row["id"])
    found = [*_unread(runs), *_unfinished(rows), *_lossless(rows), *_mixed(rows), *_development(runs)]
    for cell in _grouped(rows, lambda row: _settings(row["config"])).values():
        found += _small(cell, answered, conversations, orders)
    return found


def notes(runs: Runs) -> list[tuple[str, str]]:
    """Problems of reading that cost nothing, as where a record stood in for its W&B log."""
    read = set(runs.runs["path"])
    return [(path, reason) for path, reason in runs.problems if path in read]


def _records(frame: Any) -> list[Row]:
    return frame.to_dict("records")


def _grouped(rows: Iterable[Row], key: Callable[[Row], str]) -> dict[str, list[Row]]:
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups


def _names(rows: Iterable[Row]) -> tuple[str, ...]:
    return tuple(row["name"] for row in rows)


def unread(runs: Runs) -> list[tuple[str, str]]:
    """(path, reason) of runs that could not be read at all."""
    read = set(runs.runs["path"])
    return [(path, reason) for path, reason in runs.problems if path not in read]


def _unread(runs: Runs) -> Iterator[Finding]:
    lost = [{"name": path, "reason": reason} for path, reason in unread(runs)]
    for reason, same in _grouped(lost, lambda row: row["reason"]).items():
        yield Finding("unread", reason, _names(same))


def _unfinished(rows: list[Row]) -> Iterator[Finding]:
    if open_ones := [row for row in rows if not row["complete"]]:
        yield Finding("incomplete", "did not finish: the same command goes on with them", _names(open_ones))
    for fingerprint, same in _grouped(rows, lambda row: row["fingerprint"]).items():
        if len(same) > 1:
            yield Finding("duplicate", f"are the same run ({fingerprint}), and would count twice", _names(same))


def _lossless(rows: list[Row]) -> Iterator[Finding]:
    if failed := [row for row in rows if row["lossless"] is False]:
        tokens = sum(row["mismatches"] for row in failed)
        what = f"{tokens} tokens are not the target's" if tokens else "arms differ by more than near-ties"
        yield Finding("lossless", f"failed the audit: {what}", _names(failed))
    # Rejection sampling can't be audited, and what is replayed was when it was recorded.
    silent = [
        row
        for row in rows
        if row["lossless"] is None
        and row["measure"] == "time"
        and row["config"]["decode"].get("acceptance", "exact") == "exact"
    ]
    if silent:
        yield Finding("lossless", "were not audited", _names(silent))


def _mixed(rows: list[Row]) -> Iterator[Finding]:
    timed = [row for row in rows if row["measure"] == "time"]
    yield from _several("hardware", "were timed on different hardware, threads or workers", timed, _machine)
    yield from _several("versions", "ran on different versions", rows, lambda row: row["versions"])
    yield from _several("code", "ran different commits", rows, lambda row: row["code"])
    if dirty := [row for row in rows if "+" in row["code"]]:
        yield Finding("code", "ran code with uncommitted changes", _names(dirty))


def _several(kind: str, text: str, rows: list[Row], value: Callable[[Row], str]) -> Iterator[Finding]:
    groups = _grouped(rows, value)
    if len(groups) > 1:
        lines = [f"\n    {each}: {_few(_names(same))}" for each, same in groups.items()]
        yield Finding(kind, f"{text}:{''.join(lines)}", _names(rows))
    for each, same in groups.items():
        if BETWEEN in each:
            yield Finding(kind, f"{text} from attempt to attempt: {each}", _names(same))


def _machine(row: Row) -> str:
    return f"{row['hardware']}, {sharing(row)}"


def sharing(row: Row) -> str:
    """How a run used its machine, which decides its timings as much; what its attempts differ in is a / b."""
    numbers = (f"{row[name]:g}" if row[name] == row[name] else f"a{BETWEEN}b" for name in ("threads", "workers"))
    return "{} threads, {} at once".format(*numbers)


def development(runs: Runs) -> Counter[str]:
    """Prompts of the development split that each run answered, whatever split it asked for; without runs of none.

    Settings were chosen by them. Of workloads that are never tuned on no prompt is one.
    """
    asked = runs.conversations.loc[runs.conversations["turns"] > 0, ["run", "id"]].drop_duplicates()
    names = {id: id.partition("/")[0] for id in asked["id"].unique()}
    tuned_on = {id for id in names if is_dev(id)}
    test_only = dict(zip(runs.runs["run"], runs.runs["test_only"], strict=True))
    asked = asked[asked["id"].isin(tuned_on)]
    pairs = zip(asked["run"], asked["id"], strict=True)
    return Counter(run for run, id in pairs if names[id] not in test_only[run])


def _development(runs: Runs) -> Iterator[Finding]:
    if tuned := development(runs):
        text = f"answered {tuned.total()} prompts that settings are tuned on: workload.split=test leaves them out"
        yield Finding("split", text, tuple(runs.runs.loc[runs.runs["run"].isin(tuned), "name"]))


def _without_seed(workload: dict[str, Any]) -> dict[str, Any]:
    """A workload's config, and those of a stream's sources, which take its seed for theirs."""
    inner = {key: _without_seed(value) for key, value in workload.items() if isinstance(value, dict)}
    return {key: value for key, value in (workload | inner).items() if key != "seed"}


def _settings(config: dict[str, Any]) -> str:
    """What all runs behind one number share: everything but their seeds."""
    workload = _without_seed(config["workload"])
    return json.dumps(config | {"workload": workload, "seed": None}, sort_keys=True)


def _small(cell: list[Row], answered: dict[str, set[str]], conversations: int, orders: int) -> Iterator[Finding]:
    first = cell[0]
    what = f"{first['adapter']} on {first['workload']} at temperature {first['temperature']:g}"
    seen = len({row["order"] for row in cell})
    if first["stateful"] and seen < orders:
        wanted = ",".join(map(str, range(orders)))
        yield Finding("orders", f"{what} has {seen} of {orders} orders: workload.seed={wanted}", _names(cell))
    if (count := len(set().union(*(answered[row["run"]] for row in cell)))) < conversations:
        yield Finding("conversations", f"{what} has {count} of {conversations} conversations", _names(cell))


def _few(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(names[:LISTED]) + more


def report(found: list[Finding], runs: int) -> str:
    """Two lines or more a finding: what it is, and the runs' names unless it is all of them.

    Args:
        runs: how many there are in all.
    """
    who = [f"all {runs} runs" if len(f.runs) == runs > 1 else _few(f.runs) for f in found]
    return "".join(f"{f.kind}: {f.text}\n    {names}\n" for f, names in zip(found, who, strict=True))
