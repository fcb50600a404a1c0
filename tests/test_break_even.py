"""From which length learning pays: counted on answers whose rounds are known."""

import pytest

from analysis.break_even import Costs, break_even, costs, curve, draw, markdown, pairs_of, rounds_to, saved
from tracedraft.errors import UserError

COST = Costs(round=10.0, observe=0.5, update=4.0)


def arm(accepted: list[int], updates: list[int] = (), seconds: dict[str, float] | None = None) -> dict:
    return {
        "tokens": list(range(1 + sum(accepted) + len(accepted))),
        "accepted_per_round": accepted,
        "rounds": len(accepted),
        "updates": [{"round": r} for r in updates],
        "seconds": seconds or {},
    }


def turn(fixed: dict, adapted: dict) -> dict:
    return {"arms": {"fixed": fixed, "adapted": adapted}}


def learner(gain: int = 1) -> tuple[dict, dict]:
    """25 tokens: 24 rounds without a draft's help, 12 with one more token each, updated after each fourth."""
    return arm([0] * 24), arm([gain] * (24 // (gain + 1)), [4, 8, 12])


@pytest.mark.parametrize("length", range(1, 30))
def test_rounds_are_counted_token_by_token(length):
    response = arm([0, 2, 5, 0, 1])
    stands = [0]  # rounds after which each token stands
    for after, accepted in enumerate(response["accepted_per_round"], 1):
        stands += [after] * (accepted + 1)
    assert rounds_to(response, length) == stands[min(length, len(stands)) - 1]


def test_what_is_saved_is_rounds_less_learning():
    # 9 tokens: 8 rounds or 4; the update after round 4 serves only what comes later.
    assert saved(learner(), 9, COST) == (4, 0, 4 * 10 - 4 * 0.5)
    assert saved(learner(), 13, COST) == (6, 1, 6 * 10 - 6 * 0.5 - 4)


def test_a_draft_that_gained_nothing_pays_for_its_learning():
    pair = learner(gain=0)
    assert saved(pair, 25, COST) == (0, 3, -(24 * 0.5 + 3 * 4))


def test_costs_are_of_the_time_spent():
    """Learning pays for evidence and for drafts that got slower; verification is common to both arms."""
    fixed = arm([0] * 10, seconds={"propose": 0.2, "verify": 0.4, "observe": 0.01, "update": 0.0})
    adapted = arm([1] * 5, [2, 4], {"propose": 0.15, "verify": 0.2, "observe": 0.02, "update": 0.03})
    cost = costs(pairs_of([{"turns": [turn(fixed, adapted)]}, {"turns": []}]))
    assert (cost.round, cost.observe, cost.update) == pytest.approx((40 + 20, 3 + 10, 15))


def test_pairs_that_differ_are_left_out():
    assert pairs_of([{"turns": [turn(arm([0, 0]), arm([0]))]}]) == [[]]


def test_without_times_it_says_what_to_do():
    with pytest.raises(UserError, match="--costs"):
        costs([[learner()]])


def test_the_curve_drops_short_responses_and_finds_the_length(tmp_path):
    # The first update costs what it never brings; later ones save a round each four.
    late = arm([0] * 60), arm([0] * 20 + [1] * 20, [8, 16, 24, 32, 40])
    short = arm([0] * 8), arm([0] * 8, [8])
    points = curve([[late], [late], [late], [short]], COST, (9, 17, 25, 41, 61, 99))
    assert [p.length for p in points] == [9, 17, 25, 41, 61]
    assert [p.responses for p in points] == [4, 3, 3, 3, 3]
    assert points[0].milliseconds < 0 < points[-1].milliseconds
    assert all(p.interval is not None and p.interval[0] <= p.milliseconds <= p.interval[1] for p in points)
    assert break_even(points) == 25  # 2 rounds of 10 ms saved, 22 observed at 0.5 ms, 2 updates of 4 ms
    assert "from 25 tokens on" in markdown(points, COST)
    draw(points, tmp_path / "curve.png")
    assert (tmp_path / "curve.png").stat().st_size > 1000


def test_two_conversations_have_no_interval_and_so_no_verdict():
    points = curve([[learner()], [learner()]], COST, (9, 25))
    assert [p.interval for p in points] == [None, None]
    assert break_even(points) is None
    assert "at no length seen here" in markdown(points, COST)
