"""The loop: lossless with every draft and adapter, counted exactly, repeatable, and its supervision aligned."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import count, product

import pytest
import torch
from conftest import CPU, chain, golden_json, option, plain_greedy, recompute, tiny, tree
from torch import Tensor

from tracedraft import measure
from tracedraft.adapters.fixed import FixedAdapter, FixedSpec
from tracedraft.config import build_spec, shipped_dir
from tracedraft.decode import audit, respond
from tracedraft.drafts.eagle3 import LogitLensSpec
from tracedraft.errors import UserError
from tracedraft.interfaces import Draft, InnerAdapter
from tracedraft.meter import PHASES, Meter
from tracedraft.target import LlamaTarget
from tracedraft.types import Conversation, Evidence, Proposal, Response, Update
from tracedraft.verify import noise_key

YAMLS = sorted((shipped_dir("conf") / "adapter").glob("*.yaml"))
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


def plain(target: LlamaTarget, prompt: list[int], spec) -> list[int]:
    """Greedy decoding without a draft, one token a pass, in passes of the served shapes."""
    target.begin(spec.capacity(len(prompt), target.context), spec.width, spec.prefill_chunk)
    tokens = [int(target.prefill(prompt).logits.argmax())]
    while len(tokens) < spec.max_new_tokens and tokens[-1] not in target.eos_ids:
        tokens.append(int(target.verify(torch.tensor(tokens[-1:])).logits.argmax()))
        target.commit(1)
    return tokens


def lens(target: LlamaTarget, size: int = 100) -> Draft:
    return LogitLensSpec("lens", size, 0).build(target)[0]


def proposals_of(draft: Draft) -> list[list[int]]:
    """What ``draft`` proposes from now on."""
    noted, propose = [], draft.propose

    def noting(length: int, pick=None) -> Proposal:
        proposal = propose(length, pick)
        noted.append(proposal.tokens.tolist())
        return proposal

    draft.propose = noting
    return noted


def evidence_of(adapter: InnerAdapter) -> list[tuple[str, Tensor, Tensor]]:
    """Source, features and every row's teacher of what ``adapter`` is given from now on."""
    noted, observe = [], adapter.observe

    def noting(evidence: Evidence) -> None:
        rows = torch.arange(len(evidence.features))
        noted.append((evidence.source, evidence.features.clone(), evidence.teacher(rows).clone()))
        observe(evidence)

    adapter.observe = noting
    return noted


def updates_of(adapter: InnerAdapter, look: Callable[[], dict[str, Tensor]]) -> list[tuple[dict, dict]]:
    """What ``look`` sees before and after each update that ``adapter`` commits from now on."""
    noted, maybe_update = [], adapter.maybe_update

    def noting(round: int) -> Update | None:
        before = look()
        update = maybe_update(round)
        if update and update.committed:
            noted.append((before, look()))
        return update

    adapter.maybe_update = noting
    return noted


# Contract 1: lossless


@pytest.mark.parametrize("yaml", YAMLS, ids=lambda path: path.stem)
@pytest.mark.parametrize("kind", ["eagle3_e2e", "eagle3_tiny", "lens"])
@pytest.mark.parametrize("shape", [chain, tree])
def test_greedy_output_is_the_targets_own(golden_target, golden_draft, shape, kind, yaml):
    """In fp32, against decoding that recomputes everything for each token."""
    for case in golden_json("eagle3_e2e")["prompts"]:
        draft = lens(golden_target) if kind == "lens" else golden_draft(kind)
        before = draft.head.weight.clone()
        adapter = adapter_spec(yaml.stem).build(draft.head, 0)
        adapter.begin_conversation()
        made = respond_with(golden_target, draft, adapter, case["prompt"], shape=shape, max_new_tokens=60)
        assert made.tokens == case["hf_greedy"][:60] == plain_greedy(golden_target, case["prompt"], 60)
        committed = sum(update.committed for update in made.updates)
        assert torch.equal(draft.head.weight, before) == (committed == 0)
        if yaml.stem == "fixed":
            assert made.updates == []
        else:
            assert committed >= 2, made.updates


@pytest.mark.parametrize("yaml", YAMLS, ids=lambda path: path.stem)
@pytest.mark.parametrize("length", [1, 4, 7])
def test_bf16_output_is_the_targets_own_at_the_served_shapes(yaml, length):
    """Exact by constant shapes, in the precision in which near-ties are common."""
    target, spec = tiny("bfloat16").target, chain(chain_length=length, max_new_tokens=80)
    draft = lens(target, 200)
    adapter = adapter_spec(yaml.stem).build(draft.head, 0)
    adapter.begin_conversation()
    prompt = list(b"Why is the sky blue?")
    made = respond(target, draft, adapter, prompt, spec, 0, Meter(CPU))
    assert made.tokens == plain(target, prompt, spec)
    assert made.accepted > 0
    assert audit(target, prompt, made.tokens, spec, 0) == []
    assert sum(update.committed for update in made.updates) >= 2 or yaml.stem == "fixed"


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_sampled_output_is_the_same_for_every_draft_and_adapter(golden_target, golden_draft, temperature):
    """Common random numbers: arms are paired token by token, chains and trees too."""
    made, sampling = set(), {"temperature": temperature, "top_p": 0.95}
    for draft in (golden_draft("eagle3_e2e"), golden_draft("eagle3_tiny"), lens(golden_target)):
        for yaml, shape in product(YAMLS, (chain, tree)):
            adapter = adapter_spec(yaml.stem).build(draft.head, 0)
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
    entered |= {"update": made.rounds, "observe": made.rounds + 1, "outer": 0}
    assert {name: made.seconds[name] for name in entered} == entered


# Contract 3: what an update may touch


def everything(target: LlamaTarget, draft) -> dict[str, Tensor]:
    """Every weight and every cache row of both."""
    state = {f"target.{n}": t for n, t in target.model.state_dict().items()}
    state |= {f"draft.{n}": t for n, t in draft.model.state_dict().items()}
    for owner, cache in (("target", target.cache), ("draft", draft.cache)):
        state |= {f"{owner}.keys.{i}": t for i, t in enumerate(cache.keys)}
        state |= {f"{owner}.values.{i}": t for i, t in enumerate(cache.values)}
    return {name: tensor.clone() for name, tensor in state.items()}


def changed(before: dict[str, Tensor], after: dict[str, Tensor]) -> set[str]:
    assert before.keys() == after.keys()
    return {name for name in before if not torch.equal(before[name], after[name])}


def test_fixed_leaves_every_weight_bit_identical(golden_target, golden_draft):
    draft = golden_draft("eagle3_e2e")
    before = {name: tensor.clone() for name, tensor in draft.model.state_dict().items()}
    respond_with(golden_target, draft, FIXED.build(draft.head, 0))
    assert changed(before, draft.model.state_dict()) == set()


@pytest.mark.parametrize("name", ["reset", "persistent", "reset_published"])
def test_an_update_changes_norm_and_head_and_nothing_else(golden_target, golden_draft, name):
    draft = golden_draft("eagle3_e2e")
    adapter = adapter_spec(name).build(draft.head, 0)
    around = updates_of(adapter, lambda: everything(golden_target, draft))
    respond_with(golden_target, draft, adapter)
    assert len(around) >= 2
    for before, after in around:
        assert changed(before, after) == {"draft.norm.weight", "draft.lm_head.weight"}


# Contract 5: repeatable


def conversation(name: str) -> Conversation:
    return Conversation(name, (f"Tell me of {name}.", "And again?"), "toy")


def without_seconds(record: dict) -> dict:
    for turn in record["turns"]:
        for arm in turn["arms"].values():
            arm.pop("seconds")
    return record


@pytest.mark.parametrize(
    ("name", "temperature"),
    [("fixed", 0.7), ("reset", 0.0), ("reset", 0.7), ("persistent", 0.7), ("reset_published", 0.0)],
)
def test_same_seed_same_record_whatever_ran_before(name, temperature):
    served = tiny("bfloat16")
    spec = chain(max_new_tokens=16, temperature=temperature)
    bench = measure.Bench(served, spec, 3, Meter(CPU))
    specs = {"draft": LogitLensSpec("lens", 200, 0), "adapter": adapter_spec(name, selection="reservoir")}
    a, b = conversation("bees"), conversation("seas")

    def fresh() -> list[measure.Arm]:
        return measure.build_arms(specs, served, 3)[0]

    def run(arms: list[measure.Arm], which: Conversation) -> dict:
        return without_seconds(measure.converse(bench, arms, which, 0, lambda arm, answer: None))

    arms = fresh()
    first = run(arms, a)
    assert len(first["turns"]) == 2
    assert all(turn["lossless"]["mismatches"] == 0 for turn in first["turns"])
    assert bool(first["turns"][0]["arms"]["adapted"]["updates"]) == (name != "fixed")
    other = run(arms, b)
    assert other["turns"][0]["arms"]["fixed"]["tokens"] != first["turns"][0]["arms"]["fixed"]["tokens"]
    again = run(arms, a)
    if name != "persistent":  # what persistent has learnt stays, by design
        assert again == first
    assert run(fresh(), a) == first


# Contract 6: supervision is aligned


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("shape", [chain, tree])
def test_evidence_is_the_targets_answer_to_the_token_each_slot_consumed(
    golden_target, golden_draft, shape, temperature
):
    """Slot i holds (H_i, x_{i+1}); its teacher is z_{i+1}, and its features are what the draft makes of true
    features. Against full recomputation: float32 noise is 1e-5, a shift by one is off by several units."""
    adapter, draft = FIXED.build(None, 0), golden_draft("eagle3_e2e")
    evidence = evidence_of(adapter)
    changes = {"temperature": temperature, "max_new_tokens": 50}
    made = respond_with(golden_target, draft, adapter, key=1, shape=shape, **changes)
    text = PROMPT + made.tokens
    evidence = [piece for piece in evidence if piece[0] != "chain"]
    taps, _, logits = recompute(golden_target, text)
    draft.begin(128)
    slots = draft.extend(taps[:-1], torch.tensor(text[1:]))

    assert [source for source, _, _ in evidence] == ["prompt"] + ["response"] * made.rounds
    assert len(evidence[0][1]) == len(PROMPT) - 1
    assert [len(features) - 1 for _, features, _ in evidence[1:-1]] == made.accepted_per_round[:-1]
    features = torch.cat([f for _, f, _ in evidence])
    teacher = torch.cat([t for _, _, t in evidence])
    size = len(features)
    assert size == len(text) - 2  # all but the last token, which the target was never fed
    torch.testing.assert_close(features, slots[:size], rtol=0, atol=1e-3)
    torch.testing.assert_close(teacher, logits[1 : size + 1], rtol=0, atol=1e-3)
    for wrong in (logits[:size], logits[2 : size + 2]):
        gap = (teacher[: len(wrong)] - wrong).abs().amax(dim=1)
        # neighbours in a loop of the text may be alike; nearly all are not
        assert (gap > 1).float().mean() > 0.9


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


# What learners are shown


def test_chain_evidence_is_what_the_chain_was_and_what_the_target_says_there(golden_target, golden_draft):
    """Row k: the output that the k-th drafted token was chosen from, with the target's logits at that prefix,
    recomputed; up to the first rejected token, whose teacher prefers another."""
    draft, seen = golden_draft("eagle3_e2e"), []

    class Spy(FixedAdapter):
        def observe(self, evidence):
            if evidence.source == "chain":
                rows = torch.arange(len(evidence.features))
                seen.append((evidence.features.clone(), evidence.teacher(rows)))

    made = respond_with(golden_target, draft, Spy(), max_new_tokens=30)
    assert len(seen) == made.rounds
    at, deep = 1, 0
    for accepted, (features, teachers) in zip(made.accepted_per_round[:-1], seen[:-1], strict=True):
        assert len(features) == min(accepted + 1, 5)
        said = draft.head.vocab[draft.head.logits(features).argmax(dim=1)].tolist()
        assert said[:accepted] == made.tokens[at : at + accepted]
        _, _, logits = recompute(golden_target, PROMPT + made.tokens[: at + accepted + 1])
        expected = logits[len(PROMPT) + at - 1 :][: len(features)]
        torch.testing.assert_close(teachers, expected, rtol=0, atol=1e-3)
        if accepted < 5:
            assert said[accepted] != made.tokens[at + accepted] == int(teachers[accepted].argmax())
        deep += len(features) > 1
        at += accepted + 1
    assert deep > 2
