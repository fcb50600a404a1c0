"""Learners between requests: what they are taught, how each learns, and what becomes of a block."""

from __future__ import annotations

import dataclasses
import math
import time
from itertools import pairwise

import psutil
import pytest
import torch
from outer_cases import (
    ALL,
    PROMPTS,
    REJECTED,
    TARGET,
    answered,
    classroom,
    faulty,
    lessons,
    new_draft,
    outer,
    weights_of,
)

from tracedraft.adapters.ensemble import EnsembleRule
from tracedraft.adapters.lessons import Fault, Loss, asked, predictions
from tracedraft.adapters.own_tokens import OwnTokens, Tokens
from tracedraft.errors import UserError
from tracedraft.interfaces import OuterAdapter
from tracedraft.models import losses
from tracedraft.types import Conversation, Lesson

WORDS = {"a": "apples and pears", "b": "boats at sea"}


# What is taught


def served_logits(draft, lesson: Lesson, slot: int, step: int) -> torch.Tensor:
    """[D] of the draft as it serves: true slots up to ``slot``, then its own outputs over the lesson's tokens."""
    draft.begin(256)
    outputs = draft.extend(lesson.taps[: slot + 1], lesson.tokens[1 : slot + 2])[-1:]
    for k in range(step):
        token = lesson.tokens[slot + 2 + k : slot + 3 + k]
        outputs = draft._slots(draft.model.feedback(outputs), token, slot + 1 + k)
    return draft.head.logits(outputs)[0]


@pytest.mark.parametrize("shape", [{"chain_length": 3}, {"chain_length": 5, "temperature": 0.7}])
def test_a_lesson_holds_the_targets_own_pass_and_the_places_of_refusals(shape):
    """Against a pass over the whole text, and the counts that decoding kept."""
    draft = new_draft()
    made, lesson = answered(draft, PROMPTS[0], key=3, **shape)
    assert lesson.tokens.tolist() == PROMPTS[0] + made.tokens
    TARGET.begin(256, 8, 256)
    seen = TARGET.prefill(lesson.tokens[:-1].tolist())
    torch.testing.assert_close(lesson.hidden, seen.hidden, rtol=0, atol=1e-4)
    torch.testing.assert_close(lesson.taps, seen.taps, rtol=0, atol=1e-4)
    root, expected = len(PROMPTS[0]), []
    for accepted in made.accepted_per_round:
        if accepted < shape["chain_length"] and root + accepted + 1 < len(lesson.tokens):
            expected.append([root - 1, accepted])
        root += accepted + 1
    assert lesson.rejected.tolist() == expected
    for slot, step in expected:  # up to the refusal the draft said what stands there, and then something else
        said = [int(draft.head.vocab[served_logits(draft, lesson, slot, k).argmax()]) for k in range(step + 1)]
        stands = lesson.tokens[slot + 2 : slot + 3 + step].tolist()
        assert said[:-1] == stands[:-1]
        assert said[-1] != stands[-1]


def test_turns_after_the_first_teach_their_whole_prompt():
    """A resumed prefix brings its taps along."""
    from conftest import CPU, chain
    from decode_cases import FIXED

    from tracedraft.decode import respond
    from tracedraft.meter import Meter
    from tracedraft.prefix import Prefix
    from tracedraft.transcript import Transcript

    made, prompt = {}, PROMPTS[0] * 3
    for way in ("resumed", "anew"):
        prefix, draft = Prefix(), new_draft()
        for turn in (prompt, [*prompt, *PROMPTS[1]]):
            transcript = Transcript()
            shared = prefix if way == "resumed" else Prefix()
            spec = chain(max_new_tokens=8)
            respond(TARGET, draft, FIXED.build(None, 0), turn, spec, 0, Meter(CPU), shared, transcript)
            made[way] = transcript.lesson("toy")
    assert torch.equal(made["resumed"].taps, made["anew"].taps)
    assert torch.equal(made["resumed"].hidden, made["anew"].hidden)
    assert len(made["anew"].taps) == len(made["anew"].tokens) - 1


@pytest.mark.parametrize("teaching", [REJECTED, ALL])
def test_the_loss_is_that_of_the_draft_as_it_serves(teaching):
    """Prediction by prediction: KL of the target's distribution over the draft vocabulary to the served chain's."""
    draft, lesson = new_draft(), lessons()[0]
    total = mass = 0.0
    for slot, step in zip(*(x.tolist() for x in asked(lesson, teaching)), strict=True):
        z = TARGET.logits(lesson.hidden[slot + step + 1][None])[0]
        if int(z.argmax()) not in draft.head.vocab.tolist():
            continue
        p = z[draft.head.vocab].float().softmax(0)
        q = served_logits(draft, lesson, slot, step).float().log_softmax(0)
        total += 0.8**step * float((p * (p.log() - q)).sum())
        mass += 0.8**step
    # fp32 sums of a few hundred terms in another order
    assert classroom(teaching).loss([lesson]) == pytest.approx(total / mass, rel=1e-4)


def test_one_update_at_one_refusal_teaches_that_prediction_and_no_shifted_one():
    """Contract 6: KL at that prefix falls and the correction's probability rises; wrongly shifted it does worse."""
    kinds = {}
    for fault in (Fault.none, Fault.wrong_shift):
        draft = new_draft()
        room = classroom(faulty(fault), draft)
        lesson = dataclasses.replace(lessons()[0], rejected=lessons()[0].rejected[3:4])
        slot, step = lesson.rejected[0].tolist()
        z = TARGET.logits(lesson.hidden[slot + step + 1][None])[0]
        p, before = z[draft.head.vocab].softmax(0), served_logits(draft, lesson, slot, step).log_softmax(0)
        room.gradient([lesson])
        torch.optim.SGD(room.student.weights.values(), 0.05).step()
        room.student.serve()
        after = served_logits(draft, lesson, slot, step).log_softmax(0)
        kinds[fault] = float((p * (before - after)).sum()), float((after - before)[p.argmax()])
    assert kinds[Fault.none][0] < 0 < kinds[Fault.none][1]
    assert kinds[Fault.wrong_shift][0] > kinds[Fault.none][0]
    assert kinds[Fault.wrong_shift][1] < kinds[Fault.none][1]


def test_learning_teaches_what_was_seen_and_faulty_learning_does_not():
    """True loss over the very turns that were learnt. 60 steps, from 17.5: to 0.7 with true teachers, to 5.2 and 9.2
    with faulty ones."""
    found = {}
    for fault in Fault:
        room, honest = classroom(faulty(fault, ALL)), classroom(ALL)
        optimizer = torch.optim.AdamW(room.student.weights.values(), 1e-2, weight_decay=0.0)
        for _ in range(60):
            room.gradient(lessons())
            optimizer.step()
        honest.student = room.student
        found[fault] = honest.loss(lessons())
    assert found[Fault.none] < 2
    assert min(found[Fault.wrong_shift], found[Fault.shuffled_teacher]) > found[Fault.none] + 2


@pytest.mark.parametrize("name", ["cross_entropy", "forward_kl", "reverse_kl", "jsd", "acceptance"])
def test_losses_have_the_gradient_of_their_value(name):
    draws = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 9, generator=draws, dtype=torch.float64, requires_grad=True)
    p = torch.randn(6, 9, generator=draws, dtype=torch.float64).softmax(1)
    loss, gradient = getattr(losses, name)(logits, p)
    torch.testing.assert_close(gradient, torch.autograd.grad(loss.sum(), logits)[0])
    q = logits.detach().softmax(1)
    m = (p + q) / 2
    slow = {
        "cross_entropy": -(p * q.log()).sum(1),
        "forward_kl": (p * (p / q).log()).sum(1),
        "reverse_kl": (q * (q / p).log()).sum(1),
        "jsd": ((p * (p / m).log()).sum(1) + (q * (q / m).log()).sum(1)) / 2,
        "acceptance": -torch.minimum(p, q).sum(1).log(),
    }[name]
    torch.testing.assert_close(loss.detach(), slow)


def test_labels_are_the_tokens_that_stand_there():
    lesson, draft = lessons()[0], new_draft()
    teaching = dataclasses.replace(REJECTED, loss=Loss.label)
    made = predictions(lesson, teaching, TARGET.logits, draft.head.vocab)
    taught = made.teacher[made.rows].argmax(1)
    for slot, step, weight, at in zip(made.slots, made.steps, made.weights, taught, strict=True):
        token = int(lesson.tokens[slot + step + 2])
        assert (int(draft.head.vocab[at]) == token) == bool(weight)


@pytest.mark.parametrize("tokens", ["student", "mixed"])
def test_own_tokens_are_the_drafts_and_their_teacher_the_targets(tokens):
    draws = torch.Generator().manual_seed(0)
    own = OwnTokens(new_draft(), TARGET, Tokens(tokens), 4, draws)
    for old, new in zip(lessons() * 4, own.rewrite(lessons() * 4), strict=True):
        if new is old:
            assert tokens == "mixed"
            continue
        slot = int(new.rejected[0, 0])
        assert torch.equal(new.tokens[: slot + 2], old.tokens[: slot + 2])
        assert new.rejected.tolist() == [[slot, k] for k in range(4)]
        assert len(new.tokens) == slot + 6
        TARGET.begin(512, 8, 512)
        seen = TARGET.prefill(new.tokens[:-1].tolist())
        torch.testing.assert_close(new.hidden, seen.hidden, rtol=0, atol=1e-4)
        torch.testing.assert_close(new.taps, seen.taps, rtol=0, atol=1e-4)
        assert math.isfinite(classroom().loss([new]))


# How each learns


def blocks(learner: OuterAdapter, count: int = 3, domains: str = "a") -> list[dict]:
    """So many blocks of one conversation each, of the domains in turn."""
    found = []
    for n in range(count):
        domain = domains[n % len(domains)]
        learner.begin_conversation(Conversation(f"toy/{n}", (f"all about {WORDS[domain]}",), domain))
        learner.observe(lessons()[n % 3])
        found.append(learner.end_conversation(1.0))
    return found


def built(name: str, **changes):
    draft = new_draft()
    spec = outer(name, update_interval=1, guard=False, clip=None, unroll=ALL.unroll, **changes)
    return spec.build(draft, TARGET, 0), draft


def test_optimistic_steps_are_the_equation():
    """w_{t+1} = w_t - 2η g_t + η g_{t-1}, with each gradient at the weights that were served."""
    learner, _ = built("optimistic", lr=0.02)
    room, last = classroom(ALL), None
    unhinted = room.student.weights
    w = weights_of(room.student)
    for n in range(3):
        with torch.no_grad():
            for name, weight in unhinted.items():
                weight.copy_(w[name])
        room.gradient([lessons()[n]])
        g = {name: torch.zeros_like(x) if x.grad is None else x.grad.clone() for name, x in unhinted.items()}
        w = {name: x - 0.04 * g[name] + (0.02 * last[name] if last else 0) for name, x in w.items()}
        last = g
    blocks(learner)
    for name, weight in learner.student.weights.items():
        # three fp32 steps summed in another order
        torch.testing.assert_close(weight.detach(), w[name], rtol=1e-5, atol=1e-6)


def test_momentum_as_published_starts_anew_each_block_and_persistent_does_not():
    made = {}
    for keep in (False, True):
        learner, _ = built("optimistic", hint="momentum", lr=0.02, epochs=3, keep_momentum=keep)
        blocks(learner, 2)
        made[keep] = weights_of(learner.student)
    room = classroom(ALL)
    for n in range(2):
        optimizer = torch.optim.SGD(room.student.weights.values(), 0.02, momentum=0.9)
        for _ in range(3):
            room.gradient([lessons()[n]])
            optimizer.step()
    for name, weight in room.student.weights.items():
        torch.testing.assert_close(made[False][name], weight.detach(), rtol=0, atol=0)
    assert any(not torch.equal(made[False][name], made[True][name]) for name in made[True])


@pytest.mark.parametrize("meta", ["hedge", "ens"])
def test_an_ensemble_serves_the_average_that_its_rule_says(meta):
    lrs = [1e-3, 4e-3]
    learner, _ = built("ensemble", lrs=lrs, meta=meta, tau=0.2, epsilon=0.5, epochs=1, batch=None, optimizer="sgd")
    rooms = [classroom(ALL) for _ in lrs]
    served, totals = weights_of(rooms[0].student), [0.0, 0.0]
    for n, seen in enumerate(blocks(learner)):
        scores = []
        for i, (room, lr) in enumerate(zip(rooms, lrs, strict=True)):
            if meta == "hedge":
                with torch.no_grad():
                    for name, weight in room.student.weights.items():
                        weight.copy_(served[name])
            totals[i] += room.loss([lessons()[n]])
            room.gradient([lessons()[n]])
            torch.optim.SGD(room.student.weights.values(), lr).step()
            scores.append(-room.loss([lessons()[n]]) / 0.2 if meta == "hedge" else -0.5 * totals[i])
        p = torch.tensor(scores).softmax(0).tolist()
        assert seen["learners"]["p"] == pytest.approx(p, rel=1e-3)
        weights = [weights_of(room.student) for room in rooms]
        served = {name: p[0] * weights[0][name] + p[1] * weights[1][name] for name in served}
    for name, weight in learner.student.weights.items():
        torch.testing.assert_close(weight.detach(), served[name], rtol=1e-4, atol=1e-5)


def test_the_best_of_an_ensemble_alone():
    learner, _ = built("ensemble", combine="best", meta="hedge", epochs=1)
    p = blocks(learner, 1)[0]["learners"]["p"]
    assert isinstance(learner.rule, EnsembleRule)
    best = learner.rule.base[p.index(max(p))]
    assert all(torch.equal(weight.detach(), best[name]) for name, weight in learner.student.weights.items())


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
    learner = outer(name, update_interval=1, clip=None, guard=True, **changes).build(draft, TARGET, 0)
    before, model, rule = weights_of(learner.student), draft.model, learner.rule.state()
    seen = blocks(learner, 1)[0]
    assert (seen["committed"], seen["served"], seen["weights_sha256"]) == (False, False, None)
    assert seen["reason"] == reason or not math.isfinite(seen["loss_after"] or math.nan)
    assert draft.model is model
    assert all(torch.equal(weight.detach(), before[n]) for n, weight in learner.student.weights.items())
    assert str(learner.rule.state()) == str(rule)


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
