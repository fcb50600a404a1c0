"""What W&B is given of a run's records: a row a conversation, to see and to read back, and the table of updates."""

from __future__ import annotations

import json
from collections.abc import Iterable
from statistics import fmean
from typing import Any

from tracedraft import counts
from tracedraft.summary import summarise

COUNTS = "counts"  # all that tables need of a conversation, as JSON: the other keys are for people
UPDATE_COLUMNS = (
    "conversation", "id", "turn", "round", "committed", "reason", "positions", "loss", "grad_norm", "vocab_mass",
    "held_out_kl_before", "held_out_kl_after", "drift",
)  # fmt: skip
OUTER = ("block", "loss", "loss_after", "drift", "seconds", "committed")
OF_ROWS = ("acceptance.*", "updates.*", "drift.*", "outer.*")  # beside those that a run has as well


def row(record: dict[str, Any]) -> dict[str, Any]:
    """This conversation's numbers, the fixed arm's beside them, and its counts; what was not measured is left out."""
    summary, updates = summarise([record]), list(_updates(record))
    names = ("tau", "tokens_per_s", "rounds", "accepted", "tokens")
    shown = {name: summary[name] for name in names} | {f"fixed.{name}": summary["fixed"][name] for name in names}
    shown |= {f"acceptance.{d}": share for d, share in enumerate(summary["acceptance_by_depth"] or [], 1)}
    shown |= {f"updates.{name}": summary["updates"][name] for name in ("attempted", "committed")}
    for name in ("loss", "held_out_before", "held_out_after"):
        values = [u[name] for _, u in updates if u[name] is not None]
        shown[f"updates.{name}"] = fmean(values) if values else None
    shown |= {f"drift.{name}": value for name, value in record["drift"].items()}
    shown |= {name: summary[name] for name in ("speedup", "mismatches", "near_ties", "repeated_8gram_share")}
    shown |= _outer(record["outer"]) if record.get("outer") else {}
    shown[COUNTS] = json.dumps(counts.conversation(record), separators=(",", ":"))
    return {name: value for name, value in shown.items() if value is not None}


def _outer(outer: dict[str, Any]) -> dict[str, Any]:
    """What was learnt after the conversation."""
    learners = outer.get("learners") or {"p": [], "losses": []}
    shown = {f"outer.{name}": outer.get(name) for name in OUTER}
    for name in ("p", "losses"):
        shown |= {f"outer.{name}.{i}": value for i, value in enumerate(learners[name], 1)}
    return shown


def update_table(records: Iterable[dict[str, Any]]) -> list[list[Any]]:
    """A row of ``UPDATE_COLUMNS`` for each attempted update, in order."""
    return [
        [
            record["index"], record["id"], turn, u["round"], u["committed"], u["reason"],
            sum(u["positions"].values()), u["loss"], u["grad_norm"], u["vocab_mass"],
            u["held_out_before"], u["held_out_after"], max(u["drift"].values(), default=None),
        ]
        for record in records
        for turn, u in _updates(record)
    ]  # fmt: skip


def _updates(record: dict[str, Any]) -> Iterable[tuple[int, dict[str, Any]]]:
    return ((turn["turn"], update) for turn in record["turns"] for update in turn["arms"]["adapted"]["updates"])
