"""The numbers of a run against hand-computed and naive ones, and the reason of each that is missing."""

import dataclasses
import json
import subprocess
import sys
from random import Random

import pytest

from tracedraft import summary as summaries
from tracedraft.meter import PHASES
from tracedraft.summary import summarise
from tracedraft.types import Response, Update


def response(tokens, rounds=0, accepted=0, trials=(), survivals=(), updates=(), **seconds):
    spent = dict.fromkeys(PHASES, 0.0) | seconds
    made = Response(
        list(tokens), "limit", rounds, accepted, 0, [], list(trials), list(survivals), list(updates), spent
    )
    return dataclasses.asdict(made)


def record(*arms, id="a", audited=1, mismatches=0, near_ties=0, refused=None):
    turns = [
        {
            "turn": i,
            "prompt_tokens": 4,
            "paired": True,
            "lossless": {"audited": audited, "mismatches": mismatches, "near_ties": near_ties},
            "arms": {"fixed": fixed, "adapted": adapted},
        }
        for i, (fixed, adapted) in enumerate(arms)
    ]
    head = {"index": 0, "id": id, "domain": "maths", "occurrence": 0, "order": ["fixed", "adapted"]}
    return head | {"refused": refused, "turns": turns}


def update(committed, reason=""):
    return Update(1, committed, reason, {"prompt": 1}, None, None, {}, None)


def test_summary_of_a_hand_computed_example():
    # Adapted: turn 1 has S=4, A=6, 11 tokens in 2 s; turn 2 has S=2, A=0, 3 tokens in 1 s.
    first, second = range(100, 111), [7, 8, 9]
    adapted = [
        response(
            first,
            4,
            6,
            (4, 3, 0),
            (3, 3, 0),
            [update(True), update(False, "drift"), update(False, "drift"), update(False, "loss")],
            verify=1.5,
            update=0.5,
        ),
        response(second, 2, 0, (2, 0, 0), (0, 0, 0), [update(True)], verify=0.5, other=0.5),
    ]
    fixed = [
        response(first, 5, 5, (5, 1, 0), (4, 1, 0), verify=3.0),
        response(second, 2, 0, (2, 0, 0), (0, 0, 0), verify=1.5),
    ]
    summary = summarise([record(*zip(fixed, adapted, strict=True))])
    assert summary["tau"] == (6 + 6) / 6
    assert summary["macro_tau"] == ((6 + 4) / 4 + (0 + 2) / 2) / 2
    assert (summary["rounds"], summary["accepted"], summary["tokens"]) == (6, 6, 14)
    assert summary["tokens_per_s"] == 14 / 3
    assert summary["speedup"] == 4.5 / 3
    assert summary["acceptance_by_depth"] == [3 / 6, 3 / 3, None]
    assert summary["updates"] == {"attempted": 5, "committed": 2, "rolled_back": {"drift": 2, "loss": 1}}
    assert summary["seconds"] == dict.fromkeys(PHASES, 0.0) | {"verify": 2.0, "update": 0.5, "other": 0.5}
    assert summary["repeated_8gram_share"] == 0.0
    assert summary["fixed"]["tau"] == (5 + 7) / 7
    assert summary["fixed"]["tokens_per_s"] == 14 / 4.5
    assert summary["fixed"]["updates"]["attempted"] == 0
    assert (summary["lossless"], summary["audited"], summary["mismatches"]) == (True, 2, 0)
    assert (summary["conversations"], summary["turns"], summary["arms_differ"]) == (1, 2, 0)
    assert set(summary["null_reasons"]) == {"acceptance_by_depth", "fixed.acceptance_by_depth"}
    assert "depth 3" in summary["null_reasons"]["acceptance_by_depth"]
    json.dumps(summary, allow_nan=False)


def test_summary_does_not_depend_on_how_turns_are_grouped_or_ordered():
    random = Random(1)

    def turn():
        tokens = [random.randrange(3) for _ in range(random.randrange(1, 30))]
        arms = []
        for _ in range(2):
            rounds, accepted = random.randrange(5), random.randrange(9)
            trials = [random.randrange(4) for _ in range(3)]
            seconds = random.randrange(64) / 64  # exact in binary, so that sums don't depend on order
            arms.append(response(tokens, rounds, accepted, trials, [t // 2 for t in trials], verify=seconds))
        return tuple(arms)

    turns = [turn() for _ in range(40)]
    together = summarise([record(*turns)])
    random.shuffle(turns)
    apart = summarise([record(one) for one in turns])
    assert apart.pop("conversations") == 40
    assert together.pop("conversations") == 1
    for summary in (apart, together):  # a mean of quotients, which rounds
        for arm in (summary, summary["fixed"]):
            arm["macro_tau"] = pytest.approx(arm["macro_tau"])
    assert apart == together


def test_speedup_is_paired_over_turns_with_the_same_tokens():
    same = (response([1, 2], 1, 0, verify=3.0), response([1, 2], 1, 0, verify=2.0))
    other = (response([1, 2], 1, 0, verify=100.0), response([1, 3], 1, 0, verify=1.0))
    summary = summarise([record(same, other)])
    assert (summary["speedup"], summary["speedup_turns"], summary["arms_differ"]) == (1.5, 1, 1)
    assert summary["tokens_per_s"] == 4 / 3
    alone = summarise([record(other)])
    assert alone["speedup"] is None
    assert "same tokens" in alone["null_reasons"]["speedup"]


def test_outer_learning_is_not_in_the_throughput():
    arms = (response([1], verify=2.0, outer=6.0), response([1], verify=1.0, outer=7.0))
    summary = summarise([record(arms)])
    assert (summary["tokens_per_s"], summary["speedup"]) == (1.0, 2.0)
    assert summary["seconds"]["outer"] == 7.0


@pytest.mark.parametrize(
    ("audited", "mismatches", "ties", "same", "lossless"),
    [
        (5, 0, 0, True, True),
        (5, 1, 0, True, False),
        (5, 0, 0, False, False),
        (5, 0, 1, True, True),
        (5, 0, 2, False, True),
        (5, 1, 2, False, False),
        (0, 0, 0, True, None),
        (0, 0, 0, False, False),
    ],
)
def test_lossless(audited, mismatches, ties, same, lossless):
    """Arms may differ by proven near-ties, and by nothing else."""
    arms = (response([1, 2]), response([1, 2 if same else 3]))
    first = record(arms, audited=audited, mismatches=mismatches, near_ties=ties)
    summary = summarise([first, record(arms, audited=0, near_ties=ties)])
    assert summary["near_ties"] == 2 * ties
    assert summary["lossless"] is lossless
    assert ("lossless" in summary["null_reasons"]) == (lossless is None)


def test_every_null_of_an_empty_run_has_its_reason():
    refused = {"turn": 0, "tokens": 9000, "context": 8192}
    summary = summarise([record(id="long", refused=refused), record(id="longer", refused=refused)])
    assert summary["refused"] == {"count": 2, "ids": ["long", "longer"]}
    assert summary["tokens"] == summary["fixed"]["tokens"] == 0
    nulls = {key for key, value in summary.items() if value is None}
    nulls |= {f"fixed.{key}" for key, value in summary["fixed"].items() if value is None}
    assert nulls == set(summary["null_reasons"])
    assert {"tau", "tokens_per_s", "speedup", "lossless", "fixed.tau"} <= nulls
    assert all(summary["null_reasons"].values())


def test_repeated_8gram_share_equals_the_naive_count():
    random = Random(2)
    responses = [[random.randrange(2) for _ in range(random.randrange(60))] for _ in range(30)]
    total = repeated = 0
    for tokens in responses:
        for end in range(8, len(tokens) + 1):
            total += 1
            gram = tokens[end - 8 : end]
            repeated += any(tokens[e - 8 : e] == gram for e in range(8, end))
    assert repeated > 0
    arms = [(response(t), response(t)) for t in responses]
    assert summarise([record(*arms)])["repeated_8gram_share"] == repeated / total


def test_a_loop_repeats_everything_but_its_first_gram():
    arms = (response([5] * 8), response([5] * 27))
    summary = summarise([record(arms)])
    assert summary["repeated_8gram_share"] == 19 / 20
    assert summary["fixed"]["repeated_8gram_share"] == 0.0


def test_reading_records_needs_no_torch():
    code = (
        "import sys, tracedraft.records, tracedraft.summary as s; s.summarise([]); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
    assert summaries.NGRAM == 8
