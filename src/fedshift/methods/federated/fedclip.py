"""FedCLIP: FedAvg of an adapter that weighs the entries of CLIP's image features.

Lu, Hu, Wang, Xie: FedCLIP: Fast Generalization and Personalization for CLIP in Federated Learning. IEEE Data
Engineering Bulletin 2023.

Setting: unseen target. CLIP's two towers and the texts of the classes are fixed at every site.
Wire: FedAvg's of the adapter alone, 2·K·S(a): 4·2·(d² + d) bytes for features of width d.

    a(x) = softmax(W_2 tanh(W_1 x + b_1) + b_2);   scores s · x̂' · t̂_c with x' = a(x) ∘ x
    ½·( CE(S, diagonal) + CE(Sᵀ, diagonal) ),      S_ij = s · x̂'_i · t̂_{y_j}, i and j in a mini-batch
    a ← Σ_k (N_k / ΣN) a_k

Where paper and code differ (microsoft/PersonalizedFL @ 441670ed, fedclip/methods/fed_at_clip.py, `train` and main
script), and what was chosen
 1. The code's loss is that of pairs, in which another image of the same class counts as wrong, so it is blunt where
    classes are few. ``loss: classes`` is the cross-entropy over classes, as promptfl has it.
 2. The code gives all sites the same weight: ``weighting: uniform``, which is its ``setting: released``.
 3. The code leaves out a mini-batch of one sample; here its loss and gradient are 0.
 4. The code uses Adam with β = (0.9, 0.98), ε = 1e-6, a learning rate of 5e-5 and weight decay of 0.2; the optimiser is
    the experiment's.

Should reproduce: the code's step on the same features (``fedclip_1`` of tests/references/README.md).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from fedshift.federation.randomness import derive_seed, drawn_from
from fedshift.federation.site import Batch, Site
from fedshift.methods.federated.fedavg import FedAvg
from fedshift.methods.method_tests import MethodTests
from fedshift.methods.on_clip import FixedTexts, OnClip
from fedshift.models.network import Network
from fedshift.models.networks.clip import TextClassifier
from fedshift.weights import Weights


class FedCLIP(OnClip, FedAvg):
    """FedAvg of an adapter that weighs the entries of CLIP's image features."""

    traits = FedAvg.traits.derive(
        name="fedclip",
        citation="Lu et al., IEEE Data Eng. Bull. 2023",
        group="unseen",
        advice="On CLIP's features (model clip_text): a small adapter of the images; the texts stay.",
        sends="an adapter",
        settings={"released": {"weighting": "uniform"}},
        tasks=("classification",),
        needs_classes="its classifier is made of texts of classes",
        tests=MethodTests(
            golden={"loss": "classes"},
            rates=(0.02, 0.03),
        ),
    )

    loss: Literal["pairs", "classes"] = Field(
        "pairs", description="CLIP's loss of the pairs of a mini-batch (as the code), or cross-entropy over classes"
    )

    def trained_part(self, network: Network, texts: TextClassifier) -> Network:
        with drawn_from(derive_seed(network.seed, "fedclip")):
            parts = OrderedDict([("adapter", Adapter(network.embedding_size)), ("unit", network.features)])
        return network.with_parts(nn.Sequential(parts), FixedTexts(texts), moved_to="unit")

    def loss_at(self, site: Site, model: Network, weights: Weights) -> Callable[[Batch], Tensor]:
        if self.loss == "classes":
            return super().loss_at(site, model, weights)
        return lambda batch: paired_loss(model(batch.inputs)[:, batch.targets])


class Adapter(nn.Module):
    """Features (n, …) → (n, width), each entry weighed."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weigh = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width), nn.Softmax(dim=1))

    def forward(self, features: Tensor) -> Tensor:
        flat = features.flatten(1)
        weighed: Tensor = self.weigh(flat) * flat
        return weighed


def paired_loss(scores: Tensor) -> Tensor:
    """``½·(CE(S, diagonal) + CE(Sᵀ, diagonal))``: each image is to find its text in the batch, each text its image.

    Source: CLIP (Radford et al., ICML 2021, figure 3).
    """
    pairs = torch.arange(len(scores), device=scores.device)
    return (F.cross_entropy(scores, pairs) + F.cross_entropy(scores.t(), pairs)) / 2
