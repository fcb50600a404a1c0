"""Offline training of an EAGLE-3 draft on a cached corpus."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from tracedraft.errors import UserError
from tracedraft.models import eagle3
from tracedraft.models.weights import write_atomically
from tracedraft.target import LlamaTarget
from tracedraft.training import synthesis
from tracedraft.training.objective import Batch, teacher_of_hidden, training_time_test, weighted


@dataclass(frozen=True)
class TrainingSpec:
    """How to train.

    Attributes:
        draft_vocab_size: the most frequent tokens of the corpus.
        unroll, decay: training-time-test steps, and the weight of each after the one before.
        epochs, batch, length: passes over the corpus; rows of ``length`` tokens an optimiser step.
        lr, warmup_steps: peak of a cosine schedule that ends at a tenth of it.
        evaluate_every: optimiser steps between held-out checks and checkpoints.
    """

    draft_vocab_size: int
    unroll: int
    decay: float
    epochs: int
    batch: int
    length: int
    lr: float
    warmup_steps: int
    clip: float
    weight_decay: float
    evaluate_every: int
    seed: int

    def __post_init__(self) -> None:
        for key in ("draft_vocab_size", "unroll", "epochs", "batch", "length", "warmup_steps", "evaluate_every"):
            if getattr(self, key) < 1:
                raise UserError(f"training.{key}={getattr(self, key)}: expected at least 1")


@dataclass(frozen=True)
class Progress:
    step: int
    steps: int
    tokens: int
    loss: float
    held_out: list[float] | None


def corpus_vocab(files: list[Path], size: int, vocab_size: int, always: frozenset[int]) -> Tensor:
    """The ``size`` most frequent next tokens of the corpus, ascending; ``always`` are among them."""
    counts = torch.zeros(vocab_size, dtype=torch.long)
    for file in files:
        shard = synthesis.read_shard(file)
        counts += torch.bincount(shard["argmax"].flatten(), minlength=vocab_size)
        counts += torch.bincount(shard["tokens"].flatten(), minlength=vocab_size)
    counts[list(always)] = counts.max() + 1
    return torch.topk(counts, size).indices.sort().values


def new_draft(target: LlamaTarget, vocab: Tensor, seed: int) -> eagle3.Eagle3:
    """One layer of the target's own width, started as a pass-through of the last tap, each tap normed."""
    layer = replace(target.model.config, layers=1, rope_theta=10000.0, rope_scaling=None)
    size = layer.hidden_size
    model = eagle3.Eagle3(eagle3.Eagle3Config(layer, len(vocab), size, len(target.taps), fc_norm=True))
    model.set_vocab(vocab)
    head, norm = target.model.lm_head.weight.float().cpu(), target.model.norm.weight.float().cpu()
    eagle3.pass_through(model, head, norm, torch.Generator().manual_seed(seed))
    return model


def batches(files: list[Path], spec: TrainingSpec, rng: torch.Generator) -> Iterator[dict[str, Tensor]]:
    """Every row of every shard once, cut to ``length`` tokens, in random order."""
    for index in torch.randperm(len(files), generator=rng).tolist():
        shard = synthesis.read_shard(files[index])
        rows = {n: t.unflatten(1, (-1, min(spec.length, t.shape[1]))).flatten(0, 1) for n, t in shard.items()}
        for picked in torch.randperm(len(rows["tokens"]), generator=rng).split(spec.batch):
            yield {name: tensor[picked] for name, tensor in rows.items()}


class Trainer:
    """Training state: model, optimiser and position in the schedule; ``save`` and ``resume`` keep all three."""

    def __init__(self, target: LlamaTarget, files: list[Path], spec: TrainingSpec):
        if len(files) < 2:
            raise UserError("training needs at least two corpus shards, one of them held out: raise synthesis.tokens")
        if spec.draft_vocab_size > target.vocab_size:
            raise UserError(f"training.draft_vocab_size={spec.draft_vocab_size}: the target has {target.vocab_size}")
        self.target, self.spec = target, spec
        self.files, self.held_out = files[:-1], files[-1:]
        self.device = target.model.norm.weight.device
        vocab = corpus_vocab(self.files, spec.draft_vocab_size, target.vocab_size, target.eos_ids)
        self.model = new_draft(target, vocab, spec.seed).to(self.device)
        self.embedding = target.model.embed_tokens.weight.float()
        self.head = target.model.lm_head.weight[self.model.vocab]
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=spec.lr, betas=(0.9, 0.95), weight_decay=spec.weight_decay
        )
        rows = [synthesis.read_shard(f)["tokens"].numel() // spec.length for f in self.files]
        self.steps = spec.epochs * sum(math.ceil(n / spec.batch) for n in rows)
        self.step = 0

    def rate(self) -> float:
        warm = min(1.0, (self.step + 1) / self.spec.warmup_steps)
        return self.spec.lr * warm * (0.55 + 0.45 * math.cos(math.pi * self.step / self.steps))

    def batch(self, raw: dict[str, Tensor]) -> Batch:
        """Teacher logits are recomputed from the cached final hidden states, over the draft vocabulary."""
        raw = {name: tensor.to(self.device) for name, tensor in raw.items()}
        return Batch(
            tokens=raw["tokens"].long(),
            taps=raw["taps"].float(),
            teacher=teacher_of_hidden(raw["hidden"], self.head),
            in_vocab=self.model.t2d[raw["argmax"].long()],
            counts=torch.ones_like(raw["tokens"], dtype=torch.float32),
        )

    def run(self, folder: Path, report: Callable[[Progress], None]) -> None:
        tokens = 0
        while self.step < self.steps:
            epoch = self.step * self.spec.epochs // self.steps
            rng = torch.Generator().manual_seed(self.spec.seed * 1000 + epoch)
            done = self.step % (self.steps // self.spec.epochs)
            for raw in itertools.islice(batches(self.files, self.spec, rng), done, None):
                loss = self._optimise(self.batch(raw))
                tokens += raw["tokens"].numel()
                self.step += 1
                due = self.step % self.spec.evaluate_every == 0 or self.step >= self.steps
                held_out = self.evaluate() if due else None
                if due:
                    self.save(folder)
                report(Progress(self.step, self.steps, tokens, loss, held_out))
                if self.step >= self.steps:
                    return

    def _optimise(self, batch: Batch) -> float:
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate()
        with torch.autocast(self.device.type, torch.bfloat16):
            loss = weighted(training_time_test(self.model, self.embedding, batch, self.spec.unroll), self.spec.decay)
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.spec.clip)
        self.optimizer.step()
        return float(loss.detach())

    @torch.no_grad()
    def evaluate(self) -> list[float]:
        """Share of held-out positions, whether in the vocabulary or not, that each chain step gets right."""
        correct, seen = torch.zeros(self.spec.unroll), 0
        rng = torch.Generator().manual_seed(0)
        for i, raw in enumerate(batches(self.held_out, self.spec, rng)):
            if i * self.spec.batch * self.spec.length >= 8192:
                break
            with torch.autocast(self.device.type, torch.bfloat16):
                steps = training_time_test(self.model, self.embedding, self.batch(raw), self.spec.unroll)
            correct += torch.stack([step.correct for step in steps]).cpu()
            seen += raw["tokens"].numel()
        return (correct / seen).tolist()

    def save(self, folder: Path) -> None:
        state = {
            "step": self.step,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }
        write_atomically(folder / "state.pt", lambda path: torch.save(state, path))
        eagle3.save(self.model, folder / "draft", torch.bfloat16)

    def resume(self, folder: Path) -> None:
        path = folder / "state.pt"
        if path.exists():
            state = torch.load(path, weights_only=True)
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.step = state["step"]
