"""Figures, each from a pool of conversations by name of its line. The same data make the same bytes."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import zip_longest
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from tracedraft.analysis.panels import block_losses, learned_blocks
from tracedraft.analysis.paper import INNER, OUTER
from tracedraft.analysis.pooling import (
    LENGTHS,
    by_tokens,
    counted,
    fixed,
    rate,
    rate_beside,
    speedup,
    tau,
    tau_gain,
    timed,
)
from tracedraft.analysis.schema import SERVING
from tracedraft.files import write_atomically

STYLE = Path(__file__).with_name("figures.mplstyle")
FIXED: dict[str, Any] = {"color": "0.45", "linestyle": (0, (1, 1)), "marker": ""}
UNDATED: dict[str, dict[str, None]] = {
    "svg": {"Date": None},
    "pdf": {"CreationDate": None},
    "png": {"Software": None},
}
WINDOW = 5  # conversations of a moving average
PHASES = (*SERVING, "outer")
# Each adapter has its place in the style's cycle; a combination that of its learner between requests, and a face.
PLACES = (*INNER, *OUTER)
FACES = {"reset": "white", "persistent": "0.75"}
LEAST_SPAN = 0.05  # of an axis of accepted lengths or rates, relative: less is noise made large

Pool = pd.DataFrame


def style() -> AbstractContextManager[None]:
    return matplotlib.rc_context(fname=STYLE)


def save(figure: Figure, folder: Path, name: str) -> list[Path]:
    """Write ``NAME.svg`` and ``.pdf``, for papers, and ``.png``."""
    files = []
    for ending, undated in UNDATED.items():
        file, buffer = folder / f"{name}.{ending}", io.BytesIO()
        with style():
            figure.savefig(buffer, format=ending, metadata=undated)
        write_atomically(file, lambda path: path.write_bytes(buffer.getvalue()), "choose another OUT")  # noqa: B023
        files.append(file)
    return files


def _grid(rows: int, columns: int, height: float = 1.9, width: float = 3.3) -> tuple[Figure, Any]:
    figure = Figure(figsize=(width * columns, height * rows + 0.4))
    return figure, figure.subplots(rows, columns, squeeze=False)


def _wrapped(count: int, height: float = 2.4, width: float = 3.3, across: int = 3) -> tuple[Figure, list[Axes]]:
    """As many panels as asked for, and one at least."""
    columns = min(max(1, count), across)
    figure, grid = _grid(-(-max(1, count) // columns), columns, height, width)
    for axes in grid.flat[max(1, count) :]:
        axes.set_visible(False)
    return figure, list(grid.flat[: max(1, count)])


def _nothing(axes: Axes, why: str) -> None:
    axes.set_axis_off()
    axes.text(0.5, 0.5, why, ha="center", va="center", transform=axes.transAxes, color="0.4", fontsize="small")


def look_of(adapter: str) -> dict[str, Any]:
    """Colour, dash and marker of an adapter's line, the same in all figures."""
    cycle = list(matplotlib.rcParams["axes.prop_cycle"])
    learner, _, inside = adapter.partition("_")
    others = len(cycle) - len(PLACES)
    place = PLACES.index(learner) if learner in PLACES else len(PLACES) + sum(adapter.encode()) % others
    return cycle[place] | ({"markerfacecolor": FACES[inside]} if inside in FACES else {})


def _legend(figure: Figure, panels: Iterable[Axes]) -> None:
    """Of all lines of all panels, each once."""
    found: dict[str, Any] = {}
    for axes in panels:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    if found:
        figure.legend(list(found.values()), list(found), loc="outside lower center", ncols=6)


Line = tuple[list[int], list[float]]  # positions, and what is shown there
Along = Callable[[Pool, str, int], Line]  # of a pool's arm, over a window


def over_stream(streams: Mapping[str, Mapping[str, Pool]], window: int = WINDOW) -> Figure:
    """Accepted length and, where it was timed, tokens/s along each stream, over a window of conversations.

    A learner's line is the fixed draft's, of all runs, times what its own runs show beside their fixed arm: runs
    differ in their orders and in how busy the machine was.

    Args:
        streams: pools by adapter, by stream. Orders of a stream are summed at each position.
    """
    with style():
        is_timed = any(len(timed(pool)) for pools in streams.values() for pool in pools.values())
        shown = [(_tau_along, "accepted length"), *([(_rate_along, "tokens/s")] if is_timed else [])]
        figure, panels = _grid(max(1, len(streams)), len(shown), width=3.3 if is_timed else 5)
        for (name, pools), row in zip(streams.items(), panels, strict=False):
            for axes, (of, label) in zip(row, shown, strict=True):
                first, *learners = _arms(pools)
                common = of(first[-1], "fixed", window)
                drawn = [("fixed", FIXED, common)]
                drawn += [(adapter, look, _beside(of, pool, common, window)) for _, adapter, look, pool in learners]
                drawn = [line for line in drawn if len(line[-1][0])]
                for adapter, look, line in drawn:
                    axes.plot(*line, label=adapter, **look, markevery=5)
                axes.set(ylabel=label, xlabel="conversation", title=name)
                if not drawn:
                    _nothing(axes, "not timed")
                    continue
                # A line where the domain changes.
                for at in sorted({place for pool in pools.values() for place in _switches(pool)}):
                    axes.axvline(at - 0.5, color="0.3", linewidth=0.8, linestyle="--")
        _legend(figure, panels.flat)
        if not streams:
            _nothing(panels[0, 0], "no stream that changes domain here")
        return figure


def _arms(pools: Mapping[str, Pool]) -> list[tuple[str, str, dict[str, Any], Pool]]:
    """(arm, adapter, look, pool) of each line: the fixed arm of all, then each adapted one."""
    known = [pool for pool in pools.values() if len(pool)]
    first = [("fixed", "fixed", FIXED, fixed(pd.concat(known)))] if known else []
    return first + [("adapted", adapter, look_of(adapter), pool) for adapter, pool in pools.items()]


def _along(
    rows: Pool, numerator: Callable[[Pool], Any], denominator: str, window: int
) -> tuple[list[int], list[float]]:
    """A ratio of sums over the last ``window`` positions, at each position."""
    if rows.empty:
        return [], []
    sums = pd.DataFrame({"position": rows["position"], "top": numerator(rows), "bottom": rows[denominator]})
    each = sums.groupby("position").sum().sort_index().rolling(window, min_periods=1).sum()
    return each.index.tolist(), (each["top"] / each["bottom"]).tolist()


def _tau_along(pool: Pool, arm: str, window: int) -> tuple[list[int], list[float]]:
    rows = pool.drop_duplicates(["seed", "order", "position"]) if len(pool) else pool
    return _along(rows, lambda r: r[f"{arm}_accepted"] + r[f"{arm}_rounds"], f"{arm}_rounds", window)


def _rate_along(pool: Pool, arm: str, window: int) -> tuple[list[int], list[float]]:
    return _along(timed(pool), lambda r: r[f"{arm}_tokens"], f"{arm}_seconds", window)


def _beside(of: Along, pool: Pool, common: Line, window: int) -> Line:
    """A learner's line: the common one's, times the ratio of both arms in its own runs."""
    at, adapted = of(pool, "adapted", window)
    _, own = of(pool, "fixed", window)
    fixed_at = dict(zip(*common, strict=True))
    return at, [fixed_at[place] * a / b for place, a, b in zip(at, adapted, own, strict=True)]


def _switches(pool: Pool) -> set[int]:
    """Where streams pass from one source to the next; nowhere in those that mix."""
    return {at for places in pool["switches"] if isinstance(places, list) for at in places}


def by_depth(panels: Mapping[str, Mapping[str, Pool]]) -> Figure:
    """Share of drafted tokens accepted at each depth of those tested there.

    Args:
        panels: pools by adapter, by title.
    """
    with style():
        figure, grid = _wrapped(len(panels), width=2.9)
        if not panels:
            _nothing(grid[0], "no runs")
        for axes, (title, pools) in zip(grid, panels.items(), strict=False):
            for arm, adapter, look, pool in _arms(pools):
                shares = _by_depth(pool, arm)
                axes.plot(range(1, len(shares) + 1), shares, label=adapter, **look)
            axes.set(xlabel="depth", ylabel="accepted / tested", title=title, ylim=(0, 1))
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            axes.legend()
        return figure


def _by_depth(pool: Pool, arm: str) -> list[float]:
    rows = counted(pool)
    rows = rows[rows[f"{arm}_trials"].notna()] if len(rows) else rows
    trials, survivals = (
        [sum(depth) for depth in zip_longest(*rows[f"{arm}_{name}"], fillvalue=0)] for name in ("trials", "survivals")
    )
    return [s / t if t else float("nan") for s, t in zip(survivals, trials, strict=True)]


def by_length(panels: Mapping[str, Mapping[str, Pool]]) -> Figure:
    """Where an update pays for itself: the speedup of conversations by their length, with 95 % intervals.

    Without timings the gain in tau, which leaves learning's time out. Hollow: too few for an interval.
    """
    with style():
        figure, grid = _wrapped(len(panels))
        if not panels:
            _nothing(grid[0], "no runs")
        for axes, (title, pools) in zip(grid, panels.items(), strict=False):
            is_timed = any(len(timed(pool)) for pool in pools.values())
            for i, (adapter, pool) in enumerate(pools.items()):
                _plot_by_length(axes, _by_length(pool, is_timed), 1 + 0.05 * i, adapter)
            axes.axhline(1, color="0.3", linewidth=0.8)
            axes.set(xlabel="tokens of the conversation", title=title)
            axes.set_ylabel("speedup over fixed" if is_timed else "tau over fixed")
            longest = max((pool["paired_fixed_tokens"].max() for pool in pools.values()), default=0)
            _log_axis(axes, [length for length in LENGTHS if 0 < length < 2 * longest and math.isfinite(length)])
            axes.legend()
        return figure


def _log_axis(axes: Axes, ticks: Sequence[float]) -> None:
    axes.set_xscale("log")
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()


def _by_length(pool: Pool, is_timed: bool) -> list[tuple[float, float, float, float]]:
    """(mean tokens, ratio, low, high) of each range of lengths; the bounds NaN where it holds too few."""
    points = []
    for _, held in by_tokens(pool):
        found = speedup(held) if is_timed else tau_gain(held)
        if found.value is not None:
            bounds = [math.nan if bound is None else bound for bound in (found.low, found.high)]
            points.append((float(held["paired_fixed_tokens"].mean()), found.value, *bounds))
    return points


def _plot_by_length(
    axes: Axes, points: Sequence[tuple[float, float, float, float]], shift: float, adapter: str
) -> None:
    """
    Args:
        shift: factor of the tokens, for intervals that would hide each other.
    """
    if not points:
        return
    look = look_of(adapter)
    at, value, low, high = np.array(points).T
    axes.plot(at * shift, value, **look, markerfacecolor="white", zorder=2)
    sure = np.isfinite(low)
    reach = np.clip([value - low, high - value], 0, None)[:, sure]
    dots: dict[str, Any] = look | {"linestyle": ""}
    axes.errorbar(at[sure] * shift, value[sure], yerr=reach, **dots, capsize=2, elinewidth=0.8, zorder=3)
    axes.plot([], [], label=adapter, **look)


def phase_shares(panels: Mapping[str, Mapping[str, Pool]]) -> Figure:
    """Milliseconds a token by phase, the fixed arm first; learning between requests at the end."""
    with style():
        most = max((len(pools) + 1 for pools in panels.values()), default=1)
        figure, grid = _grid(max(1, len(panels)), 1, 0.35 * most + 0.5, 6.5)
        if not panels:
            _nothing(grid[0, 0], "no runs")
        for (axes,), (title, pools) in zip(grid, panels.items(), strict=False):
            bars = {name: _milliseconds(pool, arm) for arm, name, _, pool in _arms(pools)}
            bars = {name: of for name, of in bars.items() if of}
            if not bars:
                _nothing(axes, "not timed")
                continue
            left = np.zeros(len(bars))
            for i, phase in enumerate(PHASES):
                widths = np.array([of[phase] for of in bars.values()])
                axes.barh(list(bars), widths, left=left, label=phase, color=f"C{i}", edgecolor="white", linewidth=0.5)
                for row, (start, width, of) in enumerate(zip(left, widths, bars.values(), strict=True)):
                    if (share := width / sum(of.values())) >= 0.06:
                        axes.text(start + width / 2, row, f"{share:.0%}", ha="center", va="center", color="white")
                left += widths
            axes.invert_yaxis()
            axes.grid(axis="y", visible=False)
            axes.set(xlabel="ms a token", title=title)
            axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.32), ncols=len(PHASES), handlelength=1)
        return figure


def _milliseconds(pool: Pool, arm: str) -> dict[str, float]:
    rows = timed(pool)
    if rows.empty:
        return {}
    spent = {phase: rows[f"{arm}_s_{phase}"].sum() for phase in PHASES if phase != "outer"}
    spent["outer"] = rows[f"{arm}_outer_seconds"].sum()
    return {phase: 1e3 * seconds / rows[f"{arm}_tokens"].sum() for phase, seconds in spent.items()}


def learning_rates(panels: Mapping[str, Mapping[str, Mapping[float, Pool]]]) -> Figure:
    """Tokens/s by step size where it was timed, else tau; the fixed draft as a level.

    Args:
        panels: pools by step size, by workload, by title; a panel without any says that its runs were left out.
    """
    with style():
        figure, grid = _wrapped(len(panels))
        if not panels:
            _nothing(grid[0], "no runs that differ in their step size")
        for axes, (title, workloads) in zip(grid, panels.items(), strict=False):
            axes.set_title(title)
            if not workloads:
                _nothing(axes, "left out: runs differ in more than their step size")
                continue
            every = [pool for pools in workloads.values() for pool in pools.values()]
            is_timed = all(len(timed(pool)) for pool in every)
            for workload, pools in workloads.items():
                level = (rate if is_timed else tau)(fixed(pd.concat(list(pools.values()))), "fixed")
                of = [rate_beside(level, speedup(pool)) if is_timed else tau(pool) for pool in pools.values()]
                values: Any = [found.value for found in of]
                (line,) = axes.plot(list(pools), values, label=workload)
                if level.value is not None:
                    axes.axhline(level.value, color=line.get_color(), linewidth=0.8, linestyle=(0, (1, 1)))
            axes.set(xlabel="step size (dotted: fixed draft)")
            _log_axis(axes, sorted({step for pools in workloads.values() for step in pools}))
            _wide_enough(axes)
            axes.set_ylabel("tokens/s" if is_timed else "accepted length")
            axes.legend()
        return figure


def _wide_enough(axes: Axes) -> None:
    """Differences of a few in a thousand do not fill the height."""
    low, high = axes.get_ylim()
    missing = LEAST_SPAN * (low + high) / 2 - (high - low)
    if missing > 0:
        axes.set_ylim(low - missing / 2, high + missing / 2)


def ensemble_weights(runs: Mapping[str, Pool]) -> Figure:
    """The share p of each base learner in what is served, block by block."""
    with style():
        figure, grid = _wrapped(len(runs))
        if not runs:
            _nothing(grid[0], "no run with an ensemble")
        for axes, (title, pool) in zip(grid, runs.items(), strict=False):
            blocks = learned_blocks(pool)
            p = np.array([block["learners"]["p"] for block in blocks], dtype=float)
            for i, lr in enumerate(blocks[0]["learners"]["lrs"]):
                axes.plot([block["block"] for block in blocks], p[:, i], label=f"{lr:g}")
            axes.set(xlabel="block", ylabel="share p", ylim=(0, 1), title=title)
            axes.legend(title="step size", title_fontsize="x-small")
        return figure


def regret(runs: Mapping[str, Pool], window: int = WINDOW) -> Figure:
    """Summed loss beyond that of the best step size in hindsight, and accepted length along the stream.

    Each block's loss is taken before learning from it. What hedge is compared with is a step size for one block from
    what was served, since its base learners start each block there, and not one step size all along.
    """
    with style():
        figure, grid = _grid(max(1, len(runs)), 2)
        if not runs:
            for axes in grid[0]:
                _nothing(axes, "no run with an ensemble")
        for (title, pool), (left, right) in zip(runs.items(), grid, strict=False):
            at, learner, base, lrs = block_losses(pool)
            # One that broke, whose loss is NaN, is not the best.
            best = np.cumsum(base, axis=0)[:, np.argmin(np.nan_to_num(base.sum(axis=0), nan=np.inf))]
            for i, lr in enumerate(lrs):
                left.plot(at, np.cumsum(base[:, i]) - best, label=f"step {lr:g}", linewidth=0.9)
            left.plot(at, np.cumsum(learner) - best, label="served", color="black", linestyle="-", marker="X")
            left.axhline(0, color="0.3", linewidth=0.8)
            left.set(xlabel="block", ylabel="regret (summed loss)", title="\n".join((title, *_compared(pool))))
            low, high = left.get_ylim()
            left.set_ylim(low, high + 0.4 * (high - low))  # the legend stands above the lines
            left.legend(ncols=2, loc="upper left")
            for arm, name, look, rows in _arms({"served": pool}):
                right.plot(*_tau_along(rows, arm, window), label=name, **look, markevery=5)
            right.set(xlabel="conversation", ylabel="accepted length", title=title)
            right.legend()
        return figure


def _compared(pool: Pool) -> list[str]:
    """What a title adds of hedge, the one rule whose base learners have losses after a block too."""
    hedge = any(block["learners"]["after"] for block in learned_blocks(pool))
    return ["each step size for one block"] if hedge else []
