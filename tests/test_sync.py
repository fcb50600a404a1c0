"""Uploads, one by one, by a stand-in for the client's own command."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

import pytest

from analysis.bench_reader import encoded
from tracedraft.analysis.commands import sync
from tracedraft.errors import UserError
from tracedraft.files import exclusive
from tracedraft.records import ATTEMPTS

WANDB = """
    #!{python}
    import os, pathlib, sys, time
    assert sys.argv[1] == "sync" and "WANDB_MODE" not in os.environ, sys.argv
    (file,) = pathlib.Path(sys.argv[2]).glob("*.wandb")
    with open({log!r}, "a") as log:
        log.write(file.stem + chr(10))
    if "refused" in file.name:
        print("wandb: ERROR 403 at upload")  # and returns 0, as the real one does
    elif "hanging" in file.name:
        time.sleep(60)
    elif "crashing" in file.name:
        sys.exit("Error: No API key configured")
    elif "silent" not in file.name:
        file.with_suffix(".wandb.synced").touch()
"""


@pytest.fixture
def asked(tmp_path, monkeypatch):
    """Puts the stand-in on PATH; what it was asked to send."""
    command = tmp_path / "bin" / "wandb"
    command.parent.mkdir()
    log = tmp_path / "asked"
    command.write_text(textwrap.dedent(WANDB).strip().format(python=sys.executable, log=str(log)))
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(command.parent), prepend=":")
    monkeypatch.setenv("WANDB_MODE", "offline")
    return lambda: log.read_text().split() if log.exists() else []


def logged(sweep: Path, name: str, data: bytes | None = None) -> Path:
    file = sweep / name / "wandb" / f"offline-run-1-{name}" / f"run-{name}.wandb"
    file.parent.mkdir(parents=True)
    (sweep / name / ATTEMPTS).write_text("")
    file.write_bytes(encoded(name, {}, [{"counts": "{}"}], 0) if data is None else data)
    return file


def test_every_fit_run_is_sent_whatever_the_others_do(tmp_path, asked, capsys):
    sweep = tmp_path / "sweep"
    whole = encoded("x", {}, [{"counts": "y" * 500}] * 9, 0)
    names = ("a-fine", "b-refused", "c-crashing", "d-silent", "e-hanging", "f-fine")
    for name in names:
        logged(sweep, name)
    logged(sweep, "g-empty", whole[:7])
    logged(sweep, "h-cut", whole[:-30])
    logged(sweep, "i-fine")
    assert sync(sweep, timeout=2) == 1
    lines = capsys.readouterr().out.splitlines()
    assert asked() == [f"run-{name}" for name in (*names, "i-fine")]
    assert lines[0] == "[1/9] a-fine: uploaded"
    assert lines[1] == "[2/9] b-refused: failed: wandb: ERROR 403 at upload"
    assert lines[2] == "[3/9] c-crashing: failed: Error: No API key configured"
    assert lines[3] == "[4/9] d-silent: failed: wandb sync returned 0 and sent nothing"
    assert lines[4] == "[5/9] e-hanging: failed: no answer within timeout=2 seconds"
    assert "holds no run" in lines[6]
    assert "h-cut: failed: run-h-cut.wandb is cut short" in lines[7]
    assert lines[8] == "[9/9] i-fine: uploaded"
    assert lines[9] == "3 of 9 uploaded; failed: b-refused, c-crashing, d-silent, e-hanging, g-empty, h-cut"


def test_the_same_again_sends_what_is_missing(tmp_path, asked, capsys):
    first = logged(tmp_path, "a")
    assert sync(tmp_path, timeout=10) == 0
    logged(tmp_path, "b")
    assert sync(tmp_path, timeout=10) == 0
    assert asked() == ["run-a", "run-b"]
    assert "[1/2] a: uploaded before" in capsys.readouterr().out
    assert first.exists()


def test_a_run_at_work_is_left_for_later(tmp_path, asked, capsys):
    logged(tmp_path, "a")
    with exclusive(tmp_path / "a" / ATTEMPTS, "wait"):
        assert sync(tmp_path, timeout=10) == 1
    assert "[1/1] a: failed: the run is still at work" in capsys.readouterr().out
    assert asked() == []


def test_nothing_to_send(tmp_path):
    with pytest.raises(UserError, match="no offline W&B run there"):
        sync(tmp_path, timeout=10)
