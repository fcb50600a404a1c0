"""The head as factors: the same as dense SGD on the head, with rows that are bounded, undone and kept."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from adapter_cases import BASE, DTYPES, H, evidence, make_head, same, snapshot
from test_adapters import FAILURES, broken
from torch import Tensor

from tracedraft.adapters.choices import Optimizer, Scope, Supervision, Trained, Weights
from tracedraft.adapters.trace import TraceAdapter
from tracedraft.errors import UserError
from tracedraft.types import OutputHead, Update

HEAD_ONLY = dataclasses.replace(BASE, train=Trained.head, scope=Scope.stream, window=24, max_rows=256, lr=0.3)


def pair(dtype: torch.dtype = torch.float32, **changes) -> list[TraceAdapter]:
    """Dense and low-rank learners of equal heads."""
    spec = dataclasses.replace(HEAD_ONLY, **changes)
    return [dataclasses.replace(spec, form=form).build(make_head(dtype), 0) for form in Weights]


def effective(head: OutputHead) -> Tensor:
    """[D, H] fp32 that the draft multiplies with."""
    weight = head.weight.float()
    return weight if head.low_rank is None else weight + head.low_rank[0].float().t() @ head.low_rank[1].float()


def rounds(adapter: TraceAdapter, count: int, seed: int = 0) -> list[Update]:
    """A response with an update after each round of 5 new positions: windows of 24 overlap."""
    adapter.begin_conversation()
    adapter.begin_response()
    made = []
    for at in range(1, count + 1):
        adapter.observe(evidence(5, adapter.head, seed=100 * seed + at))
        made.append(adapter.maybe_update(at))
    adapter.end_response()
    return made


CASES = {
    "plain": {},
    "temperature": {"temperature": 2.0},
    "clipped": {"clip": 0.05},
    "anchored": {"anchor_half_life": 3.0},
    "two steps": {"steps": 2},
    "guarded": {"guard": True, "lr": 0.05},
    "replayed": {"replay_mib": 1},
    "both sources": {"source": Supervision.balanced, "prompt_positions": 8},
    "folded often": {"max_rows": 24},
    "folded, anchored and replayed": {"max_rows": 40, "anchor_half_life": 3.0, "replay_mib": 1},
}


@pytest.mark.parametrize("case", CASES)
def test_equals_dense_sgd_on_the_head(case):
    """Same losses, norms, drifts and served logits over three responses, whose updates depend on each other."""
    dense, low = pair(**CASES[case])
    probe = torch.randn(50, H, generator=torch.Generator().manual_seed(9))
    for seed in range(3):
        for ours, theirs in zip(rounds(low, 9, seed), rounds(dense, 9, seed), strict=True):
            assert (ours.committed, ours.reason, ours.positions) == (
                theirs.committed,
                theirs.reason,
                theirs.positions,
            )
            # fp32 sums of 16 to 64 terms in another order, over up to 54 updates: some 1e-6 each, rarely adding up.
            assert ours.loss == pytest.approx(theirs.loss, rel=1e-4, abs=1e-6)
            assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-4)
            assert ours.drift == pytest.approx(theirs.drift, rel=1e-4)
        torch.testing.assert_close(low.head.logits(probe), dense.head.logits(probe), rtol=1e-4, atol=1e-4)
        assert low.drift() == pytest.approx(dense.drift(), rel=1e-4)
    assert (dense.head.weight - make_head().weight).norm() > 0.1  # or equality would say little
    assert torch.equal(low.head.weight, make_head().weight) == ("folded" not in case)


def test_a_position_has_one_row_however_many_updates_it_is_in():
    _, low = pair(max_rows=128)
    rounds(low, 9)
    assert low.head.low_rank is not None
    left, right = low.head.low_rank
    assert len(left) == len(right) == 64  # 45 positions, rounded up
    assert [int((x != 0).any(1).sum()) for x in (left, right)] == [45, 45]


def test_rows_are_bounded_and_folding_changes_nothing_that_is_served():
    _, low = pair(max_rows=30)
    probe, folds, form = torch.randn(50, H), 0, low.form
    fold = form._fold

    def noting() -> None:
        nonlocal folds
        before = low.head.logits(probe)
        fold()
        folds += 1
        assert low.head.low_rank is None
        torch.testing.assert_close(low.head.logits(probe), before, rtol=1e-5, atol=1e-5)  # fp32 sums reordered

    form._fold = noting
    for seed in range(2):
        rounds(low, 9, seed)
        assert form._count <= 30
    assert folds >= 4


def test_bf16_serves_the_rows_in_bf16_and_keeps_them_in_fp32():
    """Against the dense master in fp32: bf16 rounds weights and factors to 2^-9 of themselves each."""
    dense, low = pair(torch.bfloat16, lr=0.1)
    rounds(dense, 9)
    rounds(low, 9)
    assert low.head.low_rank is not None
    assert {x.dtype for x in low.head.low_rank} == {torch.bfloat16}
    master = dense.form.masters["weight"]
    moved = master.weights.live - master.initial
    form = low.form
    assert (form._left[:45].t() @ form._right[:45] - moved).norm() < 0.02 * moved.norm()
    assert (effective(low.head) - master.weights.live).norm() < 0.02 * moved.norm()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("max_rows", [24, 256])
def test_reset_empties_the_rows_and_unfolds(dtype, max_rows):
    _, low = pair(dtype, scope=Scope.conversation, max_rows=max_rows)
    fresh = snapshot(low)
    first = rounds(low, 6)
    learnt = snapshot(low)
    assert not torch.equal(effective(low.head), make_head(dtype).weight.float())
    low.begin_response()
    assert same(snapshot(low), learnt)
    low.begin_conversation()
    assert same(snapshot(low), fresh)
    assert low.head.low_rank is None
    version = low.head.weight._version
    low.begin_conversation()
    assert low.head.weight._version == version
    assert rounds(low, 6) == first
    assert same(snapshot(low), learnt)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("max_rows", [30, 256])  # folded or not by then
@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("reason", FAILURES)
def test_failed_update_restores_everything(reason, steps, max_rows, dtype):
    changes = {"steps": steps, "max_rows": max_rows, "anchor_half_life": 8.0, "guard": "guard" in FAILURES[reason]}
    (_, low), (_, twin) = (pair(dtype, lr=0.01, **changes) for _ in range(2))
    for adapter in (low, twin):
        rounds(adapter, 5)
        adapter.begin_response()
        adapter.observe(evidence(20, adapter.head, seed=8))
    spec = low.spec
    low.spec = dataclasses.replace(spec, **FAILURES[reason])
    low.form._lr = low.spec.lr
    if reason == "non-finite loss":
        low.observe(broken(evidence(1, low.head, seed=9)))
    before = snapshot(low)
    update = low.maybe_update(1)
    assert (update.committed, update.reason) == (False, reason)
    assert same(snapshot(low), before)
    low.spec, low.form._lr = spec, spec.lr
    if reason != "non-finite loss":  # and it leaves no trace in what follows
        assert low.maybe_update(2) == twin.maybe_update(2)
        assert same(snapshot(low), snapshot(twin))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("max_rows", [30, 256])
def test_what_was_kept_goes_on_alike(dtype, max_rows, tmp_path):
    changes = {"max_rows": max_rows, "anchor_half_life": 8.0, "replay_mib": 1, "replay_positions": 4}
    _, whole = pair(dtype, **changes)
    rounds(whole, 6)
    torch.save(whole.state(), tmp_path / "state.pt")
    _, resumed = pair(dtype, **changes)
    resumed.load_state(torch.load(tmp_path / "state.pt", weights_only=True))
    assert same(snapshot(resumed), snapshot(whole))
    assert rounds(resumed, 6, 1) == rounds(whole, 6, 1)
    assert same(snapshot(resumed), snapshot(whole))
    assert resumed.drift() == whole.drift()


@pytest.mark.parametrize(
    ("key", "changes"),
    [
        ("optimizer", {"optimizer": Optimizer.adam}),
        ("train", {"train": Trained.both}),
        ("train", {"train": Trained.norm}),
        ("max_rows", {"max_rows": 23}),
        ("max_rows", {"max_rows": 27, "replay_mib": 1.0}),
    ],
)
def test_what_has_no_such_form_is_refused_by_name(key, changes):
    with pytest.raises(UserError, match=f"adapter.{key}=.*(lowrank|positions of one update)"):
        dataclasses.replace(HEAD_ONLY, form=Weights.lowrank, **changes)


def test_a_wrong_row_would_be_seen():
    """The comparison with dense SGD fails if a position's row is taken for another's."""
    dense, low = pair()
    low.form._place = lambda real, place=low.form._place: place(real).roll(1)
    theirs, ours = rounds(dense, 3), rounds(low, 3)
    assert not math.isclose(theirs[-1].loss, ours[-1].loss, rel_tol=1e-3)
