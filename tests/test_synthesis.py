"""Text that the target writes itself: right states, right flags, and the same again."""

from __future__ import annotations

import copy
import dataclasses
import random
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import recompute
from training_cases import TEXT, served, shards, synthesise

from tracedraft.errors import UserError
from tracedraft.target import LlamaTarget
from tracedraft.training import corpus as corpora
from tracedraft.training import synthesis


def test_shards_hold_what_a_teacher_forced_pass_gives(corpus):
    """Rows were written a token a pass in a batch; here each is one pass. float32 noise at taps of size ~50."""
    assert len(corpus) == 3
    target, checked = served().target, 0
    for file in corpus:
        shard = corpora.read_shard(file)
        assert {name: tuple(t.shape) for name, t in shard.items()} == {
            "tokens": (16, 128), "argmax": (16, 128), "answer": (16, 128),
            "counts": (16, 128), "greedy": (16,), "taps": (16, 128, 96), "hidden": (16, 128, 32),
        }  # fmt: skip
        for i in range(16):
            taps, hidden, logits = recompute(target, shard["tokens"][i].tolist())
            torch.testing.assert_close(shard["taps"][i], taps, rtol=1e-4, atol=1e-3)
            torch.testing.assert_close(shard["hidden"][i], hidden, rtol=1e-4, atol=1e-4)
            best = logits.topk(2).values
            clear = best[:, 0] - best[:, 1] > 1e-3
            assert torch.equal(shard["argmax"][i].long()[clear], logits.argmax(dim=1)[clear])
            checked += int(clear.sum())
    assert checked > 0.98 * 3 * 16 * 128


def rows(files: list[Path]) -> Iterator[tuple[int, list[int], list[int], list[bool]]]:
    """Number, tokens, argmax and answer flags of every row of every shard."""
    for file in files:
        shard = corpora.read_shard(file)
        columns = (shard[name].tolist() for name in ("tokens", "argmax", "answer"))
        yield from zip(range(TEXT.batch), *columns, strict=True)


def test_rows_follow_the_chat_template(corpus):
    """Each row opens as the template does; an end token is followed by the other role's header, and what the
    target then writes is flagged as answer, its end token included, in answers only."""
    tokenizer, ends, turns = served().tokenizer, served().target.eos_ids, {True: 0, False: 0}
    template = synthesis.template_of(tokenizer, ends)
    assert tokenizer.decode(template.to_answer) == "\n<|im_start|>assistant\n"
    assert tokenizer.decode(template.to_question) == "\n<|im_start|>user\n"
    header = {True: template.to_answer, False: template.to_question}
    systems = 0
    for _, tokens, _, answer in rows(corpus):
        head = re.match(r"<\|im_start\|>(system\n.*<\|im_end\|>\n<\|im_start\|>)?user\n", tokenizer.decode(tokens))
        assert head is not None
        systems += head[1] is not None
        at = len(tokenizer(head[0], add_special_tokens=False)["input_ids"])
        answering, start = False, 0
        assert not any(answer[:at])
        while at < len(tokens):
            forced = header[answering][: len(tokens) - at] if start else []
            assert tokens[at : at + len(forced)] == forced
            assert not any(answer[at : at + len(forced)])
            at += len(forced)
            start = at
            follows = header[not answering]
            while at < len(tokens):  # openings, which are given, may hold an end token
                at += 1
                if tokens[at - 1] in ends and (
                    answering or tokens[at : at + len(follows)] == follows[: len(tokens) - at]
                ):
                    break
            else:
                at += 1
            assert all(flag == answering for flag in answer[start:at])
            turns[answering] += at <= len(tokens)
            answering = not answering
    assert min(turns.values()) > 20, "too few turns ended for the test to mean anything"
    assert 0 < systems < 3 * TEXT.batch


VICUNA_LIKE = (
    "{% for m in messages %}{% if m['role'] == 'user' %}U:{{ m['content'] }}"
    "{% elif m['role'] == 'assistant' %}A:{{ m['content'] }}<|im_end|>"
    "{% else %}{{ m['content'] }} {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}A:{% endif %}"
)


def scripted(spec: synthesis.SynthesisSpec, said: list[str]) -> dict[str, torch.Tensor]:
    """The shard of one row in which the target says these texts of itself, one token after the other."""
    theirs = copy.deepcopy(served().tokenizer)
    theirs.chat_template = VICUNA_LIKE
    base = dataclasses.replace(served(), tokenizer=theirs)
    end = theirs("<|im_end|>")["input_ids"][0]
    target = LlamaTarget(base.target.model, base.target.taps, frozenset({end}), base.target.context)
    writer = synthesis._Writer(dataclasses.replace(base, target=target), spec, random.Random(0), 0)
    tokens = iter([token for text in said for token in theirs(text)["input_ids"]])
    writer._draw = lambda logits, greedy: torch.tensor([0 if writer.queues[0] else next(tokens, 0)])
    for _ in range(spec.length):
        writer.step()
    return writer.shard()


@pytest.mark.parametrize("ending", ["A:", "<|im_end|>"])
def test_a_question_that_no_token_ends_goes_over_into_its_answer(ending):
    """As in Vicuna's and Llama 2's templates: the target writes the answer's header of itself, which is not written a
    second time, or an end token, which the header takes the place of."""
    script = ["why?", ending, "so.<|im_end|>", "how?", ending, "thus.<|im_end|>"]
    whole = "U:why?A:so.<|im_end|>U:how?A:thus.<|im_end|>U:"
    tokenizer = served().tokenizer
    length = len(tokenizer(whole)["input_ids"])
    spec = dataclasses.replace(TEXT, batch=1, length=length, plain_share=1.0, system_share=0.0)
    shard = scripted(spec, script)
    tokens, answer = shard["tokens"][0], shard["answer"][0]
    assert tokenizer.decode(tokens.tolist()) == whole
    assert tokenizer.decode(tokens[answer].tolist()) == "so.<|im_end|>thus.<|im_end|>"


@pytest.mark.parametrize("repeats", [3, None])
def test_a_turn_that_goes_in_circles_is_ended(repeats):
    """At the token by which the last sixteen stand there for the third time: of a circle of seven, the thirtieth.

    What was said in the turn before does not count.
    """
    circle = "around " * 9
    spec = dataclasses.replace(TEXT, batch=1, length=80, plain_share=1.0, system_share=0.0, repeats=repeats)
    shard = scripted(spec, [circle[:20], "A:", circle])
    text = served().tokenizer.decode(shard["tokens"][0].tolist())
    rest = text.removeprefix(f"U:{circle[:20]}A:")
    assert rest != text
    if repeats is None:
        assert rest.startswith(circle[: len(rest)])
    else:
        assert rest.startswith(circle[: 16 + 2 * 7 - 1] + "<|im_end|>U:")
        said = served().tokenizer.decode(shard["tokens"][0][shard["answer"][0]].tolist())
        assert said.startswith(circle[:29])
        assert "<|im_end|>" not in said, "the target did not say that"


@pytest.mark.parametrize(("share", "whole"), [(0.0, 1.0), (1.0, 0.2)])
def test_openings_are_cut_after_a_word(share, whole, monkeypatch):
    """Of six words: after the third to the sixth, each as often; of 400 draws a fourth is 100 +- 9."""
    monkeypatch.setattr(synthesis, "lines", lambda name: ["How do I  sail\nhome safely?"])
    spec = dataclasses.replace(TEXT, batch=1, plain_share=0.0, system_share=0.0, cut_share=share)
    writer = synthesis._Writer(served(), spec, random.Random(0), 0)
    seen = Counter(served().tokenizer.decode(writer._opening()) for _ in range(400))
    ways = ["How do I", "How do I  sail", "How do I  sail\nhome", "How do I  sail\nhome safely?"]
    assert set(seen) == set(ways[3:] if share == 0 else ways)
    assert min(seen.values()) > 55
    assert seen[ways[3]] >= whole * 300


def test_without_an_end_token_nothing_can_be_ended():
    base = served()
    endless = dataclasses.replace(
        base, target=LlamaTarget(base.target.model, base.target.taps, frozenset(), base.target.context)
    )
    with pytest.raises(UserError, match=r"text\.repeats=3: the target has no end token"):
        TEXT.makers(endless, {})


def test_a_template_that_refuses_a_system_line_is_named_before_any_work():
    tokenizer = copy.deepcopy(served().tokenizer)
    tokenizer.chat_template = (
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}" + VICUNA_LIKE
    )
    theirs = dataclasses.replace(served(), tokenizer=tokenizer)
    with pytest.raises(UserError, match=r"text\.system_share=0\.2: the target's chat template refuses it: no system"):
        TEXT.makers(theirs, {})
    assert dataclasses.replace(TEXT, system_share=0.0).makers(theirs, {})


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"answer_temperature": -0.7}, "text.answer_temperature=-0.7: expected 0"),
        ({"question_temperature": -1.0}, "text.question_temperature=-1.0: expected 0"),
        ({"plain_share": 35.0}, "text.plain_share=35.0: expected a share"),
        ({"system_share": -0.1}, "text.system_share=-0.1: expected a share"),
        ({"cut_share": 1.1}, "text.cut_share=1.1: expected a share"),
        ({"repeats": 1}, "text.repeats=1: expected at least 2"),
    ],
)
def test_a_bad_setting_is_named_when_the_spec_is_built(changes, says):
    with pytest.raises(UserError, match=re.escape(says)):
        dataclasses.replace(TEXT, **changes)


def test_what_questions_start_with_is_part_of_the_texts_identity(monkeypatch, tmp_path):
    before = TEXT.identity()
    (tmp_path / "training").mkdir()
    for name in (synthesis.OPENINGS, synthesis.SYSTEMS):
        (tmp_path / "training" / name).write_text("Tell me\n")
    monkeypatch.setattr(synthesis, "ASSETS", tmp_path)
    assert TEXT.identity() != before


def test_answers_of_even_rows_are_greedy_and_no_others(corpus):
    right, total = [0, 0], [0, 0]
    for i, tokens, argmax, answer in rows(corpus):
        for t in range(len(tokens) - 1):
            if answer[t + 1]:
                total[i % 2] += 1
                right[i % 2] += tokens[t + 1] == argmax[t]
    assert min(total) > 100
    assert right[0] == total[0]
    assert right[1] < 0.9 * total[1]
    assert corpora.read_shard(corpus[0])["greedy"].tolist() == [True, False] * 8


def test_a_pass_without_a_sampled_row_writes_what_the_target_would(tmp_path):
    """One row, whose answers are greedy, and its questions here too."""
    spec = dataclasses.replace(TEXT, batch=1, tokens=128, question_temperature=0.0, answer_temperature=0.0)
    assert synthesise(tmp_path, spec) == 128
    shard = corpora.read_shard(shards(tmp_path)[0])
    follows = shard["answer"][0, 1:]
    assert follows.any()
    assert torch.equal(shard["tokens"][0, 1:][follows], shard["argmax"][0, :-1][follows])


def test_same_seed_same_shard_and_only_the_missing_one_is_written(corpus, tmp_path):
    assert synthesise(tmp_path) == TEXT.tokens
    mine = shards(tmp_path)
    assert [file.read_bytes() for file in mine] == [file.read_bytes() for file in corpus]
    assert mine[0].read_bytes() != mine[1].read_bytes()
    stamps = [file.stat().st_mtime_ns for file in mine]
    mine[1].unlink()
    assert synthesise(tmp_path) == TEXT.tokens // 3
    assert mine[1].read_bytes() == corpus[1].read_bytes()
    assert [mine[i].stat().st_mtime_ns for i in (0, 2)] == [stamps[0], stamps[2]]
    assert synthesise(tmp_path) == 0
    other = dataclasses.replace(TEXT, tokens=TEXT.batch * TEXT.length, seed=1)
    synthesise(tmp_path / "other", other)
    assert shards(tmp_path / "other")[0].read_bytes() != mine[0].read_bytes()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_disk_is_checked_before_any_work(tmp_path, monkeypatch, dtype):
    """The need is that of the files that would be written; a twentieth of the disk stays free."""
    short = dataclasses.replace(TEXT, tokens=2 * 16 * 128)
    synthesise(tmp_path / "real", short, dtype)
    written = sum(file.stat().st_size for file in shards(tmp_path / "real"))

    def free(size: float) -> None:
        monkeypatch.setattr(corpora.shutil, "disk_usage", lambda folder: SimpleNamespace(free=size))

    free(written / 0.94)
    corpora.check_disk(served(dtype), short, tmp_path, 2, 0)
    free(written / 0.97)
    with pytest.raises(UserError, match=r"the corpus still needs .* are free, .*: lower text\.tokens or move"):
        synthesise(tmp_path / "new", short, dtype)
    assert shards(tmp_path / "new") == []
    assert synthesise(tmp_path / "real", short, dtype) == 0  # nothing to write, none needed
