"""Training of a draft LM: aligned, on the shared loop, and saved as other engines read it."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path

import pytest
import torch
from conftest import CPU, chain, recompute, tiny
from decode_cases import FIXED
from safetensors.torch import save_file
from training_cases import served

from tracedraft.decode import respond
from tracedraft.drafts.lm import LmDraft, LmSpec
from tracedraft.errors import UserError
from tracedraft.meter import Meter
from tracedraft.models import weights
from tracedraft.models.architectures import read_decoder_config
from tracedraft.training import corpus as corpora
from tracedraft.training.lm import LmTrainingSpec
from tracedraft.training.loop import Trainer
from tracedraft.training.replay import Tally, replay

SPEC = LmTrainingSpec(
    init=None, after=None, loss="ce", answers_only=False, average=None, epochs=12, batch=8, length=64,
    lr=1e-2, warmup_steps=5, final_lr=0.1, betas=(0.9, 0.95), clip=0.5, weight_decay=0.0, evaluate_every=1000,
    held_out_tokens=2048, patience=None, seed=0,
    hidden_size=32, intermediate_size=64, layers=2, heads=2,
)  # fmt: skip


def train(files: list[Path], folder: Path, **changes) -> float:
    """Held-out tau after the last step."""
    trainer = Trainer(served().target, files, dataclasses.replace(SPEC, **changes))
    trainer.run(folder, lambda done: None)
    return trainer.curve[-1]["tau"]


@pytest.mark.parametrize("answers_only", [False, True])
def test_the_loss_is_soft_cross_entropy_against_the_targets_own_next_token(corpus, answers_only):
    """Position j, having consumed x_0 … x_j, is taught z_j, if x_{j+1} is an answer's where only those are learnt;
    against the definition, row by row."""
    target = served().target
    spec = dataclasses.replace(SPEC, answers_only=answers_only)
    trainer, shard = Trainer(target, corpus, spec), corpora.read_shard(corpus[1])
    raw = {name: shard[name][:2, -20:] for name in ("tokens", "hidden", "counts")}
    raw["answer"] = torch.arange(20).expand(2, -1) % 5 > 2
    raw["counts"][1, 15:] = False
    expected = 0.0
    for row in range(2):
        tokens = raw["tokens"][row].tolist()
        logits = recompute(target, shard["tokens"][row].tolist())[2][-20:]
        with torch.no_grad():
            said = trainer.model.lm_head(trainer.model.norm(trainer.model.whole(torch.tensor(tokens)[None])))[0]
        for j in range(1, 20 if row == 0 else 15):
            if answers_only and not (j < 19 and raw["answer"][row, j + 1]):
                continue
            expected -= float((logits[j].softmax(dim=0) * said[j].log_softmax(dim=0)).sum()) / 40
    torch.testing.assert_close(trainer.pupil.loss(raw).item(), expected, rtol=1e-3, atol=0)


def test_training_raises_held_out_tau_and_teachers_shifted_by_one_teach_less(corpus, tmp_path):
    """What counts is tau's part beyond the token that the target gives in any case."""
    before = Trainer(served().target, corpus, SPEC).evaluate().tau
    aligned = train(corpus, tmp_path / "aligned")
    assert aligned > before + 0.025  # 3 standard errors: 0.06 accepted a round, over 800 rounds
    for shift in (1, -1):
        folder = tmp_path / f"shift{shift}"
        folder.mkdir()
        files = []
        for file in corpus[1:]:
            shard = corpora.read_shard(file)
            files.append(folder / file.name)
            save_file(shard | {"hidden": shard["hidden"].roll(shift, dims=1).contiguous()}, files[-1])
        assert train([corpus[0], *files], folder) - 1 < (aligned - 1) / 2


def test_replay_counts_what_serving_counts(corpus, tmp_path):
    """In fp32, response by response."""
    target = served().target
    trainer = Trainer(target, corpus, dataclasses.replace(SPEC, epochs=2))
    trainer.run(tmp_path, lambda done: None)
    seen = Tally(5)
    for temperature in (0.0, 0.7):
        prompt = list(b"Why is the sky blue? ")
        spec = chain(temperature=temperature, max_new_tokens=80)
        draft = LmDraft(copy.deepcopy(trainer.model).requires_grad_(False))
        made = respond(target, draft, FIXED.build(None, 0), prompt, spec, 3, Meter(CPU))
        with torch.no_grad():
            right = trainer.pupil.hits({"tokens": torch.tensor([prompt + made.tokens])}, 5)
        tally = replay(right[:, 0], [False] * len(prompt) + [True] * len(made.tokens))
        assert (tally.rounds, tally.accepted) == (made.rounds, made.accepted)
        assert (tally.trials, tally.survivals) == (made.trials, made.survivals)
        seen.add(tally)
    assert seen.survivals[0] > 0


def test_a_resumed_training_ends_with_the_same_draft(corpus, tmp_path):
    spec = dataclasses.replace(SPEC, epochs=2, evaluate_every=3)

    class Stop(Exception):
        pass

    def stop(progress) -> None:
        if progress.step == 6:
            raise Stop

    with pytest.raises(Stop):
        Trainer(served().target, corpus, spec).run(tmp_path / "a", stop)
    again, whole = Trainer(served().target, corpus, spec), Trainer(served().target, corpus, spec)
    again.resume(tmp_path / "a")
    assert again.step == 6
    again.run(tmp_path / "a", lambda done: None)
    whole.run(tmp_path / "b", lambda done: None)
    state, expected = again.model.state_dict(), whole.model.state_dict()
    assert all(torch.equal(state[name], expected[name]) for name in expected)
    assert torch.equal(state["lm_head.weight"], state["embed_tokens.weight"])


def test_what_is_saved_is_a_llama_that_transformers_reads_alike(corpus, tmp_path):
    from transformers import AutoModelForCausalLM

    trainer = Trainer(served().target, corpus, SPEC)
    weights.save_decoder(trainer.model, tmp_path, torch.float32)
    tokens = torch.arange(40)[None]
    with torch.no_grad():
        ours = trainer.model.lm_head(trainer.model.norm(trainer.model.whole(tokens)))
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)(tokens).logits
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)
    config = read_decoder_config(tmp_path)
    assert config == trainer.model.config
    loaded = weights.load_decoder(tmp_path, config, torch.float32, "cpu").state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in trainer.model.state_dict().items())


def test_how_many_weights_there_are_is_known_beforehand(corpus):
    assert SPEC.count(served().target) == sum(
        w.numel() for w in Trainer(served().target, corpus, SPEC).model.parameters()
    )


def test_training_goes_on_from_a_draft_and_serves_it(corpus, tmp_path):
    trainer = Trainer(served().target, corpus, dataclasses.replace(SPEC, epochs=1))
    trainer.run(tmp_path, lambda done: None)
    again = Trainer(served().target, corpus, dataclasses.replace(SPEC, init=str(tmp_path / "draft"), layers=7))
    assert len(again.model.layers) == 2
    assert abs(again.evaluate().tau - trainer.best) < 0.02  # the file holds bfloat16
    assert len({id(parameter) for parameter in again.model.parameters()}) == len(list(again.model.parameters()))
    draft, _ = LmSpec("lm", str(tmp_path / "draft"), None, str(tmp_path), None).build(tiny("float32").target)
    assert len(draft.head.vocab) == 258
    config = json.loads((tmp_path / "draft" / "config.json").read_text()) | {"vocab_size": 259}
    (tmp_path / "draft" / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"draft: its vocabulary is 259, the target's 258"):
        Trainer(served().target, corpus, dataclasses.replace(SPEC, init=str(tmp_path / "draft")))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"layers": 0}, "training.layers=0: expected at least 1"),
        ({"heads": 3}, "training.heads=3: expected to divide half of training.hidden_size=32"),
        ({"hidden_size": 64}, "training.hidden_size=64: expected at most the target's 32"),
    ],
)
def test_bad_shapes_are_named(corpus, change, says):
    with pytest.raises(UserError, match=says):
        Trainer(served().target, corpus, dataclasses.replace(SPEC, **change))
