"""The command line: what a user types, sees and is told."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.singleton import Singleton
from omegaconf import OmegaConf

from tracedraft import cli, measure
from tracedraft.drafts.eagle3 import lens
from tracedraft.models import eagle3
from tracedraft.models.tiny import TinyTargetSpec
from tracedraft.records import ATTEMPTS, CONFIG, CONVERSATIONS, SUMMARY, read_conversations, read_summary

TINY = ("target=tiny", "draft=tiny", "wandb.mode=disabled", "workload.limit=1", "decode.max_new_tokens=16")
ROOT = Path(cli.__file__).parents[1]


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch):
    for name in ("TRACEDRAFT_DATA", "TRACEDRAFT_RUNS", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    state = Singleton.get_state()
    yield
    GlobalHydra.instance().clear()
    Singleton.set_state(state)


@pytest.fixture
def tell(monkeypatch, capfd, tmp_path):
    """Call an entry point in this process, in an empty working folder: exit status, stdout, stderr."""
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")

    def call(entry, *arguments):
        GlobalHydra.instance().clear()
        monkeypatch.setattr(sys, "argv", ["tracedraft", *arguments])
        capfd.readouterr()
        try:
            entry()
            code = 0
        except SystemExit as left:
            code = left.code
        return code, *capfd.readouterr()

    return call


@pytest.fixture
def refused(tell, tmp_path):
    """Run a bad command into a folder that holds something precious; the message that the user gets."""
    folder = tmp_path / "runs" / "mine"
    folder.mkdir(parents=True)
    (folder / "notes.txt").write_text("precious")

    def call(*overrides):
        code, out, err = tell(cli.run, *TINY, f"hydra.run.dir={folder}", *overrides)
        assert code not in (0, None)
        assert out == ""
        assert "Traceback" not in err
        assert {path.name: path.read_text() for path in folder.iterdir()} == {"notes.txt": "precious"}
        return err

    return call


def one_line(message: str) -> str:
    """The message, after checking that it is one line and marked as an error."""
    assert message.startswith("error: ")
    assert message.count("\n") == 1
    assert message.endswith("\n")
    return message


def start(*arguments: str, cwd: Path) -> subprocess.Popen:
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return subprocess.Popen(
        [sys.executable, "-m", "tracedraft.run", *arguments],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finished(*arguments: str, cwd: Path) -> tuple[int, str, str]:
    process = start(*arguments, cwd=cwd)
    try:
        out, err = process.communicate(timeout=120)
    finally:
        process.kill()
    return process.returncode, out, err


# --- the commands


def test_usage(tell):
    code, out, err = tell(cli.main, "--help")
    assert (code, err) == (0, "")
    commands = ("run", "status", "logs", "train", "eval-draft", "export", "bench", "bench-gpu", "prefetch")
    commands += ("check", "pack", "sync")
    assert all(f"  {command} " in out for command in commands)
    assert tell(cli.main) == (2, "", out)


@pytest.mark.parametrize("command", ["measure", "-m", ""])
def test_an_unknown_command_gets_the_usage(tell, command):
    code, out, err = tell(cli.main, command)
    assert (code, out) == (2, "")
    assert err.startswith("usage: tracedraft COMMAND")


def test_help_lists_the_options_of_each_group(tell):
    code, out, err = tell(cli.run, "--help")
    assert (code or 0, err) == (0, "")
    for line in (
        "adapter: control_frozen, control_shuffled_teacher, control_wrong_shift, ensemble, ensemble_persistent, ",
        "target: llama, llama2-7b-chat, llama3.1-8b, qwen3-8b, ",
    ):
        assert line in out


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (cli.run, "config"),
        (cli.train, "train"),
        (cli.eval_draft, "eval-draft"),
        (cli.bench, "bench"),
        (cli.bench_gpu, "bench-gpu"),
        (cli.prefetch, "prefetch"),
    ],
)
def test_help_says_what_often_used_keys_mean_and_they_exist(tell, command, name):
    code, out, err = tell(command, "--help")
    assert (code or 0, err) == (0, "")
    used, _, _ = out.partition("== Configuration groups ==")
    keys = re.findall(r"^  ([a-z][\w.]*)=\S+ +\S", used, re.MULTILINE)
    assert len(keys) >= 2
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        cfg = compose(name, return_hydra_config=True)
    assert [key for key in keys if OmegaConf.select(cfg, key, default="no") == "no"] == []


@pytest.mark.parametrize("entry", [cli.run, cli.eval_draft, cli.train])
def test_bad_input_leaves_nothing_behind_but_what_was_there(tell, tmp_path, entry):
    bad = ("target=tiny", "threads=0", f"paths.runs={tmp_path}/deep/runs")
    assert tell(entry, *bad)[0] == 2
    assert not (tmp_path / "deep").exists()
    (tmp_path / "deep").mkdir()
    assert tell(entry, *bad)[0] == 2
    assert list((tmp_path / "deep").iterdir()) == []


def test_run_through_the_console_script(tell, tmp_path):
    code, out, _ = tell(cli.main, "run", *TINY, "adapter=fixed", f"paths.runs={tmp_path}/runs")
    assert code == 0
    (folder,) = (tmp_path / "runs").iterdir()
    assert out.splitlines()[-1] == f"record: {folder}"
    assert "sample_math" in out
    assert read_summary(folder)["adapter"] == "fixed"


def test_prefetch_says_that_all_is_ready(tell):
    code, out, err = tell(cli.main, "prefetch", "target=tiny", "draft=tiny")
    assert (code, out, err) == (0, "target tiny, draft tiny, workload sample_math: ready\n", "")
    code, out, err = tell(cli.main, "prefetch", "-m", "target=tiny", "draft=tiny", "workload=sample_math,sample_chat")
    assert (code, out.count("ready"), err) == (0, 2, "")


def test_export_says_where_the_draft_is(tell, tmp_path):
    source, out = saved_draft(tmp_path / "draft"), tmp_path / "out"
    command = ("export", "target=tiny", *with_draft(source), "layout=speculators", f"out={out}")
    assert tell(cli.main, *command) == (0, f"speculators draft: {out}\n", "")
    assert sorted(path.name for path in out.iterdir()) == ["config.json", "model.safetensors"]
    code, printed, err = tell(cli.main, *command)
    assert (code, printed) == (2, "")
    assert "exists already; give a new folder" in one_line(err)


def test_train_refuses_a_draft_without_a_trainer(tell, tmp_path):
    code, out, err = tell(cli.main, "train", "target=tiny", "draft=tiny", f"out={tmp_path}/out")
    assert (code, out) == (2, "")
    assert "draft='tiny' has no trainer: choose draft=eagle3 or draft=lm" in one_line(err)


# --- whole processes


def test_a_single_run_from_another_folder(tmp_path):
    code, out, err = finished(*TINY, cwd=tmp_path)
    assert code == 0, err
    (folder,) = (tmp_path / "runs").iterdir()
    assert sorted(path.name for path in folder.iterdir()) == [ATTEMPTS, CONFIG, CONVERSATIONS, SUMMARY]
    assert f"record: {folder}" in out
    summary = read_summary(folder)
    assert summary["lossless"] is True
    assert f"{summary['fixed']['tau']:.3f} → {summary['tau']:.3f}" in out
    assert "sample_math persistent 1/1" in err  # progress goes to stderr


@pytest.mark.parametrize("launcher", ["pool", "basic"])
def test_a_sweep_leaves_one_folder_a_run_and_a_table(tmp_path, launcher):
    sweep = tmp_path / "sweep"
    how = (f"hydra/launcher={launcher}", f"hydra.sweep.dir={sweep}")
    code, out, err = finished("-m", *TINY, "adapter=fixed,reset", *how, cwd=tmp_path)
    assert code == 0, err
    names = sorted(path.name for path in sweep.iterdir() if path.is_dir())
    bare = [re.sub("_[0-9a-f]{8}_t1w1$|_[01]$", "", name) for name in names]
    assert bare == ["sample_math_fixed", "sample_math_reset"]
    assert out.count("lossless") == 1  # one table, at the end
    table = (sweep / "table.md").read_text()
    for name in names:
        summary = read_summary(sweep / name)
        assert f"| sample_math | {summary['adapter']} |" in table
        assert f"{summary['speedup']:.3f}" in table
        assert f"{summary['speedup']:.3f}" in out


def test_a_sweep_goes_on_after_a_bad_run_and_lists_it(tmp_path):
    sweep = tmp_path / "sweep"
    bad_first = ("-m", *TINY, "decode.top_p=1.5,0.9", "hydra/launcher=basic", f"hydra.sweep.dir={sweep}")
    code, out, err = finished(*bad_first, cwd=tmp_path)
    assert code == 1
    assert "Traceback" not in err
    assert "failed: sample_math_persistent_0: decode.top_p=1.5: expected a share" in err
    assert read_summary(sweep / "sample_math_persistent_1")["lossless"] is True
    table = (sweep / "table.md").read_text()
    assert "| sample_math | persistent |" in table
    assert "- sample_math_persistent_0 (no summary.json)" in table
    assert "failed: sample_math_persistent_0" in out


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 128 + signal.SIGTERM), (signal.SIGINT, 130)])
def test_a_signal_leaves_whole_records(tmp_path, number, code):
    folder = tmp_path / "run"
    long = ("workload.limit=null", "decode.max_new_tokens=128", f"hydra.run.dir={folder}")
    process = start(*TINY, *long, cwd=tmp_path)
    try:
        deadline = time.monotonic() + 120
        while not (folder / CONVERSATIONS).exists() or not (folder / CONVERSATIONS).stat().st_size:
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == code
    assert "Traceback" not in err
    if number == signal.SIGINT:
        assert f"interrupted: the same command with hydra.run.dir={folder} goes on" in err
    assert (folder / CONVERSATIONS).read_bytes().endswith(b"}\n")
    assert 1 <= len(read_conversations(folder)) < 12
    assert not (folder / SUMMARY).exists()


# --- bad input


def test_an_unknown_option_lists_the_choices(refused):
    message = refused("adapter=nope")
    for name in ("adapter/nope", "fixed", "persistent", "reset", "reset_published"):
        assert name in message


def test_an_unknown_key_is_named(refused):
    assert "decode.max_tokens" in refused("decode.max_tokens=3")


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["decode.max_new_tokens=abc"], ["decode.max_new_tokens", "'abc'"]),
        (["decode.temperature=-1"], ["decode.temperature=-1"]),
        (["+adapter.rate=1"], ["adapter", "rate"]),
        (
            ["workload=stream_sample", "workload.sources.b=null"],
            ["workload.sources.b=None", "as the others beside it"],
        ),
        (["adapter.every=0", "adapter.at_rounds=[]"], ["adapter.every=0", "adapter=fixed"]),
        (["workload.limit=0"], ["workload.limit=0"]),
        (["seed=abc"], ["seed='abc'"]),
        (["target.device=tpu9"], ["target.device='tpu9'", "cuda"]),
        (["target.dtype=int3"], ["target.dtype='int3'", "bfloat16"]),
        (["target=llama", "target.drafts.eagle3=x"], ["target.path"]),
        (["draft=eagle3"], ["draft.path", "draft=tiny"]),
        (["draft=eagle3", "draft.path=./no/such"], ["draft.path='./no/such'", "tracedraft.train"]),
        (["draft=eagle3", "draft.path=./no/such", "draft.tap_ids=both"], ["draft.tap_ids", "both"]),
        (["draft=eagle3", "draft.path=./no/such", "draft.rope_theta=0"], ["draft.rope_theta=0", "above 0"]),
        (["keep_learner=maybe"], ["keep_learner='maybe'", "true or false"]),
    ],
)
def test_a_bad_value_is_named_in_one_line(refused, overrides, parts):
    message = one_line(refused(*overrides))
    assert all(part in message for part in parts), message


def saved_draft(folder: Path) -> Path:
    """A draft checkpoint that fits target=tiny."""
    spec = TinyTargetSpec("tiny", seed=0, device="cpu", dtype="float32", context=64, drafts={})
    eagle3.save(lens(spec.build().target, 50, seed=0), folder, torch.float32)
    return folder


def with_draft(folder: Path) -> tuple[str, ...]:
    return "draft=eagle3", f"draft.path={folder}", f"paths.cache={folder.parent}/cache"


def test_a_draft_of_another_target_is_refused(refused, tell, tmp_path):
    folder = saved_draft(tmp_path / "draft")
    assert tell(cli.run, *TINY, *with_draft(folder), "hydra.run.dir=fits")[0] == 0
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"target_hidden_size": 48}))
    message = one_line(refused(*with_draft(folder)))
    assert f"draft {folder} does not fit the target: its hidden size is 48, the target's 32" in message


@pytest.mark.parametrize("harm", ["truncated", "garbage", "empty"])
def test_a_corrupt_weight_file_is_named(refused, tmp_path, harm):
    folder = saved_draft(tmp_path / "draft")
    file = folder / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes({"truncated": data[: len(data) // 2], "garbage": b"x" * 4000, "empty": b""}[harm])
    message = one_line(refused(*with_draft(folder)))
    assert f"{file}: corrupt or truncated weight file" in message


def with_prompts(folder: Path, text: str) -> tuple[str, ...]:
    (folder / "gsm8k.jsonl").write_text(text)
    return "workload=gsm8k", f"paths.data={folder}"


def test_an_empty_workload_is_refused(refused, tmp_path):
    message = one_line(refused(*with_prompts(tmp_path, "\n")))
    assert f"workload gsm8k: {tmp_path}/gsm8k.jsonl holds no prompts" in message


@pytest.mark.parametrize("bad", ['{"id": "q/2", "turns": ["a"', '{"id": "q/2", "turns": []}', "[1]"])
def test_a_malformed_prompt_is_named_by_file_and_line(refused, tmp_path, bad):
    good = '{"id": "q/1", "turns": ["Who?"]}\n'
    assert f"{tmp_path}/gsm8k.jsonl:2: " in one_line(refused(*with_prompts(tmp_path, good + bad + "\n")))


def test_a_workload_without_its_data_names_the_ways_before_the_model_loads(refused, monkeypatch):
    def too_early(spec):
        pytest.fail(f"{spec.name} was loaded before the prompts were found missing")

    monkeypatch.setattr(measure, "loaded", too_early)
    monkeypatch.setitem(sys.modules, "datasets", None)  # as where it is not installed
    began = time.monotonic()
    message = one_line(refused("workload=livecodebench"))
    assert time.monotonic() - began < 5
    for way in (
        "TRACEDRAFT_DATA",
        "paths.data",
        "livecodebench.jsonl",
        "workload.wheel",
        "pip install 'tracedraft[hub]'",
    ):
        assert way in message


def test_another_run_into_the_same_folder_is_refused_and_the_same_one_is_not_done_again(tell, tmp_path):
    command = (*TINY, f"hydra.run.dir={tmp_path}/run")
    assert tell(cli.run, *command)[0] == 0
    before = {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    code, out, err = tell(cli.run, *command, "seed=1")
    assert (code, out) == (2, "")
    assert "already holds another run" in one_line(err)
    assert "choose another hydra.run.dir" in err
    code, out, err = tell(cli.run, *command)
    assert code in (0, None)
    assert "finished" in err
    assert {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()} == before
