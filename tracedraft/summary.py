"""The numbers of a run, computed from the counts in its records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import zip_longest
from typing import Any

from tracedraft.meter import PHASES

NGRAM = 8


class Sums:
    """Of one arm, over records as they come."""

    def __init__(self, arm: str):
        self.arm, self.accepted, self.rounds, self.tokens, self.seconds = arm, 0, 0, 0, 0.0

    def add(self, record: dict[str, Any]) -> None:
        for turn in record["turns"]:
            response = turn["arms"][self.arm]
            self.accepted += response["accepted"]
            self.rounds += response["rounds"]
            self.tokens += len(response["tokens"])
            self.seconds += _serving(response)

    @property
    def tau(self) -> float | None:
        return _ratio(self.accepted + self.rounds, self.rounds)

    @property
    def tokens_per_s(self) -> float | None:
        return _ratio(self.tokens, self.seconds)


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
    adapted, reasons = summarise_arm([turn["arms"]["adapted"] for turn in turns])
    fixed, fixed_reasons = summarise_arm([turn["arms"]["fixed"] for turn in turns])
    paired, paired_reasons = _compare_arms(turns)
    plainly, plain_reasons = _plainly(turns)
    outer, outer_reasons = _outer(records, adapted)
    return {
        **adapted,
        **paired,
        "conversations": len(records),
        "turns": len(turns),
        "refused": {"count": len(refused), "ids": refused},
        "fixed": fixed,
        **plainly,
        **outer,
        "null_reasons": reasons
        | {f"fixed.{k}": v for k, v in fixed_reasons.items()}
        | paired_reasons
        | plain_reasons
        | outer_reasons,
    }


def _outer(records: list[dict[str, Any]], adapted: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """What was learnt between requests, and throughput with the time for it; empty where nobody did."""
    said = [record["outer"] for record in records if record.get("outer")]
    if not said:
        return {}, {}
    found = [outer for outer in said if outer["block"] is not None]
    # Choosing a draft, and handing a block to another process, take time also where no block was learnt.
    untimed = any(outer["seconds"] is None for outer in said)
    seconds = None if untimed else sum(outer["seconds"] for outer in said)
    wall = None if seconds is None else sum(adapted["seconds"].values()) + seconds
    numbers = {
        "outer": {
            "blocks": len(found),
            "committed": sum(outer["committed"] for outer in found),
            "rolled_back": dict(Counter(outer["reason"] for outer in found if not outer["committed"])),
            "waited": dict(Counter(outer["reason"] for outer in said if outer["block"] is None and outer["reason"])),
            "seconds": seconds,
        },
        "tokens_per_s_with_training": _ratio(adapted["tokens"], wall) if wall is not None else None,
    }
    why = "no time was measured"
    unmeasured = ["outer.seconds", "tokens_per_s_with_training"] if untimed else []
    return numbers, dict.fromkeys(unmeasured, why)


def intervals(records: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """95 % t intervals over conversations, standard errors by bootstrap, both arms of one drawn together.

    Returns:
        ``tau_gain``, the adapted arm's tau over the fixed one's, with its interval, and ``speedup_interval``;
        None with its reason where too few conversations were paired.
    """
    from tracedraft.statistics import estimate, first_over_second, tau_gain

    pairs = [pair for record in records if (pair := _paired(record)) is not None]
    seconds, counts, each = [pair[0] for pair in pairs], [pair[1] for pair in pairs], range(len(pairs))
    gain, speedup = estimate(counts, tau_gain, each), estimate(seconds, first_over_second, each)
    numbers = {
        "tau_gain": gain.value,
        "tau_gain_interval": None if gain.low is None else [gain.low, gain.high],
        "speedup_interval": None if speedup.low is None else [speedup.low, speedup.high],
    }
    untimed = None if any(map(sum, seconds)) else "no time was measured"
    why = {"speedup_interval": untimed or speedup.reason}
    reasons = {key: why.get(key) or gain.reason for key, value in numbers.items() if value is None}
    return {**numbers, "interval_over": "conversations", "null_reasons": reasons}


def paired_seconds(record: dict[str, Any]) -> tuple[float, float]:
    """Seconds of the fixed and the adapted arm in the turns that both answered alike."""
    found = _paired(record)
    return (found[0][0], found[0][1]) if found else (0.0, 0.0)


def _paired(record: dict[str, Any]) -> tuple[list[float], list[float]] | None:
    """(seconds fixed, adapted) and (A, S fixed, A, S adapted) of the turns that both arms answered alike."""
    turns = [(turn["arms"]["fixed"], turn["arms"]["adapted"]) for turn in record["turns"] if turn["paired"]]
    same = [(fixed, adapted) for fixed, adapted in turns if fixed["tokens"] == adapted["tokens"]]
    if not same:
        return None
    arms = list(zip(*same, strict=True))
    counts = [float(sum(r[name] for r in arm)) for arm in arms for name in ("accepted", "rounds")]
    return [sum(map(_serving, arm)) for arm in arms], counts


def summarise_arm(responses: list[dict[str, Any]]) -> tuple[dict[str, Any], dict[str, str]]:
    """Numbers of one arm's responses (``Response`` as a dict), and why some are None."""
    rounds = sum(r["rounds"] for r in responses)
    accepted = sum(r["accepted"] for r in responses)
    tokens = sum(len(r["tokens"]) for r in responses)
    wall = sum(_serving(r) for r in responses)
    taus = [(r["accepted"] + r["rounds"]) / r["rounds"] for r in responses if r["rounds"]]
    trials = sum_by_depth(r["trials"] for r in responses)
    survivals = sum_by_depth(r["survivals"] for r in responses)
    depths = list(zip(survivals, trials, strict=True))
    grams, repeated = ngrams(r["tokens"] for r in responses)
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
    if not all(turn["paired"] for turn in turns):
        return _unpaired(turns)
    pairs = [(turn["arms"]["fixed"], turn["arms"]["adapted"]) for turn in turns]
    same = [(f, a) for f, a in pairs if f["tokens"] == a["tokens"]]
    differ = len(pairs) - len(same)
    speedup = _ratio(sum(_serving(f) for f, _ in same), sum(_serving(a) for _, a in same))
    audited = sum(turn["lossless"]["audited"] for turn in turns)
    mismatches = sum(turn["lossless"]["mismatches"] for turn in turns)
    ties = sum(turn["lossless"]["near_ties"] for turn in turns)
    # Arms that differ by no near-tie can't both be the target's output: they disprove it without an audit.
    unexplained = any(_differ(turn) and not turn["lossless"]["near_ties"] for turn in turns)
    lossless = False if mismatches or unexplained else (True if audited else None)
    numbers = {
        "speedup": speedup,
        "speedup_turns": len(same),
        "lossless": lossless,
        "audited": audited,
        "mismatches": mismatches,
        "near_ties": ties,
        "arms_differ": differ,
    }
    reasons = {}
    if speedup is None:
        reasons["speedup"] = _no_speedup(same)
    if lossless is None:
        reasons["lossless"] = "nothing was audited"
    return numbers, reasons


def _differ(turn: dict[str, Any]) -> bool:
    return turn["arms"]["fixed"]["tokens"] != turn["arms"]["adapted"]["tokens"]


def _unpaired(turns: list[dict[str, Any]]) -> tuple[dict[str, Any], dict[str, str]]:
    """Rejection sampling: each arm says something else, so only their rates can be compared."""
    rates = []
    for name in ("fixed", "adapted"):
        arm = [turn["arms"][name] for turn in turns]
        rates.append(_ratio(sum(len(r["tokens"]) for r in arm), sum(map(_serving, arm))))
    missing = dict.fromkeys(("speedup", "lossless", "arms_differ"))
    ratio = rates[1] / rates[0] if rates[0] and rates[1] else None
    numbers = {
        **missing,
        "speedup_turns": 0,
        "audited": 0,
        "mismatches": 0,
        "near_ties": 0,
        "unpaired_speedup": ratio,
    }
    return numbers, dict.fromkeys(missing, "rejection sampling: the arms' responses differ by nature")


def _plainly(turns: list[dict[str, Any]]) -> tuple[dict[str, Any], dict[str, str]]:
    """The arm without a draft, where there is one, and what speculation gains over it on the same tokens."""
    with_plain = [turn["arms"] for turn in turns if "plain" in turn["arms"]]
    if not with_plain:
        return {}, {}
    plain, reasons = summarise_arm([arms["plain"] for arms in with_plain])
    kept = ("tokens", "tokens_per_s", "seconds")
    why, over = {f"plain.{key}": text for key, text in reasons.items() if key in kept}, {}
    for name in ("fixed", "adapted"):
        same = [(a["plain"], a[name]) for a in with_plain if a["plain"]["tokens"] == a[name]["tokens"]]
        over[name] = _ratio(sum(_serving(p) for p, _ in same), sum(_serving(a) for _, a in same))
        if over[name] is None:
            why[f"speedup_over_plain.{name}"] = _no_speedup(same)
    return {"plain": {key: plain[key] for key in kept}, "speedup_over_plain": over}, why


def _no_speedup(same: list[Any]) -> str:
    return "no time was measured" if same else "no turn with the same tokens in both arms"


def _serving(response: dict[str, Any]) -> float:
    # Outer learning happens between requests: it is no part of the throughput of serving them.
    return sum(seconds for phase, seconds in response["seconds"].items() if phase != "outer")


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def sum_by_depth(counts: Iterable[list[int]]) -> list[int]:
    return [sum(depth) for depth in zip_longest(*counts, fillvalue=0)]


def ngrams(responses: Iterable[list[int]]) -> tuple[int, int]:
    """How many n-grams the responses hold, and how many of them stood earlier in the same response."""
    total = distinct = 0
    for tokens in responses:
        grams = [tuple(tokens[i : i + NGRAM]) for i in range(len(tokens) - NGRAM + 1)]
        total += len(grams)
        distinct += len(set(grams))
    return total, total - distinct
