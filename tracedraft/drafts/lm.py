"""An independent small language model with the target's tokens for a draft, as a chain or a tree.

Slot i consumes token i+1 and predicts token i+2, as an EAGLE slot does, but from tokens alone: it reads no taps, and
the prompt's first token stands before its slots.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tracedraft.drafts.checkpoint import locate
from tracedraft.drafts.lm_student import LmStudent
from tracedraft.drafts.rollout import Beams, roll_chain, roll_tree
from tracedraft.drafts.static import WIDEST, LowRank, StaticRolls, rolled
from tracedraft.errors import UserError
from tracedraft.interfaces import Draft, DraftSpec, More, Pick
from tracedraft.models import weights
from tracedraft.models.architectures import read_decoder_config
from tracedraft.models.decoder import Decoder, KVCache, Rope, causal_mask, consecutive, tree_mask
from tracedraft.models.packing import PackedProduct, can_pack, pack
from tracedraft.target import DTYPES, LlamaTarget
from tracedraft.types import OutputHead, Proposal, TargetShape

TRAINED = ("lm_head",)  # by inner adapters, in place


class LmDraft(Draft):
    """Row 0 of its KV cache is the first token's, row i+1 that of slot i. Rows that a proposal writes are overwritten
    by the next true ones."""

    def __init__(self, model: Decoder):
        self.static = StaticRolls(self.allocate) if model.norm.weight.device.type == "cuda" else None
        self._serve(model)

    def _serve(self, model: Decoder) -> None:
        """Takes it for its own: unties the head, which adapters train, and packs the rest."""
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone(), requires_grad=False)
        pack(model, keep=TRAINED)
        self.model = model
        norm, weight = model.norm.weight.detach(), model.lm_head.weight.detach()
        self._head = OutputHead(norm, weight, model.norm.eps, torch.arange(len(weight), device=weight.device))
        if can_pack(model.lm_head):
            self._head.product = PackedProduct()
        if self.static is not None:
            self.static.forget()

    def student(self) -> LmStudent:
        dtype = self.model.norm.weight.dtype

        def publish(learnt: Decoder) -> str:
            served = copy.deepcopy(learnt).requires_grad_(False).to(dtype)
            self._serve(served)
            return weights.sha256_of_tensors(served.state_dict())

        return LmStudent(copy.deepcopy(self.model), publish)

    @property
    def head(self) -> OutputHead:
        return self._head

    @property
    def row_bytes(self) -> int:
        c = self.model.config
        return KVCache.bytes_per_row(c.layers, c.kv_heads, c.head_dim, self.model.norm.weight.element_size())

    def prepare(self, capacity: int) -> None:
        if self.static is not None:
            self.static.prepare(capacity, lambda: self.begin(capacity, 0))

    @torch.inference_mode()
    def begin(self, capacity: int, first: int) -> None:
        self.cache, self.rope = (self.allocate if self.static is None else self.static.begin)(capacity)
        self.length = 0
        self._consume(torch.tensor([first], device=self.head.weight.device), 0, None)

    def allocate(self, capacity: int) -> tuple[KVCache, Rope]:
        """A cache of so many slots behind the first token, and its rotations."""
        return self.model.cache(1, capacity + 1), self.model.rope(capacity + 1)

    @torch.inference_mode()
    def extend(self, taps: Tensor, tokens: Tensor) -> Tensor:
        if self.static is not None and len(tokens) <= WIDEST:
            slots = self.static.extend(self._extended, taps[:, :0], tokens, self.length)
        else:
            slots = self._extended(taps, tokens, self.length)
        self.length += len(tokens)
        self.last = slots[-1:]
        return slots

    def _extended(self, taps: Tensor, tokens: Tensor, start: int | Tensor) -> Tensor:
        return self._consume(tokens, start + 1, None)

    def rows(self, n: int) -> Tensor:
        rows = self.cache.rows[..., 1 : n + 1, :]
        return rows if self.static is None else rows.clone()  # whose caches are used again

    @torch.inference_mode()
    def resume(self, rows: Tensor) -> None:
        self.length = rows.shape[-2]
        self.cache.rows[..., 1 : self.length + 1, :] = rows

    @torch.inference_mode()
    def propose(self, length: int, pick: Pick | None = None, more: More | None = None) -> Proposal:
        def roll(factors: LowRank | None, last: Tensor, start: int | Tensor) -> Proposal:
            head = replace(self.head, low_rank=factors)
            return roll_chain(self._slots, head, last, start, length, pick, more)

        alone = pick is None and more is None  # nothing outside is asked on the way
        return rolled(self.static if alone else None, self.head, (length,), roll, self.last, self.length)

    @torch.inference_mode()
    def propose_tree(self, nodes: int, depth: int, top_k: int, more: More | None = None) -> Proposal:
        def roll(factors: LowRank | None, last: Tensor, start: int | Tensor) -> Proposal:
            head = replace(self.head, low_rank=factors)
            return roll_tree(self._slots, head, last, start, nodes, depth, top_k, more)

        shape, static = (nodes, depth, top_k), self.static if more is None else None
        return rolled(static, self.head, shape, roll, self.last, self.length)

    def _slots(self, outputs: Tensor, tokens: Tensor, start: int | Tensor, beams: Beams | None) -> Tensor:
        return self._consume(tokens, start + 1, beams)

    def _consume(self, tokens: Tensor, row: int | Tensor, beams: Beams | None) -> Tensor:
        """Pre-norm outputs [n, H] of tokens [n] in the cache rows from ``row``, which see those before and among
        them."""
        count, like = len(tokens), self.model.norm.weight
        rows = consecutive(row, count)
        stop = self.cache.capacity if isinstance(row, Tensor) else row + count
        groups = self.model.config.heads // self.model.config.kv_heads
        if beams is None:
            at, mask = rows, causal_mask(row, count, stop, groups, like)
        else:
            slot, sees = beams
            first = row + count - sees.shape[1]  # behind the true ones
            at, mask = consecutive(slot + 1, 1), tree_mask(first, sees, stop, groups, like)
        turned = self.rope.cos[at], self.rope.sin[at]
        return self.model.residual(tokens[None], turned, self.cache.first(stop), rows, mask)[0][0]


@dataclass(frozen=True)
class LmSpec(DraftSpec):
    """A checkpoint of one of the target's architectures, with the target's vocabulary.

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
    revision: str | None

    def check(self, shape: TargetShape) -> None:
        """Raises UserError without such a checkpoint, or when its vocabulary is not the target's."""
        if self.dtype is not None and self.dtype not in DTYPES:
            raise UserError(f"draft.dtype={self.dtype!r}: expected one of {', '.join(DTYPES)}")
        size = read_decoder_config(self.folder()).vocab_size
        if size != shape.vocab_size:
            raise UserError(
                f"draft.path={self.path!r} has a vocabulary of {size} tokens, the target one of {shape.vocab_size}: "
                "a draft LM must have the target's tokenizer"
            )

    def provenance(self) -> dict[str, str | None]:
        digest = weights.sha256_of(weights.content_files(self.folder()), Path(self.cache))
        return {"origin": str(self.path), "sha256": digest, "revision": self.revision}

    def build(self, target: LlamaTarget) -> tuple[LmDraft, dict[str, str | None]]:
        self.check(target.shape)
        like = target.model.norm.weight
        dtype, origin = DTYPES[self.dtype] if self.dtype else like.dtype, self.provenance()
        return LmDraft(copy.deepcopy(_pristine(self.folder(), dtype, like.device, origin["sha256"]))), origin

    def folder(self) -> Path:
        return locate(self.path, self.revision, "lm", "lm_tiny")


@lru_cache(maxsize=1)
def _pristine(folder: Path, dtype: torch.dtype, device: torch.device, sha256: str | None) -> Decoder:
    """The model as its file has it, kept: every arm of every run of a sweep starts from a copy."""
    return weights.load_decoder(folder, read_decoder_config(folder), dtype, device)


@dataclass(frozen=True)
class FirstLayersSpec(DraftSpec):
    """An untrained draft LM: the target's own first ``layers`` layers, then its norm and head."""

    name: str
    layers: int

    def check(self, shape: TargetShape) -> None:
        """Raises UserError for more layers than the target has."""
        if not 1 <= self.layers <= shape.layers:
            raise UserError(f"draft.layers={self.layers}: expected 1 to {shape.layers}, as many as the target has")

    def provenance(self) -> dict[str, str | None]:
        return {"origin": "untrained", "sha256": None}

    def build(self, target: LlamaTarget) -> tuple[LmDraft, dict[str, str | None]]:
        self.check(target.shape)
        # taken for copied, so that they are not: of a large target they are most of its memory
        others: dict[int, Any] = {id(layer): layer for layer in target.model.layers[self.layers :]}
        model = copy.deepcopy(target.model, others)
        model.layers, model.config = model.layers[: self.layers], replace(model.config, layers=self.layers)
        return LmDraft(model), self.provenance()
