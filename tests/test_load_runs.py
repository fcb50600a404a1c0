"""One reader, three sources: what they agree on, what breaks one of them, and what the frames' numbers must be."""

from __future__ import annotations

import gzip
import json
import shutil
from dataclasses import astuple
from pathlib import Path

import pandas as pd
import pytest
import wandb
from analysis_cases import Server, make_sweep
from pandas.testing import assert_frame_equal

from tracedraft import counts
from tracedraft.analysis import sources
from tracedraft.analysis.commands import pack
from tracedraft.analysis.runs import load_runs
from tracedraft.analysis.schema import CONVERSATIONS, RUNS, UPDATES, Runs
from tracedraft.analysis.wandb_log import log_files
from tracedraft.errors import UserError
from tracedraft.records import CONVERSATIONS as LINES
from tracedraft.records import read_conversations, read_summary

RUN_NAMES = ["both", "stopped", "unpaired", "untimed", "untracked"]


@pytest.fixture(scope="module")
def sweep(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "sweep"
    make_sweep(folder)
    return folder


@pytest.fixture
def copied(sweep, tmp_path) -> Path:
    """A copy that a test may break."""
    return shutil.copytree(sweep, tmp_path / "sweep", symlinks=True)


@pytest.fixture(scope="module")
def recorded(sweep) -> Runs:
    return load_runs(sweep, "records")


def assert_alike(one: Runs, other: Runs, names: list[str] = RUN_NAMES) -> None:
    """Row by row, all columns but where they were read."""
    for left, right in zip(astuple(picked(one, names))[:3], astuple(other)[:3], strict=True):
        places = [name for name in ("path", "source") if name in left]
        pair = [f.sort_values(list(f.columns[:3])).drop(columns=places).reset_index(drop=True) for f in (left, right)]
        assert_frame_equal(*pair)


def picked(runs: Runs, names: list[str]) -> Runs:
    kept = runs.runs[runs.runs["name"].isin(names)]
    return Runs(kept, *(frame[frame["run"].isin(kept["run"])] for frame in astuple(runs)[1:3]), [])


def test_frames_have_the_columns_they_promise(recorded):
    for frame, columns in zip(astuple(recorded), (RUNS, CONVERSATIONS, UPDATES), strict=False):
        assert {name: str(dtype) for name, dtype in frame.dtypes.items()} == {n: d for n, (d, _) in columns.items()}
        assert len(frame)
    assert recorded.runs["name"].tolist() == RUN_NAMES


def test_three_sources_agree_row_by_row(sweep, recorded, tmp_path, monkeypatch):
    offline = load_runs(sweep)
    assert offline.problems == recorded.problems == []
    assert offline.runs.set_index("name")["source"].to_dict() == {
        name: "records" if name == "untracked" else "wandb-offline" for name in RUN_NAMES
    }
    assert_alike(recorded, offline)

    monkeypatch.setattr(wandb, "Api", lambda: Server(sweep))
    tracked = [name for name in RUN_NAMES if name != "untracked"]
    for records in ((), sweep):
        served = load_runs("entity/project", "wandb-api", records)
        assert served.problems == []
        assert set(served.runs["source"]) == {"wandb-api"}
        assert_alike(recorded, served, tracked)

    pack(sweep, tmp_path)
    for path in (tmp_path, tmp_path / "sweep.jsonl.gz"):
        assert_alike(recorded, load_runs(path))


def test_numbers_from_the_frames_are_those_of_the_summary(sweep, recorded):
    for _, run in recorded.runs.iterrows():
        rows = recorded.conversations[recorded.conversations["run"] == run["run"]]
        summary = read_summary(sweep / run["name"])
        for arm, expected in (("adapted", summary), ("fixed", summary["fixed"])):
            tokens, rounds, accepted = (rows[f"{arm}_{name}"].sum() for name in ("tokens", "rounds", "accepted"))
            assert (tokens, rounds, (accepted + rounds) / rounds) == tuple(
                expected[name] for name in ("tokens", "rounds", "tau")
            )
            trials, survivals = (
                pd.DataFrame(rows[f"{arm}_{name}"].tolist()).sum() for name in ("trials", "survivals")
            )
            shares = [s / t if t else None for s, t in zip(survivals, trials, strict=True)]
            assert shares == expected["acceptance_by_depth"]
            if run["measure"] == "time":
                assert tokens / rows[f"{arm}_seconds"].sum() == pytest.approx(expected["tokens_per_s"], rel=1e-12)
                for phase in ("prefill", "propose", "verify", "observe", "update", "other"):
                    assert rows[f"{arm}_s_{phase}"].sum() == pytest.approx(expected["seconds"][phase])
            else:
                assert rows[f"{arm}_seconds"].isna().all()
        fixed, adapted = (rows[f"paired_{arm}_seconds"].sum() for arm in ("fixed", "adapted"))
        assert (pytest.approx(fixed / adapted) if adapted else None) == summary["speedup"]
        assert run["lossless"] == summary["lossless"]
        assert (run["audited"], run["mismatches"]) == (summary["audited"], summary["mismatches"])
        share = rows["repeated_8gram"].sum() / rows["ngrams"].sum()
        assert share == summary["repeated_8gram_share"]
        updates = recorded.updates[recorded.updates["run"] == run["run"]]
        assert len(updates) == rows["updates_attempted"].sum() == summary["updates"]["attempted"]
        assert updates["committed"].sum() == rows["updates_committed"].sum() == summary["updates"]["committed"]
        assert run["complete"]


def test_what_only_some_runs_have(sweep, recorded):
    rows = {run["name"]: recorded.conversations[recorded.conversations["run"] == run["run"]] for _, run in
            recorded.runs.iterrows()}  # fmt: skip
    both, runs = rows["both"], recorded.runs.set_index("name")
    summary = read_summary(sweep / "both")
    assert (both["plain_tokens"] == both["adapted_tokens"]).all()
    over = both["paired_plain_seconds"].sum() / both["paired_adapted_seconds"].sum()
    assert over == pytest.approx(summary["speedup_over_plain"]["adapted"])
    (learnt,) = [outer for outer in both["outer"] if outer is not None]
    assert learnt["block"] == 1
    assert both["adapted_outer_seconds"].tolist() == [0.0, learnt["seconds"], 0.0]
    assert (both["turns"] > 1).any()
    assert both["same"].all()
    for name in ("stopped", "unpaired", "untimed", "untracked"):
        assert rows[name]["plain_tokens"].isna().all()
        assert rows[name]["plain_trials"].map(lambda value: value is None).all()
    assert not rows["unpaired"]["same"].any()
    assert rows["unpaired"]["paired_fixed_tokens"].isna().all()
    assert runs["lossless"].to_dict() == {
        "both": True, "stopped": True, "unpaired": None, "untimed": None, "untracked": True,
    }  # fmt: skip
    assert runs["stateful"].to_dict() == {
        "both": True, "stopped": False, "unpaired": True, "untimed": True, "untracked": False,
    }  # fmt: skip
    assert runs["learning_rate"].isna().to_dict() == {name: name == "untracked" for name in RUN_NAMES}
    assert len(runs.loc["stopped", "attempts"]) == 2
    assert set(runs["experiment"]) == {"s"}


def test_nothing_of_this_machine_and_no_text_leaves_it(sweep, tmp_path):
    pack(sweep, tmp_path)
    packed = gzip.decompress((tmp_path / "sweep.jsonl.gz").read_bytes()).decode()
    assert str(sweep) not in packed
    assert str(Path.home()) not in packed
    for record in read_conversations(sweep / "both"):
        for turn in record["turns"]:
            assert json.dumps(turn["text"]) not in packed
            assert json.dumps(turn["arms"]["fixed"]["tokens"], separators=(",", ":")) not in packed


def test_a_header_names_files_and_not_where_they_lie():
    config = {"draft": {"name": "d", "path": "/home/me/d"}, "workload": {"data": "/data", "turns": ["{q}"]}}
    attempt = {"fingerprint": "f", "argv": ["/x"], "draft_weights": {"origin": "/home/me/d", "sha256": "0"}}
    header = counts.header(config, [attempt], Path("/runs/sweep/run"), "sweep")
    assert header["config"]["draft"] == {"name": "d"}
    assert header["config"]["workload"] == {"turns": ["{q}"]}
    assert header["attempts"] == [{"fingerprint": "f", "draft_weights": {"origin": "d", "sha256": "0"}}]
    assert counts.header_of(counts.flat(header)) == header


def test_packing_again_makes_the_same_bytes_and_less_than_all_says_so(copied, tmp_path, capsys):
    pack(copied, tmp_path / "a")
    shutil.move(copied, tmp_path / "elsewhere" / "sweep")
    pack(tmp_path / "elsewhere" / "sweep", tmp_path / "b")
    first, second = ((tmp_path / place / "sweep.jsonl.gz").read_bytes() for place in "ab")
    assert first == second
    capsys.readouterr()
    (tmp_path / "elsewhere" / "sweep" / "both" / "summary.json").unlink()
    pack(tmp_path / "elsewhere" / "sweep", tmp_path / "b")
    assert "note: both: did not finish\n" in capsys.readouterr().out
    assert not load_runs(tmp_path / "b").runs.set_index("name").loc["both", "complete"]


@pytest.mark.parametrize("damage", ["nothing", "header", "cut", "changed", "no end"])
def test_a_broken_log_costs_nothing_where_the_record_is(copied, recorded, damage):
    file = log_files(copied / "both")[0]
    data = file.read_bytes()
    sizes = {"nothing": 0, "header": 7, "cut": 5000, "no end": len(data) - 9}
    changed = data[:5000] + bytes([data[5000] ^ 1]) + data[5001:]
    file.write_bytes(data[: sizes[damage]] if damage in sizes else changed)
    found = load_runs(copied)
    ((path, reason),) = found.problems
    assert path == str(copied / "both")
    assert reason.startswith("taken from its record: ")
    assert file.name in reason
    assert found.runs.set_index("name").loc["both", "source"] == "records"
    assert_alike(recorded, found)


def test_a_broken_log_without_a_record_costs_that_run_alone(copied, recorded):
    for name in ("both", "stopped", "unpaired"):
        for file in (copied / name).iterdir():
            if file.is_file():
                file.unlink()
    cut, gone = log_files(copied / "both")[0], log_files(copied / "unpaired")[0]
    cut.write_bytes(cut.read_bytes()[:-9])
    gone.write_bytes(b"")
    found = load_runs(copied)
    problems = dict(found.problems)
    assert set(problems) == {str(copied / "both"), str(copied / "unpaired")}
    assert "holds no run" in problems[str(copied / "unpaired")]
    assert "unpaired" not in set(found.runs["name"])
    assert not found.runs.set_index("name").loc["both", "complete"]
    rest = ["stopped", "untimed", "untracked"]
    assert_alike(recorded, picked(found, rest), rest)


def test_a_log_that_says_something_else_gives_way_to_the_record(copied):
    lines = (copied / "both" / LINES).read_text().splitlines()
    record = json.loads(lines[1])
    record["turns"][0]["arms"]["adapted"]["accepted"] += 1
    (copied / "both" / LINES).write_text("\n".join([lines[0], json.dumps(record), *lines[2:]]) + "\n")
    found = load_runs(copied)
    assert found.problems == [(str(copied / "both"), "taken from its record: W&B has other counts of conversation 1")]
    assert_alike(load_runs(copied, "records"), found)


def test_a_record_that_broke_is_replaced_by_the_log(copied, recorded):
    lines = (copied / "both" / LINES).read_text()
    (copied / "both" / LINES).write_text("not JSON\n" + lines)
    found = load_runs(copied)
    ((path, reason),) = found.problems
    assert (path, "not a record" in reason) == (str(copied / "both"), True)
    assert_alike(recorded, found)


@pytest.mark.parametrize("file", ["attempts.jsonl", "config.yaml", "conversations.jsonl"])
@pytest.mark.parametrize("text", ["", "{}\n", "[\n", "\x00\x01", '{"fingerprint": 1}\n'])
def test_whatever_a_record_holds_it_costs_that_run_alone(copied, recorded, file, text):
    (copied / "stopped" / file).write_text(text)
    (copied / "untracked" / file).write_text(text)
    found = load_runs(copied)
    assert {path for path, _ in found.problems} == {str(copied / "stopped"), str(copied / "untracked")}
    others = [name for name in RUN_NAMES if name not in ("stopped", "untracked")]
    assert_alike(recorded, picked(found, others), others)
    assert "records" not in set(found.runs.set_index("name").loc[others, "source"])


def test_a_record_that_lost_its_last_line_is_replaced_by_the_log(copied, recorded):
    lines = (copied / "both" / LINES).read_text()
    (copied / "both" / LINES).write_text(lines[:-20])
    found = load_runs(copied)
    ((path, reason),) = found.problems
    assert (path, "cut short" in reason) == (str(copied / "both"), True)
    assert_alike(recorded, found)


def test_a_server_that_fails_for_one_run_gives_the_others(sweep, recorded, monkeypatch):
    server = Server(sweep)
    monkeypatch.setattr(wandb, "Api", lambda: server)
    first = next(run for run in server.found if run.config["folder"] == "both")
    first.scan_history = lambda keys: (_ for _ in ()).throw(ConnectionError("lost\nmore"))
    found = load_runs("p", "wandb-api")
    assert found.problems == [(f"p/{first.id}", f"{first.id}: ConnectionError: lost")]
    others = ["stopped", "unpaired", "untimed"]
    assert_alike(recorded, found, others)
    assert_alike(recorded, load_runs("p", "wandb-api", sweep), [*others, "both"])


def test_a_server_that_is_not_there(monkeypatch):
    monkeypatch.setattr(wandb, "Api", lambda: (_ for _ in ()).throw(ValueError("no key")))
    with pytest.raises(UserError, match="W&B project p: ValueError: no key: give ENTITY/PROJECT"):
        load_runs("p", "wandb-api")


def test_packed_records_serve_where_the_run_is_not_there(copied, recorded, tmp_path):
    pack(copied, tmp_path / "records")
    shutil.rmtree(copied / "both")
    found = load_runs([copied, tmp_path / "records"])
    assert_alike(recorded, found)
    where = found.runs.set_index("name")["path"]
    assert where["both"] == f"{tmp_path / 'records' / 'sweep.jsonl.gz'}:both"
    assert where["stopped"] == str(copied / "stopped")


@pytest.mark.parametrize(
    "data",
    [b"", b"no gzip", gzip.compress(b"{}\n"), gzip.compress(b'{"header":{"counts":0}}\n')],
    ids=["empty", "no gzip", "no header", "of other counts"],  # gzip notes the time
)
def test_a_broken_packed_file_is_named(copied, recorded, tmp_path, data):
    (tmp_path / "x.jsonl.gz").write_bytes(data)
    with pytest.raises(UserError, match=r"x\.jsonl\.gz.*none of 1 could be read"):
        load_runs(tmp_path / "x.jsonl.gz")
    found = load_runs([tmp_path / "x.jsonl.gz", copied])
    assert [path for path, _ in found.problems] == [str(tmp_path / "x.jsonl.gz")]
    assert_alike(recorded, found)


def test_places_without_runs(tmp_path):
    with pytest.raises(UserError, match="no run there"):
        load_runs(tmp_path)
    with pytest.raises(UserError, match="no such file or folder"):
        load_runs(tmp_path / "nowhere")


def test_the_same_run_twice_has_two_keys(copied, recorded):
    shutil.copytree(copied / "untracked", copied / "again")
    found = load_runs(copied, "records")
    fingerprint = found.runs.set_index("name").loc["untracked", "fingerprint"]
    assert set(found.runs.loc[found.runs["fingerprint"] == fingerprint, "run"]) == {fingerprint, f"{fingerprint}-2"}
    assert found.conversations.groupby("run").size()[f"{fingerprint}-2"] == 2


# --- the cache


def test_a_cache_is_not_read_past_a_change(copied, recorded, tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    read = []
    record = sources.from_record
    monkeypatch.setattr(sources, "from_record", lambda folder: read.append(folder.name) or record(folder))
    assert_alike(recorded, load_runs(copied, cache=cache))
    assert sorted(read) == RUN_NAMES
    read.clear()
    assert_alike(recorded, load_runs(copied, cache=cache))
    assert read == []

    lines = (copied / "both" / LINES).read_text()
    (copied / "both" / LINES).write_text(lines.replace('"accepted":0,', '"accepted":1,', 1))  # of the same size
    changed = load_runs(copied, cache=cache)
    assert read == ["both"]
    assert changed.problems[0][0] == str(copied / "both")
    assert load_runs(copied, cache=cache).problems == changed.problems  # which is kept as well
    assert read == ["both"]
    assert_alike(load_runs(copied), changed)


@pytest.mark.parametrize("name", ["runs", "conversations", "updates"])
def test_a_broken_cache_is_made_anew(copied, recorded, tmp_path, name):
    cache = tmp_path / "cache"
    load_runs(copied, cache=cache)
    (file,) = cache.glob(f"*/{name}.parquet")
    whole = file.read_bytes()
    file.write_bytes(whole[:-100])
    assert_alike(recorded, load_runs(copied, cache=cache))
    assert file.read_bytes() == whole
