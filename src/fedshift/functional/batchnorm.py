"""BatchNorm-MMD: distances between BatchNorm statistics of models and batches (KD3A, Feng et al., ICML 2021).

`averaging.weighted_average` with ``bn_merge="moments"`` is the closed-form minimiser of the objective.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from fedshift.errors import UserError
from fedshift.functional.averaging import is_buffer
from fedshift.weights import Weights

_MEAN = "running_mean"
_VARIANCE = "running_var"


def batchnorm_objective(batch_features: Tensor, means: Tensor, variances: Tensor, shares: Tensor) -> Tensor:
    """BatchNorm-MMD of one layer, ``Σ_k α_k (‖mean(π) − m_k‖² + ‖mean(π²) − (v_k + m_k²)‖²)``, a scalar.

    Source: KD3A, equation 12, with the diagonal of the second moments only. Differentiable by every argument.

    Args:
        batch_features: π, what enters the layer, (n, c) or (n, c, …). Means run over samples and positions.
        means: m_k, each model's running mean, (K, c).
        variances: v_k, each model's running variance, (K, c).
        shares: α_k, (K,).

    Raises:
        UserError: other shapes, or an empty batch.

    Example:
        >>> import torch
        >>> batch = torch.tensor([[1.0], [3.0]])  # mean 2, mean square 5
        >>> batchnorm_objective(batch, torch.tensor([[0.0]]), torch.tensor([[1.0]]), torch.ones(1))
        tensor(20.)
    """
    if (
        batch_features.dim() < 2
        or not batch_features.numel()
        or means.shape != (len(shares), batch_features.shape[1])
        or variances.shape != means.shape
    ):
        raise UserError(
            "BatchNorm-MMD needs features (n, c, …), means and variances (K, c) and shares (K,), found "
            f"{tuple(batch_features.shape)}, {tuple(means.shape)}, {tuple(variances.shape)} and {tuple(shares.shape)}"
        )
    axes = [axis for axis in range(batch_features.dim()) if axis != 1]
    first = batch_features.mean(axes) - means
    second = batch_features.square().mean(axes) - (variances + means.square())
    return (shares[:, None] * (first.square() + second.square())).sum()


def batchnorm_distance(
    first: Mapping[str, Tensor], second: Mapping[str, Tensor], *, per_channel: bool = False
) -> float:
    """Distance of two models' BatchNorm statistics, ``Σ_l ‖Δ m‖² + ‖Δ (v + m²)‖²`` over layers, in float64.

    It is the objective of `batchnorm_objective` between two models. Layers are found by keys that end in
    ``running_mean`` and ``running_var``; without any the distance is 0.

    Args:
        first: a model's tensors by name.
        second: the other model's.
        per_channel: divide by the number of channels of all layers, so that the distance does not grow with the
            network.

    Raises:
        UserError: the two models' layers differ.

    Example:
        >>> import torch
        >>> first = {"bn.running_mean": torch.tensor([0.0]), "bn.running_var": torch.tensor([1.0])}
        >>> second = {"bn.running_mean": torch.tensor([2.0]), "bn.running_var": torch.tensor([3.0])}
        >>> batchnorm_distance(first, second)  # 2² + (7 − 1)²
        40.0
    """
    left, right = Weights(first).select(is_buffer), Weights(second).select(is_buffer)
    left.check_like(right, "BatchNorm distance")
    total, channels = 0.0, 0
    for name in left:
        layer = name.removesuffix(_MEAN)
        if layer != name and layer + _VARIANCE in left:
            (mean, moment), (other_mean, other_moment) = _moments(left, layer), _moments(right, layer)
            total += ((mean - other_mean).square().sum() + (moment - other_moment).square().sum()).item()
            channels += len(mean)
    return total / channels if per_channel and channels else total


def _moments(weights: Weights, layer: str) -> tuple[Tensor, Tensor]:
    """First and second moment of one layer's inputs."""
    mean = weights[layer + _MEAN].double()
    return mean, weights[layer + _VARIANCE].double() + mean.square()


def mixed_statistics(
    trained: tuple[Tensor, Tensor], new: tuple[Tensor, Tensor], samples: int, prior: int
) -> tuple[Tensor, Tensor]:
    """``N/(N+n)·trained + n/(N+n)·new`` for means and for variances.

    Source: Schneider, Rusak, Eck, Bringmann, Brendel, Bethge (NeurIPS 2020): BatchNorm at a new site.

    Args:
        trained: running mean and variance of the model.
        new: those of the new site's samples.
        samples: n, the number of these samples. With none of them and no prior, the trained statistics stay.
        prior: N, how many samples the trained statistics count for.

    Example:
        >>> import torch
        >>> trained, new = (torch.tensor([0.0]), torch.tensor([1.0])), (torch.tensor([4.0]), torch.tensor([3.0]))
        >>> mixed_statistics(trained, new, samples=30, prior=10)
        (tensor([3.]), tensor([2.5000]))
    """
    share = samples / (samples + prior) if samples else 0.0
    mean, variance = ((1 - share) * before + share * now for before, now in zip(trained, new, strict=True))
    return mean, variance
