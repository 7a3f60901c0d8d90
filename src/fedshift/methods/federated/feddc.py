"""FedDC: each site keeps how far it drifted from the common model, and trains towards that distance.

Gao, Fu, Li, Chen, Xu, Xu: FedDC: Federated Learning with Non-IID Data via Local Drift Decoupling and Correction.
CVPR 2022, Algorithm 1; symbols as here.

Setting: domain generalization, as FedAvg; written for sites that do not look alike.
Wire: SCAFFOLD's: a model and a control variate, down and up. A site's drift h_i and control variate c_i stay there.

    min_θ  L_i(θ) + α/2·‖θ + h_i − w‖² + ⟨θ, c − c_i⟩                      at every site
    c_i⁺ = c_i − c + (w − θ_i)/(T·η),    h_i ← h_i + (θ_i − w)               after T steps
    w ← mean_i θ_i + mean_i h_i,    c ← c + |S|/N · mean_i (c_i⁺ − c_i)      at the server

Where papers and code differ, and what was chosen
 1. The second term of the loss and the moves of c_i and c are SCAFFOLD's, as in the code (gaoliang13/FedDC,
    utils_methods_FedDC.py, `train_FedDC`), whose ``state_gadient_diffs`` are control variates.
 2. mean_i h_i is over all sites, θ_i over those that answered. The server adds up the mean drift of each round, so
    that no h_i is sent.
 3. The code (`train_FedDC`) divides α and c at a site by N_i over the sites' mean, and multiplies the change of c_i by
    it. Here all sites have one α; with sites of one size that is the same.
 4. The code clips the gradient at norm 10 (utils_general.py, `train_model_FedDC`): ``training.clip_norm: 10``.
 5. α = 0.01, as in the code's examples (example_code_cifar10.py). With α = 0 a site's steps are SCAFFOLD's.
 6. BatchNorm statistics are averaged and have no drift.

Should reproduce: no published table of this setting is known to us. In its first round a site's steps with α = 0 are
FedAvg's, and the common model moves twice as far.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import cast

from pydantic import Field, NonNegativeFloat
from torch import Tensor

from fedshift.federation.federation import Federation
from fedshift.federation.site import Batch, Site
from fedshift.functional.control_variates import moved_gradient
from fedshift.functional.losses import proximal_penalty
from fedshift.methods.base import State
from fedshift.methods.federated.scaffold import Controlled, Scaffold, zeros
from fedshift.methods.method_tests import MethodTests, tries
from fedshift.models.network import Network
from fedshift.weights import Weights


class FedDC(Scaffold):
    """SCAFFOLD's steps with a penalty on the distance from where the site drifted."""

    traits = Scaffold.traits.derive(
        name="feddc",
        citation="Gao et al., CVPR 2022",
        group="rivals",
        advice="For many rounds at sites that differ, at twice the traffic.",
        sends="a model, and a control variate as large",
        memory_names=("optimizer", "control", "drift"),
        tests=MethodTests(options={"alpha": tries(1.0)}),
    )

    alpha: NonNegativeFloat = Field(0.01, description="α: strength of the penalty")

    def start(self, federation: Federation, weights: Weights) -> State:
        return State(weights, parts={"control": zeros(weights), "drift": zeros(weights)})

    def round(self, federation: Federation, state: State) -> State:
        control, drift = (cast(Weights, state.parts[name]) for name in ("control", "drift"))
        updates = federation.ask(self.train, to=federation.sources, weights=state.weights, control=control)
        mean = updates.mean(self.weighting)
        average, change = mean.model(), mean.model("control")
        part = mean.answered / len(federation.sources)
        drift = Weights(moved_gradient(drift, state.weights, average, -part))
        control = Weights({name: value + part * change[name] for name, value in control.items()})
        common = Weights({name: value + drift[name] if name in drift else value for name, value in average.items()})
        return state.advance(
            common, parts={"control": control, "drift": drift}, report={"losses": mean.numbers["loss"]}
        )

    def train(self, site: Site, weights: Weights, control: Weights) -> Controlled:
        """Local steps, then the site's next control variate and drift."""
        known = site.memory.weights("drift") if "drift" in site.memory else zeros(weights)
        site.scratch["aim"] = {name: weights[name] - value for name, value in known.items()}
        update = super().train(site, weights, control)
        site.memory["drift"] = Weights(moved_gradient(known, weights, update.weights, -1.0))
        return update

    def loss_along(self, site: Site, model: Network, correction: Mapping[str, Tensor]) -> Callable[[Batch], Tensor]:
        """SCAFFOLD's loss and α/2·‖θ − (w − h_i)‖²."""
        plain = super().loss_along(site, model, correction)
        aim: dict[str, Tensor] = site.scratch["aim"]
        trained = [(name, value) for name, value in model.named_parameters() if name in aim]
        reference = {name: value.to(site.device) for name, value in aim.items()}
        return lambda batch: plain(batch) + proximal_penalty(trained, reference, self.alpha)
