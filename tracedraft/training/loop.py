"""Offline training of a draft on a cached corpus, whatever its kind."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from tracedraft.errors import UserError
from tracedraft.files import write_atomically
from tracedraft.target import LlamaTarget
from tracedraft.training.corpus import read_shard, rows_of
from tracedraft.training.objective import OBJECTIVES
from tracedraft.training.replay import Tally, replay

CURVE, STATE, DRAFT = "curve.jsonl", "state.pt", "draft"
CHAIN = 5  # depth of the held-out replay: decode=chain's own
HOPELESS = 10  # steps in a row without a finite gradient


Model = TypeVar("Model", bound=nn.Module)


class Pupil(ABC, Generic[Model]):
    """A draft while it is trained.

    Attributes:
        model: all that is trained, in fp32, on the target's device.
    """

    model: Model

    @abstractmethod
    def loss(self, raw: dict[str, Tensor]) -> Tensor:
        """Of rows of the corpus as they are in a shard, on the model's device."""

    @abstractmethod
    def hits(self, raw: dict[str, Tensor], depths: int) -> Tensor:
        """[K, B, T] on the CPU: whether the chain from slot i says token i+2+k at step k; past a row's end, no."""

    @abstractmethod
    def sayable(self, tokens: Tensor) -> Tensor:
        """Which of ``tokens`` the draft vocabulary holds."""

    @abstractmethod
    def save(self, folder: Path) -> None: ...

    @abstractmethod
    def resumed(self) -> None:
        """The model was given other weights."""


@dataclass(frozen=True)
class TrainingSpec(ABC):
    """How to train.

    Attributes:
        init: a trained draft to go on from, its shape and vocabulary with it; None: a new one.
        after: the folder of an earlier training, whose last weights and moments to go on from instead.
        loss: "ce", soft cross-entropy, or "lk", -log of the mass that rejection sampling accepts.
        epochs, batch, length: passes over the corpus; rows of ``length`` tokens an optimiser step.
        answers_only: learn what the target answers, and not what stands between answers.
        lr, warmup_steps, final_lr: AdamW's, peak of a cosine schedule, and the share of it that it ends at.
        average: decay a step of a running average of the weights, judged and kept in their place; None: none.
        evaluate_every: optimiser steps between held-out checks and checkpoints.
        held_out_tokens: replayed at each check.
        patience: checks without a better tau before training stops; None: never.
    """

    init: str | None
    after: str | None
    loss: str
    answers_only: bool
    epochs: int
    batch: int
    length: int
    lr: float
    warmup_steps: int
    final_lr: float
    average: float | None
    betas: tuple[float, float]
    clip: float
    weight_decay: float
    evaluate_every: int
    held_out_tokens: int
    patience: int | None
    seed: int

    def __post_init__(self) -> None:
        counts = ("epochs", "batch", "length", "warmup_steps", "evaluate_every", "held_out_tokens")
        self._at_least_one(*counts)
        ranges = {
            "lr": (self.lr > 0, "above 0"),
            "final_lr": (0 <= self.final_lr <= 1, "a share from 0 to 1"),
            "average": (self.average is None or 0 <= self.average < 1, "a decay from 0 to below 1, or null"),
            "betas": (all(0 <= beta < 1 for beta in self.betas), "two from 0 to below 1"),
            "clip": (self.clip > 0, "above 0"),
            "weight_decay": (self.weight_decay >= 0, "0 or more"),
            "length": (self.length > 1, "at least 2"),
        }
        for key, (fits, what) in ranges.items():
            if not fits:
                raise UserError(f"training.{key}={getattr(self, key)}: expected {what}")
        if self.init is not None and self.after is not None:
            raise UserError(f"training.after={self.after}: expected null beside training.init={self.init}")
        if self.loss not in OBJECTIVES:
            raise UserError(f"training.loss={self.loss}: expected one of {', '.join(OBJECTIVES)}")
        if self.patience is not None and self.patience < 1:
            raise UserError(f"training.patience={self.patience}: expected at least 1, or null for no early stop")

    def _at_least_one(self, *keys: str) -> None:
        for key in keys:
            if getattr(self, key) < 1:
                raise UserError(f"training.{key}={getattr(self, key)}: expected at least 1")

    @property
    def start(self) -> Path | None:
        """The draft that gives shape and vocabulary."""
        if self.after is not None:
            return Path(self.after) / DRAFT
        return None if self.init is None else Path(self.init)

    @abstractmethod
    def check(self, target: LlamaTarget) -> None:
        """Raises UserError for what cannot be trained for this target, before any text is made."""

    @abstractmethod
    def count(self, target: LlamaTarget) -> int:
        """How many weights are trained."""

    @abstractmethod
    def pupil(self, target: LlamaTarget, files: list[Path]) -> Pupil:
        """A new draft, or the one to go on from, given the shards that it will be trained on."""


@dataclass(frozen=True)
class HeldOut:
    """Replay of the held-out answers as chains of five, by how the target wrote them."""

    greedy: Tally
    sampled: Tally

    @property
    def tau(self) -> float:
        """Pooled over both kinds: what early stopping goes by.

        Raises:
            UserError: there is no answer in it.
        """
        both = Tally(CHAIN)
        both.add(self.greedy)
        both.add(self.sampled)
        if both.tau is None:
            raise UserError(
                "the held-out text, the corpus's first shard, holds no answer to judge a draft by: raise "
                "training.held_out_tokens or text.batch"
            )
        return both.tau


@dataclass(frozen=True)
class Progress:
    """After a step, or before the first; ``checked``, with a new point of the curve."""

    step: int
    steps: int
    loss: float | None
    checked: bool


def batches(files: list[Path], spec: TrainingSpec, rng: torch.Generator) -> Iterator[dict[str, Tensor]]:
    """Every row of every shard once, cut to ``length`` tokens, in random order."""
    for index in torch.randperm(len(files), generator=rng).tolist():
        shard = read_shard(files[index])
        del shard["greedy"]
        rows = {n: t.unflatten(1, (-1, spec.length)).flatten(0, 1) for n, t in shard.items()}
        for picked in torch.randperm(len(rows["tokens"]), generator=rng).split(spec.batch):
            yield {name: tensor[picked] for name, tensor in rows.items()}


def check(spec: TrainingSpec, target: LlamaTarget, shards: int) -> None:
    """Raises UserError for what cannot be trained, before any text is made."""
    if shards < 2:
        raise UserError(
            "training needs at least two corpus shards, one of them held out: raise text.tokens, or lower text.batch "
            "for a file of few conversations"
        )
    spec.check(target)


def check_disk(spec: TrainingSpec, target: LlamaTarget, folder: Path) -> None:
    """Raises UserError when the disk has too little room for the state and for the one that it is replaced by."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = 3 + (spec.average is not None)  # weights, their moments, their average
    missing = 1 if (folder / STATE).exists() else 2
    needed, free = 4 * spec.count(target) * (tensors * missing + 1), shutil.disk_usage(folder).free
    if needed > 0.95 * free:
        raise UserError(
            f"the training's state needs {needed / 2**30:.1f} GiB in {folder}, where {free / 2**30:.1f} GiB are "
            "free: choose another out=FOLDER"
        )


KEPT = ("step", "tokens", "seconds", "best", "worse", "curve", "average")


class Trainer:
    """Training state, all of which ``state.pt`` keeps: model, optimiser, position in the schedule, and the curve.

    ``curve.jsonl`` is written from the kept curve, so that no kill between the two loses or doubles a point.
    """

    def __init__(self, target: LlamaTarget, files: list[Path], spec: TrainingSpec):
        check(spec, target, len(files))
        self.target, self.spec = target, spec
        self.files, self.held_out = files[1:], files[:1]
        self.device = target.model.norm.weight.device
        self.pupil = spec.pupil(target, self.files)
        self.model = self.pupil.model
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=spec.lr, betas=spec.betas, weight_decay=spec.weight_decay, fused=True
        )
        self.average = None if spec.average is None else [p.detach().clone() for p in self.model.parameters()]
        rows = [rows_of(f, spec.length) for f in self.files]
        self.steps = spec.epochs * sum(math.ceil(n / spec.batch) for n in rows)
        self.step, self.tokens, self.seconds, self.best, self.worse, self.skipped = 0, 0, 0.0, 0.0, 0, 0
        self.curve: list[dict[str, Any]] = []
        if spec.after is not None:
            self._follow(Path(spec.after))

    def _follow(self, folder: Path) -> None:
        """Take over weights and moments of the training in ``folder``; schedule and curve begin anew."""
        state = torch.load(folder / STATE, weights_only=True, map_location=self.device)
        self.model.load_state_dict(state["model"])
        self.pupil.resumed()
        self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": state["optimizer"]["state"]})
        if self.average is not None:
            self.average = [p.detach().clone() for p in self.model.parameters()]

    def rate(self) -> float:
        warm = min(1.0, (self.step + 1) / self.spec.warmup_steps)
        fall = 0.5 + 0.5 * math.cos(math.pi * self.step / self.steps)
        return self.spec.lr * warm * (self.spec.final_lr + (1 - self.spec.final_lr) * fall)

    @property
    def finished(self) -> bool:
        return self.step >= self.steps or (self.spec.patience is not None and self.worse >= self.spec.patience)

    def run(self, folder: Path, report: Callable[[Progress], None]) -> None:
        each, earlier, began, losses = self.steps // self.spec.epochs, self.seconds, time.monotonic(), []
        if not self.curve:  # a draft to go on from is only replaced by a better one
            self.keep_best(folder, None)
            report(Progress(0, self.steps, None, True))
        while not self.finished:
            rng = torch.Generator().manual_seed(self.spec.seed * 1000 + self.step // each)
            for raw in itertools.islice(batches(self.files, self.spec, rng), self.step % each, None):
                losses.append(self._optimise(self._here(raw)))
                self.tokens += raw["tokens"].numel()
                self.step += 1
                due = self.step % self.spec.evaluate_every == 0 or self.step >= self.steps
                if due:
                    self.seconds = earlier + time.monotonic() - began
                    self.keep_best(folder, sum(losses) / len(losses))
                report(Progress(self.step, self.steps, losses[-1], due))
                losses = [] if due else losses
                if self.finished:
                    return

    def _here(self, raw: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor.to(self.device) for name, tensor in raw.items()}

    def _optimise(self, raw: dict[str, Tensor]) -> float:
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate()
        with torch.autocast(self.device.type, torch.bfloat16):
            loss = self.pupil.loss(raw)
        self.model.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.spec.clip)
        if norm.isfinite():
            self.optimizer.step()
            self._average()
            self.skipped = 0
        else:  # one such step would leave no finite weight, neither here nor in the state on disk
            self.skipped += 1
        if self.skipped == HOPELESS:
            raise UserError(
                f"training.lr={self.spec.lr}: no finite gradient in {HOPELESS} steps up to step {self.step}; "
                "lower it, and go on from the draft that was kept with training.init"
            )
        return float(loss.detach())

    @torch.no_grad()
    def _average(self) -> None:
        if self.average is not None and self.spec.average is not None:
            decay = min(self.spec.average, (1 + self.step) / (10 + self.step))  # of few steps, the last ones
            get_ema_multi_avg_fn(decay)(self.average, tuple(self.model.parameters()), self.step)

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """The model has the average's weights within."""
        with torch.no_grad():
            pairs = list(zip(self.model.parameters(), self.average or (), strict=self.average is not None))
            own = [parameter.clone() for parameter, _ in pairs]
            try:
                for parameter, mean in pairs:
                    parameter.copy_(mean)
                yield
            finally:
                for (parameter, _), weight in zip(pairs, own, strict=True):
                    parameter.copy_(weight)

    @torch.no_grad()
    def evaluate(self) -> HeldOut:
        kinds = {False: Tally(CHAIN), True: Tally(CHAIN)}
        shard = read_shard(self.held_out[0])
        rows = max(1, self.spec.held_out_tokens // shard["tokens"].shape[1])
        for some in torch.arange(min(rows, len(shard["tokens"]))).split(8):
            raw = self._here({name: shard[name][some] for name in ("tokens", "taps")})
            with torch.autocast(self.device.type, torch.bfloat16):
                right = self.pupil.hits(raw, CHAIN)
            sayable = self.pupil.sayable(raw["tokens"]).cpu()
            for i, row in enumerate(some.tolist()):
                tally = replay(right[:, i], shard["answer"][row].tolist())
                tally.tokens = int(shard["answer"][row].sum())
                tally.sayable = int((sayable[i] & shard["answer"][row]).sum())
                kinds[bool(shard["greedy"][row])].add(tally)
        return HeldOut(kinds[True], kinds[False])

    def keep_best(self, folder: Path, loss: float | None) -> None:
        """Evaluate, write the draft if it is the best so far, and state and curve in any case."""
        with self.averaged():
            held_out = self.evaluate()
            better = held_out.tau > self.best
            if better:
                self.pupil.save(folder / DRAFT)
        self.best, self.worse = max(self.best, held_out.tau), 0 if better else self.worse + 1
        self.curve.append(self._point(held_out, loss))
        state = {
            **{name: getattr(self, name) for name in KEPT},
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }
        write_atomically(folder / STATE, lambda path: torch.save(state, path), "choose another out=FOLDER")
        self._write_curve(folder)

    def _point(self, held_out: HeldOut, loss: float | None) -> dict[str, Any]:
        """One line of the curve; tokens and ``seconds`` of all sittings together, ``loss`` since the line before."""
        greedy, sampled = held_out.greedy, held_out.sampled
        return {
            "step": self.step,
            "tokens": self.tokens,
            "seconds": round(self.seconds, 1),
            "loss": loss,
            "tau": held_out.tau,
            "tau_greedy": greedy.tau,
            "tau_sampled": sampled.tau,
            "acceptance_greedy": greedy.acceptance,
            "acceptance_sampled": sampled.acceptance,
            "coverage": sampled.coverage,
        }

    def _write_curve(self, folder: Path) -> None:
        lines = "".join(json.dumps(point) + "\n" for point in self.curve)
        write_atomically(folder / CURVE, lambda path: path.write_text(lines), "choose another out=FOLDER")

    def resume(self, folder: Path) -> None:
        path = folder / STATE
        if path.exists():
            state = torch.load(path, weights_only=True, map_location=self.device)
            self.model.load_state_dict(state["model"])
            self.pupil.resumed()
            self.optimizer.load_state_dict(state["optimizer"])
            for name in KEPT:
                setattr(self, name, state[name])
            self._write_curve(folder)
