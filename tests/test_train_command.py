"""``tracedraft train`` as a whole: what it leaves, that it can be killed anywhere, and its refusals."""

from __future__ import annotations

import json
import time
from functools import partial
from pathlib import Path
from random import Random

import pytest
from conftest import in_child
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig

from tracedraft.config import shipped_dir
from tracedraft.errors import UserError
from tracedraft.training.command import train_draft

SMALL = (
    "target=tiny", "draft=eagle3", "text.tokens=6144", "text.batch=16", "text.length=128", "training.length=64",
    "training.batch=8", "training.epochs=2", "training.draft_vocab_size=200", "training.evaluate_every=4",
    "training.held_out_tokens=512",
)  # fmt: skip


def composed(folder: Path, *overrides: str) -> DictConfig:
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(shipped_dir("conf")), version_base="1.3"):
        return compose("train", [*SMALL, f"out={folder}", *overrides])


def trained(folder: Path, *overrides: str) -> bytes:
    train_draft(composed(folder, *overrides), folder)
    return (folder / "draft" / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> tuple[Path, bytes]:
    folder = tmp_path_factory.mktemp("train") / "whole"
    return folder, trained(folder)


def test_it_leaves_corpus_draft_curve_and_settings(whole, capfd):
    folder, _ = whole
    assert {path.name for path in folder.iterdir()} == {"corpus", "curve.jsonl", "draft", "settings.json", "state.pt"}
    curve = [json.loads(line) for line in (folder / "curve.jsonl").read_text().splitlines()]
    assert [point["step"] for point in curve] == [4, 8, 12, 16]
    assert all({"tau", "tau_greedy", "tau_sampled", "coverage", "tokens", "loss"} <= set(point) for point in curve)
    assert json.loads((folder / "settings.json").read_text())["text"]["tokens"] == 6144


def test_killed_anywhere_it_ends_with_the_same_draft(whole, tmp_path):
    """Twelve kills, in text and in training; the draft is the uninterrupted one's, byte for byte."""
    began = time.monotonic()
    in_child(partial(train_draft, composed(tmp_path / "timed"), tmp_path / "timed"), None)
    seconds, random, kills, trial = time.monotonic() - began, Random(1), 0, 0
    while kills < 12:
        trial += 1
        folder = tmp_path / str(trial)
        while not in_child(partial(train_draft, composed(folder), folder), random.uniform(0.1, 1.0) * seconds):
            kills += 1
        assert (folder / "draft" / "model.safetensors").read_bytes() == whole[1]


def test_the_same_command_again_does_nothing_more(whole):
    folder, draft = whole
    before = (folder / "curve.jsonl").read_bytes()
    assert trained(folder) == draft
    assert (folder / "curve.jsonl").read_bytes() == before


def test_other_settings_are_refused_by_name_and_a_corpus_carries_over(whole, tmp_path):
    folder, _ = whole
    with pytest.raises(UserError, match=r"training\.lr=.*now 0\.5.*choose another out"):
        trained(folder, "training.lr=0.5")
    with pytest.raises(UserError, match=r"corpus.*text\.seed=0, now 1.*choose another corpus"):
        trained(tmp_path, f"corpus={folder}/corpus", "text.seed=1")
    more = ("text.tokens=8192", f"corpus={folder}/corpus", f"training.init={folder}/draft")
    stamps = {path: path.stat().st_mtime_ns for path in (folder / "corpus").glob("shard-*")}
    assert trained(tmp_path / "on", *more)
    assert {path: path.stat().st_mtime_ns for path in stamps} == stamps
    assert len(list((folder / "corpus").glob("shard-*"))) == 4


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("draft=tiny", "no trainer"),
        ("training.length=48", "does not divide text.length"),
        ("training.init=/nowhere", "training.init=/nowhere: no such folder"),
        ("text=conversations", "text.path"),
    ],
)
def test_bad_input_is_refused_before_any_text(tmp_path, override, says):
    overrides = [o for o in SMALL if not o.startswith("text.tokens")] if override == "text=conversations" else SMALL
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(shipped_dir("conf")), version_base="1.3"):
        cfg = compose("train", [*overrides, f"out={tmp_path}/out", override])
    with pytest.raises(UserError, match=says):
        train_draft(cfg, tmp_path / "out")
    assert not list(tmp_path.glob("**/shard-*"))
