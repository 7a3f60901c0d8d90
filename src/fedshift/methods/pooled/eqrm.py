"""EQRM: the loss that most sources stay below.

Eastwood, Robey, Singh, von Kügelgen, Hassani, Pappas, Schölkopf: Probable Domain Generalization via Quantile Risk
Minimization. NeurIPS 2022, arXiv 2207.09944, algorithm 1.

Setting: domain generalization, *not private*: the data of all sources lie in one place, with their domains' names.
Wire: every training sample once (the ledger counts them as raw data); no exchange is needed after that.

The domains' losses L_e are a sample of the losses of all domains, whose distribution a Gaussian kernel density
estimates, with the bandwidth h = 1.06 · deviation of the L_e · K^(−1/5):
    F(q) = 1/K Σ_e Φ((q − L_e)/h),    min_θ F⁻¹(α)
Before ``burn_in`` steps are done it is 1/K Σ_e L_e.

Where papers and code differ, and what was chosen. DomainBed: `EQRM` and its base in facebookresearch/DomainBed,
domainbed/algorithms.py, options in domainbed/hparams_registry.py
 1. The gradient is that of the quantile, by the implicit function theorem. DomainBed (facebookresearch/DomainBed,
    domainbed/algorithms.py, EQRM; lib/misc.py, Nonparametric.icdf) has it as the authors: it goes through a bisection
    between L_min + h Φ⁻¹(α) and L_max + h Φ⁻¹(α), so that only the least and the largest loss and h pull, by where
    the quantile lies between: ``gradient: bisection``.
 2. α = 0.75, as in DomainBed. ``setting: domainbed`` begins after 2,500 steps, with a new Adam and the rate 1e-6.
    **Before that step it is plain training**: a run must be much longer. Here it begins at once, with the run's rate.
 3. With one source it is plain training.
 4. A step counts K mini-batches, one of each source; with ``domain_batches: split`` these are the parts of one.

Should reproduce: no row in DomainBed's published table; its code later than that has the method.
"""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import Field, NonNegativeInt, PositiveFloat
from torch import Tensor

from fedshift.data.domain import WITHOUT_MASKS
from fedshift.methods.method_tests import MethodTests, tries
from fedshift.methods.pooled.penalty import DomainLoss, Step

HALVINGS = 50


class EQRM(DomainLoss):
    """A quantile of the domains' losses."""

    traits = DomainLoss.traits.derive(
        name="eqrm",
        citation="Eastwood et al., NeurIPS 2022",
        group="pooled",
        advice="Between the mean of the sources and the worst of them; it wants many sources.",
        settings={
            "domainbed": {"gradient": "bisection", "burn_in": 2500, "later_rate": 1e-6, "restart_optimizer": True}
        },
        tasks=WITHOUT_MASKS,
        tests=MethodTests(
            options={
                "quantile": tries(0.3),
                "later_rate": tries(0.01),
                "restart_optimizer": tries(True, where="normed with momentum", burn_in=1),
            },
        ),
    )

    quantile: Annotated[float, Field(gt=0, lt=1)] = Field(0.75, description="α: which quantile")
    gradient: Literal["quantile", "bisection"] = Field(
        "quantile", description="of the quantile; or through the bisection that finds it (authors' code)"
    )
    burn_in: NonNegativeInt = Field(0, description="steps of the run with the mean of the losses")
    later_rate: PositiveFloat | None = Field(None, description="learning rate after them; none = the run's")
    restart_optimizer: bool = Field(False, description="whether the optimiser forgets its moments after them")

    def loss(self, step: Step) -> Tensor:
        if step.number < self.burn_in or len(step.losses) < 2:
            return step.losses.mean()
        if self.restart_optimizer and step.number == self.burn_in:
            step.optimizer.state.clear()
        if self.later_rate is not None:
            for group in step.optimizer.param_groups:
                group["lr"] = self.later_rate
        return density_quantile(step.losses, self.quantile, self.gradient == "bisection")


def density_quantile(losses: Tensor, quantile: float, by_bisection: bool) -> Tensor:
    """F⁻¹(α) of a Gaussian kernel density of K losses, (K,), with one of the two gradients; a scalar."""
    width = 1.06 * losses.var().clamp_min(1e-24).sqrt() * len(losses) ** -0.2
    to_edge = width * torch.special.ndtri(losses.new_tensor(quantile))
    low, high = losses.min() + to_edge, losses.max() + to_edge
    with torch.no_grad():
        below, above = low, high
        for _ in range(HALVINGS):
            middle = (below + above) / 2
            beyond = torch.special.ndtr((middle - losses) / width).mean() > quantile
            below, above = torch.where(beyond, below, middle), torch.where(beyond, middle, above)
        result = (below + above) / 2
        share = (result - low) / (high - low).clamp_min(1e-24)
        density = (-((result - losses) / width).square() / 2).exp().mean() / (width * (2 * torch.pi) ** 0.5)
    if by_bisection:
        between: Tensor = low + share * (high - low)
        return between
    level = torch.special.ndtr((result - losses) / width).mean()
    by_slope: Tensor = result - (level - level.detach()) / density
    return by_slope
