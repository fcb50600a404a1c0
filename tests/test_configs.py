"""Every YAML that ships: complete, composable, and of the identity it should have."""

import dataclasses
import importlib
import textwrap
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf

import tracedraft.cli  # noqa: F401 - what entry points register is what users compose with
from tracedraft.config import build_spec, fingerprint, plain, shipped_dir
from tracedraft.errors import UserError
from tracedraft.identity import GROUPS

CONF = shipped_dir("conf")
OPTIONS = [(group, file.stem) for group in GROUPS for file in sorted((CONF / group).glob("*.yaml"))]


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch):
    for name in ("TRACEDRAFT_DATA", "TRACEDRAFT_CACHE", "TRACEDRAFT_RUNS", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    GlobalHydra.instance().clear()


def composed(*overrides: str, name: str = "config") -> DictConfig:
    """A root config; keys that the user must set get a value."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = compose(name, list(overrides))
    for key, value in leaves(OmegaConf.to_container(cfg, resolve=False)).items():
        if value == "???":
            OmegaConf.update(cfg, key, "given/by/the/user")
    return cfg


def leaves(node: Any, prefix: str = "") -> dict[str, Any]:
    """The values of nested mappings by dotted key."""
    flat: dict[str, Any] = {}
    for key, value in node.items():
        flat |= leaves(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def raw(path: Path) -> dict[str, Any]:
    loaded = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    assert isinstance(loaded, dict)
    return {str(key): value for key, value in loaded.items()}


def fields_of(target: str) -> set[str]:
    module, _, name = target.rpartition(".")
    return {field.name for field in dataclasses.fields(getattr(importlib.import_module(module), name))}


def fixed_values(node: dict[str, Any]) -> dict[str, Any]:
    """The values that a YAML states itself, without interpolations and what the user must set."""
    return {key: value for key, value in node.items() if not any(mark in str(value) for mark in ("${", "???"))}


def build_all(cfg: DictConfig) -> dict[str, Any]:
    return {group: build_spec(cfg[group], group) for group in GROUPS}


def identity(*overrides: str) -> str:
    cfg = composed(*overrides)
    return fingerprint({**build_all(cfg), "seed": cfg.seed}, {})


# --- options


def test_every_group_has_options():
    assert {group for group, _ in OPTIONS} == set(GROUPS)


@pytest.mark.parametrize(("group", "option"), OPTIONS)
def test_every_option_lists_its_whole_spec_and_builds(group, option):
    stated = raw(CONF / group / f"{option}.yaml")
    assert stated["name"] == option
    wrapped = {
        str(line).partition("@")[2].partition(".")[0] for line in stated.pop("defaults", []) if "@" in str(line)
    }
    assert stated.keys() - {"_target_"} | wrapped == fields_of(stated["_target_"])
    spec = build_spec(composed(f"{group}={option}")[group], group)
    built, expected = plain(spec), fixed_values(stated)
    assert {key: built[key] for key in expected} == expected


def test_the_pool_lists_its_whole_spec_and_builds():
    stated = raw(CONF / "launcher" / "pool.yaml")
    assert stated.keys() - {"_target_"} == fields_of(stated["_target_"])
    assert plain(build_spec(composed().launcher, "launcher")) == stated | {"_target_": stated["_target_"]}


def test_a_tree_is_as_large_as_the_device_bears():
    sizes = {}
    for device in ("cpu", "cuda", "cuda:1"):
        spec = build_spec(composed("decode=tree", f"target.device={device}").decode, "decode")
        sizes[device] = (spec.tree_nodes, spec.tree_depth, spec.tree_top_k)
    assert sizes["cuda"] == sizes["cuda:1"] == (60, 8, 10)  # EAGLE's total_token 60, depth 7, top_k 10
    assert max(sizes["cpu"]) == 8  # one pass of the smallest width
    assert build_spec(composed("decode=tree", "decode.tree_nodes=9").decode, "decode").tree_nodes == 9


@pytest.mark.parametrize(("text", "draft"), [("synthesis", "eagle3"), ("conversations", "lm")])
def test_training_lists_its_whole_specs_and_builds(text, draft):
    cfg = composed(f"text={text}", f"draft={draft}", name="train")
    for key, stated in (
        ("text", raw(CONF / "text" / f"{text}.yaml")),
        ("training", raw(CONF / "training" / f"{draft}.yaml")),
    ):
        assert stated.keys() - {"_target_"} == fields_of(stated["_target_"])
        assert plain(build_spec(cfg[key], key)) == stated


def test_eval_draft_composes_with_the_run_s_own_options():
    cfg, run = composed(name="eval-draft"), composed()
    for group in ("target", "draft", "workload", "decode"):
        assert plain(build_spec(cfg[group], group)) == plain(build_spec(run[group], group))


def test_export_composes_with_the_run_s_own_options():
    cfg, run = composed("draft.tap_ids=outputs", name="export"), composed("draft.tap_ids=outputs")
    for group in ("target", "draft"):
        assert plain(build_spec(cfg[group], group)) == plain(build_spec(run[group], group))


def test_bench_composes_with_the_run_s_own_options():
    """But for how much of them it takes."""
    cfg, run = composed(name="bench"), composed()
    for group in ("target", "draft"):
        assert plain(build_spec(cfg[group], group)) == plain(build_spec(run[group], group))
    for group in ("decode", "adapter", "workload"):
        assert cfg[f"{group}s"]
        for name, node in cfg[f"{group}s"].items():
            own = composed(f"{group}={name}")[group]
            assert plain(build_spec(node, name)) == plain(build_spec(own, name))
    for group in ("decode", "workload"):
        for node in (*cfg[f"{group}s"].values(), cfg.stand_in if group == "workload" else cfg.decodes.chain):
            assert cfg[group].keys() <= node.keys(), "these are laid over each of them"


def test_training_composes_with_every_target_and_its_output_follows():
    for target in (option for group, option in OPTIONS if group == "target"):
        cfg = composed(f"target={target}", "paths.runs=some/runs", name="train")
        build_spec(cfg.target, "target")
        if "eagle3" in cfg.target.drafts:
            build_spec(cfg.draft, "draft")
        assert cfg.out == f"some/runs/train-{target}-eagle3"


def test_paths_come_from_the_environment(monkeypatch):
    for name in ("DATA", "CACHE", "RUNS"):
        monkeypatch.setenv(f"TRACEDRAFT_{name}", f"/some/{name}")
    cfg = composed("workload=gsm8k", "draft=eagle3")
    assert OmegaConf.to_container(cfg.paths, resolve=True) == {
        "data": "/some/DATA",
        "cache": "/some/CACHE",
        "runs": "/some/RUNS",
        "recordings": "/some/CACHE/recordings",
    }
    assert build_spec(cfg.workload, "workload").data == "/some/DATA"
    assert build_spec(cfg.draft, "draft").cache == build_spec(cfg.target, "target").cache == "/some/CACHE"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("+adapter.rate=1", "adapter.*rate"),
        ("~adapter.lr", "adapter.*lr"),
        ("adapter.lr=fast", "adapter.*lr.*fast"),
        ("adapter.scope=forever", "adapter.*scope.*forever"),
        ("adapter._target_=os.remove", "adapter._target_='os.remove'.*tracedraft"),
        ("adapter._target_=tracedraft.adapters.trace.Nope", "adapter._target_.*Nope"),
        ("decode.top_p=1.5", "decode.top_p=1.5"),
        ("decode.max_new_tokens=0", "decode.max_new_tokens=0"),
        ("decode=tree decode.acceptance=rejection", "decode.acceptance=rejection.*decode=chain"),
    ],
)
def test_a_bad_field_is_named_in_one_line(override, message):
    cfg = composed(*override.split())
    with pytest.raises(UserError, match=message) as caught:
        build_all(cfg)
    assert "\n" not in str(caught.value)


# --- experiments


@pytest.mark.parametrize("file", sorted((CONF / "experiment").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_experiment_composes_and_its_values_arrive(file):
    stated = raw(file)
    for part in ("defaults", "hydra"):
        stated.pop(part, None)
    cfg = composed(f"experiment={file.stem}")
    for key, value in fixed_values(leaves(stated)).items():
        arrived = OmegaConf.select(cfg, key)
        arrived = OmegaConf.to_container(arrived) if OmegaConf.is_config(arrived) else arrived
        assert arrived == value, key
    build_all(cfg)
    build_all(composed(f"experiment={file.stem}", *sweep(file)))


@pytest.mark.parametrize("file", sorted((CONF / "experiment").glob("*.yaml")), ids=lambda path: path.stem)
def test_only_experiments_that_choose_settings_touch_development_prompts(file):
    """Tables leave out every run that answered one."""
    spec = build_all(composed(f"experiment={file.stem}", *sweep(file)))["workload"]
    tuning = file.stem == "dev" or file.stem.startswith(("ablate", "controls", "stream_steps_optimistic"))
    for each in getattr(spec, "sources", {"": spec}).values():
        assert tuning or each.split == "test" or each.shipped


def test_an_experiment_has_the_last_word_after_the_defaults_and_the_user_after_it(tmp_path):
    (tmp_path / "experiment").mkdir()
    text = """\
        # @package _global_
        defaults: [{override /adapter: reset}]
        seed: 7
        threads: 1
        adapter: {lr: 0.5}
        decode: {temperature: 0.7}
        wandb: {project: probe}
    """
    (tmp_path / "experiment" / "probe.yaml").write_text(textwrap.dedent(text))
    cfg = composed("experiment=probe", "threads=2", f"hydra.searchpath=[file://{tmp_path}]")
    assert (cfg.adapter.name, cfg.adapter.lr, cfg.decode.temperature) == ("reset", 0.5, 0.7)
    assert (cfg.seed, cfg.wandb.project, cfg.threads) == (7, "probe", 2)


def sweep(file: Path) -> list[str]:
    """An experiment's own sweep, its last value of each key."""
    params = OmegaConf.select(OmegaConf.load(file), "hydra.sweeper.params") or {}
    return [f"{key}={str(values).split(',')[-1].strip()}" for key, values in params.items()]


# --- identity

BASE = ("target=smollm2-135m", "draft=eagle3", "workload=gsm8k")


@pytest.mark.parametrize(
    "override",
    [
        "seed=1",
        "decode.temperature=0.7",
        "decode.chain_length=4",
        "decode=tree",
        "workload.limit=5",
        "workload.hub_revision=main",
        "workload=math500",
        "adapter.lr=0.031",
        "adapter.clip=1.0",
        "adapter=reset",
        "draft=tiny",
        "draft.rope_theta=5e5",
        "draft.norm_output=true",
        "target.dtype=float16",
        "target.seed=1",
    ],
)
def test_identity_changes_with_what_can_change_a_result(override):
    base = ("target=tiny", "draft=tiny", "workload=gsm8k") if override == "target.seed=1" else BASE
    assert identity(*base, override) != identity(*base)


@pytest.mark.parametrize(
    "override",
    [
        "wandb.mode=disabled",
        "wandb.project=other",
        "wandb.tags=[a]",
        "paths.data=/elsewhere",
        "paths.cache=/elsewhere",
        "paths.runs=/elsewhere",
        "launcher.workers=3",
        "threads=1",
        "workload.note=other",
    ],
)
def test_identity_ignores_what_cannot(override):
    assert composed(*BASE, override) != composed(*BASE)
    assert identity(*BASE, override) == identity(*BASE)


@pytest.mark.parametrize(
    "override",
    [
        "seed=0",
        "adapter=persistent",
        "adapter.lr=0.02",
        "adapter.scope=stream",
        "adapter.at_rounds=[]",
        "decode.temperature=0",
        "decode.top_p=1",
        "workload.limit=null",
        "target.context=null",
    ],
)
def test_identity_ignores_that_a_default_is_written_out(override):
    assert identity(*BASE, override) == identity(*BASE)


def test_identity_is_the_same_in_every_process():
    # Changes on purpose only: another value here means that every earlier record counts as another run.
    assert fingerprint({"seed": 0}, {}) == "099bdef99a6ba670"


def test_identity_follows_the_content_of_files():
    assert fingerprint({}, {"draft": "a"}) != fingerprint({}, {"draft": "b"})
