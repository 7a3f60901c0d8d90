"""Linear probe: FedAvg of a linear classifier on CLIP's image features; texts play no part.

Radford et al.: Learning Transferable Visual Models From Natural Language Supervision. ICML 2021, section 3.2.

Setting: unseen target; what the features are worth without language.
Wire: FedAvg's of a linear layer, 2·K·S(W, b).

    W x̂ + b            x̂: an image's feature of length 1; W and b begin at random

Where paper and code differ, and what was chosen
 1. The paper fits a logistic regression by L-BFGS; sites take FedAvg's steps.
 2. The paper's features are those before the projection into the space of texts; here, after it, and of length 1, as
    the other rows have them.
 3. FedAvg on the same model begins at the texts' classifier (``start_at: texts``): Wortsman et al.: Robust
    fine-tuning of zero-shot models. CVPR 2022, begin there, too.

Should reproduce: FedAvg on ``linear`` with the same features.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from fedshift.federation.randomness import derive_seed
from fedshift.methods.federated.fedavg import FedAvg
from fedshift.methods.heads import redrawn
from fedshift.methods.on_clip import OnClip
from fedshift.models.network import Network
from fedshift.models.networks.clip import TextClassifier


class LinearProbe(OnClip, FedAvg):
    """FedAvg of a linear classifier on CLIP's image features."""

    traits = FedAvg.traits.derive(
        name="linear_probe",
        citation="Radford et al., ICML 2021",
        group="unseen",
        advice="On CLIP's features (model clip_text): what they are worth without texts.",
        sends="a linear classifier",
        tasks=("classification",),
        needs_classes="its classifier begins as one of texts of classes",
    )

    start_at: Literal["random", "texts"] = Field(
        "random", description="the classifier's start: drawn (paper), or the zero-shot classifier"
    )

    def trained_part(self, network: Network, texts: TextClassifier) -> Network:
        if self.start_at == "texts":
            return network
        return network.with_parts(network.features, redrawn(texts, derive_seed(network.seed, "linear_probe")))
