"""The plan of ``decode=auto``: what rounds of each shape cost here, and how much of a draft survives.

A few short answers for each width, number of beams and some depths, in turn. Costs are taken from whole rounds: on
its own, a draft finds its weights in the processor's cache, and so does a pass of the target. The width with the best
rate is chosen for the whole run, since passes of different widths round differently and all arms must say the same.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
from pathlib import Path
from statistics import median

import numpy as np
import torch

from tracedraft import chat
from tracedraft.adapters.fixed import FixedSpec
from tracedraft.auto import AutoSpec, Plan, Way
from tracedraft.config import plain
from tracedraft.decode import respond
from tracedraft.files import exclusive, write_atomically
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
INSTEAD = "choose another paths.cache"
# Levels beside the most. A line through them is what a round is taken to cost: a level adds one pass of the draft.
# Not through one level, which costs less where all rounds have but one than among others, as `auto` mixes them: on
# two cores of an AMD EPYC 15.8 ms where it cost 16.8 in turn with seven.
TIMED = (2, 3)
REPEATS = 3  # medians of which what else the machine does can't move alone


def planned(spec: AutoSpec, served: Served, draft: Draft, weights: str | None, meter: Meter) -> AutoSpec:
    """``spec`` with its plan, which is read where this machine measured one before.

    Args:
        weights: sha256 of the draft's.
    """
    if spec.plan is not None:
        return spec
    file = Path(spec.cache) / "plans" / f"{_identity(spec, served, weights)}.json"
    if not file.exists():
        _measure(file, spec, served, draft, meter)
    return dataclasses.replace(spec, plan=json.loads(file.read_text()))


def _measure(file: Path, spec: AutoSpec, served: Served, draft: Draft, meter: Meter) -> None:
    with exclusive(file.parent / ".lock", INSTEAD, wait=True):  # workers that start together would time each other
        if file.exists():
            return
        print("decode=auto: measuring what rounds cost here, once; a minute on a small pair", file=sys.stderr)
        text = json.dumps(dataclasses.asdict(measured(spec, served, draft, meter)), indent=1)
        write_atomically(file, lambda path: path.write_text(text), INSTEAD)


def measured(spec: AutoSpec, served: Served, draft: Draft, meter: Meter) -> Plan:
    """The plan of the width with the best rate."""
    plans = [_plan(spec, width, served, draft, meter) for width in spec.widths]
    return max(plans, key=lambda plan: plan.rate)


def _plan(spec: AutoSpec, width: int, served: Served, draft: Draft, meter: Meter) -> Plan:
    ways, most = [], spec.levels(width)
    for beams in spec.beams:
        timed = {levels: [] for levels in (*(TIMED if most > 2 else (1,)), most)}
        answers = []
        # Whatever a way takes once, before any is timed.
        _answers(_shape(spec, width, beams, 1), served, draft, meter)
        for _ in range(REPEATS):
            for levels, found in timed.items():
                answers = _answers(_shape(spec, width, beams, levels), served, draft, meter)
                seconds = sum(sum(answer.seconds.values()) - answer.seconds["prefill"] for answer in answers)
                found.append(seconds / sum(answer.rounds for answer in answers))
        ways.append(Way(beams, _line({n: median(found) for n, found in timed.items()}, most), _shares(answers, most)))
    return Plan(width, ways)


def _line(seconds: dict[int, float], most: int) -> list[float]:
    """Of rounds of 1 to ``most`` levels, from those of some. A level costs nothing or more, and so does a round."""
    levels, found = np.array(list(seconds)), np.array(list(seconds.values()))
    slope = max(0.0, float(np.polyfit(levels, found, 1)[0])) if len(levels) > 1 else 0.0
    start = float(found.mean() - slope * levels.mean())
    if start < 0:  # but for noise a pass of the target costs something
        start, slope = 0.0, float(found.mean() / levels.mean())
    return [start + slope * level for level in range(1, most + 1)]


def _shape(spec: AutoSpec, width: int, beams: int, levels: int) -> AutoSpec:
    """Always so many levels, in passes of that width: nothing costs more than nothing."""
    free = Plan(width, [Way(beams, [1.0] * levels, [0.5] * levels)])
    return dataclasses.replace(
        spec,
        max_new_tokens=min(TOKENS, spec.max_new_tokens),
        most_levels=levels,
        beams=[beams],
        widths=[width],
        confident=False,
        plan=dataclasses.asdict(free),
    )


def _answers(shape: AutoSpec, served: Served, draft: Draft, meter: Meter) -> list[Response]:
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


def _identity(spec: AutoSpec, served: Served, weights: str | None) -> str:
    """Of what a plan depends on: the machine, this package's code, the models, and how answers are decoded."""
    origin = provenance()
    package = Path(__file__).parent
    code = hashlib.sha256(b"".join(file.read_bytes() for file in sorted(package.rglob("*.py")))).hexdigest()
    machine = [origin["hardware"], origin["versions"], torch.get_num_threads()]
    target = served.target
    models = [served.provenance, weights, str(target.device), str(target.model.norm.weight.dtype)]
    fields = {name: value for name, value in plain(spec).items() if name not in ("plan", "cache", "confident")}
    fields["max_new_tokens"] = min(TOKENS, spec.max_new_tokens)
    text = json.dumps([machine, code, models, fields], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]
