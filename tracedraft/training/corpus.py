"""Training text with the target's hidden states, in shards on disk; logits would be twenty times larger."""

from __future__ import annotations

import itertools
import re
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from tracedraft.config import ASSETS, plain
from tracedraft.errors import UserError
from tracedraft.files import write_atomically
from tracedraft.target import Served
from tracedraft.workloads.sources import read_file

NGRAM = 13  # words; GPT-3's measure of contamination (arXiv 2005.14165, appendix C)
SHORTEST = 5  # words of a shorter prompt that is looked for as a whole: with fewer, half of all text would hold one


@dataclass(frozen=True)
class TextSpec(ABC):
    """Where training text comes from. Rows are ``length`` tokens, a shard holds ``batch`` of them."""

    batch: int
    length: int

    def __post_init__(self) -> None:
        for key in ("batch", "length"):
            if getattr(self, key) < 1:
                raise UserError(f"text.{key}={getattr(self, key)}: expected at least 1")

    def identity(self) -> dict[str, Any]:
        """What decides the text, files by their content."""
        return plain(self)

    @abstractmethod
    def makers(self, served: Served, known: Known) -> list[Maker]:
        """One for each shard; what quotes a benchmark prompt, as ``quotes`` finds it, is not to be learnt.

        Raises:
            UserError: what the target cannot be given, before any work is done.
        """


Known = dict[int, set[str]]
"""By a number of words, runs of so many that stand in a benchmark's prompts."""

Maker = Callable[[], Generator[int, None, dict[str, Tensor]]]
"""Makes one shard: yields the number of new tokens after each pass, returns the columns."""


def shard_file(folder: Path, index: int) -> Path:
    return folder / f"shard-{index:05d}.safetensors"


def read_shard(path: Path) -> dict[str, Tensor]:
    """The columns of a shard of B rows by T tokens.

    tokens and argmax (the target's own next token) [B, T] int32; answer [B, T] bool, the tokens that the
    target wrote as an answer, its end token included; counts [B, T] bool, what training uses; greedy [B] bool,
    rows whose answers are greedy; at the target's precision taps [B, T, taps*H] and final hidden states [B, T, H].
    """
    return load_file(path)


def read_columns(path: Path, *names: str) -> list[Tensor]:
    """Some of them, without reading the others."""
    with safe_open(path, "pt") as file:
        return [file.get_tensor(name) for name in names]


def rows_of(path: Path, length: int) -> int:
    with safe_open(path, "pt") as file:
        rows, whole = file.get_slice("tokens").get_shape()
    return rows * (whole // length)


def write(served: Served, spec: TextSpec, makers: list[Maker], folder: Path, reserved: int = 0) -> Iterator[int]:
    """Write the missing shards, yielding the number of new tokens after each pass; ``reserved`` bytes stay free.

    Raises:
        UserError: the disk has too little room for what is still to be written.
    """
    missing = [i for i in range(len(makers)) if not shard_file(folder, i).exists()]
    check_disk(served, spec, folder, len(missing), reserved)
    for index in missing:
        shard = yield from makers[index]()
        file = shard_file(folder, index)
        write_atomically(file, lambda path, shard=shard: save_file(shard, path), "choose another corpus=FOLDER")


def check_disk(served: Served, spec: TextSpec, folder: Path, missing: int, reserved: int) -> None:
    model = served.target.model
    row = (len(served.target.taps) + 1) * model.config.hidden_size * model.norm.weight.element_size() + 10
    needed = missing * spec.batch * spec.length * row
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if needed and needed + reserved > 0.95 * free:
        raise UserError(
            f"the corpus still needs {needed / 2**30:.1f} GiB in {folder}, where {free / 2**30:.1f} GiB are free, "
            f"{reserved / 2**30:.1f} of them for the training: lower text.tokens or move it by corpus=FOLDER"
        )


def ngrams(texts: Iterable[str], n: int = NGRAM) -> set[str]:
    """Every run of ``n`` words, without case and punctuation."""
    found = set()
    for text in texts:
        words = re.findall(r"\w+", text.lower())
        found.update(" ".join(words[i : i + n]) for i in range(len(words) - n + 1))
    return found


def known_runs(prompts: Iterable[str]) -> Known:
    """Of each prompt every run of ``NGRAM`` words, or all of it if it is shorter."""
    known: Known = {NGRAM: set()}
    for prompt in prompts:
        words = len(re.findall(r"\w+", prompt))
        if words >= SHORTEST:
            size = min(words, NGRAM)
            known.setdefault(size, set()).update(ngrams([prompt], size))
    return known


def quotes(text: str, known: Known) -> bool:
    return any(not runs.isdisjoint(ngrams([text], size)) for size, runs in known.items())


def block(shard: dict[str, Tensor], tokenizer, known: Known) -> int:
    """Keep rows that quote a benchmark prompt out of training; returns how many there were."""
    texts = tokenizer.batch_decode(shard["tokens"].tolist())
    blocked = [quotes(text, known) for text in texts]
    for column in ("counts", "answer"):
        shard[column][torch.tensor(blocked)] = False
    return sum(blocked)


def benchmark_prompts(folder: Path | None) -> list[str]:
    """Every user turn of the prompt sets that ship, and of those in ``folder``.

    Raises:
        UserError: the folder holds none.
    """
    folders = [ASSETS / "workloads", *([folder] if folder is not None else [])]
    files = [sorted(each.glob("*.jsonl")) for each in folders]
    if not files[-1]:
        raise UserError(f"paths.data={folder}: expected a folder that holds *.jsonl files, or null")
    return [turn for file in itertools.chain(*files) for _, turns in read_file(file, "local")[0] for turn in turns]
