"""What is made of a bench's times and tokens, on answers whose numbers are known."""

from __future__ import annotations

import pytest
from conftest import chain, tiny

from tracedraft.benchmark.numbers import (
    Question,
    arm_numbers,
    by_workload,
    ms_per_token,
    pairs,
    parted,
    ratio,
    spread,
    verdict,
)
from tracedraft.types import Response


def response(tokens: list[int], seconds: float, rounds: int = 0, accepted: int = 0, update: float = 0.0) -> Response:
    spent = {"verify": seconds - update, "update": update}
    return Response(tokens, "limit", rounds, accepted, 0, [], [], [], [], spent)


def test_what_is_compared():
    """Ours with each engine, each mode with plain decoding and with those before it, each learner with its mode."""
    assert list(pairs(["generate"], ["chain", "tree"], ["reset"])) == [
        "plain_over_generate",
        "chain_over_generate",
        "tree_over_generate",
        "chain_over_plain",
        "tree_over_plain",
        "tree_over_chain",
        "chain_reset_over_chain",
        "tree_reset_over_tree",
    ]


def test_ratios_are_of_times_per_token_within_each_repetition():
    """Arms may say different numbers of tokens."""
    done = [
        {
            "plain": [response([1, 2], 1.0), response([3], 2.0)],
            "chain": [response([1, 2, 3, 4], 2.0), response([], 0.0)],
        },
        {"plain": [response([1, 2], 8.0)], "chain": [response([1, 2], 2.0)]},
    ]
    assert ms_per_token(done[0]["plain"]) == pytest.approx(1000)
    found = ratio(done, "chain", "plain")
    assert found["values"] == pytest.approx([2.0, 4.0])
    assert found["median"] == pytest.approx(3.0)
    assert found["quartiles"] == pytest.approx([2.5, 3.5])
    assert ratio(done, "plain", "generate") is None


def test_a_ratio_s_interval_is_over_prompts():
    """Prompts that gain 2 and 4 times, at equal weights: the interval holds both chance and the pooled ratio, is none
    where all gain alike, and repetitions of the same prompts do not narrow it."""

    def answers(*gains):
        return {
            "plain": [response([1, 2], 8.0) for _ in gains],
            "chain": [response([1, 2], 8.0 / gain) for gain in gains],
        }

    low, high = ratio([answers(2, 4, 2, 4)], "chain", "plain")["interval"]
    assert 1 < low < 8 / 3 < high < 6
    assert ratio([answers(2, 4, 2, 4)] * 5, "chain", "plain")["interval"] == pytest.approx([low, high])
    assert ratio([answers(2, 2, 2, 2)], "chain", "plain")["interval"] == pytest.approx([2, 2])
    assert ratio([answers(2, 4)], "chain", "plain")["interval"] is None


def test_one_repetition_has_no_quartiles():
    assert spread([2.0]) == {"median": 2.0, "quartiles": None, "values": [2.0]}


def test_an_arm_s_numbers():
    repetitions = [
        [response([1, 2], 2.0, rounds=1, accepted=1, update=0.5), response([1], 2.0, rounds=1, update=0.5)],
        [response([1, 2, 3], 3.0, rounds=1, accepted=2)],
    ]
    found = arm_numbers(repetitions)
    assert found["tau"] == (3 + 3) / 3
    assert found["learning_share"]["values"] == [0.25, 0.0]
    assert [row["tokens"] for row in found["repetitions"]] == [3, 3]
    assert arm_numbers([[response([1], 1.0)]])["tau"] is None
    assert arm_numbers([[response([1], 1.0)]])["learning_share"] is None


def test_all_workloads_together_weigh_by_their_tokens():
    long, short = [response([1] * 30, 3.0)], [response([1] * 10, 4.0)]
    found = by_workload([{"a": {"plain": long}, "b": {"plain": short}}], {"chain_over_plain": ("chain", "plain")})
    assert {name: made["arms"]["plain"]["ms_per_token"]["median"] for name, made in found.items()} == pytest.approx(
        {"a": 100, "b": 400, "all": 7000 / 40}
    )
    assert [made["ratios"] for made in found.values()] == 3 * [{"chain_over_plain": None}]


@pytest.mark.parametrize(
    ("median", "temperature", "workloads", "met", "reason"),
    [
        (1.5, 0, ["mtbench", "all"], True, None),
        (1.49, 0, ["mtbench", "all"], False, None),
        (1.6, 0.7, ["mtbench", "all"], None, "stated for temperature 0"),
        (1.6, 0, ["sample_chat", "all"], None, "stated for mtbench"),
        (None, 0, ["mtbench", "all"], None, "not measured"),
    ],
)
def test_an_aim_is_judged_only_where_it_was_stated(median, temperature, workloads, met, reason):
    ratios = {"tree_over_plain": None if median is None else spread([median])}
    found = {name: {"ratios": ratios} for name in workloads}
    aim = {"ratio": 1.5, "workload": "mtbench"}
    assert verdict(aim, "tree_over_plain", found, temperature) == {**aim, "met": met, "reason": reason}
    if "mtbench" not in workloads:
        assert verdict(aim | {"workload": None}, "tree_over_plain", found, 0)["met"] is True


def test_partings_are_scored_at_the_first_difference():
    """An arm that says what the target would not is no near-tie; one cut short is no parting."""
    target = tiny("float32").target
    prompt = list(b"Name three rivers.")
    own = int(target.exact_logits(prompt).argmax())
    other = (own + 1) % 256
    asked = {"x": [Question("a", prompt, 0)], "y": [Question("b", prompt, 0), Question("c", prompt, 0)]}
    answers = {
        "x": {"plain": [response([own, 5], 1.0)], "chain": [response([other, 9], 1.0)]},
        "y": {
            "plain": [response([own, 7], 1.0), response([own], 1.0)],
            "chain": [response([own], 1.0), response([own], 1.0)],
        },
    }
    found = parted(target, asked, answers, ("plain", "chain"), chain().sampling(0))
    assert (found["prompts"], found["parted"], found["near_ties"]) == (3, 1, 0)
    first = found["first"][0]
    assert (first["id"], first["index"], first["said"], first["own"]) == ("a", 0, other, own)
    assert first["gap"] > first["bound"]
    assert parted(target, asked, answers, ("plain", "generate"), chain().sampling(0)) is None
