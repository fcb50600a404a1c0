"""A draft beside its target: whose embeddings it reads, and where its folder comes from."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from conftest import golden_json, recompute
from test_checkpoints import changed, published

from tracedraft.config import ASSETS
from tracedraft.drafts.eagle3 import Eagle3Draft, Eagle3Spec
from tracedraft.errors import UserError
from tracedraft.models import eagle3
from tracedraft.models.decoder import DecoderConfig
from tracedraft.models.eagle3_layouts import Eagle3Config


def build(folder: Path, target) -> tuple[Eagle3Draft, dict]:
    return Eagle3Spec("eagle3", str(folder), None, str(folder.parent / "cache")).build(target)


def test_embeddings_that_are_the_targets_are_not_kept_twice(golden_target, tmp_path, capsys):
    """speculators writes them into every checkpoint."""
    draft, origin = build(published("speculators", tmp_path / "draft"), golden_target)
    assert draft.embedding.data_ptr() == golden_target.model.embed_tokens.weight.data_ptr()
    assert draft.model.embed_tokens is None
    assert origin["embedding"] == "the target's"
    assert capsys.readouterr().err == ""


def test_embeddings_that_differ_are_used_and_said(golden_target, tmp_path, capsys):
    def scaled(state: dict) -> None:
        state["embed_tokens.weight"] *= 2

    folder = changed(published("speculators", tmp_path / "draft"), scaled)
    draft, origin = build(folder, golden_target)
    assert torch.equal(draft.embedding, 2 * golden_target.model.embed_tokens.weight)
    assert origin["embedding"] == "its own"
    build(folder, golden_target)
    said = capsys.readouterr().err
    assert said.count("its token embeddings differ from the target's, and are used") == 1


def test_a_draft_of_another_width_brings_its_embeddings(golden_target, tmp_path):
    """As heads of large targets do: fc takes the target's features, all else is the draft's width."""
    layer = DecoderConfig(128, 16, 64, 1, 2, 1, 8, 1e-5, 1e4, None, False, 512)
    for own in (True, False):
        model = eagle3.Eagle3(Eagle3Config(layer, 128, 32, 3, fc_norm=False, own_embedding=own))
        eagle3.save(model, tmp_path / str(own), torch.float32)
    draft, _ = build(tmp_path / "True", golden_target)
    tokens = golden_json("target_tiny")["prompt"]
    taps, _, _ = recompute(golden_target, tokens)
    draft.begin(64)
    assert draft.extend(taps[:-1], torch.tensor(tokens[1:])).shape == (len(tokens) - 1, 16)
    assert len(draft.propose(3).tokens) == 3
    with pytest.raises(UserError, match="its embedding size is 16, the target's 32"):
        build(tmp_path / "False", golden_target)


# The hub


def test_a_hub_id_is_fetched(golden_target, tmp_path, monkeypatch):
    import huggingface_hub

    calls = []

    def fetch(name: str, revision: str | None, allow_patterns: list[str]) -> str:
        calls.append((name, revision, "pytorch_model.bin" in allow_patterns))
        return str(published("safeailab.bin", tmp_path / "fetched"))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    spec = Eagle3Spec("eagle3", "someone/EAGLE3-tiny", None, str(tmp_path / "cache"), "abc")
    draft, origin = spec.build(golden_target)
    assert draft.model.config.draft_vocab_size == 64
    assert (origin["origin"], origin["revision"]) == ("someone/EAGLE3-tiny", "abc")
    assert calls == [("someone/EAGLE3-tiny", "abc", True)]


@pytest.mark.parametrize("path", ["./no/such", "/no/such", "no/such/folder", "nosuch"])
def test_a_folder_is_not_asked_for_on_the_hub(path, monkeypatch, golden_target):
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("asked"))
    with pytest.raises(UserError, match=r"no such folder \(a name without a slash"):
        Eagle3Spec("eagle3", path, None, "cache").check(golden_target.shape)


def test_the_one_that_ships_is_small_and_fits_its_target():
    folder = ASSETS / "eagle3-smollm2-135m"
    assert sum(file.stat().st_size for file in folder.iterdir()) < 25 * 2**20
    model = eagle3.load(folder, torch.bfloat16, "cpu")
    assert model.vocab.max() < 49_152
    assert (model.vocab.diff() > 0).all()
