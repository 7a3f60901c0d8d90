"""Fish: gradients of the domains agree, by steps on one domain after the other.

Shi, Seely, Torr, Siddharth, Hannun, Usunier, Synnaeve: Gradient Matching for Domain Generalization. ICLR 2022,
arXiv 2104.09937, algorithm 1.

Setting: domain generalization, *not private*: the data of all sources lie in one place, with their domains' names.
Wire: every training sample once (the ledger counts them as raw data); no exchange is needed after that.

    θ̃ ← θ;  for each domain e in an order drawn anew:  θ̃ ← θ̃ − α ∇L_e(θ̃)
    θ ← θ + ε (θ̃ − θ)
To first order this also ascends the mean inner product of the domains' gradients (theorem 3.1).

Where papers and code differ, and what was chosen
 1. α is the learning rate, and the experiment's optimiser takes the inner steps. Its moments go on from step to step,
    as in DomainBed (facebookresearch/DomainBed, domainbed/algorithms.py, Fish). The paper has SGD without moments.
 2. DomainBed visits the domains in one order: ``order: fixed`` and ``setting: domainbed``. ε = 0.5 there, and here.
    The authors' code (YugeTen/fish, src/config.py) has 0.01 to 0.15, divided by the number of inner steps.
 3. BatchNorm's running statistics move by ε, too.
 4. A step counts K mini-batches, one of each source; with ``domain_batches: split`` these are the parts of one.
    It makes K steps of the optimiser.

Should reproduce: no row in DomainBed's published table; its code later than that has the method.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from fedshift.data.domain import WITHOUT_MASKS
from fedshift.federation.messages import Update
from fedshift.federation.site import Batch, Site
from fedshift.methods.method_tests import MethodTests, tries
from fedshift.methods.pooled.side_modules import DomainTraining
from fedshift.models.network import Network
from fedshift.weights import Weights


class Fish(DomainTraining):
    """A part of the way that steps on one domain after the other take."""

    traits = DomainTraining.traits.derive(
        name="fish",
        citation="Shi et al., ICLR 2022",
        group="pooled",
        advice="For domains whose gradients disagree, at the cost of plain training; it wants several domains.",
        settings={"domainbed": {"order": "fixed"}},
        tasks=WITHOUT_MASKS,
        memory_names=("optimizer",),
        tests=MethodTests(options={"meta_rate": tries(0.1, 1.0)}),
    )

    meta_rate: Annotated[float, Field(gt=0, le=1)] = Field(0.5, description="ε: the part of the way that is taken")
    order: Literal["drawn", "fixed"] = Field("drawn", description="of the domains in a step")

    def steps(self, mini_batches: int, domains: int) -> float:
        """One on each domain, for each that it draws."""
        return domains * super().steps(mini_batches, domains)

    def fit(self, site: Site, weights: Weights, steps: int) -> Update:
        """Train on this round's mini-batches in the pool."""
        model = site.model(weights)

        def loss_of(batch: Batch) -> Tensor:
            return site.objective.loss(model(batch.inputs), batch.targets)

        return self.train(site, self.turns(site, model, steps), loss_of, model)

    def turns(self, site: Site, model: Network, steps: int) -> Iterator[Batch]:
        """Batch after batch of a step; then ``model``, which has trained on them, goes back a part of the way."""
        draws = site.generator_for("order of domains")
        for batches in self.of_sources(site, steps):
            start = {name: value.clone() for name, value in model.state_dict().items()}
            order = torch.randperm(len(batches), generator=draws).tolist()
            for number in order if self.order == "drawn" else range(len(batches)):
                yield batches[number]
            with torch.no_grad():
                for name, value in model.state_dict().items():
                    if value.is_floating_point():
                        value.copy_(start[name].lerp(value, self.meta_rate))
