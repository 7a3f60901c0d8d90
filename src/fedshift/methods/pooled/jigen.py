"""JiGen: classify images, and solve jigsaw puzzles made of them.

Carlucci, D'Innocente, Bucci, Caputo, Tommasi: Domain Generalization by Solving Jigsaw Puzzles. CVPR 2019.

Setting: domain generalization, *not private*: the data of all sources lie in one place.
Wire: every training sample once (the ledger counts them as raw data); no exchange is needed after that.

An image is cut into 3×3 tiles. With probability 1 − β they are shuffled by one of P permutations, z says by which
(0: none). A second head on the features names it:
    L = CE(h(x), y) over ordered images  +  α · CE(h_p(z), p) over all images                    (1)

Where papers and code differ, and what was chosen. Code: fmcarlucci/JigenDG.
 1. ``class_on: all`` classifies shuffled images, too (``train_jigsaw.py``, ``Trainer._do_epoch``, without
    ``--classify_only_sane``).
 2. α is 0.7, β is 0.9 (the README's command; α's default in the code, train_jigsaw.py, `get_args`, is 0.1).
 3. The permutations are an exact set of the largest distance instead of a random search: see
    `tile_permutations`.
 4. Every tile of every image turns grey with probability 0.1, shuffled or not (data/JigsawLoader.py,
    ``JigsawDataset.get_tile``): ``tile_greyscale``, where images have colours. The code enlarges tiles before it puts
    them together. Here they keep their size.
 5. One of the P + 1 orders is drawn, and with probability β replaced by the order itself
    (``JigsawDataset.__getitem__``): so an image stays in order with probability β + (1 − β)/(P + 1).
 6. Crops, flips and jitter are ``training.augment``'s.

Should reproduce: PACS ResNet-18 79.42, 75.25, 96.03, 71.35 (80.51); VLCS AlexNet 73.19.
"""

from __future__ import annotations

from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from pydantic import Field, NonNegativeFloat
from torch import Tensor, nn

from fedshift.data.domain import WITHOUT_MASKS
from fedshift.data.tasks.objective import CLASSES, Objective
from fedshift.federation.messages import Update
from fedshift.federation.site import Batch, Site
from fedshift.methods.base import Samples
from fedshift.methods.composition.plug_in import MOST, check_tiles
from fedshift.methods.composition.puzzles import Puzzles
from fedshift.methods.method_tests import MethodTests, tries
from fedshift.methods.pooled.side_modules import ITS_OWN, PooledTraining
from fedshift.weights import Weights


class JiGen(PooledTraining):
    """A second head that names the order of an image's tiles."""

    traits = PooledTraining.traits.derive(
        name="jigen",
        citation="Carlucci et al., CVPR 2019",
        group="pooled",
        advice="For images whose parts say the class; no gain shown: 75.72 on PACS images, +1.15 over deepall (p "
        "= 1.000), while it greyed tiles of shuffled images alone.",
        tasks=WITHOUT_MASKS,
        unfit_plug_ins={
            "jigsaw": ITS_OWN,
            "label_smoothing": "which learns no class of the images that it shuffles",
        },
        relative_cost=1.1,
        tests=MethodTests(
            options={
                "jigsaw_weight": tries(0.0, 3.0),
                "permutations": tries(4),
                "ordered": tries(0.2, 1.0),
                "class_on": tries("all", ordered=0.5),
                "tile_greyscale": tries(0.0, 1.0, where="colour", ordered=0.2),
            },
        ),
    )

    jigsaw_weight: NonNegativeFloat = Field(0.7, description="α (code's default: 0.1)")
    permutations: Annotated[int, Field(ge=1, le=MOST)] = Field(30, description="P")
    ordered: Annotated[float, Field(ge=0, le=1)] = Field(0.9, description="β: probability that an image stays in order")
    class_on: Literal["ordered", "all"] = Field("ordered", description="images whose class is learnt (code: all)")
    tile_greyscale: Annotated[float, Field(ge=0, le=1)] = Field(
        0.1, description="probability that a tile of a colour image loses its colour"
    )

    def check_samples(self, samples: Samples) -> tuple[str, ...]:
        return check_tiles(self.name, samples.shape)

    def fit(self, site: Site, weights: Weights, steps: int) -> Update:
        """Train on this round's mini-batches in the pool."""
        model = site.model(weights)
        head = self.parts(site, lambda: nn.Linear(model.embedding_size, self.permutations + 1))
        puzzles = Puzzles(site, self.permutations, self.ordered, self.tile_greyscale)

        def loss_of(batch: Batch) -> Tensor:
            inputs, orders = puzzles.of(batch.inputs)
            features = model.features(inputs)
            return jigsaw_loss(
                model.classifier(features),
                batch.targets,
                head(features),
                orders,
                weight=self.jigsaw_weight,
                class_on=self.class_on,
                objective=site.objective,
            )

        return self.train(site, self.of_all(site, steps), loss_of, model, head)


def jigsaw_loss(
    logits: Tensor,
    labels: Tensor,
    named: Tensor,
    orders: Tensor,
    *,
    weight: float,
    class_on: Literal["ordered", "all"],
    objective: Objective = CLASSES,
) -> Tensor:
    """L of (1).

    ``named``: logits of the permutations, (n, P + 1). ``orders``: each image's permutation, (n,); 0: in order.
    ``weight``: α.
    """
    classified = orders == 0 if class_on == "ordered" else torch.ones_like(orders, dtype=torch.bool)
    return objective.loss_of_some(classified, logits, labels) + weight * F.cross_entropy(named, orders)
