"""Your own loss: FedAvg with a penalty on overconfident predictions.

Pereyra, Tucker, Chorowski, Kaiser, Hinton: Regularizing Neural Networks by Penalizing Confident Output Distributions.
ICLR 2017, workshop track. Every site minimises  CE(p, y) − β · H(p),  H(p) = −Σ_c p_c log p_c.
"""

from collections.abc import Callable

import torch.nn.functional as F
from pydantic import Field, NonNegativeFloat
from torch import Tensor

from fedshift.methods import Batch, FedAvg, Network, Site, Weights


class ConfidencePenalty(FedAvg):
    """FedAvg on cross-entropy minus β times the entropy of the prediction."""

    traits = FedAvg.traits.derive(name="confidence_penalty", tasks=("classification",))

    beta: NonNegativeFloat = Field(0.1, description="β: weight of the entropy; 0 = FedAvg")

    def loss_at(self, site: Site, model: Network, weights: Weights) -> Callable[[Batch], Tensor]:
        return lambda batch: penalised(model(batch.inputs), batch.targets, self.beta)


def penalised(logits: Tensor, labels: Tensor, beta: float) -> Tensor:
    """CE − β · H of a batch of logits (n, classes), a scalar."""
    said = logits.log_softmax(1)
    entropy = -(said.exp() * said).sum(1).mean()
    return F.nll_loss(said, labels) - beta * entropy
