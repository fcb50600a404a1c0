"""The commands that end an experiment, as users call them."""

from __future__ import annotations

import sys

import pytest
from analysis_cases import SAMPLED
from run_cases import composed

from tracedraft import cli
from tracedraft.measure import measure


@pytest.fixture
def tell(monkeypatch, capsys, tmp_path):
    """Call the console script in an empty folder: exit status, stdout, stderr."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["tracedraft", *arguments])
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            cli.main()
        said = capsys.readouterr()
        return int(str(left.value.code)), said.out, said.err

    return call


@pytest.mark.parametrize("command", ["check", "pack", "sync"])
def test_help_says_what_for_and_a_wrong_call_what_is_right(tell, command):
    code, out, err = tell(command, "--help")
    assert (code, err) == (0, "")
    usage, empty, *text = out.splitlines()
    assert usage.startswith(f"usage: tracedraft {command} ")
    assert (empty, bool(text)) == ("", True)
    assert all(len(line) <= 118 for line in text)
    for wrong in ((), ("--all",), ("a", "b", "c") if command == "pack" else ("a", "timeout=x", "orders=x")):
        assert tell(command, *wrong) == (2, "", out)


def test_a_place_without_runs(tell, tmp_path):
    for command in ("check", "pack", "sync"):
        code, out, err = tell(command, str(tmp_path))
        assert (code, out) == (2, "")
        assert err.startswith(f"error: {tmp_path}: no ")
        assert "give the folder of a sweep" in err


def test_a_sweep_is_packed_and_checked_from_there(tell, tmp_path):
    measure(composed(*SAMPLED, "adapter=reset"), tmp_path / "mine" / "run", "mine")
    code, out, err = tell("pack", "mine")
    assert (code, err) == (0, "")
    assert out.startswith("analysis/records/mine.jsonl.gz: 1 run, 2 conversations, ")
    assert tell("pack", "mine", "elsewhere")[1].startswith("elsewhere/mine.jsonl.gz")
    for place in ("mine", "analysis/records", "elsewhere/mine.jsonl.gz"):
        code, out, err = tell("check", place, "conversations=3")
        assert (code, err) == (1, "")
        assert "conversations: reset on sample_math at temperature 0.7 has 2 of 3 conversations\n    run\n" in out
        assert "\n1 run, 2 conversations: " in out
