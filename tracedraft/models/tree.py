"""EAGLE-2's dynamic draft tree (Li et al., arXiv 2406.16858), grown without reading anything back from the device.

Level by level the draft names the likeliest ``k`` continuations of each beam. All are candidates, scored by the
draft's cumulative log-probability of their path, and the best k of a level are the beams of the next. The tree is
the best ``K`` candidates of all levels. Whatever decides, equal ones go by number: tokens by id, candidates by
level, then by their beam's rank, then by their own.

A candidate scores no better than the one it follows, which stands before it, so the best K form a tree.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tracedraft.interfaces import More
from tracedraft.ranking import top
from tracedraft.types import Tree

# Draft logits [k, D] after the beams, whose draft ids [k] follow beams [k] of the level before (of one root: 0).
Expand = Callable[[Tensor, Tensor], Tensor]


def linked(parents: Tensor, depth: int) -> Tree:
    """The tree of rows with ``parents`` [T], at most ``depth`` deep."""
    rows = torch.arange(len(parents), device=parents.device)
    ancestors, at = rows[:, None] == rows, parents
    for _ in range(depth):
        # not ancestors[rows, at] = True, whose scalar comes from the host, for which a CUDA graph cannot wait
        ancestors = ancestors | (at[:, None] == rows)
        at = parents[at]
    return Tree(parents, ancestors, ancestors.sum(dim=1) - 1)


def grow(
    logits: Tensor, expand: Expand, nodes: int, depth: int, top_k: int, more: More | None = None
) -> tuple[Tensor, Tree, Tensor]:
    """Draft ids [K], their tree, and where each row's continuations came from.

    Args:
        logits: [1, D] after the root, the last committed token.
        nodes: K + 1, the root counted (EAGLE's ``total_token``); fewer where there are not as many candidates.
        depth: levels of candidates (EAGLE's ``depth`` counts one less).
        top_k: beams a level, and continuations a beam.
        more: whether to expand the beams of another level; None: always.

    Returns:
        the last of which, [K+1], is 0 for the root and 1 + i for the i-th row of all that ``expand`` was given;
        meaningless for rows that nothing follows.
    """
    k = min(top_k, logits.shape[1])
    root = torch.zeros(1, dtype=torch.long, device=logits.device)
    scores, beams = logits.new_zeros(1, dtype=torch.float32), root  # beams by candidate number; the root's is 0
    ids, totals, parents, expanded = [], [], [root], [root]
    size = 1
    for level in range(depth):
        said = top(logits, k)
        total = (scores[:, None] + logits.float().log_softmax(dim=1).gather(1, said)).flatten()
        ids.append(said.flatten())
        totals.append(total)
        parents.append(beams.repeat_interleave(k))
        if level == depth - 1 and more is None:
            break
        best = top(total, k)
        if more is not None:
            every = torch.cat(totals)
            go_on = more(level + 1, every.topk(min(nodes - 1, len(every))).values, total[best])
            if not go_on or level == depth - 1:
                break
        scores, beams = total[best], size + best
        expanded.append(beams)
        logits = expand(ids[-1][best], best // k)
        size += len(total)
    total, every = torch.cat(totals), torch.cat(parents)
    kept = top(total, min(nodes - 1, len(total))).sort().values
    rows = torch.cat((root, 1 + kept))
    place, source = torch.zeros_like(every), torch.zeros_like(every)
    place[rows] = torch.arange(len(rows), device=rows.device)
    outputs = torch.cat(expanded)
    source[outputs] = torch.arange(len(outputs), device=rows.device)
    return torch.cat(ids)[kept], linked(place[every[rows]], depth), source[rows]
