"""EAGLE-3's training-time test (arXiv 2503.01840): the draft learns on its own outputs, see ``models.unroll``."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tracedraft.interfaces import Objective
from tracedraft.models.eagle3 import Eagle3
from tracedraft.models.losses import HeadLoss, acceptance, cross_entropy
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


@dataclass(frozen=True)
class StepLoss:
    """One chain step: ``loss`` averaged over all B*T positions, and how many counted ones are right."""

    loss: Tensor
    correct: Tensor


def teacher_of_hidden(hidden: Tensor, head: Tensor) -> Tensor:
    """Teacher probabilities [..., D], at the precision of final hidden states [..., H] and head rows [D, H]."""
    return torch.nn.functional.linear(hidden, head).softmax(dim=-1)


def training_time_test(
    model: Eagle3, embedding: Tensor, batch: Batch, steps: int, objective: str = "ce"
) -> list[StepLoss]:
    """Loss of each chain step, over the positions that count and whose target choice the draft can say."""
    losses = []
    slots = every_slot(batch.tokens, steps)
    for k, features in enumerate(chain(model, embedding, batch.tokens, batch.taps, slots)):
        n = features.shape[1]
        # of both: the position whose prediction counts, and the one that the teacher was taken at
        counts = batch.counts[:, k : k + n] * batch.teachers[:, 1 + k :] * batch.in_vocab[:, 1 + k :]
        loss, right = HeadLoss.apply(
            model.norm(features).flatten(0, 1),
            model.lm_head.weight,
            batch.teacher[:, 1 + k :].flatten(0, 1),
            counts.flatten() / batch.tokens.numel(),
            OBJECTIVES[objective],
        )
        losses.append(StepLoss(loss, (counts.flatten() * right).sum()))
    return losses


OBJECTIVES: dict[str, Objective] = {"ce": cross_entropy, "lk": acceptance}


def weighted(losses: list[StepLoss], decay: float) -> Tensor:
    """Σ_k decay^k · loss_k."""
    return torch.stack([decay**k * step.loss for k, step in enumerate(losses)]).sum()
