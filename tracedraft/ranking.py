"""The largest of many numbers, equal ones by number, whatever the device."""

from __future__ import annotations

import torch
from torch import Tensor


def top(scores: Tensor, count: int) -> Tensor:
    """Indices [..., count] of the largest of ``scores`` [..., n], at most fp32; descending, equal ones ascending.

    topk alone leaves open which of equal numbers it names, and in bf16 many are equal. So it compares integers:
    the bits of an fp32 number, which sort like it once those of negative ones are turned, and then the index.
    """
    bits = (scores.float() + 0.0).view(torch.int32)  # + 0.0: there are two zeros
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()
    return ((ordered << 32) - torch.arange(scores.shape[-1], device=scores.device)).topk(count).indices
