"""FedLC: sites lower the scores of classes that they have few samples of, so that these are learned with a margin.

Zhang, Li, Li, Xu, Wu, Ding, Wu: Federated Learning with Label Distribution Skew via Logits Calibration. ICML 2022.

Setting: domain generalization, as FedAvg; written for sites whose classes differ.
Wire: FedAvg's. How many samples of each class a site has stays there.

    L = −log( e^{f_y − τ n_y^{−1/4}} / Σ_c e^{f_c − τ n_c^{−1/4}} )        n_c: the site's samples of class c

A class that the site lacks has n_c^{−1/4} = ∞ and leaves the sum: the site does not push its scores down.

Where papers and code differ, and what was chosen
 1. No code of the authors is known to us. The re-implementations sum over all classes, as cross-entropy does
    (KarhouTam/FL-bench, src/client/fedlc.py, `logit_calibrated_loss`; TsingZ0/PFLlib, clientlc.py, `train`). A sum over
    c ≠ y alone, which PFLlib has in comments, is not bounded below.
 2. FL-bench (`logit_calibrated_loss`) counts 1e-8 samples of an absent class, so its score is 100·τ lower; here it is
    −∞.
 3. PFLlib takes the counts of all sites together (serverlc.py, `FedLC.__init__`). Then all sites have the same margins.
 4. τ = 1, as in both.
 5. A model predicts with its plain scores.

Should reproduce: no published table of this setting is known to us. With τ = 0 it is FedAvg, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from pydantic import Field, NonNegativeFloat
from torch import Tensor

from fedshift.federation.site import Batch, Site
from fedshift.methods.federated.fedavg import FedAvg
from fedshift.methods.method_tests import MethodTests, tries
from fedshift.models.network import Network
from fedshift.weights import Weights


class FedLC(FedAvg):
    """FedAvg on cross-entropy of calibrated scores."""

    traits = FedAvg.traits.derive(
        name="fedlc",
        citation="Zhang et al., ICML 2022",
        group="rivals",
        advice="For sites whose classes differ: a site does not unlearn classes that it lacks.",
        tasks=("classification",),
        needs_classes="its scores are calibrated by the numbers of classes",
        tests=MethodTests(options={"calibration": tries(0.0, 4.0)}),
    )

    calibration: NonNegativeFloat = Field(1.0, description="τ: how much scores of rare classes are lowered")

    def loss_at(self, site: Site, model: Network, weights: Weights) -> Callable[[Batch], Tensor]:
        if self.calibration == 0:
            return super().loss_at(site, model, weights)
        counts = torch.bincount(site.data.labels, minlength=site.classes)

        def loss(batch: Batch) -> Tensor:
            scores = calibrated_scores(model(batch.inputs), counts, self.calibration)
            return site.objective.loss(scores, batch.targets)

        return loss


def calibrated_scores(scores: Tensor, counts: Tensor, strength: float) -> Tensor:
    """``f_c − τ·n_c^{−1/4}``: scores lowered the more, the fewer samples their class has here.

    Source: FedLC (Zhang et al., ICML 2022), the calibrated logits.
    """
    return scores if strength == 0 else scores - strength * counts.to(scores.dtype) ** -0.25
