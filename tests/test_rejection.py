"""Classical rejection sampling against exact laws, with the draft learning in the middle."""

from __future__ import annotations

import json

import pytest
import torch
from conftest import CPU, chain, golden_json
from run_cases import composed
from scipy.stats import chisquare
from test_verify import PROMPT, VOCAB, conversation, law_of_three, small_target
from torch import Tensor

from tracedraft.adapters.fixed import FixedSpec
from tracedraft.config import build_spec
from tracedraft.decode import respond
from tracedraft.drafts.eagle3 import LogitLensSpec
from tracedraft.measure import measure
from tracedraft.meter import Meter
from tracedraft.rejection import picker, verify_rejection
from tracedraft.types import Proposal
from tracedraft.verify import Sampling, noise_key

FALSE_ALARM = 1e-4


def test_golden_law_of_one_round():
    """8,000 rounds of the Markov pair against the exact law of what one round emits (chi-square)."""
    case, rounds = golden_json("sampling")["sampled_draft_lm"], 8_000
    p, q = (torch.tensor(case[f"{name}_next_given_state"]) for name in "pq")
    counts: dict[tuple[int, ...], int] = {}
    accepted = [0, 0, 0]
    for i in range(rounds):
        sampling = Sampling(1.0, 1.0, 0, key=noise_key(1, conversation(str(i)), 0), rejection=True)
        pick = picker(sampling, 7)
        assert pick is not None
        drafted, shares, state = [], [], case["start_state"]
        for depth in range(case["draft_length"]):
            index, share = pick(q[state][None].log(), depth)
            state = int(index)
            drafted.append(index)
            shares.append(share)
        tokens = torch.cat(drafted)
        logits = p[[case["start_state"], *tokens.tolist()]].log()
        made = verify_rejection(logits, Proposal(tokens, torch.cat(shares), torch.arange(4)), sampling, 7)
        counts[tuple(made.tokens)] = counts.get(tuple(made.tokens), 0) + 1
        accepted[made.accepted] += 1
    law = {tuple(o["tokens"]): o["prob"] for o in case["one_round_outcomes"]}
    assert set(counts) <= set(law)
    common = [t for t, prob in law.items() if prob * rounds >= 5]
    rest = [rounds - sum(counts.get(t, 0) for t in common), 1 - sum(law[t] for t in common)]
    seen = [counts.get(t, 0) for t in common] + [rest[0]]
    expected = [law[t] * rounds for t in common] + [rest[1] * rounds]
    if expected[-1] < 1e-6:
        seen, expected = seen[:-1], [e * sum(seen) / sum(expected[:-1]) for e in expected[:-1]]
    assert chisquare(seen, expected).pvalue > FALSE_ALARM
    lengths = [case["accepted_count_distribution"][str(n)] * rounds for n in range(3)]
    assert chisquare(accepted, lengths).pvalue > FALSE_ALARM


@pytest.mark.parametrize("cut", [{}, {"top_k": 4, "top_p": 0.95}], ids=str)
def test_what_is_said_keeps_the_targets_law_while_the_draft_learns(cut):
    """First three tokens of 1,000 responses against full enumeration, the draft's vocabulary smaller than the
    target's; more is accepted than by comparing with the target's own draw."""
    target, made = small_target(), {}
    for acceptance, count in (("rejection", 1000), ("exact", 400)):
        spec = chain(
            chain_length=2, max_new_tokens=4, temperature=0.9, prefill_chunk=8, cache_bucket=8,
            acceptance=acceptance, **cut,
        )  # fmt: skip
        draft, _ = LogitLensSpec("lens", 8, 0).build(target)
        learner = build_spec(
            composed("adapter=persistent", "adapter.every=1", "adapter.min_positions=1", "adapter.lr=0.3",
                     "adapter.drift_cap=null", "adapter.replay_mib=0").adapter, "adapter"
        ).build(draft.head, 0)  # fmt: skip
        learner.begin_conversation()
        counts, accepted = torch.zeros(VOCAB, VOCAB, VOCAB), 0
        before, meter = draft.head.weight.clone(), Meter(CPU)
        for i in range(count):
            answer = respond(target, draft, learner, PROMPT, spec, noise_key(5, conversation(str(i)), 0), meter)
            counts[tuple(answer.tokens[:3])] += 1
            accepted += answer.accepted
        assert not torch.equal(draft.head.weight, before)
        if acceptance == "rejection":
            law = law_of_three(target, spec.sampling(0))
            assert pvalue(counts.flatten(), law.flatten()) > FALSE_ALARM
        made[acceptance] = accepted / count
    assert made["rejection"] > 1.05 * made["exact"]


def pvalue(counts: Tensor, law: Tensor) -> float:
    """Chi-square with cells of fewer than five expected pooled; outside the support nothing may fall."""
    assert not counts[law == 0].any()
    expected = law * counts.sum()
    common = expected >= 5
    seen = [*counts[common].tolist(), float(counts[~common].sum())]
    wanted = [*expected[common].tolist(), float(expected[~common].sum())]
    return float(chisquare(seen, [w * sum(seen) / sum(wanted) for w in wanted]).pvalue)


def test_a_draft_equal_to_the_target_is_always_accepted():
    logits = 3 * torch.randn(4, 20, generator=torch.Generator().manual_seed(0))
    for key in range(50):
        sampling = Sampling(0.8, 1.0, 0, key=key, rejection=True)
        pick = picker(sampling, 3)
        assert pick is not None
        drawn = [pick(logits[d : d + 1], d) for d in range(3)]
        proposal = Proposal(torch.cat([i for i, _ in drawn]), torch.cat([s for _, s in drawn]), torch.arange(20))
        assert verify_rejection(logits, proposal, sampling, 3).accepted == 3


def test_greedy_decoding_has_nothing_to_reject():
    assert picker(Sampling(0.0, 1.0, 0, rejection=True), 0) is None
    assert picker(Sampling(1.0, 1.0, 0), 0) is None
    target = small_target()
    draft, _ = LogitLensSpec("lens", 8, 0).build(target)
    fixed, meter = FixedSpec("fixed").build(None, 0), Meter(CPU)
    answers = [
        respond(target, draft, fixed, PROMPT, chain(max_new_tokens=9, acceptance=a), 0, meter).tokens
        for a in ("exact", "rejection")
    ]
    assert answers[0] == answers[1]


def test_a_run_says_that_its_arms_are_not_paired(tmp_path):
    overrides = ("decode.acceptance=rejection", "decode.temperature=0.7", "workload.limit=3")
    summary = measure(composed(*overrides), tmp_path, None)
    assert summary["speedup"] is summary["lossless"] is summary["speedup_interval"] is None
    assert summary["unpaired_speedup"] > 0
    assert "rejection sampling" in summary["null_reasons"]["lossless"]
    assert json.loads((tmp_path / "summary.json").read_text())["audited"] == 0
