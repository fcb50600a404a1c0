"""Sweeps without Ray: what is shown of them, at any time."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
from hydra.core.global_hydra import GlobalHydra
from launch_cases import TINY, command, failing, runs_in, states

from tracedraft import cli, records
from tracedraft.files import exclusive
from tracedraft.launch import board as boards
from tracedraft.launch.ledger import CLAIM, Ledger, State

pytestmark = pytest.mark.usefixtures("plain_environment")


@pytest.fixture
def folder(tmp_path) -> Path:
    return tmp_path / "runs" / "sweep"


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
    assert tail.sums.tau == pytest.approx(summary["tau"])
    assert tail.sums.tokens_per_s == pytest.approx(summary["tokens_per_s"])


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


def test_a_sweep_over_options_may_set_keys_that_the_default_one_lacks(here, capsys):
    over = ("adapter=osd,osd_reset", "adapter.outer.update_interval=1", "launcher.dry_run=true")
    assert command(*over, "adapter.outer.lr=1e-3") == 0  # of persistent, the default, there is no adapter.outer
    assert "2 runs, 2 to run" in capsys.readouterr().out
    command(*over, "adapter.outer.lrr=1e-3")
    out = capsys.readouterr().out
    assert out.count("adapter.outer.lrr: Key 'lrr' not in 'OsdSpec'; did you mean lr?") == 2
    assert "2 runs, 0 to run" in out


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
