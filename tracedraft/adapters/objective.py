"""The loss of TraceDraft and its gradient in closed form.

Shapes: ``n`` positions, ``H`` hidden size, ``V`` target vocabulary, ``D`` draft vocabulary. With f_i the
pre-norm feature of position i, z_i its teacher's logits over the draft vocabulary and c_i its weight:

    p_i = softmax(z_i / T),  x_i = g · f_i / rms(f_i),  q_i = softmax(W x_i / T)
    L(g, W) = Σ_i c_i · T² · KL(p_i ‖ q_i)
    R_i = c_i · T · (q_i - p_i),  ∂L/∂W = Rᵀ X,  ∂L/∂g = Σ_i (R W)_i · f_i / rms(f_i)

L is the objective of the published TraceDraft code (``T²·KL(p_T‖q_θ)`` on cached features); R is its
derivative with respect to the logits, so autograd and a [D, H] gradient are not needed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tracedraft.types import OutputHead


@dataclass(frozen=True)
class Rows:
    """Supervised positions: features [n, H], teacher's probabilities [n, D], Σ p log p [n]; all fp32."""

    features: Tensor
    teacher: Tensor
    negentropy: Tensor

    def __len__(self) -> int:
        return self.features.shape[0]

    def take(self, index: Tensor) -> Rows:
        """The positions ``index`` [m]."""
        return Rows(*(x.index_select(0, index) for x in (self.features, self.teacher, self.negentropy)))


@dataclass(frozen=True)
class Batch:
    """Rows and their weights c [n] in the loss, which sum to 1."""

    rows: Rows
    weights: Tensor


@dataclass(frozen=True)
class Factors:
    """A gradient leftᵀ·right [r, H], kept as left [n, r] and right [n, H]."""

    left: Tensor
    right: Tensor

    def norm(self) -> float:
        """Frobenius norm from Gram matrices: ‖LᵀX‖² = Σ (L Lᵀ) ∘ (X Xᵀ)."""
        grams = (self.left @ self.left.t()) * (self.right @ self.right.t())
        # Rounding can leave a vanishing sum below zero; NaN must stay NaN, and clamping keeps it.
        return grams.sum(dtype=torch.float64).clamp_min(0).sqrt().item()


def teacher_rows(logits: Tensor, vocab: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What the draft can learn from target logits.

    Args:
        logits: [n, V] of the target.
        vocab: [D] int64 ascending target ids.
        temperature: T.

    Returns:
        p [n, D] fp32, the softmax of z/T over the draft vocabulary; Σ p log p [n]; carries [n] bool, whether
        the target's first choice (ties: lowest id) is a draft token; mass [n], what the target at T = 1
        gives to draft tokens.
    """
    best = logits.argmax(-1)
    at = torch.searchsorted(vocab, best).clamp_max(len(vocab) - 1)
    carries = vocab[at] == best
    inside = torch.log_softmax(logits.float(), -1).index_select(1, vocab)
    mass = inside.exp().sum(-1)
    p = torch.softmax(inside / temperature, -1)
    return p, negentropy(p), carries, mass


def negentropy(p: Tensor) -> Tensor:
    """Σ p log p [n] of probabilities [n, D]."""
    return -torch.special.entr(p).sum(-1)


def weighted(sources: dict[str, tuple[Rows, float]]) -> Batch:
    """One batch in which each source is averaged, and the averages are mixed by weights normalised to 1.

    Args:
        sources: rows and weight of each source; sources without rows have no part in the normalisation.
    """
    present = [(rows, weight) for rows, weight in sources.values() if len(rows)]
    total = sum(weight for _, weight in present)
    weights = [rows.features.new_full((len(rows),), weight / total / len(rows)) for rows, weight in present]
    if len(present) == 1:
        return Batch(present[0][0], weights[0])
    parts = zip(*((r.features, r.teacher, r.negentropy) for r, _ in present), strict=True)
    return Batch(Rows(*(torch.cat(part) for part in parts)), torch.cat(weights))


def kl_gradient(
    batch: Batch, gain: Tensor, weight: Tensor, eps: float, temperature: float
) -> tuple[float, Tensor, Tensor, Tensor]:
    """Loss and the parts of its gradient; products with the head are made at the head's own precision.

    Args:
        batch: n positions.
        gain: [H] RMSNorm gain.
        weight: [D, H] head, as served or as fp32 master.
        eps: RMSNorm epsilon.
        temperature: T.

    Returns:
        L; R [n, D]; X = RMSNorm_g(f) [n, H]; f / rms(f) [n, H]; all fp32.
    """
    f = batch.rows.features
    unit = f * torch.rsqrt(f.square().mean(-1, keepdim=True) + eps)
    normed = unit * gain.float()
    log_q = torch.log_softmax((normed.to(weight.dtype) @ weight.t()).float().div_(temperature), -1)
    loss = _mean_kl(batch, log_q, temperature)
    scale = (batch.weights * temperature).unsqueeze(-1)
    return loss, log_q.exp_().sub_(batch.rows.teacher).mul_(scale), normed, unit


def gain_gradient(residual: Tensor, weight: Tensor, unit: Tensor) -> Tensor:
    """∂L/∂g [H] of residual R [n, D], weight [D, H] and f / rms(f) [n, H]."""
    return ((residual.to(weight.dtype) @ weight).float() * unit).sum(0)


def served_kl(batch: Batch, head: OutputHead, temperature: float) -> float:
    """L with the head as it is served, at its own precision."""
    logits = head.logits(batch.rows.features.to(head.weight.dtype)).float()
    return _mean_kl(batch, torch.log_softmax(logits / temperature, -1), temperature)


def _mean_kl(batch: Batch, log_q: Tensor, temperature: float) -> float:
    cross = torch.einsum("nd,nd->n", batch.rows.teacher, log_q)
    return temperature**2 * torch.dot(batch.weights, batch.rows.negentropy - cross).item()
