"""Intervals, tests and sample sizes of ratios of sums over conversations that two arms answered side by side.

What is drawn is a conversation with all its numbers, so that both arms stay paired. Two things may vary beside the
prompts: the seed of the noise and, for learners that keep what they learn, the order of the stream. They are a level
of their own, crossed with the prompts where runs share them: 3 orders of 20 prompts are not 60 prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

RESAMPLES = 9999
AT_ONCE = 2**22  # numbers drawn at a time: all resamples of 10,000 conversations would be gigabytes
LEVEL = 0.95
FEWEST = 3  # units below which an interval says nothing
ORDERS = 3  # independent orders of a stream that a learner with a memory needs

Ratio = Callable[[Any], Any]  # of sums [..., k]


def tau(sums: Any) -> Any:
    """(A + S) / S of sums [..., (A, S)]."""
    return (sums[..., 0] + sums[..., 1]) / sums[..., 1]


def tau_gain(sums: Any) -> Any:
    """The second arm's tau over the first's, of sums [..., (A, S, A', S')]."""
    return tau(sums[..., 2:]) / tau(sums[..., :2])


def first_over_second(sums: Any) -> Any:
    """Of sums [..., 2]: a throughput ratio where they are the seconds of fixed and adapted arm."""
    return sums[..., 0] / sums[..., 1]


@dataclass(frozen=True)
class Estimate:
    """A ratio with its interval. Whatever is None could not be had; ``reason`` says why.

    Attributes:
        n: conversations in it.
        p: two-sided, that the ratio is 1.
        error: standard error of its logarithm.
        df: degrees of freedom of that error.
    """

    value: float | None
    low: float | None = None
    high: float | None = None
    p: float | None = None
    n: int = 0
    reason: str | None = None
    error: float | None = None
    df: float | None = None


def estimate(counts: ArrayLike, ratio: Ratio, units: ArrayLike, levels: ArrayLike | None = None) -> Estimate:
    """The ratio of sums over rows, with a t interval of its logarithm.

    Args:
        counts: [n, k], a row a conversation.
        units: [n] what is drawn whole: the prompt, or the block of a stream.
        levels: [n] the seed or order that a row belongs to, drawn as well; None: one.
    """
    rows = np.asarray(counts, dtype=float)
    if not len(rows):
        return Estimate(None, reason="no conversation")
    cube = cells(rows, units, levels)
    with np.errstate(divide="ignore", invalid="ignore"):
        value = float(ratio(cube.sum(axis=(0, 1))))
    if not (np.isfinite(value) and value > 0):
        return Estimate(None, n=len(rows), reason="nothing was counted")
    if len(cube) < FEWEST:
        return Estimate(value, n=len(rows), reason=f"{len(cube)} of {FEWEST} conversations or blocks for an interval")
    return with_interval(value, *standard_error(cube, ratio), len(rows))


def with_interval(value: float, error: float, df: float, n: int) -> Estimate:
    """Interval and p-value of a ratio by Student's t, from the standard error of its logarithm."""
    from scipy.stats import t

    factor = float(np.exp(t.ppf((1 + LEVEL) / 2, df) * error))
    p = 2 * float(t.sf(abs(np.log(value)) / error, df)) if error else float(value == 1)
    return Estimate(value, value / factor, value * factor, p, n, None, error, df)


def standard_error(cube: NDArray[np.float64], ratio: Ratio) -> tuple[float, float]:
    """Standard error of the logarithm of a ratio of sums, and its degrees of freedom.

    Percentiles of resamples are far too narrow for few units: of 3, a true ratio of 1 is called significant in one
    test of four. What the bootstrap yields is the variance, too small by (n - 1) / n, of drawing units alone, of
    drawing levels alone, and, in what drawing both adds to those, of the rest. They estimate what mean squares do
    in a two-way layout: the variance is units + levels - rest, with Satterthwaite's degrees of freedom. It can't be
    less than either, though that difference may be by chance.

    Args:
        cube: [units, levels, k], see ``cells``.
    """
    units, levels = len(cube), cube.shape[1]
    with np.errstate(divide="ignore", invalid="ignore"):
        first, second, both = (_log_variance(ratio(sums)) for sums in resampled(cube))
    of_units = first * units / (units - 1)
    if levels == 1:
        return float(np.sqrt(of_units)), units - 1.0
    of_levels, degrees = second * levels / (levels - 1), (units - 1) * (levels - 1)
    rest = max(both - first - second, 0.0) * units * levels / degrees
    variance = max(of_units + of_levels - rest, of_units, of_levels)
    spent = of_units**2 / (units - 1) + of_levels**2 / (levels - 1) + rest**2 / degrees
    return float(np.sqrt(variance)), float(variance**2 / spent) if spent else units - 1.0


def _log_variance(replicates: NDArray[np.float64]) -> float:
    """Of those that drew something."""
    logs = np.log(replicates)
    return float(np.var(logs[np.isfinite(logs)]))


def cells(rows: NDArray[np.float64], units: ArrayLike, levels: ArrayLike | None = None) -> NDArray[np.float64]:
    """Sums of rows [n, k] by unit and level [units, levels, k], alike in whatever order the rows come."""
    held, unit = np.unique(np.asarray(units), return_inverse=True)
    known, level = np.unique(np.zeros(len(rows)) if levels is None else np.asarray(levels), return_inverse=True)
    order = np.lexsort((*rows.T, level, unit))  # sums of floats depend on it
    cube = np.zeros((len(held), len(known), rows.shape[1]))
    np.add.at(cube, (unit[order], level[order]), rows[order])
    return cube


def resampled(cube: NDArray[np.float64]) -> tuple[NDArray[np.float64], ...]:
    """Sums [RESAMPLES, k] of what is drawn with replacement: units, levels, and both.

    Of both each is drawn for itself, and a cell counts the product (Owen, "The pigeonhole bootstrap", 2007).
    """
    random, flat = np.random.default_rng(0), cube.reshape(len(cube), -1)
    most = max(1, AT_ONCE // len(cube))
    parts = [min(most, RESAMPLES - start) for start in range(0, RESAMPLES, most)]
    by_level = np.concatenate([_multinomial(random, len(cube), part) @ flat for part in parts])
    by_level, levels = by_level.reshape(RESAMPLES, *cube.shape[1:]), _multinomial(random, cube.shape[1], RESAMPLES)
    return by_level.sum(axis=1), levels @ cube.sum(axis=0), np.einsum("rl,rlk->rk", levels, by_level)


def _multinomial(random: np.random.Generator, count: int, times: int) -> NDArray[np.float64]:
    """How often each of ``count`` is drawn [times, count]."""
    return random.multinomial(count, np.full(count, 1 / count), size=times).astype(float)


def blocks(runs: Sequence[Any], ids: Sequence[Any], positions: Sequence[int]) -> list[str]:
    """The units of a learner with a memory, a label a row.

    Prompts where runs share them, since what is hard about a prompt comes back in every order; the order's own draw
    holds what conversations of a stream share. Else blocks of n^(1/3) neighbours in one stream.
    """
    owners: dict[Any, set[Any]] = {}
    for run, id in zip(runs, ids, strict=True):
        owners.setdefault(id, set()).add(run)
    if max(map(len, owners.values()), default=1) > 1:
        return [str(id) for id in ids]
    streams: dict[Any, list[int]] = {}
    for run, position in zip(runs, positions, strict=True):
        streams.setdefault(run, []).append(position)
    length = {run: max(1, round(len(held) ** (1 / 3))) for run, held in streams.items()}
    first = {run: min(held) for run, held in streams.items()}
    return [f"{r}/{(p - first[r]) // length[r]}" for r, p in zip(runs, positions, strict=True)]


def mean(estimates: Sequence[Estimate]) -> Estimate:
    """The plain mean of several independent estimates of which none is missing."""
    values = [e.value for e in estimates if e.value is not None]
    n = sum(e.n for e in estimates)
    if not values or len(values) < len(estimates):
        return Estimate(None, n=n, reason=f"{len(values)} of {len(estimates)} are there")
    value = float(np.mean(values))
    known = [(e.value * e.error, e.df) for e in estimates if e.value and e.error is not None and e.df is not None]
    if len(known) < len(estimates):
        return Estimate(value, n=n, reason="one of them has no interval")
    variances, degrees = np.array(known).T[0] ** 2, np.array(known).T[1]
    whole = variances.sum()
    df = whole**2 / np.sum(variances**2 / degrees) if whole else degrees.min()  # Welch and Satterthwaite
    found = with_interval(value, float(np.sqrt(whole)) / len(values) / value, float(df), n)
    untested = next((e.reason for e in estimates if e.p is None), None)
    return found if untested is None else replace(found, p=None, reason=untested)


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values corrected for how many there are (Holm 1979)."""
    from statsmodels.stats.multitest import multipletests

    if not len(p_values):
        return []
    corrected: Any = multipletests(p_values, method="holm")[1]
    return corrected.tolist()


def spread(counts: ArrayLike, ratio: Ratio) -> float | None:
    """Standard deviation of what one conversation says of log(ratio), by the jackknife; None below ``FEWEST``."""
    rows = np.asarray(counts, dtype=float)
    n = len(rows)
    if n < FEWEST:
        return None
    with np.errstate(divide="ignore", invalid="ignore"):
        without = np.log(ratio(rows.sum(axis=0) - rows))
    found = (n - 1) * float(np.std(without, ddof=1))
    return found if np.isfinite(found) else None


def conversations_needed(deviation: float, gain: float, power: float = 0.8) -> int:
    """Conversations after which a gain of, say, 0.02 is seen with this probability, at two-sided 5 %.

    Args:
        deviation: of one conversation, by ``spread``, of the fixed arm against itself for the machine's noise alone.
    """
    from statsmodels.stats.power import TTestPower

    effect = np.log1p(gain) / deviation if deviation else np.inf
    if effect > 5:  # the t-test needs two or three rows then, and the solver finds no root
        return FEWEST
    found = TTestPower().solve_power(effect_size=effect, alpha=1 - LEVEL, power=power)
    return max(FEWEST, int(np.ceil(np.asarray(found).item())))
