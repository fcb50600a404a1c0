"""EAGLE-3 as a chain: one true slot per committed token, then its own output fed back."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tracedraft.config import ASSETS
from tracedraft.errors import UserError
from tracedraft.interfaces import Draft, DraftSpec, Pick
from tracedraft.models import eagle3, weights
from tracedraft.models.decoder import KVCache, causal_mask, rope_table
from tracedraft.models.packing import pack
from tracedraft.target import DTYPES, LlamaTarget
from tracedraft.types import OutputHead, Proposal, TargetShape

CHUNK = 512  # slots of one pass over a prompt: bounds its mask
TRAINED = ("lm_head",)  # by inner adapters, in place


class Eagle3Draft(Draft):
    """Its KV cache keeps true slots only: rows that a chain writes are overwritten by the next true ones."""

    def __init__(self, model: eagle3.Eagle3, embedding: Tensor):
        self.model, self.embedding = model, embedding
        self._head = OutputHead(model.norm.weight.data, model.lm_head.weight.data, model.norm.eps, model.vocab)

    @property
    def head(self) -> OutputHead:
        return self._head

    @property
    def row_bytes(self) -> int:
        layer = self.model.config.layer
        return KVCache.bytes_per_row(1, layer.kv_heads, layer.head_dim, self.model.norm.weight.element_size())

    def begin(self, capacity: int) -> None:
        layer = self.model.config.layer
        like = self.model.norm.weight
        self.cache = KVCache(1, 1, layer.kv_heads, capacity, layer.head_dim, like)
        self.rope = rope_table(layer, capacity, like.device, like.dtype)
        self.groups = layer.heads // layer.kv_heads
        self.length = 0

    @torch.inference_mode()
    def extend(self, taps: Tensor, tokens: Tensor) -> Tensor:
        parts = []
        for some_taps, some in zip(taps.split(CHUNK), tokens.split(CHUNK), strict=True):
            features = self.model.fuse(some_taps.to(self.model.norm.weight.dtype))
            parts.append(self._slots(features, some, self.length))
            self.length += len(some)
        self.last = parts[-1][-1:]
        return torch.cat(parts)

    @torch.inference_mode()
    def propose(self, length: int, pick: Pick | None = None) -> Proposal:
        features, drafted, shares, outputs = self.last, [], [], []
        for depth in range(length):
            if depth:
                features = self._slots(features, drafted[-1], self.length + depth - 1)
            outputs.append(features)
            logits = self.head.logits(features)
            if pick is None:
                index = logits.argmax(dim=1)
            else:
                index, share = pick(logits, depth)
                shares.append(share)
            drafted.append(self.head.vocab[index])
        probabilities = torch.cat(shares) if shares else None
        return Proposal(torch.cat(drafted), probabilities, self.head.vocab, torch.cat(outputs))

    def _slots(self, features: Tensor, tokens: Tensor, start: int) -> Tensor:
        """Pre-norm outputs [n, H] of n slots from ``start``, over the cache rows before and among them."""
        layer = self.model.midlayer
        stop = start + len(tokens)
        rope = self.rope.cos[start:stop], self.rope.sin[start:stop]
        keys, values = self.cache.keys[0][:, :, :stop], self.cache.values[0][:, :, :stop]
        mask = causal_mask(start, len(tokens), stop, self.groups, features)
        inputs = layer.attention_input(self.embedding[tokens], features)
        attended = layer.self_attn(inputs[None], rope, keys, values, start, mask)
        return layer.finish(features, attended[0])


@dataclass(frozen=True)
class Eagle3Spec(DraftSpec):
    """An EAGLE-3 checkpoint folder; a name without a slash ships with the package."""

    name: str
    path: str | None
    dtype: str | None
    cache: str

    def check(self, shape: TargetShape) -> None:
        """Raises UserError without such a checkpoint, or when it does not fit the target, saying in what."""
        if self.dtype is not None and self.dtype not in DTYPES:
            raise UserError(f"draft.dtype={self.dtype!r}: expected one of {', '.join(DTYPES)}")
        if self.path is None:
            raise UserError(
                "draft.path is not set, and the target names no eagle3 draft: give draft.path=FOLDER, "
                "or draft=tiny for a dry run"
            )
        if not self.folder.is_dir():
            raise UserError(
                f"draft.path={self.path!r}: no such folder (a name without a slash ships with the package, "
                "./NAME lies here); python -m tracedraft.train makes one"
            )
        check_fit(eagle3.read_config(self.folder), shape, self.folder)

    @property
    def folder(self) -> Path:
        assert self.path is not None
        return ASSETS / self.path if "/" not in self.path else Path(self.path)

    def build(self, target: LlamaTarget) -> tuple[Eagle3Draft, dict[str, str | None]]:
        """A fresh draft and its provenance."""
        self.check(target.shape)
        folder = self.folder
        like = target.model.norm.weight
        dtype = DTYPES[self.dtype] if self.dtype else like.dtype
        model = eagle3.load(folder, dtype, like.device)
        pack(model, keep=TRAINED)
        digest = weights.sha256_of(weights.content_files(folder), Path(self.cache))
        embedding = target.model.embed_tokens.weight.to(dtype)
        return Eagle3Draft(model, embedding), {"origin": str(self.path), "sha256": digest}


@dataclass(frozen=True)
class LogitLensSpec(DraftSpec):
    """An untrained EAGLE-3 draft that reads the target's last tap through the target's own head."""

    name: str
    draft_vocab_size: int
    seed: int

    def check(self, shape: TargetShape) -> None:
        """Raises UserError for a draft vocabulary that the target does not have."""
        if not 1 <= self.draft_vocab_size <= shape.vocab_size:
            raise UserError(f"draft.draft_vocab_size={self.draft_vocab_size}: expected 1 to {shape.vocab_size}")

    def build(self, target: LlamaTarget) -> tuple[Eagle3Draft, dict[str, str | None]]:
        self.check(target.shape)
        embedding = target.model.embed_tokens.weight
        model = lens(target, self.draft_vocab_size, self.seed).to(embedding)
        pack(model, keep=TRAINED)
        return Eagle3Draft(model, embedding), {"origin": "untrained", "sha256": None}


def lens(target: LlamaTarget, draft_vocab_size: int, seed: int) -> eagle3.Eagle3:
    config = target.model.config
    shape = eagle3.Eagle3Config(config, draft_vocab_size, config.hidden_size, len(target.taps), fc_norm=False)
    model = eagle3.Eagle3(shape)
    model.set_vocab(torch.arange(draft_vocab_size))
    generator = torch.Generator().manual_seed(seed)
    eagle3.start_from(
        model, target.model.lm_head.weight.float().cpu(), target.model.norm.weight.float().cpu(), generator
    )
    return model.requires_grad_(False).eval()


def check_fit(config: eagle3.Eagle3Config, shape: TargetShape, folder: Path) -> None:
    """Raises UserError naming the first dimension in which draft and target differ."""
    pairs = {
        "hidden size": (config.target_hidden_size, shape.hidden_size),
        "embedding size": (config.layer.hidden_size, shape.hidden_size),
        "vocabulary": (config.layer.vocab_size, shape.vocab_size),
        "number of tapped layers": (config.taps, shape.taps),
    }
    for what, (draft, served) in pairs.items():
        if draft != served:
            raise UserError(f"draft {folder} does not fit the target: its {what} is {draft}, the target's {served}")
