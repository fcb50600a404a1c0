"""Intervals over conversations: coverage against a known truth, pairing, and what is missing."""

from __future__ import annotations

import math
import tracemalloc
from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from tracedraft.summary import intervals


def record(
    fixed: tuple[float, int, int], adapted: tuple[float, int, int], same: bool = True, paired: bool = True
) -> dict:
    def arm(seconds: float, accepted: int, rounds: int, tokens: list[int]) -> dict:
        return {
            "tokens": tokens,
            "accepted": accepted,
            "rounds": rounds,
            "seconds": {"verify": seconds, "outer": 9.0},
        }

    arms = {"fixed": arm(*fixed, [1, 2]), "adapted": arm(*adapted, [1, 2] if same else [1, 3])}
    return {"turns": [{"arms": arms, "paired": paired}]}


def test_the_gain_is_of_sums_and_equal_arms_have_no_spread():
    equal = intervals(
        [record((2.0, 10, 20), (2.0, 10, 20)), record((1.0, 5, 5), (1.0, 5, 5)), record((3, 1, 9), (3, 1, 9))]
    )
    assert equal["tau_gain"] == 1.0
    assert equal["tau_gain_interval"] == equal["speedup_interval"] == [1.0, 1.0]
    mixed = intervals([record((2.0, 10, 20), (1.0, 20, 10))] * 2 + [record((4.0, 0, 10), (4.0, 0, 10))])
    assert mixed["tau_gain"] == pytest.approx((70 / 30) / (70 / 50))
    low, high = mixed["speedup_interval"]
    # What was seen spans 1 to 2; three conversations leave two degrees of freedom, and t's quantile is 4.3.
    assert low < 0.5
    assert high > 3
    assert math.sqrt(low * high) == pytest.approx(8 / 6)


def test_nineteen_of_twenty_intervals_hold_the_truth():
    """300 streams of 4 conversations, true speedup 1.1. Binomial(300, 0.95) falls below 272 with p = 0.1 %;
    percentiles of resamples would hold it in 0.80 of them."""
    random, held = Random(0), 0
    for _ in range(300):
        stream = []
        for _ in range(4):
            seconds = random.uniform(1, 3)
            stream.append(
                record((1.1 * seconds * random.gauss(1, 0.1), 5, 9), (seconds * random.gauss(1, 0.1), 5, 9))
            )
        low, high = intervals(stream)["speedup_interval"]
        held += low <= 1.1 <= high
    assert 272 <= held < 300


def test_pairing_removes_what_conversations_share():
    """Long and short conversations differ tenfold; each arm alone would have an interval tenfold as wide."""
    random = Random(1)
    stream = [
        record((1.2 * s, 5, 9), (s * random.gauss(1, 0.02), 5, 9))
        for s in (random.uniform(0.2, 2) for _ in range(40))
    ]
    low, high = intervals(stream)["speedup_interval"]
    assert low < 1.2 < high
    assert high - low < 0.05


def test_too_few_conversations_have_a_reason_and_no_interval():
    few = intervals([record((1.0, 1, 1), (1.0, 1, 1))] * 2)
    assert few["speedup_interval"] is None
    assert few["tau_gain"] == 1.0
    assert few["null_reasons"]["speedup_interval"] == "2 of 3 conversations or blocks for an interval"
    none = intervals([record((1.0, 1, 1), (1.0, 1, 1), same=False)] * 5)
    assert none["tau_gain"] is None
    unpaired = intervals([record((2.0, 1, 1), (1.0, 1, 1), paired=False)] * 5)
    assert unpaired["speedup_interval"] is unpaired["tau_gain"] is None
    assert set(none["null_reasons"]) == {"tau_gain", "tau_gain_interval", "speedup_interval"}


def test_thousands_of_conversations_stay_within_a_quarter_of_a_gigabyte():
    """All resamples at once would hold 3,000 x 9,999 indices, 240 MB, and as many values of each column."""
    random = Random(3)
    stream = [record((1.2 * s, 5, 9), (s, 6, 8)) for s in (random.uniform(1, 3) for _ in range(3_000))]
    low, high = made_within(2**28, lambda: intervals(stream)["speedup_interval"])
    assert low == pytest.approx(1.2)
    assert high == pytest.approx(1.2)


def made_within(size: int, make: Callable[[], Any]) -> Any:
    """What ``make`` returns, after checking that it never held more than ``size`` bytes at a time."""
    tracemalloc.start()
    try:
        made = make()
        assert tracemalloc.get_traced_memory()[1] < size
    finally:
        tracemalloc.stop()
    return made


def test_the_same_records_give_the_same_interval():
    random = Random(2)
    stream = [record((random.random(), 3, 4), (random.random(), 2, 5)) for _ in range(9)]
    first = intervals(stream)
    assert first == intervals(stream)
    assert all(math.isfinite(bound) for bound in first["tau_gain_interval"] + first["speedup_interval"])
