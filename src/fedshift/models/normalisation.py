"""Normalisation layers that replace BatchNorm, and BatchNorm with the statistics of a new site."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from fedshift.models.instance_methods import has_method
from fedshift.models.network import Network


class BatchInstanceNorm2d(nn.BatchNorm2d):
    """ρ·BatchNorm + (1 − ρ)·InstanceNorm, with one scale and shift for both.

    ρ (``gate``) is learned per channel. It starts at 1, which is plain BatchNorm, and is cut to [0, 1] after each step:
    here before it is used next, outside of the graph, so that its gradient is not lost at the bounds. Source: Nam and
    Kim, NeurIPS 2018, section 3.2.

    ``like``: the layer whose settings, weights and statistics are copied.
    """

    def __init__(self, like: nn.BatchNorm2d) -> None:
        super().__init__(like.num_features, like.eps, like.momentum, like.affine, like.track_running_stats)
        self.load_state_dict(like.state_dict())
        self.gate = nn.Parameter(torch.ones(like.num_features))

    def forward(self, inputs: Tensor) -> Tensor:
        whole = super().forward(inputs)
        if inputs.shape[2:].numel() == 1:  # InstanceNorm needs more than one position
            return whole
        per_sample = functional.instance_norm(inputs, weight=self.weight, bias=self.bias, eps=self.eps)
        if self.training:
            self.gate.data.clamp_(0, 1)  # `clamp` within the graph has no gradient where the gate starts
        share = (self.gate if self.training else self.gate.clamp(0, 1)).view(1, -1, 1, 1)
        return share * whole + (1 - share) * per_sample


class AssembledNorm2d(nn.Module):
    """ω·BatchNorm + (1 − ω)·InstanceNorm, each with a scale and shift of its own; ω is one number of the layer.

    ω is the softmax of two scores, which both start at 1: so it starts at 1/2. Names of tensors are those by which the
    authors tell what is personal. Source: gPerXAN (Le et al., CVPR 2024), `eXplicitOptimizedNorm2d` of
    lhkhiem28/gPerXAN, source/models/modules/normalization.py.

    ``like``: the layer whose settings, weights and statistics BatchNorm has; InstanceNorm has its scale and shift.
    """

    def __init__(self, like: nn.BatchNorm2d) -> None:
        super().__init__()
        self.score_batchnorm = nn.Parameter(torch.ones(1))
        self.score_instancenorm = nn.Parameter(torch.ones(1))
        self.batchnorm = copy.deepcopy(like)
        self.instancenorm = nn.InstanceNorm2d(like.num_features, eps=like.eps, affine=like.affine)
        if like.affine:
            self.instancenorm.load_state_dict({"weight": like.weight.detach(), "bias": like.bias.detach()})

    def forward(self, inputs: Tensor) -> Tensor:
        whole = self.batchnorm(inputs)
        if inputs.shape[2:].numel() == 1:  # InstanceNorm needs more than one position
            return torch.as_tensor(whole)
        shares = torch.cat((self.score_batchnorm, self.score_instancenorm)).softmax(0)
        return torch.as_tensor(shares[0] * whole + shares[1] * self.instancenorm(inputs))


def with_norms(network: Network, norm: Callable[[nn.BatchNorm2d], nn.Module]) -> Network:
    """A copy of ``network`` with what ``norm`` makes of it in place of every BatchNorm2d."""
    copied = copy.deepcopy(network)  # layers that keep what they loaded stay
    for path, module in list(copied.named_modules()):
        if type(module) is nn.BatchNorm2d and not has_method(module, "train"):
            parent, _, child = path.rpartition(".")
            setattr(copied.get_submodule(parent), child, norm(module))
    return copied


def batch_norms(network: nn.Module) -> list[_BatchNorm]:
    """The BatchNorm layers that follow their data in training mode, thus not those that keep what they loaded."""
    result = [module for module in network.modules() if isinstance(module, _BatchNorm) and module.track_running_stats]
    following = [module for module in result if not has_method(module, "train")]
    return [module for module in following if copy.copy(module).train().training]


@torch.no_grad()
def adapted_to(network: Network, batches: Iterable[Tensor], prior: int) -> Network:
    """A copy of ``network`` in evaluation mode, with statistics of these inputs in its BatchNorm layers.

    Statistics are those that each layer sees when the layers before it normalise by their mini-batch. They are mixed
    with the trained ones as ``prior`` samples would be (`mixed_statistics`).

    ``batches``: inputs. A batch of one sample is left out, since it has no variance.
    """
    made = copy.deepcopy(network).eval()
    layers, samples = batch_norms(made), 0
    if not layers:
        return made
    trained = [_statistics(layer) for layer in layers]
    for layer in layers:
        layer.train()
    for inputs in batches:
        if len(inputs) > 1:
            samples += len(inputs)
            for layer in layers:
                layer.momentum = len(inputs) / samples  # the mean over all samples so far; at first it is all
            made(inputs)
    for layer, before in zip(layers, trained, strict=True):
        layer.eval()
        layer.running_mean, layer.running_var = mixed_statistics(before, _statistics(layer), samples, prior)
    return made


def _statistics(layer: _BatchNorm) -> tuple[Tensor, Tensor]:
    assert layer.running_mean is not None
    assert layer.running_var is not None
    return layer.running_mean.clone(), layer.running_var.clone()


def mixed_statistics(
    trained: tuple[Tensor, Tensor], new: tuple[Tensor, Tensor], samples: int, prior: int
) -> tuple[Tensor, Tensor]:
    """``N/(N+n)·trained + n/(N+n)·new`` for means and for variances.

    Source: Schneider, Rusak, Eck, Bringmann, Brendel, Bethge (NeurIPS 2020): BatchNorm at a new site.
    """
    share = samples / (samples + prior) if samples else 0.0
    mean, variance = ((1 - share) * before + share * now for before, now in zip(trained, new, strict=True))
    return mean, variance
