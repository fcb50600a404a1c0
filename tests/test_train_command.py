"""``tracedraft train`` as a whole: what it leaves, that it can be killed anywhere, and its refusals."""

from __future__ import annotations

import json
import shutil
import time
from functools import partial
from pathlib import Path
from random import Random

import pytest
import torch
from conftest import in_child, small_disk
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig
from safetensors.torch import load_file

from tracedraft.config import shipped_dir
from tracedraft.errors import UserError
from tracedraft.files import exclusive
from tracedraft.training import loop
from tracedraft.training.command import train_draft

SMALL = (
    "target=tiny", "draft=eagle3", "text.tokens=6144", "text.batch=16", "text.length=128", "training.length=64",
    "training.batch=8", "training.epochs=2", "training.draft_vocab_size=200", "training.evaluate_every=4",
    "training.held_out_tokens=2048",
)  # fmt: skip


# Of a draft that is a language model, whose vocabulary is the target's.
SMALL_LM = (*(s for s in SMALL if "draft" not in s), "draft=lm", "training.hidden_size=32", "training.layers=1")


def composed(folder: Path, *overrides: str, small: tuple[str, ...] = SMALL) -> DictConfig:
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(shipped_dir("conf")), version_base="1.3"):
        return compose("train", [*small, f"out={folder}", *overrides])


def trained(folder: Path, *overrides: str, small: tuple[str, ...] = SMALL) -> bytes:
    train_draft(composed(folder, *overrides, small=small), folder)
    return (folder / "draft" / "model.safetensors").read_bytes()


KEPT = {".lock", "corpus", "curve.jsonl", "draft", "settings.json", "state.pt"}


def curve(folder: Path) -> list[dict]:
    """Without its seconds."""
    points = [json.loads(line) for line in (folder / "curve.jsonl").read_text().splitlines()]
    assert sorted(point.pop("seconds") for point in points)[0] >= 0
    return points


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> tuple[Path, bytes]:
    folder = tmp_path_factory.mktemp("train") / "whole"
    return folder, trained(folder)


def test_it_leaves_corpus_draft_curve_and_settings(whole, capfd):
    folder, _ = whole
    assert {path.name for path in folder.iterdir()} == KEPT
    points = curve(folder)
    assert [(point["step"], point["tokens"]) for point in points] == [(n, n * 8 * 64) for n in (0, 4, 8, 12, 16)]
    assert all({"tau", "tau_greedy", "tau_sampled", "coverage", "loss"} <= set(point) for point in points)
    assert [point["loss"] is None for point in points] == [True, False, False, False, False]
    assert json.loads((folder / "settings.json").read_text())["text"]["tokens"] == 6144


def test_killed_anywhere_it_ends_with_the_same_draft(whole, tmp_path):
    """Twelve kills, in text and in training; draft and curve are the uninterrupted one's, and no scratch stays."""
    began = time.monotonic()
    in_child(partial(train_draft, composed(tmp_path / "timed"), tmp_path / "timed"), None)
    seconds, random, kills, trial = time.monotonic() - began, Random(1), 0, 0
    while kills < 12:
        trial += 1
        folder = tmp_path / str(trial)
        while not in_child(partial(train_draft, composed(folder), folder), random.uniform(0.1, 1.0) * seconds):
            kills += 1
        assert (folder / "draft" / "model.safetensors").read_bytes() == whole[1]
        assert curve(folder) == curve(whole[0])
        assert {path.name for path in folder.iterdir()} == KEPT
        assert not list(folder.glob("**/*.scratch"))


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_kill_between_checkpoint_and_curve_costs_no_point(whole, tmp_path, monkeypatch, moment):
    """Right before or after the curve is written, the second time."""
    write, calls = loop.Trainer._write_curve, []

    def die(trainer, folder):
        calls.append(trainer.step)
        if len(calls) == 2 and moment == "before":
            raise KeyboardInterrupt
        write(trainer, folder)
        if len(calls) == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(loop.Trainer, "_write_curve", die)
        with pytest.raises(KeyboardInterrupt):
            trained(tmp_path)
    assert trained(tmp_path) == whole[1]
    assert curve(tmp_path) == curve(whole[0])


def test_what_a_killed_process_left_is_removed_at_the_next_start(whole, tmp_path):
    folder = shutil.copytree(whole[0], tmp_path / "out")
    left = [folder / ".state.pt.x.scratch", folder / "draft" / ".m.x.scratch", folder / "corpus" / ".s.x.scratch"]
    for scratch in left:
        scratch.mkdir()
        (scratch / "half").write_text("x")
    trained(folder)
    assert not any(scratch.exists() for scratch in left)


@pytest.mark.parametrize("held", ["", "corpus"])
def test_a_folder_in_use_is_refused_and_left_alone(whole, tmp_path, held):
    folder = shutil.copytree(whole[0], tmp_path / "out")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with (
        exclusive(folder / held / ".lock", ""),
        pytest.raises(UserError, match="another process is writing") as caught,
    ):
        trained(folder)
    assert str(caught.value).startswith(f"{folder / held}: ")
    assert ("corpus=FOLDER" if held else "out=FOLDER") in str(caught.value)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_a_full_disk_is_one_line_that_names_the_file(whole, tmp_path):
    """Where no file may grow beyond what text and draft need; the state, three times as large after a step, does."""
    state = (whole[0] / "state.pt").stat().st_size
    with small_disk(state - 1000), pytest.raises(UserError, match=r"state\.pt can't be written .*choose another out"):
        trained(tmp_path, f"corpus={whole[0]}/corpus")
    assert torch.load(tmp_path / "state.pt", weights_only=True)["step"] == 0
    assert trained(tmp_path, f"corpus={whole[0]}/corpus") == whole[1]
    with (
        small_disk(10_000),
        pytest.raises(UserError, match=r"shard-00000\.safetensors can't be written.*corpus=FOLDER"),
    ):
        trained(tmp_path / "other")


@pytest.mark.parametrize(("average", "tensors"), [("null", 3), ("0.9", 4)])
def test_room_for_the_state_is_asked_for_before_any_text_is_made(whole, tmp_path, monkeypatch, average, tensors):
    """Weights, both of their moments and their average, twice, since a state is written beside the last one, and the
    draft itself; with a little more room the text lacks some."""
    kept = load_file(whole[0] / "draft" / "model.safetensors")
    needed = 4 * sum(kept[name].numel() for name in kept if name not in ("d2t", "t2d")) * (2 * tensors + 1)
    usage = shutil.disk_usage(tmp_path)
    text = 6144 * (4 * 32 * 4 + 10)  # hidden states of a token, on the same disk
    assert needed < text
    for room, says in (
        (0.99 * needed, "the training's state needs 0.0 GiB in .*out=FOLDER"),
        (1.01 * needed, "the corpus still needs"),
        (1.01 * text, "the corpus still needs"),
    ):
        monkeypatch.setattr(shutil, "disk_usage", lambda _, free=room / 0.95: usage._replace(free=free))
        with pytest.raises(UserError, match=says):
            trained(tmp_path, f"training.average={average}")
    assert not list(tmp_path.glob("**/*.safetensors"))


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
    with pytest.raises(UserError, match=r"target\.dtype=\"float32\", now \"bfloat16\".*choose another corpus"):
        trained(tmp_path / "other", f"corpus={folder}/corpus", "target.dtype=bfloat16")
    with pytest.raises(UserError, match=r"target\.context=.*now 500.*choose another corpus"):
        trained(tmp_path / "other", f"corpus={folder}/corpus", "target.context=500")
    assert trained(tmp_path / "on", *more)
    assert {path: path.stat().st_mtime_ns for path in stamps} == stamps
    assert len(list((folder / "corpus").glob("shard-*"))) == 4


def test_another_content_of_the_same_files_is_another_corpus(tmp_path):
    """Of the user's conversations, and of the benchmark prompts that the corpus was filtered against."""
    talk, data = tmp_path / "talk.jsonl", tmp_path / "data"
    line = {"messages": [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "I."}]}
    data.mkdir()
    (data / "a.jsonl").write_text('{"id": "a", "turns": ["Who is it?"]}\n')
    own = ("text=conversations", f"text.path={talk}", "text.batch=4", f"paths.data={data}")

    def again(words: str, *more: str) -> None:
        talk.write_text("".join(json.dumps(line) + "\n" for _ in range(12)).replace("Who?", words))
        overrides = [o for o in SMALL if not o.startswith(("text.tokens", "text.batch"))]
        GlobalHydra.instance().clear()
        with initialize_config_dir(str(shipped_dir("conf")), version_base="1.3"):
            cfg = compose("train", [*overrides, *own, *more, f"out={tmp_path}/out"])
        train_draft(cfg, tmp_path / "out")

    again("Who?")
    again("Who?")
    with pytest.raises(UserError, match=r"corpus was made .*text\.path=\"sha256:.*choose another corpus"):
        again("When?")
    with pytest.raises(UserError, match=r"corpus was made .*paths\.data=\"sha256:.*now \"sha256:"):
        again("Who?", "paths.data=null")
    (data / "b.jsonl").write_text('{"id": "b", "turns": ["And who is that?"]}\n')
    with pytest.raises(UserError, match=r"paths\.data=\"sha256:"):
        again("Who?")


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("draft=tiny", "no trainer"),
        ("training.length=48", "does not divide text.length"),
        ("training.init=/nowhere", "training.init=/nowhere: no such folder"),
        ("training.after=/nowhere", "training.after=/nowhere: holds no state.pt"),
        ("text=conversations", "text.path"),
        ("corpus=${out}", "expected another folder than out"),
        ("threads=0", "threads=0: expected 1 or more"),
        ("threads=-1", "threads=-1: expected 1 or more"),
    ],
)
def test_bad_input_is_refused_before_any_text(tmp_path, override, says):
    foreign = {"text=conversations": "text.tokens", "draft=tiny": "training."}.get(override, "none")
    overrides = [o for o in SMALL if not o.startswith(foreign)]
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(shipped_dir("conf")), version_base="1.3"):
        cfg = compose("train", [*overrides, f"out={tmp_path}/out", override])
    with pytest.raises(UserError, match=says):
        train_draft(cfg, tmp_path / "out")
    assert not (tmp_path / "out").exists()
