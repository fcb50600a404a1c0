"""Training text from the target itself: given a chat opening, it writes both questions and answers.

Rows advance in lock-step, one token a pass, so that a batch needs no padding and no attention boundaries:
a row whose turn ends is fed the template's next role header and goes on. The hidden states that EAGLE-3
learns from fall out of the same passes.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Generator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from tracedraft.config import ASSETS
from tracedraft.errors import UserError
from tracedraft.target import Served
from tracedraft.training.corpus import Maker, TextSpec

GROWTH = 64  # rows by which the cache grows, so that early passes do not attend over empty ones


@dataclass(frozen=True)
class SynthesisSpec(TextSpec):
    """What text to synthesise.

    Attributes:
        tokens: total, rounded up to whole shards of ``batch`` rows by ``length`` tokens.
        question_temperature, answer_temperature: answers of every second row are greedy.
        plain_share: share of user turns without a given opening; system_share: of rows with a system line.
    """

    tokens: int
    seed: int
    question_temperature: float
    answer_temperature: float
    plain_share: float
    system_share: float

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tokens < 1:
            raise UserError(f"text.tokens={self.tokens}: expected at least 1")

    def makers(self, served: Served) -> list[Maker]:
        count = -(-self.tokens // (self.batch * self.length))
        return [partial(self._shard, served, index) for index in range(count)]

    def _shard(self, served: Served, index: int) -> Generator[int, None, dict[str, Tensor]]:
        writer = _Writer(served, self, random.Random(f"{self.seed}/{index}"), self.seed * 100_003 + index)
        for _ in range(self.length):
            writer.step()
            yield self.batch
        return writer.shard()


@dataclass(frozen=True)
class Template:
    """Token ids that the chat template puts between what is written."""

    to_answer: list[int]
    to_question: list[int]


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
        self.cache, self.rope = model.cache(spec.batch, GROWTH), model.rope(spec.length)
        self.generator = torch.Generator(self.device).manual_seed(seed)
        self.template = template_of(served.tokenizer)
        self.openings, self.systems = lines("openings.txt"), lines("systems.txt")
        self.queues = [deque(self._beginning()) for _ in range(spec.batch)]
        self.answering = [False] * spec.batch
        self.in_answer = [False] * spec.batch
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
        if start == self.cache.capacity:
            self.cache = self.cache.grown(start + GROWTH)
        hidden, taps = target.model(self.next[:, None], start, self.cache, self.rope, target.taps)
        logits = target.model.lm_head(hidden[:, 0]).float()
        greedy = logits.max(dim=1).indices  # argmax itself is twice as slow
        row = (
            self.next.int(),
            greedy.int(),
            torch.tensor(self.in_answer),
            taps[:, 0],
            hidden[:, 0],
        )
        for kept, value in zip(self.kept.values(), row, strict=True):
            kept.append(value)
        written = self._draw(logits, greedy).tolist()
        self.next = torch.tensor([self._follow(i, token) for i, token in enumerate(written)], device=self.device)

    def _draw(self, logits: Tensor, greedy: Tensor) -> Tensor:
        """Questions are sampled; so are the answers of odd rows, while those of even rows are greedy."""
        spec = self.spec
        heats = [
            (spec.answer_temperature if i % 2 else 0.0) if answering else spec.question_temperature
            for i, answering in enumerate(self.answering)
        ]
        rows = [i for i, heat in enumerate(heats) if heat > 0]
        heat = logits.new_tensor([heats[i] for i in rows])[:, None]
        some = logits[rows]
        # in place and not normalised: there are tens of thousands of tokens a row
        mass = some.sub_(some.amax(dim=1, keepdim=True)).div_(heat).exp_().cumsum_(dim=1)
        dart = torch.rand(len(rows), 1, generator=self.generator, device=self.device) * mass[:, -1:]
        drawn = torch.searchsorted(mass, dart).clamp_(max=mass.shape[1] - 1)
        return greedy.index_copy(0, torch.tensor(rows, dtype=torch.long, device=self.device), drawn[:, 0])

    def _follow(self, row: int, token: int) -> int:
        queue = self.queues[row]
        self.in_answer[row] = self.answering[row] and not queue
        if queue:
            return queue.popleft()
        if token in self.served.target.eos_ids:
            self.answering[row] = not self.answering[row]
            queue.extend(self.template.to_answer if self.answering[row] else self.template.to_question)
            if not self.answering[row]:
                queue.extend(self._opening())
        return token

    def shard(self) -> dict[str, Tensor]:
        columns = {name: torch.stack(rows, dim=1).cpu().contiguous() for name, rows in self.kept.items()}
        greedy = torch.arange(self.spec.batch) % 2 == 0
        return {**columns, "counts": torch.ones_like(columns["answer"]), "greedy": greedy}
