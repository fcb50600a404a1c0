"""Training text from the target itself: given a chat opening, it writes both questions and answers.

Rows advance in lock-step, one token a pass, so that a batch needs no padding and no attention boundaries:
a row whose turn ends is fed the template's next role header and goes on. The hidden states that EAGLE-3
learns from fall out of the same passes.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections import Counter, deque
from collections.abc import Generator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tracedraft import chat
from tracedraft.config import ASSETS
from tracedraft.errors import UserError
from tracedraft.target import Served
from tracedraft.training.corpus import Known, Maker, TextSpec, block

OPENINGS, SYSTEMS = "openings.txt", "systems.txt"
SHORTEST = 3  # words of an opening that was cut
RUN = 16  # tokens: table rules and lists of the like are shorter
GROWTH = 64  # rows by which the cache grows, so that early passes do not attend over empty ones


@dataclass(frozen=True)
class SynthesisSpec(TextSpec):
    """What text to synthesise.

    Attributes:
        tokens: total, rounded up to whole shards of ``batch`` rows by ``length`` tokens.
        question_temperature, answer_temperature: answers of every second row are greedy.
        plain_share: share of user turns without a given opening; system_share: of rows with a system line.
        cut_share: share of given openings that are cut after some word, for the target to go on from there.
        repeats: a turn that says the same ``RUN`` tokens so often, overlapping ones counted, goes in circles and is
            ended there; None: never.
    """

    tokens: int
    seed: int
    question_temperature: float
    answer_temperature: float
    plain_share: float
    system_share: float
    cut_share: float
    repeats: int | None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tokens < 1:
            raise UserError(f"text.tokens={self.tokens}: expected at least 1")
        for key in ("question_temperature", "answer_temperature"):
            if getattr(self, key) < 0:
                raise UserError(f"text.{key}={getattr(self, key)}: expected 0 (greedy) or more")
        for key in ("plain_share", "system_share", "cut_share"):
            if not 0 <= getattr(self, key) <= 1:
                raise UserError(f"text.{key}={getattr(self, key)}: expected a share from 0 to 1")
        if self.repeats is not None and self.repeats < 2:
            raise UserError(f"text.repeats={self.repeats}: expected at least 2, or null to let turns go in circles")

    def identity(self) -> dict[str, Any]:
        given = {name: (ASSETS / "training" / name).read_bytes() for name in (OPENINGS, SYSTEMS)}
        return {**super().identity(), **{name: hashlib.sha256(text).hexdigest() for name, text in given.items()}}

    def makers(self, served: Served, known: Known) -> list[Maker]:
        self._check(served)
        count = -(-self.tokens // (self.batch * self.length))
        return [partial(self._shard, served, known, index) for index in range(count)]

    def _check(self, served: Served) -> None:
        if template_of(served.tokenizer, served.target.eos_ids).end < 0 and self.repeats is not None:
            raise UserError(f"text.repeats={self.repeats}: the target has no end token to end a turn by; give null")
        if self.system_share:
            turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
            try:
                chat.render(served.tokenizer, turns, False)
            except UserError as error:
                raise UserError(f"text.system_share={self.system_share}: {error}; give 0") from error

    def _shard(self, served: Served, known: Known, index: int) -> Generator[int, None, dict[str, Tensor]]:
        writer = _Writer(served, self, random.Random(f"{self.seed}/{index}"), self.seed * 100_003 + index)
        for _ in range(self.length):
            writer.step()
            yield self.batch
        shard = writer.shard()
        block(shard, served.tokenizer, known)
        return shard


@dataclass(frozen=True)
class Template:
    """What the chat template puts between what is written.

    Attributes:
        to_answer, to_question: token ids, but for an end token, which is the target's to write.
        ends_questions: whether a user's turn ends by an end token; else the target goes on to the answer by itself.
        answers: the text by which it does.
        end: the token that ends a turn; -1: the target has none.
    """

    to_answer: list[int]
    to_question: list[int]
    ends_questions: bool
    answers: str
    end: int


def lines(name: str) -> list[str]:
    """Texts of a line each; a line end inside one is written as \\n."""
    found = (ASSETS / "training" / name).read_text().split("\n")
    return [line.replace("\\n", "\n") for line in found if line.strip()]


def _encode(tokenizer, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def template_of(tokenizer, ends: frozenset[int]) -> Template:
    """Of a tokenizer whose turns any of ``ends`` ends.

    Raises:
        UserError: the template refuses two plain turns.
    """
    user, answer, again = "XUSERX", "XANSWERX", "XAGAINX"
    turns = [{"role": r, "content": c} for r, c in (("user", user), ("assistant", answer), ("user", again))]
    opened = chat.render(tokenizer, turns[:1], True).partition(user)[2]
    to_answer = _encode(tokenizer, opened)
    to_question = _encode(tokenizer, chat.render(tokenizer, turns, False).partition(answer)[2].partition(again)[0])
    skip = [int(ids[:1] != [] and ids[0] in ends) for ids in (to_answer, to_question)]
    end = to_question[0] if skip[1] else min(ends, default=-1)
    return Template(to_answer[skip[0] :], to_question[skip[1] :], bool(skip[0]), opened.strip(), end)


class _Said:
    """A turn so far, as the target wrote it."""

    def __init__(self):
        self.last: deque[int] = deque(maxlen=RUN)
        self.runs: Counter[tuple[int, ...]] = Counter()

    def add(self, token: int) -> int:
        """How often the last ``RUN`` tokens, this one among them, stand in the turn."""
        self.last.append(token)
        run = tuple(self.last)
        self.runs[run] += len(run) == RUN
        return self.runs[run]


class _Writer:
    """One shard in the making."""

    def __init__(self, served: Served, spec: SynthesisSpec, rng: random.Random, seed: int):
        self.served, self.spec, self.rng = served, spec, rng
        model = served.target.model
        self.device = model.norm.weight.device
        self.cache, self.rope = model.cache(spec.batch, GROWTH), model.rope(spec.length)
        self.generator = torch.Generator(self.device).manual_seed(seed)
        self.template = template_of(served.tokenizer, served.target.eos_ids)
        self.asked: list[list[int]] = [[] for _ in range(spec.batch)]  # what the target wrote of each row's question
        self.said = [_Said() for _ in range(spec.batch)]
        self.openings, self.systems = lines(OPENINGS), lines(SYSTEMS)
        self.queues = [deque(self._beginning()) for _ in range(spec.batch)]
        self.answering = [False] * spec.batch
        self.in_answer = [False] * spec.batch
        self.kept = {name: [] for name in ("tokens", "argmax", "answer", "taps", "hidden")}
        self.next = torch.tensor([queue.popleft() for queue in self.queues], device=self.device)

    def _opening(self) -> list[int]:
        if self.rng.random() < self.spec.plain_share:
            return []
        given = self.rng.choice(self.openings)
        if self.rng.random() < self.spec.cut_share:
            words = list(re.finditer(r"\S+", given))
            kept = self.rng.randrange(min(SHORTEST, len(words)), len(words) + 1)
            given = given if kept == len(words) else given[: words[kept - 1].end()]
        return _encode(self.served.tokenizer, given)

    def _beginning(self) -> list[int]:
        turns = [{"role": "user", "content": "XUSERX"}]
        if self.rng.random() < self.spec.system_share:
            turns.insert(0, {"role": "system", "content": self.rng.choice(self.systems)})
        text = chat.render(self.served.tokenizer, turns, False)
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
        """What the row is fed next: of a queue, or ``token``, which the target wrote; turns change hands here."""
        queue = self.queues[row]
        self.in_answer[row] = self.answering[row] and not queue
        if queue:
            return queue.popleft()
        if self.said[row].add(token) == self.spec.repeats:
            token, self.in_answer[row] = self.template.end, False
        if not (self.answering[row] or self.template.ends_questions):
            return self._unended(row, token)
        if token in self.served.target.eos_ids:
            self._turn(row)
        return token

    def _turn(self, row: int) -> None:
        self.answering[row] = not self.answering[row]
        self.said[row] = _Said()
        self.queues[row].extend(self.template.to_answer if self.answering[row] else self.template.to_question)
        if not self.answering[row]:
            self.queues[row].extend(self._opening())

    def _unended(self, row: int, token: int) -> int:
        """The same in a question that no token ends: there the target writes the header of the answer itself, or else
        an end token, which the header takes the place of."""
        asked = self.asked[row]
        if token in self.served.target.eos_ids:
            asked.clear()
            self._turn(row)
            return self.queues[row].popleft()
        asked.append(token)
        tail = self.served.tokenizer.decode(asked[-2 * len(self.template.to_answer) :])
        if tail.rstrip().endswith(self.template.answers):
            asked.clear()
            self.answering[row] = True
            self.said[row] = _Said()
        return token

    def shard(self) -> dict[str, Tensor]:
        columns = {name: torch.stack(rows, dim=1).cpu().contiguous() for name, rows in self.kept.items()}
        greedy = torch.arange(self.spec.batch) % 2 == 0
        return {**columns, "counts": torch.ones_like(columns["answer"]), "greedy": greedy}
