"""Workloads: what a prompt set promises whatever its source, and what it says when it cannot be had."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from tracedraft.config import build_spec
from tracedraft.errors import UserError
from tracedraft.types import Conversation
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
