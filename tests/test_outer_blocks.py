"""What becomes of a block that a learner between requests took: when, whether it is served, for whom, and where."""

from __future__ import annotations

import dataclasses
import time
from itertools import pairwise

import psutil
import pytest
import torch
from outer_cases import (
    TARGET,
    WORDS,
    blocks,
    built,
    lessons,
    new_draft,
    outer,
    weights_of,
)

from tracedraft.errors import UserError
from tracedraft.types import Conversation

# What becomes of a block


@pytest.mark.parametrize("name", ["osd", "optimistic", "ensemble"])
def test_the_served_draft_changes_with_each_block_and_the_masters_hold_it(name):
    learner, draft = built(name)
    probe = torch.randn(2, 64, generator=torch.Generator().manual_seed(0))
    heads, shas = [draft.head.logits(probe[:, : len(draft.head.norm)])], []
    for _ in range(3):
        seen = blocks(learner, 1)[0]
        assert seen["committed"], seen
        shas.append(seen["weights_sha256"])
        heads.append(draft.head.logits(probe[:, : len(draft.head.norm)]))
    assert len(set(shas)) == 3
    assert all(not torch.equal(a, b) for a, b in pairwise(heads))
    assert all(torch.equal(draft.model.get_parameter(n), w) for n, w in learner.student.weights.items())


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("osd", {"optimizer": "sgd", "lr": 1e6}, "the loss over the block rose"),
        ("osd", {"optimizer": "sgd", "lr": 1e38, "epochs": 2}, "non-finite loss"),
        ("optimistic", {"lr": 1e6}, "the loss over the block rose"),
    ],
)
def test_a_broken_block_leaves_the_last_good_draft(name, changes, reason):
    draft = new_draft()
    learner = outer(name, update_interval=1, clip=None, guard="block", **changes).build(draft, TARGET, 0)
    before, model, rule = weights_of(learner.student), draft.model, learner.rule.state()
    seen = blocks(learner, 1)[0]
    assert (seen["committed"], seen["served"], seen["weights_sha256"]) == (False, False, None)
    assert seen["reason"] == reason
    assert draft.model is model
    assert all(torch.equal(weight.detach(), before[n]) for n, weight in learner.student.weights.items())
    assert str(learner.rule.state()) == str(rule)


@pytest.mark.parametrize("name", ["osd", "optimistic", "ensemble"])
def test_the_held_out_guard_sees_what_the_block_itself_hides(name):
    """A draft that knows a turn is taught its opposite, and its loss over that falls. The turn itself, held out,
    speaks against it; another one of the opposite speaks for it."""
    draft, known = new_draft(), lessons()[0]
    opposite = dataclasses.replace(known, hidden=-known.hidden)
    teacher = outer("osd", update_interval=1, guard="none", objective="all", lr=1e-2).build(draft, TARGET, 0)
    for _ in range(30):
        teacher.observe(known)
        assert teacher.end_conversation(1.0)["served"]
    for guard, last, reason in (
        ("held_out", opposite, ""),
        ("held_out", known, "the loss over held-out turns rose"),
        ("block", known, ""),
    ):
        learner = outer(name, update_interval=2, guard=guard, objective="all").build(draft, TARGET, 0)
        before = weights_of(learner.student)
        for lesson in (opposite, opposite, last):
            learner.observe(lesson)
        learner.end_conversation(1.0)
        seen = learner.end_conversation(1.0)
        assert (seen["reason"], seen["committed"]) == (reason, not reason)
        same = all(torch.equal(weight.detach(), before[n]) for n, weight in learner.student.weights.items())
        assert same == bool(reason)
        if guard == "held_out":
            assert (seen["lessons"], seen["held_out"]["lessons"]) == (2, 1)
            assert (seen["held_out"]["loss_after"] > seen["held_out"]["loss"]) == bool(reason)


def test_without_a_turn_to_hold_out_nothing_is_served():
    learner = outer("osd", update_interval=2, guard="held_out").build(new_draft(), TARGET, 0)
    learner.observe(lessons()[0])
    learner.end_conversation(1.0)
    seen = learner.end_conversation(1.0)
    assert (seen["committed"], seen["reason"]) == (False, "no held-out turn to judge by")


def test_blocks_come_when_they_are_due():
    spec = outer("osd", update_interval=3, warm_up=5)
    learner = spec.build(new_draft(), TARGET, 0)
    assert [n for n, seen in enumerate(blocks(learner, 12), 1) if seen] == [5, 8, 11]


def test_a_budget_bounds_the_share_of_time_and_its_schedule_repeats_it(monkeypatch):
    clock = iter(range(10**6))
    monkeypatch.setattr("time.perf_counter", lambda: float(next(clock)))  # so each block takes one second
    spec = outer("osd", update_interval=1, budget=0.1)
    learner = spec.build(new_draft(), TARGET, 0)
    found = blocks(learner, 30)
    learnt = [n for n, seen in enumerate(found, 1) if seen and seen["block"]]
    assert 2 <= len(learnt) < 30
    assert len(learnt) / (30 + len(learnt)) <= 0.1
    again = dataclasses.replace(spec, budget=None, schedule=[[n, n] for n in learnt]).build(new_draft(), TARGET, 0)
    repeated = [seen for seen in blocks(again, 30) if seen]
    assert [s["weights_sha256"] for s in repeated] == [s["weights_sha256"] for s in found if s and s["block"]]


def test_a_small_buffer_drops_the_oldest_turns_and_says_so():
    size = max(lesson.nbytes for lesson in lessons())
    spec = outer("osd", update_interval=3, buffer_mib=1.5 * size / 2**20)
    seen = blocks(spec.build(new_draft(), TARGET, 0))[-1]
    assert (seen["lessons"], seen["dropped"]) == (1, 2)


@pytest.mark.parametrize(
    ("name", "changes", "says"),
    [
        ("osd", {"update_interval": 0}, "adapter.outer.update_interval=0"),
        ("osd", {"update_interval": 1, "guard": "held_out"}, "update_interval=1: expected at least 2"),
        ("osd", {"lr": -1.0}, "adapter.outer.lr=-1.0"),
        ("osd", {"tokens": "student", "objective": "all"}, "adapter.outer.objective=.*rejected; see tokens"),
        ("osd", {"budget": 2.0}, "adapter.outer.budget=2.0"),
        ("ensemble", {"lrs": [1e-3]}, "two step sizes or more"),
        ("optimistic", {"epochs": 3}, "hint=gradient"),
    ],
)
def test_settings_that_cannot_work_name_their_key(name, changes, says):
    with pytest.raises(UserError, match=says):
        outer(name, **changes)


def test_what_does_not_fit_the_run_is_refused_before_it():
    with pytest.raises(UserError, match="update_interval=8: the stream has 5 conversations"):
        outer("osd").check_stream(5, timed=True)
    with pytest.raises(UserError, match="measure=acceptance"):
        outer("osd", budget=0.05).check_stream(50, timed=False)
    with pytest.raises(UserError, match="buffer_mib=1e"):
        outer("osd", buffer_mib=1e9).build(new_draft(), TARGET, 0)

    class Weightless:
        def student(self) -> None: ...

    with pytest.raises(UserError, match="no parameters"):
        outer("osd").build(Weightless(), TARGET, 0)  # type: ignore[arg-type]


# Routing


@pytest.mark.parametrize("routing", ["label", "classifier"])
def test_each_domain_learns_alone_and_its_own_draft_serves(routing):
    """As two learners that each saw one of the domains would have it; also after a restart in between."""
    spec = outer("osd", update_interval=1, routing=routing, router_warm_up=4)
    draft = new_draft()
    learner = spec.build(draft, TARGET, 0)
    found = blocks(learner, 3, "ab")
    again_draft = new_draft()
    again = spec.build(again_draft, TARGET, 0)
    again.load_state(learner.state(), learner.weights())
    found += [*blocks(learner, 3, "ba")]
    assert [s["route"]["domain"] for s in found] == ["a", "b", "a", "b", "a", "b"]
    assert [s["weights_sha256"] for s in blocks(again, 3, "ba")] == [s["weights_sha256"] for s in found[3:]]
    alone = outer("osd", update_interval=1).build(new_draft(), TARGET, 0)
    turns = [0, 2, 1]  # lessons that domain a got
    for n, seen in zip(turns, found[::2], strict=True):
        alone.observe(lessons()[n])
        assert alone.end_conversation(1.0)["weights_sha256"] == seen["weights_sha256"]
    assert found[-1]["route"]["drafts"] == 2
    assert found[-1]["route"]["memory_mib"] > 1.9 * found[0]["route"]["memory_mib"]


def test_a_classifier_routes_what_it_was_never_told():
    spec = outer("osd", update_interval=1, routing="classifier", router_warm_up=4)
    learner = spec.build(new_draft(), TARGET, 0)
    blocks(learner, 4, "ab")
    for domain in "ba":
        learner.begin_conversation(Conversation("toy/9", (f"more of {WORDS[domain]}",), "unknown"))
        learner.observe(lessons()[0])
        assert learner.end_conversation(None)["route"] | {"memory_mib": 0} == {
            "domain": domain, "label": "unknown", "seconds": None, "drafts": 2, "memory_mib": 0,
        }  # fmt: skip


# In the background


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
    assert [bool(seen) for seen in found] == [False, False, True, True, False, True]
    assert [a is b for a, b in pairwise(served)] == [True, True, False, False, True, False]
    here = outer("osd", update_interval=1).build(new_draft(), TARGET, 0)
    for n, seen in zip((1, 2, 2), [seen for seen in found if seen], strict=True):
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
