"""Per-FedAvg: the common model is trained to be good after one step of gradient descent at a site.

Fallah, Mokhtari, Ozdaglar: Personalized Federated Learning with Theoretical Guarantees: A Model-Agnostic Meta-Learning
Approach. NeurIPS 2020, Algorithm 1 and section 5 (Per-FedAvg (FO), Per-FedAvg (HF)).

Setting: the sites that take part; each has labels of its own kind. A new site that has labels can take the step, too.
Wire: FedAvg's, and the model down once more at the end. The model after the step never leaves.

    w̃ = w − α ∇f_i(w; D),    g = ∇f_i(w̃; D')                                            D, D': two mini-batches
    w ← w − β g                                                                            first order (FO)
    w ← w − β (g − α·(∇f_i(w + δg; D'') − ∇f_i(w − δg; D'')) / (2δ))                       Hessian-free (HF)
    w − α ∇f_i(w)                                                                          at the end, at each site

Where papers and code differ, and what was chosen
 1. No code of the authors is known to us; the formulas of FO and HF are as in KarhouTam/FL-bench
    (src/client/perfedavg.py, `PerFedAvgClient.fit`). Its δ for HF is 0.001, as here.
 2. An epoch passes over the samples once, so it has half as many steps of w (FO), or a third (HF), as FedAvg. A
    mini-batch that is left alone stands for the others. PFLlib (serverperavg.py, `PerAvg.train`) trains twice a round.
 3. β is ``training.lr``. α is ``fine_tune.lr``, and without one ``training.lr``, as in PFLlib
    (system/flcore/clients/clientperavg.py, `clientPerAvg`); the paper has α = 0.01 and β = 0.001.
 4. The step at the end is on one mini-batch (``fine_tune: {steps: 1}``), as in PFLlib (`clientPerAvg.train_one_step`).
 5. The mean over sites is by samples, as in PFLlib (system/flcore/servers/serverbase.py, `Server.receive_models`); the
    paper's has equal shares, ``weighting: uniform``.
 6. BatchNorm statistics follow the mini-batches D at w.

Should reproduce: PFLlib's code on ten clients of MNIST with skewed labels, 90.5 and 89.9 (two seeds, two passes a
round: ``local_epochs: 2``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Literal

import torch
from pydantic import Field, PositiveFloat
from torch import Tensor

from fedshift.federation.messages import Update
from fedshift.federation.site import Batch, Site
from fedshift.functional.control_variates import linear_term
from fedshift.functional.meta_learning import answer_at, inner_step
from fedshift.methods.base import PERSONAL
from fedshift.methods.composition.fine_tune import FineTune
from fedshift.methods.federated.fedavg import FedAvg
from fedshift.methods.method_tests import MethodTests, tries
from fedshift.models.network import Network
from fedshift.weights import Weights


class PerFedAvg(FedAvg):
    """FedAvg of models that are judged after a step at the site."""

    traits = FedAvg.traits.derive(
        name="per_fedavg",
        citation="Fallah et al., NeurIPS 2020",
        group="personal",
        advice="For sites with few labels, new ones too: the common model is made for one step at each.",
        keeps="the model after a step",
        memory_names=("optimizer", PERSONAL),
        takes_plug_ins=False,
        thaws=False,
        own_gradients=True,
        tests=MethodTests(
            options={
                "fine_tune": tries(None, {"steps": 2}, where="finished"),
                "difference": tries(0.5, order="hessian_free"),
            },
            golden={"local_epochs": 10},
            rates=(0.02, 0.05),
        ),
    )

    fine_tune: FineTune | None = Field(
        FineTune(steps=1), description="what each site does with the final model; its lr is α; none: nothing"
    )
    order: Literal["first", "hessian_free"] = Field("first", description="FO, or HF with a difference of gradients")
    difference: PositiveFloat = Field(1e-3, description="δ: step of that difference")

    def fit(self, site: Site, weights: Weights) -> Update:
        """Train the common model for the step."""
        model = site.model(weights)
        loss = site.minimise_over(self._groups(site), self._loss_after(site, model), model, remember="optimizer")
        return Update(site.weights_of(model), site.samples, loss)

    def _groups(self, site: Site) -> Iterator[tuple[Batch, ...]]:
        """D and D', or D, D' and D''."""
        size, group = (2 if self.order == "first" else 3), list[Batch]()
        for batch in site.batches(self.local_epochs, self.steps_per_round):
            group.append(batch)
            if len(group) == size:
                yield tuple(group)
                group = []
        if group:
            yield tuple(group + group[-1:] * (size - len(group)))

    def _loss_after(self, site: Site, model: Network) -> Callable[[tuple[Batch, ...]], Tensor]:
        """f_i(w̃; D'), whose gradient here is that of FO or HF."""
        rate = (self.fine_tune.lr if self.fine_tune is not None else None) or site.learning_rate

        def loss(group: tuple[Batch, ...]) -> Tensor:
            first, second, *third = group
            parameters = dict(model.named_parameters())
            before = site.objective.loss(model(first.inputs), first.targets)
            slopes = torch.autograd.grad(before, list(parameters.values()))
            after = inner_step(parameters, slopes, rate)
            value = site.objective.loss(answer_at(model, after, second.inputs), second.targets)
            if not third:
                return value
            slopes = torch.autograd.grad(value, list(parameters.values()), retain_graph=True)
            direction = dict(zip(parameters, slopes, strict=True))
            curved = hessian_product(
                lambda at: site.objective.loss(answer_at(model, at, third[0].inputs), third[0].targets),
                parameters,
                direction,
                self.difference,
            )
            term = linear_term(parameters, {name: -rate * change for name, change in curved.items()})
            return value + (term - term.detach())

        return loss


def hessian_product(
    loss_at: Callable[[Mapping[str, Tensor]], Tensor],
    parameters: Mapping[str, Tensor],
    direction: Mapping[str, Tensor],
    difference: float = 1e-3,
) -> dict[str, Tensor]:
    """``(∇L(θ + δv) − ∇L(θ − δv)) / (2δ)``: about ``∇²L(θ) v`` without second derivatives.

    Source: Fallah et al. (NeurIPS 2020), section 5, Per-FedAvg (HF).
    """
    slopes = []
    for step in (difference, -difference):
        at = {name: (value + step * direction[name]).detach().requires_grad_() for name, value in parameters.items()}
        slopes.append(torch.autograd.grad(loss_at(at), list(at.values())))
    return {name: (above - below) / (2 * difference) for name, above, below in zip(parameters, *slopes, strict=True)}
