"""Maximum mean discrepancy with several Gaussian kernels (Gretton et al., JMLR 2012; CSAC, equation 6)."""

from __future__ import annotations

import functools
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
    """Squared MMD between two batches, a scalar: `weighted_multi_kernel_mmd` of two single layers.

    ``source``: (n, f). ``target``: (n, f). ``multipliers``: as in `weighted_multi_kernel_mmd`. ``estimator``: as in
    `weighted_multi_kernel_mmd`. ``constant``: as in `weighted_multi_kernel_mmd`. ``bandwidth``: a scalar; as in
    `weighted_multi_kernel_mmd`. Raises UserError: other shapes, or as in `weighted_multi_kernel_mmd`.

    Example:
        >>> source, target = torch.tensor([[0.0], [2.0]]), torch.tensor([[1.0], [5.0]])
        >>> multi_kernel_mmd(source, target, estimator="biased")
        tensor(2.1099)
    """
    if source.dim() != 2 or target.dim() != 2:
        raise UserError(f"MMD needs two batches (n, f), found {tuple(source.shape)} and {tuple(target.shape)}")
    width = None if bandwidth is None else bandwidth.reshape(1, 1)
    item = source.new_ones((1, 1), dtype=torch.float32)
    return weighted_multi_kernel_mmd(source[None], target[None], item, multipliers, estimator, constant, width)


def weighted_multi_kernel_mmd(
    source: Tensor,
    target: Tensor,
    weights: Tensor,
    multipliers: Sequence[float] = MULTIPLIERS,
    estimator: Estimator = "unbiased",
    constant: bool = False,
    bandwidth: Tensor | None = None,
) -> Tensor:
    """Squared MMD of every layer of ``source`` with every layer of ``target``, weighted and summed (CSAC, equation 6).

    The kernels ``k_u(a, b) = exp(−‖a−b‖² / (2σ_u²))`` with ``σ_u² = a_u · bandwidth`` are summed with weight 1.

    Each layer's own distances are computed once, those between layers in one matrix product, and the gradient together
    with the value. First derivatives only. Half precision is computed in float32.

    ``source``: (R, n, f). ``target``: (S, n, f). ``weights``: (R, S), constant for back-propagation. ``multipliers``:
    a_u, positive. ``estimator``: ``"unbiased"``, as in the released code, is ``1/(n(n−1)) Σ_{i≠j} [k(s_i,s_j) +
    k(t_i,t_j)] − 2/n² Σ_{ij} k(s_i,t_j)``. It is not 0 for equal batches, and can be negative. ``"biased"`` is ``mean
    k_ss + mean k_tt − 2 mean k_st``: at least 0, and 0 for equal batches. With n = 1 the biased value is returned,
    since the other is not defined. ``constant``: add the released code's ``2/(n−1)`` to the unbiased estimate. It has
    no gradient. ``bandwidth``: (R, S). By default the mean of ‖z_i − z_j‖² over all (2n)² pairs of the two layers'
    rows, the zeros of the diagonal included. Constant for back-propagation. Where it is zero up to rounding (all rows
    equal), every kernel is 1 and the gradient is 0. Returns Σ weights · MMD², a scalar. Raises UserError: empty
    batches, unequal n or f, multipliers that are not positive, or weights of another shape.

    Example:
        >>> layers = torch.tensor([[[0.0], [2.0]], [[1.0], [5.0]]])
        >>> weighted_multi_kernel_mmd(layers, layers, torch.tensor([[0.0, 1.0], [0.0, 0.0]]), estimator="biased")
        tensor(2.1099)
    """
    source, target = _check_layers(source, target, multipliers)
    if weights.shape != (len(source), len(target)):
        raise UserError(f"MMD needs weights ({len(source)}, {len(target)}), found {tuple(weights.shape)}")
    n = source.shape[1]
    unbiased = estimator == "unbiased" and n > 1
    weights = weights.detach().to(source.dtype)
    mmd: Tensor = _WeightedMMD.apply(source, target, weights, tuple(multipliers), unbiased, bandwidth)
    return mmd + weights.sum() * (2 / (n - 1)) if constant and unbiased else mmd


def _check_layers(source: Tensor, target: Tensor, multipliers: Sequence[float]) -> tuple[Tensor, Tensor]:
    """Layers in the precision that is computed in."""
    if source.dim() != 3 or target.dim() != 3 or source.shape[1:] != target.shape[1:] or 0 in source.shape:
        raise UserError(
            f"MMD needs layers (R, n, f) and (S, n, f) of the same samples and features, at least one of each, found "
            f"{tuple(source.shape)} and {tuple(target.shape)}"
        )
    if not multipliers or min(multipliers) <= 0:
        raise UserError(f"bandwidth multipliers must be positive numbers, found {list(multipliers)}")
    dtype = torch.promote_types(torch.promote_types(source.dtype, target.dtype), torch.float32)
    return source.to(dtype), target.to(dtype)


class _WeightedMMD(torch.autograd.Function):
    """The weighted sum and its gradient, written by hand.

    Let D be the squared distances, k'(D) = −Σ_u k_u(D)/(2σ_u²), and c a pair's weight times the estimator's factor. The
    loss changes by G_ij = c·k'(D_ij) with D_ij, and by Σ_j 2·(G_ij + G_ji)(z_i − z_j) with row z_i. All pairs of one
    layer share its own distances, so their G are summed first. Two products per side remain, whatever the number of
    pairs.

    Values and slopes are made of the same kernels, so both are computed at once, and nothing is kept but the gradient.
    On small layers the number of operations costs more than what they compute. So each works on all layers or pairs,
    and views are taken once.
    """

    @staticmethod
    def forward(
        ctx: Any,
        source: Tensor,
        target: Tensor,
        weights: Tensor,
        multipliers: tuple[float, ...],
        unbiased: bool,
        bandwidth: Tensor | None,
    ) -> Tensor:
        sources, targets, n = len(source), len(target), source.shape[1]
        rows = torch.cat((source, target))
        # Distances do not depend on the origin. Near it fewer digits cancel.
        rows -= source.mean((0, 1))
        inside, across, norms = _distances(rows, sources)
        if bandwidth is None:
            sums = inside.sum((1, 2))
            total = (sums[:sources, None] + sums[sources:]).add_(across.sum((1, 3)), alpha=2)
            bandwidth = total.div_((2 * n) ** 2)
        # Squared distances have this rounding error. A narrower kernel would show rounding only.
        error = norms.sum(1).mul_(5 * torch.finfo(rows.dtype).eps / n)
        inverse = torch.where(bandwidth > error[:sources, None] + error[sources:], bandwidth.reciprocal(), 0.0)

        values, slopes = _kernels(inside, across, inverse, multipliers)
        within, between = 1 / (n * (n - 1)) if unbiased else 1 / n**2, -2 / n**2
        same = values[:2].view(2, sources, targets, n * n).sum((0, 3))
        if unbiased:
            same -= 2 * n * len(multipliers)  # the diagonals, where every kernel is 1
        mmd = same.mul_(within).add_(values[2].view_as(across).sum((1, 3)), alpha=between)
        if any(ctx.needs_input_grad):
            ctx.sources, scale = sources, weights * inverse
            ctx.save_for_backward(_gradient(rows, slopes, scale * (-4 * within), scale * (-2 * between)))
        loss: Tensor = mmd.mul_(weights).sum()
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        gradient = ctx.saved_tensors[0] * upstream
        return gradient[: ctx.sources], gradient[ctx.sources :], None, None, None, None


def _distances(rows: Tensor, sources: int) -> tuple[Tensor, Tensor, Tensor]:
    """‖z_i − z_j‖² and ‖z_i‖² of layers ``rows`` (R + S, n, f), of which the first R are sources.

    Returns:
        Within each layer (R + S, n, n), zero on the diagonal; between pairs of layers (R, n, S, n); norms (R + S, n).
    """
    layers, n, width = rows.shape
    products = torch.bmm(rows, rows.mT)
    # Taken from the products, so that equal rows round alike and their distance is zero.
    norms = products.diagonal(dim1=1, dim2=2)
    inside = torch.add(norms.unsqueeze(2), norms.unsqueeze(1)).sub_(products, alpha=2).clamp_(min=0)
    flat, first = rows.view(layers * n, width), sources * n
    across = norms[:sources, :, None, None] + norms[sources:]
    across.view(first, -1).addmm_(flat[:first], flat[first:].T, alpha=-2)
    return inside, across.clamp_(min=0), norms


def _kernels(inside: Tensor, across: Tensor, inverse: Tensor, multipliers: tuple[float, ...]) -> tuple[Tensor, Tensor]:
    """Σ_u exp(−D/(2a_u)) and its derivative by D, for D = distances · ``inverse`` of each pair of layers.

    Only the widest kernel needs exponentials: a_u/3 cubes it, as any smaller multiplier is a power.

    Returns each (3, R·S·n²): among the rows of the source and of the target, (R, S, n, n) each, then between them, (R,
    n, S, n).
    """
    sources, n, targets, _ = across.shape
    widths = tuple(sorted(multipliers, reverse=True))
    kernels = inside.new_empty(len(widths), 3 * across.numel())
    each = kernels.unbind()
    scale = (inverse * (-0.5 / widths[0])).view(sources, targets, 1, 1)
    relative = each[0].view(3, sources, targets, n, n)
    torch.mul(inside[:sources, None], scale, out=relative[0])
    torch.mul(inside[sources:], scale, out=relative[1])
    torch.mul(across, scale.transpose(1, 2), out=relative[2].view_as(across))
    each[0].exp_()
    for index in range(1, len(widths)):
        ratio = widths[index - 1] / widths[index]
        torch.pow(each[index - 1], 3 if abs(ratio - 3) < 1e-12 else ratio, out=each[index])
    result = (_factors(widths, inside.dtype, inside.device) @ kernels).view(2, 3, -1)
    return result[0], result[1]


@functools.lru_cache(maxsize=8)
def _factors(widths: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """(2, u): what sums kernels, and what sums their derivatives."""
    return torch.tensor([[1.0] * len(widths), [-0.5 / width for width in widths]], dtype=dtype, device=device)


def _gradient(rows: Tensor, slopes: Tensor, within: Tensor, between: Tensor) -> Tensor:
    """The gradient by all layers ``rows`` (R + S, n, f).

    ``rows``: all layers. ``slopes``: as of `_kernels`. ``within``: (R, S), −4 times c of the kernels within layers,
    times the inverse bandwidth. ``between``: (R, S), −2 times that of the kernels between layers.
    """
    (sources, targets), (layers, n, width) = within.shape, rows.shape
    slopes = slopes.view(3, sources, targets, n * n)
    inside = rows.new_empty(layers, 1, n * n)
    torch.bmm(within.unsqueeze(1), slopes[0], out=inside[:sources])
    torch.bmm(within.T.unsqueeze(1), slopes[1].transpose(0, 1), out=inside[sources:])
    across = slopes[2].view(sources, n, targets, n) * between.view(sources, 1, targets, 1)
    inside = inside.view(layers, n, n)
    # Σ_j G_ij z_i is a product with a diagonal, so one product does the layer's own part.
    diagonal = inside.sum(2)
    diagonal[:sources] += across.sum((2, 3))
    diagonal[sources:] += across.sum((0, 1))
    inside.diagonal(dim1=1, dim2=2).sub_(diagonal)
    gradient = torch.bmm(inside, rows)
    across, first = across.view(sources * n, targets * n), sources * n
    flat, whole = rows.view(layers * n, width), gradient.view(layers * n, width)
    whole[:first].addmm_(across, flat[first:])
    whole[first:].addmm_(across.T, flat[:first])
    return gradient
