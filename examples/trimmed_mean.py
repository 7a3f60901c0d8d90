"""A method of your own: the coordinate-wise trimmed mean, which a few odd sites cannot pull away.

Yin, Chen, Ramchandran, Bartlett: Byzantine-Robust Distributed Learning. ICML 2018, Algorithm 1, option II.
Wire: one model down and one up per site and round. Where the paper averages gradients, sites here send trained models.
"""

from typing import ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field, NonNegativeInt, PositiveInt
from torch import Tensor

from fedshift.methods import Federation, Method, Site, State, Update, UserError, Weights


class TrimmedMean(Method):
    """FedAvg with another mean: per number of the model, the highest and the lowest of the sites are left out."""

    name: ClassVar[str] = "trimmed_mean"
    citation: ClassVar[str] = "Yin et al., ICML 2018"

    trim: NonNegativeInt = Field(1, description="b: sites left out at each end, for every number of the model")
    local_epochs: PositiveInt = Field(1, description="E: passes over a site's data per round")

    def mini_batches(self, batches_per_epoch: int, rounds: int) -> int:
        return rounds * self.local_epochs * batches_per_epoch

    def round(self, federation: Federation, state: State) -> State:
        updates = federation.ask(self.fit, to=federation.sources, weights=state.weights)
        if len(updates) <= 2 * self.trim:
            raise UserError(f"trimmed_mean.trim: {self.trim} at each end leaves none of {len(updates)} sites; lower it")
        models = [update.weights for update in updates]
        mean = {name: trimmed_mean(torch.stack([model[name] for model in models]), self.trim) for name in state.weights}
        return state.advance(Weights(mean), report={"losses": updates.numbers("loss")})

    def fit(self, site: Site, weights: Weights) -> Update:
        model = site.model(weights)
        loss = site.minimise(
            lambda batch: F.cross_entropy(model(batch.inputs), batch.targets), model, epochs=self.local_epochs
        )
        return Update(site.weights_of(model), site.samples, loss)


def trimmed_mean(values: Tensor, trim: int) -> Tensor:
    """Mean over the first dimension without the ``trim`` highest and lowest; integers (counters) give their maximum."""
    if not values.is_floating_point():
        return values.amax(dim=0)
    return values.sort(dim=0).values[trim : len(values) - trim].mean(dim=0)
