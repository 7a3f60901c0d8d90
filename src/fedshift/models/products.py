"""How a network computes: linear layers by oneDNN, where torch's default library is slower; in 16 bits; compiled."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import os
import shutil
from collections.abc import Callable
from typing import Any, Literal, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedshift.errors import UserError
from fedshift.models.instance_methods import method_of, with_method
from fedshift.models.network import Network

M = TypeVar("M", bound=nn.Module)
Products = Literal["default", "onednn"]
Precision = Literal["float32", "bf16", "fp16"]

_HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_COMPILED = 512
"""Most versions of a compiled layer: one for each size of mini-batch, and more where layers are frozen later."""
_LEAST = 2**22
"""Products with fewer multiplications than this are faster in torch: calling oneDNN has a fixed cost."""


def onednn_linear(layer: nn.Linear, inputs: Tensor) -> Tensor:
    """x Wᵀ + b of a linear layer, with large float32 products on the CPU by oneDNN.

    torch uses MKL for them, and MKL uses AVX2 kernels on AMD processors. oneDNN uses AVX-512 if the processor has it.
    Results, gradients and second gradients are equal up to the order of summation.

    ``layer``: has W and b. ``inputs``: x, (n, in_features).
    """
    matrix = inputs.dim() == 2 and inputs.device.type == "cpu" and inputs.dtype == torch.float32
    if not matrix or len(inputs) * layer.weight.numel() < _LEAST:
        return F.linear(inputs, layer.weight, layer.bias)
    product: Tensor = _Product.apply(inputs, layer.weight)
    return product if layer.bias is None else product + layer.bias


def with_products(module: M, by: Products) -> M:
    """Choose the library for the products of a module's linear layers.

    ``module``: changed in place: with ``"onednn"`` its linear layers compute as `onednn_linear`. Weights and their
    names stay. Returns ``module`` itself. Raises UserError: torch was built without oneDNN.
    """
    if by == "default":
        return module
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        raise UserError("training.matrix_products: this torch has no oneDNN products; write default")
    for layer in module.modules():
        if type(layer) is nn.Linear:
            with_method(layer, "forward", onednn_linear)
    return module


def with_precision(module: M, precision: Precision) -> M:
    """Choose the precision of a module's products and convolutions.

    ``module``: changed in place: with ``"bf16"`` or ``"fp16"`` it runs under `torch.autocast`, a network's features and
    classifier each. What it returns is float32, so equations of methods are computed as before. Weights and their names
    stay float32. ``precision``: of the products; sums are float32. Returns ``module`` itself.
    """
    if precision != "float32":
        for part in _parts(module):
            with_method(part, "forward", _in_halves(method_of(part, "forward"), _HALVES[precision]))
    return module


def with_compiler(module: M) -> M:
    """Let torch's compiler make the forward and backward pass of a module while it trains (`torch.compile`).

    Each size of mini-batch is compiled for itself, so that results do not depend on what a process computed before.

    ``module``: changed in place, a network's features and classifier each. Weights and their names stay. Returns
    ``module`` itself.
    """
    for part in _parts(module):
        with_method(part, "forward", _compile(method_of(part, "forward")))
    return module


def _parts(module: nn.Module) -> tuple[nn.Module, ...]:
    return (module.features, module.classifier) if isinstance(module, Network) else (module,)


@functools.cache
def _in_halves(plain: Callable[..., Tensor], half: torch.dtype) -> Callable[..., Tensor]:
    """The same forward pass in 16 bits."""

    def forward(module: nn.Module, inputs: Tensor, *others: Any) -> Tensor:
        with torch.autocast(inputs.device.type, dtype=half):
            result = plain(module, inputs, *others)
        return result.float()

    return forward


@functools.cache
def _compile(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The same forward pass, compiled while a module trains; all copies share what was compiled."""
    compiler: Any = torch.compile
    # Without a limit of its own torch would after eight sizes compute some without the compiler, and others with it.
    limit = {"recompile_limit": _COMPILED} if "recompile_limit" in inspect.signature(compiler).parameters else {}
    fast = compiler(plain, dynamic=False, **limit)

    def forward(module: nn.Module, inputs: Tensor, *others: Any) -> Tensor:
        compiled = module.training and torch.is_grad_enabled()
        result: Tensor = (fast if compiled else plain)(module, inputs, *others)
        return result

    return forward


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
        capabilities = torch.cpu.get_capabilities()
        return any(capabilities.get(unit) for unit in ("avx512_bf16", "amx_bf16", "bf16"))
    return False


class _Product(torch.autograd.Function):
    """a bᵀ for a (n, d) and b (m, d)."""

    @staticmethod
    def forward(a: Tensor, b: Tensor) -> Tensor:
        direct = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
        if direct is None:  # a torch without this private call: the same bits by public calls, which copy
            return F.linear(a.to_mkldnn(), b.to_mkldnn()).to_dense()
        product: Tensor = direct(a, b, None, "none", [], "")
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
