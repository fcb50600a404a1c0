"""From headers and rows of counts (``tracedraft.counts``) to typed frames."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tracedraft.analysis.schema import ARMS, CONVERSATIONS, RUNS, SERVING, UPDATES, Columns, Runs
from tracedraft.counts import UPDATE

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

NAN = float("nan")
BETWEEN = " / "  # attempts at one run that differ


@dataclass(frozen=True)
class Counted:
    """One run as any source yields it.

    Attributes:
        header, rows: see ``tracedraft.counts``.
        path: where it was read.
        source: wandb-offline, wandb-api or records.
        complete: it finished.
    """

    header: dict[str, Any]
    rows: list[dict[str, Any]]
    path: str
    source: str
    complete: bool


class Tables(NamedTuple):
    """Runs on their way to frames, one after the other: those columns, but for ``run``, in Arrow.

    Objects are JSON. ``runs`` also has what ``NOTES`` names.
    """

    runs: pa.Table
    conversations: pa.Table
    updates: pa.Table


NOTES: Columns = {
    "_key": ("str", "hash of all that the run was read from"),
    "_problem": ("str", "what was wrong with that; empty: nothing"),
    "_updates": ("int64", "rows in ``updates``; those in ``conversations`` stand in the run's own column"),
}
PARTS = (RUNS | NOTES, CONVERSATIONS, UPDATES)
KINDS = {"object": "string", "str": "string", "bool": "bool", "int64": "int64", "float64": "float64"}


def tables_of(run: Counted, key: str, problem: str | None) -> Tables:
    """One run."""
    updates = {name: [value for row in run.rows for value in row["updates"].get(name, ())] for name in UPDATE}
    updates["conversation"] = [row["index"] for row in run.rows for _ in row["updates"].get("round", ())]
    notes = {"_key": key, "_problem": problem or "", "_updates": len(updates["round"])}
    conversations = [conversation_row(row) for row in run.rows]
    return Tables(
        _table({name: [value] for name, value in (run_row(run) | notes).items()}, PARTS[0]),
        _table({name: [row[name] for row in conversations] for name in CONVERSATIONS if name != "run"}, PARTS[1]),
        _table(updates, PARTS[2]),
    )


def _table(values: dict[str, list[Any]], columns: Columns) -> pa.Table:
    import pyarrow as pa

    def array(name: str, dtype: str) -> pa.Array:
        plain = [json.dumps(value, separators=(",", ":")) for value in values[name]] if dtype == "object" else None
        return pa.array(values[name] if plain is None else plain, KINDS[dtype])

    return pa.table({name: array(name, dtype) for name, (dtype, _) in columns.items() if name != "run"})


def joined(parts: Sequence[Tables]) -> Tables:
    """Several, in order."""
    import pyarrow as pa

    empty = [_table({name: [] for name in columns}, columns) for columns in PARTS]
    return Tables(*(pa.concat_tables(column) for column in zip(empty, *parts, strict=True)))


def frames(tables: Tables, problems: list[tuple[str, str]]) -> Runs:
    """The frames, each run under its key."""
    import pyarrow as pa

    runs = tables.runs
    fingerprints, seen = runs["fingerprint"].to_pylist(), Counter[str]()
    keys = []
    for fingerprint in fingerprints:
        seen[fingerprint] += 1
        keys.append(fingerprint if seen[fingerprint] == 1 else f"{fingerprint}-{seen[fingerprint]}")
    noted = zip(runs["path"].to_pylist(), runs["_problem"].to_pylist(), strict=True)
    counts = [[1] * len(keys), runs["conversations"].to_pylist(), runs["_updates"].to_pylist()]
    names = pa.array(keys, "string")
    owners = [names.take(pa.array(np.repeat(np.arange(len(keys)), each))) for each in counts]
    kept = (tables.runs.drop_columns(list(NOTES)), tables.conversations, tables.updates)
    made = [_frame(table.add_column(0, "run", keys)) for table, keys in zip(kept, owners, strict=True)]
    return Runs(made[0], made[1], made[2], problems + [(path, problem) for path, problem in noted if problem])


def _frame(table: pa.Table) -> pd.DataFrame:
    import pandas as pd

    columns = next(c for c in (RUNS, CONVERSATIONS, UPDATES) if list(c) == table.column_names)
    frame = table.to_pandas(split_blocks=True)
    for name, (dtype, _) in columns.items():
        if dtype == "object":
            texts = table[name].to_pylist()
            frame[name] = pd.Series(json.loads(f"[{','.join(texts)}]"), dtype="object")
    return frame


def run_row(run: Counted) -> dict[str, Any]:
    header, config, attempts = run.header, run.header["config"], run.header["attempts"]
    workload, decode, adapter = config["workload"], config["decode"], config["adapter"]
    rates = [part["lr"] for part in (adapter, *_parts(adapter, "outer", "inner")) if part.get("lr") is not None]
    audited, mismatches, near_ties, unexplained = (
        sum(row[name] for row in run.rows) for name in ("audited", "mismatches", "near_ties", "unexplained")
    )
    return {
        **{name: header[name] for name in ("fingerprint", "experiment", "config", "attempts")},
        "name": header["folder"],
        **{name: getattr(run, name) for name in ("path", "source", "complete")},
        **{group: config[group]["name"] for group in ("target", "draft", "adapter", "workload", "decode")},
        **{name: decode[name] for name in ("temperature", "top_p", "max_new_tokens")},
        **{name: config[name] for name in ("seed", "measure")},
        "order": workload.get("seed", 0),
        "split": workload.get("split", "all"),
        "test_only": [part["name"] for part in _workloads(workload) if part.get("test_only")],
        "switches": attempts[0]["data"].get("switches"),
        "threads": _one(attempts, lambda attempt: attempt["torch_threads"]),
        "workers": _one(attempts, lambda attempt: attempt.get("workers", 1)),
        "hardware": _distinct(attempts, _hardware),
        "code": _distinct(attempts, _code),
        "versions": _distinct(attempts, _versions),
        "stateful": _stateful(adapter),
        "lossless": False if mismatches or unexplained else (True if audited else None),
        "audited": audited,
        "mismatches": mismatches,
        "near_ties": near_ties,
        "conversations": len(run.rows),
        "learning_rate": rates[0] if rates else NAN,
    }


def _workloads(workload: dict[str, Any]) -> list[dict[str, Any]]:
    """Itself, or those that a stream draws from."""
    sources = workload.get("sources")
    return [workload] if sources is None else [part for each in sources.values() for part in _workloads(each)]


def _parts(adapter: dict[str, Any], *names: str) -> list[dict[str, Any]]:
    return [adapter[name] for name in names if isinstance(adapter.get(name), dict)]


def _stateful(adapter: dict[str, Any]) -> bool:
    """Whether anything outlasts a conversation: an outer learner, or an inner one with the stream as its scope."""
    return adapter.get("scope") == "stream" or any(
        name == "outer" or _stateful(part) for name in ("inner", "outer") for part in _parts(adapter, name)
    )


def _one(attempts: list[dict[str, Any]], value: Callable[[dict[str, Any]], Any]) -> float:
    values = {value(attempt) for attempt in attempts}
    return values.pop() if len(values) == 1 else NAN


def _distinct(attempts: list[dict[str, Any]], text: Callable[[dict[str, Any]], str]) -> str:
    return BETWEEN.join(dict.fromkeys(map(text, attempts)))


def _hardware(attempt: dict[str, Any]) -> str:
    facts = attempt["hardware"]
    gpus = [f"{count} x {name}" for name, count in Counter(facts["gpus"]).items()]
    return ", ".join([f"{facts['cpu'] or 'unknown CPU'}, {facts['logical_cores']} cores", *gpus])


def _code(attempt: dict[str, Any]) -> str:
    git = attempt["git"]
    return (git["commit"] or "unknown")[:12] + "+" * bool(git["dirty"])


def _versions(attempt: dict[str, Any]) -> str:
    return ", ".join(f"{name} {version}" for name, version in attempt["versions"].items())


_SAME = (
    "index", "id", "domain", "occurrence", "position", "turns", "same", "audited", "mismatches", "near_ties",
    "arms_differ", "unexplained", "ngrams", "repeated_8gram", "longest", "ended", "drift", "outer",
)  # fmt: skip


def conversation_row(row: dict[str, Any]) -> dict[str, Any]:
    found = {name: row[name] for name in _SAME}
    paired = row["arms"] if row["same"] else row["paired"] or {}
    committed = row["updates"].get("committed", [])
    for arm in ARMS:
        counts = row["arms"].get(arm)
        found |= _counts(f"{arm}_", counts)
        found |= {f"{arm}_{name}": counts and counts[name] for name in ("trials", "survivals")}
        seconds = (counts or {}).get("seconds") or {}
        found |= {f"{arm}_s_{phase}": seconds.get(phase, NAN) for phase in SERVING}
        found |= _counts(f"paired_{arm}_", paired.get(arm))
    found["refused"] = row["refused"] is not None
    found |= {"updates_attempted": len(committed), "updates_committed": sum(committed)}
    return found


def _counts(prefix: str, counts: dict[str, Any] | None) -> dict[str, Any]:
    """Tokens, rounds, accepted tokens and seconds; NaN without them."""
    counts = counts or {}
    seconds = counts.get("seconds")
    serving = math.fsum(s for phase, s in seconds.items() if phase != "outer") if seconds else NAN
    return {
        **{f"{prefix}{name}": counts.get(name, NAN) for name in ("tokens", "rounds", "accepted")},
        f"{prefix}seconds": serving,
        f"{prefix}outer_seconds": seconds.get("outer", 0.0) if seconds else NAN,
    }
