"""Where a run comes from: versions, hardware and the state of its own checkout."""

import json
import os
import subprocess
import sys

import torch

from tracedraft import provenance as origins
from tracedraft.provenance import git_state, provenance


def test_provenance_is_json_and_names_what_ran(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["run.py", "seed=1"])
    facts = json.loads(json.dumps(provenance(), allow_nan=False))
    assert facts["argv"] == ["run.py", "seed=1"]
    assert facts["started"].endswith("+00:00")
    assert facts["versions"]["torch"] == torch.__version__
    assert set(facts["versions"]) == {"python", "torch", "transformers", "hydra-core", "wandb", "tracedraft"}
    assert facts["torch_threads"] == torch.get_num_threads()
    hardware = facts["hardware"]
    assert hardware["logical_cores"] == os.cpu_count()
    assert hardware["memory_bytes"] > 2**28
    assert hardware["cpu"]
    assert hardware["instructions"] == torch.backends.cpu.get_cpu_capability()
    assert len(hardware["gpus"]) == torch.cuda.device_count()


def git(folder, *args):
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    env = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    command = ["git", "-C", str(folder), *identity, *args]
    return subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout.strip()


def test_the_commit_is_that_of_the_code_that_was_loaded(monkeypatch):
    before = provenance()["git"]
    monkeypatch.setattr(origins, "git_state", lambda root: {"commit": "0" * 40, "dirty": False, "reason": None})
    assert provenance()["git"] == before


def test_git_state_is_that_of_its_own_checkout_only(tmp_path, monkeypatch):
    source = tmp_path / "source"
    source.mkdir()
    nothing = git_state(source)
    assert (nothing["commit"], nothing["dirty"]) == (None, None)
    assert nothing["reason"]
    git(source, "init")
    (source / "a").write_text("1")
    git(source, "add", "a")
    assert git_state(source)["commit"] is None  # no commit yet
    git(source, "commit", "-m", "a")
    head = git(source, "rev-parse", "HEAD")
    assert git_state(source) == {"commit": head, "dirty": False, "reason": None}
    (source / "a").write_text("2")
    assert git_state(source) == {"commit": head, "dirty": True, "reason": None}

    site_packages = source / "venv" / "site-packages"
    site_packages.mkdir(parents=True)
    inside = git_state(site_packages)
    assert (inside["commit"], inside["dirty"]) == (None, None)
    assert "another repository" in inside["reason"]

    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.setenv("GIT_DIR", str(source / ".git"))
    assert git_state(elsewhere)["commit"] is None


def test_git_state_without_git_gives_a_reason(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_state(tmp_path) == {
        "commit": None,
        "dirty": None,
        "reason": "git can't be run: FileNotFoundError",
    }
