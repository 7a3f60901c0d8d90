"""A linear layer on wide inputs that are mostly zero, such as bags of words."""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
from torch import Tensor, nn

WIDE = 4096
"""From this many inputs on, skipping zeros is faster than multiplying by them."""
_DENSE = 0.1
"""Above this share of nonzero entries, the dense product is faster."""


def linear(inputs: int, outputs: int) -> nn.Linear | WideLinear:
    """A linear layer: `WideLinear` from 4,096 inputs on, else `torch.nn.Linear`."""
    return WideLinear(inputs, outputs) if inputs >= WIDE else nn.Linear(inputs, outputs)


class WideLinear(nn.Module):
    """x W + b for x (n, inputs), skipping the zeros of x. Weights start as those of `torch.nn.Linear`.

    ``weight`` is (inputs, outputs), the transpose of torch's: the weights of one input lie side by side in memory and
    are read and written together. The layer computes the plain product on an accelerator, for inputs that need a
    gradient, and for inputs with few zeros. Both products are equal up to the order of summation.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.in_features, self.out_features = inputs, outputs
        bound = 1 / math.sqrt(inputs)
        self.weight = nn.Parameter(torch.empty(outputs, inputs).uniform_(-bound, bound).t().contiguous())
        self.bias = nn.Parameter(torch.empty(outputs).uniform_(-bound, bound))

    def forward(self, inputs: Tensor) -> Tensor:
        sparse = (
            inputs.device.type == "cpu"
            and not inputs.requires_grad
            and torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]
            and int(torch.count_nonzero(inputs)) < _DENSE * inputs.numel()
        )
        if not sparse:
            return torch.addmm(self.bias, inputs, self.weight)
        product: Tensor = _SparseProduct.apply(inputs, self.weight)
        return product + self.bias


class _SparseProduct(torch.autograd.Function):
    """x W for x (n, d) with few entries and W (d, m); the gradient of W is xᵀ g."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(inputs)
        return _product(inputs, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        (inputs,) = ctx.saved_tensors
        return None, _SparseProduct.apply(inputs.t(), gradient)


def _product(sparse: Tensor, dense: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse CSR tensor support")
        rows = sparse.to_sparse_csr()
    out = dense.new_empty(sparse.shape[0], dense.shape[1])
    # In place: torch's sparse.mm first fills and copies a matrix of zeros, which for a gradient takes longer than the
    # product itself.
    return torch.addmm(out, rows, dense.contiguous(), beta=0, out=out)
