"""DeepAll: pool the data of all sources and train one model.

The usual centralised baseline of domain generalization (first under this name in Li, Yang, Song, Hospedales: Deeper,
Broader and Artier Domain Generalization, ICCV 2017).

Setting: domain generalization, *not private*: the data of all sources are in one place.
Wire: every training sample once (the ledger counts them as raw data); no exchange is needed after that.

    min_θ  Σ_k Σ_i CE(f_θ(x_i^k), y_i^k)

Where papers and code differ: no choice is needed. Equal work: the pool trains on as many mini-batches as all sites of
the federated methods together, spread evenly over the rounds.

Should reproduce: Rotated MNIST average 94.30 ± 0.29, PACS ResNet-18 80.24 ± 0.50 (as printed by CSAC).
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field, PositiveInt

from fedshift.data.domain import ALL_TASKS, Task
from fedshift.federation.federation import Federation
from fedshift.federation.messages import Update
from fedshift.federation.site import Site
from fedshift.methods.base import Method, State
from fedshift.weights import Weights


class DeepAll(Method):
    """The task's loss on the pooled data of all sources."""

    name: ClassVar[str] = "deepall"
    pooled: ClassVar[bool] = True
    tasks: ClassVar[tuple[Task, ...]] = ALL_TASKS

    local_epochs: PositiveInt = Field(
        1, description="passes over the data per round, when no other method asks for more"
    )

    def mini_batches(self, batches_per_epoch: int, rounds: int) -> int:
        return rounds * self.local_epochs * batches_per_epoch

    def round(self, federation: Federation, state: State) -> State:
        (pool,) = federation.sources
        update = federation.ask(
            self.fit, to=federation.sources, weights=state.weights, steps=federation.share(pool)
        ).only()
        return state.advance(update.weights, report={"losses": {pool: update.loss}})

    def fit(self, site: Site, weights: Weights, steps: int) -> Update:
        """Train on this round's mini-batches in the pool."""
        model = site.model(weights)
        loss = site.minimise(
            lambda batch: site.objective.loss(model(batch.inputs), batch.targets),
            model,
            steps=steps,
            remember="optimizer",
        )
        return Update(site.weights_of(model), site.samples, loss)
