"""Offline training of a draft on a cached corpus, whatever its kind."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from tracedraft.errors import UserError
from tracedraft.files import write_atomically
from tracedraft.target import LlamaTarget
from tracedraft.training.corpus import read_shard, rows_of
from tracedraft.training.replay import Tally, replay
from tracedraft.training.spec import DRAFT, TrainingSpec

CURVE, STATE = "curve.jsonl", "state.pt"
CHAIN = 5  # depth of the held-out replay: decode=chain's own
HOPELESS = 10  # steps in a row without a finite gradient


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


def check_disk(spec: TrainingSpec, target: LlamaTarget, folder: Path) -> int:
    """Bytes that training will still need in ``folder``: of its state, and of the one that it is replaced by.

    Raises:
        UserError: the disk has too little room for that.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = 3 + (spec.average is not None)  # weights, their moments, their average
    missing = 1 if (folder / STATE).exists() else 2
    needed, free = 4 * spec.count(target) * (tensors * missing + 1), shutil.disk_usage(folder).free
    if needed > 0.95 * free:
        raise UserError(
            f"the training's state needs {needed / 2**30:.1f} GiB in {folder}, where {free / 2**30:.1f} GiB are "
            "free: choose another out=FOLDER"
        )
    return needed


KEPT = ("step", "tokens", "seconds", "best", "worse", "curve", "average")


class Trainer:
    """Training state, all of which ``state.pt`` keeps: model, average, optimiser, place in the schedule, and curve.

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
        self.carried = False  # the average was begun by an earlier training
        rows = [rows_of(f, spec.length) for f in self.files]
        self.steps = spec.epochs * sum(math.ceil(n / spec.batch) for n in rows)
        self.step, self.tokens, self.seconds, self.best, self.worse, self.skipped = 0, 0, 0.0, 0.0, 0, 0
        self.curve: list[dict[str, Any]] = []
        if spec.after is not None:
            self._follow(Path(spec.after))

    def _follow(self, folder: Path) -> None:
        """Take over weights, average and moments of the training in ``folder``; schedule and curve begin anew."""
        state = torch.load(folder / STATE, weights_only=True, map_location=self.device)
        self.model.load_state_dict(state["model"])
        self.pupil.resumed()
        self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": state["optimizer"]["state"]})
        if self.average is not None:
            self.carried = state["average"] is not None
            self.average = state["average"] or [p.detach().clone() for p in self.model.parameters()]

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
            begun = 1.0 if self.carried else (1 + self.step) / (10 + self.step)  # of few steps, the last ones
            decay = min(self.spec.average, begun)
            get_ema_multi_avg_fn(decay)(self.average, tuple(self.model.parameters()), self.step)

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """The model has the average's weights within, where there is one."""
        if self.average is None:
            yield
            return
        parameters = list(self.model.parameters())
        with torch.no_grad():
            own = [parameter.clone() for parameter in parameters]
            try:
                put(parameters, self.average)
                yield
            finally:
                put(parameters, own)

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


def put(parameters: list[nn.Parameter], weights: list[Tensor]) -> None:
    for parameter, weight in zip(parameters, weights, strict=True):
        parameter.copy_(weight)
