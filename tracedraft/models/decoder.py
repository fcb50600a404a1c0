"""A lean decoder of the Llama family: RMSNorm, rotary grouped-query attention, SwiGLU.

Qwen2 adds biases to queries, keys and values, Qwen3 a norm of each query and key head.

Used by the target and, block by block, by drafts. Shapes: ``B`` batch, ``T`` tokens of a pass, ``S`` cache
capacity, ``G`` query heads per key/value head, ``E`` head dimension; others as in ``tracedraft.types``.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Rows = slice | Tensor  # of a cache that T tokens of a pass take: one after the other, or int64 [T] on the device


@dataclass(frozen=True)
class DecoderConfig:
    """Shape of a decoder.

    Attributes:
        rope_scaling: as in a ``config.json``, with ``rope_type`` "llama3" or "linear"; None: the plain frequencies.
        tied: the output head is the token embedding.
        context: most tokens that the model was made for.
        window: most tokens of context for which all layers attend to everything, where some have a sliding window.
        qkv_bias, o_bias, qk_norm: what the target's attention adds to Llama's. A draft's layer goes without.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    rope_theta: float
    rope_scaling: dict | None
    tied: bool
    context: int
    window: int | None = None
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False


def rope_frequencies(head_dim: int, theta: float, scaling: dict | None) -> Tensor:
    """Inverse frequencies [E/2] in fp32.

    Args:
        scaling: type "linear" stretches every wavelength by ``factor``, "llama3" only the long ones.

    Source: Llama 3.1's published ``rope_scaling`` rule.
    """
    inverse = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if scaling is None:
        return inverse
    if scaling.get("rope_type", scaling.get("type")) == "linear":  # older configs say "type"
        return inverse / scaling["factor"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] * inverse / (2 * torch.pi)
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return keep * inverse + (1 - keep) * inverse / scaling["factor"]


class Rope:
    """Cosines and sines [S, E] of every position, as the model's dtype."""

    def __init__(self, frequencies: Tensor, capacity: int, dtype: torch.dtype):
        angles = torch.arange(capacity, device=frequencies.device)[:, None] * frequencies
        angles = torch.cat((angles, angles), dim=-1)
        self.cos, self.sin = angles.cos().to(dtype), angles.sin().to(dtype)


def rope_table(config: DecoderConfig, capacity: int, device: torch.device, dtype: torch.dtype) -> Rope:
    frequencies = rope_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
    return Rope(frequencies.to(device), capacity, dtype)


def rotate(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Apply rotary embeddings, half-split layout, to x [B, heads, T, E]."""
    cos, sin = rope
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-b, a), dim=-1) * sin


class KVCache:
    """Static keys and values [B, kv_heads, S, E] of each layer.

    Zero-filled, since masked rows still enter the attention product, where a NaN would survive the mask.
    """

    def __init__(self, layers: int, batch: int, kv_heads: int, capacity: int, head_dim: int, like: Tensor):
        shape = (batch, kv_heads, capacity, head_dim)
        self.capacity = capacity
        self._hold(like.new_zeros(2, layers, *shape))

    def _hold(self, rows: Tensor) -> None:
        self.rows = rows  # [2, layers, B, kv_heads, S, E], of which the others are views
        self.keys, self.values = (list(half.unbind()) for half in rows)

    def move(self, start: int, rows: Tensor) -> None:
        """Bring rows start + ``rows`` [n] of every layer to start … start+n-1."""
        self.rows[..., start : start + len(rows), :] = self.rows[..., start + rows, :]

    def first(self, capacity: int) -> KVCache:
        """Its first rows alone, shared."""
        part = copy(self)
        part.capacity = capacity
        part._hold(self.rows[..., :capacity, :])
        return part

    def put(self, rows: Tensor) -> int:
        """Copy ``rows`` [2, layers, B, kv_heads, n, E] of another cache to the first n, and say n."""
        size = rows.shape[-2]
        self.rows[..., :size, :] = rows
        return size

    def grown(self, capacity: int) -> KVCache:
        """The same rows with room for ``capacity``: for passes that need not round alike, as training's."""
        larger = copy(self)
        larger.capacity = capacity
        larger._hold(F.pad(self.rows, (0, 0, 0, capacity - self.capacity)))
        return larger

    @staticmethod
    def bytes_per_row(layers: int, kv_heads: int, head_dim: int, itemsize: int) -> int:
        return 2 * layers * kv_heads * head_dim * itemsize


def consecutive(start: int | Tensor, count: int) -> Rows:
    """``count`` rows from ``start`` on."""
    if isinstance(start, Tensor):
        return start + torch.arange(count, device=start.device)
    return slice(start, start + count)


def causal_mask(start: int | Tensor, width: int, capacity: int, groups: int, like: Tensor) -> Tensor:
    """Additive mask [G*width, S]: token t of the pass sees cache rows 0 … start + t."""
    rows = start + torch.arange(width, device=like.device)
    hidden = torch.arange(capacity, device=like.device) > rows[:, None]
    return torch.zeros_like(hidden, dtype=like.dtype).masked_fill_(hidden, float("-inf")).repeat(groups, 1)


def tree_mask(start: int | Tensor, sees: Tensor, capacity: int, groups: int, like: Tensor) -> Tensor:
    """Additive mask [G*T, S]: every token of the pass sees cache rows before ``start``, and of the m rows from there
    those that ``sees`` [T, m] says."""
    width, rows = sees.shape
    hidden = (torch.arange(capacity, device=sees.device) >= start).repeat(width, 1)
    hidden.index_copy_(1, start + torch.arange(rows, device=sees.device), ~sees)
    return torch.zeros_like(hidden, dtype=like.dtype).masked_fill_(hidden, float("-inf")).repeat(groups, 1)


def few_queries(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """Attention of q [B, heads, few, E], twice as fast as the fused CPU kernel in lock-step generation."""
    # keys on the left: as the tall operand they are read in their own order
    scores = (keys @ q.transpose(-1, -2)).transpose(-1, -2).float() * q.shape[-1] ** -0.5
    weights = (scores if mask is None else scores + mask).softmax(dim=-1)
    return weights.to(values.dtype) @ values


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        # training runs fp32 gains on bf16 activations, which the fused kernel refuses
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


class Attention(nn.Module):
    def __init__(
        self,
        input_size: int,
        config: DecoderConfig,
        *,
        qkv_bias: bool = False,
        o_bias: bool = False,
        qk_norm: bool = False,
    ):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = config.heads, config.kv_heads, config.head_dim
        rows = (config.heads + 2 * config.kv_heads) * config.head_dim
        self.qkv_proj = nn.Linear(input_size, rows, bias=qkv_bias)
        self.o_proj = nn.Linear(config.heads * config.head_dim, config.hidden_size, bias=o_bias)
        self.qk_norm = qk_norm
        if qk_norm:
            self.q_norm = RMSNorm(config.head_dim, config.eps)
            self.k_norm = RMSNorm(config.head_dim, config.eps)

    def project(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries [B, heads, T, E] and keys, and values, [B, kv_heads, T, E], of x [B, T, in]."""
        mixed = self.qkv_proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        q, k, v = mixed.split((self.heads, self.kv_heads, self.kv_heads), dim=1)
        if self.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        return rotate(q, rope), rotate(k, rope), v

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        """Attention output [B, T, hidden] of q over keys and values [B, kv_heads, S, E].

        The G query heads that share a key head are folded into its rows, which spares copying the cache.
        """
        batch, _, width, _ = q.shape
        folded = q.reshape(batch, self.kv_heads, -1, self.head_dim)
        if q.device.type == "cpu" and batch > 1 and width == 1:
            out = few_queries(folded, keys, values, mask)
        else:
            out = F.scaled_dot_product_attention(folded, keys, values, attn_mask=mask)
        out = out.view(batch, self.heads, width, self.head_dim).transpose(1, 2)
        return self.o_proj(out.reshape(batch, width, -1))

    def forward(
        self, x: Tensor, rope: tuple[Tensor, Tensor], keys: Tensor, values: Tensor, rows: Rows, mask: Tensor
    ) -> Tensor:
        """Write the pass into its cache rows and attend over the whole (masked) cache."""
        q, k, v = self.project(x, rope)
        for cached, new in ((keys, k), (values, v)):
            if isinstance(rows, slice):
                cached[:, :, rows] = new
            else:
                cached.index_copy_(2, rows, new)
        return self.attend(q, keys, values, mask)


class MLP(nn.Module):
    def __init__(self, hidden_size: int, intermediate_size: int):
        super().__init__()
        self.gate_up_proj = nn.Linear(hidden_size, 2 * intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)


class Layer(nn.Module):
    def __init__(self, config: DecoderConfig):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.eps)
        extras = {"qkv_bias": config.qkv_bias, "o_bias": config.o_bias, "qk_norm": config.qk_norm}
        self.self_attn = Attention(config.hidden_size, config, **extras)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.eps)
        self.mlp = MLP(config.hidden_size, config.intermediate_size)

    def forward(self, x: Tensor, *attention) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), *attention)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """The whole model. ``forward`` also hands out the residual stream at the input of tapped layers."""

    def __init__(self, config: DecoderConfig):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.hidden_size, config.eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def cache(self, batch: int, capacity: int) -> KVCache:
        c = self.config
        return KVCache(c.layers, batch, c.kv_heads, capacity, c.head_dim, self.norm.weight)

    def rope(self, capacity: int) -> Rope:
        return rope_table(self.config, capacity, self.norm.weight.device, self.norm.weight.dtype)

    def forward(
        self,
        tokens: Tensor,
        start: int | Tensor,
        cache: KVCache,
        rope: Rope,
        taps: tuple[int, ...],
        tree: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Run tokens [B, T] at positions start … start+T-1, writing their cache rows.

        Args:
            start: int64 [1] on the device for a pass that can be captured and replayed (see ``graphs``); on a CPU
                an int is faster.
            tree: how far after start the position of each token is [T], and which tokens of the pass it sees
                [T, T]; None: a chain.

        Returns:
            hidden [B, T, H] after the final norm; taps [B, T, taps*H], low layer first.
        """
        width, like = tokens.shape[1], self.norm.weight
        groups = self.config.heads // self.config.kv_heads
        rows = consecutive(start, width)
        if tree is None:
            at = rope.cos[rows], rope.sin[rows]
            mask = causal_mask(start, width, cache.capacity, groups, like)
        else:
            depths, sees = tree
            at = rope.cos[start + depths], rope.sin[start + depths]
            mask = tree_mask(start, sees, cache.capacity, groups, like)
        x, tapped = self.residual(tokens, at, cache, rows, mask, taps)
        return self.norm(x), torch.cat(tapped, dim=-1) if tapped else x[..., :0]

    def residual(
        self,
        tokens: Tensor,
        at: tuple[Tensor, Tensor],
        cache: KVCache,
        rows: Rows,
        mask: Tensor,
        taps: tuple[int, ...] = (),
    ) -> tuple[Tensor, list[Tensor]]:
        """Pre-norm outputs [B, T, H] of tokens [B, T], and the inputs of tapped layers.

        Args:
            at: rotary cosines and sines [T, E] of their positions.
            rows: of the cache, which they take; mask: additive, [G*T, S].
        """
        x, tapped = self.embed_tokens(tokens), []
        for i, layer in enumerate(self.layers):
            if i in taps:
                tapped.append(x)
            x = layer(x, at, cache.keys[i], cache.values[i], rows, mask)
        return x, tapped

    def whole(self, tokens: Tensor) -> Tensor:
        """Pre-norm outputs [B, T, H] of whole rows [B, T] without a cache, which gradients can flow through."""
        x, rope = self.embed_tokens(tokens), self.rope(tokens.shape[1])
        for layer in self.layers:
            assert isinstance(layer, Layer)
            attention = layer.self_attn
            q, k, v = attention.project(layer.input_layernorm(x), (rope.cos, rope.sin))
            seen = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            x = x + attention.o_proj(seen.transpose(1, 2).flatten(2))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return x
