"""``measure=acceptance``: replaying the target's recorded part gives the live run's counts, whatever is served."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from conftest import CPU, chain, golden_json, recompute, tiny, tree
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig
from safetensors.torch import load_file

from tracedraft import measure as measuring
from tracedraft import recorded
from tracedraft.adapters.fixed import FixedSpec
from tracedraft.config import shipped_dir
from tracedraft.decode import respond
from tracedraft.drafts.eagle3 import LogitLensSpec
from tracedraft.errors import UserError
from tracedraft.measure import measure
from tracedraft.meter import Meter
from tracedraft.records import CONVERSATIONS
from tracedraft.target import Served

SHORT = ("target=tiny", "draft=tiny", "wandb.mode=disabled", "workload=sample_chat", "workload.limit=2")
LEARNER = ("adapter.every=2", "adapter.min_positions=1", "adapter.drift_cap=null", "adapter.lr=0.3")


def composed(folder: Path, *overrides: str) -> DictConfig:
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(shipped_dir("conf")), version_base="1.3"):
        return compose(
            "config", [*SHORT, f"paths.recordings={folder}/recordings", "decode.max_new_tokens=32", *overrides]
        )


def counts(folder: Path) -> list[dict]:
    """What both arms did, without seconds and audits."""
    records = [json.loads(line) for line in (folder / CONVERSATIONS).read_text().splitlines()]
    for record in records:
        for turn in record["turns"]:
            del turn["lossless"]
            for arm in turn["arms"].values():
                del arm["seconds"]
    return records


@pytest.mark.parametrize("temperature", [0, 0.7])
@pytest.mark.parametrize(
    "learner", [("adapter=reset", *LEARNER), ("adapter=persistent", "adapter.inputs=both", *LEARNER)]
)
def test_a_replay_counts_what_the_live_run_counts(learner, temperature, tmp_path):
    overrides = (*learner, f"decode.temperature={temperature}", "target.dtype=bfloat16")
    measure(composed(tmp_path, *overrides), tmp_path / "live", None)
    live = counts(tmp_path / "live")
    assert any(update["committed"] for turn in live[0]["turns"] for update in turn["arms"]["adapted"]["updates"])
    for attempt in ("made", "replayed"):
        measuring._REPLAYS.clear()
        measure(composed(tmp_path, *overrides, "measure=acceptance"), tmp_path / attempt, None)
        assert counts(tmp_path / attempt) == live


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_replay_answers_trees_too(golden_target, golden_draft, temperature, tmp_path):
    """In fp32, where the live tree's rows differ from the replay's linear ones by less than any choice here."""
    served = Served(golden_target, None, {"sha256": "golden"})
    prompt = golden_json("eagle3_e2e")["prompts"][0]["prompt"]
    spec = tree(temperature=temperature, max_new_tokens=60)
    fixed, made, folder = FixedSpec("fixed").build(None, 0), [], tmp_path / "recordings"
    for target in (golden_target, recorded.replaying(served, golden_draft("eagle3_tiny"), prompt, spec, 7, folder)):
        answer = respond(target, golden_draft("eagle3_e2e"), fixed, prompt, spec, 7, Meter(CPU))
        made.append(dataclasses.replace(answer, seconds={}))
    assert made[0] == made[1]
    assert max(made[0].accepted_per_round) > 1
    [file] = folder.iterdir()
    recorded.replaying(served, golden_draft("eagle3_e2e"), prompt, spec.linear, 7, folder)
    assert [file] == list(folder.iterdir()), "a chain in passes of the same width has the same target"


def test_it_times_nothing_and_says_so(tmp_path):
    summary = measure(composed(tmp_path, "measure=acceptance"), tmp_path / "run", None)
    assert summary["tau"] is not None
    for key in ("tokens_per_s", "speedup", "lossless"):
        assert summary[key] is None
        assert summary["null_reasons"][key]
    assert summary["null_reasons"]["tokens_per_s"] == "no time was measured"


def test_a_second_run_asks_the_target_for_its_head_alone(tmp_path, monkeypatch):
    cfg = composed(tmp_path, "measure=acceptance")
    measure(cfg, tmp_path / "first", None)
    monkeypatch.setattr(recorded, "record", lambda *_: pytest.fail("recorded again"))
    measure(cfg, tmp_path / "second", None)
    assert counts(tmp_path / "second") == counts(tmp_path / "first")


@pytest.mark.parametrize("change", ["seed=1", "decode.temperature=0.5", "decode.max_new_tokens=31", "target.seed=1"])
def test_what_changes_a_response_is_recorded_apart(change, tmp_path):
    measure(composed(tmp_path, "measure=acceptance", "decode.temperature=0.7"), tmp_path / "first", None)
    files = set((tmp_path / "recordings").iterdir())
    measure(composed(tmp_path, "measure=acceptance", "decode.temperature=0.7", change), tmp_path / "second", None)
    assert not set((tmp_path / "recordings").iterdir()) <= files


def test_a_recording_holds_what_the_target_had_there(tmp_path):
    served, prompt = tiny("float32"), [1, 2, 3, 4, 5]
    draft, _ = LogitLensSpec("tiny", 256, 0).build(served.target)
    replayed = recorded.replaying(served, draft, prompt, chain(), 0, tmp_path)
    taps, hidden, logits = recompute(served.target, [*prompt, *replayed.tokens[:-1]])
    kept = load_file(tmp_path / f"{replayed.name}.safetensors")
    # Passes of other shapes sum in another order: a few hundred units of fp32's last place after eight layers.
    torch.testing.assert_close(kept["taps"], taps, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(kept["hidden"], hidden, rtol=1e-3, atol=1e-4)
    assert replayed.tokens == logits.argmax(-1)[len(prompt) - 1 :].tolist()


def test_a_response_that_depends_on_the_shape_of_a_pass_is_refused(tmp_path, monkeypatch):
    served = tiny("float32")
    draft, _ = LogitLensSpec("tiny", 256, 0).build(served.target)
    honest = recorded.respond

    def other(*args):
        response = honest(*args)
        response.tokens[3] += 1
        return response

    monkeypatch.setattr(recorded, "respond", other)
    with pytest.raises(UserError, match="near-tie"):
        recorded.replaying(served, draft, [1, 2, 3], chain(), 0, tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("override", "key"),
    [("plain=true", "plain"), ("decode.acceptance=rejection", "decode.acceptance")],
)
def test_what_only_a_live_target_can_answer_is_refused(override, key, tmp_path):
    with pytest.raises(UserError, match=f"^{key}=.*measure=acceptance"):
        measure(composed(tmp_path, "measure=acceptance", override), tmp_path / "run", None)
    assert not (tmp_path / "run").exists()


def test_an_unknown_measure_is_named(tmp_path):
    with pytest.raises(UserError, match="measure='speed'"):
        measure(composed(tmp_path, "measure=speed"), tmp_path / "run", None)
