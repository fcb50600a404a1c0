"""Sweeps on Ray: warm workers, lost ones, GPUs, and machines that come and go."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

import launch_cases
import pytest
from launch_cases import TINY, Faulty, command, said, states

from tracedraft import records
from tracedraft.launch import pool as pools
from tracedraft.launch import sweep as sweeps
from tracedraft.launch import worker as workers
from tracedraft.launch.ledger import LEDGER, _events

TWO = ("launcher.workers=2", "launcher.cpus_per_worker=1", "threads=1")


pytestmark = pytest.mark.usefixtures("plain_environment")


@pytest.fixture(scope="module")
def ray():
    """A local Ray of four CPUs and two GPUs that it only believes to have, shared by the tests below."""
    import ray

    ray.init(
        num_cpus=4,
        num_gpus=2,
        include_dashboard=False,
        object_store_memory=pools.OBJECT_STORE,
        log_to_driver=False,
        logging_level="ERROR",
    )
    yield ray
    ray.shutdown()


@pytest.fixture
def folder(tmp_path) -> Path:
    return tmp_path / "runs" / "sweep"


def events(folder: Path, kind: str) -> list[dict]:
    return [event for event in _events(folder / LEDGER) if event["event"] == kind]


def test_a_single_run_and_a_dry_run_never_start_ray(tmp_path):
    code = f"""
import sys
sys.path.append({str(Path(__file__).parent)!r})
from launch_cases import TINY, command
from tracedraft.cli import run
assert command("launcher.dry_run=true") == 0
sys.argv[1:] = TINY
run()
assert "ray" not in sys.modules
"""
    assert subprocess.run([sys.executable, "-c", code], cwd=tmp_path, timeout=120).returncode == 0


def test_workers_stay_warm_and_forget_what_they_learned(ray, folder):
    """A, B, A on one worker: both A equal a cold one. As many loads as models, whatever the order of jobs."""
    one = ("launcher.workers=1", "launcher.cpus_per_worker=1")
    learning = (
        "adapter.every=2",
        "adapter.lr=0.3,0.1,0.30000001",
        "adapter.min_positions=1",
        "adapter.drift_cap=null",
    )
    longer = ("decode.max_new_tokens=24", "workload=sample_chat")
    assert command(*one, *learning, *longer, "target.seed=0,1") == 0
    finished = events(folder, "finished")
    assert [event["loads"] for event in finished] == [1, 1, 1, 2, 2, 2]
    for a, b, again in (finished[:3], finished[3:]):
        drifts = [sum(records.read_summary(folder / event["run"])["drift"].values()) for event in (a, b, again)]
        assert drifts[0] > 0
        assert drifts[0] == pytest.approx(drifts[2], rel=1e-5)
        assert drifts[0] != pytest.approx(drifts[1], rel=1e-2)
    cold = finished[2]["run"]
    warm = said(folder / cold)
    shutil.rmtree(folder / cold)
    assert command(*one, *learning[:1], "adapter.lr=0.30000001", *learning[2:], *longer, "target.seed=0") == 0
    assert events(folder, "finished")[-1]["run"] == cold
    assert said(folder / cold) == warm


def test_what_goes_wrong_in_one_run_stays_there(ray, folder, monkeypatch, capsys):
    """Of eight runs one kills its worker, one raises what can't be unpickled, one hangs, one dies once."""
    ray.cloudpickle.register_pickle_by_value(launch_cases)  # workers don't find the tests' folder
    monkeypatch.setattr(pools, "Worker", Faulty)
    limit = ("launcher.run_timeout_s=15", "launcher.max_attempts=2")  # a run takes 1 s, and 8 under load
    assert command("seed=0,1,2,3,4,5,6,7", *TWO, *limit) == 1
    found = {int(overrides(state)["seed"]): state for state in states(folder).values()}
    assert {seed for seed, state in found.items() if state.state == "failed"} == {1, 2, 3}
    assert {seed: state.attempt for seed, state in found.items()} == dict.fromkeys(range(8), 1) | {
        1: 2,
        2: 2,
        3: 2,
        4: 2,
    }
    for seed, reason in ((1, "Died"), (2, "Odd: odd 1 2"), (3, "no result after launcher.run_timeout_s=15")):
        assert reason in found[seed].reason
        log = (folder / found[seed].run / "run.log").read_text()
        assert ("Traceback" if seed == 2 else reason) in log
    err = capsys.readouterr().err
    assert "5 done, 3 failed" in err
    assert "error: 3 of 8 runs failed" in err
    before = len(events(folder, "started"))
    monkeypatch.undo()
    monkeypatch.setenv("TRACEDRAFT_RUNS", str(folder.parent))
    assert command("seed=0,1,2,3,4,5,6,7", *TWO) == 0
    assert len(events(folder, "started")) - before == 3


def overrides(state) -> dict[str, str]:
    return dict(text.split("=", 1) for text in state.facts["overrides"])


def test_runs_on_whole_gpus_never_share_one(ray, folder):
    gpus = ("launcher.gpus_per_worker=1", "launcher.cpus_per_worker=1", "measure=time", "threads=1")
    assert command("seed=0,1,2,3", *gpus) == 0
    on: dict[str, str] = {}
    for event in _events(folder / LEDGER):
        if event["event"] == "started":
            gpu = event["where"].partition("GPU ")[2]
            assert gpu in ("0", "1")
            assert gpu not in on.values()
            on[event["run"]] = gpu
        elif event["event"] == "finished":
            del on[event["run"]]
    assert Counter(event["worker"] for event in events(folder, "finished")).keys() == {0, 1}


@pytest.mark.parametrize(
    "request_", [("launcher.workers=9",), ("launcher.gpus_per_worker=3",), ("launcher.cpus_per_worker=99",)]
)
def test_what_the_machine_lacks_is_refused_at_once(ray, folder, request_, capsys):
    began = time.monotonic()
    assert command("seed=0,1", *request_) == 2
    assert time.monotonic() - began < 10
    err = capsys.readouterr().err
    assert err.startswith("error: launcher.workers=")
    assert err.count("\n") == 1
    assert not list(folder.glob(f"*/{records.ATTEMPTS}"))


def test_a_folder_that_workers_do_not_see_is_filled_from_afar(ray, folder, tmp_path, monkeypatch):
    """The workers' machine is told to look for a file that isn't there."""
    monkeypatch.setattr(sweeps.Path, "touch", lambda *_, **__: None)
    afar = Path(tempfile.gettempdir())
    asked = ("adapter=osd", "adapter.outer.update_interval=1", "keep_learner=true")
    assert command("seed=0", *asked, "launcher.workers=1", "launcher.cpus_per_worker=1") == 0
    monkeypatch.undo()
    (name,) = (path.parent.name for path in folder.glob(f"*/{records.SUMMARY}"))
    left = {"config.yaml", "attempts.jsonl", "conversations.jsonl", "summary.json", "learner.pt", "draft.pt"}
    assert {path.name for path in (folder / name).iterdir()} >= left | {workers.LOG}
    (scratch,) = afar.glob(f"tracedraft-.sweep-*/{name}")
    assert not [path for path in scratch.iterdir() if path.is_file()]
    shutil.rmtree(scratch.parent)


def test_records_name_the_command_and_no_machine(ray, folder):
    assert command("seed=0", "launcher.workers=1", "launcher.cpus_per_worker=1") == 0
    (attempts,) = map(records.read_attempts, (path.parent for path in folder.glob(f"*/{records.SUMMARY}")))
    assert attempts[0]["argv"] == ["run", "-m", *TINY, "seed=0", "launcher.workers=1", "launcher.cpus_per_worker=1"]


def test_a_lost_machine_loses_only_the_runs_on_it(folder, monkeypatch):
    """Two machines, one of which goes while it is at a run: all runs end, on the one that is left."""
    import ray
    from ray.cluster_utils import Cluster

    ray.shutdown()
    options = {"num_cpus": 1, "include_dashboard": False, "object_store_memory": pools.OBJECT_STORE}
    cluster = Cluster(initialize_head=True, head_node_args=options)
    try:
        other = cluster.add_node(num_cpus=1, object_store_memory=pools.OBJECT_STORE)
        cluster.wait_for_nodes()
        doomed = other.node_id[:8]

        def lose():
            while not any(doomed in event["where"] for event in started(folder)):
                time.sleep(0.1)
            cluster.remove_node(other, allow_graceful=False)

        thread = threading.Thread(target=lose, daemon=True)
        thread.start()
        slow = ("workload.limit=null", "decode.max_new_tokens=32", "launcher.max_attempts=3")
        code = command("seed=0,1,2,3", *slow, f"launcher.address={cluster.address}", "launcher.cpus_per_worker=1")
        thread.join(5)
        assert code == 0
        assert len(events(folder, "finished")) == 4
        assert 1 <= len(events(folder, "retried")) <= 2
    finally:
        with contextlib.suppress(Exception):
            ray.shutdown()
        cluster.shutdown()


def started(folder: Path) -> list[dict]:
    return events(folder, "started") if (folder / LEDGER).exists() else []
