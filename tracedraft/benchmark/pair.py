"""A target and its EAGLE-3 draft of any size with random weights, and the bytes that their passes must read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn

from tracedraft.drafts.eagle3 import Eagle3Draft
from tracedraft.errors import UserError
from tracedraft.models import eagle3
from tracedraft.models.decoder import Decoder, DecoderConfig, KVCache
from tracedraft.models.packing import pack
from tracedraft.target import DTYPES, LlamaTarget, default_taps

Model = TypeVar("Model", bound=nn.Module)

SPREAD = 0.02  # of random weights, as models are initialised


@dataclass(frozen=True)
class PairSpec:
    """Sizes as a ``config.json`` says them; the draft's layer is one of the target's."""

    name: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    context: int
    draft_vocab_size: int
    dtype: str
    seed: int

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise UserError(f"dtype={self.dtype!r} of {self.name}: expected one of {', '.join(DTYPES)}")
        if self.layers < 7:
            raise UserError(f"layers={self.layers} of {self.name}: expected at least 7, of which EAGLE-3 taps three")

    @property
    def config(self) -> DecoderConfig:
        return DecoderConfig(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            layers=self.layers,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            eps=1e-5,
            rope_theta=500000.0,
            rope_scaling=None,
            tied=False,
            context=self.context,
        )

    def target(self, device: torch.device) -> LlamaTarget:
        """No token ends a response."""
        model = self._random(Decoder, self.config, device)
        pack(model)
        return LlamaTarget(model, default_taps(self.layers), frozenset(), self.context)

    def draft(self, target: LlamaTarget) -> Eagle3Draft:
        shape = eagle3.Eagle3Config(self.config, self.draft_vocab_size, self.hidden_size, len(target.taps), False)
        model = self._random(eagle3.Eagle3, shape, target.device)
        model.set_vocab(torch.arange(self.draft_vocab_size, device=target.device))
        return Eagle3Draft(model, target.model.embed_tokens.weight)

    def _random(self, kind: Callable[..., Model], config: object, device: torch.device) -> Model:
        """Made where it is served and at its precision: 8B parameters in fp32 would take 32 GB on the way."""
        with torch.device("meta"):
            model = kind(config)
        model = model.to(DTYPES[self.dtype]).to_empty(device=device)
        generator = torch.Generator(device).manual_seed(self.seed)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 2:
                    parameter.normal_(0.0, SPREAD, generator=generator)
                else:
                    parameter.fill_(1.0)
        return model.requires_grad_(False).eval()

    # What must be read at least, whatever the kernels: each weight once a pass, embeddings by the row.

    def pass_bytes(self, length: int) -> int:
        """Of a pass of the target after ``length`` tokens."""
        c = self.config
        weights = c.layers * self._layer(c.hidden_size) + c.hidden_size * c.vocab_size
        return weights * self._itemsize + length * KVCache.bytes_per_row(
            c.layers, c.kv_heads, c.head_dim, self._itemsize
        )

    def draft_bytes(self, depth: int, length: int) -> int:
        """Of the draft in a round that proposes ``depth`` levels: true slots, then its own outputs fed back."""
        c = self.config
        step = self._layer(2 * c.hidden_size) + c.hidden_size * self.draft_vocab_size
        fuse = 3 * c.hidden_size**2
        cached = depth * length * KVCache.bytes_per_row(1, c.kv_heads, c.head_dim, self._itemsize)
        return (fuse + depth * step) * self._itemsize + cached

    def _layer(self, inputs: int) -> int:
        """Weights of the products of a layer, whose attention reads ``inputs`` wide rows."""
        c = self.config
        rows = c.heads * c.head_dim
        attention = inputs * (rows + 2 * c.kv_heads * c.head_dim) + rows * c.hidden_size
        return attention + 3 * c.hidden_size * c.intermediate_size

    @property
    def _itemsize(self) -> int:
        return torch.empty(0, dtype=DTYPES[self.dtype]).element_size()


def prompt(spec: PairSpec, length: int) -> list[int]:
    generator = torch.Generator().manual_seed(spec.seed)
    ids: Tensor = torch.randint(spec.vocab_size, (length,), generator=generator)
    return ids.tolist()
