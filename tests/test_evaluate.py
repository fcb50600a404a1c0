"""``tracedraft eval-draft`` on the tiny pair, against the counts of serving itself."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from tracedraft.config import shipped_dir
from tracedraft.errors import UserError
from tracedraft.evaluate import evaluate_draft

TINY = ("target=tiny", "draft=tiny", "decode.max_new_tokens=24", "threads=1")


def eval_draft(tmp_path: Path, *overrides: str, expect: int = 0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tracedraft.eval_draft", *TINY, *overrides]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == expect, done.stderr
    return done


@pytest.fixture(scope="module")
def result(tmp_path_factory) -> tuple[str, dict]:
    folder = tmp_path_factory.mktemp("eval")
    done = eval_draft(folder, "workload=sample_chat", "workload.limit=3", f"hydra.run.dir={folder}/out")
    return done.stdout, json.loads((folder / "out" / "eval-draft.json").read_text())


def test_it_reports_each_temperature(result):
    printed, kept = result
    assert [row["temperature"] for row in kept["rows"]] == [0.0, 0.7]
    for row in kept["rows"]:
        assert row["responses"] >= 3
        assert row["refused"] == 0
        assert row["tau"] == (row["accepted"] + row["rounds"]) / row["rounds"]
        assert row["tokens"] <= row["responses"] + row["accepted"] + row["rounds"]
        assert len(row["acceptance_by_depth"]) == 5
        assert 0 < row["coverage"] <= 1
        assert row["verify_ms"] > 0
        assert f"{row['tau']:.2f}" in printed
    assert kept["draft_step_ms"] > 0
    assert kept["provenance"]["fingerprint"]


def test_counts_equal_those_of_a_run(result, tmp_path):
    """The fixed arm of the main job answers the same prompts in the same rounds."""
    _, kept = result
    for row in kept["rows"]:
        folder = tmp_path / str(row["temperature"])
        overrides = ("workload=sample_chat", "workload.limit=3", "adapter=fixed", "wandb.mode=disabled")
        command = [sys.executable, "-m", "tracedraft.run", *TINY, *overrides]
        command += [f"decode.temperature={row['temperature']}", f"hydra.run.dir={folder}"]
        subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, timeout=120)
        fixed = json.loads((folder / "summary.json").read_text())["fixed"]
        assert {name: row[name] for name in ("rounds", "accepted", "tokens", "tau")} == {
            name: fixed[name] for name in ("rounds", "accepted", "tokens", "tau")
        }


def test_a_chain_of_one_has_no_further_step(tmp_path):
    eval_draft(tmp_path, "workload=sample_chat", "workload.limit=1", "decode.chain_length=1", "hydra.run.dir=out")
    kept = json.loads((tmp_path / "out" / "eval-draft.json").read_text())
    assert kept["draft_step_ms"] is None
    assert "one step" in kept["null_reasons"]["draft_step_ms"]


def test_without_any_answer_there_is_a_result_and_a_reason(tmp_path):
    eval_draft(tmp_path, "workload=sample_chat", "workload.limit=2", "target.context=8", "hydra.run.dir=out")
    kept = json.loads((tmp_path / "out" / "eval-draft.json").read_text())
    assert kept["draft_step_ms"] is None
    assert "target.context" in kept["null_reasons"]["draft_step_ms"]
    assert [(row["responses"], row["refused"], row["tau"]) for row in kept["rows"]] == [(0, 2, None)] * 2


def test_a_tree_is_reported_by_depth_too(tmp_path):
    eval_draft(tmp_path, "workload=sample_chat", "workload.limit=1", "decode=tree", "hydra.run.dir=out")
    kept = json.loads((tmp_path / "out" / "eval-draft.json").read_text())
    depth = kept["specs"]["decode"]["tree_depth"]
    assert [len(row["acceptance_by_depth"]) for row in kept["rows"]] == [depth, depth]
    assert depth > 1


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("temperatures=[]", "temperatures=[]: expected one or more"),
        ("temperatures=[a]", "temperatures=['a']: expected one or more"),
        ("temperatures=0.7", "temperatures=0.7: expected one or more"),
        ("threads=0", "threads=0: expected 1 or more"),
        ("threads=-1", "threads=-1: expected 1 or more"),
        ("seed=a", "seed='a': expected"),
        ("temperatures=[-1]", "decode.temperature=-1"),
        ("workload.limit=0", "limit=0"),
    ],
)
def test_bad_input_is_one_line(tmp_path, override, says):
    with initialize_config_dir(str(shipped_dir("conf")), version_base="1.3"):
        cfg = compose("eval-draft", [*TINY, override])
    with pytest.raises(UserError) as caught:
        evaluate_draft(cfg, tmp_path / "out")
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()
