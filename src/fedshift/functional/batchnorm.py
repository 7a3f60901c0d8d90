"""BatchNorm-MMD: how far BatchNorm's statistics of several models are from a batch and from each other (KD3A, Feng et
al., ICML 2021; section 7.3). Its closed-form minimiser is `fedshift.functional.averaging.merge_moments`."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from fedshift.errors import UserError
from fedshift.functional.averaging import is_buffer
from fedshift.weights import Weights

_MEAN = "running_mean"
_VARIANCE = "running_var"


def batchnorm_objective(batch_features: Tensor, means: Tensor, variances: Tensor, shares: Tensor) -> Tensor:
    """``Σ_k α_k (‖mean(π) − m_k‖² + ‖mean(π²) − (v_k + m_k²)‖²)`` of one BatchNorm layer, a scalar (KD3A, section 7.3).

    batch_features: π, what enters the layer, (n, c) or (n, c, …); means run over samples and positions. means,
    variances: m_k and v_k, each model's running statistics, (K, c). shares: α_k, (K,). Differentiable by all of them.
    Raises UserError for other shapes or an empty batch.
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
    """``Σ_l ‖Δ m‖² + ‖Δ (v + m²)‖²`` over two models' BatchNorm layers, in float64 (section 7.3, 7.5).

    per_channel: divided by the number of channels of all layers, so that it does not grow with the network. The layers
    are known by keys that end in ``running_mean`` and ``running_var``; 0 when there is none.
    Raises UserError when the two models' layers differ.
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
