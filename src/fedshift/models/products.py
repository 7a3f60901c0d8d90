"""Matrix products of linear layers by oneDNN, for processors on which torch's default library is slower."""

from __future__ import annotations

from typing import Any, Literal, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedshift.errors import UserError

M = TypeVar("M", bound=nn.Module)
Products = Literal["default", "onednn"]

_LEAST = 2**22
"""Products with fewer multiplications than this are faster in torch: calling oneDNN has a fixed cost."""


class OneDnnLinear(nn.Linear):
    """`torch.nn.Linear` that computes large float32 products on the CPU with oneDNN.

    torch uses MKL for them, and MKL uses AVX2 kernels on AMD processors. oneDNN uses AVX-512 if the processor has it.
    Results, gradients and second gradients are equal up to the order of summation.
    """

    def forward(self, inputs: Tensor) -> Tensor:
        """x Wᵀ + b for x (n, in_features)."""
        matrix = inputs.dim() == 2 and inputs.device.type == "cpu" and inputs.dtype == torch.float32
        if not matrix or len(inputs) * self.weight.numel() < _LEAST:
            return F.linear(inputs, self.weight, self.bias)
        product: Tensor = _Product.apply(inputs, self.weight)
        return product if self.bias is None else product + self.bias


def with_products(module: M, by: Products) -> M:
    """Choose the library for the products of a module's linear layers.

    Args:
        module: changed in place: with ``"onednn"`` its linear layers become `OneDnnLinear`. Weights and their names
            stay.
        by: the library.

    Returns:
        ``module`` itself.

    Raises:
        UserError: torch was built without oneDNN, or no longer has the call.
    """
    if by == "default":
        return module
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):  # type: ignore[no-untyped-call]
        raise UserError("training.matrix_products: this torch has no oneDNN products; write default")
    for layer in module.modules():
        if type(layer) is nn.Linear:
            layer.__class__ = OneDnnLinear
    return module


class _Product(torch.autograd.Function):
    """a bᵀ for a (n, d) and b (m, d)."""

    @staticmethod
    def forward(a: Tensor, b: Tensor) -> Tensor:
        product: Tensor = torch.ops.mkldnn._linear_pointwise(a, b, None, "none", [], "")
        return product

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        a, b = ctx.saved_tensors
        return (
            _Product.apply(gradient, b.t()) if ctx.needs_input_grad[0] else None,
            _Product.apply(gradient.t(), a.t()) if ctx.needs_input_grad[1] else None,
        )
