"""What tables need of a run, as counts: what W&B is given, what gets committed, and what frames are made of.

A run is a header and a row a conversation, both JSON. Texts, token ids and places on a disk stay in the record.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Mapping
from pathlib import Path
from typing import Any

from tracedraft.config import NOT_IN_FINGERPRINT
from tracedraft.meter import PHASES
from tracedraft.summary import ngrams, sum_by_depth

VERSION = 1
DIGITS = 6  # significant, of an update's diagnostics
KEPT = ("target", "draft", "adapter", "workload", "decode", "seed", "measure", "plain", "threads")  # of a config
PLACES = {"argv", "path"}  # of an attempt: they say where things lie on some machine
UPDATE = (
    "turn", "round", "committed", "reason", "positions", "loss", "grad_norm", "vocab_mass", "held_out_before",
    "held_out_after", "drift",
)  # fmt: skip


def header(
    config: Mapping[Any, Any], attempts: list[dict[str, Any]], folder: Path, experiment: str
) -> dict[str, Any]:
    """What a run is and where it comes from.

    Args:
        config: resolved.
        attempts: provenance of each process that worked on it; at least one.
        experiment: name of the sweep, or "single".
    """
    return {
        "counts": VERSION,
        "fingerprint": attempts[0]["fingerprint"],
        "folder": folder.name,
        "experiment": experiment,
        "config": {key: _without(config.get(key), NOT_IN_FINGERPRINT) for key in KEPT},
        "attempts": [_without(attempt, PLACES) for attempt in attempts],
    }


def flat(header: dict[str, Any]) -> dict[str, Any]:
    """A header as W&B shows it, where ``adapter.lr`` is found under that name."""
    return header["config"] | {key: value for key, value in header.items() if key != "config"}


def header_of(config: dict[str, Any]) -> dict[str, Any]:
    """The header that ``flat`` was given, from a W&B run's config.

    Raises:
        ValueError: made by another version, or by something else.
    """
    if config.get("counts") != VERSION:
        raise ValueError(f"its counts are of version {config.get('counts')}, expected {VERSION}")
    names = ("counts", "fingerprint", "folder", "experiment")
    parts = {key: config[key] for key in KEPT}
    return {**{key: config[key] for key in names}, "config": parts, "attempts": config["attempts"]}


def _without(value: Any, keys: Container[str]) -> Any:
    """Without these keys, and of each place on a disk its last part alone."""
    if isinstance(value, str):
        return Path(value).name if Path(value).is_absolute() else value
    if isinstance(value, dict):
        return {key: _without(each, keys) for key, each in value.items() if key not in keys}
    return [_without(each, keys) for each in value] if isinstance(value, list) else value


def conversation(record: dict[str, Any]) -> dict[str, Any]:
    """A row: counts of each arm over all turns, and over those that both arms answered alike.

    Returns:
        ``arms`` by name; ``same``: both arms said the same in every turn, so that ``paired`` would repeat ``arms``
        and is null; otherwise ``paired`` holds the counts of the turns in which they did, null without one.
    """
    turns = record["turns"]
    names = list(turns[0]["arms"]) if turns else ["fixed", "adapted"]
    alike = [turn for turn in turns if turn["paired"] and not _differ(turn, "fixed")]
    same = bool(turns) and len(alike) == len(turns)
    lossless = {key: sum(turn["lossless"][key] for turn in turns) for key in ("audited", "mismatches", "near_ties")}
    adapted = [turn["arms"]["adapted"] for turn in turns]
    outer = record.get("outer")
    arms, paired = _arms(turns, names, outer), None if same or not alike else _paired(alike, names, outer)
    grams, repeated = ngrams(response["tokens"] for response in adapted)
    differ = [turn for turn in turns if turn["paired"] and _differ(turn, "fixed")]
    return {
        **{key: record[key] for key in ("index", "id", "domain", "occurrence")},
        "position": record.get("position", record["index"]),
        "refused": record["refused"],
        "turns": len(turns),
        "arms": arms,
        "same": same,
        "paired": paired,
        **lossless,
        "arms_differ": len(differ),
        # Arms that differ by no near-tie can't both be the target's output.
        "unexplained": sum(not turn["lossless"]["near_ties"] for turn in differ),
        "ngrams": grams,
        "repeated_8gram": repeated,
        "longest": max((len(response["tokens"]) for response in adapted), default=0),
        "ended": dict(Counter(response["ended"] for response in adapted)),
        "updates": _updates(turns),
        "drift": record["drift"],
        "outer": outer,
    }


def _paired(
    alike: list[dict[str, Any]], names: Iterable[str], outer: dict[str, Any] | None
) -> dict[str, dict[str, Any]]:
    """Counts of turns that both arms answered alike; of a third arm only if it said the same in all of them."""
    return _arms(alike, [name for name in names if not any(_differ(turn, name) for turn in alike)], outer)


def _differ(turn: dict[str, Any], name: str) -> bool:
    return turn["arms"][name]["tokens"] != turn["arms"]["adapted"]["tokens"]


def _arms(
    turns: list[dict[str, Any]], names: Iterable[str], outer: dict[str, Any] | None
) -> dict[str, dict[str, Any]]:
    arms = {name: _arm([turn["arms"][name] for turn in turns]) for name in names}
    if outer and outer["seconds"] is not None and arms["adapted"]["seconds"]:
        arms["adapted"]["seconds"]["outer"] += outer["seconds"]
    return arms


def _arm(responses: list[dict[str, Any]]) -> dict[str, Any]:
    timed = bool(responses) and all(response["seconds"] for response in responses)
    seconds = {phase: sum(r["seconds"].get(phase, 0.0) for r in responses) for phase in PHASES} if timed else None
    return {
        "tokens": sum(len(response["tokens"]) for response in responses),
        "rounds": sum(response["rounds"] for response in responses),
        "accepted": sum(response["accepted"] for response in responses),
        "trials": sum_by_depth(response["trials"] for response in responses),
        "survivals": sum_by_depth(response["survivals"] for response in responses),
        "seconds": seconds,
    }


def _updates(turns: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """A list a field of ``UPDATE``: updates outnumber conversations by far."""
    measured = ("loss", "grad_norm", "vocab_mass", "held_out_before", "held_out_after")
    rows = [
        [
            turn["turn"], u["round"], u["committed"], u["reason"], sum(u["positions"].values()),
            *(_short(u[name]) for name in measured), _short(max(u["drift"].values(), default=None)),
        ]
        for turn in turns
        for u in turn["arms"]["adapted"]["updates"]
    ]  # fmt: skip
    return {name: list(column) for name, column in zip(UPDATE, zip(*rows, strict=True), strict=True)} if rows else {}


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.{DIGITS}g}")
