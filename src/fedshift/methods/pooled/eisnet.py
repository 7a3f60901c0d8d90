"""EISNet: jigsaw puzzles (inside an image) and momentum metric learning (between images) beside the classes.

Wang, Yu, Li, Fu, Heng: Learning from Extrinsic and Intrinsic Supervisions for Domain Generalization. ECCV 2020.

Setting: domain generalization, *not private*: the data of all sources lie in one place.
Wire: every training sample once (the ledger counts them as raw data); no exchange is needed after that.

    L = L_class + α · L_intrinsic + β · L_extrinsic                                                (1)
    L_intrinsic: which permutation the tiles of an image have (JiGen)
    L_extrinsic = mean max(0, ‖q − p‖² − ‖q − n‖² + ξ)                                            (4)
q is the normalised embedding of an image, p the farthest key of its class, n each of the k nearest keys of others.
Keys are embeddings that a momentum copy of the network made of the last batches, K of them in a queue:
    θ_key ← m θ_key + (1 − m) θ                                                                    (3)

Where papers and code differ, and what was chosen
 1. β grows from 0.5 to 1 over the run (code: over 100 epochs); α = 0.7, ξ = 2, K = 1024, k = 256, m = 0.999 (the
    script for PACS with ResNet-50).
 2. Classes are learnt on images whose tiles lie in order, as JiGen's paper says.
 3. The embedding head has one hidden layer as wide as the features, and 128 numbers.
 4. The queue begins empty: a step uses the keys that are there, those of its own batch included.

Should reproduce: PACS ResNet-18 81.89, 76.44, 95.93, 74.33 (82.15); VLCS AlexNet 74.67.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

import torch.nn.functional as F
from pydantic import Field, NonNegativeFloat, PositiveInt
from torch import Tensor, nn

from fedshift.federation.messages import Update
from fedshift.federation.site import Batch, Site
from fedshift.functional.jigsaw import MOST
from fedshift.methods.base import Samples
from fedshift.methods.composition.plug_in import check_tiles
from fedshift.methods.composition.puzzles import Puzzles
from fedshift.methods.composition.triplets import KeyQueue
from fedshift.methods.pooled.training import PooledTraining
from fedshift.models.network import Network
from fedshift.weights import Weights


class EISNet(PooledTraining):
    """Jigsaw puzzles and triplets over a queue of keys."""

    name: ClassVar[str] = "eisnet"
    relative_cost: ClassVar[float] = 1.6

    jigsaw_weight: NonNegativeFloat = Field(0.7, description="α")
    metric_weight: NonNegativeFloat = Field(0.5, description="β at the start of the run")
    metric_weight_end: NonNegativeFloat = Field(1.0, description="β at its end")
    permutations: Annotated[int, Field(ge=1, le=MOST)] = Field(30, description="P")
    ordered: Annotated[float, Field(ge=0, le=1)] = Field(0.9, description="probability that an image stays in order")
    tile_greyscale: Annotated[float, Field(ge=0, le=1)] = Field(
        0.1, description="probability that a tile of a shuffled colour image loses its colour"
    )
    embedding: PositiveInt = Field(128, description="width of the embedding")
    queue: PositiveInt = Field(1024, description="K: keys that are kept")
    hard_negatives: PositiveInt = Field(256, description="k")
    margin: NonNegativeFloat = Field(2.0, description="ξ")
    momentum: Annotated[float, Field(ge=0, le=1)] = Field(0.999, description="m of the key encoder")

    def check_samples(self, samples: Samples) -> tuple[str, ...]:
        return check_tiles(self.name, samples.shape)

    def fit(self, site: Site, weights: Weights, steps: int) -> Update:
        """Train on this round's mini-batches in the pool."""
        model = site.model(weights)
        parts = self.parts(site, lambda: Parts(model, self))
        puzzles = Puzzles(site, self.permutations, self.ordered, self.tile_greyscale)
        stepped = False

        def loss_of(batch: Batch) -> Tensor:
            nonlocal stepped
            if stepped:  # since the batch before
                parts.follow(model)
            stepped = True
            inputs, orders = puzzles.of(batch.inputs)
            features = model.features(inputs)
            parts.enqueue(inputs, batch.targets)
            beta = self.metric_weight + (self.metric_weight_end - self.metric_weight) * self.progress(site)
            loss = self.jigsaw_weight * F.cross_entropy(parts.jigsaw(features), orders)
            loss = loss + beta * parts.triplet_loss(features, batch.targets, self.margin, self.hard_negatives)
            return loss + site.objective.loss_of_some(orders == 0, model.classifier(features), batch.targets)

        loss = site.minimise(loss_of, model, parts, steps=steps, remember="optimizer")
        if stepped:
            parts.follow(model)
        site.memory["parts"] = site.weights_of(parts)
        return Update(site.weights_of(model), site.samples, loss)


class Parts(KeyQueue):
    """What trains beside the model: the head of the puzzles, and what the triplets need.

    Args:
        model: The network that is published.
        method: The options.
    """

    def __init__(self, model: Network, method: EISNet) -> None:
        jigsaw = nn.Linear(model.embedding_size, method.permutations + 1)
        super().__init__(model, method.embedding, method.queue, method.momentum)
        self.jigsaw = jigsaw
