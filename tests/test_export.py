"""``tracedraft export``: drafts, and what runs made of them, in the layouts that other engines serve."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from conftest import GOLDEN, golden_json
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from run_cases import interrupted
from safetensors.torch import load_file, save_file
from test_checkpoints import changed, published, slots
from test_run import composed as run_config

from tracedraft import measure as measuring
from tracedraft.config import shipped_dir
from tracedraft.drafts.eagle3 import lens
from tracedraft.errors import UserError
from tracedraft.measure import measure
from tracedraft.models import eagle3
from tracedraft.models.eagle3_layouts import Layout, Reading, TapIds
from tracedraft.models.tiny import TinyTargetSpec
from tracedraft.publish import export_draft, listed_taps
from tracedraft.records import LEARNER
from tracedraft.types import TargetShape

LAYOUTS = ("safeailab", "speculators")


def export(*overrides: str) -> None:
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(shipped_dir("conf")), version_base="1.3"):
        export_draft(compose("export", ["draft=eagle3", *overrides]))


@pytest.fixture
def golden_target_folder(golden_decoder, tmp_path) -> tuple[str, str]:
    """Overrides for the golden target; only its config is read."""
    folder = tmp_path / "golden-target"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(golden_json("target_tiny")["config"]))
    return "target=llama", f"target.path={folder}"


def same(state: dict, expected: dict) -> None:
    assert state.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(state[name], tensor), name
        assert state[name].dtype == tensor.dtype


# Round trips


@pytest.mark.parametrize("naming", ["safeailab", "safeailab.bin", "speculators", "vllm"])
def test_any_naming_into_any_layout_and_back(naming, golden_target_folder, golden_decoder, tmp_path):
    """Bit for bit the golden files of those layouts, and the same outputs."""
    source = published(naming, tmp_path / "source")
    golden = {
        "safeailab": load_file(GOLDEN / "eagle3_tiny.safetensors"),
        "speculators": load_file(GOLDEN / "eagle3_tiny.speculators.safetensors"),
    }
    embedding = golden["speculators"].pop("embed_tokens.weight")
    own = {"embed_tokens.weight": embedding} if naming == "speculators" else {}  # kept if it came with them
    for layout in LAYOUTS:
        out, back = tmp_path / layout, tmp_path / f"{layout}-back"
        export(*golden_target_folder, f"draft.path={source}", f"layout={layout}", f"out={out}")
        same(load_file(out / "model.safetensors"), golden[layout] | own)
        other = LAYOUTS[layout == "safeailab"]
        export(*golden_target_folder, f"draft.path={out}", f"layout={other}", f"out={back}")
        same(load_file(back / "model.safetensors"), golden[other] | own)
        logits = [
            slots(eagle3.load(f, torch.float32, "cpu").requires_grad_(False), golden_decoder)[1]
            for f in (source, out, back)
        ]
        assert torch.equal(logits[1], logits[0])
        assert torch.equal(logits[2], logits[0])


def test_configs_say_what_their_readers_need(golden_target_folder, tmp_path):
    source = published("safeailab", tmp_path / "source")
    for layout in LAYOUTS:
        export(*golden_target_folder, f"draft.path={source}", f"layout={layout}", f"out={tmp_path / layout}")
    ours, theirs = (json.loads((tmp_path / layout / "config.json").read_text()) for layout in LAYOUTS)
    assert ours["architectures"] == ["LlamaForCausalLMEagle3"]
    assert ours["rope_theta"] == 10000  # the source says nothing, and engines might take the target's
    assert "eagle_aux_hidden_state_layer_ids" not in ours  # SGLang and vLLM would read a list differently
    assert "norm_output" not in ours
    expected = golden_json("eagle3_tiny")["config_speculators"]
    assert theirs["architectures"] == expected["architectures"]
    assert theirs["speculators_model_type"] == "eagle3"
    assert theirs["eagle_aux_hidden_state_layer_ids"] == expected["eagle_aux_hidden_state_layer_ids"]
    assert theirs["speculators_config"]["verifier"]["name_or_path"] == golden_target_folder[1].partition("=")[2]
    for key in ("norm_before_residual", "norm_before_fc", "norm_output", "fc_norm", "draft_vocab_size"):
        assert theirs[key] == expected[key]
    layer = expected["transformer_layer_config"]
    mine = theirs["transformer_layer_config"]
    for key in mine.keys() & layer.keys():
        assert mine[key] == layer[key]


def test_transformers_reads_the_layer_of_speculators_as_meant(golden_target_folder, tmp_path):
    """Its reader makes a LlamaConfig of it, in which base and scaling have moved twice."""
    from transformers import LlamaConfig

    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling |= {"original_max_position_embeddings": 64, "rope_type": "llama3"}
    for rope in (None, scaling):
        source = published("safeailab", tmp_path / f"source-{rope is None}")
        changed(source, rope_scaling=rope, rope_theta=5e5)
        out = tmp_path / f"out-{rope is None}"
        export(*golden_target_folder, f"draft.path={source}", "layout=speculators", f"out={out}")
        layer = json.loads((out / "config.json").read_text())["transformer_layer_config"]
        read = LlamaConfig(**layer).rope_parameters
        assert read["rope_theta"] == 5e5
        assert {k: read.get(k) for k in scaling} == (rope or dict.fromkeys(scaling) | {"rope_type": "default"})


def test_what_keys_said_is_written_down(golden_target_folder, tmp_path):
    """A checkpoint that was open to two readings is not any more."""
    source = changed(
        published("safeailab", tmp_path / "source"), norm_output=True, eagle_aux_hidden_state_layer_ids=[1, 3, 4]
    )
    keys = ("rope_theta=1e6", "norm_before_residual=true", "norm_output=true", "tap_ids=outputs")
    said = Reading(rope_theta=1e6, norm_before_residual=True, norm_output=True, tap_ids=TapIds.outputs)
    for layout in LAYOUTS:
        out = tmp_path / layout
        overrides = [f"draft.{key}" for key in keys]
        export(*golden_target_folder, f"draft.path={source}", *overrides, f"layout={layout}", f"out={out}")
        assert eagle3.read_config(out) == eagle3.read_config(source, said)


def test_speculators_own_settings_are_kept(golden_target_folder, tmp_path):
    source = published("speculators", tmp_path / "source")
    export(*golden_target_folder, f"draft.path={source}", "layout=speculators", f"out={tmp_path / 'out'}")
    before, after = (json.loads((f / "config.json").read_text()) for f in (source, tmp_path / "out"))
    assert after["speculators_config"] == before["speculators_config"]
    assert after["speculators_version"] == before["speculators_version"]


def test_precision_is_kept_unless_asked_for(golden_target_folder, tmp_path):
    source = published("safeailab", tmp_path / "source")
    state = load_file(source / "model.safetensors")
    half = {n: t.bfloat16() if t.is_floating_point() else t for n, t in state.items()}
    export(*golden_target_folder, f"draft.path={source}", "draft.dtype=bfloat16", f"out={tmp_path / 'half'}")
    same(load_file(tmp_path / "half" / "model.safetensors"), half)
    save_file(half, source / "model.safetensors")
    export(*golden_target_folder, f"draft.path={source}", f"out={tmp_path / 'kept'}")
    same(load_file(tmp_path / "kept" / "model.safetensors"), half)


def test_a_whole_vocabulary_is_written_without_a_map(tmp_path):
    target = TinyTargetSpec("tiny", 0, "cpu", "float32", 64, {}).build().target
    eagle3.save(lens(target, target.vocab_size, 0), tmp_path, torch.float32)
    assert not {"d2t", "t2d"} & load_file(tmp_path / "model.safetensors").keys()
    assert torch.equal(eagle3.load(tmp_path, None, "cpu").vocab, torch.arange(target.vocab_size))


# Tapped layers


def test_layers_are_listed_as_the_engine_reads_them():
    usual, other = (TargetShape(32, 128, 3, taps, 8) for taps in ((2, 4, 5), (1, 4, 6)))
    assert listed_taps((2, 4, 5), usual, Layout.safeailab, None) is None
    assert listed_taps((1, 4, 6), other, Layout.safeailab, TapIds.inputs) == [1, 4, 6]
    assert listed_taps((1, 4, 6), other, Layout.safeailab, TapIds.outputs) == [0, 3, 5]
    assert listed_taps((1, 4, 6), other, Layout.speculators, None) == [1, 4, 6]
    with pytest.raises(UserError, match=r"\[1, 4, 6\], not EAGLE-3's \[2, 4, 5\].*tap_ids=inputs for vLLM"):
        listed_taps((1, 4, 6), other, Layout.safeailab, None)
    with pytest.raises(UserError, match="tap_ids=outputs: speculators' layout lists inputs"):
        listed_taps((1, 4, 6), other, Layout.speculators, TapIds.outputs)


def test_taps_of_the_target_are_written_where_the_draft_said_nothing(golden_target_folder, tmp_path):
    source = published("safeailab", tmp_path / "source")
    assert eagle3.read_config(source).tapped is None
    unusual = (*golden_target_folder, "target.taps=[1,4,6]", f"draft.path={source}")
    export(*unusual, "tap_ids=outputs", f"out={tmp_path / 'out'}")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["eagle_aux_hidden_state_layer_ids"] == [0, 3, 5]
    assert eagle3.read_config(tmp_path / "out").tapped == (1, 4, 6)


# What a run learnt

LEARNING = ("workload=sample_chat", "decode.max_new_tokens=16", "adapter=persistent", "adapter.every=2")
OFTEN = ("adapter.lr=0.3", "adapter.drift_cap=null", "adapter.min_positions=1", "adapter.replay_mib=1")


@pytest.fixture
def draft(tmp_path) -> tuple[str, ...]:
    """A bf16 checkpoint for the tiny target."""
    target = TinyTargetSpec("tiny", 0, "cpu", "float32", 64, {}).build().target
    eagle3.save(lens(target, 50, 0), tmp_path / "draft", torch.bfloat16)
    return "draft=eagle3", f"draft.path={tmp_path / 'draft'}", f"paths.cache={tmp_path / 'cache'}"


@pytest.fixture
def served(monkeypatch) -> list:
    """The arms of the runs that follow, in order."""
    made, plain = [], measuring.build_arms

    def build_arms(*arguments):
        arms, origin = plain(*arguments)
        made.append({arm.name: arm for arm in arms})
        return arms, origin

    monkeypatch.setattr(measuring, "build_arms", build_arms)
    return made


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_s_learner_goes_into_the_draft(layout, dtype, draft, served, tmp_path):
    """Norm and head exactly as they were served last, everything else as it was published."""
    run, out = tmp_path / "run", tmp_path / "out"
    cfg = run_config(*LEARNING, *OFTEN, *draft, f"target.dtype={dtype}", "adapter.train=both", "keep_learner=true")
    measure(cfg, run, None)
    assert [path.name for path in run.glob("learner*")] == [LEARNER]
    export("target=tiny", *draft[1:], f"run={run}", f"layout={layout}", f"out={out}")
    before, after = (eagle3.load(f, None, "cpu") for f in (tmp_path / "draft", out))
    head = served[0]["adapted"].draft.head
    assert not torch.equal(head.weight, served[0]["fixed"].draft.head.weight)
    assert not torch.equal(head.norm, served[0]["fixed"].draft.head.norm)
    assert torch.equal(after.lm_head.weight, head.weight)
    assert torch.equal(after.norm.weight, head.norm)
    old, new = before.state_dict(), after.state_dict()
    assert all(torch.equal(old[n], new[n]) for n in old if n not in ("norm.weight", "lm_head.weight"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("adapter", ["osd", "osd_persistent"])
def test_what_was_learnt_between_requests_goes_into_the_draft(adapter, dtype, draft, served, tmp_path):
    """All of it as it was served last, and on top what was learnt inside the last responses."""
    run, out = tmp_path / "run", tmp_path / "out"
    learner = (f"adapter={adapter}", "adapter.outer.update_interval=1", "workload=sample_chat", *draft)
    measure(run_config(*learner, f"target.dtype={dtype}", "keep_learner=true"), run, None)
    export("target=tiny", *draft[1:], f"run={run}", f"out={out}")
    after, model = eagle3.load(out, None, "cpu"), served[0]["adapted"].draft.model
    same(dict(after.state_dict()), dict(model.state_dict()))
    assert not torch.equal(
        after.fc.weight, eagle3.load(tmp_path / "draft", None, "cpu").fc.weight.to(after.fc.weight)
    )
    (run / "draft.pt").unlink()
    with pytest.raises(UserError, match=r"learnt \d+ blocks between requests, and draft\.pt, .*is gone"):
        export("target=tiny", *draft[1:], f"run={run}", f"out={tmp_path / 'without'}")
    assert not (tmp_path / "without").exists()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_low_rank_head_is_written_dense(dtype, draft, served, tmp_path):
    """The factors' product included, to fp32 rounding at logits of size ~10."""
    run, out = tmp_path / "run", tmp_path / "out"
    lowrank = ("adapter.form=lowrank", "adapter.train=head", f"target.dtype={dtype}", "keep_learner=true")
    measure(run_config(*LEARNING, *OFTEN, *draft, *lowrank), run, None)
    head = served[0]["adapted"].draft.head
    assert head.low_rank is not None
    export("target=tiny", *draft[1:], f"run={run}", f"out={out}")
    kept = load_file(out / "model.safetensors")
    assert kept["lm_head.weight"].dtype == torch.float32
    left, right = (factor.double() for factor in head.low_rank)
    exact = head.weight.double() + left.T @ right
    torch.testing.assert_close(kept["lm_head.weight"].double(), exact, rtol=1e-6, atol=1e-6)
    assert torch.equal(kept["norm.weight"], load_file(tmp_path / "draft" / "model.safetensors")["norm.weight"])


def test_an_exported_learner_drafts_as_the_run_did(draft, served, tmp_path):
    """Served unchanged, its acceptance is what the adapted draft's would be from there on."""
    run, out = tmp_path / "run", tmp_path / "out"
    measure(run_config(*LEARNING, *OFTEN, *draft, "keep_learner=true"), run, None)
    export("target=tiny", *draft[1:], f"run={run}", f"out={out}")
    fixed = ("workload=sample_math", "adapter=fixed", draft[0], draft[2], f"draft.path={out}")
    measure(run_config(*fixed), tmp_path / "again", None)
    learnt, exported = served[0]["adapted"].draft, served[1]["fixed"].draft
    assert torch.equal(learnt.head.weight, exported.head.weight)
    features = torch.randn(20, 96, generator=torch.Generator().manual_seed(0))
    proposals = []
    for each in (learnt, exported):
        each.begin(64)
        each.extend(features, torch.arange(20))
        proposals.append(each.propose(8).tokens)
    assert torch.equal(*proposals)


def test_a_stopped_run_gives_what_it_knew(draft, tmp_path, monkeypatch):
    run = tmp_path / "run"
    interrupted(run_config(*LEARNING, *OFTEN, *draft), run, 1)
    state = torch.load(run / "learner-00001.pt", weights_only=True)
    export("target=tiny", *draft[1:], f"run={run}", f"out={tmp_path / 'out'}")
    kept = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(kept["lm_head.weight"], state["form"]["weight"]["weights"])


def test_an_untrained_norm_stays_as_published(draft, tmp_path):
    """In bf16, though the run served it in fp32."""
    run = tmp_path / "run"
    measure(run_config(*LEARNING, *OFTEN, *draft, "adapter.train=head", "keep_learner=true"), run, None)
    export("target=tiny", *draft[1:], f"run={run}", f"out={tmp_path / 'out'}")
    old, new = (load_file(f / "model.safetensors") for f in (tmp_path / "draft", tmp_path / "out"))
    assert new["norm.weight"].dtype == torch.bfloat16
    assert torch.equal(old["norm.weight"], new["norm.weight"])
    assert new["lm_head.weight"].dtype == torch.float32


def test_keeping_the_learner_changes_no_result(draft, tmp_path, capsys):
    cfg = run_config(*LEARNING, *OFTEN, *draft)
    first = measure(cfg, tmp_path / "run", None)
    kept = run_config(*LEARNING, *OFTEN, *draft, "keep_learner=true")
    second = measure(kept, tmp_path / "kept", None)
    assert first["provenance"]["fingerprint"] == second["provenance"]["fingerprint"]
    capsys.readouterr()
    measure(kept, tmp_path / "run", None)
    assert "finished, without its learner: choose another hydra.run.dir" in capsys.readouterr().err


@pytest.mark.parametrize("adapter", ["fixed", "reset"])
def test_a_run_that_keeps_nothing_is_refused(adapter, draft, tmp_path):
    measure(run_config(f"adapter={adapter}", *draft, "keep_learner=true"), tmp_path / "run", None)
    with pytest.raises(UserError, match=f"left no learner: adapter={adapter} keeps nothing"):
        export("target=tiny", *draft[1:], f"run={tmp_path / 'run'}", f"out={tmp_path / 'out'}")
    assert not (tmp_path / "out").exists()


def test_a_run_on_another_draft_is_refused(draft, tmp_path):
    run = tmp_path / "run"
    measure(run_config(*LEARNING, *OFTEN, *draft, "keep_learner=true"), run, None)
    command = ("target=tiny", *draft[1:], f"run={run}", f"out={tmp_path / 'out'}")
    with pytest.raises(UserError, match=r"read this draft with rope_theta=None: give draft\.rope_theta"):
        export(*command, "draft.rope_theta=5e5")
    changed(tmp_path / "draft", lambda state: state["fc.weight"].add_(1))
    with pytest.raises(UserError, match=r"learnt on another draft, .*/draft: give it as draft\.path"):
        export(*command)


# Bad input


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("layout=gguf", "layout='gguf': expected safeailab or speculators"),
        ("tap_ids=both", "tap_ids='both': expected inputs or outputs"),
        ("out=null", "out is not set: give out=FOLDER"),
        ("out=.", "out=.: exists already"),
        ("out=/proc/no/draft", "/proc/no/draft can't be written .*another out=FOLDER"),
        ("run=no/such", "run=no/such: no run there"),
        ("draft=tiny", "draft='tiny' has no checkpoint to export"),
    ],
)
def test_bad_input_is_named_and_writes_nothing(draft, tmp_path, monkeypatch, override, says):
    monkeypatch.chdir(tmp_path)
    overrides = [] if override == "draft=tiny" else list(draft[1:])
    command = ["target=tiny", f"out={tmp_path / 'out'}", *overrides, override]
    with pytest.raises(UserError, match=says):
        export(*command)
    assert not Path("out").exists()
