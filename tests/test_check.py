"""The gate before publishing: what falls short is found, with the runs that it concerns, and nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from tracedraft.analysis import check as gate
from tracedraft.analysis.check import Finding, findings
from tracedraft.analysis.commands import check
from tracedraft.analysis.frames import Counted, frames, joined, tables_of
from tracedraft.analysis.schema import Runs
from tracedraft.launch.ledger import LEDGER, Ledger
from tracedraft.workloads.prompts import is_dev

Change = Callable[[dict[str, Any], list[dict[str, Any]]], None]
TEST = [id for id in (f"gsm8k/{i}" for i in range(100)) if not is_dev(id)]
DEV = next(id for id in (f"gsm8k/{i}" for i in range(100)) if is_dev(id))
ENOUGH = 4


def counted(name: str, order: int = 0, change: Change = lambda header, rows: None) -> Counted:
    """A run of Persistent that is fit to be published, but for ``change``."""
    arm = {"tokens": 9, "rounds": 5, "accepted": 3, "trials": [5], "survivals": [3], "seconds": {"verify": 1.0}}
    rows = [
        {
            "index": i, "id": TEST[i], "domain": "math", "occurrence": 0, "position": i, "refused": None, "turns": 1,
            "arms": {"fixed": arm, "adapted": arm}, "same": True, "paired": None, "audited": 9, "mismatches": 0,
            "near_ties": 0, "arms_differ": 0, "unexplained": 0, "ngrams": 2, "repeated_8gram": 0, "longest": 9,
            "ended": {"eos": 1}, "updates": {}, "drift": {}, "outer": None,
        }
        for i in range(ENOUGH)
    ]  # fmt: skip
    attempt = {
        "torch_threads": 2, "workers": 1, "hardware": {"cpu": "a CPU", "logical_cores": 2, "gpus": []},
        "git": {"commit": "0" * 40, "dirty": False}, "versions": {"python": "3.11"}, "data": {},
    }  # fmt: skip
    config = {
        "target": {"name": "t"}, "draft": {"name": "d"}, "adapter": {"name": "persistent", "scope": "stream"},
        "workload": {"name": "gsm8k", "seed": order}, "seed": 0, "measure": "time", "plain": False, "threads": None,
        "decode": {"name": "chain", "temperature": 0.7, "top_p": 1.0, "max_new_tokens": 9, "acceptance": "exact"},
    }  # fmt: skip
    header = {
        "fingerprint": name, "folder": name, "experiment": "s", "config": config, "attempts": [attempt],
    }  # fmt: skip
    header = json.loads(json.dumps(header))  # nothing shared
    change(header, rows)
    return Counted(header, rows, name, "records", header.pop("complete", True))


def loaded(*runs: Counted, problems: tuple[tuple[str, str], ...] = ()) -> Runs:
    return frames(joined([tables_of(run, run.path, None) for run in runs]), list(problems))


def found(*runs: Counted) -> list[Finding]:
    return findings(loaded(*runs), ENOUGH, 3)


def orders(count: int = 3) -> list[Counted]:
    return [counted(f"run{i}", i) for i in range(count)]


def test_runs_that_are_fit_have_no_finding():
    assert found(*orders()) == []


def put(**values: Any) -> Change:
    """Values by path into a header: ``put(config__measure="time")``."""

    def change(header: dict[str, Any], rows: list[dict[str, Any]]) -> None:
        for path, value in values.items():
            *above, last = path.split("__")
            node: Any = header
            for key in above:
                node = node[int(key) if key.isdigit() else key]
            node[last] = value

    return change


def row(**values: Any) -> Change:
    return lambda header, rows: rows[1].update(values)


def second_attempt(header: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    header["attempts"].append(json.loads(json.dumps(header["attempts"][0])) | {"torch_threads": 1})


@pytest.mark.parametrize(
    ("kind", "change", "said"),
    [
        ("incomplete", put(complete=False), "did not finish"),
        ("lossless", row(mismatches=2), "2 tokens are not the target's"),
        ("lossless", row(arms_differ=1, unexplained=1), "arms differ by more than near-ties"),
        ("code", put(attempts__0__git={"commit": "0" * 40, "dirty": True}), "uncommitted changes"),
        ("split", row(id=DEV), "answered 1 prompts that settings are tuned on"),
        ("hardware", second_attempt, "from attempt to attempt"),
    ],
)
def test_one_run_that_falls_short(kind, change, said):
    runs = [*orders(), counted("odd", 0, change)]
    (finding, *_) = [f for f in found(*runs) if f.runs == ("odd",)]
    assert (finding.kind, said in finding.text) == (kind, True)


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("hardware", put(attempts__0__hardware={"cpu": "another", "logical_cores": 2, "gpus": ["H"]})),
        ("hardware", put(attempts__0__workers=2)),
        ("versions", put(attempts__0__versions={"python": "3.12"})),
        ("code", put(attempts__0__git={"commit": "1" * 40, "dirty": False})),
    ],
)
def test_a_mixture_names_who_is_what(kind, change):
    (finding,) = found(*orders(), counted("odd", 0, change))
    assert finding.kind == kind
    assert finding.runs == ("run0", "run1", "run2", "odd")
    assert ": run0, run1, run2" in finding.text
    assert finding.text.endswith(": odd")


def test_hardware_is_no_matter_where_nothing_was_timed():
    counts = put(config__measure="acceptance")
    other = put(config__measure="acceptance", attempts__0__workers=2)
    runs = [counted(f"run{i}", i, other if i else counts) for i in range(3)]
    assert found(*runs) == []


def test_what_was_not_audited_needed_no_audit_or_is_named():
    def silent(header, rows):
        for each in rows:
            each["audited"] = 0

    def rejecting(header, rows):
        silent(header, rows)
        header["config"]["decode"]["acceptance"] = "rejection"

    assert [f.text for f in found(*(counted(f"r{i}", i, silent) for i in range(3)))] == ["were not audited"]
    assert found(*(counted(f"r{i}", i, rejecting) for i in range(3))) == []


def test_prompts_of_a_workload_that_is_never_tuned_on_may_be_any():
    def stream(header, rows):
        rows[0]["id"] = DEV
        sources = {"a": {"name": "gsm8k", "test_only": True}, "b": {"name": "math500", "test_only": False}}
        header["config"]["workload"] |= {"sources": sources}

    assert found(*(counted(f"r{i}", i, stream) for i in range(3))) == []


def test_sizes_are_counted_over_all_runs_behind_a_number():
    (few,) = findings(loaded(*orders(2)), ENOUGH, 3)
    assert (few.kind, few.runs) == ("orders", ("run0", "run1"))
    assert few.text == "persistent on gsm8k at temperature 0.7 has 2 of 3 orders: workload.seed=0,1,2"
    (small,) = findings(loaded(*orders()), ENOUGH + 1, 3)
    assert (small.kind, small.text.endswith(f"has {ENOUGH} of {ENOUGH + 1} conversations")) == ("conversations", True)
    other = put(config__adapter={"name": "reset", "scope": "conversation"})
    assert found(*orders(), counted("reset", 0, other)) == []  # which forgets: one order tells as much as three


def test_the_same_run_twice():
    (finding,) = found(*orders(), counted("run0", 0))
    assert (finding.kind, finding.runs) == ("duplicate", ("run0", "run0"))


def test_runs_that_left_nothing_fail_the_gate_and_stand_ins_only_get_a_note(tmp_path):
    runs = loaded(*orders(), problems=(("run0", "taken from its record"), ("gone", "left no record (failed: x)")))
    (finding,) = findings(runs, ENOUGH, 3)
    assert (finding.kind, finding.runs) == ("unread", ("gone",))
    assert gate.notes(runs) == [("run0", "taken from its record")]


def test_the_ledger_knows_runs_that_left_nothing(tmp_path, capsys):
    from analysis_cases import SAMPLED
    from run_cases import composed

    from tracedraft.measure import measure

    measure(composed(*SAMPLED, "adapter=reset"), tmp_path / "there", tmp_path.name)
    ledger = Ledger(tmp_path, "first")
    ledger.add("sweep")
    for name, fingerprint in (("there", "1"), ("lost", "2"), ("left out", "3"), ("typo", None)):
        ledger.add("queued", name, fingerprint=fingerprint)
    ledger.add("failed", "lost", attempt=2, reason="the worker was lost")
    ledger.add("excluded", "left out", reason="a rule")
    ledger.add("failed", "typo", attempt=0, reason="no such key")
    assert check([str(tmp_path)], 1, 1) == 1
    said = capsys.readouterr().out
    assert f"unread: left no record (failed: the worker was lost)\n    {tmp_path / 'lost'}\n" in said
    assert "no such key" in said
    assert "a rule" not in said
    ledger.path = tmp_path / LEDGER
    ledger.sweep = "second"
    ledger.add("sweep")
    ledger.close()
    check([str(tmp_path)], 1, 1)
    said = capsys.readouterr().out
    assert "the worker was lost" in said
    assert "no such key" not in said  # which a later command corrected


def test_the_report_lists_names_and_the_status_tells(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("tracedraft.analysis.commands.load_runs", lambda paths: loaded(*orders(2)))
    assert check(["x"], ENOUGH, 3) == 1
    assert capsys.readouterr().out == (
        "orders: persistent on gsm8k at temperature 0.7 has 2 of 3 orders: workload.seed=0,1,2\n"
        "    all 2 runs\n"
        f"2 runs, {2 * ENOUGH} conversations: 1 finding\n"
    )
    assert check(["x"], ENOUGH, 2) == 0
    assert capsys.readouterr().out == f"2 runs, {2 * ENOUGH} conversations: nothing falls short\n"
