"""The plot of a bench's result: what is drawn is what was kept."""

from __future__ import annotations

import json

import pytest

from analysis.speed import draw, rates, read, shares
from tracedraft.benchmark.numbers import by_workload, pairs
from tracedraft.errors import UserError
from tracedraft.types import Response


def response(tokens: int, **seconds: float) -> Response:
    phases = {
        "prefill": 0.0,
        "propose": 0.0,
        "verify": 0.0,
        "observe": 0.0,
        "update": 0.0,
        "outer": 0.0,
        "other": 0.0,
    }
    return Response([1] * tokens, "limit", 1, 0, 0, [], [], [], [], phases | seconds)


def result(*workloads: str) -> dict:
    """Two repetitions, the second twice as slow."""
    done = []
    for slow in (1, 2):
        arms = {
            "generate": [response(10, other=2.0 * slow)],
            "plain": [response(10, prefill=0.25 * slow, verify=0.75 * slow)],
            "tree": [response(10, propose=0.1 * slow, verify=0.4 * slow)],
        }
        done.append(dict.fromkeys(workloads, arms))
    return {"workloads": by_workload(done, pairs(["generate"], ["tree"], []))}


def test_rates_are_tokens_a_second_with_their_quartiles():
    speed = rates(result("a", "b"))
    assert list(speed) == ["generate", "plain", "tree"]
    assert list(speed["plain"]) == ["a", "b", "all"]
    middle, low, high = speed["plain"]["all"]
    assert middle == pytest.approx(10 / 1.5)
    assert (low, high) == pytest.approx((10 / 1.75, 10 / 1.25))
    assert list(rates(result("a"))["plain"]) == ["a"], "one workload is all there is"


def test_shares_are_of_the_whole_time_and_of_our_arms_alone():
    found = shares(result("a", "b"))
    assert list(found) == ["plain", "tree"]
    assert found["plain"]["verify"] == pytest.approx(0.75)
    assert found["tree"] == pytest.approx(dict.fromkeys(found["tree"], 0.0) | {"propose": 0.2, "verify": 0.8})


@pytest.mark.parametrize("names", [("a",), ("a", "b", "c", "d")])
def test_it_is_drawn(names, tmp_path):
    draw(result(*names), tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 10_000


@pytest.mark.parametrize("content", ["{}", "[]", "no json", '{"workloads": {"a": {}}}'])
def test_another_file_is_refused_by_name(content, tmp_path):
    file = tmp_path / "other.json"
    file.write_text(content)
    with pytest.raises(UserError, match=r"other\.json: no result of `make bench`"):
        read(file)
    file.write_text(json.dumps(result("a")))
    assert read(file)["workloads"]["a"]
