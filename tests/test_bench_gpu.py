"""``tracedraft bench-gpu``: what a pass must read, what is made of the times, and that a dry run says what it is."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from conftest import CPU
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig

from tracedraft.adapters.fixed import FixedSpec
from tracedraft.benchmark import gpu
from tracedraft.benchmark.gpu import benchmark_gpu, text
from tracedraft.benchmark.pair import PairSpec
from tracedraft.config import build_spec, shipped_dir
from tracedraft.errors import UserError
from tracedraft.types import Response

SMALL = PairSpec("small", 100, 32, 48, 7, 4, 2, 8, 128, 60, "float32", 0)


def composed(*overrides: str) -> DictConfig:
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(shipped_dir("conf")), version_base="1.3"):
        return compose("bench-gpu", ["repetitions=1", "threads=1", *overrides])


@pytest.fixture(scope="module")
def ran(tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("gpu")
    short = ("dry_size.max_new_tokens=20", "dry_size.copy_mib=1", "dry_pair.dtype=float32")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        result, file = benchmark_gpu(composed(*short), folder)
    assert json.loads(file.read_text()) == result
    return result


def test_the_shape_is_llama_3_1_8b_s():
    """Parameters as published: 8,030,261,248; those of its draft as counted in its checkpoint's layout."""
    spec = build_spec(composed().pair, "pair")
    embedding, norms = spec.vocab_size * spec.hidden_size, 65 * spec.hidden_size
    assert spec.pass_bytes(0) == 2 * (8_030_261_248 - embedding - norms)
    one_step = spec.draft_bytes(2, 0) - spec.draft_bytes(1, 0)
    assert one_step == pytest.approx(2 * 374e6, rel=0.01)


@pytest.mark.usefixtures("unpacked")
def test_a_pass_reads_each_product_s_weights_once_and_the_cache():
    target = SMALL.target(CPU)
    draft = SMALL.draft(target)
    products = {name: p.numel() for name, p in target.model.named_parameters() if p.dim() == 2}
    del products["embed_tokens.weight"]
    target.begin(16, 8, 8)
    assert SMALL.pass_bytes(16) == 4 * (sum(products.values()) + target.cache.rows.numel())
    own = {name: 4 * p.numel() for name, p in draft.model.named_parameters() if p.dim() == 2}
    fuse = own.pop("fc.weight")
    draft.begin(16)
    cache = 4 * draft.cache.rows.numel()
    assert [SMALL.draft_bytes(depth, 16) for depth in (1, 3)] == [
        fuse + sum(own.values()) + cache,
        fuse + 3 * (sum(own.values()) + cache),
    ]


@pytest.mark.parametrize("override", ["tau=0", "dry_size.prompt=0", "dry_size.copy_mib=none", "repetitions=0"])
def test_bad_input_is_named_and_nothing_is_written(override, tmp_path):
    with pytest.raises(UserError, match=rf"{override.split('=')[0]}=.*: expected"):
        benchmark_gpu(composed(override), tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("field", "says"), [({"dtype": "int8"}, "dtype='int8'"), ({"layers": 6}, "layers=6")])
def test_a_bad_shape_is_named(field, says):
    with pytest.raises(UserError, match=says):
        PairSpec(**(SMALL.__dict__ | field))


def response(rounds: int, updates: int = 0, **seconds: float) -> Response:
    phases = dict.fromkeys(("propose", "verify", "observe", "update"), 0.0) | seconds
    made = [SimpleNamespace(committed=True)] * updates
    return Response([1] * 20, "limit", rounds, 0, 0, [], [], [], made, phases)


def test_ratios_are_of_the_least_time_and_shares_of_a_response_s():
    """Bandwidth at which a pass over the mean length of 22 tokens takes a millisecond."""
    target = SimpleNamespace()
    bench = gpu.Bench(SMALL, target, None, [1] * 12, None)
    bandwidth = 1e3 * SMALL.pass_bytes(22)
    drafting = SMALL.draft_bytes(4, 22) / SMALL.pass_bytes(22)
    done = []
    for slow in (1, 2, 4):
        made = {
            "plain": response(10, verify=0.02 * slow),
            "eager": response(10, verify=0.05 * slow),
            "eager_draft": response(10, verify=0.04 * slow, propose=0.06 * slow),
            "chain": response(10, verify=0.04 * slow, propose=0.03 * slow, observe=0.01 * slow),
            "sgd": response(10, updates=5, update=0.05 * slow),
            "none": response(10),
        }
        done.append(made)
    table = gpu.rows(bench, {"chain": SimpleNamespace(depth=4)}, done, bandwidth, tau=2.0)
    found = {row["what"]: (row["ms"], row["limit_ms"], row["ratio"]) for row in table}
    assert found["plain decoding, a token"] == pytest.approx((4, 1, 1 / 4))
    assert found["the same without graphs"] == pytest.approx((10, 1, 1 / 10))
    assert found["chain, drafting without graphs"] == pytest.approx((12, drafting, drafting / 12))
    assert found["chain, verification"] == pytest.approx((8, 1, 1 / 8))
    assert found["chain, drafting"] == pytest.approx((6, drafting, drafting / 6))
    assert found["chain, a round"] == pytest.approx((16, 1 + drafting, (1 + drafting) / 16))
    assert found["sgd, an update of 1024 tokens"] == pytest.approx((20, 16 * 512, 20 / (16 * 512)))
    assert found["none, an update of 1024 tokens"] == (None, pytest.approx(16 * 512), None)


def test_without_a_gpu_a_small_shape_runs_and_says_so(ran, capsys):
    assert ran["dry_run"] is True
    assert ran["shape"]["name"] == "dry"
    assert ran["bandwidth"]["peak"] is None
    assert ran["limit"] == "copied"
    arms = ["plain", "eager", "eager_draft", "chain", "tree", "dense_adam", "dense_sgd", "lowrank"]
    assert [list(made) for made in ran["repetitions"]] == [arms]
    for name in ("dense_adam", "dense_sgd", "lowrank"):
        assert ran["repetitions"][0][name]["updates"]["attempted"] == ran["repetitions"][0][name]["rounds"] // 8
    printed = text(ran)
    assert printed.startswith("DRY RUN of a small shape: these numbers say nothing of a GPU\n")
    assert "yes" not in printed
    assert "no |" not in printed, "an aim is not judged by a dry run"


def test_on_a_gpu_aims_are_judged(ran):
    reached = [row | {"ratio": 0.9 if row["kind"] == "plain" else 0.03} for row in ran["rows"]]
    printed = text(ran | {"dry_run": False, "rows": reached, "bandwidth": {"peak": 4.8e12, "copied": 4e12}})
    assert not printed.startswith("DRY RUN")
    assert "memory clocked for 4800 GB/s, copies at 4000 GB/s" in printed
    assert "| 90.0 % | ≥ 85 % | yes |" in printed
    assert "| 3.0 % | ≤ 2 % | no |" in printed


def test_learners_leave_the_draft_to_each_other_as_it_was(monkeypatch):
    target = SMALL.target(CPU)
    draft = SMALL.draft(target)
    before = draft.head.weight.clone()
    bench = gpu.Bench(SMALL, target, draft, [1, 2, 3], gpu.Meter(CPU))
    cfg = composed()
    cfg.target.device, cfg.decode.max_new_tokens = "cpu", 30
    learners = gpu.each(cfg, "updates")
    done = gpu.measured(bench, gpu.modes(cfg), {**learners, "again": FixedSpec("fixed")}, 1)
    committed = {name: sum(u.committed for u in made.updates) for name, made in done[0].items()}
    assert all(committed[name] for name in learners), committed
    assert torch.equal(draft.head.weight, before)
    assert draft.head.low_rank is None
    assert done[0]["again"].tokens == done[0]["plain"].tokens == done[0]["eager"].tokens


def test_the_card_s_bandwidth_is_two_transfers_a_cycle(monkeypatch):
    """An H100 SXM: 5,120 bits at 2,619 MHz, 3.35 TB/s."""
    card = SimpleNamespace(memory_clock_rate=2_619_000, memory_bus_width=5120)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    assert gpu.peak(torch.device("cuda")) == pytest.approx(3.35e12, rel=0.01)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace())
    assert gpu.peak(torch.device("cuda")) is None
    assert gpu.peak(CPU) is None
