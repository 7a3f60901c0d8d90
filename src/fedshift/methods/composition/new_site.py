"""What the network that predicts at an unseen site takes from the samples there. No label is used and nothing is sent.

``batch_norm_at_new_site: 16`` gives statistics of these samples to BatchNorm (Schneider et al., NeurIPS 2020), and
``classifier_at_new_site: 16`` turns the classifier towards their features (T3A: Iwasawa, Matsuo, NeurIPS 2021). The
samples that are predicted together are taken for those of one site. The fewer they are, the closer the network stays to
the trained one.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedshift.data.site_data import mixed_order
from fedshift.data.tasks.objective import CLASSES
from fedshift.functional.templates import turned_templates
from fedshift.models.network import Network
from fedshift.models.normalisation import adapted_to


@dataclass(frozen=True)
class NewSite:
    """How a network is adapted to the samples of an unseen site.

    Attributes:
        batch_norm: how many samples BatchNorm's trained statistics count for; None: they stay.
        classifier: how many samples of its class a row of the trained classifier counts for; None: it stays.
    """

    batch_norm: int | None = None
    classifier: int | None = None

    def order(self, samples: int) -> Tensor | None:
        """The order in which `adapt` should see the site's samples; None: any.

        Files are often sorted by class. BatchNorm has to see mini-batches of all classes, since each of its layers
        reads what the layers before it normalise by their mini-batch.
        """
        return None if self.batch_norm is None else mixed_order(samples)

    def adapt(self, network: Network, batches: Callable[[], Iterable[Tensor]]) -> Network:
        """The network that predicts there, in evaluation mode.

        Args:
            network: the trained one. It is not changed.
            batches: begins a pass over the inputs, in the order that `order` gives.
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
