"""Learning between requests in a process of its own: what is served, when, and what its time is."""

from __future__ import annotations

import time
from itertools import pairwise

import psutil
import pytest
from outer_cases import TARGET, blocks, lessons, new_draft, outer


def test_a_block_learnt_in_the_background_is_the_one_learnt_here_and_served_when_it_is_ready():
    """Bit by bit, but for the product with the head, which is a plain one there."""
    changes = {"update_interval": 1, "background": True, "schedule": [[1, 3], [3, 4], [5, 6]]}
    draft = new_draft()
    learner = outer("osd", **changes).build(draft, TARGET, 0)
    served, found = [draft.model], []
    for seen in (blocks(learner, 1)[0] for _ in range(6)):
        found.append(seen)
        served.append(draft.model)
    learner.close()
    assert [seen and seen["block"] for seen in found] == [None, None, 1, 2, None, 3]
    assert [a is b for a, b in pairwise(served)] == [True, True, False, False, True, False]
    here = outer("osd", update_interval=1).build(new_draft(), TARGET, 0)
    for n, seen in zip((1, 2, 2), [seen for seen in found if seen and seen["block"]], strict=True):
        for _ in range(n):
            here.observe(lessons()[0])
        expected = here.end_conversation(1.0)
        assert seen["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert seen["drift"] == pytest.approx(expected["drift"], rel=1e-3)
        assert seen["lessons"] == expected["lessons"] == n


def test_what_was_being_learnt_in_the_background_is_learnt_again_after_a_restart():
    changes = {"update_interval": 1, "background": True, "schedule": [[1, 2], [2, 4]]}
    spec = outer("osd", **changes)
    learner = spec.build(new_draft(), TARGET, 0)
    blocks(learner, 3)
    again = spec.build(new_draft(), TARGET, 0)
    again.load_state(learner.state(), learner.weights())
    one, other = blocks(learner, 1)[0], blocks(again, 1)[0]
    learner.close()
    again.close()
    assert one["weights_sha256"] == other["weights_sha256"]
    assert one["block"] == other["block"] == 2


def test_a_background_process_rests_while_another_arm_is_timed():
    learner = outer("osd", update_interval=1, background=True).build(new_draft(), TARGET, 0)
    blocks(learner, 1)
    process = psutil.Process(learner.process.pid)
    for resting in (True, False):
        learner.rest(resting)
        deadline = time.monotonic() + 30
        while (process.status() == psutil.STATUS_STOPPED) is not resting:
            assert time.monotonic() < deadline
    learner.close()
    assert not process.is_running()


def ready(learner) -> None:
    """Wait until the block in the process is learnt."""
    assert learner.pipe.poll(120)


def test_its_time_is_what_serving_waits_for_and_what_it_learns_itself():
    """Starting the process and handing over a block, in the record of the conversation after which that was; then
    learning, without the second in which it was stopped for another arm."""
    learner = outer("osd", update_interval=1, background=True, epochs=100).build(new_draft(), TARGET, 0)
    started = blocks(learner, 1)[0]
    assert (started["block"], started["served"]) == (None, False)
    assert started["seconds"] > 0
    ready(learner)
    began = time.monotonic()
    assert blocks(learner, 1)[0]["block"] == 1  # and hands over the next
    time.sleep(0.2)
    for resting in (True, True, False):
        learner.rest(resting)
        time.sleep(1.0 * resting)
    ready(learner)
    seen = blocks(learner, 1)[0]
    learner.close()
    assert 0 < seen["background_seconds"] < time.monotonic() - began - 1.9
    assert seen["block"] == 2


def test_what_it_says_of_a_budget_that_is_spent_has_its_seconds():
    """A block is collected when the next one would take too much."""
    learner = outer("osd", update_interval=1, background=True, budget=1e-6).build(new_draft(), TARGET, 0)
    blocks(learner, 1)
    ready(learner)
    collected, waiting = blocks(learner, 2)
    learner.close()
    assert (collected["block"], collected["committed"]) == (1, True)
    assert collected["seconds"] > 0
    assert (waiting["reason"], waiting["block"]) == ("over budget", None)
    assert waiting["seconds"] >= 0


def test_refused_conversations_start_no_process():
    learner = outer("osd", update_interval=1, background=True).build(new_draft(), TARGET, 0)
    seen = learner.end_conversation(0.0)
    assert (seen["reason"], seen["block"], learner.process) == ("nothing to learn", None, None)


@pytest.mark.parametrize(
    ("schedule", "after", "reasons"),
    [
        ([[1, 2], [2, 3], [3, 4]], 2, ["", "", "the process that learnt ended with code -9", ""]),
        ([[1, 2], [3, 4]], 2, ["", "", "", ""]),
    ],
    ids=["learning", "idle"],
)
def test_another_process_goes_on_where_one_has_ended(schedule, after, reasons):
    """From what its last block left: the rest is as if a lost block had not been."""
    changes = {"update_interval": 1, "epochs": 20}
    learner = outer("osd", **changes, background=True, schedule=schedule).build(new_draft(), TARGET, 0)
    found = []
    for n in range(4):
        if n == after:
            learner.process.kill()
            learner.process.join()
        found += blocks(learner, 1)
    learner.close()
    assert [seen["reason"] if seen else "" for seen in found] == reasons
    assert all(seen["seconds"] >= 0 for seen in found if seen)
    here = outer("osd", **changes).build(new_draft(), TARGET, 0)
    blocks(here, 1)
    if len(schedule) == 2:
        here.observe(lessons()[0])  # the second conversation's waited
    expected = blocks(here, 1)[0]
    assert found[-1]["committed"]
    assert found[-1]["block"] == len(schedule)
    assert found[-1]["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    assert found[-1]["drift"] == pytest.approx(expected["drift"], rel=1e-3)
