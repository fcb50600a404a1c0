"""Whole runs of learners between requests on the tiny pair, alone and over learners inside them."""

from __future__ import annotations

from pathlib import Path

import pytest
import run_cases
import torch
from conftest import adapters
from omegaconf import DictConfig
from run_cases import SAMPLED, composed, conversations, interrupted, untimed

from tracedraft import arms, measure, mirror, records
from tracedraft.adapters import osd
from tracedraft.adapters.background import BackgroundLearner
from tracedraft.adapters.blocks import BlockLearner
from tracedraft.drafts.eagle3 import Eagle3Draft
from tracedraft.errors import UserError

OUTER = ("workload=sample_math", "workload.limit=6", "adapter.outer.update_interval=2", "decode.max_new_tokens=40")


def configured(adapter: str, *overrides: str) -> DictConfig:
    often = ("adapter.inner.every=2", "adapter.inner.min_positions=1") if "_" in adapter else ()
    return composed(f"adapter={adapter}", *OUTER, *often, *overrides)


def run(folder: Path, adapter: str, *overrides: str) -> dict:
    return measure.measure(configured(adapter, *overrides), folder, None)


def learnt(folder: Path) -> list[str]:
    """Hashes of the drafts that were served, block by block."""
    return [r["outer"]["weights_sha256"] for r in conversations(folder) if r["outer"] and r["outer"]["block"]]


@pytest.mark.parametrize("sampled", [(), SAMPLED])
@pytest.mark.parametrize("name", adapters(inner=False))
def test_output_is_the_targets_own_while_both_loops_learn(tmp_path, name, sampled):
    summary = run(tmp_path / "run", name, *sampled)
    assert summary["lossless"] is True
    assert (summary["mismatches"], summary["arms_differ"]) == (0, 0)
    assert summary["outer"] | {"seconds": 0} == {
        "blocks": 3,
        "committed": 3,
        "rolled_back": {},
        "waited": {},
        "seconds": 0,
    }
    assert summary["tokens_per_s_with_training"] < summary["tokens_per_s"]
    assert len(set(learnt(tmp_path / "run"))) == 3
    assert (summary["updates"]["committed"] > 0) == ("_" in name)


@pytest.mark.parametrize(
    ("adapter", "changes", "rolled_back"),
    [
        ("osd", ("optimizer=sgd", "lr=1e38", "clip=null", "epochs=2"), {"non-finite loss": 3}),
        ("ensemble", ("optimizer=sgd", "lrs=[1e38,1e-3]", "clip=null"), {}),
    ],
)
def test_a_step_that_breaks_is_recorded_and_the_stream_goes_on(tmp_path, adapter, changes, rolled_back):
    summary = run(tmp_path / "run", adapter, *(f"adapter.outer.{change}" for change in changes))
    assert summary["outer"]["rolled_back"] == rolled_back
    said = [r["outer"] for r in conversations(tmp_path / "run") if r["outer"]]
    assert len(said) == 3
    for outer in said:
        assert None in (outer["learners"]["after"] if adapter == "ensemble" else outer["grad_norms"])
    if adapter == "ensemble":  # all are alike before the first block
        assert [outer["learners"]["best_lr_so_far"] for outer in said[1:]] == [1e-3] * 2
        assert [outer["learners"]["losses"][0] for outer in said[1:]] == [None] * 2
    mirror.row(conversations(tmp_path / "run")[1])


@pytest.mark.parametrize("outer", ["osd", "optimistic", "ensemble"])
def test_inner_learning_leaves_no_trace_in_the_outer_one(tmp_path, outer):
    """Contract 4, where what is learnt does not hang on what the draft got wrong: bit by bit the same drafts."""
    made = {}
    for inner in ("", "_reset", "_persistent"):
        folder = tmp_path / f"{outer}{inner}"
        run(folder, f"{outer}{inner}", "adapter.outer.objective=all")
        made[inner] = learnt(folder)
    assert made[""] == made["_reset"] == made["_persistent"]


def test_an_inner_learner_starts_anew_on_each_new_draft(tmp_path, monkeypatch):
    drifts, end = [], arms.Arm.end_conversation

    def noting(self, *args):
        before, found = self.adapter.drift().get("weight"), end(self, *args)
        if found:
            drifts.append((before > 0, self.adapter.drift()["weight"]))
        return found

    monkeypatch.setattr(arms.Arm, "end_conversation", noting)
    run(tmp_path / "run", "osd_persistent")
    assert drifts == [(True, 0.0)] * 3


SPOILT = ("meta=ens", "lrs=[1e-3,30.0]", "optimizer=sgd", "clip=null", "update_interval=1")  # the first is refused


@pytest.mark.parametrize(
    ("name", "changes", "after"),
    [
        *((name, (), after) for name in ("osd", "optimistic_reset", "ensemble_persistent") for after in (3, 4)),
        ("ensemble", SPOILT, 1),
    ],
)
def test_a_run_goes_on_where_it_was_stopped(tmp_path, name, changes, after):
    """In the middle of a block, and right after one, served or refused: counts, losses and drafts are the
    uninterrupted run's."""
    changes = [f"adapter.outer.{change}" for change in changes]
    whole = run(tmp_path / "whole", name, *changes)
    assert bool(whole["outer"]["rolled_back"]) == bool(changes)

    interrupted(configured(name, *changes), tmp_path / "cut", after)
    assert len(conversations(tmp_path / "cut")) == after
    run(tmp_path / "cut", name, *changes)
    one, other = untimed(tmp_path / "whole"), untimed(tmp_path / "cut")
    for record in (*one, *other):
        if record["outer"]:
            record["outer"].pop("seconds")
    assert one == other
    assert sorted(path.name for path in (tmp_path / "cut").glob("*.pt")) == []


def test_a_kept_learner_keeps_the_draft_too(tmp_path):
    run(tmp_path / "run", "osd_persistent", "keep_learner=true")
    weights = torch.load(tmp_path / "run" / records.DRAFT, weights_only=True)["weights"]
    assert weights["lm_head.weight"].dtype is torch.float32
    assert (tmp_path / "run" / records.LEARNER).exists()


def test_acceptance_replays_the_same_learning(tmp_path):
    """Recorded, without a clock: the same drafts and counts as a timed run, and no seconds."""
    timed = run(tmp_path / "timed", "osd")
    recorded = run(tmp_path / "recorded", "osd", "measure=acceptance", f"paths.recordings={tmp_path / 'recordings'}")
    assert learnt(tmp_path / "timed") == learnt(tmp_path / "recorded")
    assert recorded["tau"] == timed["tau"]
    assert recorded["outer"]["seconds"] is None
    assert recorded["null_reasons"]["tokens_per_s_with_training"] == "no time was measured"


def test_a_block_longer_than_the_stream_is_refused_before_anything_is_loaded(tmp_path):
    with pytest.raises(UserError, match=r"adapter\.outer\.update_interval=9: the stream has 6"):
        run(tmp_path / "run", "osd", "adapter.outer.update_interval=9")
    assert not (tmp_path / "run").exists()


def test_streams_keep_their_domains(tmp_path):
    run(tmp_path / "run", "osd", "workload=stream_sample", "workload.lengths={a:3,b:3}")
    domains = [record["domain"] for record in conversations(tmp_path / "run")]
    assert domains == sorted(domains, key=domains.index)
    assert len(set(domains)) == 2


def test_what_ran_in_the_background_is_repeated_by_its_schedule(tmp_path, monkeypatch):
    """When a block is ready hangs on the clock; the record says it, and the same schedule gives the same counts."""
    with monkeypatch.context() as patched:
        patched.setattr(BackgroundLearner, "_ready", lambda self: self.pipe.poll(60))  # however slow a start is here
        run(tmp_path / "timed", "osd_reset", "adapter.outer.background=true")
    found = [(r["index"] + 1, r["outer"]) for r in conversations(tmp_path / "timed") if r["outer"]]
    schedule = [[outer["submitted"], at] for at, outer in found if outer["block"]]
    assert schedule
    run(tmp_path / "again", "osd_reset", "adapter.outer.background=true", f"adapter.outer.schedule={schedule}")
    assert learnt(tmp_path / "timed") == learnt(tmp_path / "again")
    first, again = (
        [arm["accepted_per_round"] for arm in run_cases.arms(conversations(tmp_path / way), "adapted")]
        for way in ("timed", "again")
    )
    assert first == again


def test_a_response_sees_one_draft_though_another_is_ready(tmp_path, monkeypatch):
    """Each waits at its end until the block in the background is learnt; that is served between two responses."""
    answering, served, response_of, serve = [], [], measure.response_of, Eagle3Draft._serve
    learners = []

    def noted(learner, target):
        learners.append(BackgroundLearner(learner, target))
        return learners[-1]

    def answer(bench, arm, *rest):
        answering.append(arm)
        made = response_of(bench, arm, *rest)
        if arm.outer and learners[0].flying is not None:
            assert learners[0].pipe.poll(120)
        answering.pop()
        return made

    def noting(draft, model):
        served.append(bool(answering))
        serve(draft, model)

    monkeypatch.setattr(osd, "placed", noted)
    monkeypatch.setattr(measure, "response_of", answer)
    monkeypatch.setattr(Eagle3Draft, "_serve", noting)
    run(tmp_path / "run", "osd", "adapter.outer.background=true")
    assert len(learnt(tmp_path / "run")) == 2  # the third is submitted after the last conversation
    assert served == [False] * (2 + 2)  # of two arms, and two blocks


@pytest.mark.parametrize("plain", ["true", "false"])
def test_what_learns_in_the_background_rests_but_while_its_own_arm_serves(tmp_path, monkeypatch, plain):
    """Also in the audit, and while records are written; it runs while it is asked what it has learnt."""
    seen, resting = [], [False]
    monkeypatch.setattr(BlockLearner, "rest", lambda self, rests: resting.__setitem__(0, rests))

    def noting(of, name, key):
        real = getattr(of, name)

        def noted(*arguments):
            seen.append((key(arguments), resting[0]))
            return real(*arguments)

        monkeypatch.setattr(of, name, noted)

    noting(measure, "response_of", lambda arguments: arguments[1].name if arguments[1] else "plain")
    noting(measure, "turn_record", lambda arguments: "audit")
    noting(measure, "keep", lambda arguments: "record")
    noting(BlockLearner, "end_conversation", lambda arguments: "learn")
    run(tmp_path / "run", "osd", f"plain={plain}", "workload=sample_chat", "workload.limit=2")
    runs = {"adapted", "learn"}
    assert set(seen) == {(key, key not in runs) for key, _ in seen}
    assert {key for key, _ in seen} == {"fixed", "audit", "record"} | runs | ({"plain"} if plain == "true" else set())


def test_the_mirror_shows_what_was_learnt(tmp_path):
    run(tmp_path / "run", "ensemble")
    shown = [mirror.row(record) for record in conversations(tmp_path / "run")]
    assert "outer.loss" not in shown[0]
    assert shown[1]["outer.block"] == 1
    assert sum(shown[1][f"outer.p.{i}"] for i in (1, 2, 3)) == pytest.approx(1)
    assert shown[1]["outer.loss_after"] < shown[1]["outer.loss"]
