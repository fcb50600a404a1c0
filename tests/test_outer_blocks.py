"""What becomes of a block that a learner between requests took: when, whether it is served, for whom, and where."""

from __future__ import annotations

import dataclasses
import time
from itertools import pairwise

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
    stream,
    weights_of,
)

from tracedraft.adapters import blocks as learning
from tracedraft.errors import UserError
from tracedraft.summary import summarise
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
    assert all(torch.equal(draft.model.state_dict()[n], w) for n, w in learner.student.weights.items())


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


@pytest.mark.parametrize("interval", [1, 3])
def test_a_budget_bounds_the_share_of_time_and_its_schedule_repeats_it(monkeypatch, interval):
    """On a clock by which a turn takes ten seconds to serve and about one to learn. What the first block costs nobody
    knows before."""
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    learn = learning.learn

    def learn_on_the_clock(rule, room, lessons, *rest):
        now[0] += sum(len(lesson.tokens) for lesson in lessons) / 80
        return learn(rule, room, lessons, *rest)

    monkeypatch.setattr(learning, "learn", learn_on_the_clock)
    spec = outer("osd", update_interval=interval, budget=0.05)
    learner = spec.build(new_draft(), TARGET, 0)
    found = blocks(learner, 60, seconds=10.0)
    learnt = [(n, seen) for n, seen in enumerate(found, 1) if seen and seen["block"]]
    assert 5 < len(learnt) < 40
    spent = learnt[0][1]["seconds"]
    for n, seen in learnt[1:]:
        spent += seen["seconds"]
        assert spent <= 0.05 * (10.0 * n + spent) + 1e-9
        assert seen["lessons"] == interval
    assert {seen["reason"] for seen in found if seen and not seen["block"]} == {"over budget"}
    assert sum(seen["lessons"] + seen["dropped"] for _, seen in learnt) == learnt[-1][0]
    again = dataclasses.replace(spec, schedule=[[n, n] for n, _ in learnt]).build(new_draft(), TARGET, 0)
    repeated = [seen for seen in blocks(again, 60) if seen]
    assert [seen["weights_sha256"] for seen in repeated] == [seen["weights_sha256"] for _, seen in learnt]


@pytest.mark.parametrize("name", ["osd", "optimistic", "ensemble"])
def test_a_block_of_refused_conversations_teaches_nothing(name):
    """Their first turn was too long for the target's context."""
    learner = outer(name, update_interval=2).build(new_draft(), TARGET, 0)
    assert learner.end_conversation(0.0) is None
    seen = learner.end_conversation(0.0)
    assert (seen["reason"], seen["block"], seen["served"], seen["seconds"]) == ("nothing to learn", None, False, 0.0)
    assert blocks(learner, 1)[0]["block"] == 1  # with the first turn that there is


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
        ("osd", {"routing": "label", "budget": 0.1}, "adapter.outer.routing=.*none with a budget or a schedule"),
        ("osd", {"routing": "label", "schedule": [[1, 1]]}, "adapter.outer.routing=.*none with a budget"),
        ("ensemble", {"lrs": [1e-3]}, "two step sizes or more"),
        ("optimistic", {"epochs": 3}, "hint=gradient"),
    ],
)
def test_settings_that_cannot_work_name_their_key(name, changes, says):
    with pytest.raises(UserError, match=says):
        outer(name, **changes)


def test_what_does_not_fit_the_run_is_refused_before_it():
    with pytest.raises(UserError, match="update_interval=8: the stream has 5 conversations"):
        outer("osd").check_stream(stream(a=5), timed=True)
    with pytest.raises(UserError, match="measure=acceptance"):
        outer("osd", budget=0.05).check_stream(stream(a=50), timed=False)
    with pytest.raises(UserError, match="buffer_mib=1e"):
        outer("osd", buffer_mib=1e9).build(new_draft(), TARGET, 0)

    class Weightless:
        def student(self) -> None: ...

    with pytest.raises(UserError, match="no parameters"):
        outer("osd").build(Weightless(), TARGET, 0)  # type: ignore[arg-type]


# Routing


def test_a_block_longer_than_a_domains_share_is_refused_where_each_has_a_draft():
    for routing in ("label", "classifier"):
        spec = outer("osd", routing=routing)
        spec.check_stream(stream(a=8, b=8), timed=True)
        with pytest.raises(UserError, match="update_interval=8: domain b of the stream has 7 conversations"):
            spec.check_stream(stream(a=8, b=7), timed=True)
    outer("osd").check_stream(stream(a=8, b=7), timed=True)


def test_routing_is_timed_and_its_memory_is_all_that_is_held():
    """Masters and those of the start: plain SGD keeps nothing. Choosing takes 0.2 s here."""
    spec = outer("osd", update_interval=2, routing="label", optimizer="sgd")
    learner = spec.build(new_draft(), TARGET, 0)
    choose = learner.router.domain

    def slowly(conversation):
        time.sleep(0.2)
        return choose(conversation)

    learner.router.domain = slowly
    found = blocks(learner, 3, "ab")
    size = sum(weight.nbytes for weight in new_draft().student().weights.values()) / 2**20
    assert [seen["route"]["memory_mib"] for seen in found] == pytest.approx([2 * size, 4 * size, 4 * size])
    assert all(0.2 < seen["route"]["seconds"] < seen["seconds"] for seen in found)
    assert [seen["block"] for seen in found] == [None, None, 1]
    timed = summarise([{"id": "toy/0", "refused": None, "turns": [], "outer": seen} for seen in found])
    assert timed["outer"]["seconds"] == pytest.approx(sum(seen["seconds"] for seen in found))


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
