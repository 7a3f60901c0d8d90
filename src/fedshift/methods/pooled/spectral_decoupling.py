"""SD: spectral decoupling, a penalty on the size of the logits.

Pezeshki, Kaba, Bengio, Courville, Precup, Lajoie: Gradient Starvation: A Learning Proclivity in Neural Networks.
NeurIPS 2021, arXiv 2011.09468.

Setting: domain generalization, *not private*: the data of all sources lie in one place.
Wire: every training sample once (the ledger counts them as raw data); no exchange is needed after that.

    L(θ) = mean CE + λ · mean over samples and classes of (ẑ − γ)²

Where papers and code differ, and what was chosen. DomainBed: `SD` and its base in facebookresearch/DomainBed,
domainbed/algorithms.py, options in domainbed/hparams_registry.py
 1. The paper adds λ/2 ‖ŷ‖² for one logit and two classes. DomainBed (facebookresearch/DomainBed,
    domainbed/algorithms.py, SD) takes λ times the mean square over samples and classes, λ = 0.1; so does this.
 2. γ (``centre``) is 0; the paper has another one for CelebA.
 3. The method does not ask for domains. ``setting: domainbed`` draws a batch of every domain, as DomainBed does.

Should reproduce: no row in DomainBed's published table; its code later than that has the method.
"""

from __future__ import annotations

from pydantic import Field, NonNegativeFloat
from torch import Tensor

from fedshift.federation.messages import Update
from fedshift.federation.site import Batch, Site
from fedshift.methods.method_tests import MethodTests, tries
from fedshift.methods.pooled.deepall import DeepAll
from fedshift.weights import Weights


class SpectralDecoupling(DeepAll):
    """Cross-entropy and the mean squared logit."""

    traits = DeepAll.traits.derive(
        name="sd",
        citation="Pezeshki et al., NeurIPS 2021",
        group="pooled",
        advice="For networks that rest on the easiest features, at no cost worth naming.",
        settings={"domainbed": {"domain_batches": "full"}},
        tasks=("classification",),
        needs_classes="its penalty is on logits",
        tests=MethodTests(options={"penalty_weight": tries(0.0, 1.0)}),
    )

    penalty_weight: NonNegativeFloat = Field(0.1, description="λ: weight of the penalty")
    centre: float = Field(0.0, description="γ: where the penalty on a logit is 0")

    def fit(self, site: Site, weights: Weights, steps: int) -> Update:
        """Train on this round's mini-batches in the pool."""
        model = site.model(weights)

        def loss_of(batch: Batch) -> Tensor:
            logits: Tensor = model(batch.inputs)
            penalty = (logits - self.centre).square().mean()
            loss: Tensor = site.objective.loss(logits, batch.targets) + self.penalty_weight * penalty
            return loss

        loss = site.minimise_over(self.of_all(site, steps), loss_of, model, remember="optimizer")
        return Update(site.weights_of(model), site.samples, loss)
