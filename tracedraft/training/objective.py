"""EAGLE-3's training-time test (arXiv 2503.01840): the draft learns on its own outputs, see ``models.unroll``."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tracedraft.interfaces import Objective
from tracedraft.models.eagle3 import Eagle3
from tracedraft.models.losses import AlongSlopes, acceptance, cross_entropy, slopes
from tracedraft.models.unroll import chain, every_slot

SHAPES = 64  # slots that go on are made a multiple of this many


@dataclass(frozen=True)
class Batch:
    """Nothing is shifted here; T tokens a row.

    Attributes:
        tokens: [B, T] int64. taps: [B, T, taps*H].
        teacher: [B, T, D] target probabilities over the draft vocabulary, renormalised.
        in_vocab: [B, T] whether the target's argmax over its full vocabulary is in the draft's.
        counts: [B, T] loss mask; position i weighs the prediction made from H_i.
        teachers: [B, T] bool, where a teacher is: all but padding.
    """

    tokens: Tensor
    taps: Tensor
    teacher: Tensor
    in_vocab: Tensor
    counts: Tensor
    teachers: Tensor


def teacher_of_hidden(hidden: Tensor, head: Tensor) -> Tensor:
    """Teacher probabilities [..., D], at the precision of final hidden states [..., H] and head rows [D, H]."""
    return torch.nn.functional.linear(hidden, head).softmax(dim=-1)


def training_time_test(
    model: Eagle3,
    embedding: Tensor,
    batch: Batch,
    steps: int,
    decay: float,
    objective: str = "ce",
    accepted_only: bool = False,
) -> tuple[Tensor, list[Tensor]]:
    """Σ_k decay^k · loss_k, and each step's own without gradient, over the positions that count and whose target
    choice the draft can say; averages over all B*T.

    ``accepted_only``: step k counts where the steps before it said the tokens that follow, as inference only comes
    there then; slots that stand in no row are not gone on with.

    The head's gradient, as large as the vocabulary, is made of all steps at once.
    """
    head, teacher = model.lm_head.weight, batch.teacher.flatten(0, 1)
    slots = every_slot(batch.tokens, 1 if accepted_only else steps)
    stands = torch.ones_like(batch.tokens, dtype=torch.bool)
    outputs, found = [], []
    for k, features in enumerate(chain(model, embedding, batch.tokens, batch.taps, slots)):
        at, stands = slots[k], stands[:, : len(slots[k])]
        # of both: the position whose prediction counts, and the one that the teacher was taken at
        both = batch.counts[:, at + k] * (batch.teachers & batch.in_vocab)[:, at + 1 + k]
        row, column = (stands if accepted_only else both).nonzero(as_tuple=True)
        own, weights = row * batch.tokens.shape[1] + at[column] + 1 + k, both[row, column] / batch.tokens.numel()
        outputs.append(model.norm(features[row, column]))
        found.append(slopes(outputs[k], head, teacher, decay**k * weights, OBJECTIVES[objective], own, accepted_only))
        if accepted_only and k + 1 < steps:
            said = torch.zeros_like(stands)
            said[row, column] = said_next(model.vocab[found[k].choices], batch.tokens, row, at[column] + 2 + k)
            going_on = rounded(2 * said.any(dim=0) + (at + 2 + k < batch.tokens.shape[1]))
            slots.append(at[going_on])
            stands = said[:, going_on]
    losses = torch.cat([each.shares for each in found])
    total = AlongSlopes.apply(torch.cat(outputs), head, torch.cat([each.slope for each in found]), losses)
    return total, [each.shares.sum() / decay**k for k, each in enumerate(found)]


def said_next(said: Tensor, tokens: Tensor, row: Tensor, following: Tensor) -> Tensor:
    """[n] whether ``said`` [n] is the token at [row, following] of tokens [B, T]; past the end, no."""
    last = tokens.shape[1] - 1
    return (following <= last) & (said == tokens[row, following.clamp_max(last)])


def rounded(rank: Tensor) -> Tensor:
    """Ascending indices of rank [n] above 1, and of some of rank 1 to make them a multiple of ``SHAPES``."""
    wanted = int((rank > 1).sum())
    count = min(wanted + -wanted % SHAPES, int((rank > 0).sum()))
    return rank.topk(count).indices.sort().values


OBJECTIVES: dict[str, Objective] = {"ce": cross_entropy, "lk": acceptance}
