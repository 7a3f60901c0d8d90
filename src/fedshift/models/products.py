"""How a network computes: linear layers by oneDNN, where torch's default library is slower; in 16 bits; compiled."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import os
import shutil
from typing import Any, Literal, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedshift.errors import UserError
from fedshift.models.network import Network

M = TypeVar("M", bound=nn.Module)
Products = Literal["default", "onednn"]
Precision = Literal["float32", "bf16", "fp16"]

_HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_COMPILED = 512
"""Most versions of a compiled layer: one for each size of mini-batch, and more where layers are frozen later."""
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


def with_precision(module: M, precision: Precision) -> M:
    """Choose the precision of a module's products and convolutions.

    Args:
        module: changed in place: with ``"bf16"`` or ``"fp16"`` it runs under `torch.autocast`, a network's features and
            classifier each. What it returns is float32, so equations of methods are computed as before. Weights and
            their names stay float32.
        precision: of the products; sums are float32.

    Returns:
        ``module`` itself.
    """
    if precision != "float32":
        for part in _parts(module):
            kind: Any = type(part)
            part.__class__ = _in_halves(kind, _HALVES[precision])
    return module


def with_compiler(module: M) -> M:
    """Let torch's compiler make the forward and backward pass of a module while it trains (`torch.compile`).

    Each size of mini-batch is compiled for itself, so that results do not depend on what a process computed before.

    Args:
        module: changed in place, a network's features and classifier each. Weights and their names stay.

    Returns:
        ``module`` itself.
    """
    for part in _parts(module):
        kind: Any = type(part)
        part.__class__ = _compiled(kind)
    return module


def _parts(module: nn.Module) -> tuple[nn.Module, ...]:
    return (module.features, module.classifier) if isinstance(module, Network) else (module,)


@functools.cache
def _in_halves(kind: Any, half: torch.dtype) -> Any:
    """The class of the same layers in 16 bits. A class, since a function in the module would stay with it in copies."""

    def forward(self: nn.Module, inputs: Tensor, *others: Any) -> Tensor:
        with torch.autocast(inputs.device.type, dtype=half):
            found: Tensor = kind.forward(self, inputs, *others)
        return found.float()

    return type(kind.__name__, (kind,), {"forward": forward})


@functools.cache
def _compiled(kind: Any) -> Any:
    """The class of the same layers that is compiled while it trains; all copies share what was compiled."""
    compiler: Any = torch.compile
    # Without a limit of its own torch would after eight sizes compute some without the compiler, and others with it.
    limit = {"recompile_limit": _COMPILED} if "recompile_limit" in inspect.signature(compiler).parameters else {}
    fast = compiler(kind.forward, dynamic=False, **limit)

    def forward(self: nn.Module, inputs: Tensor, *others: Any) -> Tensor:
        compiled = self.training and torch.is_grad_enabled()
        found: Tensor = (fast if compiled else kind.forward)(self, inputs, *others)
        return found

    return type(kind.__name__, (kind,), {"forward": forward})


def can_compile(device: str) -> bool:
    """Whether what torch's compiler needs is here: Triton for a card, else a C++ compiler.

    A file is enough: that it works shows in the first mini-batch.
    """
    if device.startswith("cuda"):
        return importlib.util.find_spec("triton") is not None
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "clang++", "cl"]
    return any(shutil.which(name) is not None for name in names)


def has_bf16_units(device: str) -> bool:
    """Whether a device multiplies bf16 faster than float32."""
    if device.startswith("cuda"):
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    if device == "cpu":
        found = torch.cpu.get_capabilities()
        return any(found.get(unit) for unit in ("avx512_bf16", "amx_bf16", "bf16"))
    return False


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
