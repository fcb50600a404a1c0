"""Training text from the target itself: given a chat opening, it writes both questions and answers.

Rows advance in lock-step, one token a pass, so that a batch needs no padding and no attention boundaries:
a row whose turn ends is fed the template's next role header and goes on. The hidden states that EAGLE-3
learns from fall out of the same passes and are cached; logits would be twenty times larger.
"""

from __future__ import annotations

import random
import shutil
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tracedraft.config import ASSETS
from tracedraft.errors import UserError
from tracedraft.models.weights import write_atomically
from tracedraft.target import Served


@dataclass(frozen=True)
class SynthesisSpec:
    """What text to synthesise.

    Attributes:
        tokens: total, rounded up to whole shards of ``batch`` rows by ``length`` tokens.
        question_temperature, answer_temperature: answers of every second row are greedy.
        plain_share: share of user turns without a given opening; system_share: of rows with a system line.
    """

    tokens: int
    batch: int
    length: int
    seed: int
    question_temperature: float
    answer_temperature: float
    plain_share: float
    system_share: float

    def __post_init__(self) -> None:
        for key in ("tokens", "batch", "length"):
            if getattr(self, key) < 1:
                raise UserError(f"synthesis.{key}={getattr(self, key)}: expected at least 1")


@dataclass(frozen=True)
class Template:
    """Token ids that the chat template puts between what is written."""

    to_answer: list[int]
    to_question: list[int]


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("shard-*.safetensors"))


def read_shard(path: Path) -> dict[str, Tensor]:
    """tokens and argmax (the target's own next token) [B, T] int32, answer [B, T] bool; at the target's
    precision taps [B, T, taps*H] and final hidden states [B, T, H]."""
    return load_file(path)


def synthesise(served: Served, spec: SynthesisSpec, folder: Path) -> Iterator[int]:
    """Write the missing shards, yielding the number of new tokens after each pass.

    Raises:
        UserError: the disk has too little room for what is still to be written.
    """
    count = -(-spec.tokens // (spec.batch * spec.length))
    missing = [i for i in range(count) if not (folder / f"shard-{i:04d}.safetensors").exists()]
    check_disk(served, spec, folder, len(missing))
    for index in missing:
        writer = _Writer(served, spec, random.Random(f"{spec.seed}/{index}"), spec.seed * 100_003 + index)
        for _ in range(spec.length):
            writer.step()
            yield spec.batch
        write_atomically(folder / f"shard-{index:04d}.safetensors", lambda path, w=writer: save_file(w.shard(), path))


def check_disk(served: Served, spec: SynthesisSpec, folder: Path, missing: int) -> None:
    model = served.target.model
    row = (len(served.target.taps) + 1) * model.config.hidden_size * model.norm.weight.element_size() + 9
    needed = missing * spec.batch * spec.length * row
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if needed > 0.95 * free:
        raise UserError(
            f"synthesis.tokens={spec.tokens} needs {needed / 2**30:.1f} GiB in {folder}, where "
            f"{free / 2**30:.1f} GiB are free: lower it or move paths.corpus"
        )


def lines(name: str) -> list[str]:
    return [line for line in (ASSETS / "training" / name).read_text().split("\n") if line.strip()]


def _encode(tokenizer, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def template_of(tokenizer) -> Template:
    user, answer, again = "XUSERX", "XANSWERX", "XAGAINX"
    turns = [{"role": r, "content": c} for r, c in (("user", user), ("assistant", answer), ("user", again))]
    text = tokenizer.apply_chat_template(turns, tokenize=False)
    opened = tokenizer.apply_chat_template(turns[:1], tokenize=False, add_generation_prompt=True)
    to_answer = _encode(tokenizer, opened.partition(user)[2])
    to_question = _encode(tokenizer, text.partition(answer)[2].partition(again)[0])
    # the end-of-turn token is the model's own to write
    skip = [int(ids[0] == tokenizer.eos_token_id) for ids in (to_answer, to_question)]
    return Template(to_answer[skip[0] :], to_question[skip[1] :])


class _Writer:
    """One shard in the making."""

    def __init__(self, served: Served, spec: SynthesisSpec, rng: random.Random, seed: int):
        self.served, self.spec, self.rng = served, spec, rng
        model = served.target.model
        self.device = model.norm.weight.device
        self.cache, self.rope = model.cache(spec.batch, spec.length), model.rope(spec.length)
        self.generator = torch.Generator(self.device).manual_seed(seed)
        self.template = template_of(served.tokenizer)
        self.openings, self.systems = lines("openings.txt"), lines("systems.txt")
        self.queues = [deque(self._beginning()) for _ in range(spec.batch)]
        self.answering = [False] * spec.batch
        self.kept = {name: [] for name in ("tokens", "argmax", "answer", "taps", "hidden")}
        self.next = torch.tensor([queue.popleft() for queue in self.queues], device=self.device)

    def _opening(self) -> list[int]:
        if self.rng.random() < self.spec.plain_share:
            return []
        return _encode(self.served.tokenizer, self.rng.choice(self.openings))

    def _beginning(self) -> list[int]:
        turns = [{"role": "user", "content": "XUSERX"}]
        if self.rng.random() < self.spec.system_share:
            turns.insert(0, {"role": "system", "content": self.rng.choice(self.systems)})
        text = self.served.tokenizer.apply_chat_template(turns, tokenize=False)
        return _encode(self.served.tokenizer, text.partition("XUSERX")[0]) + self._opening()

    @torch.inference_mode()
    def step(self) -> None:
        target = self.served.target
        start = len(self.kept["tokens"])
        hidden, taps = target.model(
            self.next[:, None], start, self.cache.upto(64 * (start // 64 + 1)), self.rope, target.taps
        )
        logits = target.model.lm_head(hidden[:, 0])
        row = (
            self.next.int(),
            logits.argmax(dim=1).int(),
            torch.tensor(self.answering),
            taps[:, 0],
            hidden[:, 0],
        )
        for kept, value in zip(self.kept.values(), row, strict=True):
            kept.append(value)
        written = self._draw(logits).tolist()
        self.next = torch.tensor([self._follow(i, token) for i, token in enumerate(written)], device=self.device)

    def _draw(self, logits: Tensor) -> Tensor:
        """Questions are sampled; so are the answers of odd rows, while those of even rows are greedy."""
        spec = self.spec
        heat = logits.new_tensor(
            [
                (spec.answer_temperature if i % 2 else 0.0) if answering else spec.question_temperature
                for i, answering in enumerate(self.answering)
            ],
            dtype=torch.float32,
        )[:, None]
        mass = (logits.float() / heat.clamp(min=1e-3)).softmax(dim=1).cumsum(dim=1)
        dart = torch.rand(len(heat), 1, generator=self.generator, device=self.device) * mass[:, -1:]
        drawn = torch.searchsorted(mass, dart).clamp(max=mass.shape[1] - 1)
        return torch.where(heat > 0, drawn, logits.argmax(dim=1, keepdim=True)).squeeze(1)

    def _follow(self, row: int, token: int) -> int:
        queue = self.queues[row]
        if queue:
            return queue.popleft()
        if token in self.served.target.eos_ids:
            self.answering[row] = not self.answering[row]
            queue.extend(self.template.to_answer if self.answering[row] else self.template.to_question)
            if not self.answering[row]:
                queue.extend(self._opening())
        return token

    def shard(self) -> dict[str, Tensor]:
        return {name: torch.stack(rows, dim=1).cpu().contiguous() for name, rows in self.kept.items()}
