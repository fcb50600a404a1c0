"""From headers and rows of counts (``tracedraft.counts``) to typed frames."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tracedraft.analysis.schema import ARMS, CONVERSATIONS, RUNS, UPDATES, Columns, Runs
from tracedraft.counts import UPDATE

if TYPE_CHECKING:
    import pandas as pd

NAN = float("nan")


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


def frames(counted: Iterable[Counted], problems: list[tuple[str, str]]) -> Runs:
    """The frames of runs, in their order."""
    runs: list[dict[str, Any]] = []
    conversations: list[dict[str, Any]] = []
    updates: list[dict[str, Any]] = []
    seen: Counter[str] = Counter()
    for run in counted:
        fingerprint = run.header["fingerprint"]
        seen[fingerprint] += 1
        key = fingerprint if seen[fingerprint] == 1 else f"{fingerprint}-{seen[fingerprint]}"
        runs.append(run_row(run, key))
        conversations += ({"run": key} | conversation_row(row) for row in run.rows)
        updates += ({"run": key} | row for row in update_rows(run.rows))
    made = zip((runs, conversations, updates), (RUNS, CONVERSATIONS, UPDATES), strict=True)
    return Runs(*(typed(rows, columns) for rows, columns in made), problems)


def typed(rows: list[dict[str, Any]], columns: Columns) -> pd.DataFrame:
    """A frame with exactly these columns, whatever the rows."""
    import pandas as pd

    values = {name: pd.Series([row[name] for row in rows], dtype=kind) for name, (kind, _) in columns.items()}
    return pd.DataFrame(values)


def run_row(run: Counted, key: str) -> dict[str, Any]:
    header, config, attempts = run.header, run.header["config"], run.header["attempts"]
    workload, decode, adapter = config["workload"], config["decode"], config["adapter"]
    rates = [part["lr"] for part in (adapter, *_parts(adapter, "outer", "inner")) if part.get("lr") is not None]
    audited, mismatches, near_ties, unexplained = (
        sum(row[name] for row in run.rows) for name in ("audited", "mismatches", "near_ties", "unexplained")
    )
    return {
        "run": key,
        **{name: header[name] for name in ("fingerprint", "experiment", "config", "attempts")},
        "name": header["folder"],
        **{name: getattr(run, name) for name in ("path", "source", "complete")},
        **{group: config[group]["name"] for group in ("target", "draft", "adapter", "workload", "decode")},
        **{name: decode[name] for name in ("temperature", "top_p", "max_new_tokens")},
        **{name: config[name] for name in ("seed", "measure")},
        "order": workload.get("seed", 0),
        "split": workload.get("split", "all"),
        "test_only": workload.get("test_only", False),
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
    return " / ".join(dict.fromkeys(map(text, attempts)))


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
        phases = ("prefill", "propose", "verify", "observe", "update", "other")
        found |= {f"{arm}_s_{phase}": seconds.get(phase, NAN) for phase in phases}
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


def update_rows(rows: Iterable[dict[str, Any]]) -> Iterable[dict[str, Any]]:
    for row in rows:
        for values in zip(*(row["updates"].get(name, ()) for name in UPDATE), strict=True):
            yield {"conversation": row["index"]} | dict(zip(UPDATE, values, strict=True))
