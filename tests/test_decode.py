"""The loop: lossless with every draft and adapter, counted exactly, and audited."""

from __future__ import annotations

import time
from itertools import count, product

import pytest
import torch
from conftest import CPU, adapters, auto, chain, golden_json, plain_greedy, tiny, tree
from decode_cases import FIXED, PROMPT, adapter_spec, conversation, lens, lm, respond_with

from tracedraft.decode import audit, respond
from tracedraft.errors import UserError
from tracedraft.interfaces import Draft
from tracedraft.meter import PHASES, Meter
from tracedraft.target import LlamaTarget
from tracedraft.types import Proposal, Response
from tracedraft.verify import noise_key

INNER = adapters(inner=True)


def plain(target: LlamaTarget, prompt: list[int], spec) -> list[int]:
    """Greedy decoding without a draft, one token a pass, in passes of the served shapes."""
    target.begin(spec.capacity(len(prompt), target.context), spec.width, spec.prefill_chunk)
    tokens = [int(target.prefill(prompt).logits.argmax())]
    while len(tokens) < spec.max_new_tokens and tokens[-1] not in target.eos_ids:
        tokens.append(int(target.verify(torch.tensor(tokens[-1:])).logits.argmax()))
        target.commit(1)
    return tokens


def proposals_of(draft: Draft) -> list[list[int]]:
    """What ``draft`` proposes from now on."""
    noted, propose = [], draft.propose

    def noting(length: int, pick=None) -> Proposal:
        proposal = propose(length, pick)
        noted.append(proposal.tokens.tolist())
        return proposal

    draft.propose = noting
    return noted


@pytest.mark.parametrize(("shape", "deep"), [(tree, {"tree_depth": 7}), (auto, {})])
def test_rows_that_a_draft_writes_in_vain_widen_no_pass_of_the_target(golden_target, golden_draft, shape, deep):
    """Its passes attend over all rows, so a tree would pay for them, and round otherwise than a chain as wide. With
    one row a bucket each cache is as long as what it holds at most."""
    short = {"cache_bucket": 1, "max_new_tokens": 9}
    spec = shape(**short, **deep)
    assert spec.loose > spec.width
    given, begin = {}, LlamaTarget.begin

    class Target(LlamaTarget):
        def begin(self, capacity: int, *rest) -> None:
            given["target"] = capacity
            begin(self, capacity, *rest)

    target = Target(golden_target.model, golden_target.taps, golden_target.eos_ids, golden_target.context)
    draft = golden_draft("eagle3_e2e")
    prompt = golden_json("eagle3_e2e")["prompts"][0]["prompt"] * 4
    made = respond_with(target, draft, FIXED.build(None, 0), prompt, shape=shape, **short, **deep)
    assert made.tokens == plain(golden_target, prompt, spec)
    linear = chain(chain_length=spec.rows - 1, **short)
    assert given["target"] == linear.capacity(len(prompt), target.context)
    assert draft.cache.capacity - given["target"] == spec.loose - spec.width


# Contract 1: lossless


@pytest.mark.parametrize("name", INNER)
@pytest.mark.parametrize("kind", ["eagle3_e2e", "eagle3_tiny", "lens", "lm"])
@pytest.mark.parametrize("shape", [chain, tree, auto])
def test_greedy_output_is_the_targets_own(golden_target, golden_draft, shape, kind, name):
    """In fp32, against decoding that recomputes everything for each token."""
    for case in golden_json("eagle3_e2e")["prompts"]:
        own = {"lens": lens, "lm": lm}.get(kind)
        draft = own(golden_target) if own else golden_draft(kind)
        probe = draft.head.norm.new_ones(1, len(draft.head.norm))
        before = draft.head.logits(probe)
        adapter = adapter_spec(name).build(draft.head, 0)
        adapter.begin_conversation()
        made = respond_with(golden_target, draft, adapter, case["prompt"], shape=shape, max_new_tokens=60)
        assert made.tokens == case["hf_greedy"][:60] == plain_greedy(golden_target, case["prompt"], 60)
        committed = sum(update.committed for update in made.updates)
        assert torch.equal(draft.head.logits(probe), before) == (committed == 0)
        if name == "fixed":
            assert made.updates == []
        else:
            assert committed >= 2, made.updates


@pytest.mark.parametrize("name", INNER)
@pytest.mark.parametrize(("kind", "length"), [(lens, 1), (lens, 4), (lens, 7), (lm, 4)])
def test_bf16_output_is_the_targets_own_at_the_served_shapes(name, kind, length):
    """Exact by constant shapes, in the precision in which near-ties are common."""
    target, spec = tiny("bfloat16").target, chain(chain_length=length, max_new_tokens=80)
    draft = lens(target, 200) if kind is lens else lm(target)
    adapter = adapter_spec(name).build(draft.head, 0)
    adapter.begin_conversation()
    prompt = list(b"Why is the sky blue?")
    made = respond(target, draft, adapter, prompt, spec, 0, Meter(CPU))
    assert made.tokens == plain(target, prompt, spec)
    assert made.accepted > 0
    assert audit(target, prompt, made.tokens, spec, 0) == []
    assert sum(update.committed for update in made.updates) >= 2 or name == "fixed"


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_sampled_output_is_the_same_for_every_draft_and_adapter(golden_target, golden_draft, temperature):
    """Common random numbers: arms are paired token by token, chains, trees and what changes between them too."""
    made, sampling = set(), {"temperature": temperature, "top_p": 0.95}
    drafts = (golden_draft("eagle3_e2e"), golden_draft("eagle3_tiny"), lens(golden_target), lm(golden_target))
    for draft in drafts:
        for name, shape in product(INNER, (chain, tree, auto)):
            adapter = adapter_spec(name).build(draft.head, 0)
            made.add(tuple(respond_with(golden_target, draft, adapter, key=99, shape=shape, **sampling).tokens))
    assert len(made) == 1
    other = respond_with(golden_target, draft, FIXED.build(None, 0), key=98, **sampling)
    assert tuple(other.tokens) not in made


# Ends and counts


def slow_counts(proposed: list[list[int]], tokens: list[int], full: list[int], length: int) -> tuple:
    """What the counts must be, from the proposals, the response and the target's endless text."""
    at, accepted, trials, survivals = 1, [], [0] * length, [0] * length
    for drafted in proposed:
        kept = 0
        for depth, token in enumerate(drafted):
            if at + depth >= len(tokens):
                break
            trials[depth] += 1
            if token != full[at + depth]:
                break
            survivals[depth] += 1
            kept += 1
        accepted.append(kept)
        at += kept + 1
    return accepted, trials, survivals


def check_counts(made: Response, proposed: list[list[int]], full: list[int], length: int) -> None:
    accepted, trials, survivals = slow_counts(proposed, made.tokens, full, length)
    assert (made.accepted_per_round, made.trials, made.survivals) == (accepted, trials, survivals)
    assert made.rounds == len(made.accepted_per_round) == len(proposed)
    assert made.accepted == sum(made.accepted_per_round) == sum(made.survivals)
    assert len(made.tokens) == 1 + made.accepted + made.rounds - made.cut
    assert made.cut in (0, 1)


@pytest.mark.parametrize("limit", [*range(1, 20), 33, 64])
def test_every_limit_ends_exactly(golden_target, golden_draft, limit):
    """Limits fall on the first token, on accepted tokens, right before and right after the target's own."""
    case = golden_json("eagle3_e2e")["prompts"][1]
    draft = golden_draft("eagle3_e2e")
    proposed = proposals_of(draft)
    made = respond_with(golden_target, draft, FIXED.build(None, 0), case["prompt"], max_new_tokens=limit)
    assert made.tokens == case["hf_greedy"][:limit]
    assert made.ended == "limit"
    check_counts(made, proposed, case["hf_greedy"], 5)


@pytest.mark.parametrize("at", range(24))
def test_every_end_token_ends_exactly(golden_target, golden_draft, at):
    """The end token is first, among accepted tokens, or the target's own, depending on where it stands."""
    case = golden_json("eagle3_e2e")["prompts"][1]
    full = case["hf_greedy"]
    golden_target.eos_ids = frozenset({full[at], 1000})
    draft = golden_draft("eagle3_e2e")
    proposed = proposals_of(draft)
    made = respond_with(golden_target, draft, FIXED.build(None, 0), case["prompt"], max_new_tokens=60)
    first = full.index(full[at])
    assert made.tokens == full[: first + 1]
    assert made.ended == "eos"
    assert made.rounds == 0 or first > 0
    check_counts(made, proposed, full, 5)


def test_end_tokens_were_met_in_every_place(golden_target, golden_draft):
    """The two tests above would say less if no end fell among accepted tokens, or none right after them."""
    case = golden_json("eagle3_e2e")["prompts"][1]
    cuts = set()
    for at in range(24):
        golden_target.eos_ids = frozenset({case["hf_greedy"][at]})
        made = respond_with(golden_target, golden_draft("eagle3_e2e"), FIXED.build(None, 0), case["prompt"])
        cuts.add((made.cut, made.accepted_per_round[-1] if made.rounds else None))
    assert (0, None) in cuts
    assert {accepted for cut, accepted in cuts if cut == 1} >= {1, 2, 3}
    assert {accepted for cut, accepted in cuts if cut == 0} - {None}


@pytest.mark.parametrize("room", [1, 2, 7, 20])
@pytest.mark.parametrize("bucket", [1, 64])
def test_context_ends_a_response(golden_decoder, golden_draft, room, bucket):
    """With a cache that is not a row longer than it has to be, too."""
    case = golden_json("eagle3_e2e")["prompts"][1]
    target = LlamaTarget(golden_decoder, (2, 4, 5), frozenset(), len(case["prompt"]) + room)
    changes = {"max_new_tokens": 60, "cache_bucket": bucket, "prefill_chunk": 7}
    draft = golden_draft("eagle3_e2e")
    proposed = proposals_of(draft)
    made = respond_with(target, draft, FIXED.build(None, 0), case["prompt"], **changes)
    assert made.tokens == case["hf_greedy"][:room]
    assert made.ended == "context"
    check_counts(made, proposed, case["hf_greedy"], 5)


@pytest.mark.parametrize("size", [1, 2, 6, 7, 8, 14, 30])
@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_prompts_of_any_length_in_chunks_of_any_size(golden_target, golden_draft, size, chunk):
    prompt = (PROMPT * 3)[:size]
    made = respond_with(
        golden_target, golden_draft("eagle3_e2e"), FIXED.build(None, 0), prompt,
        max_new_tokens=9, prefill_chunk=chunk, cache_bucket=1,
    )  # fmt: skip
    assert made.tokens == plain_greedy(golden_target, prompt, 9)


@pytest.mark.parametrize(
    "change", [{"chain_length": 0}, {"max_new_tokens": 0}, {"temperature": -0.1}, {"top_p": 0.0}, {"top_p": 1.1},
               {"top_k": -1}, {"acceptance": "typical"}, {"prefill_chunk": 0}, {"cache_bucket": 0}],
)  # fmt: skip
def test_impossible_settings_are_refused_by_name(change):
    key, value = next(iter(change.items()))
    with pytest.raises(UserError, match=rf"decode\.{key}={value}: expected"):
        chain(**change)


def test_seconds_are_those_of_the_clock(golden_target, golden_draft, monkeypatch):
    """With a clock that advances by one tick a reading: every tick is charged to one phase, none twice."""
    ticks = count()
    monkeypatch.setattr(time, "perf_counter_ns", lambda: next(ticks) * 10**9)
    made = respond_with(golden_target, golden_draft("eagle3_e2e"), FIXED.build(None, 0))
    assert tuple(made.seconds) == PHASES
    assert sum(made.seconds.values()) == next(ticks) - 1
    entered = {"prefill": 1, "propose": 2 * made.rounds, "verify": made.rounds}
    entered |= {"update": made.rounds, "observe": made.rounds + 2, "outer": 0}
    assert {name: made.seconds[name] for name in entered} == entered


# The audit


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_audit_passes_the_true_response_and_finds_a_planted_token(dtype, temperature):
    target, prompt = tiny(dtype).target, list(b"Name three rivers.")
    spec, key = chain(temperature=temperature, max_new_tokens=30), noise_key(0, conversation("x"), 0)
    tokens = respond(target, lens(target, 200), FIXED.build(None, 0), prompt, spec, key, Meter(CPU)).tokens
    assert audit(target, prompt, tokens, spec, key) == []
    assert audit(target, prompt, tokens[:1], spec, key) == []
    for at in (0, 1, 5, 6, 7, 12, len(tokens) - 1):
        planted = [*tokens[:at], (tokens[at] + 1) % 256, *tokens[at + 1 :]]
        wrong = audit(target, prompt, planted, spec, key)[0]
        assert (wrong.index, wrong.said, wrong.own) == (at, planted[at], tokens[at])
    if temperature:
        assert audit(target, prompt, tokens, spec, key + 1) != []
