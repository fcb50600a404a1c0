"""What runs on CUDA alone, over a device that is pretended: the same answers, on one device, at one wait a round."""

from __future__ import annotations

import copy
import itertools
import json
from collections import Counter
from collections.abc import Callable

import pretend_gpu
import pytest
import torch
from checkpoints import load, saved
from conftest import CPU, auto, chain, golden_folder, tiny, tree
from decode_cases import FIXED, PROMPT, adapter_spec, lens, lm
from pretend_gpu import GPU, pretended
from run_cases import CHAT, SAMPLED, composed, interrupted, untimed
from safetensors.torch import load_file
from test_bench_gpu import composed as bench_composed
from test_train_command import SMALL, SMALL_LM, curve, trained

from tracedraft.adapters import objective
from tracedraft.benchmark.gpu import benchmark_gpu
from tracedraft.decode import respond, respond_plainly
from tracedraft.drafts.static import StaticRolls
from tracedraft.interfaces import Draft
from tracedraft.measure import measure
from tracedraft.meter import Meter
from tracedraft.models import eagle3
from tracedraft.models.graphs import StaticPasses
from tracedraft.target import LlamaTarget

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, which need not be pretended")


@pytest.fixture
def device():
    with pretended() as found:
        yield found


@pytest.fixture
def operators(monkeypatch):
    """Triton's interpreter can't read what is pretended. That its kernels do what these do is tested elsewhere."""
    monkeypatch.setattr(objective, "operators", lambda device: (objective.rms_norm, objective.kl_parts))


def on(where: torch.device, dtype: str) -> LlamaTarget:
    """A target there; on the CPU in passes over buffers, as those that graphs are captured of."""
    usual = tiny(dtype).target
    target = LlamaTarget(copy.deepcopy(usual.model).to(where), usual.taps, usual.eos_ids, usual.context)
    if where is CPU:
        target.static = StaticPasses(target.model, target.taps, captured=False)
    return target


def answers(where: torch.device, dtype: str, kind: Callable[[LlamaTarget], Draft], adapter, spec) -> list:
    """Two conversations, the second over what the first has captured, and one without a draft."""
    target = on(where, dtype)
    draft = kind(target)
    if where is CPU:
        draft.static = StaticRolls(draft.allocate, captured=False)
    learner, meter, seen = adapter.build(draft.head, 0), Meter(where), []
    for key in range(2):
        learner.begin_conversation()
        made = respond(target, draft, learner, PROMPT, spec, key, meter)
        committed = [update.committed for update in made.updates]
        seen.append((made.tokens, made.accepted_per_round, committed))
    return [*seen, respond_plainly(target, PROMPT, spec, 0, meter).tokens]


# What is refused


@pytest.mark.parametrize(
    "action",
    [
        lambda x: x + torch.ones(3),
        lambda x: torch.cat((x, torch.ones(3))),
        lambda x: torch.ones(3).add_(x),
        lambda x: x.numpy(),
        lambda x: torch.nn.functional.linear(x, torch.ones(2, 3)),
        lambda x: x.__setitem__(torch.arange(2, device="cuda"), torch.ones(2)),
        lambda x: torch.stack((x[0], torch.ones(()))),
        lambda x: torch.rand(3, device="cuda", generator=torch.Generator()),
        lambda x: torch.rand(3, generator=torch.Generator("cuda")),
    ],
    ids=["sum", "cat", "in place", "numpy", "product", "put", "stack", "generator", "its generator"],
)
def test_two_devices_do_not_mix(device, action):
    x = torch.ones(3, device="cuda")
    with pytest.raises((RuntimeError, TypeError), match=r"same device|convert cuda|generator"):
        action(x)
    assert (x + torch.ones(())).tolist() == [2.0] * 3, "numbers are passed along"


@pytest.mark.parametrize(
    "action",
    [
        lambda x: x.sum().item(),
        lambda x: x.tolist(),
        lambda x: x.nonzero(),
        lambda x: x[x > 1],
        lambda x: torch.tensor([1.0], device="cuda"),
        lambda x: x.copy_(torch.ones(3)),
        lambda x: torch.cuda.synchronize(),
        lambda x: torch.where(x > 1),
        lambda x: x.long().bincount(),
        lambda x: torch.ones(()).copy_(x[0]),
        lambda x: torch.ones(3).copy_(x, non_blocking=True),
    ],
    ids=["item", "tolist", "nonzero", "mask", "tensor", "to", "sync", "where", "bincount", "number", "unpinned"],
)
def test_what_waits_can_t_be_captured(device, action):
    x = torch.ones(3, device="cuda")
    action(x)
    assert device.waits.total() >= 1
    with pytest.raises(RuntimeError, match="capturing"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        action(x)


def test_a_replay_sees_new_contents_and_old_numbers(device):
    x, number, on_host = torch.zeros(3, device="cuda"), 1, torch.ones(())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = (x + number + on_host)[1:]
        x.mul_(2)
    x.fill_(5)
    number = 100
    on_host.fill_(100)
    graph.replay()
    assert (made.tolist(), x.tolist()) == ([7.0, 7.0], [10.0] * 3)


def test_pinned_memory_is_filled_when_the_stream_was_waited_for(device):
    pinned = torch.empty(2, pin_memory=True)
    pinned.copy_(torch.ones(2, device="cuda"), non_blocking=True)
    assert pinned.tolist() == [-1.0, -1.0]
    torch.cuda.current_stream().synchronize()
    assert pinned.tolist() == [1.0, 1.0]


# What is the same

SHAPES = [(chain, {}), (tree, {}), (auto, {"confident": False}), (auto, {"confident": True})]
SAMPLING = {"float32": {}, "bfloat16": {"temperature": 0.7, "top_p": 0.95}}


@pytest.mark.parametrize(("kind", "dtype"), [(lens, "float32"), (lm, "bfloat16")], ids=["lens", "lm"])
@pytest.mark.parametrize(("shape", "changes"), SHAPES, ids=["chain", "tree", "auto", "confident"])
def test_answers_are_the_cpu_s(dtype, kind, shape, changes):
    asked = (dtype, kind, FIXED, shape(max_new_tokens=24, **changes, **SAMPLING[dtype]))
    expected = answers(CPU, *asked)
    with pretended() as device:
        assert answers(GPU, *asked) == expected
    assert device.replays > device.captures > 0


@pytest.mark.parametrize(
    ("name", "shape"), [("reset", tree), ("persistent", chain), ("reset_lowrank", tree), ("reset_published", chain)]
)
def test_so_they_are_while_the_draft_learns(operators, name, shape):
    asked = ("bfloat16", lens, adapter_spec(name), shape(max_new_tokens=24, temperature=0.7))
    expected = answers(CPU, *asked)
    with pretended():
        assert answers(GPU, *asked) == expected
    assert any(itertools.chain.from_iterable(committed for _, _, committed in expected[:2]))


def test_so_they_are_by_rejection():
    asked = ("float32", lm, FIXED, chain(max_new_tokens=24, temperature=1.0, acceptance="rejection"))
    expected = answers(CPU, *asked)
    with pretended():
        assert answers(GPU, *asked) == expected


def test_whole_runs_are(operators, tmp_path):
    """Loading, warming up, each arm, an audit and the summary."""
    overrides = (*CHAT, *SAMPLED, "adapter=reset", "workload.limit=1", "workload.max_turns=1", "plain=true")
    measure(composed(*overrides), tmp_path / "cpu", None)
    with pretended():
        measure(composed(*overrides, "target.device=cuda"), tmp_path / "gpu", None)
    ours, theirs = ([arms(record) for record in untimed(tmp_path / name)] for name in ("cpu", "gpu"))
    assert ours == theirs
    summary = json.loads((tmp_path / "gpu" / "summary.json").read_text())
    assert summary["lossless"] is True
    assert summary["provenance"]["hardware"]["gpus"] == ["pretended"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_checkpoints_are_loaded_there(tmp_path, dtype):
    """Of a target in shards, and of a published draft."""
    saved(tmp_path / "target", shard="100KB", head_dim=8)
    expected = load(tmp_path / "target", dtype=dtype).model.state_dict()
    draft = golden_folder("eagle3_tiny", tmp_path / "draft")
    drafted = eagle3.load(draft, getattr(torch, dtype), "cpu").state_dict()
    with pretended():
        for made, wanted in (
            (load(tmp_path / "target", dtype=dtype, device="cuda").model.state_dict(), expected),
            (eagle3.load(draft, getattr(torch, dtype), "cuda").state_dict(), drafted),
        ):
            assert {name: tensor.device for name, tensor in made.items()} == dict.fromkeys(wanted, GPU)
            assert all(torch.equal(tensor.cpu(), wanted[name]) for name, tensor in made.items())


def arms(record: dict) -> list:
    return [[(arm["tokens"], arm["accepted"]) for arm in turn["arms"].values()] for turn in record["turns"]]


@pytest.mark.parametrize("adapter", ["osd", "optimistic", "ensemble", "osd_persistent"])
def test_so_they_are_where_drafts_are_trained_between_requests(operators, adapter, tmp_path):
    """By autograd, and every weight that is served."""
    overrides = (f"adapter={adapter}", "adapter.outer.update_interval=1", "decode.max_new_tokens=12")
    learnt = []
    measure(composed(*overrides), tmp_path / "cpu", None)
    with pretended():
        measure(composed(*overrides, "target.device=cuda"), tmp_path / "gpu", None)
    for name in ("cpu", "gpu"):
        records = untimed(tmp_path / name)
        outer = [record["outer"] for record in records]
        assert all(found.pop("seconds") > 0 and found["served"] for found in outer)
        learnt.append((outer, [arms(record) for record in records]))
    assert learnt[0] == learnt[1]


def test_a_run_that_was_stopped_goes_on_there(operators, tmp_path):
    """What a learner knew is read back to the device."""
    overrides = (*CHAT, "adapter=persistent", "decode.max_new_tokens=12", "adapter.every=2", "target.device=cuda")
    with pretended():
        measure(composed(*overrides), tmp_path / "whole", None)
        interrupted(composed(*overrides), tmp_path / "stopped", 1)
        measure(composed(*overrides), tmp_path / "stopped", None)
    assert untimed(tmp_path / "stopped") == untimed(tmp_path / "whole")


@pytest.mark.parametrize("small", [SMALL, SMALL_LM], ids=["eagle3", "lm"])
def test_a_draft_is_trained_there(small, tmp_path):
    """From the target's own text to what is served, and from a given text to the same losses."""
    short = ("training.epochs=1", "text.tokens=4096", "training.evaluate_every=2")
    there = (*short, "target.device=cuda")
    trained(tmp_path / "cpu", *short, small=small)
    with pretended():
        assert trained(tmp_path / "own", *there, small=small)
        trained(tmp_path / "gpu", *there, f"corpus={tmp_path / 'cpu' / 'corpus'}", small=small)
    texts = [load_file(tmp_path / name / "corpus" / "shard-00000.safetensors") for name in ("cpu", "own")]
    assert torch.equal(*(text["tokens"] for text in texts))
    ours, theirs = (curve(tmp_path / name)[1:] for name in ("cpu", "gpu"))
    assert len(ours) > 1
    # Products in bf16, each rounded by 0.4 %.
    losses = [point["loss"] for point in ours]
    assert [point["loss"] for point in theirs] == pytest.approx(losses, rel=4e-3)


def test_auto_plans_there(tmp_path):
    short = ("workload.limit=1", "decode.max_new_tokens=8", f"paths.cache={tmp_path}")
    with pretended():
        overrides = ("adapter=fixed", "decode=auto", "target.device=cuda", *short)
        measure(composed(*overrides), tmp_path / "gpu", None)
    plan = json.loads((tmp_path / "gpu" / "summary.json").read_text())["provenance"]["plan"]
    assert all(second > 0 for way in plan["ways"] for second in way["seconds"])


def test_the_gpu_s_bench_is_no_dry_run_there(operators, tmp_path):
    size = {"vocab_size": 256, "hidden_size": 32, "intermediate_size": 48, "layers": 7, "heads": 4, "kv_heads": 2}
    small = size | {"head_dim": 8, "draft_vocab_size": 128, "context": 256}
    overrides = [f"pair.{key}={value}" for key, value in small.items()]
    cfg = bench_composed(*overrides, "size.prompt=16", "size.max_new_tokens=20", "size.copy_mib=1")
    with pretended():
        result, _ = benchmark_gpu(cfg, tmp_path)
    assert not result["dry_run"]
    assert {row["kind"] for row in result["rows"]} >= {"plain", "verify", "propose", "round", "update"}
    assert all(row["ms"] > 0 for row in result["rows"] if row["ms"] is not None)


# How often it is waited for


class Waits(Meter):
    """Before each round of a response."""

    def __init__(self, device: pretend_gpu.Device):
        super().__init__(GPU)
        self.device, self.before, self.updates = device, [], []

    def phase(self, name: str):
        if name == "update":
            self.before.append(self.device.waits.total() - self.device.captures)
        return super().phase(name)


@pytest.mark.parametrize("shape", [chain, tree])
@pytest.mark.parametrize(("name", "count"), [("reset", 6), ("reset_lowrank", 8)])
def test_a_round_waits_once_and_an_update_so_often(operators, device, shape, name, count):
    """Reset's for what its positions are, for which of them carry loss, and for those that do; for the loss, the norm
    of the gradient, and how many rows of the head are worth a step."""
    target = on(GPU, "bfloat16")
    draft, every = lens(target), 6
    learner, meter = adapter_spec(name, every=every).build(draft.head, 0), Waits(device)
    learner.begin_conversation()
    made = respond(target, draft, learner, PROMPT, shape(max_new_tokens=32), 0, meter)
    waits = Counter(after - before for before, after in itertools.pairwise(meter.before))
    assert waits.keys() == {1, 1 + count}
    assert waits[1 + count] == sum(update.round + 1 < len(meter.before) for update in made.updates) > 2
