import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from tracedraft.tracking import NullTracker, WandbTracker, flatten, open_tracker, sigterm_as_exit


@pytest.fixture(autouse=True)
def _own_wandb_folders(tmp_path, monkeypatch):
    for name in ("CONFIG_DIR", "CACHE_DIR", "DATA_DIR"):
        monkeypatch.setenv(f"WANDB_{name}", str(tmp_path / "wandb-home"))


def tracker(tmp_path, mode="offline", run_id="run1", config=None):
    return open_tracker(mode, "p", None, "sweep", "adapt", ["t"], config or {}, tmp_path, run_id)


def read_wandb(run_dir: Path) -> list[dict]:
    """All records of the one .wandb file of a run directory, by the client's own reader."""
    (file,) = run_dir.glob("wandb/offline-run-*/*.wandb")
    deadline = time.monotonic() + 10  # the client's service may still be writing when finish() returns
    while file.stat().st_size <= 7 and time.monotonic() < deadline:  # 7 bytes are the bare header
        time.sleep(0.01)
    assert file.stat().st_size > 7
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    return [json.loads(line) for line in done.stdout.splitlines() if line]


def history(found: list[dict]) -> list[dict]:
    items = [r["history"]["item"] for r in found if r["type"] == "history"]
    return [{k: v for k, v in item.items() if k not in ("_runtime", "_timestamp")} for item in items]


def of_type(found: list[dict], kind: str) -> dict:
    (only,) = [r[kind] for r in found if r["type"] == kind]
    return only


def test_disabled_leaves_no_trace_and_loads_no_client(tmp_path):
    code = """
        import sys; from pathlib import Path; from tracedraft.tracking import open_tracker
        t = open_tracker("disabled", "p", None, None, None, [], {}, Path(sys.argv[1]), "x")
        t.log({"a": 1}, 0); t.finish({}, 0)
        sys.exit("wandb" in sys.modules or t.error is not None)
    """
    folder = tmp_path / "run"
    folder.mkdir()
    assert subprocess.run([sys.executable, "-c", textwrap.dedent(code), str(folder)]).returncode == 0
    assert list(folder.iterdir()) == []
    assert isinstance(tracker(tmp_path, mode="disabled"), NullTracker)


def test_flatten():
    assert flatten({"a": 1, "b": {"c": [1, {"d": 2}], "e": {"f": None}}, "g": {}}) == {
        "a": 1,
        "b.c": [1, {"d": 2}],
        "b.e.f": None,
    }


def test_what_only_rows_have_stands_for_no_whole_run(tmp_path):
    """By default the last row's value would."""
    made = open_tracker("offline", "p", None, None, "adapt", [], {}, tmp_path, "id", of_rows=("acceptance.*",))
    made.log({"acceptance": {"1": 0.5}, "tau": 2.0}, 0)
    made.finish({}, 0)
    assert made.error is None
    metrics = [r["metric"] for r in read_wandb(tmp_path) if r["type"] == "metric"]
    assert [m["glob_name"] for m in metrics if "glob_name" in m] == ["acceptance.*"]


def test_offline_runs_of_one_process_keep_their_own_rows(tmp_path):
    dirs = [tmp_path / "one", tmp_path / "two"]
    trackers = []
    for number, folder in enumerate(dirs):
        folder.mkdir()
        trackers.append(tracker(folder, run_id=f"id{number}", config={"adapter": {"lr": number}}))
    for step in range(3):
        for number, each in enumerate(trackers):
            each.log({"tau": step + number, "seconds": {"verify": {"mean": 0.5}}}, step)
    for each in trackers:
        each.finish({"tau": 1.5, "fixed": {"tau": 1.25}, "speedup": None}, exit_code=0)
        assert each.error is None
    for number, folder in enumerate(dirs):
        found = read_wandb(folder)
        assert history(found) == [
            {"_step": step, "tau": step + number, "seconds.verify.mean": 0.5} for step in range(3)
        ]
        run = of_type(found, "run")
        assert (run["run_id"], run["run_group"], run["job_type"]) == (f"id{number}", "sweep", "adapt")
        assert run["config"]["update"]["adapter"] == {"lr": number}
        summary = {}
        for each in found:
            if each["type"] == "summary":
                summary |= each["summary"]["update"]
        assert (summary["fixed.tau"], summary["speedup"]) == (1.25, None)
        assert of_type(found, "exit")["exit_code"] == 0


def test_a_table_is_kept_with_the_run_and_an_empty_one_is_not(tmp_path):
    t = tracker(tmp_path)
    t.log({"tau": 1.5}, 0)
    t.table("updates", ("round", "reason"), [[5, ""], [10, "drift over cap"]])
    t.table("none", ("round",), [])
    t.finish({}, exit_code=0)
    assert t.error is None
    (file,) = tmp_path.glob("wandb/offline-run-*/files/media/table/*.table.json")
    assert json.loads(file.read_text()) == {"columns": ["round", "reason"], "data": [[5, ""], [10, "drift over cap"]]}
    keys = [key for item in history(read_wandb(tmp_path)) for key in item]
    assert any(key.startswith("updates") for key in keys)
    assert not any(key.startswith("none") for key in keys)


class Client:
    """Stands in for a W&B run; the named method raises."""

    def __init__(self, broken):
        self.broken, self.calls, self.summary = broken, [], {}

    def _call(self, name):
        self.calls.append(name)
        if name == self.broken:
            raise ConnectionResetError("Connection lost\nby peer")

    def log(self, row, step):
        self._call("log")

    def finish(self, exit_code):
        self._call("finish")


@pytest.mark.parametrize(("broken", "calls"), [("log", ["log", "finish"]), ("finish", ["log", "log", "finish"])])
def test_a_client_that_breaks_is_recorded_and_left_alone(tmp_path, monkeypatch, broken, calls):
    client = Client(broken)
    monkeypatch.setattr("wandb.init", lambda **_: client)
    broken_tracker = tracker(tmp_path)
    broken_tracker.log({"a": 1}, 0)
    broken_tracker.log({"a": 2}, 1)
    broken_tracker.finish({}, 0)
    broken_tracker.finish({}, 0)
    assert broken_tracker.error == f"wandb {broken}: ConnectionResetError: Connection lost"
    assert client.calls == calls


def test_a_client_that_does_not_start_is_recorded(tmp_path, monkeypatch):
    def fail(**_):
        raise RuntimeError

    monkeypatch.setattr("wandb.init", fail)
    broken = tracker(tmp_path)
    broken.log({"a": 1}, 0)
    broken.finish({}, 0)
    assert broken.error == "wandb init: RuntimeError"


def test_an_id_the_real_client_refuses_is_recorded(tmp_path):
    broken = tracker(tmp_path, run_id="not/an:id")
    assert isinstance(broken, WandbTracker)
    assert broken.error is not None
    assert broken.error.startswith("wandb init: ")
    broken.finish({}, 0)


def test_a_missing_client_is_recorded(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert tracker(tmp_path).error.startswith("wandb init: ModuleNotFoundError")


RUN = """
    import os, signal, subprocess, sys, time
    from pathlib import Path
    from tracedraft.tracking import open_tracker, sigterm_as_exit

    t = open_tracker("offline", "p", None, None, None, [], {}, Path(sys.argv[1]), "x")
    code = 1
    with sigterm_as_exit():
        try:
            for step in range(10):
                t.log({"a": step}, step)
            {body}
            code = 0
        finally:
            t.finish({"rows": 10}, code)
            print("error:", t.error, flush=True)
"""


def run_process(tmp_path, body):
    code = textwrap.dedent(RUN).replace("{body}", body)
    # A client started in this process would be shared, where the test needs one that is the child's own.
    env = {k: v for k, v in os.environ.items() if k != "WANDB_SERVICE"}
    return subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def test_sigterm_finishes_an_offline_run_and_its_rows_survive(tmp_path):
    process = run_process(tmp_path, "print('ready', flush=True); time.sleep(60)")
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=60)
    assert out == "error: None\n"
    assert process.returncode == 143
    found = read_wandb(tmp_path)
    assert history(found) == [{"_step": step, "a": step} for step in range(10)]
    assert of_type(found, "exit")["exit_code"] == 1


def test_the_death_of_the_real_client_does_not_stop_the_run(tmp_path):
    # The client's service is the only other process that this one started.
    kill = "import psutil; [child.kill() for child in psutil.Process().children(recursive=True)]"
    log = "[t.log({'a': step}, step) for step in range(10, 200)]"
    process = run_process(tmp_path, f"{kill}; time.sleep(0.2); {log}; print('went on', flush=True)")
    out, _ = process.communicate(timeout=60)
    first, second = out.splitlines()
    assert first == "went on"
    assert second.startswith("error: wandb log: ")
    assert process.returncode == 0


def test_sigterm_raises_inside_and_the_handler_before_is_back_outside():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as caught, sigterm_as_exit():  # noqa: PT012
        assert signal.getsignal(signal.SIGTERM) is not before
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            signal.raise_signal(signal.SIGTERM)  # a second one must not cut the winding down short
            wound_down = True
    assert wound_down
    assert caught.value.code == 143
    assert signal.getsignal(signal.SIGTERM) is before


def test_sigterm_as_exit_does_nothing_in_other_threads():
    before, seen = signal.getsignal(signal.SIGTERM), []

    def work():
        with sigterm_as_exit():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [before]
