"""Mismatches of an audit: what rounding explains, what it does not, and the arm without a draft."""

from __future__ import annotations

import copy
import weakref

import pytest
import torch
from conftest import CPU, chain, plain_greedy, tiny
from run_cases import composed, conversations

from tracedraft.decode import audit, respond_plainly
from tracedraft.measure import measure
from tracedraft.meter import Meter
from tracedraft.models.decoder import Layer
from tracedraft.verify import Sampling, choose, score_gap

PROMPT = list(b"Name three rivers.")


@pytest.mark.parametrize("cut", [{}, {"top_k": 5}, {"top_p": 0.6}, {"top_k": 7, "top_p": 0.8}], ids=str)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_gap_is_what_a_logit_lacks_to_be_chosen(temperature, cut):
    """Of the chosen token it is 0; raising another's logit by less than its gap never makes it the chosen one, and
    where no nucleus moves with it, by a little more does."""
    generator = torch.Generator().manual_seed(0)
    for position in range(40):
        logits = 3 * torch.randn(30, generator=generator)
        sampling = Sampling(temperature, cut.get("top_p", 1.0), cut.get("top_k", 0), key=5)
        chosen = int(choose(logits[None], sampling, position))
        assert score_gap(logits, sampling, position, chosen) == pytest.approx(0, abs=1e-6)
        for token in range(30):
            gap = score_gap(logits, sampling, position, token) * (temperature or 1.0)
            raised = logits.clone()
            raised[token] += 0.99 * gap - 1e-5
            assert (int(choose(raised[None], sampling, position)) == token) == (token == chosen)
            if not cut:
                raised[token] = logits[token] + gap + 1e-4
                assert int(choose(raised[None], sampling, position)) == token


@pytest.mark.parametrize(
    ("exact", "served", "cut"),
    [
        ((0.60, 0.3499, 0.03, 0.0201), (0.60, 0.3501, 0.03, 0.0199), {"top_p": 0.95}),
        ((0.60, 0.3, 0.0501, 0.0499), (0.60, 0.3, 0.0499, 0.0501), {"top_k": 3}),
    ],
    ids=["nucleus", "top-k"],
)
def test_a_token_at_the_edge_of_the_support_explains_a_difference(exact, served, cut):
    """Rounding lets a token in or out, whose noise then decides: as near a tie as any, from both sides."""
    found = 0
    for key in range(400):
        sampling = Sampling(0.7, cut.get("top_p", 1.0), cut.get("top_k", 0), key=key)
        rows = [0.7 * torch.tensor(p).log() for p in (exact, served)]
        own, said = (int(choose(row[None], sampling, 5)) for row in rows)
        if own != said:
            found += 1
            assert 0 < score_gap(rows[0], sampling, 5, said) < 0.02
    assert found > 3


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_difference_is_a_near_tie_only_if_the_exact_scores_lie_close(monkeypatch, temperature):
    target = tiny("bfloat16").target
    spec = chain(temperature=temperature, max_new_tokens=20)
    tokens = respond_plainly(target, PROMPT, spec, 3, Meter(CPU)).tokens
    planted = [*tokens[:9], (tokens[9] + 1) % 256, *tokens[10:]]
    wrong = audit(target, PROMPT, planted, spec, 3)[0]
    assert not wrong.near_tie
    assert wrong.gap > wrong.bound > 0
    real = target.exact_logits
    for share, near in ((0.9, True), (1.1, False)):

        def close(prefix, share=share):
            logits = real(prefix).clone()
            if len(prefix) == len(PROMPT) + 9:
                assert prefix == [*PROMPT, *tokens[:9]]
                logits[planted[9]] += (wrong.gap - share * wrong.bound) * (temperature or 1.0)
            return logits

        monkeypatch.setattr(target, "exact_logits", close)
        again = audit(target, PROMPT, planted, spec, 3)[0]
        assert again.near_tie is near
        assert again.gap == pytest.approx(share * wrong.bound, rel=0.02)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_exact_logits_are_those_of_a_pass_from_nothing(dtype):
    """At the precision above: what they differ by from the served ones is the served precision's rounding."""
    target = tiny(dtype).target
    exact = target.exact_logits(PROMPT)
    target.begin(64, 8, 32)
    served = target.prefill(PROMPT).logits[0]
    assert exact.dtype is (torch.float64 if dtype == "float32" else torch.float32)
    assert 0 < (exact - served).abs().max() <= 2 * target.rounding * exact.abs().max()
    assert target.model.norm.weight.dtype is getattr(torch, dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_exact_logits_are_bit_equal_to_a_whole_model_at_that_precision_and_hold_one_layer_of_it(dtype, monkeypatch):
    target, alive, most = tiny(dtype).target, weakref.WeakSet(), 0
    above = torch.float64 if dtype == "float32" else torch.float32
    model = copy.deepcopy(target.model).to(above)
    size = len(PROMPT)
    hidden, _ = model(torch.tensor(PROMPT)[None], 0, model.cache(1, size), model.rope(size), ())
    forward = Layer.forward

    def noting(self, *given):
        nonlocal most
        alive.add(self)
        most = max(most, len(alive))
        assert self.mlp.down_proj.weight.dtype is above
        return forward(self, *given)

    monkeypatch.setattr(Layer, "forward", noting)
    assert torch.equal(target.exact_logits(PROMPT), model.lm_head(hidden[0, -1:])[0])
    assert most == 1


def test_plain_decoding_is_the_targets_own():
    target = tiny("float32").target
    made = respond_plainly(target, PROMPT, chain(max_new_tokens=30), 0, Meter(CPU))
    assert made.tokens == plain_greedy(target, PROMPT, 30)
    assert (made.accepted, made.rounds) == (0, len(made.tokens) - 1)
    assert made.trials == []


def test_a_third_arm_without_a_draft_is_timed_beside_the_two(tmp_path):
    summary = measure(composed("plain=true", "workload.limit=3"), tmp_path, None)
    assert [record["order"] for record in conversations(tmp_path)] == [
        ["fixed", "adapted", "plain"],
        ["plain", "adapted", "fixed"],
        ["fixed", "adapted", "plain"],
    ]
    assert summary["plain"]["tokens"] == summary["tokens"]
    seconds = summary["plain"]["seconds"]
    assert seconds["propose"] == seconds["update"] == 0
    whole = {name: sum(summary[name]["seconds"].values()) for name in ("plain", "fixed")}
    assert summary["speedup_over_plain"]["fixed"] == pytest.approx(whole["plain"] / whole["fixed"])
    assert summary["lossless"] is True
    assert summary["null_reasons"].keys() <= {"acceptance_by_depth", "fixed.acceptance_by_depth"}


def test_a_gain_over_plain_decoding_that_is_not_known_has_its_reason(tmp_path):
    rejection = ("decode.acceptance=rejection", "decode.temperature=1.0")
    summary = measure(composed("plain=true", "workload.limit=1", *rejection), tmp_path, None)
    assert summary["speedup_over_plain"] == {"fixed": None, "adapted": None}
    for arm in ("fixed", "adapted"):
        assert "same tokens" in summary["null_reasons"][f"speedup_over_plain.{arm}"]
