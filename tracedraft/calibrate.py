"""The plan of ``decode=auto``: what passes and drafts of each size cost here, and how much of a draft survives.

A few short answers at each width and number of beams, for the shares and the seconds of a round, and repeated drafts
of two depths, for the seconds of a level. The width with the best rate is chosen for the whole run, since passes of
different widths round differently and all arms must say the same.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import statistics
from pathlib import Path
from typing import Any

import torch

from tracedraft import chat
from tracedraft.adapters.fixed import FixedSpec
from tracedraft.auto import AutoSpec, Plan, Way
from tracedraft.config import plain
from tracedraft.decode import ChainSpec, DecodeSpec, TreeSpec, respond
from tracedraft.files import write_atomically
from tracedraft.interfaces import Draft
from tracedraft.meter import Meter
from tracedraft.provenance import provenance
from tracedraft.target import Served
from tracedraft.types import Response

PROMPTS = (
    "Why is the sky blue in the daytime and red in the evening?",
    "A shop sells pens at 3 dollars each and gives every fifth one for free. What do 23 pens cost?",
)
TOKENS = 64  # of an answer
REPEATS = 15  # of a draft, of which the median counts


def planned(spec: AutoSpec, served: Served, draft: Draft, weights: str | None, meter: Meter) -> AutoSpec:
    """``spec`` with its plan, which is read where this machine measured one before.

    Args:
        weights: sha256 of the draft's.
    """
    if spec.plan is not None:
        return spec
    file = Path(spec.cache) / "plans" / f"{_identity(spec, served, weights)}.json"
    if file.exists():
        return dataclasses.replace(spec, plan=json.loads(file.read_text()))
    plan = dataclasses.asdict(measured(spec, served, draft, meter))
    text = json.dumps(plan, indent=1)
    write_atomically(file, lambda path: path.write_text(text), "choose another paths.cache")
    return dataclasses.replace(spec, plan=plan)


def measured(spec: AutoSpec, served: Served, draft: Draft, meter: Meter) -> Plan:
    """The plan of the width with the best rate."""
    plans = [_plan(spec, width, served, draft, meter) for width in spec.widths]
    return max(plans, key=lambda plan: plan.rate)


def _plan(spec: AutoSpec, width: int, served: Served, draft: Draft, meter: Meter) -> Plan:
    ways, passes, rests = [], [], []
    for beams in spec.beams:
        shape = _shape(spec, width, beams, spec.most_levels)
        answers = _answers(shape, served, draft, meter)
        way = Way(beams, *_drafting(spec, width, beams, draft, meter), _shares(answers, spec.most_levels))
        seconds = [answer.seconds for answer in answers]
        rounds = sum(answer.rounds for answer in answers)
        passes.append(sum(by_phase["verify"] for by_phase in seconds) / rounds)
        served_in = sum(sum(by_phase.values()) - by_phase["prefill"] for by_phase in seconds) / rounds
        rests.append(served_in - passes[-1] - way.first - (shape.depth - 1) * way.level)
        ways.append(way)
    return Plan(width, min(passes), max(min(rests), 0.0), ways)


def _shape(spec: AutoSpec, width: int, beams: int, levels: int) -> DecodeSpec:
    common: dict[str, Any] = spec.common | {"max_new_tokens": min(TOKENS, spec.max_new_tokens)}
    if beams == 1:
        return ChainSpec(**common, chain_length=min(levels, width - 1))
    nodes = min(width, 1 + beams + (levels - 1) * beams**2)
    return TreeSpec(**common, tree_nodes=nodes, tree_depth=levels, tree_top_k=beams)


def _answers(shape: DecodeSpec, served: Served, draft: Draft, meter: Meter) -> list[Response]:
    fixed = FixedSpec("fixed").build(None, 0)
    prompts = [chat.encode(served.tokenizer, [{"role": "user", "content": text}]) for text in PROMPTS]
    return [respond(served.target, draft, fixed, prompt, shape, key, meter) for key, prompt in enumerate(prompts)]


def _shares(answers: list[Response], levels: int) -> list[float]:
    """By depth; where few rounds came so far, near one half."""
    shares = []
    for depth in range(levels):
        counts = [(a.survivals[depth], a.trials[depth]) for a in answers if depth < len(a.trials)]
        survived, tested = (sum(column) for column in zip(*counts, strict=True)) if counts else (0, 0)
        shares.append((survived + 1) / (tested + 2))
    return shares


def _drafting(spec: AutoSpec, width: int, beams: int, draft: Draft, meter: Meter) -> tuple[float, float]:
    """Median seconds of one level, and of each further one, after the last response."""
    deep = _shape(spec, width, beams, min(4, spec.most_levels))
    flat = _shape(spec, width, beams, 1)

    def seconds(shape: DecodeSpec) -> float:
        meter.start()
        with meter.phase("propose"):
            shape.proposer().propose(draft, None)
        return meter.stop()["propose"]

    pairs = [(seconds(flat), seconds(deep)) for _ in range(REPEATS)]
    first = statistics.median(one for one, _ in pairs)
    further = max(deep.depth - flat.depth, 1)
    return first, max(statistics.median(more - one for one, more in pairs), 0.0) / further


def _identity(spec: AutoSpec, served: Served, weights: str | None) -> str:
    """Of what a plan depends on: the machine, the models, and how answers are decoded."""
    origin = provenance()
    machine = [origin["hardware"], origin["versions"], torch.get_num_threads()]
    target = served.target
    models = [served.provenance, weights, str(target.device), str(target.model.norm.weight.dtype)]
    fields = {name: value for name, value in plain(spec).items() if name not in ("plan", "cache", "confident")}
    text = json.dumps([machine, models, fields], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]
