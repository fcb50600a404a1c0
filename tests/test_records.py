"""The run directory: what is written, locked, resumed and strictly read back."""

import math
import os
import subprocess
import sys
import threading
from functools import partial

import pytest
import torch
from conftest import small_disk
from omegaconf import OmegaConf
from safetensors.torch import save_file

from tracedraft.errors import UserError
from tracedraft.files import write_atomically
from tracedraft.records import (
    LEARNER,
    RunDir,
    TruncatedRecord,
    last_learner,
    read_attempts,
    read_conversations,
    read_summary,
)

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


def test_an_attempt_that_a_crash_cut_short_does_not_spoil_the_next(tmp_path):
    RunDir.open(tmp_path, {}, ORIGIN).close()
    with open(tmp_path / "attempts.jsonl", "ab") as file:
        file.write(b'{"attempt":2,"fr')
    RunDir.open(tmp_path, {}, ORIGIN).close()
    assert [attempt["attempt"] for attempt in read_attempts(tmp_path)] == [1, 2]


def test_a_draft_of_a_conversation_that_a_crash_lost_is_never_served(tmp_path):
    """Learnt after the second one, whose record is not there; done again it may learn nothing, and write no draft."""
    with RunDir.open(tmp_path, {}, ORIGIN) as run:
        run.append({"id": 1})
        for keep in (run.keep_draft, run.keep_learner):
            keep(2, lambda path: path.write_text("lost"))
    with RunDir.open(tmp_path, {}, ORIGIN) as run:
        run.append({"id": 2})
    with RunDir.open(tmp_path, {}, ORIGIN) as run:
        assert run.done == [{"id": 1}, {"id": 2}]
        assert run.draft() is run.learner() is None


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


def test_a_state_that_finds_no_room_is_a_user_error_and_the_one_before_stays(tmp_path):
    """torch.save says RuntimeError, safetensors an error of its own."""
    big = {"a": torch.zeros(100_000)}
    with RunDir.open(tmp_path, {}, ORIGIN) as run:
        run.keep_learner(1, lambda path: path.write_text("small"))
        for save in (partial(torch.save, big), partial(save_file, big)):
            with (
                small_disk(50_000),
                pytest.raises(UserError, match=r"learner-00002\.pt can't be written.*free space"),
            ):
                run.keep_learner(2, save)
        assert [path.read_text() for path in tmp_path.glob("learner-*")] == ["small"]
        assert not list(tmp_path.glob(".*"))


def test_what_a_killed_attempt_left_is_removed_by_the_next(tmp_path, monkeypatch):
    RunDir.open(tmp_path, {}, ORIGIN).close()
    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", lambda *_, **__: None)  # as when killed
        with pytest.raises(KeyboardInterrupt):
            write_atomically(tmp_path / "learner-00001.pt", killed, "")
    assert len(list(tmp_path.glob(".*"))) == 1
    RunDir.open(tmp_path, {}, ORIGIN).close()
    assert not list(tmp_path.glob(".*"))


def killed(path):
    path.write_text("half")
    raise KeyboardInterrupt


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
