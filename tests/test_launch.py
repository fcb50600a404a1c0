"""Sweeps without Ray: what is reused, left out, tried again, interrupted and shared."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from conftest import in_child
from launch_cases import Here, command, failing, runs_in, said, states

from tracedraft import records
from tracedraft.files import exclusive
from tracedraft.launch import command as commands
from tracedraft.launch.ledger import CLAIM
from tracedraft.launch.plan import drift, finished_runs

pytestmark = pytest.mark.usefixtures("plain_environment")


@pytest.fixture
def folder(tmp_path) -> Path:
    return tmp_path / "runs" / "sweep"


# --- resume


def test_the_same_command_again_runs_nothing_and_its_table_is_the_same(here, folder, capsys):
    assert command("adapter=fixed,reset") == 0
    assert len(here.served) == 2
    table, out = (folder / "table.md").read_bytes(), capsys.readouterr().out
    assert command("adapter=fixed,reset", "launcher.workers=2", "wandb.project=other") == 0
    assert len(here.served) == 2
    assert (folder / "table.md").read_bytes() == table
    assert capsys.readouterr().out == out
    assert all(state.reused for state in states(folder).values())


def test_only_what_is_new_runs(here, folder):
    assert command("workload=sample_math", "adapter=fixed,reset") == 0
    first = set(here.served)
    assert command("workload=sample_math,sample_chat", "adapter=fixed,reset") == 0
    assert len(here.served) == 4
    assert command("workload=sample_math", "adapter=fixed,reset", "seed=1") == 0
    assert len(set(here.served)) == 6
    assert first < runs_in(folder)
    assert command("workload=sample_math", "adapter=fixed,reset", "threads=1", "paths.cache=elsewhere") == 0
    assert len(here.served) == 6


def test_timings_by_other_threads_are_not_reused_and_acceptance_is(here, folder):
    assert command("measure=time", "threads=1") == 0
    assert command("measure=time", "threads=1") == 0
    assert len(here.served) == 1
    assert command("measure=time", "threads=2") == 0
    assert command("measure=time", "threads=1", "launcher.workers=2", "launcher.cpus_per_worker=1") == 0
    assert len(set(here.served)) == 3
    assert {key[1] for key in finished_runs(folder)} == {None, (1, 1), (2, 1), (1, 2)}


def test_a_run_that_another_launcher_did_is_found(here, folder):
    assert command("adapter=fixed,reset", "hydra/launcher=basic") == 0
    assert runs_in(folder) == {"sample_math_fixed_0", "sample_math_reset_1"}
    assert command("adapter=fixed,reset") == 0
    assert here.served == []


def test_two_jobs_for_one_run_are_done_once(here, folder):
    assert command("wandb.project=a,b") == 0
    assert len(here.served) == 1


def test_fresh_leaves_what_was_there(here, folder):
    assert command("adapter=fixed") == 0
    before = {path: path.read_bytes() for path in folder.glob("*/*")}
    assert command("adapter=fixed", "launcher.resume=fresh") == 0
    assert command("adapter=fixed", "launcher.resume=fresh") == 0
    names = sorted(runs_in(folder))
    assert names[1:] == [f"{names[0]}_2", f"{names[0]}_3"]
    assert {path: path.read_bytes() for path in before} == before
    assert said(folder / names[0]) == said(folder / names[2])


def test_two_runs_must_not_share_a_folder(here, folder, capsys):
    assert command("seed=0,1", "hydra.sweep.subdir=same") == 2
    assert "hydra.sweep.subdir gives two runs the folder same" in capsys.readouterr().err


def test_excluded_runs_are_said_and_not_run(here, folder, capsys):
    assert command("adapter=fixed,reset", "seed=0,1", "launcher.exclude=['adapter=fixed seed=1']") == 0
    assert len(here.served) == 3
    assert "excluded: adapter=fixed seed=1" in capsys.readouterr().err


def test_drift_is_shown_and_nothing_runs_again(here, folder, monkeypatch, capsys):
    from tracedraft import provenance as origins

    assert command("adapter=fixed") == 0
    now = origins.provenance()
    other = {**now, "git": {**now["git"], "commit": "0" * 40}, "hardware": {**now["hardware"], "cpu": "another"}}
    monkeypatch.setattr(origins, "provenance", lambda: other)
    capsys.readouterr()
    assert command("adapter=fixed") == 0
    assert len(here.served) == 1
    err = capsys.readouterr().err
    assert "now 00000000" in err
    assert "now another" in err
    assert drift(now, now) in ((), ("code with uncommitted changes",))
    one, eight = ({**now, "hardware": {**now["hardware"], "gpus": ["H200"] * count}} for count in (1, 8))
    assert drift(one, eight) == drift(now, now)  # a worker is shown its own
    assert any("gpus" in said for said in drift(one, now))
    bare = {k: v for k, v in now["hardware"].items() if k != "instructions"}  # as once recorded
    assert drift({**now, "hardware": bare}, now) == drift(now, now)
    assert "instructions none, now" in drift({**now, "hardware": {**bare, "instructions": "none"}}, now)[-1]


# --- failure


def test_a_failure_is_isolated_tried_again_last_and_reported(here, folder, capsys):
    failing(here, {0}, "died")
    assert command("seed=0,1,2") == 1
    (bad,) = {name for name in here.served if here.served.count(name) == 2}
    assert here.served[0] == here.served[-1] == bad
    out, err = capsys.readouterr()
    assert f"failed: {bad} (lost to a test)" in out
    assert "error: 1 of 3 runs failed" in err
    assert "2 done, 1 failed" in err
    assert "lost to a test" in (folder / bad / "run.log").read_text()
    assert f"- {bad} (lost to a test)" in (folder / "table.md").read_text()
    here.answer = Here.answer
    here.served.clear()
    assert command("seed=0,1,2") == 0
    assert here.served == [bad]


def test_only_failed_ones_if_asked(here, folder):
    failing(here, {1}, "died")
    assert command("seed=0,1") == 1
    here.answer = Here.answer
    here.served.clear()
    assert command("seed=0,1,2", "launcher.resume=retry_failed") == 0
    assert len(here.served) == 1
    assert len(runs_in(folder)) == 2


def test_what_failed_is_still_known_as_such_after_an_interruption(here, folder):
    """Every command writes down all its runs as queued."""
    failing(here, {0, 1}, "died")
    assert command("seed=0,1,2") == 1
    here.answer = Here.answer

    def press(pool: Here) -> None:
        if not here.served:
            os.kill(os.getpid(), signal.SIGINT)

    here.served.clear()
    here.on_wait = press
    assert command("seed=0,1,2", "launcher.resume=retry_failed", "launcher.workers=1") == 130
    here.on_wait = None
    first = list(here.served)
    assert len(first) == 1
    assert command("seed=0,1,2", "launcher.resume=retry_failed") == 0
    assert len(here.served) == 2
    assert len(runs_in(folder)) == 3
    assert command("seed=0,1,2", "launcher.resume=retry_failed") == 0
    assert len(here.served) == 2


def test_a_run_that_raised_is_tried_again_by_another_worker(here, folder):
    """After some errors, of CUDA say, no later run of that process could go well."""
    killed = []
    kill = Here.kill

    def noted(pool: Here, hand) -> None:
        killed.append(hand.number)
        kill(pool, hand)

    here.kill = noted
    failing(here, {0}, "failed")
    assert command("seed=0,1") == 1
    assert len(killed) == 2


def test_a_finished_run_without_its_learner_says_so(here, folder, capsys):
    assert command("adapter=persistent") == 0
    assert command("adapter=persistent", "keep_learner=true") == 0
    assert len(here.served) == 1
    assert "without its learner: launcher.resume=fresh" in capsys.readouterr().err
    assert command("adapter=persistent", "keep_learner=true", "launcher.resume=fresh") == 0
    assert len(list(folder.glob("*/learner.pt"))) == 1


def test_bad_input_fails_its_run_alone_and_is_not_tried_again(here, folder, capsys):
    assert command("decode.top_p=1.5,0.9") == 1
    assert len(here.served) == 1
    out, err = capsys.readouterr()
    assert "decode.top_p=1.5: expected a share" in err
    assert "failed: sample_math_persistent_0 (decode.top_p=1.5" in out
    assert "decode.top_p=1.5" in (folder / "sample_math_persistent_0" / "run.log").read_text()
    # What only the worker finds out is as final.
    assert command("decode.cache_bucket=256,1000000000000") == 1
    assert len(here.served) == 3


def test_fail_fast_starts_nothing_more(here, folder):
    failing(here, {0}, "failed")
    assert command("seed=0,1,2", "launcher.fail_fast=true", "launcher.max_attempts=1", "launcher.workers=1") == 1
    assert len(here.served) == 1


def test_a_traceback_is_in_the_log(here, folder, monkeypatch, capsys):
    def boom(*_):
        raise ValueError("deep inside")

    monkeypatch.setattr("tracedraft.measure.stream", boom)
    assert command("seed=0", "launcher.max_attempts=1") == 1
    (log,) = folder.glob("*/run.log")
    assert "Traceback" in log.read_text()
    assert "ValueError: deep inside" in log.read_text()
    assert "Traceback" not in capsys.readouterr().err


def test_no_cluster_at_the_address_is_said_in_one_line(folder, capsys):
    assert command("seed=0,1", "launcher.address=127.0.0.1:1") == 2
    err = capsys.readouterr().err
    assert "launcher.address=127.0.0.1:1: no Ray cluster there" in err
    assert "ray start --head" in err


# --- Ctrl-C


def test_ctrl_c_once_ends_what_runs_and_the_same_command_goes_on(here, folder, capsys, tmp_path):
    def press(pool):
        if len(here.served) == 1:
            os.kill(os.getpid(), signal.SIGINT)

    here.on_wait = press
    assert command("seed=0,1,2,3") == 130
    assert len(runs_in(folder)) == 2
    assert "2 of 4 runs left" in capsys.readouterr().err
    here.on_wait = None
    assert command("seed=0,1,2,3") == 0
    assert len(here.served) == 4
    assert command("seed=0,1,2,3", f"hydra.sweep.dir={tmp_path}/whole") == 0
    assert runs_in(folder) == runs_in(tmp_path / "whole")
    for name in runs_in(folder):
        assert said(folder / name) == said(tmp_path / "whole" / name)
    assert (folder / "table.md").read_bytes() == (tmp_path / "whole" / "table.md").read_bytes()


@pytest.mark.parametrize("signals", [(signal.SIGINT, signal.SIGINT), (signal.SIGTERM,)])
def test_ctrl_c_twice_kills(here, folder, signals):
    def press(pool):
        if len(here.served) == 1:
            for number in signals:
                os.kill(os.getpid(), number)
            type(pool).answer = lambda self, task: {"status": "ready"}  # the run goes on and on

    here.on_wait = press
    assert command("seed=0,1,2", "launcher.workers=1") == 130
    assert here.made[0].hands == []
    assert sorted(state.state for state in states(folder).values()) == ["done", "queued", "queued"]


# --- two commands at once


def test_a_run_that_another_command_holds_is_waited_for_and_taken_from_it(here, folder, capsys):
    """Held from the start, and finished meanwhile: it is not done twice. Given up: it is taken over."""
    assert command("seed=0,1", "adapter=fixed") == 0
    done = sorted(runs_in(folder))[0]
    hidden = folder / done / "summary.hidden"
    (folder / done / records.SUMMARY).rename(hidden)
    claim = exclusive(folder / done / CLAIM, "")
    waits = []

    def finish(pool):
        waits.append(1)
        if len(waits) == 3:
            hidden.rename(folder / done / records.SUMMARY)
            claim.close()

    here.on_wait = finish
    here.served.clear()
    assert command("seed=0,1,2", "adapter=fixed") == 0
    assert len(here.served) == 1
    assert f"{done}: another command is at it" in capsys.readouterr().err
    assert states(folder)[done].reused
    claim = exclusive(folder / done / CLAIM, "")
    (folder / done / records.SUMMARY).unlink()
    here.on_wait = lambda pool: claim.close()
    assert command("seed=0,1,2", "adapter=fixed") == 0
    assert here.served[1:] == [done]


def test_two_commands_at_once_do_no_run_twice(folder, here):
    """Each in a process of its own, which notes what it served."""

    def one(number):
        def go():
            Here.served, Here.made = [], []
            commands.Pool = Here
            command("seed=0,1,2,3,4,5", "launcher.workers=1")
            (folder.parent / f"served{number}").write_text("\n".join(Here.served))

        return go

    other = os.fork()
    if other == 0:
        in_child(one(0), None)
        os._exit(0)
    in_child(one(1), None)
    os.waitpid(other, 0)
    served = [name for number in (0, 1) for name in (folder.parent / f"served{number}").read_text().split()]
    assert sorted(served) == sorted(runs_in(folder))
    assert len(served) == 6
    for name in served:
        assert len(records.read_attempts(folder / name)) == 1
