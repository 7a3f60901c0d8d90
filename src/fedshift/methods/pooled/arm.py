"""ARM: the network also reads what the samples that come with a sample are like.

Zhang, Marklund, Dhawan, Gupta, Levine, Finn: Adaptive Risk Minimization: Learning to Adapt to Domain Shift. NeurIPS
2021, arXiv 2007.02931, ARM-CML, as DomainBed runs it.

Setting: domain generalization, *not private*: the data of all sources lie in one place, with their domains' names.
Wire: every training sample once (the ledger counts them as raw data); no exchange is needed after that.

g is a small network of three convolutions, which makes one channel of an image. All images of a domain in a step have
the same channel beside their own:
    c_e = mean_(x in e) g(x),     L(θ) = 1/K Σ_e CE(h(f([x, c_e])), y)
When it predicts, the channel is the mean of the samples that are predicted together.

Where papers and code differ, and what was chosen. DomainBed: `ARM` and its base in facebookresearch/DomainBed,
domainbed/algorithms.py, options in domainbed/hparams_registry.py
 1. This is DomainBed's ARM (facebookresearch/DomainBed, domainbed/algorithms.py, ARM; domainbed/networks.py,
    ContextNet). The paper also has variants that adapt by BatchNorm or by gradients.
 2. The network's first layer must be a convolution: it gets one more input channel, drawn anew. In DomainBed's ResNets
    this channel begins as a copy of the first one.
 3. A prediction depends on the samples that are predicted together, 500 at a time where a run measures. DomainBed's
    come in groups of a mini-batch.
 4. A step counts K mini-batches, one of each source; with ``domain_batches: split`` these are the parts of one.
 5. DomainBed trains with Adam. With plain SGD it stayed far below DeepAll on rotated digits, with Adam less so.

Should reproduce (DomainBed's table, ResNet-50, training-domain validation): VLCS 77.6, PACS 85.1, OfficeHome 64.8,
TerraIncognita 45.5.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from fedshift.data.domain import WITHOUT_MASKS
from fedshift.errors import UserError
from fedshift.federation.randomness import derive_seed, drawn_from
from fedshift.methods.base import Samples
from fedshift.methods.composition.plug_in import check_images
from fedshift.methods.method_tests import MethodTests
from fedshift.methods.pooled.penalty import DomainLoss, Step
from fedshift.models.network import Network


class ARM(DomainLoss):
    """The loss of a network with one more channel, which says what the domain is like."""

    traits = DomainLoss.traits.derive(
        name="arm",
        citation="Zhang et al., NeurIPS 2021",
        group="pooled",
        advice="For many sources and samples that come in groups of one kind; predictions depend on the samples that "
        "are predicted together. Train it with adam: with SGD it stayed far below deepall on rotated digits.",
        tasks=WITHOUT_MASKS,
        relative_cost=2.0,
        tests=MethodTests(rates=(0.005, 0.02)),
    )

    def check(self, network: Network) -> None:
        super().check(network)
        first = first_layer(network.features)
        if first is None or not isinstance(network.features.get_submodule(first), nn.Conv2d):
            raise UserError(f"{self.name} needs a network whose first layer is a convolution, such as mnist_cnn")

    def check_samples(self, samples: Samples) -> tuple[str, ...]:
        check_images(self.name, samples.shape, "vectors have no channels")
        return super().check_samples(samples)

    def adapt_network(self, network: Network, sources: int) -> Network:
        self.check(network)
        with drawn_from(derive_seed(network.seed, "context")):
            whole = InContext(copy.deepcopy(network.features))
        return network.with_parts(whole, network.classifier, moved_to="body")

    def loss(self, step: Step) -> Tensor:
        whole = cast(InContext, step.model.features)
        features = whole.of_groups(step.inputs, [len(batch.inputs) for batch in step.batches])
        logits = step.by_domain(step.model.classifier(features))
        pairs = zip(logits, step.batches, strict=True)
        return torch.stack([step.site.objective.loss(predicted, batch.targets) for predicted, batch in pairs]).mean()


class InContext(nn.Module):
    """A feature extractor of images with one more channel, the same for all of a group."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        path = cast(str, first_layer(body))
        first = cast(nn.Conv2d, body.get_submodule(path))
        self.context = context_network(first.in_channels)
        self.body = body
        parent, _, name = path.rpartition(".")
        setattr(body.get_submodule(parent), name, Widened(first))

    def of_groups(self, images: Tensor, sizes: Sequence[int]) -> Tensor:
        """Features of images (n, c, h, w), which are groups of these sizes, one after the other."""
        means = [part.mean(0, keepdim=True).expand_as(part) for part in self.context(images).split(list(sizes))]
        features: Tensor = self.body(torch.cat([images, torch.cat(means)], 1))
        return features

    def forward(self, images: Tensor) -> Tensor:
        return self.of_groups(images, [len(images)])


def first_layer(features: nn.Module) -> str | None:
    """The path of the first convolution or linear layer; None if there is none."""
    layers = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)
    return next((path for path, layer in features.named_modules() if path and isinstance(layer, layers)), None)


class Widened(nn.Module):
    """A convolution of one more channel, whose weights are drawn as if it had always had them."""

    def __init__(self, images: nn.Conv2d) -> None:
        super().__init__()
        channels = images.in_channels + 1
        self.images = images
        self.context = nn.Conv2d(
            1,
            images.out_channels,
            cast(tuple[int, int], images.kernel_size),
            cast(tuple[int, int], images.stride),
            cast(tuple[int, int], images.padding),
            cast(tuple[int, int], images.dilation),
            bias=False,
        )
        with torch.no_grad():
            self.context.weight /= channels**0.5

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.images(inputs[:, :-1]) + self.context(inputs[:, -1:])
        return outputs


def context_network(channels: int) -> nn.Sequential:
    """g: images (n, c, h, w) → (n, 1, h, w)."""
    return nn.Sequential(
        nn.Conv2d(channels, 64, 5, padding=2),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.Conv2d(64, 64, 5, padding=2),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.Conv2d(64, 1, 5, padding=2),
    )
