"""``tracedraft train``: corpus, then draft."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from omegaconf import DictConfig
from rich.console import Console
from rich.progress import Progress, TextColumn, TimeRemainingColumn

from tracedraft.config import build_spec, plain
from tracedraft.errors import UserError
from tracedraft.models.weights import write_atomically
from tracedraft.training import loop, synthesis


def keep_settings(folder: Path, settings: dict) -> None:
    """Raises UserError when the folder holds a corpus or a training made with other settings."""
    file = folder / "settings.json"
    if file.exists() and json.loads(file.read_text()) != settings:
        raise UserError(f"{folder} holds a training with other settings ({file}): choose another out=FOLDER")
    write_atomically(file, lambda path: path.write_text(json.dumps(settings, indent=1) + "\n"))


def train_draft(cfg: DictConfig, folder: Path) -> None:
    """Synthesise what is missing of the corpus in ``folder``, then train; the draft is in ``folder/draft``.

    Raises:
        UserError: a draft kind that cannot be trained, or too little disk.
    """
    if cfg.draft.name != "eagle3":
        raise UserError(f"draft={cfg.draft.name!r} has no trainer: choose draft=eagle3")
    text: synthesis.SynthesisSpec = build_spec(cfg.synthesis, "synthesis")
    spec: loop.TrainingSpec = build_spec(cfg.training, "training")
    if text.length % spec.length:
        raise UserError(f"training.length={spec.length} does not divide synthesis.length={text.length}")
    target_spec = build_spec(cfg.target, "target")
    if cfg.threads is not None:
        torch.set_num_threads(cfg.threads)
    served = target_spec.build()
    keep_settings(folder, {"target": served.provenance, "synthesis": plain(text), "training": plain(spec)})
    console = Console(stderr=True)
    with Progress(
        *Progress.get_default_columns()[:2],
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
        console=console,
        disable=not console.is_terminal,
    ) as bar:
        corpus = folder / "corpus"
        task = bar.add_task("synthesis", total=text.tokens, note="")
        for written in synthesis.synthesise(served, text, corpus):
            bar.advance(task, written)
        trainer = loop.Trainer(served.target, synthesis.shards(corpus), spec)
        trainer.resume(folder)
        task = bar.add_task("training", total=trainer.steps, completed=trainer.step, note="")
        notes: list[str] = []

        def report(done: loop.Progress) -> None:
            if done.held_out is not None:
                held_out = " ".join(f"{share:.3f}" for share in done.held_out)
                notes[:] = [f"held-out accuracy by depth {held_out}"]
                line = f"step {done.step}/{done.steps}  loss {done.loss:.3f}  {notes[0]}"
                bar.console.print(line, highlight=False)
            bar.update(task, completed=done.step, note=f"loss {done.loss:.3f}  {''.join(notes)}")

        trainer.run(folder, report)
    print(f"draft: {folder / 'draft'}")
