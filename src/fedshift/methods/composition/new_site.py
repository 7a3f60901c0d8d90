"""What the network that predicts at an unseen site takes from the samples there. No label is used and nothing is sent.

``batch_norm_at_new_site: 16`` gives statistics of these samples to BatchNorm (Schneider et al., NeurIPS 2020), and
``classifier_at_new_site: 16`` turns the classifier towards their features (T3A: Iwasawa, Matsuo, NeurIPS 2021). The
samples that are predicted together are taken for those of one site. The fewer they are, the closer the network stays to
the trained one.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedshift.data.site_data import mixed_order
from fedshift.data.tasks.objective import CLASSES
from fedshift.functional.losses import entropy_of_logits
from fedshift.models.network import Network
from fedshift.models.normalisation import adapted_to


@dataclass(frozen=True)
class NewSite:
    """How a network is adapted to the samples of an unseen site."""

    batch_norm: int | None = None  # how many samples BatchNorm's trained statistics count for; None: they stay
    # how many samples of its class a row of the trained classifier counts for; None: it stays
    classifier: int | None = None

    def order(self, samples: int) -> Tensor | None:
        """The order in which `adapt` should see the site's samples; None: any.

        Files are often sorted by class. BatchNorm has to see mini-batches of all classes, since each of its layers
        reads what the layers before it normalise by their mini-batch.
        """
        return None if self.batch_norm is None else mixed_order(samples)

    def adapt(self, network: Network, batches: Callable[[], Iterable[Tensor]]) -> Network:
        """The network that predicts there, in evaluation mode.

        ``network``: the trained one. It is not changed. ``batches``: begins a pass over the inputs, in the order that
        `order` gives.
        """
        if self.batch_norm is not None:
            network = adapted_to(network, batches(), self.batch_norm)
        return network if self.classifier is None else _turn_classifier(network, batches(), self.classifier)


@torch.no_grad()
def _turn_classifier(network: Network, batches: Iterable[Tensor], prior: int) -> Network:
    """A copy of ``network`` with a classifier turned towards the features of these inputs (`turned_templates`)."""
    made = copy.deepcopy(network).eval()
    if not turns(made) or made.objective != CLASSES:
        return made
    result = [made.features(inputs).float() for inputs in batches]
    if result:
        features, classifier = torch.cat(result), made.classifier
        assert isinstance(classifier, nn.Linear)
        classifier.weight.copy_(turned_templates(classifier.weight, classifier(features), features, prior))
        if classifier.bias is not None:
            classifier.bias.zero_()
    return made


def turns(network: Network) -> bool:
    """Whether the classifier is one linear layer, whose rows can be turned."""
    return type(network).forward is Network.forward and isinstance(network.classifier, nn.Linear)


@torch.no_grad()
def turned_templates(templates: Tensor, logits: Tensor, features: Tensor, prior: int) -> Tensor:
    """A linear classifier turned towards samples without labels, ``(1 − s)·w_k/‖w_k‖ + s·mean(z_i/‖z_i‖)``, (C, d).

    The mean is over the half of the samples predicted as class k whose prediction has the least entropy, rounded up. A
    class that is never predicted keeps w_k. Every row gets the same norm, the mean norm of the w_k, and there is no
    bias: it says how frequent the classes were where the classifier was trained.

    s = n/(n + N·C) is the same for all classes. Features of all classes have much in common, so a class that turned
    further towards its samples than another would win samples of the other.

    Source: T3A (Iwasawa, Matsuo, NeurIPS 2021), where samples come one by one, w_k counts as one sample of its class,
    and a fixed number of samples is kept for each class.
    """
    rows, size = functional.normalize(templates), templates.norm(dim=1).mean()
    unit, doubt, predicted = functional.normalize(features), entropy_of_logits(logits), logits.argmax(1)
    share = len(features) / (len(features) + prior * len(rows)) if len(features) else 0.0
    turned = rows.clone()
    for number in sorted(set(predicted.tolist())):
        members = (predicted == number).nonzero()[:, 0]
        surest = members[doubt[members].argsort(stable=True)[: math.ceil(len(members) / 2)]]
        turned[number] = (1 - share) * rows[number] + share * unit[surest].mean(0)
    result: Tensor = size * functional.normalize(turned)
    return result
