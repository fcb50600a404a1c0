"""Golden models, tiny served targets, and slow plain references that several test files share."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra.core.global_hydra import GlobalHydra
from hydra.core.singleton import Singleton
from omegaconf import DictConfig, OmegaConf
from safetensors.torch import load_file
from torch import Tensor

from tracedraft.auto import AutoSpec, Plan, Way
from tracedraft.config import shipped_dir
from tracedraft.decode import ChainSpec, TreeSpec
from tracedraft.drafts.eagle3 import Eagle3Draft
from tracedraft.meter import Meter
from tracedraft.models import architectures, eagle3, weights
from tracedraft.models.decoder import Decoder
from tracedraft.models.tiny import TinyTargetSpec
from tracedraft.target import LlamaTarget, Served, default_taps

GOLDEN = Path(__file__).parent / "data" / "golden"
CPU = torch.device("cpu")
SHORT = {
    "max_new_tokens": 40,
    "temperature": 0.0,
    "top_p": 1.0,
    "top_k": 0,
    "acceptance": "exact",
    "prefill_chunk": 16,
    "cache_bucket": 64,
}


# Tiny models are fastest on one thread, and threads that wait by spinning starve each other on a busy machine.
# Subprocesses that the tests start inherit it.
os.environ["OMP_NUM_THREADS"] = "1"
torch.set_num_threads(1)

# Read when Triton is first imported: without a GPU its kernels are interpreted.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# Scripts start jobs in the background with SIGINT ignored. Runs that the tests start would inherit that, and could
# not be interrupted.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def option(group: str, name: str) -> DictConfig:
    """A YAML of a config group, with the options that it wraps in their places."""
    conf = shipped_dir("conf")
    node = OmegaConf.load(conf / group / f"{name}.yaml")
    assert isinstance(node, DictConfig)
    for wrapped, _, key in (str(line).partition("@") for line in node.pop("defaults", [])):
        if key:
            own = OmegaConf.select(node, key) or {}
            file = conf / f"{wrapped[1:] if wrapped.startswith('/') else f'{group}/{wrapped}'}.yaml"
            OmegaConf.update(node, key, OmegaConf.merge(OmegaConf.load(file), own))
    return node


def adapters(inner: bool) -> list[str]:
    """Names of the adapters that learn inside responses alone, or else of those that learn between them too."""
    files = sorted((shipped_dir("conf") / "adapter").glob("*.yaml"))
    return [file.stem for file in files if ("/outer/" not in file.read_text()) is inner]


def in_child(action: Callable[[], object], seconds: float | None) -> bool:
    """Run ``action`` in a forked process, killed after ``seconds`` (None: never); whether it ended by itself."""
    child = os.fork()
    if child == 0:
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        try:
            action()
        except BaseException:
            os._exit(1)
        os._exit(0)
    if seconds is not None:
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if not os.WIFSIGNALED(status):
        assert os.waitstatus_to_exitcode(status) == 0
    return not os.WIFSIGNALED(status)


@contextmanager
def small_disk(size: int) -> Iterator[None]:
    """No file may grow beyond ``size`` bytes: what a full disk does to whoever writes."""
    ignored, limits = signal.signal(signal.SIGXFSZ, signal.SIG_IGN), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)


@pytest.fixture
def meter() -> Meter:
    return Meter(CPU)


@cache
def golden_json(name: str) -> dict[str, Any]:
    return json.loads((GOLDEN / f"{name}.json").read_text())


@cache
def golden_tensors(name: str) -> dict[str, Tensor]:
    """Inputs and expected outputs."""
    return load_file(GOLDEN / f"{name}.expected.safetensors")


def golden_folder(name: str, folder: Path) -> Path:
    """A golden model as a checkpoint folder."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(golden_json(name)["config"]))
    shutil.copy(GOLDEN / f"{name}.safetensors", folder / "model.safetensors")
    return folder


@pytest.fixture(scope="session")
def golden_decoder(tmp_path_factory) -> Decoder:
    folder = golden_folder("target_tiny", tmp_path_factory.mktemp("golden") / "target")
    return weights.load_decoder(folder, architectures.read_decoder_config(folder), torch.float32, "cpu")


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> list[Path]:
    """Shards of text by the tiny target of ``training_cases``; not to be changed."""
    from training_cases import shards, synthesise

    folder = tmp_path_factory.mktemp("corpus")
    synthesise(folder)
    return shards(folder)


@pytest.fixture
def golden_target(golden_decoder) -> LlamaTarget:
    return LlamaTarget(golden_decoder, default_taps(8), frozenset(), 512)


@pytest.fixture
def golden_draft(golden_decoder, tmp_path):
    """``golden_draft(name)``: a fresh draft with the weights of eagle3_tiny or eagle3_e2e."""

    def make(name: str) -> Eagle3Draft:
        model = eagle3.load(golden_folder(name, tmp_path / name), torch.float32, "cpu")
        return Eagle3Draft(model.requires_grad_(False), golden_decoder.embed_tokens.weight)

    return make


@pytest.fixture
def unpacked(monkeypatch):
    """Models built in this test keep ``nn.Linear`` on every CPU: what a test reads or writes there is the
    weight. Of ``tiny``, which is shared, take ``tiny.__wrapped__``."""
    monkeypatch.setattr("tracedraft.models.packing.cpu_dtype", lambda: torch.float16)


@cache
def tiny(dtype: str, seed: int = 0) -> Served:
    """``target=tiny``. Shared: a test that changes its end tokens or its context makes its own."""
    return TinyTargetSpec("tiny", seed, "cpu", dtype, 1024, {}).build()


def chain(**changes) -> ChainSpec:
    return ChainSpec(name="chain", **({"chain_length": 5} | SHORT | changes))


def tree(**changes) -> TreeSpec:
    return TreeSpec(name="tree", **({"tree_nodes": 24, "tree_depth": 5, "tree_top_k": 6} | SHORT | changes))


def auto(**changes) -> AutoSpec:
    """Of a machine on which a level costs a tenth of a pass, whether of a chain or of a tree."""
    ways = [Way(beams, [1 + 0.1 * levels for levels in range(1, 7)], [0.5] * 6) for beams in (1, 4)]
    plan = asdict(Plan(width=16, ways=ways))
    shape = {"most_levels": 6, "beams": [1, 4], "widths": [16], "confident": True, "probe_every": 4, "cache": ""}
    return AutoSpec(name="auto", **({"plan": plan} | shape | SHORT | changes))


def recompute(target: LlamaTarget, tokens: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Taps, hidden states and logits of every position, from one pass over all of them: no cache, no padding."""
    model, size = target.model, len(tokens)
    with torch.no_grad():
        ids = torch.tensor(tokens)[None]
        hidden, taps = model(ids, 0, model.cache(1, size), model.rope(size), target.taps)
        return taps[0], hidden[0], model.lm_head(hidden[0])


def plain_greedy(target: LlamaTarget, prompt: list[int], count: int) -> list[int]:
    """Greedy decoding that recomputes everything for each token."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(recompute(target, tokens)[2][-1].argmax()))
    return tokens[len(prompt) :]


def chi_square(counts: Tensor, probabilities: Tensor) -> float:
    """Chance of counts at least this far from their expectation; cells that expect under 5 are joined."""
    expected = probabilities.double() * counts.sum()
    assert bool((counts[expected == 0] == 0).all()), "an outcome of probability zero occurred"
    small = expected < 5
    observed = torch.cat((counts[~small].double(), counts[small].sum()[None].double()))
    expected = torch.cat((expected[~small], expected[small].sum()[None]))
    observed, expected = observed[expected > 0], expected[expected > 0]
    if len(expected) == 1:  # certain, and nothing else happened
        return 1.0
    statistic = ((observed - expected).square() / expected).sum()
    freedom = torch.tensor((len(expected) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic / 2))


@pytest.fixture
def plain_environment(monkeypatch, tmp_path):
    """No setting of the caller's, and folders of the test's own; Hydra as it was before."""
    for name in ("TRACEDRAFT_DATA", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TRACEDRAFT_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("TRACEDRAFT_CACHE", str(tmp_path / "cache"))
    state = Singleton.get_state()
    yield
    GlobalHydra.instance().clear()
    Singleton.set_state(state)


@pytest.fixture
def here(monkeypatch):
    """Sweeps run on ``Here``, a fresh class of it."""
    from launch_cases import Here

    class Mine(Here):
        served, made = [], []

    monkeypatch.setattr("tracedraft.launch.command.Pool", Mine)
    return Mine
