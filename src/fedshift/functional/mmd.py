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

    On small layers the number of operations costs more than what they compute, so each works on the layers of both
    sides, and on the kernels of all pairs, at once.
    """

    @staticmethod
    def forward(
        ctx: Any, source: Tensor, target: Tensor, multipliers: Sequence[float], unbiased: bool, bandwidth: Tensor | None
    ) -> Tensor:
        sources, targets, samples = len(source), len(target), source.shape[1]
        rows = torch.cat((source, target))
        # Distances do not depend on the origin. Near it fewer digits cancel.
        rows -= source.mean(dim=(0, 1))
        distances, norms = _distances(rows, sources)
        own, across = distances[: sources + targets], distances[sources + targets :]
        across = across.view(sources, targets, samples, samples)

        if bandwidth is None:
            totals = distances.flatten(1).sum(1)
            within = totals[:sources, None] + totals[sources : sources + targets]
            bandwidth = within.add_(totals[sources + targets :].view(sources, targets), alpha=2) / (2 * samples) ** 2
        # Squared distances have this rounding error. A narrower kernel would show rounding only.
        error = norms.mean(1) * (5 * torch.finfo(rows.dtype).eps)
        inverse = torch.where(bandwidth > error[:sources, None] + error[sources:], 1 / bandwidth, 0.0)

        # Kernels of each pair: among the rows of the source, among those of the target, and between them.
        relative = rows.new_empty(3, sources, targets, samples, samples)
        scale = inverse[:, :, None, None]
        torch.mul(own[:sources, None], scale, out=relative[0])
        torch.mul(own[None, sources:], scale, out=relative[1])
        torch.mul(across, scale, out=relative[2])
        kernels, slopes = _kernels(relative, multipliers)
        sums = kernels.flatten(3).sum(3)

        ctx.within, ctx.across, ctx.sources = 1 / samples**2, -2 / samples**2, sources
        same = sums[0].add_(sums[1])
        if unbiased:
            ctx.within = 1 / (samples * (samples - 1))
            same -= 2 * samples * len(multipliers)  # the diagonals, where every kernel is 1
        ctx.save_for_backward(rows, inverse, slopes)
        mmd: Tensor = (same * ctx.within).add_(sums[2], alpha=ctx.across)
        return mmd

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        rows, inverse, slopes = ctx.saved_tensors
        sources, (layers, samples, _) = ctx.sources, rows.shape
        targets = layers - sources
        factors = upstream * inverse

        # Both D_ij and D_ji depend on z_i, hence the factor 4 of G within a layer.
        own = rows.new_empty(layers, samples, samples)
        weights, flat = factors * (4 * ctx.within), slopes.flatten(3)
        torch.bmm(weights[:, None, :], flat[0], out=own[:sources].view(sources, 1, -1))
        torch.bmm(weights.T[:, None, :], flat[1].transpose(0, 1), out=own[sources:].view(targets, 1, -1))
        # G between layers as one matrix, (R·n, S·n).
        across = rows.new_empty(sources, samples, targets, samples)
        torch.mul(slopes[2], (factors * (2 * ctx.across))[:, :, None, None], out=across.transpose(1, 2))
        # Σ_j G_ij z_i is a product with a diagonal, so one product does the layer's own part.
        diagonal = own.sum(2)
        diagonal[:sources] += across.sum((2, 3))
        diagonal[sources:] += across.sum((0, 1))
        own.neg_().diagonal(dim1=1, dim2=2).add_(diagonal)
        gradient = torch.bmm(own, rows)
        across = across.view(sources * samples, targets * samples)
        gradient[:sources].flatten(0, 1).addmm_(across, rows[sources:].flatten(0, 1), alpha=-1)
        gradient[sources:].flatten(0, 1).addmm_(across.T, rows[:sources].flatten(0, 1), alpha=-1)
        return gradient[:sources], gradient[sources:], None, None, None


def _distances(rows: Tensor, sources: int) -> tuple[Tensor, Tensor]:
    """‖z_i − z_j‖² and ‖z_i‖² of layers ``rows`` (R + S, n, f), of which the first R are sources.

    Returns:
        (R + S + R·S, n, n) and (R + S, n): within each layer, zero on the diagonal, then of each pair of layers.
    """
    layers, samples, _ = rows.shape
    targets = layers - sources
    products = torch.bmm(rows, rows.mT)
    # Taken from the products, so that equal rows round alike and their distance is zero.
    norms = products.diagonal(dim1=1, dim2=2)
    between = (rows[:sources].flatten(0, 1) @ rows[sources:].flatten(0, 1).T).view(sources, samples, targets, samples)
    distances = rows.new_empty(layers + sources * targets, samples, samples)
    own, across = distances[:layers], distances[layers:].view(sources, targets, samples, samples)
    torch.add(norms[:, :, None], norms[:, None, :], out=own).sub_(products, alpha=2)
    torch.add(norms[:sources, None, :, None], norms[None, sources:, None, :], out=across)
    across.sub_(between.transpose(1, 2), alpha=2)
    return distances.clamp_(min=0), norms


def _kernels(relative: Tensor, multipliers: Sequence[float]) -> tuple[Tensor, Tensor]:
    """Σ_u exp(−D/(2a_u)) and its derivative by D, for D = ``relative``.

    Multipliers that fall by a factor of three from the largest need one exponential: a_u/3 cubes the kernel.
    """
    widths = sorted(multipliers, reverse=True)
    kernels = relative.new_empty(len(widths), relative.numel())
    each = kernels.unbind()
    for place, width in enumerate(widths):
        if place and abs(widths[place - 1] / width - 3) < 1e-12:
            wider = each[place - 1]
            torch.mul(wider, wider, out=each[place]).mul_(wider)
        else:
            torch.mul(relative.view(-1), -0.5 / width, out=each[place]).exp_()
    factors = kernels.new_tensor([[1.0] * len(widths), [-0.5 / width for width in widths]])
    values, slopes = (factors @ kernels).view(2, *relative.shape)
    return values, slopes
