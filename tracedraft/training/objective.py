"""EAGLE-3's training-time test (arXiv 2503.01840): the draft learns on its own outputs, see ``models.unroll``."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tracedraft.interfaces import Objective
from tracedraft.models.eagle3 import Eagle3
from tracedraft.models.losses import AlongSlopes, acceptance, cross_entropy, product_dtype, slopes
from tracedraft.models.unroll import chain, every_slot

ROUNDED = 64  # slots that go on are a multiple of this many: products of every new shape are compiled anew on a CPU


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
    there then. Slots that stand in no row are not gone on with, but for some that make their number a round one.

    The head's gradient, as large as the vocabulary, is made of all steps at once.
    """
    head, teacher, known = model.lm_head.weight, batch.teacher.flatten(0, 1), batch.teachers & batch.in_vocab
    low = head.detach().to(product_dtype(head))  # once, and not at each step
    slots = every_slot(batch.tokens, 1 if accepted_only else steps)
    stands = torch.ones_like(batch.tokens[:, 1:], dtype=torch.bool)
    outputs, slope, shares = [], [], []
    for k, features in enumerate(chain(model, embedding, batch.tokens, batch.taps, slots)):
        at, more = slots[k], accepted_only and k + 1 < steps
        # of both: the position whose prediction counts, and the one that the teacher was taken at
        both = stands[:, : len(at)] * batch.counts[:, at + k] * known[:, at + 1 + k]
        row, column = (stands if more else both).nonzero(as_tuple=True)
        own, weights = row * batch.tokens.shape[1] + at[column] + 1 + k, both[row, column] / batch.tokens.numel()
        outputs.append(model.norm(features[row, column]))
        found = slopes(outputs[k], low, teacher, decay**k * weights, OBJECTIVES[objective], own, more)
        slope.append(found.slope)
        shares.append(found.shares)
        if found.choices is not None:
            said = torch.zeros_like(stands)
            said[row, column] = said_next(model.vocab[found.choices], batch.tokens, row, at[column] + 2 + k)
            going_on = rounded(said.any(dim=0), at + 2 + k < batch.tokens.shape[1])
            slots.append(at[going_on])
            stands = said[:, going_on]
    total = AlongSlopes.apply(torch.cat(outputs), head, torch.cat(slope), torch.cat(shares))
    return total, [share.sum() / decay**k for k, share in enumerate(shares)]


def said_next(said: Tensor, tokens: Tensor, row: Tensor, following: Tensor) -> Tensor:
    """[n] whether ``said`` [n] is the token at [row, following] of tokens [B, T]; past the end, no."""
    last = tokens.shape[1] - 1
    return (following <= last) & (said == tokens[row, following.clamp_max(last)])


def rounded(wanted: Tensor, legal: Tensor) -> Tensor:
    """Ascending indices where ``wanted`` [n], and where ``legal`` [n] besides to make them a multiple of ``ROUNDED``;
    all of them if there are too few."""
    some, most = torch.stack((wanted.sum(), legal.sum())).tolist()
    count = min(some + -some % ROUNDED, most)
    return (wanted.int() + legal.int()).topk(count).indices.sort().values


OBJECTIVES: dict[str, Objective] = {"ce": cross_entropy, "lk": acceptance}
