"""What TraceDraft's settings may be; each is explained where it is used, in ``trace.TraceSpec``."""

import math
from enum import Enum
from typing import Any

from tracedraft.errors import UserError


class Scope(Enum):
    conversation = "conversation"
    stream = "stream"


class Supervision(Enum):
    prompt = "prompt"
    response = "response"
    balanced = "balanced"


class Inputs(Enum):
    slots = "slots"
    chain = "chain"
    both = "both"


class Selection(Enum):
    recent = "recent"
    reservoir = "reservoir"


class Optimizer(Enum):
    sgd = "sgd"
    adam = "adam"


class Trained(Enum):
    norm = "norm"
    head = "head"
    both = "both"


class Weights(Enum):
    dense = "dense"
    lowrank = "lowrank"


def positions(spec: Any) -> int:
    """Of one update of a ``trace.TraceSpec``, at most."""
    prompt = spec.prompt_positions if spec.source is not Supervision.response else 0
    response = spec.window if spec.source is not Supervision.prompt else 0
    return prompt + response + (spec.replay_positions if spec.replay_mib else 0)


def check(spec: Any) -> None:
    """Raises UserError for settings of a ``trace.TraceSpec`` that cannot work.

    One rule a line: key, whether its value works, what would.
    """
    prompt = spec.source is not Supervision.response
    response = spec.source is not Supervision.prompt
    ever = spec.every or spec.at_rounds or spec.at_prefill
    optional = {key: getattr(spec, key) for key in ("clip", "drift_cap", "anchor_half_life")}
    dense, most = spec.form is Weights.dense, positions(spec)
    rules = [
        ("every", spec.every >= 0, "at least 0"),
        ("every", ever, "every, at_rounds or at_prefill; adapter=fixed never updates"),
        ("at_rounds", all(r >= 1 for r in spec.at_rounds), "rounds from 1; at_prefill is before the first"),
        ("at_prefill", prompt or not spec.at_prefill, "false with source=response: it has no position then"),
        ("prompt_weight", 0 < spec.prompt_weight < 1, "between 0 and 1; see source"),
        ("window", spec.window >= 1, "at least 1"),
        ("prompt_positions", spec.prompt_positions >= 1, "at least 1; see source=response"),
        ("lr", 0 <= spec.lr < math.inf, "a finite number, at least 0"),
        ("beta1", 0 <= spec.beta1 < 1, "in [0, 1)"),
        ("beta2", 0 <= spec.beta2 < 1, "in [0, 1)"),
        ("eps", spec.eps > 0, "above 0"),
        ("skip", 0 <= spec.skip <= 0.01, "0 (none) to 0.01; more is no longer the gradient"),
        ("optimizer", dense or spec.optimizer is Optimizer.sgd, "sgd with form=lowrank, whose steps are of low rank"),
        ("train", dense or spec.train is Trained.head, "head with form=lowrank, whose rows need a norm that stays"),
        ("max_rows", dense or spec.max_rows >= most, f"at least {most}, the positions of one update"),
        ("steps", spec.steps >= 1, "at least 1"),
        ("temperature", 0 < spec.temperature < math.inf, "above 0"),
        ("min_positions", spec.min_positions >= 1, "at least 1"),
        ("replay_mib", 0 <= spec.replay_mib < math.inf, "at least 0"),
        ("replay_mib", response or not spec.replay_mib, "0 with source=prompt: it replays responses"),
        ("replay_positions", spec.replay_positions >= 1, "at least 1; see replay_mib=0"),
        ("replay_weight", 0 < spec.replay_weight < math.inf, "above 0; see replay_mib=0"),
        *((key, value is None or value > 0, "above 0, or null") for key, value in optional.items()),
    ]
    for key, works, want in rules:
        if not works:
            raise UserError(f"adapter.{key}={getattr(spec, key)!r}: expected {want}")
