"""The numbers of a run, computed from the counts in its records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import zip_longest
from typing import Any

from tracedraft.meter import PHASES

NGRAM = 8


def summarise(records: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The numbers of a run, from counts summed over all its turns (micro averages unless named otherwise).

    Top-level numbers are the adapted arm's, those under ``fixed`` the fixed arm's. Times are in seconds,
    ``tokens_per_s`` is generated tokens over the wall time of serving. What can't be measured is None, and
    ``null_reasons`` says why by dotted key.

    Args:
        records: conversation records as ``measure.py`` writes them.
    """
    records = list(records)
    turns = [turn for record in records for turn in record["turns"]]
    refused = [record["id"] for record in records if record["refused"] is not None]
    adapted, reasons = _summarise_arm([turn["arms"]["adapted"] for turn in turns])
    fixed, fixed_reasons = _summarise_arm([turn["arms"]["fixed"] for turn in turns])
    paired, paired_reasons = _compare_arms(turns)
    return {
        **adapted,
        **paired,
        "conversations": len(records),
        "turns": len(turns),
        "refused": {"count": len(refused), "ids": refused},
        "fixed": fixed,
        "null_reasons": reasons | {f"fixed.{k}": v for k, v in fixed_reasons.items()} | paired_reasons,
    }


def _summarise_arm(responses: list[dict[str, Any]]) -> tuple[dict[str, Any], dict[str, str]]:
    rounds = sum(r["rounds"] for r in responses)
    accepted = sum(r["accepted"] for r in responses)
    tokens = sum(len(r["tokens"]) for r in responses)
    wall = sum(_serving(r) for r in responses)
    taus = [(r["accepted"] + r["rounds"]) / r["rounds"] for r in responses if r["rounds"]]
    trials = _sum_by_depth(r["trials"] for r in responses)
    survivals = _sum_by_depth(r["survivals"] for r in responses)
    depths = list(zip(survivals, trials, strict=True))
    grams, repeated = _ngrams(r["tokens"] for r in responses)
    updates = [update for r in responses for update in r["updates"]]
    numbers = {
        "tau": _ratio(accepted + rounds, rounds),
        "macro_tau": _ratio(sum(taus), len(taus)),
        "tokens": tokens,
        "tokens_per_s": _ratio(tokens, wall),
        "rounds": rounds,
        "accepted": accepted,
        "acceptance_by_depth": [_ratio(s, t) for s, t in depths] if depths else None,
        "repeated_8gram_share": _ratio(repeated, grams),
        "updates": {
            "attempted": len(updates),
            "committed": sum(u["committed"] for u in updates),
            "rolled_back": dict(Counter(u["reason"] for u in updates if not u["committed"])),
        },
        "seconds": {phase: sum(r["seconds"].get(phase, 0.0) for r in responses) for phase in PHASES},
    }
    why = {
        "tau": "no verification round",
        "macro_tau": "no verification round",
        "tokens_per_s": "no time was measured",
        "acceptance_by_depth": "no token was drafted",
        "repeated_8gram_share": f"no response of {NGRAM} tokens or more",
    }
    reasons = {key: text for key, text in why.items() if numbers[key] is None}
    untested = [str(depth) for depth, (_, t) in enumerate(depths, 1) if not t]
    if untested:
        reasons["acceptance_by_depth"] = f"no drafted token was tested at depth {', '.join(untested)}"
    return numbers, reasons


def _compare_arms(turns: list[dict[str, Any]]) -> tuple[dict[str, Any], dict[str, str]]:
    pairs = [(turn["arms"]["fixed"], turn["arms"]["adapted"]) for turn in turns]
    same = [(f, a) for f, a in pairs if f["tokens"] == a["tokens"]]
    differ = len(pairs) - len(same)
    speedup = _ratio(sum(_serving(f) for f, _ in same), sum(_serving(a) for _, a in same))
    audited = sum(turn["lossless"]["audited"] for turn in turns)
    mismatches = sum(turn["lossless"]["mismatches"] for turn in turns)
    # Arms that differ can't both be the target's output, so they disprove it without an audit.
    lossless = False if mismatches or differ else (True if audited else None)
    numbers = {
        "speedup": speedup,
        "speedup_turns": len(same),
        "lossless": lossless,
        "audited": audited,
        "mismatches": mismatches,
        "arms_differ": differ,
    }
    reasons = {}
    if speedup is None:
        reasons["speedup"] = "no time was measured" if same else "no turn with the same tokens in both arms"
    if lossless is None:
        reasons["lossless"] = "nothing was audited"
    return numbers, reasons


def _serving(response: dict[str, Any]) -> float:
    # Outer learning happens between requests: it is no part of the throughput of serving them.
    return sum(seconds for phase, seconds in response["seconds"].items() if phase != "outer")


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _sum_by_depth(counts: Iterable[list[int]]) -> list[int]:
    return [sum(depth) for depth in zip_longest(*counts, fillvalue=0)]


def _ngrams(responses: Iterable[list[int]]) -> tuple[int, int]:
    """How many n-grams the responses hold, and how many of them stood earlier in the same response."""
    total = distinct = 0
    for tokens in responses:
        grams = [tuple(tokens[i : i + NGRAM]) for i in range(len(tokens) - NGRAM + 1)]
        total += len(grams)
        distinct += len(set(grams))
    return total, total - distinct
