"""Frozen linears with their weights stored in the order that oneDNN, torch's library for CPU products, reads.

A bf16 product on a CPU otherwise reorders the whole weight on every call, which takes longer than multiplying a few
rows by it. The one order serves every number of rows. Results were bit-equal to those of plain weights on a CPU with
bf16 instructions, and within rounding where they are emulated.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class PackedLinear(nn.Module):
    """``nn.Linear`` without bias for products that nobody differentiates: the packed weight is the only copy.

    ``weight`` and ``state_dict()`` unpack it, into copies that can be written to without any effect. A deep copy is
    a plain, trainable ``nn.Linear``.
    """

    def __init__(self, weight: Tensor):
        super().__init__()
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach())

    @property
    def weight(self) -> Tensor:
        """[out, in], unpacked anew at each call."""
        return self._packed.to_dense()

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, None, "none", [], "")

    def _save_to_state_dict(self, destination: dict[str, Tensor], prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}weight"] = self.weight

    def __deepcopy__(self, memo: dict) -> nn.Linear:
        out, size = self._packed.shape
        plain = nn.Linear(size, out, bias=False, device="meta")
        plain.weight = nn.Parameter(self.weight, requires_grad=False)
        return plain


def pack(module: nn.Module, keep: tuple[str, ...] = ()) -> None:
    """Pack every linear inside ``module``, in place, where that can be done; elsewhere it stays as it is.

    For serving only: packed weights are no parameters.

    Args:
        keep: names of linears that stay plain since they will change.
    """
    for name, child in module.named_children():
        if not isinstance(child, nn.Linear):
            pack(child, keep)
        elif name not in keep and can_pack(child):
            setattr(module, name, PackedLinear(child.weight))


def can_pack(linear: nn.Linear) -> bool:
    """In bf16 on a CPU with the instructions for it: fp32 gains little, and elsewhere there is no such format."""
    weight = linear.weight
    return (
        linear.bias is None
        and weight.device.type == "cpu"
        and weight.dtype == torch.bfloat16
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )
