"""A chain or a tree drafted by a network that consumes its own tokens, one cache row each behind the true ones."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tracedraft.interfaces import More, Pick
from tracedraft.models.tree import grow
from tracedraft.types import OutputHead, Proposal

# A level of a tree: the position of all its nodes [n], and which of the rows behind the true slots each sees [n, m].
Beams = tuple[int | Tensor, Tensor]
# Pre-norm outputs [n, H] of slots that consume tokens [n], given the outputs [n, H] that those were chosen from and
# the slot whose cache row the first one takes.
Step = Callable[[Tensor, Tensor, int | Tensor, Beams | None], Tensor]


def roll_chain(
    step: Step,
    head: OutputHead,
    last: Tensor,
    start: int | Tensor,
    length: int,
    pick: Pick | None,
    more: More | None,
) -> Proposal:
    """As ``Draft.propose``.

    Args:
        last: [1, H] output of the last true slot; start: the slot after it, int64 [1] in work that is captured.
    """
    features, drafted, shares, outputs = last, [], [], []
    totals = features.new_zeros(0, dtype=torch.float32)
    for depth in range(length):
        if depth:
            features = step(features, drafted[-1], start + depth - 1, None)
        outputs.append(features)
        logits = head.logits(features)
        if pick is None:
            index = logits.max(dim=1).indices  # argmax, which is slow in bf16
        else:
            index, share = pick(logits, depth)
            shares.append(share)
        drafted.append(head.vocab[index])
        if more is not None:
            said = logits.float().log_softmax(dim=1)[0, index]
            totals = torch.cat((totals, totals[-1:] + said if depth else said))
            if not more(depth + 1, totals, totals[-1:]):
                break
    return Proposal(torch.cat(drafted), torch.cat(shares) if shares else None, head.vocab, torch.cat(outputs))


def roll_tree(
    step: Step,
    head: OutputHead,
    last: Tensor,
    start: int | Tensor,
    nodes: int,
    depth: int,
    top_k: int,
    more: More | None,
) -> Proposal:
    """As ``Draft.propose_tree``; arguments as of ``roll_chain``."""
    outputs, sees = [last], torch.zeros(1, 0, dtype=torch.bool, device=last.device)

    def expand(ids: Tensor, origin: Tensor) -> Tensor:
        nonlocal sees
        own = torch.eye(len(ids), dtype=torch.bool, device=ids.device)
        row, position = start + sees.shape[1], start + len(outputs) - 1
        sees = torch.cat((sees[origin], own), dim=1)
        outputs.append(step(outputs[-1][origin], head.vocab[ids], row, (position, sees)))
        return head.logits(outputs[-1])

    ids, tree, source = grow(head.logits(last), expand, nodes, depth, top_k, more)
    return Proposal(head.vocab[ids], features=torch.cat(outputs)[source], tree=tree)
