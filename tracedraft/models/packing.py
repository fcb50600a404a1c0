"""Frozen linears with their weights stored in the order that oneDNN, torch's library for CPU products, reads.

A bf16 product on a CPU otherwise reorders the whole weight on every call, which takes longer than multiplying a few
rows by it. The one order serves every number of rows. Results, with and without bias, were bit-equal to those of
plain weights on a CPU with bf16 instructions, and within rounding where they are emulated.

Where oneDNN has no bf16 products at all (x86 without AVX-512), 8 rows take seven times as long as one. Such a CPU is
served in fp32, whose packed products took 0.3 to 0.9 of the time of plain ones at 6 to 16 rows, and are summed in
another order.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


def _packed(weight: Tensor) -> Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach())


def _product(x: Tensor, packed: Tensor, bias: Tensor | None = None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")


class PackedLinear(nn.Module):
    """``nn.Linear`` for products that nobody differentiates: the packed weight is the only copy.

    ``weight`` and ``state_dict()`` unpack it, into copies that can be written to without any effect. A deep copy is
    a plain, trainable ``nn.Linear``.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None):
        super().__init__()
        self._packed = _packed(weight)
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)

    @property
    def weight(self) -> Tensor:
        """[out, in], unpacked anew at each call."""
        return self._packed.to_dense()

    def forward(self, x: Tensor) -> Tensor:
        return _product(x, self._packed, self.bias)

    def _save_to_state_dict(self, destination: dict[str, Tensor], prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}weight"] = self.weight
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def __deepcopy__(self, memo: dict) -> nn.Linear:
        out, size = self._packed.shape
        plain = nn.Linear(size, out, bias=self.bias is not None, device="meta")
        plain.weight = nn.Parameter(self.weight, requires_grad=False)
        if self.bias is not None:
            plain.bias = nn.Parameter(self.bias.clone(), requires_grad=False)
        return plain


class PackedProduct:
    """Products with a weight that changes in place between many of them: packed anew whenever it has.

    torch counts the changes of a tensor, its views and whatever ``detach`` gave, but not those through ``.data``.
    """

    def __init__(self) -> None:
        self._of: tuple[Tensor, int] | None = None

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        if self._of is None or self._of[0] is not weight or self._of[1] != weight._version:
            self._of, self._weight = (weight, weight._version), _packed(weight)
        return _product(x, self._weight)


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
            setattr(module, name, PackedLinear(child.weight, child.bias))


def can_pack(linear: nn.Linear) -> bool:
    """On a CPU, in the precision that it serves best: of others one gains little and one has no such format."""
    weight = linear.weight
    return (
        weight.device.type == "cpu"
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and weight.dtype == cpu_dtype()
    )


def cpu_dtype() -> torch.dtype:
    """The precision in which this CPU serves fastest: fp32 where oneDNN has no bf16 products, else bf16."""
    supported = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True)
    return torch.bfloat16 if supported() else torch.float32
