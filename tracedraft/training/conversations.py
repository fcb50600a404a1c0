"""Training text from the user's own conversations, their tokens fed to the target as they stand."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tracedraft import chat
from tracedraft.config import plain
from tracedraft.errors import UserError
from tracedraft.target import Served
from tracedraft.training.corpus import Known, Maker, TextSpec, quotes

Message = dict[str, str]
ROLES = ("system", "user", "assistant")
CHUNK = 512  # tokens of one pass over a conversation

Talk = tuple[list[int], list[bool]]  # tokens of a conversation, and which are an answer's


@dataclass(frozen=True)
class ConversationsSpec(TextSpec):
    """A JSONL file, one conversation a line: ``{"messages": [{"role": "user", "content": "…"}, …]}``.

    Answers should be the target's own: a draft learns to foresee what it is shown.
    """

    path: str | None

    def identity(self) -> dict[str, Any]:
        assert self.path is not None
        return {**plain(self), "path": f"sha256:{hashlib.sha256(Path(self.path).read_bytes()).hexdigest()}"}

    def makers(self, served: Served, known: Known) -> list[Maker]:
        """The file is read whole here, so that a bad line is named before any work is done. Conversations come in an
        order of chance, and none is cut between the first shard, which is held out, and the others."""
        found = list(encoded(served, read_conversations(self.path)))
        texts = served.tokenizer.batch_decode([tokens for tokens, _ in found])
        talks = [talk for talk, text in zip(found, texts, strict=True) if not quotes(text, known)]
        if not talks:
            raise UserError(f"text.path={self.path}: every conversation quotes a benchmark prompt (paths.data)")
        random.Random(0).shuffle(talks)
        pieces = [(n, i) for n, (tokens, _) in enumerate(talks) for i in range(-(-len(tokens) // self.length))]
        held_out = pieces[: self.batch]
        rest = [(n, i) for n, i in pieces[self.batch :] if n > held_out[-1][0]]
        shards = [held_out, *(rest[at : at + self.batch] for at in range(0, len(rest), self.batch))]
        return [partial(self._shard, served, talks, shard) for shard in shards]

    def _shard(
        self, served: Served, talks: list[Talk], pieces: list[tuple[int, int]]
    ) -> Generator[int, None, dict[str, Tensor]]:
        """Of pieces, by conversation and place in it: what comes before one is seen by the target, too."""
        rows, columns, of = [], {}, -1
        for n, i in pieces:
            if n != of:
                columns, of = forced(served, *talks[n]), n
            rows.append({name: padded(column[i * self.length :], self.length) for name, column in columns.items()})
            yield self.length
        shard = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
        return {**shard, "greedy": torch.zeros(len(rows), dtype=torch.bool)}


def read_conversations(path: str | None) -> list[tuple[str, list[Message]]]:
    """Each conversation after its file and line; raises UserError naming the first that is none."""
    if path is None:
        raise UserError("text.path is not set: give a JSONL file of conversations, text.path=FILE")
    try:
        lines = Path(path).read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"text.path={path}: cannot be read: {error}") from error
    places = [(f"text.path={path}, line {i}", line) for i, line in enumerate(lines, 1) if line.strip()]
    found = [(where, checked(line, where)) for where, line in places]
    if not found:
        raise UserError(f"text.path={path}: holds no conversation")
    return found


def checked(line: str, where: str) -> list[Message]:
    try:
        messages = json.loads(line)["messages"]
        fits = all(m["role"] in ROLES and isinstance(m["content"], str) for m in messages)
    except (ValueError, KeyError, TypeError):
        messages, fits = [], False
    roles = [m["role"] for m in messages] if fits else []
    if "assistant" not in roles or "user" not in roles[: roles.index("assistant")]:
        raise UserError(
            f'{where}: expected {{"messages": [{{"role": …, "content": …}}, …]}} with roles '
            f"{', '.join(ROLES)} and at least one answer, after a user's message"
        )
    return messages


def encoded(served: Served, conversations: list[tuple[str, list[Message]]]) -> Iterator[Talk]:
    """Token ids of each conversation, cut to the target's context, and which of them are an answer's.

    As in serving, an answer's tokens begin where the opened template ends. What follows the last one is left out.

    Raises:
        UserError: the chat template refuses a conversation or rewrites what came before, by file and line.
    """
    for where, messages in conversations:
        tokens: list[int] = []
        answer: list[bool] = []
        text = ""
        for i in (i for i, message in enumerate(messages) if message["role"] == "assistant"):
            before = _render(served.tokenizer, messages[:i], True, where)
            after = _render(served.tokenizer, messages[: i + 1], False, where)
            if not before.startswith(text):
                raise UserError(
                    f"{where}: the target's chat template rewrites what stands before message {i + 1} (drops the "
                    "reasoning of a former answer, say): make it conversations of one answer each"
                )
            if not after.startswith(before):
                raise UserError(
                    f"{where}: the target's chat template shows message {i + 1} otherwise than serving begins an "
                    "answer (with a mark of reasoning, say): leave the conversation out"
                )
            for piece, said in ((before[len(text) :], False), (after[len(before) :], True)):
                ids = served.tokenizer(piece, add_special_tokens=False)["input_ids"]
                tokens += ids
                # the template may add a line end behind the end token, which serving never comes to
                end = max((i for i, token in enumerate(ids, 1) if token in served.target.eos_ids), default=len(ids))
                answer += [said and i < end for i in range(len(ids))]
            text = after
        yield tokens[: served.target.context], answer[: served.target.context]


def _render(tokenizer: Any, messages: list[Message], opened: bool, where: str) -> str:
    try:
        return chat.render(tokenizer, messages, opened)
    except UserError as error:
        raise UserError(f"{where}: {error}") from error


@torch.inference_mode()
def forced(served: Served, tokens: list[int], answer: list[bool]) -> dict[str, Tensor]:
    """The columns of one conversation, [L] or [L, ...]; see ``corpus.read_shard``."""
    target = served.target
    chunk = min(CHUNK, target.context)
    target.begin(-(-len(tokens) // chunk) * chunk, chunk, chunk)
    seen = target.prefill(tokens)
    return {
        "tokens": torch.tensor(tokens, dtype=torch.int32),
        "argmax": torch.cat([target.logits(some).argmax(dim=1).int().cpu() for some in seen.hidden.split(CHUNK)]),
        "answer": torch.tensor(answer),
        "counts": torch.ones(len(tokens), dtype=torch.bool),
        "taps": seen.taps.cpu(),
        "hidden": seen.hidden.cpu(),
    }


def padded(column: Tensor, length: int) -> Tensor:
    """The first ``length`` entries, zeros (which count nowhere) behind a shorter column."""
    out = column.new_zeros(length, *column.shape[1:])
    out[: len(column)] = column[:length]
    return out
