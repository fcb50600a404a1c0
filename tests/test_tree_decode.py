"""Decoding with draft trees: rounds like the published ones, counted and audited, and the caches of a linear pass."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from conftest import CPU, chain, golden_json, recompute, tiny, tree
from decode_cases import FIXED, PROMPT, adapter_spec, lens, respond_with
from test_decode import INNER, plain
from test_decode_learning import evidence_of
from test_tree import paths_of
from torch import Tensor

from tracedraft.decode import audit, respond
from tracedraft.errors import UserError
from tracedraft.interfaces import Draft
from tracedraft.meter import Meter
from tracedraft.ranking import top
from tracedraft.types import Proposal, Response


@pytest.mark.parametrize("prompt", [0, 1, 2])
@pytest.mark.parametrize("run", [0, 1, 2])
def test_golden_rounds(golden_target, golden_draft, prompt, run):
    """Tokens and counts of every round of the published program, its chain as a tree of one beam included."""
    case = golden_json("eagle3_e2e")["prompts"][prompt]
    golden = case["runs"][run]
    draft = golden_draft("eagle3_e2e")
    proposed = trees_of(draft)
    said = [*golden["tokens"], golden["next_root"]]
    made = respond_with(
        golden_target, draft, FIXED.build(None, 0), case["prompt"], shape=tree, max_new_tokens=len(said),
        tree_nodes=golden["total_token"], tree_depth=golden["depth"] + 1, tree_top_k=golden["top_k"],
    )  # fmt: skip
    assert made.tokens == said
    assert made.accepted_per_round == golden["accepted_per_round"]
    for got, expected in zip(proposed, golden["first_rounds"], strict=False):
        parents = [0, *expected["parents"][1:]]
        # nodes of nearly equal score may swap numbers
        assert set(got) == set(paths_of(expected["draft_tokens"][1:], parents))


def trees_of(draft: Draft) -> list[list[tuple[int, ...]]]:
    """Paths of the trees that ``draft`` proposes from now on."""
    noted, propose = [], draft.propose_tree

    def noting(*shape: int) -> Proposal:
        proposal = propose(*shape)
        assert proposal.tree is not None
        noted.append(paths_of(proposal.tokens.tolist(), proposal.tree.parents.tolist()))
        return proposal

    draft.propose_tree = noting
    return noted


def check_counts(made: Response, proposed: list[list[tuple[int, ...]]], full: list[int], depths: int) -> None:
    """Against the proposals, the response and the target's endless text, path by path."""
    at, accepted, trials, survivals = 1, [], [0] * depths, [0] * depths
    for paths in proposed:
        kept = 0
        while at + kept < len(made.tokens):
            before, token = tuple(full[at : at + kept]), full[at + kept]
            if not any(path[:-1] == before for path in paths):
                break
            trials[kept] += 1
            if (*before, token) not in paths:
                break
            survivals[kept] += 1
            kept += 1
        accepted.append(kept)
        at += kept + 1
    assert (made.accepted_per_round, made.trials, made.survivals) == (accepted, trials, survivals)
    assert made.rounds == len(proposed)
    assert made.accepted == sum(accepted)
    assert len(made.tokens) == 1 + made.accepted + made.rounds - made.cut
    assert made.cut in (0, 1)


@pytest.mark.parametrize("limit", [*range(1, 14), 40, 64])
def test_every_limit_and_end_token_ends_exactly(golden_target, golden_draft, limit):
    case = golden_json("eagle3_e2e")["prompts"][1]
    full = case["hf_greedy"]
    for end in (None, full[limit - 1]):
        golden_target.eos_ids = frozenset() if end is None else frozenset({end})
        draft = golden_draft("eagle3_e2e")
        proposed = trees_of(draft)
        count = limit if end is None else 64
        made = respond_with(
            golden_target,
            draft,
            FIXED.build(None, 0),
            case["prompt"],
            shape=tree,
            max_new_tokens=count,
            cache_bucket=1,
        )
        assert made.tokens == full[: limit if end is None else full.index(end) + 1]
        check_counts(made, proposed, full, 5)


@pytest.mark.parametrize("name", INNER)
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_tree_of_one_beam_is_the_chain(golden_target, golden_draft, name, temperature):
    """Count by count, and what learners are shown row by row: what they learn is the same, too."""
    made, shown = [], []
    for shape in (chain(chain_length=5), tree(tree_nodes=6, tree_depth=5, tree_top_k=1)):
        spec = dataclasses.replace(shape, temperature=temperature, max_new_tokens=50)
        draft = golden_draft("eagle3_e2e")
        learner = {} if name in ("fixed", "control_frozen") else {"inputs": "both"}
        adapter = adapter_spec(name, **learner).build(draft.head, 0)
        shown.append(evidence_of(adapter))
        adapter.begin_conversation()
        made.append(respond(golden_target, draft, adapter, PROMPT, spec, 3, Meter(CPU)))
    one, other = made
    for name in ("tokens", "accepted_per_round", "trials", "survivals", "cut", "ended"):
        assert getattr(one, name) == getattr(other, name), name
    assert [u.round for u in one.updates if u.committed] == [u.round for u in other.updates if u.committed]
    for (source, features, teacher), (source_2, features_2, teacher_2) in zip(*shown, strict=True):
        assert source == source_2
        # float32 noise at features and logits of size 10
        torch.testing.assert_close(features, features_2, rtol=0, atol=1e-3)
        torch.testing.assert_close(teacher, teacher_2, rtol=0, atol=1e-3)


def test_tree_evidence_is_what_the_path_was_and_what_the_target_says_there(golden_target, golden_draft):
    """Row i: the output that named the tokens after the i-th row of the accepted path, and the target's logits at
    that prefix, recomputed; the last row only if tokens followed there."""
    draft = golden_draft("eagle3_e2e")
    proposed, adapter = trees_of(draft), FIXED.build(None, 0)
    shown = evidence_of(adapter)
    made = respond_with(golden_target, draft, adapter, shape=tree, max_new_tokens=60)
    pieces = [piece for piece in shown if piece[0] == "chain"]
    assert len(pieces) == made.rounds
    at, deep, unfollowed = 1, 0, 0
    logits = recompute(golden_target, PROMPT + made.tokens)[2][len(PROMPT) :]
    rounds = zip(made.accepted_per_round[:-1], pieces[:-1], proposed[:-1], strict=True)
    for accepted, (_, features, teachers), paths in rounds:
        path = tuple(made.tokens[at : at + accepted])
        followed = any(other[:-1] == path for other in paths)
        assert len(features) == accepted + followed
        named = draft.head.vocab[top(draft.head.logits(features), 6)].tolist()
        for depth, tokens in enumerate(named):
            after = [other[-1] for other in paths if other[:-1] == path[:depth]]
            assert after == tokens[: len(after)] != []
        torch.testing.assert_close(teachers, logits[at - 1 :][: len(features)], rtol=0, atol=1e-3)
        deep, unfollowed = deep + (len(features) > 1), unfollowed + (not followed)
        at += accepted + 1
    assert deep > 2
    assert unfollowed > 0


def test_caches_after_a_tree_are_those_of_a_linear_pass(golden_target, golden_draft):
    """Of fp32 keys and values of size 10; rows of another branch differ by units."""
    draft = golden_draft("eagle3_e2e")
    made = respond_with(golden_target, draft, FIXED.build(None, 0), shape=tree, max_new_tokens=60)
    assert made.accepted > 20
    served, length = golden_target.cache.rows, golden_target.length
    drafted, slots = draft.cache.rows, draft.length
    assert length == len(PROMPT) + len(made.tokens) - 1
    text = PROMPT + made.tokens
    golden_target.begin(128, 8, 16)
    golden_target.prefill(text[:length])
    torch.testing.assert_close(served[..., :length, :], golden_target.cache.rows[..., :length, :], rtol=0, atol=1e-4)
    draft.begin(128)
    draft.extend(recompute(golden_target, text)[0][:slots], torch.tensor(text[1 : slots + 1]))
    torch.testing.assert_close(drafted[..., :slots, :], draft.cache.rows[..., :slots, :], rtol=0, atol=1e-4)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_in_bf16_what_differs_are_near_ties(temperature):
    """A tree's rows round by their place. The loop against plain decoding up to the first difference, if any."""
    target, prompt = tiny("bfloat16").target, list(b"Why is the sky blue?")
    spec = tree(max_new_tokens=80, temperature=temperature)
    made = respond(target, lens(target, 200), FIXED.build(None, 0), prompt, spec, 0, Meter(CPU))
    wrong = audit(target, prompt, made.tokens, spec, 0)
    assert all(mismatch.near_tie for mismatch in wrong)
    assert made.accepted > 0
    first = wrong[0].index if wrong else len(made.tokens)
    if temperature == 0:
        assert made.tokens[:first] == plain(target, prompt, spec)[:first]


# What is refused


@pytest.mark.parametrize(
    "change", [{"tree_nodes": 1}, {"tree_nodes": 152}, {"tree_depth": 0}, {"tree_top_k": 0},
               {"acceptance": "rejection"}, {"acceptance": "typical"}, {"max_new_tokens": 0}],
)  # fmt: skip
def test_impossible_settings_are_refused_by_name(change):
    key, value = next(iter(change.items()))
    with pytest.raises(UserError, match=rf"decode\.{key}={value}: "):
        tree(**change)
    assert tree(tree_nodes=151).width == 152


def test_a_draft_without_trees_says_so():
    class Chains(Draft):
        head = None
        row_bytes = 0

        def begin(self, capacity: int, first: int) -> None: ...

        def extend(self, taps: Tensor, tokens: Tensor) -> Tensor:
            return taps

        def rows(self, n: int) -> Tensor:
            return torch.zeros(n, 0)

        def resume(self, rows: Tensor) -> None: ...

        def student(self) -> None: ...

        def propose(self, length: int, pick=None) -> Proposal:
            return Proposal(torch.zeros(length, dtype=torch.long))

    with pytest.raises(UserError, match="decode=chain"):
        respond_with(tiny("float32").target, Chains(), FIXED.build(None, 0), [1, 2], shape=tree)
