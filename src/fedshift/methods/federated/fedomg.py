"""FedOMG: the server looks for a direction that agrees with every site's update.

Nguyen, Le, Nguyen, Dao, Wong et al.: Federated Domain Generalization with Data-free On-server Matching Gradient. ICLR
2025.

Setting: domain generalization, as FedAvg.
Wire: FedAvg's: all that is new happens at the server.

With g_k = θ_k − θ the sites' updates and ḡ their mean:
    Γ = argmin_{Γ ≥ 0, ΣΓ = 1}  ⟨Γ·g, ḡ⟩ + κ‖ḡ‖·‖Γ·g‖                                      (theorem 2)
    g* = ḡ + κ‖ḡ‖/‖Γ·g‖ · Γ·g,      θ ← θ + η_g g*                                            (9)

Where papers and code differ, and what was chosen (code: skydvn/FedOMG, FedOMG-DG/algorithms/FedOMG/utils/fed_merge.py)
 1. The code (`OMG`) divides g* by 1 + κ² (``rescaled``).
 2. The code (`FedOMG`) multiplies each update by a share that is about 1/K, and then takes their mean over K: so a step
    is about K times shorter (``shares_twice``); and η_g is 0.5, where the paper has 1. ``setting: released`` has all
    three. Its shares are those of *test* sets; here all sites count alike.
 3. The code (`OMG`) descends 21 steps of SGD on the logits of Γ with rate 25; here sequential quadratic programming to
    convergence. They agree where the code has converged, and not where updates are opposed.
 4. The code adds 1e-4 under its roots, which bounds how much a short Γ·g is lengthened; here a Γ·g below a millionth of
    the longest update counts as zero. `FedOMG` passes 3 for the number of sites, and fails with more.
 5. κ = 0.5. The code evaluates with BatchNorm statistics of the initial network; here they are averaged.

Should reproduce: no table of this setting with our splits is known to us; with κ = 0 it is FedAvg with equal shares.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from pydantic import Field, NonNegativeFloat, PositiveFloat
from torch import Tensor

from fedshift.errors import UserError
from fedshift.federation.exchange import Replies
from fedshift.federation.federation import Federation
from fedshift.federation.messages import Update
from fedshift.functional.averaging import parameters_of
from fedshift.methods.base import State, trained_mean
from fedshift.methods.federated.fedavg import LocalTraining
from fedshift.methods.method_tests import MethodTests, tries
from fedshift.methods.robust import Averaged, squared_distances
from fedshift.weights import Weights


class FedOMG(LocalTraining):
    """Updates matched on the server."""

    traits = LocalTraining.traits.derive(
        name="fedomg",
        citation="Nguyen et al., ICLR 2025",
        group="rivals",
        advice="For sites of very different size that all can be trusted: 60.19 on SURF, the best row, but −4.28 "
        "at amazon, so that no gain over targets is shown (+9.14 over FedAvg, p = 1.000). It follows the "
        "site with the shortest update. Level with equal shares on PACS features.",
        settings={"released": {"rescaled": True, "shares_twice": True, "server_rate": 0.5}},
        averages={"fit": Averaged(rules="each")},
        tests=MethodTests(
            options={"kappa": tries(0.0, 0.9), "server_rate": tries(0.5)},
            rates=(0.01, 0.02),
        ),
    )

    kappa: NonNegativeFloat = Field(0.5, description="κ: how far the direction may be from the mean update")
    server_rate: PositiveFloat = Field(1.0, description="η_g")
    rescaled: bool = Field(False, description="g* divided by 1 + κ² (code)")
    shares_twice: bool = Field(False, description="updates times 1/K before their mean over K (code)")

    def round(self, federation: Federation, state: State) -> State:
        updates = federation.ask(self.fit, to=federation.sources, weights=state.weights).keep()
        mean, _, losses = trained_mean(updates, by="uniform")
        start = parameters_of(state.weights)
        shares = matching_shares(products_about(squared_distances(_Models(updates, start))), self.kappa)
        used = dict(zip(updates.sites, shares.tolist(), strict=True))
        # Σ s_k g_k is Σ s_k times the way to the mean model by these shares.
        matched = trained_mean(updates, by=used)[0]
        rate = self.server_rate * float(shares.sum()) / ((1 + self.kappa**2) if self.rescaled else 1.0)
        rate /= len(shares) if self.shares_twice else 1
        moved = {name: value + rate * (matched[name] - value) for name, value in start.items()}
        return state.advance(mean.merge(moved), report={"losses": losses, "aggregation_weights": used})


@dataclass(frozen=True)
class _Models:
    """The parameters of the sites' models and, last, those of the common model; every pass reads the replies anew."""

    replies: Replies[Update]
    common: Weights

    def __iter__(self) -> Iterator[Weights]:
        for reply in self.replies:
            yield reply.weights.select(list(self.common))
        yield self.common


def products_about(distances: Tensor) -> Tensor:
    """``⟨x_i − o, x_j − o⟩`` of all pairs of points, from squared distances between the points and o."""
    norms = distances[:-1, -1]
    return (norms[:, None] + norms - distances[:-1, :-1]) / 2


def matching_weights(gram: Tensor, kappa: float) -> Tensor:
    """Γ on the simplex that minimises ``⟨Γ·g, ḡ⟩ + κ‖ḡ‖·‖Γ·g‖``, ḡ the mean of the sites' updates.

    The function is convex. Sequential quadratic programming finds its minimum, also where one update is much longer
    than the others. Source: FedOMG (Nguyen et al., ICLR 2025, theorem 2), after CAGrad (Liu et al., NeurIPS 2021).
    """
    from scipy.optimize import minimize  # slow to import, and only this function needs it

    if gram.dim() != 2 or gram.shape[0] != gram.shape[1] or not bool(gram.isfinite().all()):
        raise UserError(f"a direction is matched by a finite Gram matrix (K, K), found one of {tuple(gram.shape)}")
    sites = len(gram)
    equal = np.full(sites, 1 / sites)
    products = gram.double().numpy(force=True)
    scale = products.diagonal().mean()
    if not scale > 0:
        return torch.from_numpy(equal)
    products = products / scale
    towards_mean = products.mean(1)
    strength = kappa * np.sqrt(max(towards_mean.mean(), 0.0))

    def value_and_slope(weights: npt.NDArray[np.float64]) -> tuple[float, npt.NDArray[np.float64]]:
        mixed = products @ weights
        length = np.sqrt(max(weights @ mixed, 1e-12))
        return float(weights @ towards_mean + strength * length), towards_mean + strength * mixed / length

    minimum = minimize(
        value_and_slope,
        equal,
        jac=True,
        method="SLSQP",
        bounds=[(0, 1)] * sites,
        constraints={"type": "eq", "fun": lambda weights: weights.sum() - 1, "jac": np.ones_like},
        options={"ftol": 1e-12, "maxiter": 200},
    ).x.clip(0)
    minimum = minimum / minimum.sum()
    return torch.from_numpy(min(minimum, equal, key=lambda weights: value_and_slope(weights)[0]))


def matching_shares(gram: Tensor, kappa: float) -> Tensor:
    """``1/K + κ‖ḡ‖/‖Γ·g‖ · Γ``: how much of each site's update makes the invariant direction.

    Source: FedOMG (ICLR 2025, equation 9). Where Γ·g vanishes the mean alone is left.
    """
    weights, products = matching_weights(gram, kappa), gram.double()
    mean = products.mean().clamp_min(0).sqrt()
    length = (weights @ products @ weights).clamp_min(0).sqrt()
    plain = torch.full_like(weights, 1 / len(weights))
    return plain + kappa * mean / length * weights if length > 1e-6 * products.diagonal().max().sqrt() else plain
