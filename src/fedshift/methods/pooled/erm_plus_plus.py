"""ERM++: plain training with a first part for the classifier alone, and the mean of the weights of its steps.

Teterwak, Saito, Tsiligkaridis, Saenko, Plummer: ERM++: An Improved Baseline for Domain Generalization. 2023, arXiv
2304.01973.

Setting: domain generalization, *not private*: the data of all sources lie in one place.
Wire: every training sample once (the ledger counts them as raw data); no exchange is needed after that.

With the classifier w alone at first, then with all weights θ:
    w ← w − η_w ∇_w L,   then   θ ← θ − η ∇_θ L,   L the cross-entropy of all sources
    θ̄ ← the mean of θ after each step since a step,   which predicts
After each step θ̄ sees the step's samples, so that its BatchNorm has statistics of its own.

Where papers and code differ, and what was chosen. Code: facebookresearch/DomainBed, domainbed/algorithms.py,
ERMPlusPlus; domainbed/lib/misc.py, ErmPlusPlusMovingAvg.
 1. The code trains w for 501 steps and averages from step 599 on, of 5,001. Here these are shares of the run, 0.1 and
    0.12. **In a run of few steps its code trains the classifier alone.**
 2. η_w is the run's rate; in the code both are 5e-5 for a ResNet-50. The optimiser forgets its moments when θ begins.
 3. The code lowers the rate where the loss on held-out parts stalls, and then trains on these parts, too. Here the rate
    is ``training.schedule``.
 4. Its start, a network trained with AugMix, is ``model.pretrained``.

Should reproduce: no row in DomainBed's published table; its code later than that has the method.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedshift.data.domain import WITHOUT_MASKS
from fedshift.federation.messages import Update
from fedshift.federation.site import Batch, Site
from fedshift.federation.site_memory import begin_momentum
from fedshift.methods.method_tests import MethodTests, tries
from fedshift.methods.pooled.side_modules import PooledTraining
from fedshift.models.network import Network
from fedshift.weights import Weights

Share = Annotated[float, Field(ge=0, le=1)]


class ERMPlusPlus(PooledTraining):
    """The task's loss, for the classifier first; the mean of the steps' weights predicts."""

    traits = PooledTraining.traits.derive(
        name="erm_plus_plus",
        citation="Teterwak et al., 2023",
        group="pooled",
        advice="Plain training as its authors tuned it: for pre-trained networks and long runs.",
        tasks=WITHOUT_MASKS,
        relative_cost=1.2,
        tests=MethodTests(options={"linear_share": tries(0.0, 0.6), "average_from": tries(0.0, 0.8)}),
    )

    linear_share: Share = Field(0.1, description="share of the run in which the classifier trains alone")
    average_from: Share = Field(0.12, description="share of the run after which weights are averaged")

    def fit(self, site: Site, weights: Weights, steps: int) -> Update:
        """Train on this round's mini-batches in the pool."""
        average = site.model(weights)
        run = self.parts(site, lambda: Running(site.model(weights)))
        optimizer = site.optimizer(run.network, memory="optimizer")

        def loss_of(batch: Batch) -> Tensor:
            if self.progress(site) <= self.linear_share:
                begin_momentum(optimizer)  # the features have no gradient
                with torch.no_grad():
                    features = run.network.features(batch.inputs)
            else:
                if not run.whole:
                    run.whole.fill_(True)
                    optimizer.state.clear()
                features = run.network.features(batch.inputs)
            return site.objective.loss(run.network.classifier(features), batch.targets)

        loss = site.minimise_over(self.turns(site, run, average, steps), loss_of, run.network, optimizers=[optimizer])
        site.remember_optimizer(optimizer, "optimizer")
        site.memory["parts"] = site.weights_of(run)
        return Update(site.weights_of(average), site.samples, loss)

    def turns(self, site: Site, run: Running, average: Network, steps: int) -> Iterator[Batch]:
        """Batch after batch; after the step on it the average follows."""
        for batch in self.of_all(site, steps):
            yield batch
            run.leads(average, batch.inputs, self.progress(site) >= self.average_from)


class Running(nn.Module):
    """The network that trains, and how many of its steps the average has."""

    steps: Tensor
    whole: Tensor

    def __init__(self, network: Network) -> None:
        super().__init__()
        self.network = network
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("whole", torch.zeros((), dtype=torch.bool))

    @torch.no_grad()
    def leads(self, average: Network, inputs: Tensor, averaging: bool) -> None:
        """Take these weights into ``average``, or make it equal to them; it sees ``inputs`` for its BatchNorm."""
        self.steps += averaging
        theirs = average.state_dict()
        for name, value in self.network.state_dict().items():
            kept = int(self.steps) / (int(self.steps) + 1) if averaging and value.is_floating_point() else 0.0
            theirs[name].copy_(kept * theirs[name] + (1 - kept) * value)
        if any(isinstance(layer, _BatchNorm) for layer in average.modules()):
            average.train()(inputs)
