"""Engines beside ours: fed one prompt at a time, and what becomes of those that fail."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from conftest import CPU

from tracedraft.benchmark import engines
from tracedraft.benchmark.engines import Job, Running, find
from tracedraft.errors import UserError

JOB = Job(Path("target"), Path("draft"), CPU, torch.float32, 8, 0.0, 64, frozenset({9}))
PROMPTS = [[1, 2], [3], [4, 5, 6]]


def echo(job: Job, prompts: Iterator[list[int]]) -> Iterator[tuple[list[int], float]]:
    """Says the prompt, and then the end token."""
    for prompt in prompts:
        yield [*prompt, 9][: job.max_new_tokens], 0.5


def test_an_engine_answers_the_prompt_it_was_given_last():
    running = Running(echo, JOB)
    for prompt in PROMPTS:
        made = running.answer(prompt)
        assert made.tokens == [*prompt, 9]
        assert made.ended == "eos"
        assert sum(made.seconds.values()) == made.seconds["other"] == 0.5
        assert (made.rounds, made.accepted) == (0, 0)
    assert running.answer([1] * 20).ended == "limit"


def test_an_engine_works_only_while_it_is_asked():
    """What it loads is loaded once, with its first prompt; nothing of it runs between two of ours."""
    told = []

    def engine(job, prompts):
        told.append("load")
        for prompt in prompts:
            told.append(prompt)
            yield torch.tensor(prompt), torch.tensor(1.0)

    running = Running(engine, JOB)
    assert told == []
    assert answers(running) == PROMPTS
    assert told == ["load", *PROMPTS]


def greedy(job, prompts):
    """Takes all prompts at once."""
    for prompt in list(prompts):
        yield prompt, 1.0


def short(job, prompts):
    yield next(prompts), 1.0


def broken(job, prompts):
    raise ValueError("no such shape\nand more")
    yield


def silent(job, prompts):
    for _ in prompts:
        yield [], 1.0


def strange(job, prompts):
    for _ in prompts:
        yield None


def answers(running: Running) -> list[list[int]]:
    return [running.answer(prompt).tokens for prompt in PROMPTS]


@pytest.mark.parametrize(
    ("engine", "says"),
    [
        (greedy, "it took a prompt before it had yielded the answer to the one before"),
        (short, "it ended before every prompt was answered"),
        (broken, "ValueError: no such shape"),
        (silent, "it yielded 0 tokens and 1.0 seconds: expected both above 0"),
        (strange, "TypeError: cannot unpack non-iterable NoneType object"),
    ],
)
def test_what_an_engine_does_wrong_is_said_in_a_line(engine, says):
    running = Running(engine, JOB)
    with pytest.raises(UserError) as caught:
        answers(running)
    assert str(caught.value) == says


def test_engines_are_found_by_name():
    assert find("engines.generate", "tracedraft.benchmark.engines:generate") is engines.generate
    for path in ("tracedraft.benchmark.engines:nope", "no.such:thing", "tracedraft.benchmark.engines", ""):
        with pytest.raises(UserError, match=r"engines\.x=.*expected package\.module:function"):
            find("engines.x", path)


def test_generate_s_times_are_of_its_answers_alone(tmp_path):
    """A pause between two prompts is nobody's."""
    from checkpoints import saved

    saved(tmp_path / "llama", tie_word_embeddings=True)
    job = Job(tmp_path / "llama", None, CPU, torch.float32, 8, 0.0, 64, frozenset())
    for engine in (engines.generate, engines.generate_static):
        running = Running(engine, job)
        first = running.answer([5, 6, 7])
        began = time.perf_counter()
        time.sleep(0.5)
        again = running.answer([5, 6, 7])
        assert again.tokens == first.tokens
        assert len(first.tokens) == 8
        assert 0 < again.seconds["other"] < time.perf_counter() - began - 0.5
        assert len(running.answer([5] * 60).tokens) == 4, "the context ends there"


def test_assisted_generation_is_the_targets_own_in_chains_of_five(tmp_path, monkeypatch):
    """A draft that is the target itself: after the prompt each of the target's passes is worth six tokens."""
    from checkpoints import saved

    passes, load = {}, engines._load

    def counted(job, folder):
        model = load(job, folder)
        passes[folder.name] = []
        model.register_forward_hook(lambda *_: passes[folder.name].append(1))
        return model

    monkeypatch.setattr(engines, "_load", counted)
    for name, layers in (("target", 7), ("same", 7), ("other", 2)):
        saved(tmp_path / name, tie_word_embeddings=True, num_hidden_layers=layers)
    made = {}
    for name in ("same", "other"):
        job = Job(tmp_path / "target", tmp_path / name, CPU, torch.float32, 24, 0.0, 64, frozenset())
        plain = Running(engines.generate, job).answer([5, 6, 7]).tokens
        assert Running(engines.generate_assisted, job).answer([5, 6, 7]).tokens == plain
        made[name] = len(passes["target"])
        assert passes[name], "the draft was never asked"
    assert len(plain) == 24
    assert made["same"] == 24 / 6 < made["other"]
    (tmp_path / "eagle3").mkdir()
    (tmp_path / "eagle3" / "config.json").write_text('{"architectures": ["LlamaForCausalLMEagle3"]}')
    for draft, says in ((None, "the draft lies in no folder"), (tmp_path / "eagle3", "by a language model only")):
        job = Job(tmp_path / "target", draft, CPU, torch.float32, 24, 0.0, 64, frozenset())
        with pytest.raises(UserError, match=says):
            Running(engines.generate_assisted, job).answer([5, 6, 7])
