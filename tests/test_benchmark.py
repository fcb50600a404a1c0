"""``tracedraft bench``: who is timed against whom in which order, what is made of the times, and what is null."""

from __future__ import annotations

import dataclasses
import json
import statistics
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from checkpoints import saved
from conftest import chain, tiny
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig

from tracedraft.benchmark import (
    Question,
    arm_numbers,
    benchmark,
    interleave,
    ms_per_token,
    parted,
    ratio,
    spread,
    text,
    verdict,
)
from tracedraft.config import shipped_dir
from tracedraft.errors import UserError
from tracedraft.types import Response

SMALL = ("draft=tiny", "threads=1", "repetitions=2", "workload=sample_chat", "workload.limit=2")
SHORT = ("decode.max_new_tokens=24", "decode.prefill_chunk=16", "decode.cache_bucket=64", "adapters.reset.every=2")
ASKED = [Question("a", [1], 0), Question("b", [2, 3], 1)]
BENCH = SimpleNamespace(decode=chain(), served=tiny("float32"))


def composed(*overrides: str) -> DictConfig:
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(shipped_dir("conf")), version_base="1.3"):
        return compose("bench", [*SMALL, *SHORT, *overrides])


def response(tokens: list[int], seconds: float, rounds: int = 0, accepted: int = 0, update: float = 0.0) -> Response:
    spent = {"verify": seconds - update, "update": update}
    return Response(tokens, "limit", rounds, accepted, 0, [], [], [], [], spent)


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("bench") / "llama"
    saved(folder, tie_word_embeddings=True)
    return folder


@pytest.fixture(scope="module")
def measured(llama, tmp_path_factory) -> tuple[dict, str]:
    """The command on a small Llama in fp32: what it kept and what it printed."""
    folder = tmp_path_factory.mktemp("bench")
    arguments = ("target=llama", f"target.path={llama}", "target.dtype=float32", *SMALL, *SHORT)
    command = [sys.executable, "-m", "tracedraft.bench", *arguments, f"out={folder}/deep/kept.json"]
    command += [f"paths.cache={folder}/cache", f"paths.runs={folder}/runs"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("ms a token") == 2
    assert done.stdout.endswith(f"record: {folder}/deep/kept.json\n")
    assert not (folder / "runs").exists(), "an empty folder was left"
    return json.loads((folder / "deep" / "kept.json").read_text()), done.stdout


def test_a_learner_that_keeps_what_it_learns_meets_each_repetition_anew(measured):
    """The same answers to the same prompts: counts cannot differ unless something was remembered."""
    result, _ = measured
    rows = result["arms"]["persistent"]["repetitions"]
    assert len(rows) == 2
    assert rows[0]["rounds"] == rows[1]["rounds"]


# Order and arithmetic


def test_arms_take_turns_so_that_each_is_as_often_early_as_late():
    calls, limits, restarts = [], [], []

    def arm(name):
        def answer(bench, prompt, key):
            calls.append((name, key))
            limits.append(bench.decode.max_new_tokens)
            return response([key], 1.0)

        return answer

    @dataclasses.dataclass(frozen=True)
    class Fake:
        decode: object

    arms = {name: arm(name) for name in "xyz"}
    done = interleave(Fake(chain(max_new_tokens=40)), arms, ASKED, 2, lambda: restarts.append(len(calls)))
    assert restarts == [3, 9]  # after the warm-up, and before each repetition
    warm, served = calls[:3], calls[3:]
    assert warm == [("x", 0), ("y", 0), ("z", 0)]
    assert (set(limits[:3]), set(limits[3:])) == ({16}, {40})
    turns = [served[i : i + 3] for i in range(0, 12, 3)]
    assert ["".join(name for name, _ in turn) for turn in turns] == ["xyz", "zyx", "zyx", "xyz"]
    assert [turn[0][1] for turn in turns] == [0, 1, 0, 1]
    assert [[r.tokens for r in answers[name]] for answers in done for name in "xyz"] == 6 * [[[0], [1]]]


def test_ratios_are_of_times_per_token_within_each_repetition():
    """Arms may say different numbers of tokens."""
    done = [
        {"plain": [response([1, 2], 1.0), response([3], 2.0)], "speculation": [response([1, 2, 3, 4], 2.0)]},
        {"plain": [response([1, 2], 8.0)], "speculation": [response([1, 2], 2.0)]},
    ]
    assert ms_per_token(done[0]["plain"]) == pytest.approx(1000)
    found = ratio(done, "speculation", "plain")
    assert found["values"] == pytest.approx([2.0, 4.0])
    assert found["median"] == pytest.approx(3.0)
    assert found["quartiles"] == pytest.approx([2.5, 3.5])
    assert ratio(done, "plain", "generate") is None


def test_one_repetition_has_no_quartiles():
    assert spread([2.0]) == {"median": 2.0, "quartiles": None, "values": [2.0]}


def test_an_arm_s_numbers():
    repetitions = [
        [response([1, 2], 2.0, rounds=1, accepted=1, update=0.5), response([1], 2.0, rounds=1, update=0.5)],
        [response([1, 2, 3], 3.0, rounds=1, accepted=2)],
    ]
    found = arm_numbers(repetitions)
    assert found["tau"] == (3 + 3) / 3
    assert found["learning_share"]["values"] == [0.25, 0.0]
    assert [row["tokens"] for row in found["repetitions"]] == [3, 3]
    assert arm_numbers([[response([1], 1.0)]])["tau"] is None
    assert arm_numbers([[response([1], 1.0)]])["learning_share"] is None


@pytest.mark.parametrize(
    ("median", "temperature", "workload", "met", "reason"),
    [
        (1.5, 0, "mtbench", True, None),
        (1.49, 0, "mtbench", False, None),
        (1.6, 0.7, "mtbench", None, "stated for temperature 0"),
        (1.6, 0, "sample_chat", None, "stated for mtbench"),
        (None, 0, "mtbench", None, "not measured"),
    ],
)
def test_an_aim_is_judged_only_where_it_was_stated(median, temperature, workload, met, reason):
    specs = {"decode": chain(temperature=temperature), "workload": SimpleNamespace(name=workload)}
    found = None if median is None else spread([median])
    judged = verdict({"ratio": 1.5, "workload": "mtbench"}, found, specs)
    assert judged == {"ratio": 1.5, "workload": "mtbench", "met": met, "reason": reason}
    if workload != "mtbench":
        assert verdict({"ratio": 1.5, "workload": None}, found, specs)["met"] is True


def test_partings_are_scored_at_the_first_difference():
    """An arm that says what the target would not is no near-tie; one cut short is no parting."""
    target = BENCH.served.target
    prompt = list(b"Name three rivers.")
    own = int(target.exact_logits(prompt).argmax())
    other = (own + 1) % 256
    asked = [Question("a", prompt, 0), Question("b", prompt, 0), Question("c", prompt, 0)]
    answers = {
        "plain": [response([own, 5], 1.0), response([own, 7], 1.0), response([own], 1.0)],
        "speculation": [response([other, 9], 1.0), response([own], 1.0), response([own], 1.0)],
    }
    found = parted(BENCH, asked, answers, "plain", "speculation")
    assert (found["prompts"], found["parted"], found["near_ties"]) == (3, 1, 0)
    first = found["first"][0]
    assert (first["id"], first["index"], first["said"], first["own"]) == ("a", 0, other, own)
    assert first["gap"] > first["bound"]
    assert parted(BENCH, asked, answers, "plain", "generate") is None


# The command


def test_the_command_times_every_arm_on_the_same_prompts(measured):
    kept, _ = measured
    assert list(kept["arms"]) == ["generate", "plain", "speculation", "reset", "persistent"]
    assert len(kept["prompts"]) == 2
    counts = {name: [row["tokens"] for row in arm["repetitions"]] for name, arm in kept["arms"].items()}
    assert len({tuple(c) for c in counts.values()}) == 1, "in fp32 all arms say the same"
    for name, (faster, slower) in {
        "plain_over_generate": ("plain", "generate"),
        "speculation_over_plain": ("speculation", "plain"),
        "reset_over_speculation": ("reset", "speculation"),
        "persistent_over_speculation": ("persistent", "speculation"),
    }.items():
        ms = [kept["arms"][arm]["ms_per_token"]["values"] for arm in (slower, faster)]
        assert kept["ratios"][name]["values"] == pytest.approx([a / b for a, b in zip(*ms, strict=True)])
        assert kept["ratios"][name]["median"] == statistics.median(kept["ratios"][name]["values"])


def test_generate_says_what_plain_decoding_says(measured):
    """fp32 of one order of sums and another: the random model's choices are far clearer than that."""
    kept, _ = measured
    for pair in ("plain_over_generate", "speculation_over_plain"):
        assert kept["parted"][pair] == {"prompts": 2, "parted": 0, "near_ties": 0, "first": []}


def test_the_share_of_learning_is_that_of_its_phases(measured):
    kept, _ = measured
    for name, arm in kept["arms"].items():
        shares = []
        for row in arm["repetitions"]:
            learning = row["seconds"]["observe"] + row["seconds"]["update"]
            shares.append(learning / sum(row["seconds"].values()))
        if name in ("generate", "plain"):
            assert arm["learning_share"] is None
            assert shares == [0, 0]
        else:
            assert arm["learning_share"]["values"] == pytest.approx(shares)
            assert min(shares) > 0
    assert kept["arms"]["generate"]["tau"] is None
    assert kept["arms"]["speculation"]["tau"] >= kept["arms"]["plain"]["tau"] == 1


def test_the_table_holds_what_was_kept(measured):
    kept, printed = measured
    for name, arm in kept["arms"].items():
        assert f"| {name} | {arm['ms_per_token']['median']:.1f} [" in printed
    assert f"{kept['provenance']['hardware']['cpu']}, " in printed
    reached = {True: "yes", False: "no"}[kept["aims"]["plain_over_generate"]["met"]]
    assert f"| plain over generate | {kept['ratios']['plain_over_generate']['median']:.2f} [" in printed
    assert f"| 1.50 | {reached} |" in printed
    assert "| 1.50 | — (stated for mtbench) |" in printed
    assert kept["provenance"]["load_average"] >= 0
    assert kept["provenance"]["fingerprint"]


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (("target=tiny",), "the target's weights lie in no folder that transformers could read"),
        (("target=tiny", "decode.temperature=0.7"), "generate is compared greedily only: decode.temperature=0"),
    ],
)
def test_without_generate_its_numbers_are_null_with_the_reason(tmp_path, overrides, says):
    result, file = benchmark(composed(*overrides, "repetitions=1"), tmp_path)
    assert file == tmp_path / "bench.json"
    assert json.loads(file.read_text()) == result
    assert result["null_reasons"] == {"generate": says}
    assert "generate" not in result["arms"]
    assert result["ratios"]["plain_over_generate"] is result["parted"]["plain_over_generate"] is None
    assert result["aims"]["plain_over_generate"]["reason"] == "not measured"
    assert result["ratios"]["speculation_over_plain"]["median"] > 0
    printed = text(result)
    assert f"- generate was not measured: {says}\n" in printed
    assert "| plain over generate | — | 1.50 | — (not measured) |" in printed


def test_a_folder_that_transformers_refuses_is_a_reason(llama, tmp_path, monkeypatch):
    from transformers import AutoModelForCausalLM

    def refuse(*args, **kwargs):
        raise ValueError("no such thing\nand more")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", refuse)
    cfg = composed("target=llama", f"target.path={llama}", f"paths.cache={tmp_path}", "repetitions=1")
    result, _ = benchmark(cfg, tmp_path)
    assert result["null_reasons"] == {"generate": f"transformers can't load {llama}: no such thing"}


def test_prompts_that_no_source_has_are_stood_in_for(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    cfg = composed("target=tiny", "workload=mtbench", "stand_in.limit=1", "repetitions=1", "paths.data=null")
    result, _ = benchmark(cfg, tmp_path)
    assert (result["workload"], len(result["prompts"])) == ("sample_chat", 1)
    assert "no source has the prompts of mtbench (see paths.data): sample_chat stands in" in capsys.readouterr().err
    (tmp_path / "mtbench.jsonl").write_text('{"id": "mt/1", "turns": ["Who?", "Why?"]}\n')
    cfg = composed("target=tiny", "workload=mtbench", "repetitions=1", f"paths.data={tmp_path}")
    result, _ = benchmark(cfg, tmp_path / "second")
    assert (result["workload"], result["prompts"]) == ("mtbench", ["mt/1"])
    assert result["aims"]["speculation_over_plain"]["met"] in (True, False)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("repetitions=0", "repetitions=0: expected 1 or more"),
        ("repetitions=few", "repetitions='few': expected 1 or more"),
        (
            "+aims.nope={ratio: 2, workload: null}",
            "aims.nope: expected one of plain_over_generate, spec",
        ),
        ("target.context=8", "every prompt is longer than the target's context of 8 tokens"),
        ("adapters.reset.every=0", "every=0"),
    ],
)
def test_bad_input_is_named_and_nothing_is_written(tmp_path, override, says):
    with pytest.raises(UserError) as caught:
        benchmark(composed("target=tiny", override), tmp_path)
    assert says in str(caught.value)
    assert list(tmp_path.iterdir()) == []
