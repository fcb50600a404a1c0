"""What a draft's logits are held against the target's distribution by, with gradients in closed form.

Each takes logits [n, D] and a teacher's probabilities [n, D], fp32, and gives the loss [n] and its gradient with
respect to the logits [n, D]. With q = softmax(logits) and p the teacher.
"""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor

from tracedraft.interfaces import Objective

ROWS, CELLS = 256, 2**22  # of logits at a time: a few MB in fp32 stay within a CPU's cache
TINY = 1e-30  # below any probability whose logarithm matters


def cross_entropy(logits: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
    """-Σ p log q: KL(p ‖ q) but for the teacher's entropy, which no draft can change."""
    shifted = logits - logits.amax(dim=1, keepdim=True)  # each pass over tens of thousands of tokens counts
    said = torch.linalg.vecdot(teacher, shifted)
    unnormalised = shifted.exp_()
    mass = unnormalised.sum(dim=1, keepdim=True)
    return mass[:, 0].log() - said, (unnormalised / mass).sub_(teacher)


def forward_kl(logits: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
    """KL(p ‖ q)."""
    loss, gradient = cross_entropy(logits, teacher)
    return loss - torch.special.entr(teacher).sum(dim=1), gradient


def reverse_kl(logits: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
    """KL(q ‖ p)."""
    log_q = logits.log_softmax(dim=1)
    q, ratio = log_q.exp(), log_q - teacher.clamp_min(TINY).log()
    loss = (q * ratio).sum(dim=1, keepdim=True)
    return loss[:, 0], q * (ratio - loss)


def jsd(logits: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
    """Jensen-Shannon divergence, ½KL(p ‖ m) + ½KL(q ‖ m) with m = (p + q)/2."""
    q = logits.softmax(dim=1)
    log_m = ((q + teacher) / 2).clamp_min(TINY).log()
    of_q = q.clamp_min(TINY).log() - log_m
    of_p = teacher.clamp_min(TINY).log() - log_m
    mean = (q * of_q).sum(dim=1, keepdim=True)
    loss = ((teacher * of_p).sum(dim=1) + mean[:, 0]) / 2
    return loss, q * (of_q - mean) / 2


def acceptance(logits: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
    """-log Σ min(p, q), what rejection sampling accepts ("LK loss")."""
    q = logits.softmax(dim=1)
    accepted = torch.minimum(q, teacher).sum(dim=1, keepdim=True).clamp_min(TINY)
    kept = q * (q < teacher)
    return -accepted[:, 0].log(), (q * kept.sum(dim=1, keepdim=True) - kept) / accepted


class HeadLoss(torch.autograd.Function):
    """Σ counts · objective(x Wᵀ, teacher), its gradient made on the way so that no [n, D] tensor in fp32 is kept.

    The products run at autocast's precision where it is on. A second output, without gradient: each row's share [n].
    ``of`` [n], where several rows have one teacher: which of its rows belongs to each.
    """

    @staticmethod
    def forward(
        ctx,
        x: Tensor,
        weight: Tensor,
        teacher: Tensor,
        counts: Tensor,
        objective: Objective,
        of: Tensor | None = None,
    ):
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        ctx.dtypes = x.dtype, weight.dtype
        with torch.autocast(kind, enabled=False):
            x, weight = x.to(dtype), weight.to(dtype)
            gradient = x.new_empty(len(x), len(weight))
            losses = []
            rows = max(1, min(ROWS, CELLS // len(weight)))
            taught = teacher if of is None else of
            for some, share, own, into in zip(
                *(each.split(rows) for each in (x, counts, taught, gradient)), strict=True
            ):
                loss, slope = objective((some @ weight.T).float(), (own if of is None else teacher[own]).float())
                losses.append(share * loss)
                into.copy_(slope.mul_(share[:, None]))
            ctx.save_for_backward(gradient @ weight, gradient.T @ x)
        shares = torch.cat(losses)
        ctx.mark_non_differentiable(shares)
        return shares.sum(), shares

    @staticmethod
    def backward(ctx, scale: Tensor, *_):  # pyright: ignore[reportIncompatibleMethodOverride]
        of_x, of_weight = (g.to(kind).mul_(scale) for g, kind in zip(ctx.saved_tensors, ctx.dtypes, strict=True))
        return of_x, of_weight, None, None, None, None


def products_at(dtype: torch.dtype, device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Products of fp32 masters at the precision that they will be served at, where that is a low one."""
    return contextlib.nullcontext() if dtype is torch.float32 else torch.autocast(device.type, dtype)
