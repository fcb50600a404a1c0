"""What W&B is given of a record, when, and that a mirror may break and a run not."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import wandb
from run_cases import CHAT, composed, conversations

from tracedraft import measure as measuring
from tracedraft import mirror
from tracedraft.measure import measure
from tracedraft.records import SUMMARY
from tracedraft.tracking import NullTracker


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> list[dict]:
    folder = tmp_path_factory.mktemp("mirror") / "run"
    measure(composed(*CHAT, "adapter=persistent", "adapter.every=4", "adapter.guard=true"), folder, None)
    return conversations(folder)


def test_a_row_shows_both_arms_depths_updates_and_drift(recorded):
    for record in recorded:
        row = mirror.row(record)
        answers = [turn["arms"] for turn in record["turns"]]
        accepted, rounds = (sum(a["adapted"][name] for a in answers) for name in ("accepted", "rounds"))
        assert row["tau"] == (accepted + rounds) / rounds
        assert row["fixed.rounds"] == sum(a["fixed"]["rounds"] for a in answers)
        assert row["acceptance.1"] == sum(a["adapted"]["survivals"][0] for a in answers) / sum(
            a["adapted"]["trials"][0] for a in answers
        )
        assert row["updates.attempted"] == sum(len(a["adapted"]["updates"]) for a in answers) > 0
        assert row["drift.weight"] == record["drift"]["weight"]
        assert {"updates.loss", "updates.held_out_before", "updates.held_out_after", "speedup", "near_ties"} <= set(
            row
        )
        assert None not in row.values()


def test_the_update_table_has_a_row_for_each_attempt(recorded):
    table = mirror.update_table(recorded)
    attempts = [u for r in recorded for turn in r["turns"] for u in turn["arms"]["adapted"]["updates"]]
    assert len(table) == len(attempts)
    for line, update in zip(table, attempts, strict=True):
        named = dict(zip(mirror.UPDATE_COLUMNS, line, strict=True))
        for name in ("round", "committed", "reason", "loss"):
            assert named[name] == update[name]
        assert named["held_out_kl_after"] == update["held_out_after"]
        assert named["positions"] == sum(update["positions"].values())


class Spy(NullTracker):
    """A mirror that notes what it is given and what was on disk then; it may break at one step."""

    def __init__(self, folder: Path, breaks_at: int | None):
        super().__init__()
        self.folder, self.breaks_at = folder, breaks_at
        self.rows: list[dict] = []
        self.finished: tuple[dict, int] | None = None

    def log(self, row, step):
        assert step == len(self.rows)
        assert len(conversations(self.folder)) == step + 1  # on disk before it is mirrored
        self.rows.append(row)
        if step == self.breaks_at:
            raise OSError("the mirror broke")

    def finish(self, summary, exit_code):
        self.finished = summary, exit_code


def spied(monkeypatch, folder: Path, breaks_at: int | None = None) -> tuple[Spy, dict]:
    spy, opened = Spy(folder, breaks_at), {}

    def open_spy(**kwargs):
        opened.update(kwargs)
        return spy

    monkeypatch.setattr(measuring, "open_tracker", open_spy)
    return spy, opened


def test_records_are_written_before_they_are_mirrored(tmp_path, monkeypatch):
    spy, opened = spied(monkeypatch, tmp_path / "run")
    summary = measure(composed("workload.limit=3"), tmp_path / "run", "my sweep")
    assert len(spy.rows) == 3
    assert spy.finished == ({k: v for k, v in summary.items() if k != "provenance"}, 0)
    for row, record in zip(spy.rows, conversations(tmp_path / "run"), strict=True):
        turns = [turn["arms"] for turn in record["turns"]]
        assert row["rounds"] == sum(turn["adapted"]["rounds"] for turn in turns)
        assert row["fixed.tokens"] == sum(len(turn["fixed"]["tokens"]) for turn in turns)
        assert None not in row.values()
    assert (opened["group"], opened["job_type"]) == ("my sweep", "persistent")
    assert opened["run_id"].startswith(summary["provenance"]["fingerprint"])


def test_what_was_recorded_survives_a_crash(tmp_path, monkeypatch):
    spy, opened = spied(monkeypatch, tmp_path / "run", breaks_at=1)
    with pytest.raises(OSError, match="the mirror broke"):
        measure(composed("workload.limit=3"), tmp_path / "run", None)
    assert len(conversations(tmp_path / "run")) == 2
    assert not (tmp_path / "run" / SUMMARY).exists()
    assert spy.finished == ({}, 1)
    assert opened["group"] == "single"


def test_the_mirror_works_offline(tmp_path, monkeypatch):
    for name in ("CONFIG_DIR", "CACHE_DIR", "DATA_DIR"):
        monkeypatch.setenv(f"WANDB_{name}", str(tmp_path / "wandb-home"))
    measure(composed("wandb.mode=offline"), tmp_path / "run", None)
    (file,) = (tmp_path / "run").glob("wandb/offline-run-*/*.wandb")
    deadline = time.monotonic() + 20
    while b"fixed.tokens_per_s" not in file.read_bytes():  # W&B's own process may write after finish() returns
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert json.loads((tmp_path / "run" / SUMMARY).read_text())["wandb_error"] is None


def test_a_broken_client_is_recorded_and_the_run_goes_on(tmp_path, monkeypatch):
    def broken(**_):
        raise RuntimeError("no such server\nat all")

    monkeypatch.setattr(wandb, "init", broken)
    measure(composed("wandb.mode=offline"), tmp_path / "run", None)
    found = json.loads((tmp_path / "run" / SUMMARY).read_text())
    assert found["wandb_error"] == "wandb init: RuntimeError: no such server"
    assert found["conversations"] == len(conversations(tmp_path / "run")) == 2
