"""Offline training: the golden training-time test, text from the target itself, and that learning learns."""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import golden_folder, golden_json, golden_tensors, recompute, tiny
from safetensors.torch import save_file

from tracedraft.errors import UserError
from tracedraft.models import eagle3
from tracedraft.target import LlamaTarget, Served
from tracedraft.training import corpus as corpora
from tracedraft.training import synthesis
from tracedraft.training.loop import Trainer, TrainingSpec, batches, corpus_vocab, new_draft
from tracedraft.training.objective import (
    Batch,
    chain,
    teacher_of,
    teacher_of_hidden,
    training_time_test,
    weighted,
)

TEXT = synthesis.SynthesisSpec(
    tokens=3 * 16 * 128, batch=16, length=128, seed=0,
    question_temperature=1.5, answer_temperature=1.5, plain_share=0.35, system_share=0.2,
)  # fmt: skip
SPEC = TrainingSpec(
    draft_vocab_size=200, fc_norm=True, pass_through=True, init=None, loss="ce", unroll=2, decay=0.8, epochs=16,
    batch=8, length=64, lr=3e-2, warmup_steps=5, final_lr=0.1, betas=(0.9, 0.95), clip=0.5,
    weight_decay=0.0, evaluate_every=1000, held_out_tokens=2048, patience=None, seed=0,
)  # fmt: skip


@cache
def served(dtype: str = "float32") -> Served:
    """A tiny target that can be learnt from a few thousand tokens: its layers add little to the embedding, it
    is sure of itself, and several tokens end a turn, or hardly one would end by chance."""
    base = tiny(dtype)
    model = copy.deepcopy(base.target.model)
    for layer in model.layers:
        layer.self_attn.o_proj.weight.mul_(0.1)
        layer.mlp.down_proj.weight.mul_(0.1)
    model.lm_head.weight.mul_(4)
    ends = base.target.eos_ids | set(range(0, 250, 25))
    return dataclasses.replace(base, target=LlamaTarget(model, base.target.taps, ends, base.target.context))


def synthesise(folder: Path, spec: synthesis.SynthesisSpec = TEXT, dtype: str = "float32") -> int:
    return sum(corpora.write(served(dtype), spec, folder, []))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> list[Path]:
    folder = tmp_path_factory.mktemp("corpus")
    synthesise(folder)
    return corpora.shards(folder)


# The objective, against the reference's own trainer


@pytest.fixture
def golden_model(tmp_path):
    def make(name: str) -> eagle3.Eagle3:
        return eagle3.load(golden_folder(name, tmp_path / name), torch.float32, "cpu").requires_grad_(True)

    return make


def golden_batch(model: eagle3.Eagle3) -> Batch:
    given = golden_tensors("eagle3_tiny")
    teacher, in_vocab = teacher_of(given["train_teacher_logits"][None], model)
    counts = given["train_loss_mask"][None].float()
    everywhere = torch.ones_like(counts, dtype=torch.bool)
    return Batch(given["train_input_ids"][None], given["train_features"][None], teacher, in_vocab, counts, everywhere)


def test_golden_losses_and_gradients(golden_model, golden_decoder):
    """Tolerances of the reference: loss 1e-5, gradients 1e-3, relative. Fused rows are split again."""
    model, expected = golden_model("eagle3_tiny"), golden_json("eagle3_tiny")["training"]
    losses = training_time_test(model, golden_decoder.embed_tokens.weight, golden_batch(model), expected["steps"])
    assert [loss.loss.item() for loss in losses] == pytest.approx(expected["ploss"], rel=1e-5)
    total = weighted(losses, 0.8)
    assert total.item() == pytest.approx(expected["total"], rel=1e-5)
    total.backward()
    got = {}
    for name, parameter in model.named_parameters():
        if "qkv" in name:
            pieces = zip("qkv", parameter.grad.split((32, 16, 16)), strict=True)
            got |= {name.replace("qkv", part): piece for part, piece in pieces}
        elif "gate_up" in name:
            pieces = zip(("gate", "up"), parameter.grad.split((96, 96)), strict=True)
            got |= {name.replace("gate_up", part): piece for part, piece in pieces}
        else:
            got[name] = parameter.grad
    assert {name: float(g.norm()) for name, g in got.items()} == pytest.approx(expected["grad_l2"], rel=1e-3)
    for name in ("fc.weight", "norm.weight"):
        whole = golden_tensors("eagle3_tiny")[f"grad.{name}"]
        assert (got[name] - whole).norm() < 1e-3 * whole.norm()


def test_golden_logits_of_each_step(golden_model, golden_decoder):
    """Losses could agree by luck of averaging. The last k+1 slots have no next token; the reference pads."""
    model, expected = golden_model("eagle3_tiny"), golden_tensors("eagle3_tiny")
    batch = golden_batch(model)
    steps = list(chain(model, golden_decoder.embed_tokens.weight, batch.tokens, batch.taps, 3))
    for k, hidden in enumerate(steps):
        n = 24 - 1 - k
        assert hidden.shape[1] == n
        torch.testing.assert_close(hidden[0], expected["ttt_hidden"][k, :n], rtol=0, atol=1e-4)
        logits = model.lm_head(model.norm(hidden))[0]
        torch.testing.assert_close(logits, expected["ttt_logits"][k, :n], rtol=0, atol=1e-4)


def test_golden_losses_with_every_position_counted(golden_model, golden_decoder):
    """The reference's padded rows count only if token 0 is a draft token, which it is not here."""
    model, expected = golden_model("eagle3_tiny"), golden_json("eagle3_tiny")["training"]["full_mask_variant"]
    assert not expected["token0_in_draft_vocab"]
    batch = golden_batch(model)
    batch = dataclasses.replace(batch, counts=torch.ones_like(batch.counts))
    losses = training_time_test(model, golden_decoder.embed_tokens.weight, batch, 3)
    assert [loss.loss.item() for loss in losses] == pytest.approx(expected["ploss"], rel=1e-5)
    assert weighted(losses, 0.8).item() == pytest.approx(expected["total"], rel=1e-5)


def test_golden_accuracy_of_a_trained_draft(golden_model, golden_target):
    """Loss and accuracy where the draft is right more often than not, through the target's own features."""
    model, golden = golden_model("eagle3_e2e"), golden_json("eagle3_e2e")["training_metrics"]
    taps, _, logits = recompute(golden_target, golden["input_ids"])
    teacher, in_vocab = teacher_of(logits, model)
    mask = torch.tensor(golden["loss_mask"], dtype=torch.float32)
    tokens, everywhere = torch.tensor(golden["input_ids"])[None], torch.ones(1, len(mask), dtype=torch.bool)
    batch = Batch(tokens, taps[None], teacher[None], in_vocab[None], mask[None], everywhere)
    losses = training_time_test(model, golden_target.model.embed_tokens.weight, batch, golden["steps"])
    assert [loss.loss.item() for loss in losses] == pytest.approx(golden["ploss"], rel=1e-4)
    assert weighted(losses, 0.8).item() == pytest.approx(golden["total"], rel=1e-4)
    accuracy = [float(loss.correct / mask[k:].sum()) for k, loss in enumerate(losses)]
    assert accuracy == pytest.approx(golden["accuracy"], abs=1e-6)
    assert min(accuracy) > 0.5


def test_teacher_from_hidden_states_is_the_teacher_from_logits(golden_model, golden_target):
    """Only the order of sums differs: 1e-6 of logits below 20, so 2e-5 of a probability."""
    model = golden_model("eagle3_tiny")
    _, hidden, logits = recompute(golden_target, golden_json("target_tiny")["prompt"])
    teacher, in_vocab = teacher_of(logits, model)
    again = teacher_of_hidden(hidden, golden_target.model.lm_head.weight[model.vocab])
    torch.testing.assert_close(again, teacher, rtol=2e-5, atol=1e-9)
    torch.testing.assert_close(teacher.sum(-1), torch.ones(12))
    inside = [int(row.argmax()) in model.vocab.tolist() for row in logits]
    assert in_vocab.tolist() == inside
    assert len(set(inside)) == 2


# Text from the target itself


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
    template = synthesis.template_of(tokenizer)
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


def test_same_seed_same_shard_and_only_the_missing_one_is_written(corpus, tmp_path):
    assert synthesise(tmp_path) == TEXT.tokens
    mine = corpora.shards(tmp_path)
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
    assert corpora.shards(tmp_path / "other")[0].read_bytes() != mine[0].read_bytes()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_disk_is_checked_before_any_work(tmp_path, monkeypatch, dtype):
    """The need is that of the files that would be written; a twentieth of the disk stays free."""
    short = dataclasses.replace(TEXT, tokens=2 * 16 * 128)
    synthesise(tmp_path / "real", short, dtype)
    written = sum(file.stat().st_size for file in corpora.shards(tmp_path / "real"))

    def free(size: float) -> None:
        monkeypatch.setattr(corpora.shutil, "disk_usage", lambda folder: SimpleNamespace(free=size))

    free(written / 0.94)
    corpora.check_disk(served(dtype), short, tmp_path, 2)
    free(written / 0.97)
    with pytest.raises(UserError, match=r"the corpus still needs .* are free: lower text\.tokens or move"):
        list(corpora.write(served(dtype), short, tmp_path / "new", []))
    assert corpora.shards(tmp_path / "new") == []
    assert list(corpora.write(served(dtype), short, tmp_path / "real", [])) == []  # nothing to write, none needed


# Learning


def test_batches_hold_the_teacher_of_their_own_position(corpus):
    """Against full recomputation, nothing shifted; a draft vocabulary small enough to miss some choices."""
    target, seen = served().target, 0
    trainer = Trainer(target, corpus, dataclasses.replace(SPEC, draft_vocab_size=60))
    vocab, rows = trainer.model.vocab, corpora.read_shard(corpus[0])["tokens"].tolist()
    for raw in batches(corpus[:1], trainer.spec, torch.Generator().manual_seed(0)):
        batch = trainer.batch(raw)
        assert batch.tokens.shape == (8, 64)
        assert bool((batch.counts == 1).all())
        for i in range(8):
            whole = next(row for row in rows if batch.tokens[i].tolist() in (row[:64], row[64:]))
            half = slice(64) if batch.tokens[i].tolist() == whole[:64] else slice(64, 128)
            taps, _, logits = (part[half] for part in recompute(target, whole))
            torch.testing.assert_close(batch.taps[i], taps, rtol=1e-4, atol=1e-3)
            # logits of size ~40 in float32, through an exponential
            torch.testing.assert_close(batch.teacher[i], logits[:, vocab].softmax(dim=1), rtol=0, atol=1e-3)
            assert batch.in_vocab[i].tolist() == torch.isin(logits.argmax(dim=1), vocab).tolist()
            seen += int(batch.in_vocab[i].sum())
    assert 0.1 < seen / (16 * 128) < 0.9


def train(files: list[Path], folder: Path, **changes) -> tuple[list[float], float]:
    """Losses, and held-out tau after the last step."""
    done = []
    trainer = Trainer(served().target, files, dataclasses.replace(SPEC, **changes))
    trainer.run(folder, done.append)
    assert [p.step for p in done] == list(range(1, trainer.steps + 1))
    assert done[-1].held_out is not None
    return [p.loss for p in done], done[-1].held_out.tau


@pytest.mark.parametrize("changes", [{}, {"loss": "lk"}], ids=["ce", "lk"])
def test_training_lowers_the_loss_and_raises_held_out_tau(corpus, tmp_path, changes):
    trainer = Trainer(served().target, corpus, SPEC)
    before = trainer.evaluate().tau
    losses, after = train(corpus, tmp_path, **changes)
    first, last = sum(losses[:8]) / 8, sum(losses[-8:]) / 8
    assert last < 0.8 * first
    assert after > before + 0.025  # 3 standard errors: 0.06 accepted a round, over 800 rounds


def test_teachers_shifted_by_one_teach_less(corpus, tmp_path):
    """The control of alignment: same text, same features, but each teacher is its neighbour's.

    What counts is tau's part beyond the token that the target gives in any case. Measured: 0.056 aligned,
    0.018 and 0.016 shifted, each within 0.008 (standard error over 800 rounds).
    """
    _, aligned = train(corpus, tmp_path / "aligned")
    for shift in (1, -1):
        folder = tmp_path / f"shift{shift}"
        folder.mkdir()
        files = []
        for file in corpus[1:]:
            shard = corpora.read_shard(file)
            moved = {name: shard[name].roll(shift, dims=1).contiguous() for name in ("hidden", "argmax")}
            files.append(folder / file.name)
            save_file(shard | moved, files[-1])
        _, shifted = train([corpus[0], *files], folder)
        assert shifted - 1 < (aligned - 1) / 2


def test_resume_restores_step_model_and_optimiser(corpus, tmp_path):
    target, spec = served().target, dataclasses.replace(SPEC, epochs=2, evaluate_every=3)
    first = Trainer(target, corpus, spec)

    class Stop(Exception):
        pass

    def stop(progress) -> None:
        if progress.step == 6:
            raise Stop

    with pytest.raises(Stop):
        first.run(tmp_path, stop)
    again = Trainer(target, corpus, spec)
    fresh = {name: t.clone() for name, t in again.model.state_dict().items()}
    again.resume(tmp_path)
    assert again.step == 6
    state, expected = again.model.state_dict(), first.model.state_dict()
    assert all(torch.equal(state[name], expected[name]) for name in expected)
    assert not torch.equal(state["fc.weight"], fresh["fc.weight"])
    for a, b in zip(again.optimizer.state.values(), first.optimizer.state.values(), strict=True):
        assert torch.equal(a["exp_avg"], b["exp_avg"])
        assert torch.equal(a["exp_avg_sq"], b["exp_avg_sq"])
        assert a["step"] == b["step"] == 6
    steps = []
    again.run(tmp_path, lambda progress: steps.append(progress.step))
    assert steps == list(range(7, again.steps + 1))
    whole = Trainer(target, corpus, spec)
    whole.run(tmp_path / "whole", lambda progress: None)
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(again.model.state_dict()[name], tensor)


def test_the_best_draft_is_kept_and_training_stops_without_a_better_one(corpus, tmp_path):
    """A rate so high that the draft gets worse: two checks later it ends, and what is on disk is the best."""
    points = []
    spec = dataclasses.replace(SPEC, lr=1.0, evaluate_every=2, patience=2)
    trainer = Trainer(served().target, corpus, spec)
    trainer.run(tmp_path, lambda done: points.append(done))
    taus = {p.step: p.held_out.tau for p in points if p.held_out}
    best = max(taus, key=lambda step: taus[step])
    assert trainer.step == best + 2 * spec.evaluate_every < trainer.steps
    again = Trainer(served().target, corpus, dataclasses.replace(spec, init=str(tmp_path / "draft")))
    # the file holds bfloat16
    assert abs(again.evaluate().tau - taus[best]) < 0.02
    assert trainer.best == taus[best]


def test_training_goes_on_from_a_draft(corpus, tmp_path):
    """Shape and vocabulary come with it; one made for another target is refused."""
    train(corpus, tmp_path, epochs=4)
    spec = dataclasses.replace(SPEC, init=str(tmp_path / "draft"), draft_vocab_size=7)
    trainer = Trainer(served().target, corpus, spec)
    kept = eagle3.load(tmp_path / "draft", torch.float32, "cpu")
    assert torch.equal(trainer.model.vocab, kept.vocab)
    assert torch.equal(trainer.model.fc.weight, kept.fc.weight)
    config = (tmp_path / "draft" / "config.json").read_text()
    other = config.replace('"vocab_size": 258', '"vocab_size": 259')
    (tmp_path / "draft" / "config.json").write_text(other)
    with pytest.raises(UserError, match="does not fit the target: its vocabulary is 259"):
        Trainer(served().target, corpus, spec)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"loss": "mse"}, "training.loss=mse: expected one of ce, lk"),
        ({"patience": 0}, "training.patience=0"),
        ({"unroll": 0}, "training.unroll=0"),
    ],
)
def test_bad_settings_are_named(change, says):
    with pytest.raises(UserError, match=says):
        dataclasses.replace(SPEC, **change)


def test_resume_from_nothing_starts_at_nothing(corpus, tmp_path):
    trainer = Trainer(served().target, corpus, SPEC)
    trainer.resume(tmp_path)
    assert trainer.step == 0


def test_one_shard_is_too_few(corpus):
    with pytest.raises(UserError, match="at least two corpus shards"):
        Trainer(served().target, corpus[:1], SPEC)


def test_vocabulary_is_the_most_frequent_tokens_and_the_end_token(corpus):
    target, tally = served().target, [0] * 258
    for file in corpus[:2]:
        shard = corpora.read_shard(file)
        for token in shard["tokens"].flatten().tolist() + shard["argmax"].flatten().tolist():
            tally[token] += 1
    vocab = corpus_vocab(corpus[:2], 50, 258, target.eos_ids).tolist()
    assert vocab == sorted(set(vocab))
    assert len(vocab) == 50
    assert target.eos_ids <= set(vocab)
    left_out = max(tally[token] for token in range(258) if token not in vocab)
    assert min(tally[token] for token in vocab if token not in target.eos_ids) >= left_out


def test_new_draft_starts_from_the_targets_norm_and_head():
    target = served().target
    model = new_draft(target, torch.arange(10, 210), SPEC)
    assert torch.equal(model.lm_head.weight, target.model.lm_head.weight[10:210])
    assert torch.equal(model.norm.weight, target.model.norm.weight)
    assert model.config.layer.rope_theta == 10000.0
