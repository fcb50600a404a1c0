"""Training text of the user's own, and that no benchmark prompt enters training."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import re
from pathlib import Path

import pytest
import torch
from conftest import recompute
from training_cases import SPEC, TEXT, served, shards

from tracedraft import chat
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
    makers = spec.makers(served(), corpus.known_runs(prompts or []))
    list(corpus.write(served(), spec, makers, folder / "corpus"))
    return [corpus.read_shard(file) for file in shards(folder / "corpus")]


def test_conversations_become_rows(tmp_path):
    """Tokens as in serving, answers flagged with their end token, context kept across pieces, padding uncounted."""
    (shard,) = written(dataclasses.replace(conversations(tmp_path, TALK), batch=9), tmp_path)
    tokenizer, target = served().tokenizer, served().target
    whole = chat.encode(tokenizer, TALK[:2]) + tokenizer("Four.<|im_end|>")["input_ids"]
    lengths = shard["counts"].sum(dim=1).tolist()
    assert len(lengths) >= 3
    assert lengths[:-1] == [64] * (len(lengths) - 1)
    assert 0 < lengths[-1] < 64
    talk, answer, taps = (shard[name][shard["counts"]] for name in ("tokens", "answer", "taps"))
    assert talk[: len(whole)].tolist() == whole
    answers = [tokenizer.decode(talk[a:b]) for a, b in spans_of(answer)]
    assert answers == ["Four.<|im_end|>", "Six, of course.<|im_end|>"]
    torch.testing.assert_close(taps, recompute(target, talk.tolist())[0], rtol=1e-4, atol=1e-3)
    assert not shard["answer"][~shard["counts"]].any()
    assert not shard["hidden"][~shard["counts"]].any()


def test_no_conversation_is_in_both_held_out_and_training_text(tmp_path):
    """Each of nine pieces, the three of a shard to a row; which come first is a matter of chance, not of the file."""
    talks = [[{"role": "user", "content": f"{i}" * 150}, SHORT[1]] for i in range(9)]
    made = written(dataclasses.replace(conversations(tmp_path, *talks), batch=4), tmp_path)
    digits = [set(served().tokenizer.decode(shard["tokens"].flatten().tolist())) & set("012345678") for shard in made]
    assert len(digits) > 3
    assert digits[0]
    assert not digits[0] & set.union(*digits[1:])
    assert digits[0] != {"0", "1"}


def spans_of(flags: torch.Tensor) -> list[tuple[int, int]]:
    from tracedraft.training.replay import spans

    return list(spans(flags.tolist()))


def test_padding_is_no_teacher_and_no_token_of_the_vocabulary(tmp_path):
    """A row of 40 real tokens of 64: what its last tokens predict has no teacher; id 0 is no draft token."""
    written(conversations(tmp_path, *[SHORT] * 6), tmp_path)
    files = shards(tmp_path / "corpus")
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
        served().target, shards(tmp_path / "corpus"), dataclasses.replace(SPEC, epochs=8, lr=1e-2, batch=3)
    )
    losses = []
    trainer.run(tmp_path, lambda done: losses.append(done.loss))
    assert losses[-1] < losses[1] / 2


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
        conversations(tmp_path, SHORT, second).makers(dataclasses.replace(served(), tokenizer=tokenizer), {})
    assert "\n" not in str(caught.value)


def test_a_template_that_wants_a_user_beside_its_system_line_is_served(tmp_path):
    """Only histories that serving meets are rendered: none that ends with a system line or an open question."""
    tokenizer = copy.deepcopy(served().tokenizer)
    tokenizer.chat_template = (
        "{% if messages[-1]['role'] == 'system' or (messages[-1]['role'] == 'user' and not add_generation_prompt) %}"
        "{{ raise_exception('a question is missing') }}{% endif %}" + tokenizer.chat_template
    )
    (spec, theirs) = conversations(tmp_path, [*TALK, SHORT[0]]), dataclasses.replace(served(), tokenizer=tokenizer)
    assert len(spec.makers(theirs, {})) == len(conversations(tmp_path, TALK).makers(served(), {}))


def test_no_file_or_an_empty_one_is_an_error(tmp_path):
    for spec, says in (
        (ConversationsSpec(batch=1, length=8, path=None), "text.path=FILE"),
        (ConversationsSpec(batch=1, length=8, path=str(tmp_path / "none")), "cannot be read"),
        (conversations(tmp_path, ""), "holds no conversation"),
    ):
        with pytest.raises(UserError, match=says):
            written(spec, tmp_path)


PROMPT = "Natalia sold clips to 48 of her friends in April, and then she sold half as many in May."


@pytest.mark.parametrize(
    ("said", "kept"),
    [
        (PROMPT.upper().replace(",", " ..."), False),
        (" ".join(PROMPT.split()[:12]), True),
        ("So: give three tips, for staying healthy!", False),
        ("Give three tips for staying.", True),
        ("Say hello", True),  # a prompt, too, but too short to tell quotations from chance
    ],
)
def test_a_conversation_that_quotes_a_benchmark_prompt_is_left_out(tmp_path, said, kept):
    """Whatever of case and punctuation differs, and wherever it is cut: rows here are of 16 tokens."""
    known = [PROMPT, "Give three tips for staying healthy.", "Say hello"]
    quoted = [{"role": "user", "content": said}, SHORT[1]]
    made = written(dataclasses.replace(conversations(tmp_path, SHORT, quoted, length=16), batch=64), tmp_path, known)
    (shard,) = made
    text = served().tokenizer.decode(shard["tokens"][shard["counts"]].tolist())
    assert (said in text) == kept
    assert "What is two and two?" in text


def test_a_file_of_nothing_else_is_an_error(tmp_path):
    with pytest.raises(UserError, match="every conversation quotes a benchmark prompt"):
        written(conversations(tmp_path, [{"role": "user", "content": PROMPT}, SHORT[1]]), tmp_path, [PROMPT])


def test_a_row_of_synthesised_text_that_quotes_a_prompt_counts_nowhere(tmp_path):
    """What the target wrote in one of its rows is taken for a prompt."""
    short = dataclasses.replace(TEXT, tokens=TEXT.batch * TEXT.length, system_share=1.0)
    (shard,) = written(short, tmp_path / "free")
    systems = synthesis.lines("systems.txt")
    texts = served().tokenizer.batch_decode(shard["tokens"].tolist())
    line = next(line for line in systems if 5 <= len(words(line).split()) <= 13 and line in "".join(texts))
    (again,) = written(short, tmp_path / "kept", [line])
    clean = torch.tensor([words(line) not in words(text) for text in texts])
    assert not clean.all()
    for column in ("counts", "answer"):
        assert torch.equal(again[column], shard[column] & clean[:, None])


def words(text: str) -> str:
    return " ".join(re.findall(r"\w+", text.lower()))


@pytest.mark.parametrize("there", [True, False])
def test_a_folder_without_prompts_is_an_error(tmp_path, there):
    with pytest.raises(UserError, match=r"paths\.data=.*expected a folder that holds \*\.jsonl files"):
        corpus.benchmark_prompts(tmp_path if there else tmp_path / "none")


def workloads() -> Path:
    folder = Path(os.environ.get("TRACEDRAFT_DATA") or Path(__file__).parents[2] / "shared" / "workloads")
    if not folder.is_dir():
        pytest.skip("no local workloads: set TRACEDRAFT_DATA")
    return folder


def test_what_seeds_the_text_quotes_no_workload():
    """No six words in a row of an opening or system line stand in any local prompt set; a planted one is found."""
    prompts = corpus.benchmark_prompts(workloads())
    assert len(prompts) > 2000
    known = {gram for prompt in prompts for gram in corpus.ngrams([prompt], 6)}
    given = [*synthesis.lines("openings.txt"), *synthesis.lines("systems.txt")]
    assert not known & corpus.ngrams(given, 6)
    long = next(prompt for prompt in prompts if len(prompt.split()) > 20)
    assert known & corpus.ngrams([long], 6)


def test_shipped_workloads_are_not_training_text():
    given = corpus.ngrams([*synthesis.lines("openings.txt"), *synthesis.lines("systems.txt")], 6)
    prompts = corpus.benchmark_prompts(None)
    assert len(prompts) > 10
    assert not given & corpus.ngrams(prompts, 6)
