"""A run that is killed at any moment and started again ends with the counts of one that never was."""

from __future__ import annotations

import json
import time
import warnings
from functools import partial
from random import Random

import pytest
import torch
from conftest import in_child
from run_cases import arms, composed, conversations, interrupted, untimed

from tracedraft.measure import measure
from tracedraft.records import SUMMARY, read_attempts, read_conversations, read_summary
from tracedraft.tracking import NullTracker

LEARNING = ("workload=sample_chat", "workload.limit=3", "decode.max_new_tokens=12", "adapter=persistent")
OFTEN = ("adapter.every=2", "adapter.lr=0.3", "adapter.drift_cap=null", "adapter.min_positions=1")
SAMPLED = ("decode.temperature=0.7", "adapter.optimizer=adam", "adapter.replay_mib=1")
KILLS = 50


def test_fifty_kills_lose_nothing_but_the_conversation_in_progress(tmp_path):
    """Weights, Adam's moments, replay and draws go on: each later update depends on all of them."""
    cfg = composed(*LEARNING, *OFTEN, *SAMPLED)
    in_child(partial(measure, cfg, tmp_path / "warm", None), None)
    began = time.monotonic()
    in_child(partial(measure, cfg, tmp_path / "whole", None), None)
    whole = time.monotonic() - began
    expected, random = untimed(tmp_path / "whole"), Random(0)
    losses = [u["loss"] for answer in arms(expected, "adapted") for u in answer["updates"] if u["committed"]]
    assert len(set(losses)) > 5
    kills = resumed = trial = 0
    while kills < KILLS:
        trial += 1
        folder, had = tmp_path / f"killed-{trial}", 0
        while not (folder / SUMMARY).exists():
            in_child(partial(measure, cfg, folder, None), random.uniform(0, whole))
            kills += not (folder / SUMMARY).exists()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # a line cut short is what a kill may leave
                got = len(read_conversations(folder)) if (folder / "conversations.jsonl").exists() else 0
            assert got >= had
            had = got
        assert untimed(folder) == expected
        resumed += any(attempt["from"] for attempt in read_attempts(folder))
        assert read_summary(folder)["drift"] == read_summary(tmp_path / "whole")["drift"]
    assert resumed > 2, "no run went on from a record"


@pytest.mark.parametrize("adapter", ["fixed", "reset", "persistent"])
def test_a_run_goes_on_after_each_conversation(tmp_path, adapter):
    """Also without the last line's newline; the records of earlier attempts are not touched."""
    learner = () if adapter == "fixed" else OFTEN
    cfg = composed(*LEARNING[:3], f"adapter={adapter}", *learner)
    measure(cfg, tmp_path / "whole", None)
    expected = untimed(tmp_path / "whole")
    for stop in (1, 2):
        folder = tmp_path / str(stop)
        interrupted(cfg, folder, stop)
        kept = (folder / "conversations.jsonl").read_bytes()
        assert kept.count(b"\n") == stop
        summary = measure(cfg, folder, None)
        assert (folder / "conversations.jsonl").read_bytes().startswith(kept)
        assert untimed(folder) == expected
        assert [attempt["from"] for attempt in summary["provenance"]["attempts"]] == [0, stop]
        assert list(folder.glob("learner-*")) == []


def test_the_mirror_of_each_attempt_shows_all_earlier_rows(tmp_path, monkeypatch):
    """The newest W&B run of a fingerprint is complete, and equal to that of a run that never stopped."""
    mirrored: list[list[tuple[int, dict]]] = []

    class Rows(NullTracker):
        def __init__(self):
            super().__init__()
            mirrored.append([])

        def log(self, row, step):
            timed = ("tokens_per_s", "fixed.tokens_per_s", "speedup", "counts")
            counts = json.loads(row["counts"])
            for arm in counts["arms"].values():
                del arm["seconds"]
            mirrored[-1].append((step, {k: v for k, v in row.items() if k not in timed} | {"counts": counts}))

    monkeypatch.setattr("tracedraft.measure.open_tracker", lambda **_: Rows())
    cfg = composed(*LEARNING, *OFTEN)
    measure(cfg, tmp_path / "whole", None)
    interrupted(cfg, tmp_path / "stopped", 1)
    interrupted(cfg, tmp_path / "stopped", 1)
    measure(cfg, tmp_path / "stopped", None)
    whole, first, second, last = mirrored
    assert [step for step, _ in whole] == [0, 1, 2]
    assert first == whole[:1]
    assert second == whole[:2]
    assert last == whole


def test_a_finished_run_is_not_done_again(tmp_path, capsys):
    cfg = composed("workload.limit=1")
    first = measure(cfg, tmp_path, None)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    again = measure(cfg, tmp_path, None)
    assert json.dumps(again) == json.dumps(read_summary(tmp_path))
    assert again["tau"] == first["tau"]
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert "finished" in capsys.readouterr().err


def test_a_learner_whose_state_is_gone_is_an_error(tmp_path):
    from tracedraft.errors import UserError

    cfg = composed(*LEARNING, *OFTEN)
    interrupted(cfg, tmp_path, 2)
    for file in tmp_path.glob("learner-*.pt"):
        file.unlink()
    with pytest.raises(UserError, match="state after conversation 2 is missing"):
        measure(cfg, tmp_path, None)
    assert len(conversations(tmp_path)) == 2


def test_other_threads_are_the_same_run_and_say_so(tmp_path):
    """Threads change timings, not counts: the attempts tell them apart."""
    interrupted(composed(*LEARNING, "threads=1"), tmp_path, 1)
    summary = measure(composed(*LEARNING, "threads=2"), tmp_path, None)
    assert [attempt["torch_threads"] for attempt in summary["provenance"]["attempts"]] == [1, 2]
    torch.set_num_threads(1)
