"""Lossless acceptance: verification by brute force, ties, the noise, and the distribution of what comes out.

Stochastic tests use fixed keys, so their outcome never varies. Their bound is the share of keys for which a
correct program would fail them: 1e-4 each, unless said otherwise.
"""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import torch
from conftest import CPU, chain, chi_square, golden_json, plain_greedy, recompute, tree
from omegaconf import OmegaConf
from torch import Tensor

from tracedraft.config import build_spec, shipped_dir
from tracedraft.decode import respond
from tracedraft.drafts.eagle3 import LogitLensSpec
from tracedraft.meter import Meter
from tracedraft.models.decoder import Decoder, DecoderConfig
from tracedraft.target import LlamaTarget
from tracedraft.types import Conversation
from tracedraft.verify import CANDIDATES, Sampling, choose, gumbel, noise_key, verify_chain, warped

FALSE_ALARM = 1e-4
GREEDY = Sampling(0.0, 1.0, 0)


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def slow_warp(logits: list[float], sampling: Sampling) -> dict[int, float]:
    """Probability of each token that top-k and then top-p leave, one token at a time, in double precision."""
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    order = order[: sampling.top_k or len(order)]
    weights = [math.exp((logits[i] - logits[order[0]]) / sampling.temperature) for i in order]
    kept, mass = {}, 0.0
    for i, weight in zip(order, weights, strict=True):
        if mass >= sampling.top_p and kept:
            break
        kept[i] = weight
        mass += weight / math.fsum(weights)
    total = math.fsum(kept.values())
    return {i: weight / total for i, weight in kept.items()}


# Acceptance


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_verify_chain_by_brute_force(temperature):
    """Token by token, each drawn by itself from its own row at its own position."""
    rng = torch.Generator().manual_seed(1)
    seen = set()
    for trial in range(300):
        length, position = 1 + trial % 7, 5 + trial
        sampling = Sampling(temperature, 0.9, 5, key=trial)
        logits = normal(length + 1, 9, seed=trial)
        own = [int(choose(logits[i : i + 1], sampling, position + i)) for i in range(length + 1)]
        agree = int(torch.randint(length + 1, (1,), generator=rng))
        drafted = own[:agree] + [(token + 1) % 9 for token in own[agree:length]]
        if agree < length - 1:  # agreement after a rejection counts for nothing
            drafted[-1] = own[length - 1]
        expected = []
        for token, drawn in zip([*drafted, None], own, strict=True):
            expected.append(drawn)
            if token != drawn:
                break
        verdict = verify_chain(logits, torch.tensor(drafted), sampling, position)
        assert (verdict.accepted, verdict.tokens) == (len(expected) - 1, expected)
        seen.add((length, agree))
    assert len(seen) > 30


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [5, 100, 258, 49152])
def test_exact_ties_go_to_the_lowest_id(dtype, size):
    """Logits of a few levels only, so that nearly every row's maximum is shared; vector code must not mind."""
    logits = normal(24, size).mul(2).round().div(2).clamp(max=1.5).to(dtype)
    expected = [row.index(max(row)) for row in logits.tolist()]
    assert (logits == logits.max(dim=1, keepdim=True).values).sum() > 1.5 * len(logits) or size == 5
    assert choose(logits, GREEDY, 0).tolist() == expected
    assert [int(choose(row[None], GREEDY, 0)) for row in logits] == expected
    assert verify_chain(logits, torch.tensor(expected[:-1]), GREEDY, 0).tokens == expected


# The noise


def test_gumbel_is_gumbel():
    """Uniform after its own distribution function, and uncorrelated, along ids, positions and keys."""
    n = 2**16
    ids, zero = torch.arange(n)[None], torch.zeros(1, dtype=torch.long)
    draws = {
        "ids": gumbel(7, zero + 3, ids)[0],
        "positions": gumbel(7, torch.arange(n), zero[None].expand(n, 1))[:, 0],
        "keys": torch.cat([gumbel(key, zero, zero[None])[0] for key in range(2**13)]),
        "hashed keys": torch.cat(
            [gumbel(noise_key(0, conversation(i), 0), zero, zero[None])[0] for i in range(2**13)]
        ),
    }
    for name, noise in draws.items():
        count = len(noise)
        uniform = torch.exp(-torch.exp(-noise))
        cells = torch.bincount((uniform * 64).long(), minlength=64)
        assert chi_square(cells, torch.full((64,), 1 / 64)) > FALSE_ALARM, name
        # mean and variance within 4.5 standard errors (7e-6 a side); the fourth moment of a Gumbel is 14.6
        spread = math.pi / math.sqrt(6)
        assert abs(noise.mean() - 0.5772157) < 4.5 * spread / math.sqrt(count), name
        assert abs(noise.var() - spread**2) < 4.5 * math.sqrt((14.6 - spread**4) / count), name
        for lag in (1, 2, 64):
            a, b = uniform[:-lag] - 0.5, uniform[lag:] - 0.5
            assert abs((a * b).mean() * 12) < 4.5 / math.sqrt(count), (name, lag)


def test_noise_depends_on_key_position_and_id_alone():
    positions, ids = torch.tensor([0, 5, 4000]), torch.tensor([[3, 9, 1], [49151, 0, 9], [7, 3, 2]])
    whole = gumbel(2**63 - 1, positions, ids)
    for i, j in itertools.product(range(3), range(3)):
        assert torch.equal(gumbel(2**63 - 1, positions[i : i + 1], ids[i : i + 1, j : j + 1])[0, 0], whole[i, j])
    fewer = gumbel(2**63 - 1, positions[1:], ids[1:].flip(1))
    assert torch.equal(fewer.flip(1), whole[1:])
    grid = torch.stack([gumbel(key, torch.arange(50), torch.arange(50).expand(50, 50)) for key in range(20)])
    assert len(grid.unique()) == grid.numel()  # 50,000 draws of 53 bits collide once in 7 million


def conversation(number: int, occurrence: int = 0) -> Conversation:
    return Conversation(f"toy/{number}", ("Hi",), "toy", occurrence)


def test_noise_keys_differ_and_are_stable():
    cases = itertools.product((0, 1), (0, 1, 11), (0, 1), (0, 1, 2))
    keys = [noise_key(seed, conversation(number, showing), turn) for seed, number, showing, turn in cases]
    assert len(set(keys)) == len(keys)
    assert all(0 <= key < 2**63 for key in keys)
    # written down once: another value would make old records of sampled runs impossible to repeat
    assert noise_key(0, Conversation("gsm8k/3", ("Hi",), "math"), 1) == 439571572254572682


# Warping

SAMPLINGS = [
    Sampling(1.0, 1.0, 0),
    Sampling(0.7, 1.0, 0),
    Sampling(0.7, 0.95, 0),
    Sampling(1.3, 1.0, 3),
    Sampling(0.7, 0.8, 5),
    Sampling(1.0, 0.05, 0),
    Sampling(1.0, 1.0, 1),
    Sampling(1.0, 0.9, 100),
]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_choose_draws_from_the_warped_distribution(sampling):
    count, logits = 20_000, normal(8, seed=5, scale=1.5)
    drawn = choose(logits.expand(count, 8), dataclasses.replace(sampling, key=11), 0)
    law = torch.zeros(8, dtype=torch.float64)
    for token, share in slow_warp(logits.tolist(), sampling).items():
        law[token] = share
    assert chi_square(torch.bincount(drawn, minlength=8), law) > FALSE_ALARM
    flatter = torch.softmax(logits.double() / (sampling.temperature * 1.2), 0) * (law > 0)
    if (law > 0).sum() > 1:  # power: 20,000 draws tell a temperature 20 % off
        assert chi_square(torch.bincount(drawn, minlength=8), flatter / flatter.sum()) < 1e-6


def support(ids: Tensor, scores: Tensor) -> list[set[int]]:
    return [set(i[s > -torch.inf].tolist()) for i, s in zip(ids, scores, strict=True)]


@pytest.mark.parametrize("top_p", [0.1, 0.5, 0.9, 0.95, 0.999, 1.0])
@pytest.mark.parametrize("top_k", [0, 1, 50, 300, 5000])
def test_nucleus_is_that_of_a_slow_reference(top_p, top_k):
    """Peaked and flat rows in one block, so that some nuclei exceed the candidates that are sorted first."""
    sampling = Sampling(0.7, top_p, top_k)
    logits = torch.cat((normal(6, 2000, scale=6.0), normal(6, 2000, seed=1, scale=0.3)))
    expected = [slow_warp(row, sampling) for row in logits.tolist()]
    if top_p >= 0.5 and top_k in (0, 5000):
        assert max(map(len, expected)) > CANDIDATES
    ids, scores = warped(logits, sampling)
    assert support(ids, scores) == [set(row) for row in expected]
    for i, row in enumerate(expected):
        law = torch.softmax(scores[i].double(), 0)
        got = {int(token): float(p) for token, p in zip(ids[i], law, strict=True) if p > 0}
        # scores are float32 numbers of size ~30: each weight is right to 30 * 6e-8 * a few
        assert max(abs(got[token] / share - 1) for token, share in row.items()) < 2e-5


@pytest.mark.parametrize("top_p", [0.3, 0.9, 1.0])
@pytest.mark.parametrize("top_k", [0, 1, 7, 50])
def test_equal_scores_enter_the_support_by_id(top_p, top_k):
    """In bf16 many scores are equal, also at the cut."""
    logits = normal(20, 600, scale=2.0).to(torch.bfloat16)
    sampling = Sampling(1.0, top_p, top_k)
    assert all(len(set(row)) < 500 for row in logits.tolist())
    expected = [set(slow_warp(row, sampling)) for row in logits.tolist()]
    assert support(*warped(logits, sampling)) == expected


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_warping_a_row_does_not_depend_on_its_neighbours(sampling):
    """A flat row makes the whole block sort in full; its neighbours must draw what they draw alone."""
    peaked, flat = normal(3, 2000, scale=6.0), normal(3, 2000, seed=1, scale=0.1)
    together = choose(torch.cat((peaked, flat)), sampling, 40)
    alone = [int(choose(row[None], sampling, 40 + i)) for i, row in enumerate(torch.cat((peaked, flat)))]
    assert together.tolist() == alone


# Sampling while the draft learns

VOCAB, PROMPT = 12, [3, 1, 4, 1, 5]


def small_target() -> LlamaTarget:
    shape = {"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 16, "layers": 6, "heads": 2, "kv_heads": 1}
    model = Decoder(
        DecoderConfig(**shape, head_dim=8, eps=1e-5, rope_theta=1e4, rope_scaling=None, tied=False, context=64)
    )
    generator = torch.Generator().manual_seed(2)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, 0.0, 0.4, generator)
    return LlamaTarget(model.requires_grad_(False).eval(), (2, 3), frozenset(), 64)


def law_of_three(target: LlamaTarget, sampling: Sampling) -> Tensor:
    """[V, V, V] probability of each first three tokens, by enumerating every prefix."""
    law = torch.zeros(VOCAB, VOCAB, VOCAB, dtype=torch.float64)

    def after(tokens: list[int]) -> dict[int, float]:
        return slow_warp(recompute(target, PROMPT + tokens)[2][-1].tolist(), sampling)

    for a, p in after([]).items():
        for b, q in after([a]).items():
            for c, r in after([a, b]).items():
                law[a, b, c] = p * q * r
    return law


@pytest.mark.parametrize("shape", [chain(chain_length=2), tree(tree_nodes=6, tree_depth=2, tree_top_k=3)])
def test_sampling_is_lossless_while_the_draft_is_updated(shape):
    """The draft learns during and between responses; what is said keeps the target's own distribution."""
    target, count = small_target(), 1500
    short = {"max_new_tokens": 4, "prefill_chunk": 8, "cache_bucket": 8}
    spec = dataclasses.replace(shape, temperature=0.9, top_k=4, top_p=0.95, **short)
    draft, _ = LogitLensSpec("lens", 8, 0).build(target)
    node = OmegaConf.load(shipped_dir("conf") / "adapter" / "persistent.yaml")
    changes = {"every": 1, "min_positions": 1, "lr": 0.3, "drift_cap": None, "replay_mib": 0}
    adapter = build_spec(OmegaConf.merge(node, changes), "adapter").build(draft.head, 0)
    counts, meter, inside, survived, tried = torch.zeros(VOCAB, VOCAB, VOCAB), Meter(CPU), 0, 0, 0
    before = draft.head.weight.clone()
    adapter.begin_conversation()
    for i in range(count):
        made = respond(target, draft, adapter, PROMPT, spec, noise_key(5, conversation(i), 0), meter)
        counts[tuple(made.tokens[:3])] += 1
        inside += any(update.committed for update in made.updates)
        survived, tried = survived + made.survivals[0], tried + made.trials[0]
    assert inside > count / 4
    assert not torch.equal(draft.head.weight, before)
    assert 0.05 < survived / tried < 0.95, "a draft that is never or always right would prove nothing"
    law = law_of_three(target, spec.sampling(0))
    assert law.sum() == pytest.approx(1)
    assert chi_square(counts.flatten(), law.flatten()) > FALSE_ALARM
    # power: at another temperature the same counts are impossible
    other = law_of_three(target, dataclasses.replace(spec.sampling(0), temperature=1.1))
    assert chi_square(counts.flatten(), other.flatten()) < 1e-6


def test_golden_sampling_cases_are_reproduced_by_the_slow_reference():
    """The reference that this file trusts, against probabilities that others derived."""
    tree = golden_json("sampling")["deterministic_tree"]
    for case in tree["cases"]:
        law = slow_warp(tree["logits_per_node"][0], Sampling(case["temperature"], 1.0, 0))
        first = [0.0] * tree["vocab"]
        for outcome in case["outcomes"]:
            first[outcome["tokens"][0]] += outcome["prob"]
        assert [law[i] for i in range(tree["vocab"])] == pytest.approx(first, abs=1e-12)


def test_temperature_zero_is_plain_greedy():
    target = small_target()
    tokens = plain_greedy(target, PROMPT, 1)
    assert choose(recompute(target, PROMPT)[2][-1:], GREEDY, 5).tolist() == tokens
