"""Streams: what is drawn from which source where, by whose seed, and how often."""

from __future__ import annotations

import json
import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

from tracedraft.config import build_spec, shipped_dir
from tracedraft.errors import UserError
from tracedraft.identity import identify
from tracedraft.interfaces import WorkloadSpec
from tracedraft.measure import measure
from tracedraft.records import CONVERSATIONS, SUMMARY
from tracedraft.types import Conversation
from tracedraft.verify import noise_key
from tracedraft.workloads.streams import InterleavedSpec, SharpSpec, SmoothSpec, StreamSpec

CONF = shipped_dir("conf")
STREAMS = sorted(path.stem for path in (CONF / "workload").glob("stream_*.yaml"))
DATA = Path(os.environ.get("TRACEDRAFT_DATA") or Path(__file__).resolve().parents[2] / "shared" / "workloads")


@dataclass(frozen=True)
class Toy(WorkloadSpec):
    name: str
    size: int

    def load(self) -> tuple[list[Conversation], dict[str, Any]]:
        rows = [Conversation(f"{self.name}/{n}", (f"{self.name} {n}?",), self.name) for n in range(self.size)]
        return rows, {"sha256": self.name}


def common(*sizes: int, **changes) -> dict[str, Any]:
    sources = {letter: Toy(letter, size) for letter, size in zip("abc", sizes, strict=False)}
    return {
        "name": "toy",
        "sources": sources,
        "repeat": False,
        "limit": None,
        "seed": 0,
        "split": "all",
        "note": "",
    } | changes


def smooth(*sizes: int, seed: int = 0, **changes) -> SmoothSpec:
    chances = {"length": 40, "first": {"a": 8, "b": 1}, "last": {"a": 1, "b": 8}}
    return SmoothSpec(**common(*sizes, seed=seed), **chances | changes)


def ids(spec: StreamSpec) -> list[str]:
    return [conversation.id for conversation in spec.load()[0]]


def composed(*overrides: str) -> DictConfig:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("config", ["target=tiny", "draft=tiny", "wandb.mode=disabled", *overrides])


def test_a_sharp_stream_is_one_source_after_the_other():
    spec = SharpSpec(**common(5, 3, 4), lengths={"a": 2, "b": None, "c": 4})
    assert ids(spec) == ["a/0", "a/1", "b/0", "b/1", "b/2", "c/0", "c/1", "c/2", "c/3"]
    provenance = spec.load()[1]
    assert provenance["switches"] == [2, 5]
    short = SharpSpec(**common(5, 3, 4, limit=4), lengths={"a": 2, "b": 9, "c": 4})  # 9 of b, but for the limit
    assert ids(short) == ids(spec)[:4]
    assert short.load()[1]["switches"] == [2]
    assert provenance["sources"] == {name: {"sha256": name} for name in "abc"}


@pytest.mark.parametrize("lengths", [{"a": 6, "b": 6}, {"a": 9, "b": 3}, {"a": 8, "b": 3, "c": 1}])
def test_an_interleaved_stream_holds_its_proportions_everywhere(lengths):
    spec = InterleavedSpec(**common(*[9] * len(lengths)), lengths=lengths)
    order, total = ids(spec), sum(lengths.values())
    assert spec.load()[1]["switches"] is None
    for name, count in lengths.items():
        assert [id for id in order if id.startswith(name)] == [f"{name}/{n}" for n in range(count)]
        for end in range(total):
            so_far = sum(id.startswith(name) for id in order[:end])
            assert abs(so_far - count * end / total) < 1
    assert order[:2] == ["a/0", "b/0"] or lengths["a"] > lengths["b"]


def test_the_chances_of_a_smooth_stream_move_linearly_from_end_to_end():
    """Of 20,000 draws, the share in each tenth of the stream is its middle's chance within 5 standard deviations."""
    spec = smooth(20_000, 20_000, length=20_000)
    assert spec.chances(0) == pytest.approx([8 / 9, 1 / 9])
    assert spec.chances(19_999) == pytest.approx([1 / 9, 8 / 9])
    order = spec.order({})
    for tenth in range(10):
        part = order[2000 * tenth : 2000 * (tenth + 1)]
        chance = 8 / 9 + (tenth + 0.5) / 10 * (1 / 9 - 8 / 9)
        assert abs(part.count("a") / 2000 - chance) < 5 * (0.25 / 2000) ** 0.5
    assert set(smooth(40, 40, last={"a": 1, "b": 0}, first={"a": 3, "b": 0}).order({})) == {"a"}


def test_the_seed_decides_the_mixture():
    assert ids(smooth(40, 40)) == ids(smooth(40, 40)) != ids(smooth(40, 40, seed=1))


def test_conversations_that_come_again_are_counted_and_sampled_anew():
    spec = SharpSpec(**common(3, repeat=True), lengths={"a": 8})
    conversations, provenance = spec.load()
    assert [(c.id, c.occurrence) for c in conversations] == [(f"a/{n % 3}", n // 3) for n in range(8)]
    assert len({noise_key(0, conversation, 0) for conversation in conversations}) == 8
    assert provenance["switches"] == []


def test_none_comes_again_unless_asked_for():
    with pytest.raises(UserError, match=r"draws 4 conversations from sources\.b, which has 3 .*repeat=true"):
        SharpSpec(**common(5, 3), lengths={"a": 5, "b": 4}).load()
    twice = common(3) | {"sources": {"a": Toy("a", 3), "b": Toy("a", 3)}}
    with pytest.raises(UserError, match=r"workload\.repeat=false: a/0 stands in two of the sources"):
        SharpSpec(**twice, lengths={"a": 2, "b": 2}).load()
    again = SharpSpec(**twice | {"repeat": True}, lengths={"a": 2, "b": 2}).load()[0]
    assert [(c.id, c.occurrence) for c in again] == [("a/0", 0), ("a/1", 0), ("a/0", 1), ("a/1", 1)]


def test_the_hash_is_of_what_is_served_and_its_order():
    specs = [
        SharpSpec(**common(9, 9), lengths={"a": 4, "b": 4}),
        SharpSpec(**common(9, 9), lengths={"a": 4, "b": 5}),
        InterleavedSpec(**common(9, 9), lengths={"a": 4, "b": 4}),
    ]
    assert len({spec.load()[1]["sha256"] for spec in specs}) == 3
    note = SharpSpec(**common(9, 9, note="other"), lengths={"a": 4, "b": 4})
    assert note.load()[1]["sha256"] == specs[0].load()[1]["sha256"]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("workload.lengths.a=0", "workload.lengths.a=0: expected 1 or more, or null for all"),
        ("+workload.lengths.c=3", "workload.lengths: has a, b, c; expected the sources, a, b"),
        ("workload.limit=0", "workload.limit=0: expected 1 or more, or null for the whole stream"),
        ("workload.sources.b.limit=0", "workload.sources.b.limit=0: expected 1 or more"),
        ("workload.sources.b.limit=few", "workload.sources.b.limit: "),
        ("workload.split=train", "workload.sources.a.split=train: expected one of all, dev, test"),
        ("~workload.sources.b._target_", "workload.sources.b._target_='': expected a spec class"),
    ],
)
def test_bad_keys_are_named_with_the_source_that_they_are_of(override, message):
    with pytest.raises(UserError) as error:
        build_spec(composed("workload=stream_sample", override).workload, "workload")
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"length": 1}, "workload.length=1: expected 2 or more"),
        ({"first": {"a": 1}}, "workload.first: has a; expected the sources, a, b"),
        ({"last": {"a": -1, "b": 1}}, "workload.last.a=-1: expected a chance"),
        ({"last": {"a": float("nan"), "b": 1}}, "workload.last.a=nan: expected a chance"),
        ({"first": {"a": 0, "b": 0}}, "workload.first: all chances are 0"),
    ],
)
def test_impossible_chances_are_named(changes, message):
    with pytest.raises(UserError) as error:
        smooth(5, 5, **changes)
    assert str(error.value).startswith(message)


def test_a_stream_needs_a_source():
    with pytest.raises(UserError, match=r"workload\.sources=\{\}: expected one or more"):
        SharpSpec(**common(), lengths={})


# --- the streams that ship


def test_seed_and_split_of_a_stream_are_those_of_its_sources_unless_they_say_others():
    spec = build_spec(
        composed("workload=stream_sample", "workload.seed=3", "workload.sources.b.seed=5").workload, "workload"
    )
    assert [(source.seed, source.split) for source in spec.sources.values()] == [(3, "all"), (5, "all")]
    first, other = (ids(build_spec(composed("workload=stream_sample", f"workload.seed={seed}").workload, "workload"))
                    for seed in (0, 1))  # fmt: skip
    assert first != other
    assert sorted(first) == sorted(other)


@pytest.mark.skipif(not DATA.is_dir(), reason="no folder of prompt files (TRACEDRAFT_DATA)")
@pytest.mark.parametrize("name", STREAMS)
def test_streams_load_from_the_local_folder(name, monkeypatch):
    monkeypatch.setenv("TRACEDRAFT_DATA", str(DATA))
    for split in ("all", "test"):
        spec = build_spec(composed(f"workload={name}", f"workload.split={split}").workload, "workload")
        conversations, provenance = spec.load()
        assert set(Counter(c.domain for c in conversations)) == {source.domain for source in spec.sources.values()}
        if isinstance(spec, SharpSpec) and len(spec.sources) > 1:
            (switch,) = provenance["switches"]
            assert conversations[switch - 1].domain != conversations[switch].domain
    assert {"source", "path", "revision", "sha256", "note"} <= provenance.keys()
    assert spec.note


def test_a_dry_run_over_a_change_of_domain(tmp_path):
    cfg = composed(
        "workload=stream_sample", "workload.lengths.a=2", "workload.lengths.b=1", "decode.max_new_tokens=8",
        "workload.sources.b.max_turns=1",
    )  # fmt: skip
    measure(cfg, tmp_path / "run", None)
    records = [json.loads(line) for line in (tmp_path / "run" / CONVERSATIONS).read_text().splitlines()]
    assert [(record["index"], record["domain"]) for record in records] == [(0, "math"), (1, "math"), (2, "chat")]
    data = json.loads((tmp_path / "run" / SUMMARY).read_text())["provenance"]["data"]
    assert data["switches"] == [2]
    assert data["sha256"] == identify(cfg).data["sha256"]
