"""FedBABU: the classifier stays at its random start, the body is averaged, and each site fine-tunes at the end.

Oh, Kim, Yun: FedBABU: Toward Enhanced Representation for Federated Image Classification. ICLR 2022, Algorithm 1.

Setting: the sites that take part; each has labels of its own kind. A new site gets the common body below the common
classifier, which no one trained.
Wire: FedAvg's without the classifier, 2·K·S(body), and the body down once more at the end. A tuned model never leaves.

    θ_i ← E epochs of the loss at (θ, h⁰) by the body alone, from θ;    θ ← Σ_i (N_i / ΣN)·θ_i      in every round
    (θ_i, h_i) ← epochs of the loss from (θ, h⁰)                        at the end, at site i, which predicts with it

Where paper and code differ, and what was chosen
 1. The paper fine-tunes for 5 epochs; PFLlib (TsingZ0/PFLlib, system/flcore/clients/clientbabu.py,
    `clientBABU.fine_tune`) for 10: ``fine_tune: {epochs: 10}``. Both tune the whole model, as here.
 2. The classifier has no gradient in the rounds, as in PFLlib (`clientBABU.train`), so momentum and weight decay do not
    reach it either.

Should reproduce: PFLlib's code on ten clients of MNIST with skewed labels, 92.6 and 92.0 (two seeds, 10 epochs of
fine-tuning); 82.2 and 81.1 before it.
"""

from __future__ import annotations

from pydantic import Field

from fedshift.federation.messages import Update
from fedshift.federation.site import LocalFit, Site
from fedshift.methods.composition.fine_tune import FineTune
from fedshift.methods.federated.fedper import HEAD, FedPer
from fedshift.methods.method_tests import MethodTests, tries
from fedshift.weights import Weights


class FedBABU(FedPer):
    """FedAvg of a body below a classifier that no one trains, and fine-tuning at the end."""

    traits = FedPer.traits.derive(
        name="fedbabu",
        citation="Oh et al., ICLR 2022",
        group="personal",
        advice="As fedper; each site makes its model at the end. A new site can do so, too.",
        sends="a model without its classifier",
        keeps="a tuned model",
        no_new_site=False,
        tests=MethodTests(
            options={"fine_tune": tries(None, {"steps": 2}, where="finished")},
            rates=(0.03, 0.2),
        ),
    )

    fine_tune: FineTune | None = Field(
        FineTune(epochs=5), description="how each site trains the final model on; none: it predicts with the common one"
    )

    def fit(self, site: Site, weights: Weights) -> Update:
        """Train the body alone."""
        update: Update = self._fit_at(site, site.weights_of(site.network).merge(weights)).carry_out()
        return Update(update.weights.without(HEAD), update.samples, update.loss)

    def _fit_at(self, site: Site, weights: Weights) -> LocalFit:
        fit = super()._fit_at(site, weights)
        fit.model.classifier.requires_grad_(False)
        return fit
