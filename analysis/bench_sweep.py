"""What a sweep costs beside its runs: ``make bench-sweep``.

The same runs of the tiny pair by our pool, by Hydra's own launcher and, in an environment made for it, by
hydra-ray-launcher; then how often a sweep of the embedded pair loads a model, and how long ``status`` takes over a
ledger of ten thousand runs. Let nothing else run meanwhile: the load found is printed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
import time
import venv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from tracedraft.launch.ledger import LEDGER, Ledger

OTHER = "hydra-ray-launcher==1.2.2"
NEEDS = ("boto3", "aiohttp<4", "cloudpickle<3")  # beside Ray, of which it takes ours
TINY = (
    "target=tiny",
    "draft=tiny",
    "wandb.mode=disabled",
    "threads=1",
    "workload.limit=1",
    "workload.max_turns=1",
    "decode.max_new_tokens=8",
)


def sweep(python: Path, folder: Path, *overrides: str) -> tuple[float, list[int]]:
    """Run a sweep in a process of its own: wall seconds, and its resident bytes every second."""
    command = [str(python), "-m", "tracedraft.run", "-m", *overrides, f"hydra.sweep.dir={folder}"]
    began, memory = time.monotonic(), []
    with open(folder.parent / f"{folder.name}.log", "w") as log:
        child = psutil.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        while child.poll() is None:
            try:
                memory.append(child.memory_info().rss)
            except psutil.NoSuchProcess:
                break
            time.sleep(1.0)
    if child.wait() != 0:
        print(f"{folder.name} ended with status {child.returncode}: {folder.parent / f'{folder.name}.log'}")
    return time.monotonic() - began, memory


def events(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / LEDGER).read_text().splitlines()]


def pool(python: Path, folder: Path, runs: int, workers: int) -> dict[str, float]:
    """What the pool adds to its runs, from its own ledger."""
    wall, memory = sweep(
        python, folder, *TINY, f"launcher.workers={workers}", "launcher.cpus_per_worker=1", seeds(runs)
    )
    told = events(folder)
    start = next(event for event in told if event["event"] == "sweep")
    begun = [event["time"] for event in told if event["event"] == "started"]
    ended = [event for event in told if event["event"] == "finished"]
    busy = (ended[-1]["time"] - begun[0]) * workers
    work = sum(event["work"] for event in ended)
    # Of the time that the loop ran; before it, the driver is still reading what it needs.
    half = memory[len(memory) // 2 :]
    return {
        "wall_s": wall,
        "runs": len(ended),
        "work_s_a_run": work / len(ended),
        "beside_work_ms_a_run": (busy - work) / len(ended) * 1e3,
        "planning_ms_a_run": start["planning"] / runs * 1e3,
        "hydra_composing_ms_a_run": 2 * start["composing"] / runs * 1e3,  # Hydra does it once more before
        "until_first_run_s": begun[0] - start["time"],
        "driver_mib_half_way": half[0] / 2**20,
        "driver_mib_at_end": memory[-2] / 2**20,
    }


def seeds(runs: int) -> str:
    return "seed=" + ",".join(map(str, range(runs)))


def other_environment(folder: Path) -> Path:
    """A throw-away environment with the other launcher, over the packages of this one."""
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    (own,) = (folder / "lib").glob("python*/site-packages")
    (own / "zz_base.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    pip = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    subprocess.run([*pip, "--ignore-installed", *NEEDS], check=True)
    subprocess.run([*pip, "--no-deps", OTHER], check=True)
    return python


def loads(python: Path, folder: Path) -> dict[str, float]:
    """Twelve runs of the embedded pair on two workers."""
    size = ("measure=acceptance", "workload.limit=1", "workload.max_turns=1", "decode.max_new_tokens=16")
    grid = ("workload=sample_math,sample_chat", "adapter=reset,persistent", "seed=0,1,2")
    workers = ("launcher.workers=2", "launcher.cpus_per_worker=1", "threads=1", "wandb.mode=disabled")
    sweep(python, folder, *size, *grid, *workers, f"paths.recordings={folder}/recordings")
    most: dict[int, int] = {}
    for event in events(folder):
        if event["event"] == "finished":
            most[event["worker"]] = max(most.get(event["worker"], 0), event["loads"])
    return {"runs": 12, "workers": len(most), "model_loads": sum(most.values())}


def status_seconds(python: Path, folder: Path) -> float:
    """``tracedraft status`` over ten thousand finished runs, the start of Python included."""
    folder.mkdir()
    ledger = Ledger(folder, "bench")
    ledger.add("sweep", argv=[], runs=10_000, workers=2, threads=1)
    for number in range(10_000):
        run = f"sample_math_reset_{number:08x}"
        ledger.add("queued", run, fingerprint=f"{number:016x}", overrides=["a=1", "b=2"], conversations=12)
        ledger.add("started", run, attempt=1, where="worker 0 on 0123abcd")
        ledger.add("finished", run, seconds=1.0, work=1.0, loads=1, worker=0)
    code = "from tracedraft.cli import main; main()"
    began = time.monotonic()
    subprocess.run([str(python), "-c", code, "status", str(folder)], stdout=subprocess.DEVNULL, check=True)
    return time.monotonic() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=500, help="of the tiny pair")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--without", nargs="*", default=[], choices=["ray", "basic", "loads"], help="parts to skip")
    parser.add_argument("--out", type=Path, help="the JSON file; by default only printed")
    given = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    python, result = Path(sys.executable), {"load_average": psutil.getloadavg()[0]}
    init, remote = "+hydra.launcher.ray.init.num_cpus", "+hydra.launcher.ray.remote.num_cpus"
    ray = ("hydra/launcher=ray", f"{init}={given.workers}", f"{remote}=1")
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        os.environ["TRACEDRAFT_CACHE"] = os.environ.get("TRACEDRAFT_CACHE", str(Path.home() / ".cache/tracedraft"))
        parts: dict[str, Callable[[], Any]] = {
            "pool": lambda: pool(python, root / "pool", given.runs, given.workers),
            "basic": lambda: {
                "wall_s": sweep(python, root / "basic", *TINY, seeds(given.runs), "hydra/launcher=basic")[0]
            },
            "ray": lambda: {
                "wall_s": sweep(other_environment(root / "venv"), root / "ray", *TINY, seeds(given.runs), *ray)[0]
            },
            "loads": lambda: loads(python, root / "loads"),
            "status_of_10000_s": lambda: status_seconds(python, root / "status"),
        }
        for name, part in parts.items():
            if name not in given.without:
                result[name] = part()
                print(f"{name}: {json.dumps(result[name])}", flush=True)
    result["load_average_after"] = psutil.getloadavg()[0]
    print(json.dumps(result, indent=1))
    if given.out:
        given.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
