"""How fast each arm of a bench was on each workload, and what its time went into.

``python analysis/speed.py BENCH.json [--out NAME]`` reads what ``make bench`` left; ``NAME.md`` gets its tables, and
``NAME.png`` tokens a second by arm and workload, beside what each arm's time went into.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from tracedraft.benchmark.numbers import ALL, PLAIN
from tracedraft.benchmark.table import text
from tracedraft.errors import UserError
from tracedraft.meter import PHASES

Rate = tuple[float, float, float]  # tokens/s: the median, and the quartiles around it


def read(file: Path) -> dict[str, Any]:
    """Raises UserError for anything but a bench's result."""
    try:
        result = json.loads(file.read_text(encoding="utf-8"))
        return result if result["workloads"][ALL] else {}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file}: no result of `make bench` ({type(error).__name__}: {error})") from error


def rates(result: dict[str, Any]) -> dict[str, dict[str, Rate]]:
    """By arm and workload; all together where there are several."""
    names = list(result["workloads"])
    names = names if len(names) > 2 else names[:1]
    arms = result["workloads"][ALL]["arms"]
    return {arm: {name: _rate(result["workloads"][name]["arms"][arm]) for name in names} for arm in arms}


def _rate(numbers: dict[str, Any]) -> Rate:
    found = numbers["ms_per_token"]
    slow, fast = (found["quartiles"] or 2 * [found["median"]])[::-1]
    return 1e3 / found["median"], 1e3 / slow, 1e3 / fast


def shares(result: dict[str, Any]) -> dict[str, dict[str, float]]:
    """What part of its time each arm of ours spent in each phase, all workloads and repetitions together."""
    arms = result["workloads"][ALL]["arms"]
    ours = list(arms)[list(arms).index(PLAIN) :]  # engines before it say how long they took, not on what
    found = {}
    for arm in ours:
        spent = {p: sum(row["seconds"][p] for row in arms[arm]["repetitions"]) for p in PHASES}
        found[arm] = {phase: seconds / sum(spent.values()) for phase, seconds in spent.items()}
    return found


def draw(result: dict[str, Any], file: Path) -> None:
    from matplotlib.figure import Figure

    speed = rates(result)
    figure = Figure(figsize=(10, 1.6 + 0.42 * len(speed)), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2), sharey=True)
    _bars(left, speed)
    _stacks(right, list(speed), shares(result))
    left.invert_yaxis()
    under_labels = -0.5 / (0.42 * len(speed))  # half an inch below axes of about this height
    below = {"loc": "upper center", "bbox_to_anchor": (0.5, under_labels), "fontsize": "small", "frameon": False}
    for axes in (left, right):
        axes.legend(ncols=5, columnspacing=1, handlelength=1, **below)
    figure.savefig(file, dpi=150)


def _bars(axes: Any, speed: dict[str, dict[str, Rate]]) -> None:
    from matplotlib import colormaps

    arms, names = list(speed), list(next(iter(speed.values())))
    height = 0.8 / len(names)
    for i, name in enumerate(names):
        at = [row + (i - (len(names) - 1) / 2) * height for row in range(len(arms))]
        middle, low, high = zip(*(speed[arm][name] for arm in arms), strict=True)
        reach = [
            [m - v for m, v in zip(middle, low, strict=True)],
            [v - m for m, v in zip(middle, high, strict=True)],
        ]
        shade = "black" if name == ALL else colormaps["Blues"](0.3 + 0.6 * i / len(names))
        axes.barh(
            at, middle, 0.9 * height, xerr=reach, label=name, color=shade, error_kw={"linewidth": 0.7, "ecolor": "C3"}
        )
    axes.set(xlabel="tokens/s: median, quartiles", yticks=range(len(arms)), yticklabels=arms)


def _stacks(axes: Any, arms: list[str], phases: dict[str, dict[str, float]]) -> None:
    left = dict.fromkeys(phases, 0.0)
    for i, phase in enumerate(PHASES):
        widths = {arm: 100 * of[phase] for arm, of in phases.items()}
        if max(widths.values()) < 0.5:
            continue
        rows = [arms.index(arm) for arm in phases]
        axes.barh(rows, widths.values(), left=left.values(), height=0.7, label=phase, color=f"C{i}")
        for row, (arm, width) in zip(rows, widths.items(), strict=True):
            if width >= 6:
                axes.text(left[arm] + width / 2, row, f"{width:.0f}", ha="center", va="center", fontsize="small")
            left[arm] += width
    for arm in set(arms) - set(phases):
        axes.text(2, arms.index(arm), "says no phases", va="center", fontsize="small", color="0.4")
    axes.set(xlabel="% of the time", xlim=(0, 100))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path, metavar="BENCH.json")
    parser.add_argument("--out", type=Path, default=Path("speed"), metavar="NAME")
    args = parser.parse_args()
    result = read(args.result)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.with_suffix(".md").write_text(text(result), encoding="utf-8")
    draw(result, args.out.with_suffix(".png"))
    print(f"{args.out.with_suffix('.md')} and {args.out.with_suffix('.png')} written")


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
