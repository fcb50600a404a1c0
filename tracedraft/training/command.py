"""``tracedraft train``: corpus, then draft."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from rich.console import Console
from rich.progress import Progress, TextColumn, TimeRemainingColumn

from tracedraft.config import build_spec, plain
from tracedraft.errors import UserError
from tracedraft.files import write_atomically
from tracedraft.target import Served
from tracedraft.training import corpus, loop


def keep_settings(folder: Path, settings: dict[str, Any], instead: str) -> None:
    """Raises UserError when the folder holds what was made with other settings."""
    file = folder / "settings.json"
    if file.exists() and (kept := json.loads(file.read_text())) != settings:
        raise UserError(f"{folder} was made with other settings ({', '.join(differing(kept, settings))}): {instead}")
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(file, lambda path: path.write_text(json.dumps(settings, indent=1) + "\n"))


def differing(a: Any, b: Any, key: str = "") -> list[str]:
    if isinstance(a, dict) and isinstance(b, dict):
        return [d for k in sorted(a | b) for d in differing(a.get(k), b.get(k), f"{key}.{k}".lstrip("."))]
    return [] if a == b else [f"{key}={json.dumps(a)}, now {json.dumps(b)}"]


def train_draft(cfg: DictConfig, folder: Path) -> None:
    """Write what is missing of the corpus, then train; the best draft is in ``folder/draft``.

    Raises:
        UserError: a draft kind that cannot be trained, or too little disk.
    """
    if cfg.draft.name != "eagle3":
        raise UserError(f"draft={cfg.draft.name!r} has no trainer: choose draft=eagle3")
    text: corpus.TextSpec = build_spec(cfg.text, "text")
    spec: loop.TrainingSpec = build_spec(cfg.training, "training")
    if text.length % spec.length:
        raise UserError(f"training.length={spec.length} does not divide text.length={text.length}")
    if spec.init is not None and not Path(spec.init).is_dir():
        raise UserError(f"training.init={spec.init}: no such folder")
    target_spec = build_spec(cfg.target, "target")
    if cfg.threads is not None:
        torch.set_num_threads(cfg.threads)
    served = target_spec.build()
    loop.check(spec, served.target, len(text.makers(served)))
    made = plain(text)
    source = {name: value for name, value in made.items() if name != "tokens"}
    keep_settings(Path(cfg.corpus), {"target": served.provenance, "text": source}, "choose another corpus=FOLDER")
    settings = {"target": served.provenance, "text": made, "training": plain(spec)}
    keep_settings(folder, settings, "choose another out=FOLDER; corpus=FOLDER and training.init=FOLDER carry over")
    console = Console(stderr=True)
    columns = (*Progress.get_default_columns()[:3], TimeRemainingColumn(), TextColumn("{task.fields[note]}"))
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        write_corpus(served, text, Path(cfg.corpus), cfg.paths.data, bar)
        shards = [corpus.shard_file(Path(cfg.corpus), i) for i in range(len(text.makers(served)))]
        train(served, shards, spec, folder, bar)
    print(f"draft: {folder / 'draft'}")


def write_corpus(served: Served, text: corpus.TextSpec, folder: Path, benchmarks: str | None, bar: Progress) -> None:
    prompts = corpus.benchmark_prompts(Path(benchmarks) if benchmarks else None)
    total = len(text.makers(served)) * text.batch * text.length
    have = min(len(corpus.shards(folder)) * text.batch * text.length, total)
    task = bar.add_task("corpus", total=total, completed=have, note="tokens")
    shard, began, new = text.batch * text.length, time.monotonic(), 0
    for written in corpus.write(served, text, folder, prompts):
        bar.advance(task, written)
        new += written
        if new % shard == 0 and not bar.console.is_terminal:
            rate = new / (time.monotonic() - began)
            left = (total - have - new) / rate / 60
            bar.console.print(f"corpus: {have + new}/{total} tokens, {rate:.0f} tokens/s, {left:.0f} min left")


def train(served: Served, files: list[Path], spec: loop.TrainingSpec, folder: Path, bar: Progress) -> None:
    trainer = loop.Trainer(served.target, files, spec)
    trainer.resume(folder)
    task = bar.add_task("training", total=trainer.steps, completed=trainer.step, note="")
    began, start, held_out = time.monotonic(), trainer.step, ""

    def report(done: loop.Progress) -> None:
        nonlocal held_out
        if done.held_out is not None:
            point = curve_point(done, time.monotonic() - began)
            with (folder / "curve.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(point) + "\n")
            held_out = f"held-out tau {show(point['tau_greedy'])} greedy, {show(point['tau_sampled'])} sampled"
            left = point["seconds"] / (done.step - start) * (done.steps - done.step) / 60
            line = f"step {done.step}/{done.steps}  loss {done.loss:.3f}  {held_out}  {left:.0f} min left"
            bar.console.print(line, highlight=False)
        bar.update(task, completed=done.step, note=f"loss {done.loss:.3f}  {held_out}")

    trainer.run(folder, report)
    if trainer.step < trainer.steps:
        print(f"stopped early: {spec.patience} checks without a better tau than {trainer.best:.3f}")


def curve_point(done: loop.Progress, seconds: float) -> dict[str, Any]:
    """One line of ``curve.jsonl``; ``seconds`` since this sitting began."""
    assert done.held_out is not None
    greedy, sampled = done.held_out.greedy, done.held_out.sampled
    return {
        "step": done.step,
        "tokens": done.tokens,
        "seconds": round(seconds, 1),
        "loss": done.loss,
        "tau": done.held_out.tau,
        "tau_greedy": greedy.tau,
        "tau_sampled": sampled.tau,
        "acceptance_greedy": greedy.acceptance,
        "acceptance_sampled": sampled.acceptance,
        "coverage": sampled.coverage,
    }


def show(value: float | None) -> str:
    return "—" if value is None else f"{value:.3f}"
