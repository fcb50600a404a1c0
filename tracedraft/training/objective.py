"""EAGLE-3's training-time test (arXiv 2503.01840): the draft learns on its own outputs, see ``models.unroll``."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tracedraft.interfaces import Objective
from tracedraft.models.eagle3 import Eagle3
from tracedraft.models.losses import ROWS, HeadLoss, acceptance, cross_entropy
from tracedraft.models.unroll import chain, every_slot


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
    there then.

    The head takes all steps at once: of its gradient, as large as the vocabulary, one is made and not one a step.
    """
    outputs, teachers, weights, whole = [], [], [], batch.tokens.numel()
    slots = every_slot(batch.tokens, steps)
    stands = torch.ones_like(batch.tokens, dtype=torch.bool)
    for k, features in enumerate(chain(model, embedding, batch.tokens, batch.taps, slots)):
        n = features.shape[1]
        # of both: the position whose prediction counts, and the one that the teacher was taken at
        both = batch.counts[:, k : k + n] * batch.teachers[:, 1 + k :] * batch.in_vocab[:, 1 + k :]
        row, slot = (both * stands[:, :n]).nonzero(as_tuple=True)
        outputs.append(model.norm(features[row, slot]))
        teachers.append(row * batch.tokens.shape[1] + slot + 1 + k)
        weights.append(decay**k * both[row, slot] / whole)
        if accepted_only and k + 1 < steps:
            stands = said_next(model, features, stands[:, :n], batch.tokens[:, 2 + k :])
    total, shares = HeadLoss.apply(
        torch.cat(outputs), model.lm_head.weight, batch.teacher.flatten(0, 1), torch.cat(weights),
        OBJECTIVES[objective], torch.cat(teachers),
    )  # fmt: skip
    each = shares.split([len(mask) for mask in weights])
    return total, [share.sum() / decay**k for k, share in enumerate(each)]


@torch.no_grad()
def said_next(model: Eagle3, features: Tensor, stands: Tensor, tokens: Tensor) -> Tensor:
    """[B, n] which of the slots that stand say their next token, given features [B, n, H] and tokens [B, n-1]; the
    last slot of a row has none."""
    row, slot = stands[:, :-1].nonzero(as_tuple=True)
    said = torch.zeros_like(stands)
    for rows, at in zip(row.split(ROWS), slot.split(ROWS), strict=True):
        best = model.lm_head(model.norm(features[rows, at])).max(dim=-1).indices  # argmax itself is twice as slow
        said[rows, at] = model.vocab[best] == tokens[rows, at]
    return said


OBJECTIVES: dict[str, Objective] = {"ce": cross_entropy, "lk": acceptance}
