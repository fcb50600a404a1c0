"""What a draft would have had accepted, without serving: against serving itself; and the head's fused loss."""

from __future__ import annotations

import torch
from conftest import golden_folder, golden_json, recompute

from tracedraft.adapters.fixed import FixedSpec
from tracedraft.decode import ChainSpec, respond
from tracedraft.drafts.eagle3 import Eagle3Draft
from tracedraft.models import eagle3
from tracedraft.models.losses import head_loss, slopes
from tracedraft.training.objective import OBJECTIVES
from tracedraft.training.replay import Tally, hits, replay, spans


def test_replay_counts_what_serving_counts(meter, golden_target, tmp_path):
    """At both temperatures, in fp32: the same rounds, accepted tokens, trials and survivals, response by response."""
    target = golden_target
    embedding = target.model.embed_tokens.weight
    model = eagle3.load(golden_folder("eagle3_e2e", tmp_path), torch.float32, "cpu")
    seen = Tally(5)
    for temperature in (0.0, 0.3):
        spec = ChainSpec(
            name="chain", chain_length=5, max_new_tokens=60, temperature=temperature, top_p=1.0, top_k=0,
            acceptance="exact",
            prefill_chunk=16, cache_bucket=32,
        )  # fmt: skip
        for case in golden_json("eagle3_e2e")["prompts"]:
            draft = Eagle3Draft(model, embedding)
            prompt = case["prompt"]
            response = respond(target, draft, FixedSpec("fixed").build(None, 0), prompt, spec, 99, meter)
            tokens = prompt + response.tokens
            taps, _, _ = recompute(target, tokens)
            with torch.no_grad():
                right = hits(model, embedding, torch.tensor(tokens)[None], taps[None], 5)
            answer = [False] * len(prompt) + [True] * len(response.tokens)
            tally = replay(right[:, 0], answer)
            assert (tally.rounds, tally.accepted) == (response.rounds, response.accepted)
            assert (tally.trials, tally.survivals) == (response.trials, response.survivals)
            seen.add(tally)
    assert min(seen.survivals[:3]) > 0, "too little was accepted for the test to mean anything"


def test_replay_serves_each_answer_of_a_row():
    """Two answers of 4 and 3 tokens: chains that are always right need one round each, hopeless ones 3 + 2."""
    answer = [False, True, True, True, True, False, False, True, True, True]
    assert list(spans(answer)) == [(1, 5), (7, 10)]
    always, never = (replay(torch.full((5, 10), value), answer) for value in (True, False))
    assert (always.rounds, always.accepted, always.tau) == (2, 5, 3.5)
    assert always.survivals == [2, 2, 1, 0, 0]
    assert (never.rounds, never.accepted, never.tau) == (5, 0, 1.0)
    assert never.trials == [5, 0, 0, 0, 0]
    assert replay(torch.full((5, 10), True), [False] * 10).tau is None
    # a row that begins inside an answer: its first token is given, as from a prefill
    inside = replay(torch.full((5, 10), True), [True] * 6 + [False] * 4)
    assert (inside.rounds, inside.accepted, inside.survivals) == (1, 4, [1, 1, 1, 1, 0])


def plain_loss(name: str, logits: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    if name == "ce":
        return -(teacher * logits.log_softmax(dim=1)).sum(dim=1)
    return -torch.minimum(logits.softmax(dim=1), teacher).sum(dim=1).log()


def test_head_loss_and_its_gradients_are_autograds():
    """Over more rows than are made at once; logits pass through float32 on their way to the loss."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(600, 12, dtype=torch.float64, generator=generator)
    weight = torch.randn(40, 12, dtype=torch.float64, generator=generator)
    teacher = (3 * torch.randn(600, 40, dtype=torch.float64, generator=generator)).softmax(dim=1)
    counts = torch.rand(600, dtype=torch.float64, generator=generator).round() / 600
    for name, objective in OBJECTIVES.items():
        a, w = x.clone().requires_grad_(True), weight.clone().requires_grad_(True)
        expected = (counts * plain_loss(name, a @ w.T, teacher)).sum()
        expected.backward()
        b, v = x.clone().requires_grad_(True), weight.clone().requires_grad_(True)
        loss = head_loss(b, v, teacher, counts, objective)
        (2 * loss).backward()
        torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0, check_dtype=False)
        torch.testing.assert_close(b.grad, 2 * a.grad, rtol=1e-4, atol=1e-9)
        torch.testing.assert_close(v.grad, 2 * w.grad, rtol=1e-4, atol=1e-8)
        each = counts * plain_loss(name, x @ weight.T, teacher)
        found = slopes(x, weight, teacher, counts, objective, choose=True)
        torch.testing.assert_close(found.shares, each, rtol=1e-5, atol=1e-9, check_dtype=False)
        assert torch.equal(found.choices, (x @ weight.T).argmax(dim=1))


def test_lk_loss_is_least_where_draft_and_target_agree():
    teacher = torch.tensor([[0.7, 0.2, 0.1]])
    agreed, _ = OBJECTIVES["lk"](teacher.log(), teacher)
    assert abs(float(agreed)) < 1e-6
    other, _ = OBJECTIVES["lk"](torch.tensor([[0.1, 0.2, 0.7]]).log(), teacher)
    torch.testing.assert_close(other, -torch.tensor([0.1 + 0.2 + 0.1]).log())
