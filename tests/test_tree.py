"""Draft trees: grown like a slow reference grows them and like the published ones, and verified by brute force."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from conftest import GOLDEN, chi_square, golden_json, recompute
from decode_cases import PROMPT
from safetensors.torch import load_file
from test_host_reads import Operators
from torch import Tensor

from tracedraft.models.tree import grow, linked
from tracedraft.ranking import top
from tracedraft.verify import Sampling, choose, verify_tree


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# Growing


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("levels", [1, 2, 9, None])
def test_top_names_the_lowest_of_equal_numbers(dtype, levels):
    """``levels`` different numbers, zeros of both signs among them; None: hardly two alike."""
    scores = normal(20, 300).to(dtype)
    if levels is not None:
        scores = (scores * levels / 4).round().clamp(-(levels // 2), levels // 2)
        scores[:, ::2] *= -1
        assert levels == 1 or bool(scores[scores == 0].signbit().any())
    for count in (1, 7, 300):
        expected = [sorted(range(300), key=lambda i, row=row: (-row[i], i))[:count] for row in scores.tolist()]
        assert top(scores, count).tolist() == expected


def logits_after(path: tuple[int, ...], vocab: int, levels: int | None) -> Tensor:
    """[D] made of the path alone; of a few levels only, so that nearly everything ties, or of any value."""
    row = normal(vocab, seed=hash(path) % 2**31)
    return row if levels is None else (row * levels / 4).round()


def slow_tree(vocab: int, levels: int | None, nodes: int, depth: int, top_k: int) -> list[tuple[int, ...]]:
    """Path of each node, one candidate at a time."""
    candidates, beams = [], [(0.0, ())]
    for _ in range(depth):
        fresh = []
        for score, path in beams:
            row = logits_after(path, vocab, levels)
            shares = row.log_softmax(dim=0)
            for token in sorted(range(vocab), key=lambda i: (-float(row[i]), i))[:top_k]:
                fresh.append((float(torch.tensor(score) + shares[token]), (*path, token)))
        candidates += fresh
        beams = sorted(fresh, key=lambda candidate: -candidate[0])[:top_k]  # stable: of equal ones the first
    ranked = sorted(range(len(candidates)), key=lambda i: -candidates[i][0])
    return [candidates[i][1] for i in sorted(ranked[: nodes - 1])]


def paths_of(tokens: list[int], parents: list[int]) -> list[tuple[int, ...]]:
    """Tokens from the root to each row of a pass but the first."""
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(tokens, parents[1:], strict=True):
        paths.append((*paths[parent], token))
    return paths[1:]


@pytest.mark.parametrize("levels", [None, 1, 2, 5])
@pytest.mark.parametrize(
    ("nodes", "depth", "top_k"), [(2, 1, 1), (6, 5, 1), (5, 1, 4), (12, 4, 4), (24, 5, 6), (60, 8, 10), (25, 3, 3)]
)
def test_trees_grow_like_a_slow_reference(levels, nodes, depth, top_k):
    for vocab in (11, 300):
        beams: list[list[tuple[int, ...]]] = [[()]]

        def expand(ids: Tensor, origin: Tensor, vocab=vocab, beams=beams) -> Tensor:
            pairs = zip(ids.tolist(), origin.tolist(), strict=True)
            beams.append([(*beams[-1][o], i) for i, o in pairs])
            return torch.stack([logits_after(path, vocab, levels) for path in beams[-1]])

        first = logits_after((), vocab, levels)[None]
        ids, made, source = grow(first, expand, nodes, depth, top_k)
        got = paths_of(ids.tolist(), made.parents.tolist())
        assert got == slow_tree(vocab, levels, nodes, depth, top_k)
        assert made.depths.tolist() == [0, *map(len, got)]
        rows = [(), *got]
        sees = [[path[: len(other)] == other for other in rows] for path in rows]
        assert made.ancestors.tolist() == sees
        fed = [path for level in beams for path in level]
        assert {rows[p] for p in made.parents[1:].tolist()} == {fed[source[p]] for p in made.parents[1:].tolist()}, (
            "an output is not that of the row whose continuations came from it"
        )
        assert all(fed[source[p]] == rows[p] for p in made.parents[1:].tolist())


def test_a_vocabulary_smaller_than_the_tree_asks_for_gives_what_there_is():
    ids, made, _ = grow(normal(1, 2), lambda ids, _: normal(len(ids), 2), nodes=60, depth=3, top_k=10)
    assert len(ids) == 2 + 4 + 4
    assert made.ancestors.shape == (11, 11)


@pytest.mark.parametrize(("case", "nodes", "depth", "top_k"), [("a", 12, 4, 4), ("b", 24, 5, 6)])
def test_golden_trees(golden_draft, case, nodes, depth, top_k):
    """Node by node: the smallest gap between scores that decide is 4e-3."""
    golden, draft = load_file(GOLDEN / "eagle3_tree.safetensors"), golden_draft("eagle3_tiny")
    draft.begin(64)
    draft.extend(golden["round1_features"], golden["round1_tokens"][1:])
    for prefix in (f"{case}.", f"{case}.round2."):
        for _ in range(2):  # a proposal leaves no trace
            proposal = draft.propose_tree(nodes, depth, top_k)
            assert proposal.tree is not None
            assert torch.equal(proposal.tokens, golden[prefix + "draft_tokens"][1:])
            assert torch.equal(proposal.tree.parents[1:], golden[prefix + "parents"][1:])
            assert torch.equal(proposal.tree.depths, golden[prefix + "position_ids"])
            assert torch.equal(proposal.tree.ancestors, golden[prefix + "tree_mask"].bool())
        draft.extend(golden["round2_new_features"], golden["round2_tokens"][-3:])


@pytest.mark.usefixtures("unpacked")
def test_growing_reads_nothing_back_and_works_on_all_nodes_at_once(golden_draft):
    draft, golden = golden_draft("eagle3_tiny"), load_file(GOLDEN / "eagle3_tree.safetensors")
    draft.begin(128)
    draft.extend(golden["round1_features"], golden["round1_tokens"][1:])
    counts = set()
    for nodes, top_k in ((2, 1), (12, 4), (60, 10)):
        with Operators(Counter()) as ops:
            draft.propose_tree(nodes, 4, top_k)
        assert ops.seen.total() == 0
        counts.add(ops.count)
    assert len(counts) == 1, "as many operations for 60 nodes as for 2"


# Verification


def test_a_pass_over_a_tree_is_a_pass_over_each_path(golden_target):
    """Every row of random trees, the rejected ones too; then the pass after a path was committed. fp32 noise is 1e-5
    at logits of size 10."""
    prompt, width = PROMPT[:9], 24
    for seed in range(6):
        rng = torch.Generator().manual_seed(seed)
        size = [24, 17, 2, 9, 24, 13][seed]
        parents = [0] + [int(torch.randint(max(0, i - 4), i, (1,), generator=rng)) for i in range(1, size)]
        tokens = torch.randint(golden_target.vocab_size, (size,), generator=rng)
        golden_target.begin(64, width, 4)
        golden_target.prefill(prompt)
        passed = golden_target.verify(tokens, linked(torch.tensor(parents), size))
        paths = [(), *paths_of(tokens[1:].tolist(), parents)]
        for row, path in enumerate(paths):
            parts = recompute(golden_target, [*prompt, int(tokens[0]), *path])
            for got, expected in zip((passed.taps, passed.hidden, passed.logits), parts, strict=True):
                torch.testing.assert_close(got[row], expected[-1], rtol=0, atol=1e-3)
        at, rows = size - 1, [size - 1]
        while at:
            at = parents[at]
            rows.insert(0, at)
        golden_target.commit(len(rows), torch.tensor(rows))
        text = [*prompt, int(tokens[0]), *paths[-1]]
        assert golden_target.length == len(text)
        after = golden_target.verify(torch.tensor([5, 6])).logits
        torch.testing.assert_close(after, recompute(golden_target, [*text, 5, 6])[2][-2:], rtol=0, atol=1e-3)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_verify_tree_by_brute_force(temperature):
    """A walk from the root, each node's successor drawn by itself, on random trees of few tokens."""
    seen = set()
    for trial in range(400):
        vocab, size, position = 4, 2 + trial % 11, 5 + trial
        sampling = Sampling(temperature, 0.9, 3, key=trial)
        rng = torch.Generator().manual_seed(trial)
        parents, tokens = [0], []
        for row in range(1, size):
            taken = set(zip(parents[1:], tokens, strict=True))
            free = [(p, t) for p in range(row) for t in range(vocab) if (p, t) not in taken]
            parent, token = free[int(torch.randint(len(free), (1,), generator=rng))]
            parents.append(parent)
            tokens.append(token)
        shape = linked(torch.tensor(parents), size)
        logits = normal(size, vocab, seed=trial)
        at, expected, rows = 0, [], [0]
        while True:
            expected.append(int(choose(logits[at : at + 1], sampling, position + len(rows) - 1)))
            children = {tokens[i - 1]: i for i in range(1, size) if parents[i] == at}
            if expected[-1] not in children:
                break
            at = children[expected[-1]]
            rows.append(at)
        found = verify_tree(logits, torch.tensor(tokens), shape, sampling, position)
        assert (found.accepted, found.tokens, found.rows.tolist()) == (len(rows) - 1, expected, rows)
        assert found.tested == len(rows) - 1 + bool(children)
        seen.add((found.accepted, found.tested))
    assert {(0, 1), (1, 1), (1, 2), (2, 2), (2, 3)} <= seen


@pytest.mark.parametrize("case", [0, 1])
def test_golden_law_of_one_round(case):
    """What a round says, against exact probabilities that others derived; false alarms for 1e-4 of all keys."""
    golden = golden_json("sampling")["deterministic_tree"]
    temperature, outcomes = (golden["cases"][case][key] for key in ("temperature", "outcomes"))
    shape = linked(torch.tensor([0, *golden["parents"][1:]]), 3)
    tokens, logits = torch.tensor(golden["node_tokens"][1:]), torch.tensor(golden["logits_per_node"])
    index = {tuple(outcome["tokens"]): i for i, outcome in enumerate(outcomes)}
    counts = torch.zeros(len(outcomes))
    for key in range(4000):
        counts[index[tuple(verify_tree(logits, tokens, shape, Sampling(temperature, 1.0, 0, key), 9).tokens)]] += 1
    assert chi_square(counts, torch.tensor([outcome["prob"] for outcome in outcomes], dtype=torch.float64)) > 1e-4
