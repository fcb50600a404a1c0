"""W&B's files: the format itself, the client's own command beside it, and what is broken."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import wandb
from golden_wandb import CONFIG, FOLDER, ROWS

from analysis.bench_reader import encoded, framed
from tracedraft.analysis import wandb_log
from tracedraft.analysis.wandb_log import BLOCK, HEADER, Damaged, payloads, read_log
from tracedraft.errors import UserError

GOLDEN = sorted(FOLDER.glob("*.wandb"))


def check_golden(log: wandb_log.Log) -> None:
    assert (log.id, log.exit_code, log.damage) == ("f-a1-x", 0, None)
    assert {key: log.config[key] for key in CONFIG} == CONFIG
    assert [{key: row[key] for key in ROWS[0]} for row in log.history] == ROWS


@pytest.mark.parametrize("file", GOLDEN, ids=lambda file: file.stem)
def test_a_golden_file_of_each_supported_client(file):
    check_golden(read_log(file))


def test_the_installed_client_has_a_golden_file_which_its_own_command_reads_alike(monkeypatch):
    file = FOLDER / f"{wandb.__version__}.wandb"
    direct = read_log(file)
    monkeypatch.setattr(wandb_log, "_by_format", lambda data: (_ for _ in ()).throw(ImportError("no such buffers")))
    log = read_log(file)
    check_golden(log)
    assert log == direct


def test_records_of_any_length_at_any_place_come_back():
    rng = random.Random(0)
    edges = [0, 1, BLOCK - 30, BLOCK - 21, BLOCK - 14, BLOCK - 7, BLOCK, 3 * BLOCK]
    for _ in range(40):
        records = [rng.randbytes(rng.choice(edges) + rng.randrange(20)) for _ in range(rng.randrange(6))]
        assert list(payloads(framed(records))) == records


def test_a_file_cut_anywhere_yields_a_prefix_and_says_so():
    rows = [{"counts": "x" * 9000} for _ in range(12)]
    whole = encoded("f-a1-x", {"a": 1}, rows, 0)
    records = list(payloads(whole))
    ends = {len(framed(records[: n + 1])) for n in range(len(records))} | {len(HEADER)}
    for size in [*range(0, len(whole), 997), *ends, *(end - 1 for end in ends)]:
        found, cut = [], False
        try:
            for record in payloads(whole[:size]):
                found.append(record)
        except Damaged:
            cut = True
        assert found == records[: len(found)]
        # A cut inside the zeros before the next block can't be told from the end.
        assert cut or size in ends or not any(whole[size - 7 : size])


def test_a_changed_byte_loses_what_follows_and_is_named(tmp_path):
    data = bytearray(encoded("f-a1-x", {"a": 1}, [{"counts": "x" * 9000}] * 12, 0))
    data[60_000] ^= 1
    (tmp_path / "run-x.wandb").write_bytes(data)
    log = read_log(tmp_path / "run-x.wandb")
    assert 0 < len(log.history) < 12
    assert log.damage is not None
    assert log.damage.startswith("damaged at byte ")


@pytest.mark.parametrize("data", [b"", HEADER, b"something else altogether", framed([b"\xff\xff no buffer"])])
def test_a_file_without_a_run_is_refused(tmp_path, data):
    (tmp_path / "run-x.wandb").write_bytes(data)
    with pytest.raises(UserError, match=r"run-x\.wandb holds no run"):
        read_log(tmp_path / "run-x.wandb")


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(UserError, match="can't be read"):
        read_log(tmp_path / "run-x.wandb")


def test_the_link_to_the_latest_run_is_not_another_one(tmp_path):
    folder = tmp_path / "wandb" / "offline-run-1-f-a1-x"
    folder.mkdir(parents=True)
    (folder / "run-f-a1-x.wandb").touch()
    Path(tmp_path / "wandb" / "latest-run").symlink_to(folder)
    assert wandb_log.log_files(tmp_path) == [folder / "run-f-a1-x.wandb"]
