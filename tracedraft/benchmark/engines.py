"""Engines beside ours: what each is given, and what it must yield.

An engine is a function of a ``Job`` and of prompts that come one at a time. It loads what it needs once, then yields,
for each prompt before it takes the next, the ids that it generated and the seconds that they took:

    def mine(job, prompts):
        model = load(job.checkpoint, job.draft)
        for prompt in prompts:
            began = time.perf_counter()
            ids = model.answer(prompt, job.max_new_tokens)
            yield ids, time.perf_counter() - began

The bench asks it between our own arms, so that both meet the machine in the same state.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tracedraft.errors import UserError
from tracedraft.meter import PHASES
from tracedraft.types import Response

CHAIN = 5  # tokens that an assistant proposes a round: decode=chain's own


@dataclass(frozen=True)
class Job:
    """What an engine is given.

    Attributes:
        checkpoint: folder of the target's weights, as transformers reads them.
        draft: folder of the draft's checkpoint; None for one that lies nowhere.
        device, dtype: where and at what precision to run.
        max_new_tokens: most tokens of an answer; with the prompt's, at most ``context``.
        temperature: 0, greedy: only then is there one right answer.
        eos_ids: tokens that end an answer, and are part of it.
    """

    checkpoint: Path
    draft: Path | None
    device: torch.device
    dtype: torch.dtype
    max_new_tokens: int
    temperature: float
    context: int
    eos_ids: frozenset[int]


Engine = Callable[[Job, Iterator[list[int]]], Iterator[tuple[list[int], float]]]


def find(key: str, path: str) -> Engine:
    """The function that ``package.module:function`` names.

    Raises:
        UserError: no such function.
    """
    module, _, name = str(path).partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(f"{key}={path!r}: expected package.module:function ({error})") from error


class Running:
    """An engine from its first prompt on, asked like an arm of ours."""

    def __init__(self, engine: Engine, job: Job):
        self._job, self._prompt = job, None
        self._answers = iter(engine(job, self._prompts()))

    def _prompts(self) -> Iterator[list[int]]:
        while True:
            prompt, self._prompt = self._prompt, None
            if prompt is None:
                raise UserError("it took a prompt before it had yielded the answer to the one before")
            yield prompt

    def answer(self, prompt: list[int]) -> Response:
        """Raises UserError when the engine fails or gives something else than ids and seconds."""
        self._prompt = list(prompt)
        try:
            ids, seconds = next(self._answers)
            tokens, spent = [int(i) for i in ids], float(seconds)
        except StopIteration:
            raise UserError("it ended before every prompt was answered") from None
        except UserError:
            raise
        except Exception as error:  # whatever someone else's code may raise
            raise UserError(f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}") from error
        if not tokens or spent <= 0:
            raise UserError(f"it yielded {len(tokens)} tokens and {spent} seconds: expected both above 0")
        ended = "eos" if tokens[-1] in self._job.eos_ids else "limit"
        phases = dict.fromkeys(PHASES, 0.0) | {"other": spent}
        return Response(tokens, ended, 0, 0, 0, [], [], [], [], phases)


def generate(job: Job, prompts: Iterator[list[int]]) -> Iterator[tuple[list[int], float]]:
    """transformers' ``generate``, as it is by default."""
    yield from _generate(job, prompts, {})


def generate_static(job: Job, prompts: Iterator[list[int]]) -> Iterator[tuple[list[int], float]]:
    """transformers' ``generate`` over a static cache, which it compiles on a GPU; on a CPU no faster."""
    yield from _generate(job, prompts, {"cache_implementation": "static"})


def generate_assisted(job: Job, prompts: Iterator[list[int]]) -> Iterator[tuple[list[int], float]]:
    """transformers' assisted generation (arXiv 2211.17192) with the draft LM, in chains of five."""
    if job.draft is None:
        raise UserError("the draft lies in no folder that transformers could read")
    if "Eagle3" in (job.draft / "config.json").read_text(encoding="utf-8"):
        raise UserError("transformers assists by a language model only: draft=lm")
    assistant = _load(job, job.draft)
    settings = assistant.generation_config
    settings.num_assistant_tokens, settings.num_assistant_tokens_schedule = CHAIN, "constant"
    settings.assistant_confidence_threshold = 0.0  # it would stop early where the draft is unsure
    yield from _generate(job, prompts, {"assistant_model": assistant})


def _load(job: Job, folder: Path) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=job.dtype, local_files_only=True)
    return model.to(job.device).eval()


def _generate(job: Job, prompts: Iterator[list[int]], options: dict[str, Any]) -> Iterator[tuple[list[int], float]]:
    model = _load(job, job.checkpoint)
    options = {"eos_token_id": sorted(job.eos_ids) or None, "pad_token_id": 0, "do_sample": False, **options}
    for prompt in prompts:
        limit = min(job.max_new_tokens, job.context - len(prompt))
        began = time.perf_counter()
        ids = torch.tensor([prompt], device=job.device)
        # not around the yield, which would leave whoever asks in this mode
        with torch.inference_mode():
            said = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=limit, **options)
        tokens = said[0, len(prompt) :].tolist()
        yield tokens, time.perf_counter() - began
