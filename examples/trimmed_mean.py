"""Your own server: FedAvg with the coordinate-wise trimmed mean, which a few outlying sites cannot change much.

Yin, Chen, Ramchandran, Bartlett: Byzantine-Robust Distributed Learning. ICML 2018, Algorithm 1, option II. The paper
averages gradients; here sites send trained models.
"""

import torch
from pydantic import Field, NonNegativeInt

from fedshift.methods import Federation, LocalTraining, State, UserError, Weights


class TrimmedMean(LocalTraining):
    """Of every number of the model, the mean without the highest and the lowest values."""

    traits = LocalTraining.traits.derive(name="trimmed_mean")

    trim: NonNegativeInt = Field(1, description="b: sites left out at each end, for every number of the model")

    def round(self, federation: Federation, state: State) -> State:
        updates = federation.ask(self.fit, to=federation.sources, weights=state.weights)
        models = [update.weights for update in updates]
        if len(models) <= 2 * self.trim:
            raise UserError(f"trimmed_mean.trim: {self.trim} at each end leaves none of {len(models)} sites; lower it")
        mean = {name: trimmed_mean(torch.stack([model[name] for model in models]), self.trim) for name in state.weights}
        return state.advance(Weights(mean), report={"losses": updates.numbers("loss")})


def trimmed_mean(values: torch.Tensor, trim: int) -> torch.Tensor:
    """Mean over the first dimension without the ``trim`` highest and lowest; of integers (counters) the maximum."""
    if not values.is_floating_point():
        return values.amax(dim=0)
    return values.sort(dim=0).values[trim : len(values) - trim].mean(dim=0)
