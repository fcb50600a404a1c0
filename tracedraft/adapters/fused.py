"""What surrounds the head's product in an update's gradient, one Triton kernel on each side of it.

Launched one by one, ``objective``'s operators are some twenty, and those after the product each pass over [n, D]
numbers. Here a kernel reads a position's feature once, and another its logits twice and its teacher once. The product
itself stays the library's: at a window of positions it is bound by reading the head, which no fusion spares.

This has never run on a GPU: it was written where there was none. What tests show is that Triton's interpreter gets
from these kernels what ``objective``'s operators give, and that its compiler takes them for CUDA.
"""

from __future__ import annotations

from typing import Any

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

BLOCK = 4096  # logits at a time: 16 a thread in 8 warps
WARPS = 8


@triton.jit
def rms_norm_kernel(features, gain, unit, normed, eps, HIDDEN: tl.constexpr, BLOCK: tl.constexpr):
    """A row of ``rms_norm`` a program."""
    at = tl.arange(0, BLOCK)
    inside = at < HIDDEN
    row = tl.program_id(0).to(tl.int64) * HIDDEN + at
    f = tl.load(features + row, mask=inside, other=0.0)
    u = f * tl.rsqrt(tl.sum(f * f) / HIDDEN + eps)
    tl.store(unit + row, u, mask=inside)
    tl.store(normed + row, u * tl.load(gain + at, mask=inside, other=0.0).to(tl.float32), mask=inside)


@triton.jit
def kl_kernel(logits, teacher, cross, residual, temperature, DRAFTED: tl.constexpr, BLOCK: tl.constexpr):
    """A row of ``kl_parts`` a program: the mass of exp(z/T) while its largest z/T is found, then what is written."""
    row = tl.program_id(0).to(tl.int64)
    logits, teacher, residual = logits + row * DRAFTED, teacher + row * DRAFTED, residual + row * DRAFTED
    at = tl.arange(0, BLOCK)
    most, mass = -float("inf"), 0.0
    for start in range(0, DRAFTED, BLOCK):
        z = tl.load(logits + start + at, mask=start + at < DRAFTED, other=-float("inf")).to(tl.float32) / temperature
        larger = tl.maximum(most, tl.max(z))
        mass = mass * tl.exp(most - larger) + tl.sum(tl.exp(z - larger))
        most = larger
    said = 0.0
    for start in range(0, DRAFTED, BLOCK):
        inside = start + at < DRAFTED
        z = tl.load(logits + start + at, mask=inside, other=0.0).to(tl.float32) / temperature - most
        p = tl.load(teacher + start + at, mask=inside, other=0.0)
        said += tl.sum(p * z)  # pyright: ignore[reportOperatorIssue]
        tl.store(residual + start + at, (tl.exp(z) / mass - p).to(residual.dtype.element_ty), mask=inside)
    tl.store(cross + row, said - tl.log(mass))


def rms_norm(features: Tensor, gain: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """As ``objective.rms_norm``: [n, H] of f [n, H] fp32 and g [H]."""
    features = features.contiguous()
    unit, normed = torch.empty_like(features), torch.empty_like(features)
    hidden = features.shape[1]
    block = triton.next_power_of_2(hidden)
    _launch(rms_norm_kernel, features, gain.contiguous(), unit, normed, eps, HIDDEN=hidden, BLOCK=block)
    return unit, normed


def kl_parts(logits: Tensor, teacher: Tensor, temperature: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """As ``objective.kl_parts``, of logits and teacher [n, D], but that the logits stay as they are."""
    logits, teacher = logits.contiguous(), teacher.contiguous()
    cross, residual = teacher.new_empty(len(teacher)), torch.empty_like(teacher, dtype=dtype)
    _launch(kl_kernel, logits, teacher, cross, residual, temperature, DRAFTED=logits.shape[1], BLOCK=BLOCK)
    return cross, residual


def _launch(kernel: Any, rows: Tensor, *rest: Tensor | float, **constants: int) -> None:
    """A program for each of ``rows``, on their device, which need not be the current one."""
    with torch.cuda.device_of(rows):
        kernel[(len(rows),)](rows, *rest, num_warps=WARPS, **constants)
