"""From which length on an update pays for itself: rounds saved against the time that learning takes.

``python analysis/break_even.py RUN… [--costs TIMED_RUN…] [--out NAME]`` reads run folders and writes ``NAME.md`` and
``NAME.png``. Runs with ``measure=acceptance`` have no times: their costs then come from ``--costs``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import bootstrap

from tracedraft.errors import UserError
from tracedraft.records import read_conversations

LENGTHS = (16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
FEWEST = 3

Pair = tuple[dict[str, Any], dict[str, Any]]


@dataclass(frozen=True)
class Costs:
    """Milliseconds: of a round of drafting and verification, and of learning, a round and an attempted update.

    ``observe`` holds all that learning adds to a round: taking evidence in, and drafting that got slower by it.
    """

    round: float
    observe: float
    update: float


def pairs_of(records: Iterable[dict[str, Any]]) -> list[list[Pair]]:
    """(fixed, adapted) responses of each conversation, where both arms said the same."""
    arms = [[(t["arms"]["fixed"], t["arms"]["adapted"]) for t in record["turns"]] for record in records]
    return [[(f, a) for f, a in pairs if f["tokens"] == a["tokens"]] for pairs in arms]


def costs(conversations: list[list[Pair]]) -> Costs:
    """Of timed responses. A round is the fixed arm's, but for verification: it is the same in both, its noise is not.

    Raises:
        UserError: nothing was timed.
    """
    pairs = [pair for conversation in conversations for pair in conversation]

    def total(arm: int, *phases: str) -> float:
        return sum(pair[arm]["seconds"].get(phase, 0.0) for pair in pairs for phase in phases)

    rounds = [sum(pair[arm]["rounds"] for pair in pairs) for arm in (0, 1)]
    updates = sum(len(adapted["updates"]) for _, adapted in pairs)
    verify = total(0, "verify") + total(1, "verify")
    if not verify or not updates:
        raise UserError("these runs hold no timed updates: name a timed run of the same adapter with --costs")
    propose = [total(arm, "propose") / rounds[arm] for arm in (0, 1)]
    observe = total(1, "observe") / rounds[1] - total(0, "observe") / rounds[0] + propose[1] - propose[0]
    each = verify / sum(rounds) + propose[0]
    return Costs(1e3 * each, max(0.0, 1e3 * observe), 1e3 * total(1, "update") / updates)


def rounds_to(response: dict[str, Any], length: int) -> int:
    """Rounds after which ``length`` tokens stand; the first comes from the prefill."""
    said, rounds = 1, 0
    for accepted in response["accepted_per_round"]:
        if said >= length:
            break
        said += accepted + 1
        rounds += 1
    return rounds


def saved(pair: Pair, length: int, cost: Costs) -> tuple[float, float, float]:
    """Rounds saved, updates attempted, and milliseconds saved, by the time ``length`` tokens stand."""
    fixed, adapted = (rounds_to(response, length) for response in pair)
    # An update after round r is paid for by responses that go on beyond it.
    updates = sum(update["round"] < adapted for update in pair[1]["updates"])
    spent = adapted * cost.observe + updates * cost.update
    return fixed - adapted, updates, (fixed - adapted) * cost.round - spent


@dataclass(frozen=True)
class Point:
    """Means over the responses of at least ``length`` tokens, and the 95 % interval of the milliseconds saved."""

    length: int
    responses: int
    rounds: float
    updates: float
    milliseconds: float
    interval: tuple[float, float] | None


def curve(conversations: list[list[Pair]], cost: Costs, lengths: Iterable[int] = LENGTHS) -> list[Point]:
    """What learning has saved at each length, resampled over conversations."""
    points = []
    for length in lengths:
        groups = [[saved(p, length, cost) for p in pairs if len(p[1]["tokens"]) >= length] for pairs in conversations]
        groups = [group for group in groups if group]
        if not groups:
            break
        rows = np.array([row for group in groups for row in group])
        rounds, updates, milliseconds = rows.mean(axis=0).tolist()
        sums = np.array([[sum(row[2] for row in group), len(group)] for group in groups])
        points.append(Point(length, len(rows), rounds, updates, milliseconds, _interval(sums)))
    return points


def _interval(sums: NDArray[np.float64]) -> tuple[float, float] | None:
    if len(sums) < FEWEST:
        return None

    def mean(total: Any, count: Any, axis: int) -> Any:
        return total.sum(axis=axis) / count.sum(axis=axis)

    found = bootstrap(tuple(sums.T), mean, paired=True, vectorized=True, method="percentile", rng=0, batch=1000)
    return float(found.confidence_interval.low), float(found.confidence_interval.high)


def break_even(points: list[Point]) -> int | None:
    """The least length from which on every interval lies above zero; None: no such length was seen."""
    found = None
    for point in reversed(points):
        if point.interval is None or point.interval[0] <= 0:
            break
        found = point.length
    return found


def markdown(points: list[Point], cost: Costs) -> str:
    lines = [
        f"Costs in ms: a round {cost.round:.1f}; learning {cost.observe:.2f} a round, {cost.update:.1f} an update.",
        "",
        "| tokens | responses | rounds saved | updates | ms saved | 95 % interval |",
        "| ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for p in points:
        interval = "—" if p.interval is None else f"{p.interval[0]:.0f} … {p.interval[1]:.0f}"
        cells = (p.length, p.responses, f"{p.rounds:.1f}", f"{p.updates:.1f}", f"{p.milliseconds:.0f}", interval)
        lines.append(f"| {' | '.join(map(str, cells))} |")
    length = break_even(points)
    verdict = "at no length seen here" if length is None else f"from {length} tokens on"
    return "\n".join([*lines, "", f"Learning pays for itself {verdict} (interval above zero).", ""])


def draw(points: list[Point], file: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.5), layout="constrained")
    axes = figure.subplots()
    lengths = [p.length for p in points]
    axes.axhline(0, color="0.6", linewidth=0.8)
    axes.plot(lengths, [p.milliseconds for p in points], marker="o", markersize=3)
    known = [(p.length, *p.interval) for p in points if p.interval is not None]
    at, low, high = np.array(known).reshape(-1, 3).T
    axes.fill_between(at, low, high, alpha=0.2, linewidth=0)
    axes.set(xlabel="tokens generated", ylabel="ms saved a response")
    figure.savefig(file, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN")
    parser.add_argument("--costs", nargs="+", type=Path, metavar="TIMED_RUN")
    parser.add_argument("--out", type=Path, default=Path("break_even"), metavar="NAME")
    args = parser.parse_args()
    conversations, timed = (
        [pairs for run in runs for pairs in pairs_of(read_conversations(run))]
        for runs in (args.runs, args.costs or args.runs)
    )
    cost = costs(timed)
    points = curve(conversations, cost)
    text = markdown(points, cost)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.with_suffix(".md").write_text(text, encoding="utf-8")
    draw(points, args.out.with_suffix(".png"))
    print(text, end="")


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
