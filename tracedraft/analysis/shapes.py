"""What shapes say of the arithmetic, the traffic and the memory of a decoder and of what learns on it.

Weights times what was counted. Left out: attention over caches and their traffic, padding, activations, and what a
learner between requests spends on judging a block and on tokens of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tracedraft.errors import UserError

BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
FP32 = 4


@dataclass(frozen=True)
class Shape:
    """A decoder as its published config has it, and the vocabulary of the EAGLE-3 draft that goes with it."""

    layers: int
    hidden: int
    mlp: int
    heads: int
    kv_heads: int
    head: int
    vocab: int
    draft_vocab: int
    tied: bool = False

    def layer(self, inputs: int) -> int:
        """Weights of one layer whose attention reads vectors of this size."""
        attention = inputs * self.head * (self.heads + 2 * self.kv_heads) + self.heads * self.head * self.hidden
        return attention + 3 * self.hidden * self.mlp

    @property
    def target_pass(self) -> int:
        """Weights that a pass of the target reads: layers and head."""
        return self.layers * self.layer(self.hidden) + self.hidden * self.vocab

    @property
    def draft_slot(self) -> int:
        """Weights between taps and output: three taps to one vector, and a layer over that and a token's."""
        return 3 * self.hidden * self.hidden + self.layer(2 * self.hidden)

    @property
    def draft_head(self) -> int:
        return self.hidden * self.draft_vocab

    @property
    def kv_row(self) -> int:
        """Numbers that a token takes in the caches of both."""
        return 2 * (self.layers + 1) * self.kv_heads * self.head


_LLAMA_8B = Shape(32, 4096, 14336, 32, 8, 128, 128256, 32000)
_LLAMA_7B = Shape(32, 4096, 11008, 32, 32, 128, 32000, 32000)
SHAPES = {
    "smollm2-135m": Shape(30, 576, 1536, 9, 3, 64, 49152, 12288, tied=True),
    "llama3.1-8b": _LLAMA_8B,
    "r1-distill-llama-8b": _LLAMA_8B,
    "vicuna-7b": _LLAMA_7B,
    "llama2-7b-chat": _LLAMA_7B,
    "vicuna-13b": Shape(40, 5120, 13824, 40, 40, 128, 32000, 32000),
    "qwen3-8b": Shape(36, 4096, 12288, 32, 8, 128, 151936, 32000),
}


@dataclass(frozen=True)
class Training:
    """Between requests, what a generated token needs of each.

    Attributes:
        steps: of the optimiser.
        passes: turns that the draft went through, forward and backward, over all steps.
        predictions: that it learnt from in those.
    """

    steps: float = 0.0
    passes: float = 0.0
    predictions: float = 0.0


@dataclass(frozen=True)
class Work:
    """Of one arm, from counts: what a generated token needs of each."""

    rounds: float
    updates: float
    positions: float  # of an update
    training: Training = Training()


def arithmetic(shape: Shape, decode: dict[str, Any], adapter: dict[str, Any], work: Work) -> float | None:
    """Floating-point operations a token; None where the drafted shape is unknown.

    Two for each weight and row forward, four backward; an update of the head is its logits and its gradient, a
    prediction between requests has a teacher's logits too.
    """
    drafted = _drafted(decode)
    if drafted is None:
        return None
    width, steps, beams = drafted
    inner, outer = _inner(adapter), adapter.get("outer", {})
    # A token more than is accepted enters the draft's cache each round.
    extend = 1 / work.rounds * shape.draft_slot
    propose = beams * ((steps - 1) * shape.draft_slot + steps * (shape.draft_head + _rows(shape, inner)))
    update = 2 * work.positions * shape.draft_head * inner.get("steps", 1)
    # The steps of an unrolled chain share their teachers.
    shared = outer.get("unroll", 1) if outer.get("objective") == "all" else 1
    teaching = shape.hidden * shape.vocab / shared
    training = work.training.predictions * (3 * (shape.draft_slot + shape.draft_head) + teaching)
    return 2 * (work.rounds * (width * shape.target_pass + extend + propose) + work.updates * update + training)


def traffic(shape: Shape, decode: dict[str, Any], adapter: dict[str, Any], work: Work, size: int) -> float | None:
    """Bytes of weights read and written a token; None where the drafted shape is unknown.

    Args:
        size: bytes of a weight as it is served.
    """
    drafted = _drafted(decode)
    if drafted is None:
        return None
    _, steps, _ = drafted
    inner = _inner(adapter)
    propose = steps * (shape.draft_slot + shape.draft_head + _rows(shape, inner))
    serving = work.rounds * size * (shape.target_pass + propose)
    update = inner.get("steps", 1) * _update_traffic(shape, inner, work.positions, size)
    return serving + work.updates * update + _training_traffic(shape, adapter.get("outer", {}), work.training, size)


def _update_traffic(shape: Shape, inner: dict[str, Any], positions: float, size: int) -> float:
    """Of one step of an update: the head is read for its logits; what is trained is read, written and published."""
    logits = size * shape.draft_head
    if inner.get("form") == "lowrank":
        return logits + (2 * FP32 + size) * positions * (shape.hidden + shape.draft_vocab)
    if inner.get("train") == "norm":
        return 2 * logits  # its gradient reads the head again
    state = 3 if inner.get("optimizer") == "adam" else 0  # two moments, and the step
    return logits + (2 * FP32 * (1 + state) + size) * shape.draft_head


def _training_traffic(shape: Shape, outer: dict[str, Any], training: Training, size: int) -> float:
    """A pass reads the weights forward and backward, adds to their gradients and reads the target's head once."""
    weights = shape.draft_slot + shape.draft_head
    each = 4 * FP32 * weights + size * shape.hidden * shape.vocab
    moments = 2 if outer.get("optimizer") == "adamw" else int(outer.get("momentum", 0) > 0)
    return training.passes * each + training.steps * (FP32 * (3 + 2 * moments) + size) * weights


def _inner(adapter: dict[str, Any]) -> dict[str, Any]:
    return adapter["inner"] if "outer" in adapter else adapter


def _rows(shape: Shape, inner: dict[str, Any]) -> int:
    """Weights that a low-rank head has beside its own, with as many rows as it may keep."""
    return inner["max_rows"] * (shape.hidden + shape.draft_vocab) if inner.get("form") == "lowrank" else 0


def _drafted(decode: dict[str, Any]) -> tuple[int, int, int] | None:
    """(rows verified a round, steps of the draft, ways followed in each) of a chain or a tree."""
    if "chain_length" in decode:
        return decode["chain_length"] + 1, decode["chain_length"], 1
    if "tree_nodes" in decode:
        return decode["tree_nodes"], decode["tree_depth"], decode["tree_top_k"]
    return None


def memory(shape: Shape, size: int, adapter: dict[str, Any]) -> tuple[float, float | None]:
    """Bytes of the weights of target and draft, and of what a learner holds beside them; None where unknown."""
    embedding = 0 if shape.tied else shape.hidden * shape.vocab
    weights = size * (shape.target_pass + embedding + shape.draft_slot + shape.draft_head)
    if "outer" not in adapter:
        return weights, _inner_memory(shape, size, adapter)
    inner, outer = _inner_memory(shape, size, adapter["inner"]), _outer_memory(shape, adapter)
    return weights, None if inner is None or outer is None else inner + outer


def _inner_memory(shape: Shape, size: int, adapter: dict[str, Any]) -> float | None:
    if adapter.get("name") == "fixed":
        return 0.0
    if "optimizer" not in adapter:
        return None
    window = FP32 * adapter["window"] * (shape.hidden + shape.draft_vocab)
    if adapter["form"] == "lowrank":
        served = size if size < FP32 else 0  # a second copy, where the draft is not fp32
        return window + (FP32 + served) * _rows(shape, adapter)
    moments = 3 if adapter["optimizer"] == "adam" else 0  # two, and the step
    return window + (FP32 * (1 + moments) + size) * shape.draft_head


def _outer_memory(shape: Shape, adapter: dict[str, Any]) -> float | None:
    """What learning between requests asks for before it starts, less the turns that it keeps."""
    from omegaconf import OmegaConf

    from tracedraft.config import build_spec

    try:
        copies = build_spec(OmegaConf.create(adapter), "adapter").outer.copies + 2
    except UserError:  # recorded by another version
        return None
    return float(FP32) * copies * (shape.draft_slot + shape.draft_head)


def cache(shape: Shape, size: int, tokens: int) -> int:
    """Bytes of the keys and values of both decoders for so many tokens."""
    return size * tokens * shape.kv_row
