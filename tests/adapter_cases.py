"""Small random heads and evidence for the tests of adapters: V target tokens, D draft tokens, H hidden."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from tracedraft.adapters.choices import Inputs, Optimizer, Scope, Selection, Supervision, Trained, Weights
from tracedraft.adapters.trace import TraceAdapter, TraceSpec
from tracedraft.types import Evidence, OutputHead, Update

V, D, H = 40, 24, 16
DTYPES = [torch.float32, torch.bfloat16]

BASE = TraceSpec(
    name="test",
    scope=Scope.conversation,
    every=1,
    at_rounds=[],
    at_prefill=False,
    source=Supervision.response,
    inputs=Inputs.slots,
    prompt_weight=0.5,
    selection=Selection.recent,
    window=64,
    prompt_positions=64,
    form=Weights.dense,
    max_rows=256,
    optimizer=Optimizer.sgd,
    lr=0.1,
    beta1=0.9,
    beta2=0.999,
    eps=1e-8,
    skip=0.0,
    steps=1,
    train=Trained.both,
    temperature=1.0,
    clip=None,
    drift_cap=None,
    guard=False,
    min_positions=1,
    anchor_half_life=None,
    replay_mib=0,
    replay_positions=4,
    replay_weight=0.25,
)


def make_head(dtype: torch.dtype = torch.float32, seed: int = 0) -> OutputHead:
    g = torch.Generator().manual_seed(seed)
    return OutputHead(
        norm=(1 + 0.1 * torch.randn(H, generator=g)).to(dtype),
        weight=(0.3 * torch.randn(D, H, generator=g)).to(dtype),
        eps=1e-5,
        vocab=torch.randperm(V, generator=g)[:D].sort().values,
    )


def evidence(n: int, head: OutputHead, source: str = "response", seed: int = 1, spread: float = 1.0) -> Evidence:
    """Random positions whose teacher's first choice is always a draft token."""
    g = torch.Generator().manual_seed(seed)
    logits = spread * torch.randn(n, V, generator=g)
    logits[torch.arange(n), head.vocab[torch.randint(D, (n,), generator=g)]] += 8 * spread
    features = (3 * torch.randn(n, H, generator=g)).to(head.weight.dtype)
    return Evidence(source, features, lambda rows: logits[rows])  # type: ignore[arg-type]


def make(head: OutputHead, seed: int = 0, **changes) -> TraceAdapter:
    return dataclasses.replace(BASE, **changes).build(head, seed)


def serve(adapter, *pieces: Evidence, round: int = 1) -> Update | None:
    """One response of one conversation with one update opportunity."""
    adapter.begin_conversation()
    adapter.begin_response()
    for piece in pieces:
        adapter.observe(piece)
    update = adapter.maybe_update(round)
    adapter.end_response()
    return update


def snapshot(adapter: TraceAdapter) -> list[Tensor]:
    """Everything that a rollback or a reset has to bring back."""
    kept = [adapter.head.norm, adapter.head.weight, adapter.draws.get_state(), torch.tensor(adapter.count)]
    kept += [*leaves(adapter.form.state()), *(adapter.head.low_rank or ())]
    n = len(adapter.replay)
    kept += [torch.tensor(n), adapter.replay._features[:n], adapter.replay._teacher[:n]]
    return [t.detach().clone() for t in kept]


def leaves(state: Any) -> list[Tensor]:
    """Every value in nested containers, as tensors."""
    if isinstance(state, dict | list):
        return [leaf for part in (state.values() if isinstance(state, dict) else state) for leaf in leaves(part)]
    return [] if state is None else [torch.as_tensor(state)]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def kl_to(teacher: Tensor, head: OutputHead, features: Tensor) -> Tensor:
    """[n] KL of the served draft to the teacher's logits [n, V], written independently of the adapter."""
    p = torch.softmax(teacher[:, head.vocab].float(), -1)
    q = torch.log_softmax(head.logits(features).float(), -1)
    return (p * (p.log() - q)).sum(-1)


def no_teacher(rows: Tensor) -> Tensor:
    raise AssertionError("the teacher was called")
