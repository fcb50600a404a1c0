"""Responses of small targets with every draft and adapter, for the tests of the loop."""

from __future__ import annotations

from conftest import CPU, chain, golden_json, option

from tracedraft.adapters.fixed import FixedSpec
from tracedraft.config import build_spec
from tracedraft.decode import respond
from tracedraft.drafts.eagle3 import LogitLensSpec
from tracedraft.drafts.lm import FirstLayersSpec
from tracedraft.interfaces import Draft
from tracedraft.meter import Meter
from tracedraft.target import LlamaTarget
from tracedraft.types import Conversation, Response

PROMPT = golden_json("eagle3_e2e")["prompts"][1]["prompt"]
FIXED = FixedSpec("fixed")


def adapter_spec(name: str, **changes):
    """A shipped adapter, its schedule shortened so that a short response is updated again and again."""
    node = option("adapter", name)
    learner = node.get("inner", node)
    if "every" in learner:
        often = {"every": 2 if learner.every else 0, "at_rounds": [2, 3] if learner.at_rounds else []}
        learner.update(often | {"min_positions": 1} | changes)
    return build_spec(node, "adapter")


def respond_with(target, draft, adapter, prompt=PROMPT, key=0, shape=chain, **changes) -> Response:
    return respond(target, draft, adapter, prompt, shape(**changes), key, Meter(CPU))


def lens(target: LlamaTarget, size: int = 100) -> Draft:
    return LogitLensSpec("lens", size, 0).build(target)[0]


def lm(target: LlamaTarget, layers: int = 6) -> Draft:
    """A draft LM that is right now and then: the target without its last layers."""
    return FirstLayersSpec("lm", layers).build(target)[0]


def conversation(name: str) -> Conversation:
    return Conversation(name, (f"Tell me of {name}.", "And again?"), "toy")
