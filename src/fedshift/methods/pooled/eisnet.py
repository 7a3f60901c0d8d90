"""EISNet: jigsaw puzzles (inside an image) and momentum metric learning (between images) beside the classes.

Wang, Yu, Li, Fu, Heng: Learning from Extrinsic and Intrinsic Supervisions for Domain Generalization. ECCV 2020.

Setting: domain generalization, *not private*: the data of all sources lie in one place.
Wire: every training sample once (the ledger counts them as raw data); no exchange is needed after that.

    L = L_class + α · L_intrinsic + β · L_extrinsic                                                (1)
    L_intrinsic: which permutation the tiles of an image have (JiGen)
    L_extrinsic = mean max(0, ‖q − p‖² − ‖q − n‖² + ξ)                                            (4)
q is the normalised embedding of an image whose tiles may be shuffled, p the key of another image of its class in the
batch. n are drawn among the semi-hard keys of other classes, 0 < ‖q − p‖² − ‖q − n‖² + ξ < ξ, at most k for a pair.
Keys are embeddings of the images in order that a momentum copy of the network made, K of the last in a queue:
    θ_key ← m θ_key + (1 − m) θ                                                                    (3)

Where papers and code differ, and what was chosen. Code: EmmaW8/EISNet, code/train.py, ``Trainer._do_epoch``.
 1. α = 0.7, β = 0.5, ξ = 2, K = 1024, k = 256, m = 0.999 (``run_PACS_photo_Resnet50.sh``). The code defines a growth
    of β from 0.5 to 1 and never calls it (``Trainer.update_moco_weight``): ``metric_weight_end``.
 2. Classes are learnt on all images, shuffled ones included; ``class_on: ordered`` is JiGen's way.
 3. The paper speaks of hard positives and negatives. The code's positives are all pairs of a batch, each once, and its
    negatives are drawn with repetition (``code/utils/anchor_selector.py``,
    KSemihardNegativeTripletSelectorFromMomentum). A batch without a triplet stops the code; here its loss is 0.
 4. The embedding is one linear layer of 128 outputs (``code/models/resnet.py``, ResNet).
 5. The copy answers in evaluation mode, with the BatchNorm statistics that it began with: those of trained weights
    where the network has these (``Trainer.momentum_update`` moves parameters only).
 6. The queue begins empty: a step uses the keys that are there, those of its own batch included.
 7. In the code a whole image in order, which keys are made of, turns grey with probability 0.1. Here it is as the
    experiment's augmentation gives it.

Should reproduce: PACS ResNet-18 81.89, 76.44, 95.93, 74.33 (82.15); VLCS AlexNet 74.67.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveInt
from torch import Tensor, nn

from fedshift.federation.messages import Update
from fedshift.federation.site import Batch, Site
from fedshift.methods.base import Samples
from fedshift.methods.composition.plug_in import MOST, check_tiles
from fedshift.methods.composition.puzzles import Puzzles
from fedshift.methods.composition.triplets import KeyQueue
from fedshift.methods.method_tests import MethodTests, tries
from fedshift.methods.pooled.jigen import jigsaw_loss
from fedshift.methods.pooled.side_modules import ITS_OWN, OF_ONE_BATCH, PooledTraining
from fedshift.models.network import Network
from fedshift.weights import Weights


class EISNet(PooledTraining):
    """Jigsaw puzzles and triplets over a queue of keys."""

    traits = PooledTraining.traits.derive(
        name="eisnet",
        citation="Wang et al., ECCV 2020",
        group="pooled",
        advice="JiGen with metric learning; not measured since its triplets are those of its authors' code.",
        needs_classes="its triplets are of one class or of two",
        unfit_plug_ins={
            **dict.fromkeys(OF_ONE_BATCH, "whose queue of keys takes a batch once"),
            **dict.fromkeys(("jigsaw", "triplets"), ITS_OWN),
        },
        relative_cost=1.6,
        tests=MethodTests(
            options={
                "jigsaw_weight": tries(0.0, 3.0),
                "metric_weight": tries(0.0, 2.0),
                "metric_weight_end": tries(0.0, 5.0),
                "class_on": tries("ordered", ordered=0.5),
                "permutations": tries(4),
                "ordered": tries(0.2, 1.0),
                "tile_greyscale": tries(0.0, 1.0, where="colour", ordered=0.2),
                "embedding": tries(8),
                "queue": tries(4, 9),
                "hard_negatives": tries(1),
                "margin": tries(0.0),
                "momentum": tries(0.0, 0.5),
            },
        ),
    )

    jigsaw_weight: NonNegativeFloat = Field(0.7, description="α")
    metric_weight: NonNegativeFloat = Field(0.5, description="β at the start of the run")
    metric_weight_end: NonNegativeFloat = Field(0.5, description="β at its end (a growth to 1 is in the code, unused)")
    class_on: Literal["ordered", "all"] = Field("all", description="images whose class is learnt (JiGen: ordered)")
    permutations: Annotated[int, Field(ge=1, le=MOST)] = Field(30, description="P")
    ordered: Annotated[float, Field(ge=0, le=1)] = Field(0.9, description="probability that an image stays in order")
    tile_greyscale: Annotated[float, Field(ge=0, le=1)] = Field(
        0.1, description="probability that a tile of a colour image loses its colour"
    )
    embedding: PositiveInt = Field(128, description="width of the embedding")
    queue: PositiveInt = Field(1024, description="K: keys that are kept")
    hard_negatives: PositiveInt = Field(256, description="k: semi-hard negatives that are drawn for a pair, at most")
    margin: NonNegativeFloat = Field(2.0, description="ξ")
    momentum: Annotated[float, Field(ge=0, le=1)] = Field(0.999, description="m of the key encoder")

    def check_samples(self, samples: Samples) -> tuple[str, ...]:
        return check_tiles(self.name, samples.shape)

    def fit(self, site: Site, weights: Weights, steps: int) -> Update:
        """Train on this round's mini-batches in the pool."""
        model = site.model(weights)
        parts = self.parts(site, lambda: Parts(model, self))
        puzzles = Puzzles(site, self.permutations, self.ordered, self.tile_greyscale)
        draws = site.generator_for("triplets")

        def loss_of(batch: Batch) -> Tensor:
            inputs, orders = puzzles.of(batch.inputs)
            features = model.features(inputs)
            keys = parts.enqueue(batch.inputs, batch.targets)
            apart = parts.triplet_loss(features, keys, batch.targets, self.margin, self.hard_negatives, draws)
            loss = jigsaw_loss(
                model.classifier(features),
                batch.targets,
                parts.jigsaw(features),
                orders,
                weight=self.jigsaw_weight,
                class_on=self.class_on,
                objective=site.objective,
            )
            return loss + self.beta(self.progress(site)) * apart  # (1)

        optimizer = site.optimizer(model, parts, memory="optimizer")
        optimizer.register_step_post_hook(lambda *_: parts.follow(model))
        return self.train(site, self.of_all(site, steps), loss_of, model, parts, {"optimizer": optimizer})

    def beta(self, progress: float) -> float:
        """β of (1) after this share of the run."""
        return self.metric_weight + (self.metric_weight_end - self.metric_weight) * progress


class Parts(KeyQueue):
    """What trains beside the model: the head of the puzzles, and what the triplets need."""

    def __init__(self, model: Network, method: EISNet) -> None:
        jigsaw = nn.Linear(model.embedding_size, method.permutations + 1)
        super().__init__(model, method.embedding, method.queue, method.momentum)
        self.jigsaw = jigsaw
