"""EAGLE-3's training-time test (arXiv 2503.01840): the draft learns on its own chained outputs.

At step k, slot i holds (step k-1's output of slot i, token i+1+k) at rotary position i+k; it attends to
step-0 keys of slots ≤ i and, of later steps, to its own slot only, just as a chain rollout does. Its
teacher is the target's distribution after token i+1+k.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tracedraft.models.decoder import Attention, Rope, rope_frequencies
from tracedraft.models.eagle3 import Eagle3


@dataclass(frozen=True)
class Batch:
    """Nothing is shifted here; T tokens a row.

    Attributes:
        tokens: [B, T] int64. taps: [B, T, taps*H].
        teacher: [B, T, D] target probabilities over the draft vocabulary, renormalised.
        in_vocab: [B, T] whether the target's argmax over its full vocabulary is in the draft's.
        counts: [B, T] loss mask; position i weighs the prediction made from H_i.
    """

    tokens: Tensor
    taps: Tensor
    teacher: Tensor
    in_vocab: Tensor
    counts: Tensor


@dataclass(frozen=True)
class StepLoss:
    """One chain step: ``loss`` averaged over all B*T positions, and how many counted ones are right."""

    loss: Tensor
    correct: Tensor


def teacher_of(logits: Tensor, model: Eagle3) -> tuple[Tensor, Tensor]:
    """Teacher probabilities [..., D] and in-vocabulary flags [...] of target logits [..., V]."""
    return logits[..., model.vocab].float().softmax(dim=-1), model.t2d[logits.argmax(dim=-1)]


def teacher_of_hidden(hidden: Tensor, head: Tensor) -> Tensor:
    """Teacher probabilities [..., D] of final hidden states [..., H] and the head's draft rows [D, H]."""
    return torch.nn.functional.linear(hidden, head).float().softmax(dim=-1)


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


def training_time_test(model: Eagle3, embedding: Tensor, batch: Batch, steps: int) -> list[StepLoss]:
    """Soft cross-entropy of each chain step.

    Args:
        embedding: [V, H] the target's token embeddings, frozen.
    """
    layer, shape = model.midlayer, model.config.layer
    total, length = batch.tokens.shape
    rope = Rope(
        rope_frequencies(shape.head_dim, shape.rope_theta, shape.rope_scaling).to(embedding.device),
        length + steps,
        torch.float32,
    )
    hidden = torch.ones(length, length, dtype=torch.bool, device=embedding.device).triu(1)
    features = model.fuse(batch.taps)
    keys, values, losses = [], [], []
    for k in range(steps):
        n = length - 1 - k
        features = features[:, :n]
        embedded = torch.nn.functional.embedding(batch.tokens[:, 1 + k : 1 + k + n], embedding)
        at = rope.cos[k : k + n], rope.sin[k : k + n]
        q, key, value = layer.self_attn.project(layer.attention_input(embedded, features), at)
        keys.append(key)
        values.append(value)
        features = layer.finish(features, chain_attention(layer.self_attn, q, keys, values, hidden))
        logits = model.lm_head(model.norm(features)).float()
        counts = batch.counts[:, k : k + n] * batch.in_vocab[:, 1 + k : 1 + k + n]
        losses.append(_step_loss(logits, batch.teacher[:, 1 + k : 1 + k + n], counts, total * length))
    return losses


def _step_loss(logits: Tensor, teacher: Tensor, counts: Tensor, positions: int) -> StepLoss:
    # the teacher sums to one, so log-softmax needs no [B, n, D] tensor of its own
    entropy = torch.logsumexp(logits, dim=-1) - (teacher * logits).sum(dim=-1)
    with torch.no_grad():
        correct = (counts * (logits.argmax(dim=-1) == teacher.argmax(dim=-1))).sum()
    return StepLoss((counts * entropy).sum() / positions, correct)


def weighted(losses: list[StepLoss], decay: float) -> Tensor:
    """Σ_k decay^k · loss_k."""
    return torch.stack([decay**k * step.loss for k, step in enumerate(losses)]).sum()
