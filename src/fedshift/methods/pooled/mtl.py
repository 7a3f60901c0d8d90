"""MTL: a classifier that also reads what its domain is like.

Blanchard, Deshmukh, Dogan, Lee, Scott: Domain Generalization by Marginal Transfer Learning. JMLR 2021, arXiv
1711.07910, with networks as in DomainBed.

Setting: domain generalization, *not private*: the data of all sources lie in one place, with their domains' names.
Wire: every training sample once (the ledger counts them as raw data); no exchange is needed after that.

The paper's kernel machine reads a sample and the distribution of its domain. Here the distribution is the mean of the
features f:
    μ_e ← ρ mean_(x in e) f(x) + (1 − ρ) μ_e,     L(θ) = 1/K Σ_e CE(h(f(x), μ_e), y)
with the gradient of the batch's mean. At a domain that was not seen μ is the mean of the samples that are predicted.

Where papers and code differ, and what was chosen
 1. DomainBed (facebookresearch/DomainBed, domainbed/algorithms.py, MTL.predict) overwrites μ_e with normal noise in
    training and in prediction, by a function that works in place. **Not here**: the comparisons are with its code
    without that call.
 2. ρ = 0.99 there: almost all of μ_e is the last batch's mean. It adds the losses; here it is their mean.
 3. h reads f and μ by a layer each, whose outputs are added: for a linear classifier the same as one that reads both.
 4. A prediction depends on the samples that are predicted together, 500 at a time where a run measures. With
    ``unseen: sources`` it does not: μ is the mean of the sources'.
 5. A step counts K mini-batches, one of each source; with ``domain_batches: split`` these are the parts of one.

Should reproduce (DomainBed's table, ResNet-50, training-domain validation): VLCS 77.2, PACS 84.6, OfficeHome 66.4,
TerraIncognita 45.6. All with noise in the place of μ.
"""

from __future__ import annotations

from typing import Annotated, Literal, cast

import torch
from pydantic import Field
from torch import Tensor, nn

from fedshift.data.domain import WITHOUT_MASKS
from fedshift.federation.randomness import derive_seed, drawn_from
from fedshift.methods.method_tests import MethodTests, tries
from fedshift.methods.pooled.penalty import DomainLoss, Step
from fedshift.models.network import Network


class MTL(DomainLoss):
    """The loss of a classifier that reads the features and their mean in the domain."""

    traits = DomainLoss.traits.derive(
        name="mtl",
        citation="Blanchard et al., JMLR 2021",
        group="pooled",
        advice="For many sources, of which each says what a kind of site is like; predictions depend on the samples "
        "that are predicted together.",
        tasks=WITHOUT_MASKS,
        unfit_plug_ins={
            **DomainLoss.traits.unfit_plug_ins,
            "dropout": "which classifies each domain beside a mean of its own",
        },
        tests=MethodTests(options={"newest": tries(0.3)}),
    )

    newest: Annotated[float, Field(gt=0, le=1)] = Field(0.99, description="ρ: the share of the step's mean in μ_e")
    unseen: Literal["batch", "sources"] = Field(
        "batch", description="μ of what is predicted: the mean of its samples, or of the sources' μ_e"
    )

    def adapt_network(self, network: Network, sources: int) -> Network:
        with drawn_from(derive_seed(network.seed, "embedding")):
            of_mean = nn.Linear(network.embedding_size, network.classes, bias=False)
        whole = Contextual(network.classifier, of_mean, sources, self.unseen == "batch")
        return network.with_parts(network.features, whole)

    def loss(self, step: Step) -> Tensor:
        whole = cast(Contextual, step.model.classifier)
        features = step.by_domain(step.features)
        means = torch.stack([part.mean(0) for part in features])
        embeddings = self.newest * means + (1 - self.newest) * whole.embeddings
        whole.embeddings.copy_(embeddings.detach())
        logits = [whole.beside(part, embedding) for part, embedding in zip(features, embeddings, strict=True)]
        pairs = zip(logits, step.batches, strict=True)
        return torch.stack([step.site.objective.loss(predicted, batch.targets) for predicted, batch in pairs]).mean()


class Contextual(nn.Module):
    """A classifier of features and of a domain's mean of them.

    ``by_batch``: whether the mean is that of the features that come; else that of the sources.
    """

    embeddings: Tensor

    def __init__(self, classifier: nn.Module, of_mean: nn.Linear, sources: int, by_batch: bool) -> None:
        super().__init__()
        self.classifier, self.of_mean, self.by_batch = classifier, of_mean, by_batch
        self.register_buffer("embeddings", torch.zeros(sources, of_mean.in_features))

    def beside(self, features: Tensor, embedding: Tensor) -> Tensor:
        """Outputs for features (n, d) of a domain with this mean, (d,)."""
        outputs: Tensor = self.classifier(features) + self.of_mean(embedding)
        return outputs

    def forward(self, features: Tensor) -> Tensor:
        return self.beside(features, (features if self.by_batch else self.embeddings).mean(0))
