"""EAGLE-3's training-time test (arXiv 2503.01840): the draft learns on its own chained outputs.

At step k, slot i holds (step k-1's output of slot i, token i+1+k) at rotary position i+k; it attends to
step-0 keys of slots ≤ i and, of later steps, to its own slot only, just as a chain rollout does. Its
teacher is the target's distribution after token i+1+k.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from tracedraft.models.decoder import Attention, rope_table
from tracedraft.models.eagle3 import Eagle3

ROWS = 256  # of logits at a time: 256 x 8,192 in fp32 stay within a CPU's cache


@dataclass(frozen=True)
class Batch:
    """Nothing is shifted here; T tokens a row.

    Attributes:
        tokens: [B, T] int64. taps: [B, T, taps*H].
        teacher: [B, T, D] target probabilities over the draft vocabulary, renormalised.
        in_vocab: [B, T] whether the target's argmax over its full vocabulary is in the draft's.
        counts: [B, T] loss mask; position i weighs the prediction made from H_i.
        teachers: [B, T] bool, where a teacher is: all but padding.
    """

    tokens: Tensor
    taps: Tensor
    teacher: Tensor
    in_vocab: Tensor
    counts: Tensor
    teachers: Tensor


@dataclass(frozen=True)
class StepLoss:
    """One chain step: ``loss`` averaged over all B*T positions, and how many counted ones are right."""

    loss: Tensor
    correct: Tensor


def teacher_of_hidden(hidden: Tensor, head: Tensor) -> Tensor:
    """Teacher probabilities [..., D], at the precision of final hidden states [..., H] and head rows [D, H]."""
    return torch.nn.functional.linear(hidden, head).softmax(dim=-1)


def chain_attention(
    attention: Attention, q: Tensor, keys: list[Tensor], values: list[Tensor], hidden: Tensor
) -> Tensor:
    """Attend q [B, heads, n, E] to step-0 keys causally and to later steps' keys on the diagonal."""
    groups = attention.heads // attention.kv_heads
    n = q.shape[2]
    keys = [k[:, :, :n].repeat_interleave(groups, dim=1) for k in keys]
    values = [v[:, :, :n].repeat_interleave(groups, dim=1) for v in values]
    q = q * attention.head_dim**-0.5
    causal = (q @ keys[0].transpose(-1, -2)).masked_fill(hidden[:n, :n], float("-inf"))
    diagonal = [(q * k).sum(dim=-1, keepdim=True) for k in keys[1:]]
    weights = torch.cat((causal, *diagonal), dim=-1).float().softmax(dim=-1).to(q.dtype)
    out = weights[..., :n] @ values[0]
    for j, value in enumerate(values[1:]):
        out = out + weights[..., n + j, None] * value
    return attention.o_proj(out.transpose(1, 2).flatten(2))


def chain(model: Eagle3, embedding: Tensor, tokens: Tensor, taps: Tensor, steps: int) -> Iterator[Tensor]:
    """Pre-norm outputs [B, T-1-k, H] of each chain step k from every slot, tokens given.

    Args:
        embedding: [V, H] the target's token embeddings, frozen.
    """
    layer, length = model.midlayer, tokens.shape[1]
    rope = rope_table(model.config.layer, length + steps, embedding.device, torch.float32)
    hidden = torch.ones(length, length, dtype=torch.bool, device=embedding.device).triu(1)
    features = model.fuse(taps)
    keys, values = [], []
    for k in range(steps):
        n = length - 1 - k
        features = features[:, :n]
        embedded = torch.nn.functional.embedding(tokens[:, 1 + k :], embedding)
        at = rope.cos[k : k + n], rope.sin[k : k + n]
        q, key, value = layer.self_attn.project(layer.attention_input(embedded, features), at)
        keys.append(key)
        values.append(value)
        outputs = layer.finish(features, chain_attention(layer.self_attn, q, keys, values, hidden))
        yield outputs
        features = model.feedback(outputs)


def training_time_test(
    model: Eagle3, embedding: Tensor, batch: Batch, steps: int, objective: str = "ce"
) -> list[StepLoss]:
    """Loss of each chain step, over the positions that count and whose target choice the draft can say."""
    losses = []
    for k, features in enumerate(chain(model, embedding, batch.tokens, batch.taps, steps)):
        n = features.shape[1]
        # of both: the position whose prediction counts, and the one that the teacher was taken at
        counts = batch.counts[:, k : k + n] * batch.teachers[:, 1 + k :] * batch.in_vocab[:, 1 + k :]
        loss, right = HeadLoss.apply(
            model.norm(features).flatten(0, 1),
            model.lm_head.weight,
            batch.teacher[:, 1 + k :].flatten(0, 1),
            counts.flatten() / batch.tokens.numel(),
            OBJECTIVES[objective],
        )
        losses.append(StepLoss(loss, (counts.flatten() * right).sum()))
    return losses


def cross_entropy(logits: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
    """Soft cross-entropy [n] of logits [n, D] against probabilities [n, D], and its gradient."""
    normaliser = torch.logsumexp(logits, dim=1, keepdim=True)
    loss = normaliser[:, 0] - (teacher * logits).sum(dim=1)
    return loss, (logits - normaliser).exp_().sub_(teacher)


def acceptance(logits: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
    """-log Σ min(p, q), what rejection sampling accepts ("LK loss"), and its gradient."""
    p = logits.softmax(dim=1)
    accepted = torch.minimum(p, teacher).sum(dim=1, keepdim=True)
    kept = p * (p < teacher)
    return -accepted[:, 0].log(), (p * kept.sum(dim=1, keepdim=True) - kept) / accepted


Objective = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
OBJECTIVES: dict[str, Objective] = {"ce": cross_entropy, "lk": acceptance}


class HeadLoss(torch.autograd.Function):
    """Σ counts · objective(x Wᵀ, teacher), its gradient made on the way so that no [n, D] tensor in fp32 is kept.

    The products run at autocast's precision where it is on. Second output: [n] whether the draft's argmax is
    the teacher's.
    """

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, teacher: Tensor, counts: Tensor, objective: Objective):
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        ctx.dtypes = x.dtype, weight.dtype
        with torch.autocast(kind, enabled=False):
            x, weight = x.to(dtype), weight.to(dtype)
            gradient = x.new_empty(len(x), len(weight))
            losses, right = [], []
            for some, share, taught, into in zip(
                x.split(ROWS), counts.split(ROWS), teacher.split(ROWS), gradient.split(ROWS), strict=True
            ):
                logits, taught = (some @ weight.T).float(), taught.float()
                right.append(logits.argmax(dim=1) == taught.argmax(dim=1))
                loss, slope = objective(logits, taught)
                losses.append((share * loss).sum())
                into.copy_(slope.mul_(share[:, None]))
            ctx.save_for_backward(gradient @ weight, gradient.T @ x)
        return torch.stack(losses).sum(), torch.cat(right)

    @staticmethod
    def backward(ctx, scale: Tensor, _):  # pyright: ignore[reportIncompatibleMethodOverride]
        of_x, of_weight = ctx.saved_tensors
        return scale * of_x.to(ctx.dtypes[0]), scale * of_weight.to(ctx.dtypes[1]), None, None, None


def weighted(losses: list[StepLoss], decay: float) -> Tensor:
    """Σ_k decay^k · loss_k."""
    return torch.stack([decay**k * step.loss for k, step in enumerate(losses)]).sum()
