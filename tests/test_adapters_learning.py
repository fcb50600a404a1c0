"""What an update computes: gradient, step and whether it teaches. Small random heads."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from adapter_cases import DTYPES, D, H, V, evidence, kl_to, make, make_head, serve

from tracedraft.adapters.choices import Inputs, Optimizer, Scope, Supervision, Trained
from tracedraft.adapters.objective import Batch, Rows, factors, kl_gradient, negentropy
from tracedraft.types import Evidence, OutputHead

# The gradient


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_gradient_equals_autograd(dtype, temperature):
    head, g = make_head(dtype), torch.Generator().manual_seed(3)
    features = (3 * torch.randn(9, H, generator=g)).to(dtype).float()
    p = torch.softmax(2 * torch.randn(9, D, generator=g) / temperature, -1)
    c = torch.rand(9, generator=g)
    gain, weight = head.norm.float().requires_grad_(), head.weight.float().requires_grad_()
    x = torch.nn.functional.rms_norm(features, (H,), gain, head.eps)
    kl = (p * (p.log() - torch.log_softmax(x @ weight.t() / temperature, -1))).sum(-1)
    expected = temperature**2 * (c * kl).sum()
    expected.backward()

    exact = dataclasses.replace(head, norm=head.norm.float(), weight=head.weight.float())
    batch = Batch(Rows(features, p, negentropy(p), torch.arange(len(p))), c)
    loss, gradients = make(exact, temperature=temperature).form.gradients(batch)
    # Both sides are fp32 with sums of at most 24 terms of order 1: a few units of 1e-7 each.
    close = {"rtol": 1e-5, "atol": 1e-5}
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    dense = {key: f.left.t() @ f.right for key, f in gradients.items()}
    torch.testing.assert_close(dense["weight"], weight.grad, **close)
    torch.testing.assert_close(dense["norm"].flatten(), gain.grad, **close)


@pytest.mark.parametrize("n", [1, 7, 64])
def test_gram_norm_equals_explicit_norm(n):
    g = torch.Generator().manual_seed(n)
    left, right = torch.randn(n, D, generator=g), torch.randn(n, H, generator=g)
    # fp32 rounding of sums over at most 64 positions.
    assert factors(left, right, 0.0).norm == pytest.approx((left.t() @ right).norm().item(), rel=1e-5)


@pytest.mark.parametrize("skip", [1e-6, 1e-4, 1e-2])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_left_out_hold_at_most_their_share(skip, dtype):
    """Of a gradient whose rows differ by orders of magnitude, as those of a vocabulary do."""
    g = torch.Generator().manual_seed(0)
    left = (torch.randn(64, 8000, generator=g) * 10 ** (-12 * torch.rand(8000, generator=g))).to(dtype)
    right = torch.randn(64, H, generator=g)
    made, whole = factors(left, right, skip), left.float().t() @ right
    rest = whole.clone()
    rest[made.rows] = 0
    assert 0 < len(made.rows) < 4000
    assert torch.equal(made.left, left[:, made.rows])
    assert rest.square().sum() <= skip * whole.square().sum()
    assert made.norm == pytest.approx(whole.norm().item(), rel=1e-5 if dtype == torch.float32 else 0.01)


@pytest.mark.parametrize("half_life", [None, 4.0])
def test_a_step_that_leaves_rows_out_writes_the_others_as_ever(half_life):
    """A large vocabulary of which the teacher and the draft both leave most alone."""
    g = torch.Generator().manual_seed(0)
    size = 4096
    head = OutputHead(torch.ones(H), 3 * torch.randn(size, H, generator=g), 1e-5, torch.arange(size))
    heads = {
        skip: dataclasses.replace(head, weight=head.weight.clone(), norm=head.norm.clone()) for skip in (0, 1e-6)
    }
    logits = 20 * torch.randn(16, size, generator=g)
    piece = Evidence("response", torch.randn(16, H, generator=g), logits.__getitem__)
    for skip, served in heads.items():
        adapter = make(served, skip=skip, lr=0.5, scope=Scope.stream, anchor_half_life=half_life)
        for _ in range(3):
            assert serve(adapter, piece).committed
        assert torch.equal(served.weight, adapter.form.masters["weight"].weights.live)
    moved = heads[0].weight - head.weight
    still = (heads[1e-6].weight == head.weight).all(1)
    assert 1000 < still.sum() < size
    # Each of three steps may leave out a thousandth of its gradient's norm.
    assert (heads[1e-6].weight - heads[0].weight).norm() < 3e-3 * moved.norm()
    torch.testing.assert_close(heads[1e-6].norm, heads[0].norm, rtol=0, atol=3e-3)


@pytest.mark.parametrize("optimizer", list(Optimizer))
@pytest.mark.parametrize("clip", [None, 0.05])
def test_steps_equal_the_optimisers_of_torch(optimizer, clip):
    head = make_head()
    piece = evidence(12, head)
    gain, weight = head.norm.clone().requires_grad_(), head.weight.clone().requires_grad_()
    kind = torch.optim.SGD if optimizer is Optimizer.sgd else torch.optim.Adam
    reference = kind([gain, weight], lr=0.01)
    adapter = make(head, optimizer=optimizer, lr=0.01, clip=clip, steps=2, scope=Scope.stream)
    p = torch.softmax(piece.teacher(torch.arange(12))[:, head.vocab], -1)
    for _ in range(3):
        assert serve(adapter, piece).committed
    for _ in range(6):
        reference.zero_grad()
        x = torch.nn.functional.rms_norm(piece.features, (H,), gain, head.eps)
        (p * (p.log() - torch.log_softmax(x @ weight.t(), -1))).sum(-1).mean().backward()
        if clip:
            torch.nn.utils.clip_grad_norm_([gain, weight], clip)
        reference.step()
    # Adam divides by the root of tiny second moments, which amplifies fp32 rounding of the gradient; 1e-5 is
    # a thousandth of one step.
    torch.testing.assert_close(head.weight, weight.detach(), rtol=0, atol=1e-5)
    torch.testing.assert_close(head.norm, gain.detach(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_steps_stay_close_to_the_exact_gradient(dtype):
    """Against autograd through the same logits; what is published is the fp32 master, rounded."""
    head = make_head(dtype)
    piece = evidence(32, head)
    features = piece.features.float()
    unit = features * torch.rsqrt(features.square().mean(-1, keepdim=True) + head.eps)
    normed = unit * head.norm.float()
    z = (normed.to(dtype) @ head.weight.t()).float().requires_grad_()
    p = torch.softmax(piece.teacher(torch.arange(32))[:, head.vocab], -1)
    (p * (p.log() - torch.log_softmax(z, -1))).sum(-1).mean().backward()
    exact, before = z.grad.t() @ normed, head.weight.float()
    adapter = make(head, lr=0.5, scope=Scope.stream)
    update = serve(adapter, piece)
    moved = (before - adapter.form.masters["weight"].weights.live) / 0.5
    # Rounding both factors and the product to bf16 moves each entry by some 2^-9 of itself: 0.4 % of the norm at
    # most. fp16 factors are not rounded.
    limit = 0.004 if dtype == torch.bfloat16 else 1e-5
    assert (moved - exact).norm() < limit * exact.norm()
    assert update.grad_norm == pytest.approx(
        math.hypot(exact.norm().item(), ((z.grad @ before) * unit).sum(0).norm().item()), rel=0.01
    )
    assert torch.equal(head.weight, adapter.form.masters["weight"].weights.live.to(dtype))


def test_balanced_weighting_equals_a_slow_loop():
    head = make_head()
    prompt, response = evidence(32, head, "prompt", 5), evidence(18, head, "response", 6)
    update = serve(make(head, source=Supervision.balanced, prompt_weight=0.3, lr=0.0), prompt, response)
    expected = 0.0
    for piece, weight in ((prompt, 0.3), (response, 0.7)):
        n = len(piece.features)
        for i in range(n):
            z = piece.teacher(torch.tensor([i]))
            expected += weight / n * kl_to(z, head, piece.features[i : i + 1]).item()
    assert update.positions == {"prompt": 32, "response": 18}
    assert update.loss == pytest.approx(expected, rel=1e-5)  # fp32 sums of 50 terms of order 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("optimizer", "lr"), [(Optimizer.sgd, 0.05), (Optimizer.adam, 0.01)])
def test_one_rejected_position_is_corrected(dtype, optimizer, lr):
    head = make_head(dtype)
    piece = evidence(1, head, spread=2.0)  # the correction token stands 16 nats above the rest
    teacher = piece.teacher(torch.tensor([0]))
    token = int(torch.searchsorted(head.vocab, teacher.argmax()))
    before = kl_to(teacher, head, piece.features), head.logits(piece.features).float().softmax(-1)[0, token]
    assert serve(make(head, optimizer=optimizer, lr=lr), piece).committed
    after = kl_to(teacher, head, piece.features), head.logits(piece.features).float().softmax(-1)[0, token]
    assert after[0] < before[0]
    assert after[1] > before[1]


def test_wrong_shift_does_worse_on_held_out_positions():
    g = torch.Generator().manual_seed(0)
    truth = torch.randn(V, H, generator=g)
    features = torch.randn(600, H, generator=g)
    logits = features @ truth.t()
    held_out = slice(500, 600)
    result = {}
    for shift in (0, 1):
        head = make_head()
        adapter = make(head, lr=1.0, window=500, steps=60)
        teacher = logits.roll(shift, 0)
        assert serve(adapter, Evidence("response", features[:500], lambda rows, t=teacher: t[rows])).committed
        result[shift] = kl_to(logits[held_out], head, features[held_out]).mean().item()
    fresh = kl_to(logits[held_out], make_head(), features[held_out]).mean().item()
    # Features are independent here, so a shifted teacher can teach no more than average preferences. Seen:
    # 2.79 before, 0.35 with the right teacher, 2.35 with the shifted one.
    assert result[0] < fresh / 4
    assert result[1] > fresh / 2


@pytest.mark.parametrize(("train", "kept"), [(Trained.norm, "weight"), (Trained.head, "norm")])
@pytest.mark.parametrize("optimizer", list(Optimizer))
def test_untrained_tensor_is_bit_identical(train, kept, optimizer):
    head = make_head()
    before = {key: getattr(head, key).clone() for key in ("norm", "weight")}
    assert serve(make(head, train=train, optimizer=optimizer), evidence(8, head)).committed
    changed = {key for key, value in before.items() if not torch.equal(value, getattr(head, key))}
    assert changed == {"norm", "weight"} - {kept}


def test_kl_gradient_is_zero_at_the_teacher():
    head, g = make_head(), torch.Generator().manual_seed(2)
    features = torch.randn(5, H, generator=g)
    p = head.logits(features).softmax(-1)
    rows = Rows(features, p, negentropy(p), torch.arange(len(p)))
    batch = Batch(rows, torch.full((5,), 0.2))
    loss, residual, _, _ = kl_gradient(batch, head.norm, head.eps, 1.0, lambda x: x @ head.weight.t(), torch.float32)
    assert abs(loss) < 1e-6  # differences of fp32 sums of order 3
    assert residual.abs().max() < 1e-6


# What positions are predicted from


@pytest.mark.parametrize(("inputs", "from_slots", "from_chain"), [("slots", 5, 0), ("chain", 0, 3), ("both", 5, 3)])
def test_inputs_choose_between_true_slots_and_the_chain(inputs, from_slots, from_chain):
    """Rows end up in one window; a chain's features are taught by the same teachers."""
    head = make_head()
    slots, chain = evidence(5, head, seed=1), evidence(3, head, "chain", seed=2)
    adapter = make(head, inputs=Inputs(inputs), lr=0.0)
    serve(adapter, slots, chain)
    rows = adapter.windows["response"].take(adapter.windows["response"].index())
    expected = [slots.features] * (from_slots > 0) + [chain.features] * (from_chain > 0)
    assert torch.equal(rows.features, torch.cat(expected).float())
    assert len(rows) == from_slots + from_chain


def test_learning_at_chain_states_helps_there_and_not_from_their_neighbours():
    """An update on the chain's outputs lowers the KL at them; taught one position off, it does worse."""
    result = {}
    for shift in (0, 1):
        head = make_head()
        piece = evidence(32, head, "chain", seed=3)
        logits = piece.teacher(torch.arange(32))
        adapter = make(head, inputs=Inputs.chain, lr=0.3, steps=20)
        before = kl_to(logits, head, piece.features).mean().item()
        wrong = Evidence("chain", piece.features, logits.roll(shift, 0).__getitem__)
        update = serve(adapter, wrong)
        assert update is not None
        assert update.committed
        result[shift] = kl_to(logits, head, piece.features).mean().item()
    assert result[0] < 0.8 * before
    assert result[0] < 0.8 * result[1]
