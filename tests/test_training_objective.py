"""The training-time test and its teacher, against the reference's own trainer."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from conftest import golden_folder, golden_json, golden_tensors, recompute

from tracedraft.models import eagle3
from tracedraft.models.unroll import chain, every_slot
from tracedraft.training import objective as training_objective
from tracedraft.training.objective import (
    Batch,
    teacher_of_hidden,
    training_time_test,
)
from tracedraft.training.replay import hits


def teacher_of(logits: torch.Tensor, model: eagle3.Eagle3) -> tuple[torch.Tensor, torch.Tensor]:
    """Teacher probabilities [..., D] and in-vocabulary flags [...] of target logits [..., V]."""
    return logits[..., model.vocab].float().softmax(dim=-1), model.t2d[logits.argmax(dim=-1)]


@pytest.fixture
def golden_model(tmp_path):
    def make(name: str) -> eagle3.Eagle3:
        return eagle3.load(golden_folder(name, tmp_path / name), torch.float32, "cpu").requires_grad_(True)

    return make


def golden_batch(model: eagle3.Eagle3) -> Batch:
    given = golden_tensors("eagle3_tiny")
    teacher, in_vocab = teacher_of(given["train_teacher_logits"][None], model)
    counts = given["train_loss_mask"][None].float()
    everywhere = torch.ones_like(counts, dtype=torch.bool)
    return Batch(given["train_input_ids"][None], given["train_features"][None], teacher, in_vocab, counts, everywhere)


def test_golden_losses_and_gradients(golden_model, golden_decoder):
    """Tolerances of the reference: loss 1e-5, gradients 1e-3, relative. Fused rows are split again."""
    model, expected = golden_model("eagle3_tiny"), golden_json("eagle3_tiny")["training"]
    embedding, batch = golden_decoder.embed_tokens.weight, golden_batch(model)
    total, losses = training_time_test(model, embedding, batch, expected["steps"], 0.8)
    assert [loss.item() for loss in losses] == pytest.approx(expected["ploss"], rel=1e-5)
    assert total.item() == pytest.approx(expected["total"], rel=1e-5)
    total.backward()
    got = {}
    for name, parameter in model.named_parameters():
        if "qkv" in name:
            pieces = zip("qkv", parameter.grad.split((32, 16, 16)), strict=True)
            got |= {name.replace("qkv", part): piece for part, piece in pieces}
        elif "gate_up" in name:
            pieces = zip(("gate", "up"), parameter.grad.split((96, 96)), strict=True)
            got |= {name.replace("gate_up", part): piece for part, piece in pieces}
        else:
            got[name] = parameter.grad
    assert {name: float(g.norm()) for name, g in got.items()} == pytest.approx(expected["grad_l2"], rel=1e-3)
    for name in ("fc.weight", "norm.weight"):
        whole = golden_tensors("eagle3_tiny")[f"grad.{name}"]
        assert (got[name] - whole).norm() < 1e-3 * whole.norm()


def test_golden_logits_of_each_step(golden_model, golden_decoder):
    """Losses could agree by luck of averaging. The last k+1 slots have no next token; the reference pads."""
    model, expected = golden_model("eagle3_tiny"), golden_tensors("eagle3_tiny")
    batch = golden_batch(model)
    steps = list(
        chain(model, golden_decoder.embed_tokens.weight, batch.tokens, batch.taps, every_slot(batch.tokens, 3))
    )
    for k, hidden in enumerate(steps):
        n = 24 - 1 - k
        assert hidden.shape[1] == n
        torch.testing.assert_close(hidden[0], expected["ttt_hidden"][k, :n], rtol=0, atol=1e-4)
        logits = model.lm_head(model.norm(hidden))[0]
        torch.testing.assert_close(logits, expected["ttt_logits"][k, :n], rtol=0, atol=1e-4)


def test_golden_losses_with_every_position_counted(golden_model, golden_decoder):
    """The reference's padded rows count only if token 0 is a draft token, which it is not here."""
    model, expected = golden_model("eagle3_tiny"), golden_json("eagle3_tiny")["training"]["full_mask_variant"]
    assert not expected["token0_in_draft_vocab"]
    batch = golden_batch(model)
    batch = dataclasses.replace(batch, counts=torch.ones_like(batch.counts))
    total, losses = training_time_test(model, golden_decoder.embed_tokens.weight, batch, 3, 0.8)
    assert [loss.item() for loss in losses] == pytest.approx(expected["ploss"], rel=1e-5)
    assert total.item() == pytest.approx(expected["total"], rel=1e-5)


def test_golden_accuracy_of_a_trained_draft(golden_model, golden_target):
    """Loss and accuracy where the draft is right more often than not, through the target's own features."""
    model, golden = golden_model("eagle3_e2e"), golden_json("eagle3_e2e")["training_metrics"]
    taps, _, logits = recompute(golden_target, golden["input_ids"])
    teacher, in_vocab = teacher_of(logits, model)
    mask = torch.tensor(golden["loss_mask"], dtype=torch.float32)
    tokens, everywhere = torch.tensor(golden["input_ids"])[None], torch.ones(1, len(mask), dtype=torch.bool)
    batch = Batch(tokens, taps[None], teacher[None], in_vocab[None], mask[None], everywhere)
    embedding = golden_target.model.embed_tokens.weight
    total, losses = training_time_test(model, embedding, batch, golden["steps"], 0.8)
    assert [loss.item() for loss in losses] == pytest.approx(golden["ploss"], rel=1e-4)
    assert total.item() == pytest.approx(golden["total"], rel=1e-4)
    accuracy = []
    for k, features in enumerate(chain(model, embedding, tokens, taps[None], every_slot(tokens, golden["steps"]))):
        right = model.lm_head(model.norm(features[0])).argmax(dim=1) == teacher[1 + k :].argmax(dim=1)
        counts = mask[k : k + len(right)]
        accuracy.append(float((right * in_vocab[1 + k :] * counts).sum() / mask[k:].sum()))
    assert accuracy == pytest.approx(golden["accuracy"], abs=1e-6)
    assert min(accuracy) > 0.5


@pytest.fixture(params=[1, 8, 64])
def rounding(request, monkeypatch) -> int:
    """Numbers of slots that go on, from exactly the accepted ones to all that a row has."""
    monkeypatch.setattr(training_objective, "ROUNDED", request.param)
    return request.param


@pytest.mark.usefixtures("rounding")
def test_later_steps_may_count_only_where_the_chain_before_them_is_accepted(golden_model, golden_target):
    """Against each slot's loss by definition, its gradient by autograd, and the replay's hits; a draft that is right
    more often than not."""
    model, golden = golden_model("eagle3_e2e"), golden_json("eagle3_e2e")["training_metrics"]
    taps, _, logits = recompute(golden_target, golden["input_ids"])
    teacher, in_vocab = teacher_of(logits, model)
    tokens, everywhere = torch.tensor(golden["input_ids"])[None], torch.ones(1, len(teacher), dtype=torch.bool)
    mask = torch.tensor(golden["loss_mask"], dtype=torch.float32)
    batch = Batch(tokens, taps[None], teacher[None], in_vocab[None], mask[None], everywhere)
    embedding, steps = golden_target.model.embed_tokens.weight, 4
    right = hits(model, embedding, tokens, taps[None], steps)[:, 0].int().cumprod(dim=0)
    expected, counted = [], []
    for k, features in enumerate(chain(model, embedding, tokens, taps[None], every_slot(tokens, steps))):
        q = model.lm_head(model.norm(features[0])).log_softmax(dim=1)
        n = len(q)
        each = -(teacher[1 + k : 1 + k + n] * q).sum(dim=1) * mask[k : k + n] * in_vocab[1 + k : 1 + k + n]
        met = right[k - 1, :n].float() if k else torch.ones(n)
        expected.append((each * met).sum() / len(mask))
        counted.append(float(met.mean()))
    total = torch.stack([0.9**k * loss for k, loss in enumerate(expected)]).sum()
    slopes = torch.autograd.grad(total, list(model.parameters()))
    found, losses = training_time_test(model, embedding, batch, steps, 0.9, accepted_only=True)
    assert [loss.item() for loss in losses] == pytest.approx([loss.item() for loss in expected], rel=1e-4)
    assert found.item() == pytest.approx(total.item(), rel=1e-4)
    for got, slope in zip(torch.autograd.grad(found, list(model.parameters())), slopes, strict=True):
        assert (got - slope).norm() < 1e-3 * slope.norm()
    assert 1 == counted[0] > counted[1] > counted[3] > 0.1
    everything = training_time_test(model, embedding, batch, steps, 0.9)[1]
    assert losses[0].item() == pytest.approx(everything[0].item(), rel=1e-6)
    assert losses[1] < everything[1]


@pytest.mark.usefixtures("rounding")
def test_rows_of_a_batch_go_on_on_their_own(golden_model, golden_target):
    """Slots where one row's chain is accepted and the other's is not; loss and gradient are the rows' means."""
    model, ids = golden_model("eagle3_e2e"), golden_json("eagle3_e2e")["training_metrics"]["input_ids"]
    embedding, alone, met = golden_target.model.embed_tokens.weight, [], []
    for tokens in (ids, ids[5:] + ids[:5]):
        taps, _, logits = recompute(golden_target, tokens)
        teacher, in_vocab = teacher_of(logits, model)
        row, whole = torch.tensor(tokens)[None], torch.ones(1, len(tokens))
        alone.append(Batch(row, taps[None], teacher[None], in_vocab[None], whole, whole.bool()))
        met.append(hits(model, embedding, row, taps[None], 1))
    assert (met[0] ^ met[1]).any()
    names = [field.name for field in dataclasses.fields(Batch)]
    both = Batch(*(torch.cat([getattr(batch, name) for batch in alone]) for name in names))
    losses, gradients = [], []
    for batch in (both, *alone):
        total, each = training_time_test(model, embedding, batch, 4, 0.9, accepted_only=True)
        losses.append(torch.stack(each))
        gradients.append(torch.cat([g.flatten() for g in torch.autograd.grad(total, list(model.parameters()))]))
    torch.testing.assert_close(losses[0], (losses[1] + losses[2]) / 2, rtol=1e-5, atol=0)
    mean = (gradients[1] + gradients[2]) / 2
    assert (gradients[0] - mean).norm() < 1e-4 * mean.norm()


def test_slots_that_go_on_are_a_round_number(rounding):
    wanted = torch.zeros(200, dtype=torch.bool)
    wanted[[3, 50, 51, 120, 198]] = True
    legal = torch.arange(200) < 199
    kept = training_objective.rounded(wanted, legal)
    assert kept.tolist() == sorted(set(kept.tolist()))
    assert set(kept.tolist()) >= {3, 50, 51, 120, 198}
    assert len(kept) == {1: 5, 8: 8, 64: 64}[rounding]
    assert training_objective.rounded(legal, legal).tolist() == list(range(199))
    assert training_objective.rounded(wanted & ~wanted, legal).tolist() == []


def test_teacher_from_hidden_states_is_the_teacher_from_logits(golden_model, golden_target):
    """Only the order of sums differs: 1e-6 of logits below 20, so 2e-5 of a probability."""
    model = golden_model("eagle3_tiny")
    _, hidden, logits = recompute(golden_target, golden_json("target_tiny")["prompt"])
    teacher, in_vocab = teacher_of(logits, model)
    again = teacher_of_hidden(hidden, golden_target.model.lm_head.weight[model.vocab])
    torch.testing.assert_close(again, teacher, rtol=2e-5, atol=1e-9)
    torch.testing.assert_close(teacher.sum(-1), torch.ones(12))
    inside = [int(row.argmax()) in model.vocab.tolist() for row in logits]
    assert in_vocab.tolist() == inside
    assert len(set(inside)) == 2


def test_rows_that_count_nowhere_give_no_loss_and_no_gradient(golden_model):
    model = golden_model("eagle3_tiny")
    batch = golden_batch(model)
    none = dataclasses.replace(batch, counts=torch.zeros_like(batch.counts))
    embedding = torch.randn(1000, model.config.layer.hidden_size)
    total, losses = training_time_test(model, embedding, none, 3, 0.8)
    total.backward()
    assert total == 0
    assert [loss.item() for loss in losses] == [0, 0, 0]
    assert not any(p.grad.any() for p in model.parameters() if p.grad is not None)
