import dataclasses
import json
import math
import os
import subprocess
import sys
import threading
from random import Random

import pytest
import torch
from omegaconf import OmegaConf

from tracedraft import summary as summaries
from tracedraft.errors import UserError
from tracedraft.meter import PHASES
from tracedraft.provenance import git_state, provenance
from tracedraft.records import (
    LEARNER,
    RunDir,
    TruncatedRecord,
    last_learner,
    read_attempts,
    read_conversations,
    read_summary,
)
from tracedraft.summary import summarise
from tracedraft.types import Response, Update

ORIGIN = {"fingerprint": "f00d", "started": "today"}

# --- the run directory


def test_what_is_written_is_read_back(tmp_path):
    rows = [{"index": i, "text": "ü→\n" * i, "none": None, "x": 0.1 * i} for i in range(5)]
    with RunDir.open(tmp_path / "a" / "b", {"seed": 3, "lr": 1e-7, "name": "1e-3"}, ORIGIN) as run:
        assert read_conversations(run.path) == []
        for i, row in enumerate(rows):
            run.append(row)
            assert read_conversations(run.path) == rows[: i + 1]  # at once, not at close
        run.write_summary({"tau": 1.5})
    assert read_conversations(run.path / "conversations.jsonl") == rows
    assert read_summary(run.path) == read_summary(run.path / "summary.json") == {"tau": 1.5}
    assert OmegaConf.load(run.path / "config.yaml") == {"seed": 3, "lr": 1e-7, "name": "1e-3"}
    assert sorted(p.name for p in run.path.iterdir()) == [
        "attempts.jsonl",
        "config.yaml",
        "conversations.jsonl",
        "summary.json",
    ]


def test_config_is_written_resolved(tmp_path):
    RunDir.open(tmp_path, OmegaConf.create({"a": 1, "b": "${a}"}), ORIGIN).close()
    assert (tmp_path / "config.yaml").read_text() == "a: 1\nb: 1\n"


@pytest.mark.parametrize("name", ["config.yaml", "conversations.jsonl", "summary.json"])
def test_a_folder_that_holds_a_run_is_refused_and_left_alone(tmp_path, name):
    (tmp_path / name).write_text("precious")
    with pytest.raises(UserError) as caught:
        RunDir.open(tmp_path, {}, ORIGIN)
    message = str(caught.value)
    assert str(tmp_path) in message
    assert "hydra.run.dir" in message
    assert "hydra.sweep.dir" in message
    assert "\n" not in message
    assert [p.name for p in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_text() == "precious"


def test_of_runs_that_start_together_in_one_folder_one_wins(tmp_path):
    for attempt in range(20):
        barrier, tried, outcomes = threading.Barrier(4), threading.Barrier(4), []

        def start(path=tmp_path / str(attempt), barrier=barrier, tried=tried, outcomes=outcomes):
            barrier.wait()
            try:
                run = RunDir.open(path, {}, ORIGIN)
                outcomes.append("won")
                tried.wait()
                run.close()
            except UserError as error:
                outcomes.append("refused" if "another process is writing" in str(error) else str(error))
                tried.wait()

        threads = [threading.Thread(target=start) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(outcomes) == ["refused"] * 3 + ["won"]


def test_the_same_run_goes_on_where_it_stopped(tmp_path):
    """At any byte of a line that a crash cut short; config and earlier records stay as they were."""
    for cut in range(1, 9):
        folder = tmp_path / str(cut)
        with RunDir.open(folder, {"threads": 1}, ORIGIN) as run:
            assert (run.done, run.attempt) == ([], 1)
            run.append({"id": 1})
        with open(folder / "conversations.jsonl", "ab") as file:
            file.write(b'{"id":2}'[:cut])
        with RunDir.open(folder, {"threads": 2}, ORIGIN | {"started": "later"}) as run:
            assert (run.done, run.attempt) == ([{"id": 1}], 2)
            run.append({"id": 2})
        assert read_conversations(folder) == [{"id": 1}, {"id": 2}]
        assert (folder / "config.yaml").read_text() == "threads: 1\n"
        assert [(a["attempt"], a["from"], a["started"]) for a in read_attempts(folder)] == [
            (1, 0, "today"),
            (2, 1, "later"),
        ]


def test_another_run_and_a_finished_one_are_refused(tmp_path):
    with RunDir.open(tmp_path, {}, ORIGIN) as run:
        run.append({"id": 1})
    with pytest.raises(UserError, match=r"another run .f00d, this one is beef"):
        RunDir.open(tmp_path, {}, {"fingerprint": "beef"})
    with RunDir.open(tmp_path, {}, ORIGIN) as run:
        run.write_summary({})
    with pytest.raises(UserError, match="a finished run"):
        RunDir.open(tmp_path, {}, ORIGIN)
    assert read_conversations(tmp_path) == [{"id": 1}]
    assert len(read_attempts(tmp_path)) == 2


def test_the_state_kept_is_that_of_the_last_record(tmp_path):
    """Killed between state and record, the state before is found; a finished run keeps none."""
    with RunDir.open(tmp_path, {}, ORIGIN) as run:
        assert run.learner() is None
        for count in (1, 2, 3):
            run.keep_learner(count, lambda path, count=count: path.write_text(str(count)))
            if count < 3:
                run.append({"id": count})
    with RunDir.open(tmp_path, {}, ORIGIN) as run:
        assert run.learner().read_text() == "2"
        run.keep_learner(3, lambda path: path.write_text("again"))
        run.append({"id": 3})
    with RunDir.open(tmp_path, {}, ORIGIN) as run:
        assert run.learner().read_text() == "again"
        run.write_summary({})
    assert list(tmp_path.glob("learner*")) == []
    assert last_learner(tmp_path) is None


def test_a_finished_run_keeps_its_learner_if_asked(tmp_path):
    """Under a name of its own, and over the number that a crash at the end may leave."""
    with RunDir.open(tmp_path, {}, ORIGIN) as run:
        for count in (1, 2):
            run.keep_learner(count, lambda path, count=count: path.write_text(str(count)))
            run.append({"id": count})
        assert last_learner(tmp_path).read_text() == "2"
        run.write_summary({}, keep_learner=True)
        assert [path.name for path in tmp_path.glob("learner*")] == [LEARNER]
        run.write_summary({"again": True})
    assert last_learner(tmp_path).read_text() == "2"


def test_a_folder_that_cannot_be_written_is_a_user_error(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(UserError, match=r"file.*hydra\.run\.dir"):
            RunDir.open(path, {}, ORIGIN)

    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("builtins.open", refuse)
    with pytest.raises(UserError, match=r"Permission denied.*hydra\.run\.dir"):
        RunDir.open(tmp_path / "readonly", {}, ORIGIN)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_readonly_folder_is_a_user_error(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(UserError, match="Permission denied"):
        RunDir.open(tmp_path / "run", {}, ORIGIN)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_numbers_are_refused_and_nothing_is_written(tmp_path, bad):
    with RunDir.open(tmp_path, {}, ORIGIN) as run:
        run.append({"id": "good"})
        with pytest.raises(ValueError, match=r"conversations\.jsonl.*'broken'"):
            run.append({"id": "broken", "deep": [{"loss": bad}]})
        with pytest.raises(ValueError, match="JSON"):
            run.write_summary({"tau": bad})
    assert read_conversations(tmp_path) == [{"id": "good"}]
    assert not (tmp_path / "summary.json").exists()


def test_a_line_the_disk_took_in_part_is_cut_off_again(tmp_path):
    with RunDir.open(tmp_path, {}, ORIGIN) as run:
        run.append({"id": 1})
        real = run._lines

        class FullDisk:
            def write(self, data):
                return real.write(data[: len(data) // 2])

            def __getattr__(self, name):
                return getattr(real, name)

        run._lines = FullDisk()
        with pytest.raises(UserError, match=r"conversations\.jsonl can't be written"):
            run.append({"id": 2})
        assert (tmp_path / "conversations.jsonl").read_bytes() == b'{"id":1}\n'
        run._lines = real
        run.append({"id": 3})
    assert read_conversations(tmp_path) == [{"id": 1}, {"id": 3}]


def test_a_record_is_synced_before_append_returns(tmp_path, monkeypatch):
    synced = []
    with RunDir.open(tmp_path, {}, ORIGIN) as run:
        monkeypatch.setattr(os, "fsync", lambda _: synced.append(read_conversations(tmp_path)))
        run.append({"id": 1})
        assert synced == [[{"id": 1}]]


def test_a_record_survives_the_kill_of_its_process(tmp_path):
    code = (
        "import os, signal, sys; from tracedraft.records import RunDir\n"
        "run = RunDir.open(sys.argv[1], {}, {'fingerprint': 'f'})\n"
        "run.append({'id': 1}); os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)]).returncode == -9
    assert read_conversations(tmp_path) == [{"id": 1}]


# --- the strict reader


def test_a_last_line_cut_at_any_byte_is_dropped_and_reported(tmp_path):
    first, last = '{"id":1}\n', '{"id":22,"t":["a\\n",{"x":-1.5e3}],"n":null,"u":"\\u00fc"}\n'
    file = tmp_path / "conversations.jsonl"
    for cut in range(1, len(last) - 1):
        file.write_text(first + last[:cut])
        with pytest.warns(TruncatedRecord, match=rf"{file}:2"):
            assert read_conversations(tmp_path) == [{"id": 1}]
    # Nothing to drop: not begun, or whole but for the newline.
    file.write_text(first)
    assert read_conversations(tmp_path) == [{"id": 1}]
    file.write_text(first + last[:-1])
    assert read_conversations(tmp_path)[1]["id"] == 22


@pytest.mark.parametrize("bad", [b'{"id":', b"[1]", b"", b'{"x":NaN}', b'{"x":"\xff"}', b"\0\0", b"{}{}"])
@pytest.mark.parametrize("after", [b"", b'{"id":3}\n', b'{"id"'])
def test_a_bad_line_elsewhere_is_an_error_with_its_place(tmp_path, bad, after):
    file = tmp_path / "conversations.jsonl"
    file.write_bytes(b'{"id":1}\n' + bad + b"\n" + after)
    with pytest.raises(UserError, match=rf"{file}:2: "):
        read_conversations(tmp_path)


def test_missing_or_broken_files_are_user_errors(tmp_path):
    for read in (read_conversations, read_summary):
        with pytest.raises(UserError, match="can't be read"):
            read(tmp_path)
    (tmp_path / "summary.json").write_text('{"tau": 1')
    with pytest.raises(UserError, match=r"summary\.json: not a summary"):
        read_summary(tmp_path)


# --- the summary is written whole or not at all


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_summary_that_fails_half_way_leaves_the_old_one(tmp_path, monkeypatch, step):
    with RunDir.open(tmp_path, {}, ORIGIN) as run:
        run.write_summary({"tau": 1})

        def fail(*_):
            assert read_summary(tmp_path) == {"tau": 1}
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(os, step, fail)
            with pytest.raises(UserError, match=r"summary\.json.*No space left"):
                run.write_summary({"tau": 2})
        assert read_summary(tmp_path) == {"tau": 1}
        assert not list(tmp_path.glob("*.tmp")) + list(tmp_path.glob(".*"))
        run.write_summary({"tau": 3})
    assert read_summary(tmp_path) == {"tau": 3}


# --- provenance


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
    assert len(hardware["gpus"]) == torch.cuda.device_count()


def git(folder, *args):
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    env = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    command = ["git", "-C", str(folder), *identity, *args]
    return subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout.strip()


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


# --- aggregation


def response(tokens, rounds=0, accepted=0, trials=(), survivals=(), updates=(), **seconds):
    spent = dict.fromkeys(PHASES, 0.0) | seconds
    made = Response(
        list(tokens), "limit", rounds, accepted, 0, [], list(trials), list(survivals), list(updates), spent
    )
    return dataclasses.asdict(made)


def record(*arms, id="a", audited=1, mismatches=0, near_ties=0, refused=None):
    turns = [
        {
            "turn": i,
            "prompt_tokens": 4,
            "paired": True,
            "lossless": {"audited": audited, "mismatches": mismatches, "near_ties": near_ties},
            "arms": {"fixed": fixed, "adapted": adapted},
        }
        for i, (fixed, adapted) in enumerate(arms)
    ]
    head = {"index": 0, "id": id, "domain": "maths", "occurrence": 0, "order": ["fixed", "adapted"]}
    return head | {"refused": refused, "turns": turns}


def update(committed, reason=""):
    return Update(1, committed, reason, {"prompt": 1}, None, None, {}, None)


def test_summary_of_a_hand_computed_example():
    # Adapted: turn 1 has S=4, A=6, 11 tokens in 2 s; turn 2 has S=2, A=0, 3 tokens in 1 s.
    first, second = range(100, 111), [7, 8, 9]
    adapted = [
        response(
            first,
            4,
            6,
            (4, 3, 0),
            (3, 3, 0),
            [update(True), update(False, "drift"), update(False, "drift"), update(False, "loss")],
            verify=1.5,
            update=0.5,
        ),
        response(second, 2, 0, (2, 0, 0), (0, 0, 0), [update(True)], verify=0.5, other=0.5),
    ]
    fixed = [
        response(first, 5, 5, (5, 1, 0), (4, 1, 0), verify=3.0),
        response(second, 2, 0, (2, 0, 0), (0, 0, 0), verify=1.5),
    ]
    summary = summarise([record(*zip(fixed, adapted, strict=True))])
    assert summary["tau"] == (6 + 6) / 6
    assert summary["macro_tau"] == ((6 + 4) / 4 + (0 + 2) / 2) / 2
    assert (summary["rounds"], summary["accepted"], summary["tokens"]) == (6, 6, 14)
    assert summary["tokens_per_s"] == 14 / 3
    assert summary["speedup"] == 4.5 / 3
    assert summary["acceptance_by_depth"] == [3 / 6, 3 / 3, None]
    assert summary["updates"] == {"attempted": 5, "committed": 2, "rolled_back": {"drift": 2, "loss": 1}}
    assert summary["seconds"] == dict.fromkeys(PHASES, 0.0) | {"verify": 2.0, "update": 0.5, "other": 0.5}
    assert summary["repeated_8gram_share"] == 0.0
    assert summary["fixed"]["tau"] == (5 + 7) / 7
    assert summary["fixed"]["tokens_per_s"] == 14 / 4.5
    assert summary["fixed"]["updates"]["attempted"] == 0
    assert (summary["lossless"], summary["audited"], summary["mismatches"]) == (True, 2, 0)
    assert (summary["conversations"], summary["turns"], summary["arms_differ"]) == (1, 2, 0)
    assert set(summary["null_reasons"]) == {"acceptance_by_depth", "fixed.acceptance_by_depth"}
    assert "depth 3" in summary["null_reasons"]["acceptance_by_depth"]
    json.dumps(summary, allow_nan=False)


def test_summary_does_not_depend_on_how_turns_are_grouped_or_ordered():
    random = Random(1)

    def turn():
        tokens = [random.randrange(3) for _ in range(random.randrange(1, 30))]
        arms = []
        for _ in range(2):
            rounds, accepted = random.randrange(5), random.randrange(9)
            trials = [random.randrange(4) for _ in range(3)]
            seconds = random.randrange(64) / 64  # exact in binary, so that sums don't depend on order
            arms.append(response(tokens, rounds, accepted, trials, [t // 2 for t in trials], verify=seconds))
        return tuple(arms)

    turns = [turn() for _ in range(40)]
    together = summarise([record(*turns)])
    random.shuffle(turns)
    apart = summarise([record(one) for one in turns])
    assert apart.pop("conversations") == 40
    assert together.pop("conversations") == 1
    for summary in (apart, together):  # a mean of quotients, which rounds
        for arm in (summary, summary["fixed"]):
            arm["macro_tau"] = pytest.approx(arm["macro_tau"])
    assert apart == together


def test_speedup_is_paired_over_turns_with_the_same_tokens():
    same = (response([1, 2], 1, 0, verify=3.0), response([1, 2], 1, 0, verify=2.0))
    other = (response([1, 2], 1, 0, verify=100.0), response([1, 3], 1, 0, verify=1.0))
    summary = summarise([record(same, other)])
    assert (summary["speedup"], summary["speedup_turns"], summary["arms_differ"]) == (1.5, 1, 1)
    assert summary["tokens_per_s"] == 4 / 3
    alone = summarise([record(other)])
    assert alone["speedup"] is None
    assert "same tokens" in alone["null_reasons"]["speedup"]


def test_outer_learning_is_not_in_the_throughput():
    arms = (response([1], verify=2.0, outer=6.0), response([1], verify=1.0, outer=7.0))
    summary = summarise([record(arms)])
    assert (summary["tokens_per_s"], summary["speedup"]) == (1.0, 2.0)
    assert summary["seconds"]["outer"] == 7.0


@pytest.mark.parametrize(
    ("audited", "mismatches", "ties", "same", "lossless"),
    [
        (5, 0, 0, True, True),
        (5, 1, 0, True, False),
        (5, 0, 0, False, False),
        (5, 0, 1, True, True),
        (5, 0, 2, False, True),
        (5, 1, 2, False, False),
        (0, 0, 0, True, None),
        (0, 0, 0, False, False),
    ],
)
def test_lossless(audited, mismatches, ties, same, lossless):
    """Arms may differ by proven near-ties, and by nothing else."""
    arms = (response([1, 2]), response([1, 2 if same else 3]))
    first = record(arms, audited=audited, mismatches=mismatches, near_ties=ties)
    summary = summarise([first, record(arms, audited=0, near_ties=ties)])
    assert summary["near_ties"] == 2 * ties
    assert summary["lossless"] is lossless
    assert ("lossless" in summary["null_reasons"]) == (lossless is None)


def test_every_null_of_an_empty_run_has_its_reason():
    refused = {"turn": 0, "tokens": 9000, "context": 8192}
    summary = summarise([record(id="long", refused=refused), record(id="longer", refused=refused)])
    assert summary["refused"] == {"count": 2, "ids": ["long", "longer"]}
    assert summary["tokens"] == summary["fixed"]["tokens"] == 0
    nulls = {key for key, value in summary.items() if value is None}
    nulls |= {f"fixed.{key}" for key, value in summary["fixed"].items() if value is None}
    assert nulls == set(summary["null_reasons"])
    assert {"tau", "tokens_per_s", "speedup", "lossless", "fixed.tau"} <= nulls
    assert all(summary["null_reasons"].values())


def test_repeated_8gram_share_equals_the_naive_count():
    random = Random(2)
    responses = [[random.randrange(2) for _ in range(random.randrange(60))] for _ in range(30)]
    total = repeated = 0
    for tokens in responses:
        for end in range(8, len(tokens) + 1):
            total += 1
            gram = tokens[end - 8 : end]
            repeated += any(tokens[e - 8 : e] == gram for e in range(8, end))
    assert repeated > 0
    arms = [(response(t), response(t)) for t in responses]
    assert summarise([record(*arms)])["repeated_8gram_share"] == repeated / total


def test_a_loop_repeats_everything_but_its_first_gram():
    arms = (response([5] * 8), response([5] * 27))
    summary = summarise([record(arms)])
    assert summary["repeated_8gram_share"] == 19 / 20
    assert summary["fixed"]["repeated_8gram_share"] == 0.0


def test_reading_records_needs_no_torch():
    code = (
        "import sys, tracedraft.records, tracedraft.summary as s; s.summarise([]); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
    assert summaries.NGRAM == 8
