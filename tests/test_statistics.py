"""Coverage of intervals on streams with a known truth, Holm's worked example, and sample sizes that deliver."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import binom

from tracedraft.analysis import statistics
from tracedraft.analysis.statistics import (
    blocks,
    conversations_needed,
    estimate,
    first_over_second,
    holm,
    mean,
    resampled,
    spread,
    tau_gain,
)

TRUTH = 1.1


@pytest.fixture
def fewer_resamples(monkeypatch):
    monkeypatch.setattr(statistics, "RESAMPLES", 599)


def seconds(random, effect):
    """Seconds of fixed and adapted arm [n, 2] where conversations differ in length and the true ratio is known."""
    length = random.uniform(1, 3, len(effect))
    return np.stack([TRUTH * length * np.exp(effect), length], axis=1)


def held(interval):
    return interval.low <= TRUTH <= interval.high


def least(coverage, trials):
    """What a method of this coverage reaches in all but one in a thousand tests."""
    return int(binom.ppf(0.001, trials, coverage))


def test_intervals_over_conversations_hold_the_truth(fewer_resamples):
    """300 tables of 40 conversations: the percentile bootstrap covers 0.94 there."""
    random, count = np.random.default_rng(0), 0
    for _ in range(300):
        count += held(estimate(seconds(random, random.normal(0, 0.1, 40)), first_over_second, np.arange(40)))
    assert least(0.94, 300) <= count < 300


def test_orders_of_the_same_prompts_are_no_new_prompts(fewer_resamples):
    """A prompt's own gain comes back in all orders. Drawing the 60 rows as if apart would cover 0.74."""
    random, count, apart = np.random.default_rng(1), 0, 0
    for _ in range(200):
        prompts = np.tile(random.normal(0, 0.1, 20), 3)
        rows = seconds(random, prompts + random.normal(0, 0.02, 60))
        count += held(estimate(rows, first_over_second, np.tile(np.arange(20), 3), np.repeat(range(3), 20)))
        apart += held(estimate(rows, first_over_second, np.arange(60)))
    assert count >= least(0.93, 200)
    assert apart < 170


def test_orders_and_blocks_hold_what_neighbours_share(fewer_resamples):
    """Five streams of other prompts, each with an effect of its own and a state that lasts some conversations."""
    random, count, apart = np.random.default_rng(2), 0, 0
    for _ in range(200):
        state = np.zeros((5, 30))
        for i in range(1, 30):
            state[:, i] = 0.7 * state[:, i - 1] + random.normal(0, 0.05, 5)
        rows = seconds(random, (state + random.normal(0, 0.02, (5, 1))).ravel())
        runs, at = np.repeat(range(5), 30).tolist(), np.tile(range(30), 5).tolist()
        units = blocks(runs, list(range(150)), at)
        count += held(estimate(rows, first_over_second, units, runs))
        apart += held(estimate(rows, first_over_second, np.arange(150)))
    assert count >= least(0.92, 200)
    assert apart < count - 20


def test_units_are_drawn_whole_and_levels_multiply():
    """Sums of the identity are how often each row was drawn."""
    drawn = resampled(np.eye(4), ["a", "a", "b", "c"], [0, 1, 0, 1])
    assert drawn.shape == (statistics.RESAMPLES, 4)
    units = resampled(np.eye(4), ["a", "a", "b", "c"])
    assert (units[:, 0] == units[:, 1]).all()
    assert (units[:, [0, 2, 3]].sum(axis=1) == 3).all()
    twice = drawn[:, 0] + drawn[:, 1]  # unit a's weight times the draws of both levels, which are two
    assert (twice == 2 * units[:, 0]).all()
    assert set(np.unique(drawn[:, 0] / np.where(units[:, 0] > 0, units[:, 0], 1))) == {0, 1, 2}


def test_blocks_are_neighbours_of_one_stream_unless_prompts_come_back():
    assert blocks(["r"] * 8, list("abcdefgh"), range(4, 12)) == ["r/0"] * 2 + ["r/1"] * 2 + ["r/2"] * 2 + ["r/3"] * 2
    assert blocks(["r", "r", "s"], ["a", "b", "a"], [0, 1, 0]) == ["a", "b", "a"]


def test_ratios_are_of_sums_and_equal_arms_have_no_spread():
    rows = [[10, 20, 20, 10], [10, 20, 20, 10], [0, 10, 0, 10]]
    found = estimate(rows, tau_gain, range(3))
    assert found.value == pytest.approx((70 / 30) / (70 / 50))
    same = estimate([[5, 9, 5, 9], [1, 7, 1, 7], [0, 3, 0, 3]], tau_gain, range(3))
    assert (same.value, same.low, same.high, same.p, same.n) == (1, 1, 1, 1, 3)


@pytest.mark.parametrize(
    ("rows", "value", "reason"),
    [([], None, "no conversation"), ([[0, 0]] * 4, None, "nothing was counted"), ([[2, 1]] * 2, 2, "2 of 3")],
)
def test_what_is_missing_has_a_reason(rows, value, reason):
    found = estimate(np.reshape(rows, (-1, 2)), first_over_second, range(len(rows)))
    assert (found.value, found.low, found.n) == (value, None, len(rows))
    assert found.reason.startswith(reason)


def test_a_mean_is_of_all_or_of_none():
    random = np.random.default_rng(3)
    cells = [estimate(seconds(random, random.normal(0, 0.1, 30)), first_over_second, [f"{w}{i}" for i in range(30)])
             for w in range(4)]  # fmt: skip
    found = mean(cells)
    assert found.value == pytest.approx(np.mean([cell.value for cell in cells]))
    # Independent cells: the mean of four is half as wide as one.
    widths = [cell.high - cell.low for cell in cells]
    assert found.high - found.low == pytest.approx(np.mean(widths) / 2, rel=0.2)
    missing = mean([*cells, statistics.Estimate(None)])
    assert (missing.value, missing.reason) == (None, "4 of 5 are there")


def test_holm_against_the_worked_example():
    """Four tests at 0.01, 0.04, 0.03, 0.005: times 3, 1, 2 and 4 in order of size, never falling."""
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([]) == []


def test_as_many_conversations_as_needed_find_the_gain(fewer_resamples):
    """At the number that power 0.8 asks for, intervals lie above 1 in 0.8 of 200 tables, within binomial error."""
    random = np.random.default_rng(4)
    deviation = spread(seconds(random, random.normal(0, 0.1, 400)), first_over_second)
    assert deviation == pytest.approx(0.11, abs=0.02)
    n = conversations_needed(deviation, 0.1)
    found = sum(
        estimate(seconds(random, random.normal(0, 0.1, n)), first_over_second, range(n)).low > 1 for _ in range(200)
    )
    assert binom.ppf(0.001, 200, 0.8) <= found <= binom.ppf(0.999, 200, 0.92)
    assert conversations_needed(deviation, 0.01) > 50 * n
    assert conversations_needed(0.0, 0.1) == statistics.FEWEST
    assert spread([[1, 1]] * 2, first_over_second) is None
