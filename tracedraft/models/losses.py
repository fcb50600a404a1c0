"""What a draft's logits are held against the target's distribution by, with gradients in closed form.

Each takes logits [n, D] and a teacher's probabilities [n, D], fp32, and gives the loss [n] and its gradient with
respect to the logits [n, D]. With q = softmax(logits) and p the teacher.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

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


@dataclass(frozen=True)
class Slopes:
    """An objective at n rows of a head of D tokens.

    Attributes:
        shares: [n] each row's weighted loss.
        slope: [n, D] derivative of their sum with respect to the logits, at the products' precision.
        choices: [n] int64 in [0, D), each row's likeliest token; None where it was not asked for.
    """

    shares: Tensor
    slope: Tensor
    choices: Tensor | None


@torch.no_grad()
def slopes(
    x: Tensor,
    weight: Tensor,
    teacher: Tensor,
    counts: Tensor,
    objective: Objective,
    of: Tensor | None = None,
    choose: bool = False,
) -> Slopes:
    """The weighted ``objective`` of the logits x Wᵀ and its slope, a few rows at a time so that no [n, D] tensor in
    fp32 is kept; the products run at :func:`product_dtype`.

    Args:
        x: [n, H]. weight: [D, H]. counts: [n] weights.
        teacher: [n, D], or [m, D] with ``of``.
        of: [n], where several rows have one teacher: which of the m is each one's.
        choose: give each row's likeliest token too.
    """
    dtype, kind = product_dtype(x), x.device.type
    with torch.autocast(kind, enabled=False):
        x, weight = x.to(dtype), weight.to(dtype)
        slope = x.new_empty(len(x), len(weight))
        losses, choices = [], []
        rows = max(1, min(ROWS, CELLS // len(weight)))
        taught = teacher if of is None else of
        for some, share, own, into in zip(*(each.split(rows) for each in (x, counts, taught, slope)), strict=True):
            logits = (some @ weight.T).float()
            if choose:
                choices.append(logits.max(dim=1).indices)  # argmax itself is twice as slow on a CPU
            loss, steep = objective(logits, (own if of is None else teacher[own]).float())
            losses.append(share * loss)
            into.copy_(steep.mul_(share[:, None]))
    return Slopes(torch.cat(losses), slope, torch.cat(choices) if choose else None)


def product_dtype(x: Tensor) -> torch.dtype:
    """Autocast's precision where it is on, else that of ``x``."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


class AlongSlopes(torch.autograd.Function):
    """The sum of losses [n] whose slope [n, D] with respect to the logits x Wᵀ is known.

    Both products are made on the way, so that the slope is not kept.
    """

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, slope: Tensor, shares: Tensor):
        ctx.dtypes = x.dtype, weight.dtype
        with torch.autocast(x.device.type, enabled=False):
            ctx.save_for_backward(slope @ weight.to(slope.dtype), slope.T @ x.to(slope.dtype))
        return shares.sum()

    @staticmethod
    def backward(ctx, scale: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        of_x, of_weight = (g.to(kind).mul_(scale) for g, kind in zip(ctx.saved_tensors, ctx.dtypes, strict=True))
        return of_x, of_weight, None, None


def head_loss(x: Tensor, weight: Tensor, teacher: Tensor, counts: Tensor, objective: Objective) -> Tensor:
    """Σ counts · objective(x Wᵀ, teacher), with gradient; arguments as of :func:`slopes`."""
    found = slopes(x, weight, teacher, counts, objective)
    return AlongSlopes.apply(x, weight, found.slope, found.shares)


def products_at(dtype: torch.dtype, device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Products of fp32 masters at the precision that they will be served at, where that is a low one."""
    return contextlib.nullcontext() if dtype is torch.float32 else torch.autocast(device.type, dtype)
