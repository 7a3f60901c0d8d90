"""FedAvg: federated averaging.

McMahan, Moore, Ramage, Hampson, Agüera y Arcas: Communication-Efficient Learning of Deep Networks from Decentralized
Data. AISTATS 2017, Algorithm 1.

Setting: domain generalization (the reference row of every table); the target is never seen.
Wire: one model up and one down per site and round, 2·K·S(θ), and the sample count N_k.

    θ ← Σ_k (N_k / ΣN) θ_k        after E local epochs of cross-entropy at every site      (Algorithm 1)

Where papers and code differ
* CSAC's released code (junkunyuan/CSAC, mains/exam_align.py, `FLDG._fedavg_`) rounds the shares N_k/ΣN to four decimals
  and takes integer buffers from the last site. Here: exact shares; integer buffers are the maximum.
* CCST, FedSR and FedADG give all sites the same weight: ``weighting: uniform``.
* FedBN and others leave BatchNorm statistics at the sites. Here they are averaged like weights.
* Equal work: CSAC trains its sites before the first round (30 epochs). FedAvg has as many in further rounds.

Should reproduce: Rotated MNIST average 92.65 ± 0.08, PACS ResNet-18 82.36 ± 0.44 (as printed by CSAC).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from pydantic import Field, PositiveInt
from torch import Tensor, nn

from fedshift.data.domain import ALL_TASKS
from fedshift.federation.federation import Federation
from fedshift.federation.messages import Count, Reply, Update
from fedshift.federation.site import Batch, LocalFit, Site
from fedshift.methods.base import PERSONAL, Method, State, calls_of, trained_mean
from fedshift.methods.composition.fine_tune import FineTune
from fedshift.methods.method_tests import MethodTests, tries
from fedshift.methods.robust import Averaged
from fedshift.methods.traits import Traits
from fedshift.models.network import Network
from fedshift.weights import Weights


@dataclass(frozen=True)
class Finished(Reply):
    """On how many mini-batches a site trained its own model after the last round. The model stays there."""

    steps: Count


class LocalTraining(Method):
    """Base of methods whose sites train the common model. A subclass's ``round`` aggregates their models.

    A subclass with another loss overrides `loss_at` or `regulariser_at`, and names in ``tasks`` the tasks of that loss.
    """

    traits = Traits(
        tasks=ALL_TASKS,
        tests=MethodTests(options={"fine_tune": tries({"epochs": 1}, {"steps": 3, "lr": 0.5}, where="finished")}),
    )

    local_epochs: PositiveInt = Field(1, description="E: passes over a site's data per round")
    steps_per_round: PositiveInt | None = Field(None, description="mini-batches per round instead of whole epochs")
    fine_tune: FineTune | None = Field(
        None,
        description="after the last round each site trains the final model on and predicts with what comes of it, such "
        "as {epochs: 5} or {steps: 100, lr: 0.01}; it never leaves",
    )

    def adjust_traits(self, traits: Traits) -> Traits:
        if self.fine_tune is None:
            return traits
        memory = dict.fromkeys((*traits.memory_names, PERSONAL))
        return replace(traits, memory_names=tuple(memory), trains_privately=False)

    def mini_batches(self, batches_per_epoch: int, rounds: int) -> int:
        return rounds * (self.steps_per_round or self.local_epochs * batches_per_epoch)

    def fit(self, site: Site, weights: Weights) -> Update:
        """Train for E epochs from the common model."""
        update: Update = self._fit_at(site, weights).carry_out()
        return update

    def personalise(self, federation: Federation, weights: Weights) -> None:
        if self.fine_tune is not None:
            federation.ask(self.tune, to=federation.sources, weights=weights)

    def tune(self, site: Site, weights: Weights) -> Finished:
        """Train what predicts at this site on with the task's loss, and keep it here."""
        assert self.fine_tune is not None
        model, rate = site.model(self.own_weights(weights, site.memory)), self.fine_tune.lr or site.training.lr
        site.minimise(
            lambda batch: site.objective.loss(model(batch.inputs), batch.targets),
            model,
            epochs=self.fine_tune.epochs or 1,
            steps=self.fine_tune.steps,
            optimizers=[site.optimizer(model, rate=rate)],
        )
        site.memory[PERSONAL] = site.weights_of(model)
        return Finished(site.mini_batches)

    def _train_with(self, site: Site, loss_of: Callable[[Batch], Tensor], model: Network, *beside: nn.Module) -> Update:
        """Train a model, and modules beside it, for E epochs with a loss of a mini-batch."""
        steps = self.steps_per_round
        loss = site.minimise(loss_of, model, *beside, epochs=self.local_epochs, steps=steps, remember="optimizer")
        return Update(site.weights_of(model), site.samples, loss)

    def _fit_at(self, site: Site, weights: Weights) -> LocalFit:
        model = site.model(weights)
        return LocalFit(
            site,
            model,
            self.loss_at(site, model, weights),
            lambda loss: Update(site.weights_of(model), site.samples, loss),
            epochs=self.local_epochs,
            steps=self.steps_per_round,
            remember="optimizer",
            regulariser=self.regulariser_at(site, model, weights),
        )

    @property
    def trains_in_parts(self) -> bool:
        """True if `fit` is the only call of a run and its loss is the task's."""
        kind = type(self)
        trains_otherwise = kind.fit is not LocalTraining.fit or kind.loss_at is not LocalTraining.loss_at
        return not trains_otherwise and self.fine_tune is None and set(calls_of(kind)) == {"fit", "tune"}

    def in_parts(self, call: str, site: Site, content: Mapping[str, Any]) -> LocalFit:
        return self._fit_at(site, **content)

    def loss_at(self, site: Site, model: Network, weights: Weights) -> Callable[[Batch], Tensor]:
        """The loss of a mini-batch: that of the task, such as cross-entropy."""
        return lambda batch: site.objective.loss(model(batch.inputs), batch.targets)

    def regulariser_at(self, site: Site, model: Network, weights: Weights) -> Callable[[], Tensor] | None:
        """What the loss has beside the part that depends on samples; None: nothing. Arguments as of `loss_at`."""
        return None


class FedAvg(LocalTraining):
    """Every site trains from the common model; the server averages their models."""

    traits = LocalTraining.traits.derive(
        name="fedavg",
        citation="McMahan et al., AISTATS 2017",
        group="unseen",
        advice="Begin here: the cheapest, and the row that others have to beat.",
        averages={"fit": Averaged()},
        server_reads="sums",
        trains_privately=True,
    )

    weighting: Literal["samples", "uniform"] = Field("samples", description="shares N_k/ΣN (paper) or 1/K")

    def round(self, federation: Federation, state: State) -> State:
        updates = federation.ask(self.fit, to=federation.sources, weights=state.weights)
        weights, shares, losses = trained_mean(updates, by=self.weighting)
        return state.advance(weights, report={"losses": losses, "aggregation_weights": shares})
