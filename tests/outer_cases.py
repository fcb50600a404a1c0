"""A tiny target, an untrained draft and the lessons of its responses, for the tests of learners between requests."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import torch
from conftest import CPU, chain, option
from decode_cases import FIXED, lens
from training_cases import served

from tracedraft.adapters.lessons import Classroom, Fault, Loss, Taught, Teaching
from tracedraft.config import build_spec
from tracedraft.decode import respond
from tracedraft.drafts.eagle3 import Eagle3Draft
from tracedraft.interfaces import OuterAdapter, Student
from tracedraft.meter import Meter
from tracedraft.target import LlamaTarget
from tracedraft.transcript import Transcript
from tracedraft.types import Conversation, Lesson, Response

# One whose next token can be learnt from the last, and that never ends by itself.
TARGET = LlamaTarget(served().target.model, served().target.taps, frozenset(), served().target.context)
REJECTED = Teaching(Taught.rejected, Loss.forward_kl, 3, 0.8, 1.0)
ALL = dataclasses.replace(REJECTED, objective=Taught.all)
PROMPTS = [list(text) for text in (b"Why is the sky blue?", b"Count to ten.", b"Name a river in Peru!")]


def answered(draft: Eagle3Draft, prompt: list[int], key: int = 0, **changes: Any) -> tuple[Response, Lesson]:
    """A response of the tiny fp32 target, and what it can teach."""
    transcript, spec = Transcript(), chain(**{"chain_length": 3, "max_new_tokens": 60} | changes)
    adapter = FIXED.build(None, 0)
    made = respond(TARGET, draft, adapter, prompt, spec, key, Meter(CPU), transcript=transcript)
    return made, transcript.lesson("toy")


def new_draft() -> Eagle3Draft:
    draft = lens(TARGET, 200)
    assert isinstance(draft, Eagle3Draft)
    return draft


@cache
def lessons() -> list[Lesson]:
    return [answered(new_draft(), prompt, key=n, temperature=1.0)[1] for n, prompt in enumerate(PROMPTS)]


def classroom(teaching: Teaching = REJECTED, draft: Eagle3Draft | None = None) -> Classroom:
    return Classroom((draft or new_draft()).student(), teaching, TARGET.logits)


def outer(name: str, **changes: Any):
    """A shipped learner's spec."""
    node = option("outer", name)
    node.update(changes)
    return build_spec(node, "adapter.outer")


def weights_of(student: Student) -> dict[str, torch.Tensor]:
    return {name: weight.detach().clone() for name, weight in student.weights.items()}


def faulty(fault: Fault, teaching: Teaching = REJECTED) -> Teaching:
    return dataclasses.replace(teaching, fault=fault)


WORDS = {"a": "apples and pears", "b": "boats at sea"}


def stream(**domains: int) -> list[Conversation]:
    """So many conversations of each domain."""
    return [Conversation(f"{d}/{n}", ("Why?",), d) for d, count in domains.items() for n in range(count)]


def blocks(learner: OuterAdapter, count: int = 3, domains: str = "a", seconds: float = 1.0) -> list[dict]:
    """So many conversations, of the domains in turn; what came of each."""
    found = []
    for n in range(count):
        domain = domains[n % len(domains)]
        learner.begin_conversation(Conversation(f"toy/{n}", (f"all about {WORDS[domain]}",), domain))
        learner.observe(lessons()[n % 3])
        found.append(learner.end_conversation(seconds))
    return found


def built(name: str, **changes):
    draft = new_draft()
    spec = outer(name, update_interval=1, guard="none", clip=None, unroll=ALL.unroll, **changes)
    return spec.build(draft, TARGET, 0), draft
