"""MDFNet's masks: the layer, the modules that stay at a site, and a network with masked inputs."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor, nn

from fedshift.errors import UserError
from fedshift.functional.masking import draws_like, straight_through_mask
from fedshift.methods.heads import with_block
from fedshift.models.network import Network


class Mask(nn.Module):
    """Multiplies features (b, …) by a mask over all axes but the first. Its logits m̂ start as draws from U(0, 1).

    ``hard``: in evaluation, use 1 where the probability is at least ½ and 0 elsewhere, instead of the probabilities.
    ``drawn``: in training, draw 0 or 1 for each sample, instead of using the probabilities.
    """

    def __init__(self, width: int, hard: bool, drawn: bool = True) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.rand(width))
        self._hard = hard
        self._drawn = drawn

    def forward(self, features: Tensor) -> Tensor:
        flat = features.flatten(1)
        if self.training:
            mask = straight_through_mask(self.logits, draws_like(flat)) if self._drawn else self.logits.sigmoid()
        else:
            mask = (self.logits >= 0).to(flat) if self._hard else self.logits.sigmoid()
        return (flat * mask).view_as(features)


class Private(nn.Module):
    """The modules that stay at a site: the specific mask, and the decoder from both halves to the inputs."""

    def __init__(self, masked: int, embedding: int, hidden: int, inputs: int, drawn: bool = True) -> None:
        super().__init__()
        self.mask = Mask(masked, hard=False, drawn=drawn)
        self.decoder = nn.Sequential(nn.Linear(2 * embedding, hidden), nn.ReLU(), nn.Linear(hidden, inputs))


def parts(model: Network) -> tuple[nn.Module, nn.Module]:
    """Encoder and mask, or mask and encoder."""
    assert isinstance(model.features, nn.Sequential)
    first, second = model.features
    return first, second


def with_masked_inputs(network: Network, hard: bool, drawn: bool = True) -> Network:
    """``network`` with the invariant mask before its features."""
    first = next((module for module in network.features.modules() if list(module.parameters(recurse=False))), None)
    if not isinstance(first, nn.Linear):
        raise UserError("mdfnet.mask: inputs masks the vectors that a fully connected layer reads; choose model mlp")
    width = first.in_features
    mask = parts(with_block(network, lambda _: Mask(width, hard, drawn), size=network.embedding_size))[1]
    features = nn.Sequential(OrderedDict(mask=mask, encoder=network.features))
    return network.with_parts(features, network.classifier, moved_to="encoder")
