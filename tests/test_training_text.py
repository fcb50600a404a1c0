"""Training text of the user's own, and that no benchmark prompt enters training."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
from pathlib import Path

import pytest
import torch
from conftest import recompute
from training_cases import SPEC, TEXT, served

from tracedraft import chat
from tracedraft.config import ASSETS
from tracedraft.errors import UserError
from tracedraft.training import corpus, synthesis
from tracedraft.training.conversations import ConversationsSpec
from tracedraft.training.eagle3 import corpus_vocab
from tracedraft.training.loop import Trainer
from tracedraft.training.objective import training_time_test

TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is two and two?"},
    {"role": "assistant", "content": "Four."},
    {"role": "user", "content": "And three and three, if you please? " * 3},
    {"role": "assistant", "content": "Six, of course."},
]
SHORT = TALK[1:3]


def conversations(folder: Path, *lines: str | list, length: int = 64) -> ConversationsSpec:
    path = folder / "talk.jsonl"
    path.write_text(
        "".join(f"{line if isinstance(line, str) else json.dumps({'messages': line})}\n" for line in lines)
    )
    return ConversationsSpec(batch=3, length=length, path=str(path))


def written(spec: corpus.TextSpec, folder: Path, prompts: list[str] | None = None) -> list[dict[str, torch.Tensor]]:
    list(corpus.write(served(), spec, folder / "corpus", prompts or []))
    return [corpus.read_shard(file) for file in corpus.shards(folder / "corpus")]


def test_conversations_become_rows(tmp_path):
    """Tokens as in serving, answers flagged with their end token, context kept across pieces, padding uncounted."""
    spec = conversations(tmp_path, SHORT, TALK, SHORT)
    shards = written(spec, tmp_path)
    tokenizer, target = served().tokenizer, served().target
    whole = chat.encode(tokenizer, TALK[:2]) + tokenizer("Four.<|im_end|>")["input_ids"]
    rows = {name: torch.cat([shard[name] for shard in shards]) for name in shards[0]}
    lengths = rows["counts"].sum(dim=1).tolist()
    assert lengths[0] == lengths[-1] < 64
    pieces = rows["tokens"][1:-1]
    assert pieces.shape[0] >= 3
    talk = torch.cat([row[:n] for row, n in zip(pieces, lengths[1:-1], strict=True)]).tolist()
    assert talk[: len(whole)] == whole
    answers = [
        tokenizer.decode(talk[a:b])
        for a, b in spans_of(torch.cat([row[:n] for row, n in zip(rows["answer"][1:-1], lengths[1:-1], strict=True)]))
    ]
    assert answers == ["Four.<|im_end|>", "Six, of course.<|im_end|>"]
    taps, _, _ = recompute(target, talk)
    got = torch.cat([row[:n] for row, n in zip(rows["taps"][1:-1], lengths[1:-1], strict=True)])
    torch.testing.assert_close(got, taps, rtol=1e-4, atol=1e-3)
    for row, n in enumerate(lengths):
        assert not rows["answer"][row, n:].any()
        assert not rows["hidden"][row, n:].any()


def spans_of(flags: torch.Tensor) -> list[tuple[int, int]]:
    from tracedraft.training.replay import spans

    return list(spans(flags.tolist()))


def test_padding_is_no_teacher_and_no_token_of_the_vocabulary(tmp_path):
    """A row of 40 real tokens of 64: what its last tokens predict has no teacher; id 0 is no draft token."""
    written(conversations(tmp_path, *[SHORT] * 6), tmp_path)
    files = corpus.shards(tmp_path / "corpus")
    trainer = Trainer(served().target, files, dataclasses.replace(SPEC, batch=3))
    raw = corpus.read_shard(files[1])
    del raw["greedy"]
    real = int(raw["counts"][0].sum())
    assert real < 60
    batch = trainer.pupil.batch(raw)
    longer = {name: tensor.clone() for name, tensor in raw.items()}
    longer["hidden"][:, real:] = 7.0
    longer["taps"][:, real:] = 7.0
    other = trainer.pupil.batch(longer)
    losses = [
        [loss.item() for loss in training_time_test(trainer.model, trainer.pupil.embedding, b, 3, 0.8)[1]]
        for b in (batch, other)
    ]
    assert losses[0] == losses[1]
    assert min(losses[0]) > 0
    tokens = raw["tokens"][raw["counts"]].tolist() + raw["argmax"][raw["counts"]].tolist()
    counted = corpus_vocab(files[1:], len(set(tokens)), 258, frozenset())
    assert set(counted.tolist()) == set(tokens)


def test_a_draft_trains_on_conversations(tmp_path):
    spec = conversations(tmp_path, *[TALK] * 6)
    written(spec, tmp_path)
    trainer = Trainer(
        served().target, corpus.shards(tmp_path / "corpus"), dataclasses.replace(SPEC, epochs=8, lr=1e-2, batch=3)
    )
    losses = []
    trainer.run(tmp_path, lambda done: losses.append(done.loss))
    assert losses[-1] < losses[0] / 2


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "line 2: expected"),
        ('{"messages": "hello"}', "line 2: expected"),
        ('{"messages": [{"role": "bot", "content": "x"}]}', "line 2: expected"),
        ('{"messages": [{"role": "user", "content": "x"}]}', "at least one answer"),
        ('{"turns": ["x"]}', "line 2: expected"),
        ('{"messages": [{"role": "assistant", "content": "x"}]}', "after a user's message"),
    ],
)
def test_a_bad_line_is_named_before_any_work(tmp_path, line, says):
    with pytest.raises(UserError, match=says):
        written(conversations(tmp_path, SHORT, line), tmp_path)
    assert not (tmp_path / "corpus").exists()


ROLES_MUST_ALTERNATE = (
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate') }}{% endif %}[{{ m['role'] }}]{{ m['content'] }}<|im_end|>"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
LAST_ANSWER_ONLY = (
    "{% for m in messages %}[{{ m['role'] }}]{% if m['role'] == 'user' or loop.last %}{{ m['content'] }}{% endif %}"
    "<|im_end|>{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
OPENS_WITH_A_MARK = (
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]<think>{% endif %}"
)


@pytest.mark.parametrize(
    ("template", "second", "says"),
    [
        (
            ROLES_MUST_ALTERNATE,
            [SHORT[0], *SHORT],
            "line 2: the target's chat template refuses it: Roles must alternate",
        ),
        (ROLES_MUST_ALTERNATE, TALK, "line 2: the target's chat template refuses it: Roles must alternate"),
        (LAST_ANSWER_ONLY, TALK[1:], "line 2: .* rewrites what stands before message 4 .*one answer each"),
        (OPENS_WITH_A_MARK, SHORT, "line 1: .* shows message 2 otherwise than serving begins an answer"),
    ],
)
def test_what_the_chat_template_refuses_or_rewrites_is_named_before_any_work(tmp_path, template, second, says):
    tokenizer = copy.deepcopy(served().tokenizer)
    tokenizer.chat_template = template
    with pytest.raises(UserError, match=rf"text\.path=.*talk\.jsonl, {says}") as caught:
        conversations(tmp_path, SHORT, second).makers(dataclasses.replace(served(), tokenizer=tokenizer))
    assert "\n" not in str(caught.value)


def test_a_template_that_wants_a_user_beside_its_system_line_is_served(tmp_path):
    """Only histories that serving meets are rendered: none that ends with a system line or an open question."""
    tokenizer = copy.deepcopy(served().tokenizer)
    tokenizer.chat_template = (
        "{% if messages[-1]['role'] == 'system' or (messages[-1]['role'] == 'user' and not add_generation_prompt) %}"
        "{{ raise_exception('a question is missing') }}{% endif %}" + tokenizer.chat_template
    )
    (spec, theirs) = conversations(tmp_path, [*TALK, SHORT[0]]), dataclasses.replace(served(), tokenizer=tokenizer)
    assert len(spec.makers(theirs)) == len(conversations(tmp_path, TALK).makers(served()))


def test_no_file_or_an_empty_one_is_an_error(tmp_path):
    for spec, says in (
        (ConversationsSpec(batch=1, length=8, path=None), "text.path=FILE"),
        (ConversationsSpec(batch=1, length=8, path=str(tmp_path / "none")), "cannot be read"),
        (conversations(tmp_path, ""), "holds no conversation"),
    ):
        with pytest.raises(UserError, match=says):
            written(spec, tmp_path)


def test_rows_with_a_benchmark_prompt_count_nowhere(tmp_path):
    """Case and punctuation do not hide one; a run of 12 words is no match."""
    prompt = "Natalia sold clips to 48 of her friends in April, and then she sold half as many in May."
    quoted = [{"role": "user", "content": prompt.upper().replace(",", " ...")}, SHORT[1]]
    near = [{"role": "user", "content": " ".join(prompt.split()[:12])}, SHORT[1]]
    (shard,) = written(conversations(tmp_path, SHORT, quoted, near, length=512), tmp_path, [prompt])
    assert shard["counts"].any(dim=1).tolist() == [True, False, True]
    assert shard["answer"].any(dim=1).tolist() == [True, False, True]


def workloads() -> Path:
    folder = Path(os.environ.get("TRACEDRAFT_DATA") or Path(__file__).parents[2] / "shared" / "workloads")
    if not folder.is_dir():
        pytest.skip("no local workloads: set TRACEDRAFT_DATA")
    return folder


def test_what_seeds_the_text_quotes_no_workload():
    """No six words in a row of an opening or system line stand in any local prompt set; a planted one is found."""
    prompts = list(corpus.benchmark_prompts(workloads()))
    assert len(prompts) > 2000
    known = {gram for prompt in prompts for gram in corpus.ngrams([prompt], 6)}
    given = [*synthesis.lines("openings.txt"), *synthesis.lines("systems.txt")]
    assert not known & corpus.ngrams(given, 6)
    long = next(prompt for prompt in prompts if len(prompt.split()) > 20)
    assert known & corpus.ngrams([long], 6)


def test_synthesised_rows_share_no_thirteen_words_with_a_workload(tmp_path):
    prompts = list(corpus.benchmark_prompts(workloads()))
    short = dataclasses.replace(TEXT, tokens=TEXT.batch * TEXT.length)
    (shard,) = written(short, tmp_path, prompts)
    kept = [row for row, counts in zip(shard["tokens"], shard["counts"], strict=True) if counts.any()]
    texts = served().tokenizer.batch_decode([row.tolist() for row in kept])
    assert not corpus.ngrams(prompts) & corpus.ngrams(texts)


def test_shipped_workloads_are_not_training_text():
    given = corpus.ngrams([*synthesis.lines("openings.txt"), *synthesis.lines("systems.txt")], 6)
    prompts = list(corpus.benchmark_prompts(ASSETS / "workloads"))
    assert len(prompts) > 10
    assert not given & corpus.ngrams(prompts, 6)
