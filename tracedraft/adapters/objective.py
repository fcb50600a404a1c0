"""The loss of TraceDraft and its gradient in closed form.

Shapes: ``n`` positions, ``H`` hidden size, ``V`` target vocabulary, ``D`` draft vocabulary. With f_i the
pre-norm feature of position i, z_i its teacher's logits over the draft vocabulary and c_i its weight:

    p_i = softmax(z_i / T),  x_i = g · f_i / rms(f_i),  q_i = softmax(W x_i / T)
    L(g, W) = Σ_i c_i · T² · KL(p_i ‖ q_i)
    R_i = q_i - p_i,  ∂L/∂W = Σ_i R_iᵀ (c_i T x_i),  ∂L/∂g = Σ_i c_i T · (R W)_i · f_i / rms(f_i)

L is the objective of the published TraceDraft code (``T²·KL(p_T‖q_θ)`` on cached features); c_i T R_i is its
derivative with respect to the logits, so autograd and a [D, H] gradient are not needed.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tracedraft.types import OutputHead

Norm = Callable[[Tensor, Tensor, float], tuple[Tensor, Tensor]]  # rms_norm's
KlParts = Callable[[Tensor, Tensor, float, torch.dtype], tuple[Tensor, Tensor]]  # kl_parts'

PADDING = 8  # batches have a multiple of this many positions
ROUNDED = 512  # and steps that leave out rows of the head a multiple of this many rows


@dataclass(frozen=True)
class Rows:
    """Supervised positions: features [n, H], teacher's probabilities [n, D], Σ p log p [n], all fp32; ids [n] int64,
    by which a position is known at later updates."""

    features: Tensor
    teacher: Tensor
    negentropy: Tensor
    ids: Tensor

    def __len__(self) -> int:
        return self.features.shape[0]

    def take(self, index: Tensor) -> Rows:
        """The positions ``index`` [m]."""
        return Rows(*(x.index_select(0, index) for x in self._parts()))

    def _parts(self) -> tuple[Tensor, ...]:
        return self.features, self.teacher, self.negentropy, self.ids

    @staticmethod
    def blank(count: int, head: OutputHead) -> Rows:
        """Room for ``count`` positions of a draft with that head, all zero."""
        size, hidden = head.weight.shape
        like = torch.zeros(0, dtype=torch.float32, device=head.weight.device)
        ids = torch.zeros(count, dtype=torch.long, device=like.device)
        return Rows(like.new_zeros(count, hidden), like.new_zeros(count, size), like.new_zeros(count), ids)

    @staticmethod
    def cat(pieces: list[Rows]) -> Rows:
        return Rows(*(torch.cat(parts) for parts in zip(*(rows._parts() for rows in pieces), strict=True)))


@dataclass(frozen=True)
class Batch:
    """Rows and their weights c [n] in the loss, which sum to 1."""

    rows: Rows
    weights: Tensor

    def scale(self, temperature: float) -> Tensor:
        """c·T [n, 1]."""
        return (self.weights * temperature).unsqueeze(-1)


@dataclass(frozen=True)
class Factors:
    """A gradient leftᵀ·right [r, H], kept as left [n, r] and right [n, H]; right is fp32.

    In bf16 left has relative errors of 0.2 %, and one that came from bf16 logits had 1 % before it was rounded.

    Attributes:
        norm: Frobenius norm of the whole gradient.
        rows: [r] int64 ascending, the rows of the trained tensor that these are; None: all.
    """

    left: Tensor
    right: Tensor
    norm: float
    rows: Tensor | None = None


def factors(left: Tensor, right: Tensor, skip: float) -> Factors:
    """The gradient leftᵀ·right, without rows that hold together at most the share ``skip`` of its squared norm.

    To first order a step lowers the loss by lr times the squared norm, so it loses that share of its effect.
    """
    # ‖Σ_i L_ir x_i‖² = Σ_i L_ir (K L)_ir with K = X Xᵀ: no product of the size of the gradient.
    squares = (left * ((right @ right.t()).to(left.dtype) @ left)).sum(0, dtype=torch.float32)
    # Rounding can leave a vanishing sum below zero; NaN must stay NaN, and clamping keeps it.
    total = squares.sum().clamp_min(0).item()
    norm = math.sqrt(total)
    if not skip or not math.isfinite(total):
        return Factors(left, right, norm)
    count = int((squares > skip * total / len(squares)).sum())
    count += -count % ROUNDED  # few shapes of products; see PADDING
    if count > len(squares) // 2:  # a sweep over all rows is then as fast
        return Factors(left, right, norm)
    rows = squares.topk(count, sorted=False).indices.sort().values
    return Factors(left.index_select(1, rows), right, norm, rows)


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
    z = logits.to(torch.float32, copy=True)  # also for argmax, which is six times slower in bf16 on a CPU
    best = z.argmax(-1, keepdim=True)
    at = torch.searchsorted(vocab, best).clamp_max(len(vocab) - 1)
    carries = (vocab[at] == best).squeeze(-1)
    top = z.gather(1, best)
    inside = z.index_select(1, vocab).sub_(top)
    whole = z.sub_(top).exp_().sum(-1)  # the only exponentials over the whole vocabulary
    mass = inside.exp().sum(-1) / whole
    log_p = torch.log_softmax(inside.div_(temperature), -1)
    p = log_p.exp()
    return p, torch.linalg.vecdot(p, log_p), carries, mass


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
    if excess := sum(len(rows) for rows, _ in present) % PADDING:
        # Copies of a row, of no weight: products of every new shape are compiled anew on a CPU, for milliseconds.
        rows = present[0][0]
        present.append((rows.take(torch.zeros(PADDING - excess, dtype=torch.long, device=rows.features.device)), 0.0))
    weights = [rows.features.new_full((len(rows),), weight / total / len(rows)) for rows, weight in present]
    if len(present) == 1:
        return Batch(present[0][0], weights[0])
    return Batch(Rows.cat([rows for rows, _ in present]), torch.cat(weights))


def kl_gradient(
    batch: Batch,
    gain: Tensor,
    eps: float,
    temperature: float,
    project: Callable[[Tensor], Tensor],
    dtype: torch.dtype,
) -> tuple[float, Tensor, Tensor, Tensor]:
    """Loss and the parts of its gradient.

    Args:
        batch: n positions.
        gain: [H] RMSNorm gain.
        eps: RMSNorm epsilon.
        temperature: T.
        project: the head, [n, H] → [n, D], at its own precision.
        dtype: of R, see ``residual_dtype``.

    Returns:
        L; R [n, D]; x [n, H]; f / rms(f) [n, H]; fp32 but for R.
    """
    norm, parts = operators(batch.rows.features.device)
    unit, normed = norm(batch.rows.features, gain, eps)
    cross, residual = parts(project(normed), batch.rows.teacher, temperature, dtype)
    return _mean_kl(batch, cross, temperature), residual, normed, unit


def residual_dtype(head: OutputHead) -> torch.dtype:
    """That of a head in bf16, whose products take a third of the time then; fp16 has no room for small entries."""
    return torch.bfloat16 if head.weight.dtype is torch.bfloat16 else torch.float32


@functools.cache
def operators(device: torch.device) -> tuple[Norm, KlParts]:
    """``rms_norm`` and ``kl_parts``; on a GPU as kernels, where they can be compiled."""
    if device.type == "cuda":
        try:
            from tracedraft.adapters import fused

            fused.rms_norm(torch.ones(1, 8, device=device), torch.ones(8, device=device), 1e-5)
        except Exception as error:  # no Triton (as on Windows), no C compiler, too old a GPU: each raises its own
            warnings.warn(f"updates go without kernels of their own: {type(error).__name__}: {error}", stacklevel=2)
        else:
            return fused.rms_norm, fused.kl_parts
    return rms_norm, kl_parts


def warm_up(head: OutputHead, temperature: float) -> None:
    """Let a GPU's kernels be compiled for a head before a response waits for it, at its precision and at masters'."""
    if head.weight.device.type != "cuda":
        return
    norm, parts = operators(head.weight.device)
    rows = Rows.blank(PADDING, head)
    for dtype in (head.weight.dtype, torch.float32):
        norm(rows.features, head.norm.to(dtype), head.eps)
        parts(rows.teacher.to(dtype, copy=True), rows.teacher, temperature, residual_dtype(head))


def rms_norm(features: Tensor, gain: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """f / rms(f) and x, [n, H] fp32, of f [n, H] fp32 and g [H]."""
    unit = features * torch.rsqrt(features.square().mean(-1, keepdim=True) + eps)
    return unit, unit * gain.float()


def kl_parts(logits: Tensor, teacher: Tensor, temperature: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Σ p log q [n] fp32, and q - p [n, D] in ``dtype``, of the teacher's p [n, D] fp32 and logits [n, D], which are
    overwritten where they are fp32."""
    z = logits.float().div_(temperature)
    z -= z.amax(-1, keepdim=True)
    q = torch.softmax(z, -1)
    # log q from z and the likeliest token, whose z is 0 and whose q can't vanish: a logarithm of every entry would
    # cost as much again.
    cross = torch.linalg.vecdot(teacher, z) + q.amax(-1).log()
    return cross, q.sub_(teacher).to(dtype)


def gain_gradient(residual: Tensor, weight: Tensor, unit: Tensor) -> Tensor:
    """∂L/∂g [H] of R [n, D], W [D, H] and c·T·f / rms(f) [n, H]; the product is made at W's own precision."""
    # Two halves of the long sum side by side: a CPU takes a quarter less time for them than for the whole.
    count = 2 if len(weight) % 2 == 0 else 1
    parts = residual.to(weight.dtype).unflatten(1, (count, -1)).transpose(0, 1) @ weight.unflatten(0, (count, -1))
    return (parts.float().sum(0) * unit).sum(0)


def served_kl(batch: Batch, head: OutputHead, temperature: float) -> float:
    """L with the head as it is served, at its own precision."""
    z = head.logits(batch.rows.features.to(head.weight.dtype)).float() / temperature
    return _mean_kl(batch, torch.linalg.vecdot(batch.rows.teacher, torch.log_softmax(z, -1)), temperature)


def _mean_kl(batch: Batch, cross: Tensor, temperature: float) -> float:
    """L from Σ p log q [n]."""
    return temperature**2 * torch.dot(batch.weights, batch.rows.negentropy - cross).item()
