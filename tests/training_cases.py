"""A tiny target that a draft learns in seconds, and the text it writes, for the tests of training."""

from __future__ import annotations

import copy
import dataclasses
from functools import cache
from pathlib import Path

from conftest import tiny

from tracedraft.target import LlamaTarget, Served
from tracedraft.training import corpus as corpora
from tracedraft.training import synthesis
from tracedraft.training.eagle3 import Eagle3TrainingSpec

TEXT = synthesis.SynthesisSpec(
    tokens=3 * 16 * 128, batch=16, length=128, seed=0,
    question_temperature=1.5, answer_temperature=1.5, plain_share=0.35, system_share=0.2, cut_share=0.5, repeats=3,
)  # fmt: skip
SPEC = Eagle3TrainingSpec(
    draft_vocab_size=200, fc_norm=True, pass_through=True, intermediate_size=None, init=None, after=None, loss="ce",
    unroll=2, decay=0.8, accepted_only=False, answers_only=False, average=None, epochs=16, batch=8, length=64,
    lr=3e-2, warmup_steps=5, final_lr=0.1, betas=(0.9, 0.95), clip=0.5, weight_decay=0.0, evaluate_every=1000,
    held_out_tokens=2048, patience=None, seed=0,
)  # fmt: skip


@cache
def served(dtype: str = "float32") -> Served:
    """A tiny target that can be learnt from a few thousand tokens: its layers add little to the embedding, it
    is sure of itself, and several tokens end a turn, or hardly one would end by chance."""
    base = tiny(dtype)
    model = copy.deepcopy(base.target.model)
    for layer in model.layers:
        layer.self_attn.o_proj.weight.mul_(0.1)
        layer.mlp.down_proj.weight.mul_(0.1)
    model.lm_head.weight.mul_(4)
    ends = base.target.eos_ids | set(range(0, 250, 25))
    return dataclasses.replace(base, target=LlamaTarget(model, base.target.taps, ends, base.target.context))


def synthesise(folder: Path, spec: synthesis.SynthesisSpec = TEXT, dtype: str = "float32") -> int:
    return sum(corpora.write(served(dtype), spec, spec.makers(served(dtype), {}), folder))


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("shard-*.safetensors"))
