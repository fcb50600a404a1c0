"""``tracedraft export``: a draft, and what a learner made of it, written so that other engines can serve it."""

from __future__ import annotations

import dataclasses
from enum import Enum
from pathlib import Path
from typing import TypeVar

import torch
from omegaconf import DictConfig, OmegaConf

from tracedraft import records
from tracedraft.adapters.both import BothSpec
from tracedraft.config import build_spec, plain
from tracedraft.drafts.eagle3 import Eagle3Spec
from tracedraft.errors import UserError
from tracedraft.files import write_atomically
from tracedraft.models import eagle3, weights
from tracedraft.models import eagle3_layouts as layouts
from tracedraft.models.eagle3_layouts import Layout, Reading, TapIds
from tracedraft.target import DTYPES, default_taps
from tracedraft.types import OutputHead, TargetShape

Choice = TypeVar("Choice", bound=Enum)


def export_draft(cfg: DictConfig) -> None:
    """Write ``cfg.draft`` to the new folder ``cfg.out``, with the weights that ``cfg.run`` learnt if that is given.

    Raises:
        UserError: bad input; nothing is written.
    """
    layout = _one_of(Layout, "layout", cfg.layout)
    tap_ids = None if cfg.tap_ids is None else _one_of(TapIds, "tap_ids", cfg.tap_ids)
    if cfg.out is None:
        raise UserError("out is not set: give out=FOLDER, a new one")
    out = Path(cfg.out)
    if out.exists():
        raise UserError(f"out={cfg.out}: exists already; give a new folder")
    target, spec = build_spec(cfg.target, "target"), build_spec(cfg.draft, "draft")
    if not isinstance(spec, Eagle3Spec):
        raise UserError(f"draft={cfg.draft.name!r} has no checkpoint to export: choose draft=eagle3")
    shape = target.shape()
    spec.check(shape)
    folder = spec.folder()
    dtype = DTYPES[spec.dtype] if spec.dtype else None
    model = eagle3.load(folder, dtype, "cpu", spec)
    if cfg.run is not None:
        put_learnt(model, Path(cfg.run), spec)
    model.config = dataclasses.replace(model.config, tapped=model.config.tapped or shape.tapped)
    ids = listed_taps(model.config.tapped, shape, layout, tap_ids)
    source, path = layouts.read_json(folder), getattr(target, "path", None)
    said = layouts.to_json(model.config, layout, model.fc.weight.dtype, source, ids, path)
    write_atomically(out, lambda made: eagle3.save(model, made, dtype, layout, said), "choose another out=FOLDER")
    print(f"{layout.value} draft: {out}")


def _one_of(kind: type[Choice], key: str, value: str) -> Choice:
    """Raises UserError for a value that the enum ``kind`` has not."""
    names = [member.value for member in kind]
    if value not in names:
        raise UserError(f"{key}={value!r}: expected {' or '.join(names)}")
    return kind(value)


def listed_taps(
    taps: tuple[int, ...] | None, shape: TargetShape, layout: Layout, tap_ids: TapIds | None
) -> list[int] | None:
    """The layer ids for the config of a draft that reads the inputs of ``taps``; None: none need be listed.

    Raises:
        UserError: engines would read the list differently, and ``tap_ids`` does not say which one is meant.
    """
    assert taps
    if layout is Layout.speculators:
        if tap_ids is TapIds.outputs:
            raise UserError("tap_ids=outputs: speculators' layout lists inputs; leave it null")
        return list(taps)
    if tap_ids is None:
        if taps == default_taps(shape.layers):
            return None  # what every engine takes without a list
        raise UserError(
            f"this draft reads the inputs of layers {list(taps)}, not EAGLE-3's {list(default_taps(shape.layers))}, "
            "so its config must list them: give tap_ids=inputs for vLLM, tap_ids=outputs for SGLang"
        )
    return [i - (tap_ids is TapIds.outputs) for i in taps]


def put_draft(model: eagle3.Eagle3, run: Path, dtype: torch.dtype) -> None:
    """Give a draft all the weights that a learner between requests made, as they were served.

    Raises:
        UserError: it made a draft for each domain, or its draft is gone.
    """
    file = records.last_draft(run)
    if file is None:
        said = [record["outer"] for record in records.read_conversations(run) if record.get("outer")]
        if learnt := sum(outer["block"] is not None and outer["committed"] for outer in said):
            raise UserError(
                f"run={run} learnt {learnt} blocks between requests, and {records.DRAFT}, the draft that they made, "
                "is gone: run it again with keep_learner=true, in another hydra.run.dir"
            )
        return  # nothing was learnt yet
    kept = torch.load(file, weights_only=True, map_location="cpu")
    if "weights" not in kept:
        raise UserError(f"run={run} made a draft for each domain ({', '.join(kept)}); none serves all")
    for name, parameter in model.named_parameters():
        if name in kept["weights"]:
            parameter.data = kept["weights"][name].to(dtype)


def put_learnt(model: eagle3.Eagle3, run: Path, spec: Eagle3Spec) -> None:
    """Give a draft what a run's learner served last, bit for bit and in that precision.

    A low-rank head is summed up in fp32, since rounding would lose what is small beside the weights.

    Raises:
        UserError: no such run, none that kept its learner, or one that learnt on another draft.
    """
    attempts = records.read_attempts(run)
    if not attempts:
        raise UserError(f"run={run}: no run there; give the folder that a run left")
    config = OmegaConf.load(run / records.CONFIG)
    digest = weights.sha256_of(weights.content_files(spec.folder()), Path(spec.cache))
    if attempts[0]["draft_weights"]["sha256"] != digest:
        learnt_on = attempts[0]["draft_weights"]["origin"]
        raise UserError(f"run={run} learnt on another draft, {learnt_on}: give it as draft.path")
    for field in dataclasses.fields(Reading):
        if (used := config.draft.get(field.name)) != plain(getattr(spec, field.name)):
            raise UserError(f"run={run} read this draft with {field.name}={used}: give draft.{field.name} the same")
    file = records.last_learner(run)
    if file is None:
        raise UserError(
            f"run={run} left no learner: adapter={config.adapter.name} keeps nothing between conversations, or the "
            "run finished without keep_learner=true"
        )
    dtype = DTYPES[config.draft.dtype or config.target.dtype]
    adapter, state = build_spec(config.adapter, "adapter"), torch.load(file, weights_only=True, map_location="cpu")
    if isinstance(adapter, BothSpec):
        put_draft(model, run, dtype)
        adapter, state = adapter.inner, state["inner"]
    if state is None:
        return
    trained = model.norm.weight, model.lm_head.weight
    norm, weight = (parameter.data.to(dtype, copy=True) for parameter in trained)
    before = norm.clone(), weight.clone()
    # The adapter itself puts back what it knew: how it keeps that is its own affair.
    head = OutputHead(norm, weight, model.norm.eps, model.vocab)
    adapter.build(head, config.seed).load_state(state)
    if head.low_rank is not None:
        left, right = (factor.float() for factor in head.low_rank)
        weight = weight.float().addmm_(left.t(), right)
    for parameter, old, new in zip(trained, before, (norm, weight), strict=True):
        if not torch.equal(old.to(new.dtype), new):
            parameter.data = new
