"""``tracedraft train``: corpus, then draft."""

from __future__ import annotations

import hashlib
import json
import time
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from rich.console import Console
from rich.progress import Progress, TextColumn, TimeRemainingColumn

from tracedraft.config import build_spec, check_settings, differing, plain
from tracedraft.errors import UserError
from tracedraft.files import exclusive, remove_scratch, write_atomically
from tracedraft.target import Served
from tracedraft.training import corpus, loop
from tracedraft.training.spec import DRAFT, TrainingSpec

LOCK = ".lock"
OTHER_CORPUS = "choose another corpus=FOLDER"
OTHER_OUT = (
    "choose another out=FOLDER; corpus=FOLDER carries over, and training.after or training.init goes on from here"
)


def keep_settings(folder: Path, settings: dict[str, Any], instead: str) -> None:
    """Raises UserError when the folder holds what was made with other settings."""
    file = folder / "settings.json"
    if file.exists() and (others := differing(json.loads(file.read_text()), settings)):
        raise UserError(f"{folder} was made with other settings ({', '.join(others)}): {instead}")
    write_atomically(file, lambda path: path.write_text(json.dumps(settings, indent=1) + "\n"), instead)


def train_draft(cfg: DictConfig, folder: Path) -> None:
    """Write what is missing of the corpus, then train; the best draft is in ``folder/draft``.

    Raises:
        UserError: a draft kind that cannot be trained, a folder of other settings or in use, or too little disk.
    """
    check_settings(cfg)
    if "training" not in cfg:
        raise UserError(f"draft={cfg.draft.name!r} has no trainer: choose draft=eagle3 or draft=lm")
    text: corpus.TextSpec = build_spec(cfg.text, "text")
    spec: TrainingSpec = build_spec(cfg.training, "training")
    if text.length % spec.length:
        raise UserError(f"training.length={spec.length} does not divide text.length={text.length}")
    if spec.init is not None and not Path(spec.init).is_dir():
        raise UserError(f"training.init={spec.init}: no such folder")
    if spec.after is not None and not (Path(spec.after) / loop.STATE).is_file():
        raise UserError(
            f"training.after={spec.after}: holds no {loop.STATE}, which a training leaves in its out=FOLDER"
        )
    if Path(cfg.corpus).resolve() == folder.resolve():
        raise UserError(f"corpus={cfg.corpus}: expected another folder than out, which the draft goes to")
    prompts = corpus.benchmark_prompts(Path(cfg.paths.data) if cfg.paths.data else None)
    target_spec = build_spec(cfg.target, "target")
    if cfg.threads is not None:
        torch.set_num_threads(cfg.threads)
    served = target_spec.build()
    if text.length > served.target.context:
        raise UserError(f"text.length={text.length}: the target reads at most {served.target.context} tokens")
    makers = text.makers(served, corpus.known_runs(prompts))
    loop.check(spec, served.target, len(makers))
    reserved = loop.check_disk(spec, served.target, folder)
    made = identity(served, text, prompts)
    console = Console(stderr=True)
    columns = (*Progress.get_default_columns()[:3], TimeRemainingColumn(), TextColumn("{task.fields[note]}"))
    bar = Progress(*columns, console=console, disable=not console.is_terminal)
    with exclusive(folder / LOCK, OTHER_OUT), bar:
        files = [corpus.shard_file(Path(cfg.corpus), i) for i in range(len(makers))]
        with exclusive(Path(cfg.corpus) / LOCK, OTHER_CORPUS):
            source = {name: value for name, value in made["text"].items() if name != "tokens"}
            keep_settings(Path(cfg.corpus), {**made, "text": source}, OTHER_CORPUS)
            keep_settings(folder, {**made, "training": plain(spec)}, OTHER_OUT)
            console.print(f"text that quotes one of {len(prompts)} benchmark prompts is left out")
            apart = folder.stat().st_dev != Path(cfg.corpus).stat().st_dev
            write_corpus(served, text, makers, Path(cfg.corpus), 0 if apart else reserved, bar)
        remove_scratch(folder / DRAFT)
        train(served, files, spec, folder, bar)
    print(f"draft: {folder / DRAFT}")


def identity(served: Served, text: corpus.TextSpec, prompts: list[str]) -> dict[str, Any]:
    """What decides a corpus: with another of these, shards of the same name hold something else."""
    target = served.target
    shape = {"taps": list(target.taps), "dtype": str(target.model.norm.weight.dtype).removeprefix("torch.")}
    digest = f"sha256:{hashlib.sha256(json.dumps(prompts).encode()).hexdigest()}"
    return {
        "target": {**served.provenance, **shape, "context": target.context},
        "text": text.identity(),
        "paths.data": digest,
    }


def write_corpus(
    served: Served, text: corpus.TextSpec, makers: list[corpus.Maker], folder: Path, reserved: int, bar: Progress
) -> None:
    """``reserved``: bytes of its disk that are needed for other things."""
    shard, began, new = text.batch * text.length, time.monotonic(), 0
    total, have = len(makers) * shard, sum(corpus.shard_file(folder, i).exists() for i in range(len(makers))) * shard
    task = bar.add_task("corpus", total=total, completed=have, note="tokens")
    for written in corpus.write(served, text, makers, folder, reserved):
        bar.advance(task, written)
        new += written
        if new % shard == 0 and not bar.console.is_terminal:
            rate = new / (time.monotonic() - began)
            left = (total - have - new) / rate / 60
            bar.console.print(f"corpus: {have + new}/{total} tokens, {rate:.0f} tokens/s, {left:.0f} min left")


def train(served: Served, files: list[Path], spec: TrainingSpec, folder: Path, bar: Progress) -> None:
    trainer = loop.Trainer(served.target, files, spec)
    trainer.resume(folder)
    task = bar.add_task("training", total=trainer.steps, completed=trainer.step, note="")
    began, start, held_out = time.monotonic(), trainer.step, ""

    def report(done: loop.Progress) -> None:
        nonlocal held_out
        if done.checked:
            point = trainer.curve[-1]
            held_out = f"held-out tau {show(point['tau_greedy'])} greedy, {show(point['tau_sampled'])} sampled"
            taken = (time.monotonic() - began) / (done.step - start) if done.step > start else None
            left = f"  {taken * (done.steps - done.step) / 60:.0f} min left" if taken else ""
            said = f"step {done.step}/{done.steps}  loss {show(point['loss'])}  {held_out}{left}"
            bar.console.print(said, highlight=False)
        bar.update(task, completed=done.step, note=f"loss {show(done.loss)}  {held_out}")

    trainer.run(folder, report)
    if trainer.step < trainer.steps:
        print(f"stopped early: {spec.patience} checks without a better tau than {trainer.best:.3f}")


def show(value: float | None) -> str:
    return "—" if value is None else f"{value:.3f}"
