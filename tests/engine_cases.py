"""Engines of other people, as a bench could be given them."""

from __future__ import annotations

from collections.abc import Iterator

from conftest import plain_greedy

from tracedraft.benchmark.engines import Job
from tracedraft.models import architectures, weights
from tracedraft.target import LlamaTarget, default_taps


def naive(job: Job, prompts: Iterator[list[int]]) -> Iterator[tuple[list[int], float]]:
    """Recomputes everything for each token, and says that each took a second."""
    config = architectures.read_decoder_config(job.checkpoint)
    model = weights.load_decoder(job.checkpoint, config, job.dtype, str(job.device)).requires_grad_(False)
    target = LlamaTarget(model, default_taps(config.layers), job.eos_ids, job.context)
    for prompt in prompts:
        said = plain_greedy(target, prompt, job.max_new_tokens)
        end = next((i for i, token in enumerate(said) if token in job.eos_ids), len(said) - 1)
        yield said[: end + 1], float(end + 1)


def babbling(job: Job, prompts: Iterator[list[int]]) -> Iterator[tuple[list[int], float]]:
    for _ in prompts:
        yield [1, 2, 3], 1.0
