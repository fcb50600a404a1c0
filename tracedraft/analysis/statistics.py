"""Intervals, tests and sample sizes for ratios of sums over conversations that two arms answered side by side.

What is drawn is a conversation with all its numbers, so that both arms stay paired. Two things may vary beside the
prompts: the seed of the noise and, for learners that keep what they learn, the order of the stream. They are a level
of their own, crossed with the prompts where runs share them: 3 orders of 20 prompts are not 60 prompts.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

RESAMPLES = 9999
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
        replicates: [RESAMPLES] the ratio in each resample.
    """

    value: float | None
    low: float | None = None
    high: float | None = None
    p: float | None = None
    n: int = 0
    reason: str | None = None
    replicates: NDArray[np.float64] | None = None


def estimate(counts: ArrayLike, ratio: Ratio, units: ArrayLike, levels: ArrayLike | None = None) -> Estimate:
    """The ratio of sums over rows, with a percentile-bootstrap interval.

    Args:
        counts: [n, k], a row a conversation.
        units: [n] what is drawn whole: the prompt, or the block of a stream.
        levels: [n] the seed or order that a row belongs to, drawn as well; None: one.
    """
    rows = np.asarray(counts, dtype=float)
    if not len(rows):
        return Estimate(None, reason="no conversation")
    with np.errstate(divide="ignore", invalid="ignore"):
        value = float(ratio(rows.sum(axis=0)))
    if not np.isfinite(value):
        return Estimate(None, n=len(rows), reason="nothing was counted")
    found = len(np.unique(np.asarray(units)))
    if found < FEWEST:
        return Estimate(value, n=len(rows), reason=f"{found} of {FEWEST} conversations or blocks for an interval")
    with np.errstate(divide="ignore", invalid="ignore"):
        replicates = ratio(resampled(rows, units, levels))
    return from_replicates(value, replicates, len(rows))


def from_replicates(value: float, replicates: NDArray[np.float64], n: int) -> Estimate:
    """Interval and p-value by the share of resamples on either side; one that drew nothing does not count."""
    drawn = replicates[np.isfinite(replicates)]
    low, high = np.quantile(drawn, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    tail = min(np.sum(drawn <= 1), np.sum(drawn >= 1))
    p = min(1.0, 2 * (tail + 1) / (len(drawn) + 1))
    return Estimate(value, float(low), float(high), float(p), n, None, replicates)


def resampled(rows: NDArray[np.float64], units: ArrayLike, levels: ArrayLike | None = None) -> NDArray[np.float64]:
    """Sums of rows [n, k] in each resample [RESAMPLES, k].

    Units and levels are drawn with replacement, each for itself, and a row counts the product (Owen, "The pigeonhole
    bootstrap", 2007). Where every unit lies in one level only, this is drawing levels, and units below them.
    """
    # Of their own per set of units: cells that drew alike could not be averaged.
    named = "\n".join(map(str, np.asarray(units).tolist()))
    random = np.random.default_rng(zlib.crc32(named.encode()))
    held, unit = np.unique(np.asarray(units), return_inverse=True)
    known, level = np.unique(np.zeros(len(rows)) if levels is None else np.asarray(levels), return_inverse=True)
    # Never [RESAMPLES, n] at once: hundreds of orders of hundreds of prompts would be gigabytes.
    cube = np.zeros((len(held), len(known), rows.shape[1]))
    np.add.at(cube, (unit, level), rows)
    by_level = (_multinomial(random, len(held)) @ cube.reshape(len(held), -1)).reshape(RESAMPLES, *cube.shape[1:])
    return by_level[:, 0] if levels is None else np.einsum("rl,rlk->rk", _multinomial(random, len(known)), by_level)


def _multinomial(random: np.random.Generator, count: int) -> NDArray[np.float64]:
    """How often each of ``count`` is drawn [RESAMPLES, count]."""
    return random.multinomial(count, np.full(count, 1 / count), size=RESAMPLES).astype(float)


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
    """The plain mean of several estimates of which none is missing, each resampled for itself."""
    values = [e.value for e in estimates if e.value is not None]
    n = sum(e.n for e in estimates)
    if not values or len(values) < len(estimates):
        return Estimate(None, n=n, reason=f"{len(values)} of {len(estimates)} are there")
    replicates = [e.replicates for e in estimates if e.replicates is not None]
    value = float(np.mean(values))
    if len(replicates) < len(estimates):
        return Estimate(value, n=n, reason="one of them has no interval")
    found = from_replicates(value, np.mean(replicates, axis=0), n)
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
