"""Maximum mean discrepancy with several Gaussian kernels (Gretton et al., JMLR 2012; CSAC, equation 6)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fedshift.errors import UserError

MULTIPLIERS = (1 / 27, 1 / 9, 1 / 3, 1.0, 3.0)
"""a_u: CSAC's five bandwidths as multiples of the mean squared distance."""

Estimator = Literal["unbiased", "biased"]


def multi_kernel_mmd(
    source: Tensor,
    target: Tensor,
    multipliers: Sequence[float] = MULTIPLIERS,
    estimator: Estimator = "unbiased",
    constant: bool = False,
    bandwidth: Tensor | None = None,
) -> Tensor:
    """Squared MMD between two batches, a scalar: `cross_multi_kernel_mmd` of two single layers.

    Args:
        source: (n, f).
        target: (n, f).
        multipliers: as in `cross_multi_kernel_mmd`.
        estimator: as in `cross_multi_kernel_mmd`.
        constant: as in `cross_multi_kernel_mmd`.
        bandwidth: a scalar; as in `cross_multi_kernel_mmd`.

    Raises:
        UserError: other shapes, or as in `cross_multi_kernel_mmd`.

    Example:
        >>> source, target = torch.tensor([[0.0], [2.0]]), torch.tensor([[1.0], [5.0]])
        >>> multi_kernel_mmd(source, target, estimator="biased")
        tensor(2.1099)
    """
    if source.dim() != 2 or target.dim() != 2:
        raise UserError(f"MMD needs two batches (n, f), found {tuple(source.shape)} and {tuple(target.shape)}")
    width = None if bandwidth is None else bandwidth.reshape(1, 1)
    return cross_multi_kernel_mmd(source[None], target[None], multipliers, estimator, constant, width)[0, 0]


def cross_multi_kernel_mmd(
    source: Tensor,
    target: Tensor,
    multipliers: Sequence[float] = MULTIPLIERS,
    estimator: Estimator = "unbiased",
    constant: bool = False,
    bandwidth: Tensor | None = None,
) -> Tensor:
    """Squared MMD of every layer of ``source`` with every layer of ``target`` (CSAC, equation 6).

    The kernels ``k_u(a, b) = exp(−‖a−b‖² / (2σ_u²))`` with ``σ_u² = a_u · bandwidth`` are summed with weight 1.

    The result equals that of pairwise calls. But each layer's own distances are computed once, and those between layers
    in one matrix product. First derivatives only. Half precision is computed in float32.

    Args:
        source: (R, n, f).
        target: (S, n, f).
        multipliers: a_u, positive.
        estimator: ``"unbiased"``, as in the released code, is
            ``1/(n(n−1)) Σ_{i≠j} [k(s_i,s_j) + k(t_i,t_j)] − 2/n² Σ_{ij} k(s_i,t_j)``. It is not 0 for equal batches,
            and can be negative. ``"biased"`` is ``mean k_ss + mean k_tt − 2 mean k_st``: at least 0, and 0 for equal
            batches. With n = 1 the biased value is returned, since the other is not defined.
        constant: add the released code's ``2/(n−1)`` to the unbiased estimate. It has no gradient.
        bandwidth: (R, S). By default the mean of ‖z_i − z_j‖² over all (2n)² pairs of the two layers' rows, the zeros
            of the diagonal included. Constant for back-propagation. Where it is zero up to rounding (all rows equal),
            every kernel is 1 and the gradient is 0.

    Returns:
        (R, S).

    Raises:
        UserError: empty batches, unequal n or f, or multipliers that are not positive.

    Example:
        >>> layers = torch.tensor([[[0.0], [2.0]], [[1.0], [5.0]]])  # two layers, two samples
        >>> cross_multi_kernel_mmd(layers, layers, estimator="biased").round(decimals=3).abs()
        tensor([[0.0000, 2.1100],
                [2.1100, 0.0000]])
    """
    if source.dim() != 3 or target.dim() != 3 or source.shape[1:] != target.shape[1:] or 0 in source.shape:
        raise UserError(
            f"MMD needs layers (R, n, f) and (S, n, f) of the same samples and features, at least one of each, found "
            f"{tuple(source.shape)} and {tuple(target.shape)}"
        )
    if not multipliers or min(multipliers) <= 0:
        raise UserError(f"bandwidth multipliers must be positive numbers, found {list(multipliers)}")
    samples = source.shape[1]
    unbiased = estimator == "unbiased" and samples > 1
    dtype = torch.promote_types(torch.promote_types(source.dtype, target.dtype), torch.float32)
    source, target = source.to(dtype), target.to(dtype)
    mmd: Tensor = _CrossMMD.apply(source, target, multipliers, unbiased, bandwidth)
    return mmd + 2 / (samples - 1) if constant and unbiased else mmd


class _CrossMMD(torch.autograd.Function):
    """The (R, S) values and their gradient, written by hand.

    Let D be the squared distances, k'(D) = −Σ_u k_u(D)/(2σ_u²), g the upstream gradient and c the estimator's factor.
    Then the loss changes by G_ij = g·c·k'(D_ij) with D_ij, and by Σ_j 2·G_ij (z_i − z_j) with row z_i. All pairs of a
    layer share its own distances, so their G are summed first. Two products per side remain, whatever the number of
    pairs.
    """

    @staticmethod
    def forward(
        ctx: Any, source: Tensor, target: Tensor, multipliers: Sequence[float], unbiased: bool, bandwidth: Tensor | None
    ) -> Tensor:
        samples = source.shape[1]
        # Distances do not depend on the origin. Near it fewer digits cancel.
        origin = source.mean(dim=(0, 1))
        source, target = source - origin, target - origin
        within_source, norms_source = _distances_within(source)
        within_target, norms_target = _distances_within(target)
        across = _distances_across(source, target, norms_source, norms_target)

        if bandwidth is None:
            total = within_source.sum((1, 2))[:, None] + within_target.sum((1, 2)) + 2 * across.sum((2, 3))
            bandwidth = total / (2 * samples) ** 2
        # Squared distances have this rounding error. A narrower kernel would show rounding only.
        error = 5 * torch.finfo(source.dtype).eps * (norms_source.mean(1)[:, None] + norms_target.mean(1))
        inverse = torch.where(bandwidth > error, 1 / bandwidth, 0.0)

        scale = inverse[:, :, None, None]
        sum_source, slope_source = _kernels(within_source[:, None] * scale, multipliers)
        sum_target, slope_target = _kernels(within_target[None] * scale, multipliers)
        sum_across, slope_across = _kernels(across * scale, multipliers)
        ctx.within, ctx.across = 1 / samples**2, -2 / samples**2
        if unbiased:
            ctx.within = 1 / (samples * (samples - 1))
            sum_source = sum_source - samples * len(multipliers)  # the diagonal, where every kernel is 1
            sum_target = sum_target - samples * len(multipliers)
        ctx.save_for_backward(source, target, inverse, slope_source, slope_target, slope_across)
        mmd: Tensor = ctx.within * (sum_source + sum_target) + ctx.across * sum_across
        return mmd

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        source, target, inverse, slope_source, slope_target, slope_across = ctx.saved_tensors
        within = ctx.within * upstream * inverse
        across = (ctx.across * upstream * inverse)[:, :, None, None] * slope_across
        gradient_source = gradient_target = None
        if ctx.needs_input_grad[0]:
            gradient_source = _pull(torch.einsum("rs,rsij->rij", within, slope_source), across, source, target)
        if ctx.needs_input_grad[1]:
            turned = across.permute(1, 0, 3, 2)
            gradient_target = _pull(torch.einsum("rs,rsij->sij", within, slope_target), turned, target, source)
        return gradient_source, gradient_target, None, None, None


def _distances_within(rows: Tensor) -> tuple[Tensor, Tensor]:
    """‖z_i − z_j‖² of each layer, (R, n, f) → (R, n, n), zero on the diagonal; and ‖z_i‖², (R, n)."""
    products = torch.bmm(rows, rows.mT)
    # Taken from the products, so that equal rows round alike and their distance is zero.
    norms = products.diagonal(dim1=1, dim2=2)
    return (norms[:, :, None] + norms[:, None, :]).sub_(products, alpha=2).clamp_(min=0), norms


def _distances_across(source: Tensor, target: Tensor, norms_source: Tensor, norms_target: Tensor) -> Tensor:
    """‖s_i − t_j‖² of each pair of layers: (R, n, f), (S, n, f) → (R, S, n, n)."""
    sources, samples, _ = source.shape
    products = (source.flatten(0, 1) @ target.flatten(0, 1).T).view(sources, samples, -1, samples).transpose(1, 2)
    return (norms_source[:, None, :, None] + norms_target[None, :, None, :]).sub_(products, alpha=2).clamp_(min=0)


def _kernels(relative: Tensor, multipliers: Sequence[float]) -> tuple[Tensor, Tensor]:
    """Σ_u exp(−D/(2a_u)) summed over the last two axes, and its derivative by each D, with D = ``relative``.

    Multipliers that fall by a factor of three from the largest need one exponential: a_u/3 cubes the kernel.
    """
    widest, *narrower = sorted(multipliers, reverse=True)
    kernel = torch.exp(relative / (-2 * widest))
    total, slope = kernel.clone(), kernel / (-2 * widest)
    previous = widest
    for multiplier in narrower:
        if abs(previous / multiplier - 3) < 1e-12:
            kernel *= kernel.square()
        else:
            kernel = torch.exp(relative / (-2 * multiplier))
        total += kernel
        slope.add_(kernel, alpha=-1 / (2 * multiplier))
        previous = multiplier
    return total.sum((2, 3)), slope


def _pull(within: Tensor, across: Tensor, own: Tensor, other: Tensor) -> Tensor:
    """The gradient by the rows ``own`` (R, n, f): Σ_j 2·G_ij (z_i − z_j) over their own layer and all of ``other``.

    Args:
        within: G of the own layer, (R, n, n), symmetric. Both D_ij and D_ji depend on z_i, hence the factor 4.
        across: G of the own and the other layers, (R, S, n, n).
        own: z.
        other: the rows of the other layers.
    """
    layers, samples, _ = own.shape
    within, across = 4 * within, 2 * across
    # Σ_j G_ij z_i is a product with a diagonal, so one product does the layer's own part.
    diagonal = torch.diag_embed(within.sum(2) + across.sum((1, 3)))
    gradient = torch.bmm(diagonal - within, own)
    gradient.flatten(0, 1).addmm_(across.transpose(1, 2).reshape(layers * samples, -1), other.flatten(0, 1), alpha=-1)
    return gradient
