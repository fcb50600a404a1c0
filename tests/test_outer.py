"""Learners between requests: what they are taught, how each learns, and what becomes of a block."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from conftest import CPU, chain
from decode_cases import FIXED, lm
from outer_cases import (
    ALL,
    PROMPTS,
    REJECTED,
    TARGET,
    answered,
    blocks,
    built,
    classroom,
    faulty,
    lessons,
    new_draft,
    outer,
    weights_of,
)

from tracedraft.adapters.ensemble import EnsembleRule
from tracedraft.adapters.lessons import Fault, Loss, Taught, Teaching, asked, predictions
from tracedraft.adapters.own_tokens import OwnTokens, Tokens
from tracedraft.decode import respond
from tracedraft.meter import Meter
from tracedraft.models import losses
from tracedraft.prefix import Prefix
from tracedraft.transcript import Transcript
from tracedraft.types import Lesson

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


def served_loss(draft, lesson: Lesson, teaching: Teaching) -> float:
    """Prediction by prediction: KL of the target's distribution over the draft vocabulary to the served chain's, a
    mean over refusals, whatever their depth, or weighed by 0.8^step."""
    rejected = teaching.objective is Taught.rejected
    total = mass = 0.0
    for slot, step in zip(*(x.tolist() for x in asked(lesson, teaching)), strict=True):
        z = TARGET.logits(lesson.hidden[slot + step + 1][None])[0]
        if int(z.argmax()) not in draft.head.vocab.tolist():
            continue
        p = z[draft.head.vocab].float().softmax(0)
        q = served_logits(draft, lesson, slot, step).float().log_softmax(0)
        weight = 1 if rejected else 0.8**step
        total += weight * float((p * (p.log() - q)).sum())
        mass += weight
    return total / mass


@pytest.mark.parametrize("teaching", [REJECTED, ALL])
def test_the_loss_is_that_of_the_draft_as_it_serves(teaching):
    places = torch.cartesian_prod(torch.arange(20, 32), torch.arange(4))  # this draft is refused at once all along
    lesson = dataclasses.replace(lessons()[0], rejected=places)
    # fp32 sums of a few hundred terms in another order
    assert classroom(teaching).loss([lesson]) == pytest.approx(served_loss(new_draft(), lesson, teaching), rel=1e-4)


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


@pytest.mark.parametrize("refusals", range(1, 9))
def test_no_shuffled_teacher_is_the_true_one(refusals):
    """Whatever the seed, which is the turn's length; a refusal alone has no other teacher, and teaches nothing."""
    draft = new_draft()
    for length in range(50, 70):
        lesson = lessons()[0]
        lesson = dataclasses.replace(
            lesson, tokens=lesson.tokens[:length], rejected=lesson.rejected[1 : refusals + 1]
        )
        true, made = (
            predictions(lesson, faulty(fault), TARGET.logits, draft.head.vocab)
            for fault in (Fault.none, Fault.shuffled_teacher)
        )
        assert sorted(made.rows.tolist()) == sorted(true.rows.tolist()) == list(range(refusals))
        assert bool((made.rows == true.rows).any()) == (refusals == 1)
        assert (made.weights.count_nonzero() > 0) == (refusals > 1)


@pytest.mark.parametrize(("name", "changes"), [("osd", {"batch": 1}), ("ensemble", {"batch": 1}), ("optimistic", {})])
def test_turns_that_teach_nothing_are_passed_over(name, changes):
    """All that was refused in them lies outside the draft's vocabulary."""
    lesson = lessons()[0]
    weights = predictions(lesson, REJECTED, TARGET.logits, new_draft().head.vocab).weights
    nothing = dataclasses.replace(lesson, rejected=lesson.rejected[weights == 0])
    assert len(nothing.rejected)
    found = {}
    for key, turns in {
        "with": [lesson, nothing, lessons()[1]],
        "without": [lesson, lessons()[1]],
        "all": [nothing],
    }.items():
        learner, _ = built(name, objective="rejected", **changes)
        for turn in turns:
            learner.observe(turn)
        found[key] = learner.end_conversation(1.0)
    assert found["with"]["committed"]
    assert found["with"]["weights_sha256"] == found["without"]["weights_sha256"]
    assert (found["all"]["reason"], found["all"]["committed"]) == ("nothing to learn", False)


@pytest.mark.parametrize("tokens", ["student", "mixed"])
def test_own_tokens_are_the_drafts_and_their_teacher_the_targets(tokens):
    draws, draft = torch.Generator().manual_seed(0), new_draft()
    own = OwnTokens(draft.student(), TARGET, Tokens(tokens), 4, draws)
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
        assert classroom().loss([new]) == pytest.approx(served_loss(draft, new, REJECTED), rel=1e-4)


@pytest.mark.parametrize("kind", ["eagle3", "lm"])
def test_own_tokens_are_drawn_as_the_draft_would_without_what_was_learnt_inside(kind):
    """Against the served draft's own chain, drawn alike; then an inner learner turns its head about."""
    draft = new_draft() if kind == "eagle3" else lm(TARGET)
    student, lesson, slot = draft.student(), lessons()[0], 24

    def pick(logits, depth):
        p = logits.softmax(1)
        return torch.multinomial(p, 1, generator=draws)[0], p

    for seed in range(8):
        draws = torch.Generator().manual_seed(seed)
        draft.begin(64, int(lesson.tokens[0]))
        draft.extend(lesson.taps[: slot + 1], lesson.tokens[1 : slot + 2])
        expected = draft.propose(5, pick).tokens.tolist()
        assert student.say(lesson, slot, 5, torch.Generator().manual_seed(seed)).tolist() == expected
    said = student.say(lesson, slot, 5, torch.Generator().manual_seed(0))
    draft.head.weight.neg_()
    assert torch.equal(student.say(lesson, slot, 5, torch.Generator().manual_seed(0)), said)


@pytest.mark.parametrize("tokens", ["teacher", "student"])
@pytest.mark.parametrize("name", ["osd", "optimistic", "ensemble"])
def test_recorded_verdicts_teach_the_same_whatever_was_learnt_inside(name, tokens):
    """Contract 4 for what is learnt where the draft was refused: two learners are fed the same lessons, and the head
    of one is changed in between, as inside a response."""
    found = {}
    for inner in (False, True):
        draft = new_draft()
        spec = outer(name, update_interval=1, guard="none", objective="rejected", tokens=tokens, student_tokens=3)
        learner, served = spec.build(draft, TARGET, 0), []
        for lesson in lessons():
            if inner:
                draft.head.weight.neg_()
                draft.head.norm.mul_(1.5)
            learner.observe(lesson)
            served.append(learner.end_conversation(1.0)["weights_sha256"])
        found[inner] = served
    assert found[True] == found[False]
    assert len(set(found[True])) == 3


# How each learns


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
    """And what it records: each base learner's loss before it learns from the block, as the last one left it."""
    lrs = [1e-3, 4e-3]
    learner, _ = built("ensemble", lrs=lrs, meta=meta, tau=0.2, epsilon=0.5, epochs=1, batch=None, optimizer="sgd")
    rooms = [classroom(ALL) for _ in lrs]
    served, totals = weights_of(rooms[0].student), [0.0, 0.0]
    for n, seen in enumerate(blocks(learner)):
        scores, unseen = [], [room.loss([lessons()[n]]) for room in rooms]
        for i, (room, lr) in enumerate(zip(rooms, lrs, strict=True)):
            if meta == "hedge":
                with torch.no_grad():
                    for name, weight in room.student.weights.items():
                        weight.copy_(served[name])
            totals[i] += room.loss([lessons()[n]]) or 0.0
            room.gradient([lessons()[n]])
            torch.optim.SGD(room.student.weights.values(), lr).step()
            after = room.loss([lessons()[n]])
            assert after is not None
            scores.append(-after / 0.2 if meta == "hedge" else -0.5 * totals[i])
        p = torch.tensor(scores).softmax(0).tolist()
        assert seen["learners"]["p"] == pytest.approx(p, rel=1e-3)
        assert seen["learners"]["losses"] == pytest.approx(unseen, rel=1e-4)
        weights = [weights_of(room.student) for room in rooms]
        served = {name: p[0] * weights[0][name] + p[1] * weights[1][name] for name in served}
    for name, weight in learner.student.weights.items():
        torch.testing.assert_close(weight.detach(), served[name], rtol=1e-4, atol=1e-5)


def test_a_refused_block_speaks_against_the_learner_that_spoilt_it():
    """Those of ens go on as without a guard, so their shares are the same; what spoils the average loses its own."""
    found = {}
    for guard in ("none", "block"):
        changes: dict = {"lrs": [0.03, 30.0], "optimizer": "sgd", "batch": None, "epochs": 1, "clip": None}
        spec = outer("ensemble", update_interval=1, guard=guard, meta="ens", **changes)
        found[guard] = blocks(spec.build(new_draft(), TARGET, 0), 4)
    assert [seen["learners"] for seen in found["block"]] == [seen["learners"] for seen in found["none"]]
    assert [seen["committed"] for seen in found["block"]] == [False, True, True, True]
    assert all(seen["committed"] for seen in found["none"])
    p = [seen["learners"]["p"][1] for seen in found["block"]]
    assert p[0] == 0.5
    assert max(p[1:]) < 1e-3


def test_a_refused_block_leaves_hedges_next_one_as_if_it_had_not_been():
    """They start from what is served, with the optimisers of then; only the losses of before are as it left them."""
    changes: dict = {"lrs": [0.03, 30.0], "tau": 1e9, "optimizer": "sgd", "momentum": 0.9, "batch": None}
    spec = outer("ensemble", update_interval=1, guard="block", clip=None, **changes)
    learner = spec.build(new_draft(), TARGET, 0)
    assert not blocks(learner, 1)[0]["committed"]
    first, other = (blocks(each, 1)[0] for each in (learner, spec.build(new_draft(), TARGET, 0)))
    assert first["learners"]["after"] == other["learners"]["after"]
    assert first["learners"]["losses"] != other["learners"]["losses"]


def test_the_best_of_an_ensemble_alone():
    learner, _ = built("ensemble", combine="best", meta="hedge", epochs=1)
    p = blocks(learner, 1)[0]["learners"]["p"]
    assert isinstance(learner.rule, EnsembleRule)
    best = learner.rule.base[p.index(max(p))]
    assert all(torch.equal(weight.detach(), best[name]) for name, weight in learner.student.weights.items())
