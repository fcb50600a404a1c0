"""EAGLE-3's chain rolled out from many slots at once over given tokens, for training (arXiv 2503.01840).

At step k, slot i holds (step k-1's output of slot i, token i+1+k) at rotary position i+k; it attends to
step-0 keys of slots ≤ i and, of later steps, to its own slot only, just as a chain rollout does. Its
teacher is the target's distribution after token i+1+k.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from tracedraft.models.decoder import Attention, rope_table
from tracedraft.models.eagle3 import Eagle3


def chain_attention(
    attention: Attention, q: Tensor, keys: list[Tensor], values: list[Tensor], hidden: Tensor
) -> Tensor:
    """Attend q [B, heads, n, E] to step-0 keys where not ``hidden`` [n, S], and to later steps' keys on the diagonal.

    Args:
        keys, values: of step 0, [B, kv_heads, S, E]; of each later step, [B, kv_heads, n, E].
    """
    groups = attention.heads // attention.kv_heads
    keys = [k.repeat_interleave(groups, dim=1) for k in keys]
    values = [v.repeat_interleave(groups, dim=1) for v in values]
    q = q * attention.head_dim**-0.5
    causal = (q @ keys[0].transpose(-1, -2)).masked_fill(hidden, float("-inf"))
    diagonal = [(q * k).sum(dim=-1, keepdim=True) for k in keys[1:]]
    weights = torch.cat((causal, *diagonal), dim=-1).float().softmax(dim=-1).to(q.dtype)
    seen = keys[0].shape[2]
    out = weights[..., :seen] @ values[0]
    for j, value in enumerate(values[1:]):
        out = out + weights[..., seen + j, None] * value
    return attention.o_proj(out.transpose(1, 2).flatten(2))


def every_slot(tokens: Tensor, steps: int) -> list[Tensor]:
    """The slots of ``tokens`` [B, T] that have a next token, at each step."""
    return [torch.arange(max(tokens.shape[1] - 1 - k, 0), device=tokens.device) for k in range(steps)]


def chain(
    model: Eagle3, embedding: Tensor, tokens: Tensor, taps: Tensor, slots: Sequence[Tensor]
) -> Iterator[Tensor]:
    """Pre-norm outputs [B, n_k, H] of each chain step k at ``slots``, tokens given.

    Args:
        embedding: [V, H] the target's token embeddings, frozen.
        tokens: [B, T] int64; taps: [B, ≥T-1, taps*H], those of the last token unused.
        slots: [n_k] int64 of each step, ascending, each step's among those of the step before. In a list, a
            step's may be put there once the outputs of the step before are known.
    """
    layer, device = model.midlayer, embedding.device
    reach = int(slots[0][-1]) + 1  # slots that any step sees
    rope = rope_table(model.config.layer, tokens.shape[1], device, torch.float32)
    fused = model.fuse(taps[:, :reach])
    features, within = fused[:, slots[0]], torch.arange(reach, device=device)
    keys, values = [], []
    for k, at in enumerate(slots):
        position, following = at + k, tokens[:, 1 + k :]
        if k == 0:
            # Keys of every slot, queries of those asked for.
            inputs = layer.attention_input(_embedded(embedding, following[:, :reach], fused), fused)
            q, key, value = layer.self_attn.project(inputs, (rope.cos[:reach], rope.sin[:reach]))
            q = q[:, :, at]
        else:
            kept = torch.searchsorted(slots[k - 1], at)
            features = features[:, kept]
            keys[1:] = [earlier[:, :, kept] for earlier in keys[1:]]
            values[1:] = [earlier[:, :, kept] for earlier in values[1:]]
            inputs = layer.attention_input(_embedded(embedding, following[:, at], features), features)
            q, key, value = layer.self_attn.project(inputs, (rope.cos[position], rope.sin[position]))
        keys.append(key)
        values.append(value)
        attended = chain_attention(layer.self_attn, q, keys, values, within > at[:, None])
        outputs = layer.finish(features, attended)
        yield outputs
        features = model.feedback(outputs)


def _embedded(embedding: Tensor, tokens: Tensor, like: Tensor) -> Tensor:
    return torch.nn.functional.embedding(tokens, embedding).to(like.dtype)
