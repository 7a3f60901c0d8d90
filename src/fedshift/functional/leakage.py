"""What a gradient reveals about the samples it was computed from.

Distances that an attack lowers, direct inversions, and measures of how alike two samples are. Sources:

Zhu, Liu, Han: Deep Leakage from Gradients. NeurIPS 2019. Zhao, Mopuri, Bilen: iDLG: Improved Deep Leakage from
Gradients. 2020. Geiping, Bauermeister, Dröge, Moeller: Inverting Gradients. NeurIPS 2020.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from fedshift.errors import UserError

_WINDOW, _SIGMA = 11, 1.5
_K1, _K2 = 0.01, 0.03


def squared_distance(gradient: Sequence[Tensor], observed: Sequence[Tensor]) -> Tensor:
    """``‖g − g*‖²`` over all parameters together, a scalar (Deep Leakage, equation 4).

    ``gradient``: g, one tensor per parameter. ``observed``: g*, of the same shapes. Raises UserError: the shapes
    differ.

    Example:
        >>> squared_distance([torch.tensor([1.0]), torch.tensor([2.0])], [torch.zeros(1), torch.zeros(1)])
        tensor(5.)
    """
    _check_alike(gradient, observed)
    return torch.stack([(a - b).square().sum() for a, b in zip(gradient, observed, strict=True)]).sum()


def cosine_distance(gradient: Sequence[Tensor], observed: Sequence[Tensor]) -> Tensor:
    """``1 − ⟨g, g*⟩ / (‖g‖‖g*‖)`` over all parameters together, in [0, 2] (Inverting Gradients, equation 4).

    The scale of either gradient does not matter. If one of them is zero, the distance is 1.

    ``gradient``: g, one tensor per parameter. ``observed``: g*, of the same shapes. Raises UserError: the shapes
    differ.

    Example:
        >>> cosine_distance([torch.tensor([1.0, 0.0])], [torch.tensor([0.0, 7.0])])
        tensor(1.)
    """
    _check_alike(gradient, observed)
    a = torch.cat([part.flatten() for part in gradient])
    b = torch.cat([part.flatten() for part in observed])
    # At zero the norm's gradient is 0 and the clamp keeps the quotient finite.
    norms: Tensor = torch.linalg.vector_norm(a) * torch.linalg.vector_norm(b)
    return 1 - (a @ b) / norms.clamp_min(torch.finfo(norms.dtype).tiny)


def total_variation(images: Tensor) -> Tensor:
    """Mean absolute difference of neighbouring pixels, down plus across, a scalar (Geiping et al.).

    ``images``: (n, c, h, w).

    Example:
        >>> total_variation(torch.tensor([[[[0.0, 1.0], [0.0, 1.0]]]]))
        tensor(1.)
    """
    down, across = images.diff(dim=-2).abs(), images.diff(dim=-1).abs()
    # A single row or column has no neighbours in that direction.
    return down.sum() / max(1, down.numel()) + across.sum() / max(1, across.numel())


def pseudo_gradient(before: Iterable[Tensor], after: Iterable[Tensor], lr: float) -> list[Tensor]:
    """``(θ_before − θ_after) / η`` of each parameter: what a sent model reveals about the gradients in between.

    ``before``: parameters of the model that a site received. ``after``: parameters of the model that it sent. ``lr``:
    learning rate η, above 0. Raises UserError: the learning rate is not above 0.

    Example:
        >>> pseudo_gradient([torch.tensor([1.0])], [torch.tensor([0.5])], lr=0.25)
        [tensor([2.])]
    """
    if not lr > 0:
        raise UserError(f"a pseudo-gradient needs a learning rate above 0, found {lr}")
    return [(a - b) / lr for a, b in zip(before, after, strict=True)]


def gradients_in_update(steps: int, momentum: float = 0.0, nesterov: bool = False) -> float:
    """How many gradients a `pseudo_gradient` of several SGD steps sums up, momentum included.

    Step t of T passes on ``Σ_(j ≤ T−t) m^j`` times its gradient. So the sum is ``Σ_(k=1..T) (1 − m^k) / (1 − m)``. With
    Nesterov momentum each gradient counts once, plus m times that sum.

    ``steps``: T, at least 1. ``momentum``: m, in [0, 1). ``nesterov``: whether the optimiser uses Nesterov momentum.
    Raises UserError: no step, or a momentum outside [0, 1).

    Example:
        >>> gradients_in_update(2), gradients_in_update(2, momentum=0.5)  # 2; 1 + 1.5
        (2.0, 2.5)
    """
    if steps < 1 or not 0 <= momentum < 1:
        raise UserError(f"an update needs at least 1 step and a momentum in [0, 1), found {steps} and {momentum}")
    # Σ (1 − m^k) in closed form: T − m(1 − m^T)/(1 − m).
    total = (steps - momentum * (1 - momentum**steps) / (1 - momentum)) / (1 - momentum)
    return steps + momentum * total if nesterov else total


def invert_linear(weight_gradient: Tensor, bias_gradient: Tensor) -> Tensor:
    """The single input of a linear layer with bias, from the gradients of its weight and bias.

    ``∂ℓ/∂W_i = ∂ℓ/∂b_i · x``, so every row divided by its bias gradient is exactly x. This is the least-squares
    quotient over all units, ``Σ_i b_i W_i / Σ_i b_i²``. With several inputs it is their mean, weighted by how much each
    moved the units.

    ``weight_gradient``: (u, d). ``bias_gradient``: (u,). Returns (d,). Raises UserError: the shapes do not fit, or no
    bias has a gradient.

    Example:
        >>> x, errors = torch.tensor([2.0, -1.0]), torch.tensor([0.5, -0.5])
        >>> invert_linear(errors[:, None] * x, errors)
        tensor([ 2., -1.])
    """
    if weight_gradient.dim() != 2 or bias_gradient.shape != weight_gradient.shape[:1]:
        raise UserError(
            f"a linear layer's gradients are (u, d) and (u,), found {tuple(weight_gradient.shape)} and "
            f"{tuple(bias_gradient.shape)}"
        )
    power = bias_gradient.square().sum()
    if power == 0:
        raise UserError("the bias has no gradient: nothing can be inferred about the layer's input")
    return bias_gradient @ weight_gradient / power


def infer_label(bias_gradient: Tensor) -> int:
    """The label of a single sample, from the last layer's bias gradient: its one negative entry (iDLG).

    This is exact for cross-entropy, whose gradient there is ``p − 1[c = y]``.

    ``bias_gradient``: (C,).

    Example:
        >>> infer_label(torch.tensor([0.2, -0.9, 0.7]))
        1
    """
    return int(bias_gradient.argmin())


def infer_labels(bias_gradient: Tensor, probabilities: Tensor, number: int) -> list[int]:
    """The likeliest labels of several samples, from the last layer's bias gradient of their mean loss.

    The gradient is ``p̄ − n_c/n``, so class c has about ``n·(p̄_c − g_c)`` samples. Labels are assigned one by one,
    each to the class with the largest number left. For one sample this is `infer_label`.

    ``bias_gradient``: g, (C,). ``probabilities``: p̄ as the attacker estimates it, (C,). ``number``: n. Returns n
    labels, sorted.

    Example:
        >>> infer_labels(torch.tensor([-0.25, -0.25, 0.5]), torch.tensor([0.25, 0.25, 0.5]), number=4)
        [0, 0, 1, 1]
    """
    if number == 1:
        return [infer_label(bias_gradient)]
    owed = (number * (probabilities - bias_gradient)).double().clone()
    labels: list[int] = []
    for _ in range(number):
        labels.append(int(owed.argmax()))
        owed[labels[-1]] -= 1
    return sorted(labels)


def mean_squared_errors(reconstructed: Tensor, originals: Tensor) -> Tensor:
    """Mean squared error of every pair of samples. ``reconstructed``: (n, …). ``originals``: (m, …). Returns (n, m).

    Example:
        >>> mean_squared_errors(torch.tensor([[0.0, 0.0]]), torch.tensor([[1.0, 1.0], [0.0, 2.0]])).round(decimals=4)
        tensor([[1., 2.]])
    """
    a, b = reconstructed.flatten(1), originals.flatten(1)
    # The expanded square would lose the small errors that matter here.
    return torch.cdist(a, b, compute_mode="donot_use_mm_for_euclid_dist").square() / a.shape[1]


def best_match(errors: Tensor) -> Tensor:
    """Match each reconstruction to an original: least total error, no original twice.

    ``errors``: (n, m), n ≤ m. Returns number of the original for each reconstruction, (n,). Raises UserError: there are
    more reconstructions than originals.

    Example:
        >>> best_match(torch.tensor([[1.0, 2.0], [0.0, 5.0]]))
        tensor([1, 0])
    """
    from scipy.optimize import linear_sum_assignment  # slow to import, and only this function needs it

    if errors.shape[0] > errors.shape[1]:
        raise UserError(f"{errors.shape[0]} reconstructions cannot each show one of {errors.shape[1]} originals")
    _, columns = linear_sum_assignment(errors.detach().cpu().double().numpy())
    return torch.as_tensor(columns, dtype=torch.int64)


def psnr(error: float, peak: float = 1.0) -> float:
    """Peak signal-to-noise ratio in dB; infinite for no error.

    ``error``: mean squared error of the values. ``peak``: largest value; values lie in [0, ``peak``].

    Example:
        >>> round(psnr(0.01), 6)
        20.0
    """
    return 10 * math.log10(peak**2 / error) if error > 0 else math.inf


def ssim(first: Tensor, second: Tensor, peak: float = 1.0) -> Tensor:
    """Structural similarity of two batches of images: 1 for equal images.

    Gaussian window of 11 pixels, σ = 1.5, K = (0.01, 0.03); the mean over all places where the window fits and over
    channels. Images below 11 pixels use the largest odd window that fits. Source: Wang, Bovik, Sheikh, Simoncelli (IEEE
    TIP 2004).

    ``first``: (n, c, h, w), values in [0, ``peak``]. ``second``: the same shape. ``peak``: largest value. Returns (n,).
    Raises UserError: the shapes differ, or are not those of images.

    Example:
        >>> image = torch.arange(256.0).view(1, 1, 16, 16) / 255
        >>> ssim(image, image).round(decimals=4)
        tensor([1.])
    """
    if first.dim() != 4 or first.shape != second.shape:
        raise UserError(
            f"SSIM compares two batches of images (n, c, h, w), found {tuple(first.shape)} and {tuple(second.shape)}"
        )
    fits = min(_WINDOW, *first.shape[2:])
    size = fits if fits % 2 else fits - 1
    places = torch.arange(size, dtype=first.dtype, device=first.device) - size // 2
    line = torch.exp(-places.square() / (2 * _SIGMA**2))
    line = line / line.sum()
    window = torch.outer(line, line)[None, None]

    def local_mean(values: Tensor) -> Tensor:
        return F.conv2d(values.flatten(0, 1).unsqueeze(1), window)

    mean_x, mean_y = local_mean(first), local_mean(second)
    variance_x = local_mean(first.square()) - mean_x.square()
    variance_y = local_mean(second.square()) - mean_y.square()
    covariance = local_mean(first * second) - mean_x * mean_y
    c1, c2 = (_K1 * peak) ** 2, (_K2 * peak) ** 2
    luminance = (2 * mean_x * mean_y + c1) / (mean_x.square() + mean_y.square() + c1)
    structure = (2 * covariance + c2) / (variance_x + variance_y + c2)
    return (luminance * structure).view(first.shape[0], -1).mean(1)


def correlation(first: Tensor, second: Tensor) -> Tensor:
    """Pearson's correlation of each pair of samples; 0 where one of them is constant.

    ``first``: (n, …). ``second``: the same shape. Returns (n,).

    Example:
        >>> correlation(torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[6.0, 4.0, 2.0]])).round(decimals=4)
        tensor([-1.])
    """
    a, b = first.flatten(1), second.flatten(1)
    a, b = a - a.mean(1, keepdim=True), b - b.mean(1, keepdim=True)
    norms: Tensor = torch.linalg.vector_norm(a, dim=1) * torch.linalg.vector_norm(b, dim=1)
    return (a * b).sum(1) / norms.clamp_min(torch.finfo(norms.dtype).tiny)


def _check_alike(gradient: Sequence[Tensor], observed: Sequence[Tensor]) -> None:
    result, wanted = ([tuple(part.shape) for part in parts] for parts in (gradient, observed))
    if result != wanted or not result:
        raise UserError(f"two gradients of one network are compared, found shapes {result} and {wanted}")
