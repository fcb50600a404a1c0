"""``tracedraft bench``: who is timed against whom in which order, and what is null with which reason."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoints import saved
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig

from tracedraft.benchmark.command import benchmark, interleave
from tracedraft.benchmark.numbers import Question
from tracedraft.benchmark.table import text
from tracedraft.config import shipped_dir
from tracedraft.errors import UserError
from tracedraft.types import Response

SMALL = ("draft=tiny", "threads=1", "repetitions=2", "workload.limit=1")
SHIPPED = ("+workload@workloads.a=sample_chat", "+workload@workloads.b=sample_math")
BENCHMARKS = ("mtbench", "gsm8k", "humaneval", "longwrite")
TWO = (*SHIPPED, *(f"~workload@workloads.{name}" for name in BENCHMARKS))
SHORT = ("decode.max_new_tokens=24", "decode.prefill_chunk=16", "decode.cache_bucket=64")
OFTEN = ("adapters.reset.every=2",)
MODES = ["chain", "tree", "auto"]
ARMS = ["plain", *MODES, *(f"{mode}_{learner}" for mode in MODES for learner in ("reset", "persistent"))]
NO_LEARNERS = ("~adapter@adapters.reset", "~adapter@adapters.persistent")


def composed(*overrides: str, workloads: tuple[str, ...] = TWO) -> DictConfig:
    often = () if set(NO_LEARNERS) <= set(overrides) else OFTEN
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(shipped_dir("conf")), version_base="1.3"):
        return compose("bench", [*SMALL, *SHORT, *often, *workloads, *overrides])


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory, monkeypatch):
    """One for all, so that a plan is measured once."""
    monkeypatch.setenv("TRACEDRAFT_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("bench") / "llama"
    saved(folder, tie_word_embeddings=True)
    return folder


@pytest.fixture(scope="module")
def measured(llama, tmp_path_factory) -> tuple[dict, str]:
    """The command on a small Llama in fp32: what it kept and what it printed."""
    folder = tmp_path_factory.mktemp("bench")
    others = ("+engines.naive=engine_cases:naive", "+engines.babbling=engine_cases:babbling")
    arguments = (
        "target=llama",
        f"target.path={llama}",
        "target.dtype=float32",
        *SMALL,
        *SHORT,
        *OFTEN,
        *TWO,
        *others,
    )
    command = [sys.executable, "-m", "tracedraft.bench", *arguments, f"out={folder}/deep/kept.json"]
    command += [f"paths.cache={folder}/cache", f"paths.runs={folder}/runs"]
    path = os.pathsep.join((str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")))
    environment = os.environ | {"PYTHONPATH": path}
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=120, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("ms a token") == 2
    assert done.stdout.endswith(f"record: {folder}/deep/kept.json\n")
    assert not (folder / "runs").exists(), "an empty folder was left"
    return json.loads((folder / "deep" / "kept.json").read_text()), done.stdout


def test_a_learner_that_keeps_what_it_learns_meets_each_repetition_anew(measured):
    """The same answers to the same prompts: counts cannot differ unless something was remembered."""
    result, _ = measured
    for mode in MODES:
        for name in ("a", "b"):
            rows = result["workloads"][name]["arms"][f"{mode}_persistent"]["repetitions"]
            assert len(rows) == 2
            assert rows[0]["rounds"] == rows[1]["rounds"]


# Order and arithmetic


def test_arms_take_turns_so_that_each_is_as_often_early_as_late():
    calls, limits, restarts = [], [], []

    def arm(name):
        def answer(question, limit):
            calls.append((name, question.key))
            limits.append(limit)
            return Response([question.key], "limit", 0, 0, 0, [], [], [], [], {"verify": 1.0})

        return answer

    arms = {name: arm(name) for name in "xyz"}
    asked = {"a": [Question("a0", [1], 0), Question("a1", [2, 3], 1)], "b": [Question("b0", [4], 2)]}
    done = interleave(arms, asked, 2, 40, lambda: restarts.append(len(calls)))
    assert restarts == [3, 9, 12, 18]  # after the warm-up, before each workload of each repetition
    warm, served = calls[:3], calls[3:]
    assert warm == [("x", 0), ("y", 0), ("z", 0)]
    assert (set(limits[:3]), set(limits[3:])) == ({16}, {40})
    turns = [served[i : i + 3] for i in range(0, 18, 3)]
    assert ["".join(name for name, _ in turn) for turn in turns] == ["xyz", "zyx", "xyz", "zyx", "xyz", "zyx"]
    assert [turn[0][1] for turn in turns] == [0, 1, 2, 0, 1, 2]
    answered = {"a": [[0], [1]], "b": [[2]]}
    for answers in done:
        said = {name: [[r.tokens for r in made[arm]] for arm in "xyz"] for name, made in answers.items()}
        assert said == {name: 3 * [tokens] for name, tokens in answered.items()}


# The command


def test_the_command_times_every_arm_on_the_same_prompts(measured):
    kept, _ = measured
    assert {name: len(ids) for name, ids in kept["prompts"].items()} == {"a": 1, "b": 1}
    assert list(kept["workloads"]) == ["a", "b", "all"]
    for found in kept["workloads"].values():
        assert list(found["arms"]) == ["generate", "naive", "babbling", *ARMS]
        counts = {name: [row["tokens"] for row in arm["repetitions"]] for name, arm in found["arms"].items()}
        del counts["babbling"]
        assert len({tuple(c) for c in counts.values()}) == 1, "in fp32 all arms say the same"
        for name, (faster, slower) in {
            "plain_over_generate": ("plain", "generate"),
            "tree_over_naive": ("tree", "naive"),
            "chain_over_plain": ("chain", "plain"),
            "tree_over_chain": ("tree", "chain"),
            "auto_over_chain": ("auto", "chain"),
            "auto_over_tree": ("auto", "tree"),
            "chain_reset_over_chain": ("chain_reset", "chain"),
            "tree_persistent_over_tree": ("tree_persistent", "tree"),
        }.items():
            ms = [found["arms"][arm]["ms_per_token"]["values"] for arm in (slower, faster)]
            assert found["ratios"][name]["values"] == pytest.approx([a / b for a, b in zip(*ms, strict=True)])
            assert found["ratios"][name]["median"] == statistics.median(found["ratios"][name]["values"])


def test_another_engine_stands_in_the_table_with_its_own_times(measured):
    """It said that each token took a second."""
    kept, printed = measured
    for name in ("a", "b", "all"):
        assert kept["workloads"][name]["arms"]["naive"]["ms_per_token"]["values"] == [1000.0, 1000.0]
    assert "| naive | 1.0 | 1.0 | 1.0 | 1000.0 [1000.0, 1000.0] | — | — |" in printed
    assert "| tree over naive | " in printed


def test_engines_that_say_the_same_never_part_and_others_are_found_out(measured):
    """fp32 of one order of sums and another: the random model's choices are far clearer than that."""
    kept, printed = measured
    assert list(kept["parted"]) == [
        *(f"plain_over_{name}" for name in ("generate", "naive", "babbling")),
        "chain_over_plain",
        "tree_over_plain",
        "auto_over_plain",
    ]
    for name, found in kept["parted"].items():
        alike = {"prompts": 2, "parted": 0, "near_ties": 0, "first": []}
        assert name == "plain_over_babbling" or {**found, "arms": None} == {**alike, "arms": None}
    babbled = kept["parted"]["plain_over_babbling"]
    assert (babbled["parted"], babbled["near_ties"]) == (2, 0)
    assert "babbling and plain chose other tokens from some place on in 2 of 2 answers, 0 of them at a" in printed


def test_the_share_of_learning_is_that_of_its_phases(measured):
    kept, _ = measured
    arms = kept["workloads"]["all"]["arms"]
    for name, arm in arms.items():
        shares = []
        for row in arm["repetitions"]:
            learning = row["seconds"]["observe"] + row["seconds"]["update"]
            shares.append(learning / sum(row["seconds"].values()))
        if name in ("generate", "naive", "babbling", "plain"):
            assert arm["learning_share"] is None
            assert shares == [0, 0]
        else:
            assert arm["learning_share"]["values"] == pytest.approx(shares)
            assert min(shares) > 0
    assert arms["generate"]["tau"] is None
    assert arms["chain"]["tau"] >= arms["plain"]["tau"] == 1


def test_the_table_holds_what_was_kept(measured):
    kept, printed = measured
    for name in ARMS:
        medians = [found["arms"][name]["ms_per_token"]["median"] for found in kept["workloads"].values()]
        rates = " | ".join(f"{1e3 / ms:.1f}" for ms in medians)
        assert f"| {name} | {rates} | {medians[-1]:.1f} [" in printed
    assert f"{kept['provenance']['hardware']['cpu']}, " in printed
    reached = {True: "yes", False: "no"}[kept["aims"]["plain_over_generate"]["met"]]
    ratios = [found["ratios"]["plain_over_generate"] for found in kept["workloads"].values()]
    cells = [
        f"{r['median']:.2f}" + (f" [{r['interval'][0]:.2f}, {r['interval'][1]:.2f}]" if r["interval"] else "")
        for r in ratios
    ]
    assert f"| plain over generate | {' | '.join(cells)} | 1.50 | {reached} |" in printed
    assert "| 1.50 | — (stated for mtbench) |" in printed
    assert kept["provenance"]["load_average"] >= 0
    assert kept["provenance"]["fingerprint"]
    assert list(kept["provenance"]["data"]) == ["a", "b"]
    assert kept["provenance"]["plans"]["auto"]["width"] in kept["specs"]["decodes"]["auto"]["widths"]


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (("target=tiny",), "the target's weights lie in no folder that an engine could read"),
        (("target=tiny", "decode.temperature=0.7"), "engines are compared greedily only: decode.temperature=0"),
    ],
)
def test_without_generate_its_numbers_are_null_with_the_reason(tmp_path, overrides, says):
    result, file = benchmark(composed(*overrides, "repetitions=1"), tmp_path)
    assert file == tmp_path / "bench.json"
    assert json.loads(file.read_text()) == json.loads(json.dumps(result))
    assert result["null_reasons"] == {"generate": says}
    found = result["workloads"]["all"]
    assert list(found["arms"]) == ARMS
    assert found["ratios"]["plain_over_generate"] is result["parted"]["plain_over_generate"] is None
    assert result["aims"]["plain_over_generate"]["reason"] == "not measured"
    assert found["ratios"]["chain_over_plain"]["median"] > 0
    printed = text(result)
    assert f"- generate was not measured: {says}\n" in printed
    assert "| plain over generate | — | — | — | 1.50 | — (not measured) |" in printed


def test_an_engine_that_fails_is_a_reason_and_the_others_go_on(llama, tmp_path, monkeypatch):
    from transformers import AutoModelForCausalLM

    def refuse(*args, **kwargs):
        raise ValueError("no such thing\nand more")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", refuse)
    cfg = composed("target=llama", f"target.path={llama}", f"paths.cache={tmp_path}", "repetitions=1", *NO_LEARNERS)
    result, _ = benchmark(cfg, tmp_path)
    assert result["null_reasons"] == {"generate": "ValueError: no such thing"}
    assert list(result["workloads"]["a"]["arms"]) == ["plain", *MODES]


def test_a_mode_may_stand_twice_with_shapes_of_its_own(tmp_path):
    """And learners may be left out: only speculation is timed then."""
    more = ("+decode@decodes.one=chain", "decodes.one.chain_length=1", "repetitions=1")
    less = (
        *NO_LEARNERS,
        "~decode@decodes.tree",
        "~decode@decodes.auto",
        "aims.tree_over_plain=null",
        "~workload@workloads.b",
    )
    cfg = composed("target=tiny", *more, *less)
    result, _ = benchmark(cfg, tmp_path)
    assert list(result["workloads"]) == ["a", "all"]
    assert list(result["workloads"]["a"]["arms"]) == ["plain", "chain", "one"]
    assert result["workloads"]["a"] == result["workloads"]["all"]
    assert {name: spec["chain_length"] for name, spec in result["specs"]["decodes"].items()} == {"chain": 5, "one": 1}
    assert "| ratio of speed | median [95 %] |" in text(result)


def test_prompts_that_no_source_has_are_left_out_or_stood_in_for(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    cfg = composed("target=tiny", "repetitions=1", *NO_LEARNERS, "paths.data=null", workloads=())
    result, _ = benchmark(cfg, tmp_path)
    assert {name: len(ids) for name, ids in result["prompts"].items()} == {"sample_chat": 1}
    says = "no source has the prompts of mtbench, gsm8k, humaneval, longwrite (see paths.data): sample_chat it is"
    assert says in capsys.readouterr().err
    (tmp_path / "mtbench.jsonl").write_text('{"id": "mt/1", "turns": ["Who?", "Why?"]}\n')
    cfg.paths.data = str(tmp_path)
    result, _ = benchmark(cfg, tmp_path / "second")
    assert result["prompts"] == {"mtbench": ["mt/1"]}
    assert result["null_reasons"]["gsm8k"] == "no source has its prompts (see paths.data)"
    assert result["aims"]["tree_over_plain"]["met"] in (True, False)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("repetitions=0", "repetitions=0: expected 1 or more"),
        ("repetitions=few", "repetitions='few': expected 1 or more"),
        (
            "+aims.nope={ratio: 2, workload: null}",
            "aims.nope: expected one of plain_over_generate, chain_over_generate",
        ),
        ("target.context=8", "every prompt is longer than the target's context of 8 tokens"),
        ("adapters.reset.every=0", "every=0"),
        ("decodes.tree.tree_nodes=1", "tree_nodes=1"),
        ("engines.generate=no.such:engine", "engines.generate='no.such:engine': expected package.module:function"),
        ("+engines.tree=tracedraft.benchmark.engines:generate", "'tree' names two arms"),
    ],
)
def test_bad_input_is_named_and_nothing_is_written(tmp_path, override, says):
    with pytest.raises(UserError) as caught:
        benchmark(composed("target=tiny", override), tmp_path)
    assert says in str(caught.value)
    assert list(tmp_path.iterdir()) == []
