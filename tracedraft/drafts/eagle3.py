"""EAGLE-3 as a chain or a tree: one true slot per committed token, then its own output fed back."""

from __future__ import annotations

import copy
import sys
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path

import torch
from torch import Tensor

from tracedraft.drafts.checkpoint import locate
from tracedraft.drafts.eagle3_student import Eagle3Student
from tracedraft.drafts.rollout import Beams, roll_chain, roll_tree
from tracedraft.drafts.static import WIDEST, LowRank, StaticRolls, rolled
from tracedraft.errors import UserError
from tracedraft.interfaces import Draft, DraftSpec, More, Pick
from tracedraft.models import eagle3, weights
from tracedraft.models.decoder import KVCache, Rope, causal_mask, consecutive, rope_table, tree_mask
from tracedraft.models.eagle3_layouts import Reading
from tracedraft.models.packing import PackedProduct, can_pack, pack
from tracedraft.target import DTYPES, LlamaTarget
from tracedraft.types import OutputHead, Proposal, TargetShape

TRAINED = ("lm_head",)  # by inner adapters, in place


class Eagle3Draft(Draft):
    """Its KV cache keeps true slots only: rows that a proposal writes are overwritten by the next true ones."""

    def __init__(self, model: eagle3.Eagle3, embedding: Tensor):
        self.embedding = embedding
        self.static = StaticRolls(self.allocate) if embedding.device.type == "cuda" else None
        self._serve(model)

    def _serve(self, model: eagle3.Eagle3) -> None:
        """Packs it, in place."""
        pack(model, keep=TRAINED)
        self.model = model
        norm, weight = model.norm.weight.detach(), model.lm_head.weight.detach()
        self._head = OutputHead(norm, weight, model.norm.eps, model.vocab)
        if can_pack(model.lm_head):
            self._head.product = PackedProduct()
        if self.static is not None:
            self.static.forget()

    def student(self) -> Eagle3Student:
        dtype = self.model.norm.weight.dtype

        def publish(learnt: eagle3.Eagle3) -> str:
            served = copy.deepcopy(learnt).requires_grad_(False).to(dtype)
            digest = weights.sha256_of_tensors(served.state_dict())
            self._serve(served)
            return digest

        return Eagle3Student(copy.deepcopy(self.model), self.embedding, publish)

    @property
    def head(self) -> OutputHead:
        return self._head

    @property
    def row_bytes(self) -> int:
        layer = self.model.config.layer
        return KVCache.bytes_per_row(1, layer.kv_heads, layer.head_dim, self.model.norm.weight.element_size())

    def prepare(self, capacity: int) -> None:
        if self.static is not None:
            self.static.prepare(capacity, lambda: self.begin(capacity, 0))

    def begin(self, capacity: int, first: int | None = None) -> None:
        layer = self.model.config.layer
        self.cache, self.rope = (self.allocate if self.static is None else self.static.begin)(capacity)
        self.groups = layer.heads // layer.kv_heads
        self.length = 0

    def allocate(self, capacity: int) -> tuple[KVCache, Rope]:
        """A cache of so many rows, and its rotations."""
        layer, like = self.model.config.layer, self.model.norm.weight
        cache = KVCache(1, 1, layer.kv_heads, capacity, layer.head_dim, like)
        return cache, rope_table(layer, capacity, like.device, like.dtype)

    @torch.inference_mode()
    def extend(self, taps: Tensor, tokens: Tensor) -> Tensor:
        if self.static is not None and len(tokens) <= WIDEST:
            slots = self.static.extend(self._extended, taps, tokens, self.length)
        else:
            slots = self._extended(taps, tokens, self.length)
        self.length += len(tokens)
        self.last = slots[-1:]
        return slots

    def _extended(self, taps: Tensor, tokens: Tensor, start: int | Tensor) -> Tensor:
        return self._slots(self.model.fuse(taps.to(self.model.norm.weight.dtype)), tokens, start)

    def rows(self, n: int) -> Tensor:
        rows = self.cache.rows[..., :n, :]
        return rows if self.static is None else rows.clone()  # whose caches are used again

    @torch.inference_mode()
    def resume(self, rows: Tensor) -> None:
        self.length = self.cache.put(rows)

    @torch.inference_mode()
    def propose(self, length: int, pick: Pick | None = None, more: More | None = None) -> Proposal:
        def roll(factors: LowRank | None, last: Tensor, start: int | Tensor) -> Proposal:
            head = replace(self.head, low_rank=factors)
            return roll_chain(self._fed_back, head, last, start, length, pick, more)

        alone = pick is None and more is None  # nothing outside is asked on the way
        return rolled(self.static if alone else None, self.head, (length,), roll, self.last, self.length)

    @torch.inference_mode()
    def propose_tree(self, nodes: int, depth: int, top_k: int, more: More | None = None) -> Proposal:
        def roll(factors: LowRank | None, last: Tensor, start: int | Tensor) -> Proposal:
            head = replace(self.head, low_rank=factors)
            return roll_tree(self._fed_back, head, last, start, nodes, depth, top_k, more)

        shape, static = (nodes, depth, top_k), self.static if more is None else None
        return rolled(static, self.head, shape, roll, self.last, self.length)

    def _fed_back(self, outputs: Tensor, tokens: Tensor, start: int | Tensor, beams: Beams | None) -> Tensor:
        return self._slots(self.model.feedback(outputs), tokens, start, beams)

    def _slots(self, features: Tensor, tokens: Tensor, start: int | Tensor, beams: Beams | None = None) -> Tensor:
        """Pre-norm outputs [n, H] of n slots from ``start``, over the cache rows before and among them.

        Args:
            start: int64 [1] on the device for work that can be captured, over all of the cache.
        """
        layer, count = self.model.midlayer, len(tokens)
        rows = consecutive(start, count)
        stop = self.cache.capacity if isinstance(start, Tensor) else start + count
        if beams is None:
            at, mask = rows, causal_mask(start, count, stop, self.groups, features)
        else:
            position, sees = beams
            first = start + count - sees.shape[1]  # behind the true slots
            at, mask = consecutive(position, 1), tree_mask(first, sees, stop, self.groups, features)
        keys, values = self.cache.keys[0][:, :, :stop], self.cache.values[0][:, :, :stop]
        inputs = layer.attention_input(self.embedding[tokens], features)
        attended = layer.self_attn(inputs[None], (self.rope.cos[at], self.rope.sin[at]), keys, values, rows, mask)
        return layer.finish(features, attended[0])


@dataclass(frozen=True)
class Eagle3Spec(Reading, DraftSpec):
    """An EAGLE-3 checkpoint as published, and how to read what it leaves open (see ``Reading``).

    Attributes:
        path: folder or hub id; a name without a slash ships with the package.
        dtype: bfloat16, float16 or float32; None: the target's.
        cache: folder where the hash of its weights is remembered.
        revision: of the hub repository.
    """

    name: str
    path: str | None
    dtype: str | None
    cache: str
    revision: str | None = None

    def check(self, shape: TargetShape) -> None:
        """Raises UserError without such a checkpoint, or when it does not fit the target, saying in what."""
        if self.dtype is not None and self.dtype not in DTYPES:
            raise UserError(f"draft.dtype={self.dtype!r}: expected one of {', '.join(DTYPES)}")
        for key in ("rope_theta", "head_dim"):
            if (value := getattr(self, key)) is not None and value <= 0:
                raise UserError(f"draft.{key}={value}: expected above 0, or null for what the checkpoint says")
        folder = self.folder()
        check_fit(eagle3.read_config(folder, self), shape, folder)

    def folder(self) -> Path:
        """Where the checkpoint lies, fetched from the hub if need be."""
        return locate(self.path, self.revision, "eagle3", "tiny")

    def provenance(self) -> dict[str, str | None]:
        digest = weights.sha256_of(weights.content_files(self.folder()), Path(self.cache))
        return {"origin": str(self.path), "sha256": digest, "revision": self.revision}

    def build(self, target: LlamaTarget) -> tuple[Eagle3Draft, dict[str, str | None]]:
        """A fresh draft and its provenance."""
        self.check(target.shape)
        folder = self.folder()
        like = target.model.embed_tokens.weight
        dtype = DTYPES[self.dtype] if self.dtype else like.dtype
        origin = self.provenance()
        model = copy.deepcopy(_pristine(self, folder, dtype, like.device, origin["sha256"]))
        embedding, whose = like.to(dtype), "the target's"
        if model.embed_tokens is not None:
            own = model.embed_tokens.weight.data
            if not _same(own, like):
                embedding, whose = own, "its own"
                _say(f"draft {self.path}: its token embeddings differ from the target's, and are used")
            model.embed_tokens = None  # the target's are not kept twice
        return Eagle3Draft(model, embedding), {**origin, "embedding": whose}


@lru_cache(maxsize=1)
def _pristine(
    spec: Eagle3Spec, folder: Path, dtype: torch.dtype, device: torch.device, sha256: str | None
) -> eagle3.Eagle3:
    """The model as its file has it, kept: every arm of every run of a sweep starts from a copy."""
    return eagle3.load(folder, dtype, device, spec)


def _same(own: Tensor, target: Tensor) -> bool:
    """Whether two embeddings are one, at the coarser of their precisions."""
    if own.shape != target.shape:
        return False
    return torch.equal(own, target.to(own.dtype)) or torch.equal(own.to(target.dtype), target)


@cache
def _say(line: str) -> None:
    """Once a process: each arm of a run builds its own draft."""
    print(line, file=sys.stderr)


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

    def provenance(self) -> dict[str, str | None]:
        return {"origin": "untrained", "sha256": None}

    def build(self, target: LlamaTarget) -> tuple[Eagle3Draft, dict[str, str | None]]:
        self.check(target.shape)
        embedding = target.model.embed_tokens.weight
        model = lens(target, self.draft_vocab_size, self.seed).to(embedding)
        return Eagle3Draft(model, embedding), self.provenance()


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
        "embedding size": (
            shape.hidden_size if config.own_embedding else config.layer.hidden_size,
            shape.hidden_size,
        ),
        "vocabulary": (config.layer.vocab_size, shape.vocab_size),
        "number of tapped layers": (config.taps, shape.taps),
    }
    for what, (draft, served) in pairs.items():
        if draft != served:
            raise UserError(f"draft {folder} does not fit the target: its {what} is {draft}, the target's {served}")
    if config.tapped and shape.tapped and config.tapped != shape.tapped:
        raise UserError(
            f"draft {folder} reads the inputs of the target's layers {list(config.tapped)}, and the target taps "
            f"{list(shape.tapped)}: set target.taps={list(config.tapped)}, or draft.tap_ids if it counts otherwise"
        )
