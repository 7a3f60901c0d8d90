"""What methods on CLIP's features share: they begin with its classifier of texts."""

from __future__ import annotations

from abc import abstractmethod

from torch import Tensor, nn
from torch.nn import functional

from fedshift.errors import UserError
from fedshift.methods.base import Method
from fedshift.models.network import Network
from fedshift.models.networks.clip import TextClassifier


class OnClip(Method):
    """Base of methods that begin with CLIP's classifier of texts. A subclass says what is trained in its place."""

    def adapt_network(self, network: Network, sources: int) -> Network:
        if not isinstance(network.classifier, TextClassifier):
            raise UserError(
                f"{self.name} needs CLIP: write model: {{name: frozen, backbone: {{name: clip, pretrained: FOLDER}}, "
                "scale: clip, head: {name: clip_text, pretrained: FOLDER, class_names: [a, b]}}"
            )
        return self.trained_part(network, network.classifier)

    @abstractmethod
    def trained_part(self, network: Network, texts: TextClassifier) -> Network:
        """The network whose parameters are trained and sent.

        ``network``: features of length 1, and ``texts`` as classifier. It is not changed.
        """


class FixedTexts(nn.Module):
    """A classifier of texts that is no part of the network's state, so nobody trains or sends it."""

    weight: Tensor

    def __init__(self, texts: TextClassifier) -> None:
        super().__init__()
        self.register_buffer("weight", texts.weight.detach().clone(), persistent=False)

    def forward(self, features: Tensor) -> Tensor:
        return functional.linear(features, self.weight)
