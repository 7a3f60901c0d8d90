"""The plan of a deployed experiment. It uses the sites' descriptions of their data in place of the data."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from fedshift.data import agreement
from fedshift.data.domain import DataSet, Preprocessing, Rows
from fedshift.deploy.handshake import Agreed, encoded_for
from fedshift.errors import UserError
from fedshift.evaluation.records import WithoutLabels
from fedshift.experiment.config.experiment import Experiment
from fedshift.experiment.environment import data_fingerprint
from fedshift.experiment.plan import Plan, PlannedRun, Run
from fedshift.experiment.protocols.base import EVERY_SITE, Split
from fedshift.functional.differential_privacy import NoisySteps, adaptive_epsilon
from fedshift.text import one_line


class DeployedPlan(Plan):
    """A `Plan` that knows how many rows each site has, but not the samples.

    Only the coordinator's own unseen data, if there are any, are read as in a simulation.
    """

    def __init__(self, experiment: Experiment, agreed: Agreed) -> None:
        super().__init__(experiment, agreed.data)
        self.agreed = agreed
        self.unseen = tuple(agreed.unseen.domains) if agreed.unseen else ()

    @cached_property
    def targets(self) -> tuple[str, ...]:
        """The protocol's targets. ``all`` means the coordinator's own domains, or every site if it has none. UserError
        if a target does not exist or cannot take part."""
        only_sources = {site for site, card in self.agreed.cards.items() if card.only_source}
        if named := next((target for target in self.experiment.protocol.named_targets if target in only_sources), None):
            raise UserError(f"protocol.targets: '{named}' holds the labels that train: name the site itself")
        sites = tuple(site for site in self.agreed.sites if site not in only_sources)
        return self.experiment.protocol.for_deployment().targets_among(sites, self.unseen)

    @cached_property
    def fingerprint(self) -> str:
        """The sites' checksums, then that of the coordinator's own set."""
        unseen = data_fingerprint(self.agreed.unseen) if self.agreed.unseen else ""
        return "+".join([*(card.fingerprint for card in self.agreed.cards.values()), *([unseen] if unseen else [])])

    @cached_property
    def site_differences(self) -> tuple[str, ...]:
        """What sums and category sets show, which sites send for a common encoding; the samples are not here."""
        if self.data.preprocessing.kind == "image":  # channels, whose brightness may differ
            return ()
        return tuple(map(one_line, agreement.differences(self.agreed.given or {})))

    def stored_preprocessing(self, data: DataSet) -> Preprocessing:
        """As in `Plan`, with the column that names rows, which is no part of the encoding that sites agree on."""
        table = data.preprocessing.table
        if table is None or self.agreed.id is None:
            return data.preprocessing
        return data.preprocessing.model_copy(update={"table": {**table, "id": self.agreed.id}})

    def about_images(self, planned: PlannedRun) -> dict[str, Any]:
        """Nothing: sites do not say how their images look."""
        return {}

    def measurement_noise(self, site: str) -> float | None:
        """As in `Plan`: what a site with a budget of privacy says on its card."""
        budget = self.agreed.privacy.get(site)
        return None if budget is None else budget.measurement_noise

    def without_labels(self, planned: PlannedRun) -> dict[str, WithoutLabels]:
        """As in `Plan`: how unlike the samples are is known at their site alone."""
        return {site: WithoutLabels(samples=len(rows), at_site=True) for site, rows in planned.split.predicted.items()}

    def in_groups(self, site: str, rows: Rows) -> bool:
        """As in `Plan`, as the site's card says."""
        return self.agreed.in_groups(site)

    def _split(self, target: str, seed: int) -> Split:
        """How many rows of each site train and are held out; which rows of the coordinator's own set are measured."""
        protocol, agreed = self.experiment.protocol.for_deployment(), self.agreed
        lacking = agreed.data.unlabelled
        sources = [site for site in agreed.sites if site != target and site not in lacking]
        if not sources:
            raise UserError(f"protocol.targets: no site is left to train when '{target}' is the target")
        rows = {site: self._rows(site, seed) for site in agreed.sites}
        train = {site: rows[site][0] for site in sources}
        held_out = {site: rows[site][1] for site in sources}
        for site, chosen in train.items():
            if len(chosen) == 0:
                cause = " or see whether its samples are all in one group, such as one patient ID"
                raise UserError(
                    f"protocol: site '{site}' has no training samples left; lower protocol.test_fraction"
                    f"{cause if agreed.in_groups(site) else ''}"
                )
        if target == EVERY_SITE:
            return protocol.of_counts(train, held_out)
        if agreed.unseen is not None and target in self.unseen:
            domain = agreed.unseen.domains[target]
            own_held_out = protocol.domain_rows(domain, seed)[1]
            return Split(train, held_out, {target: protocol.measured_rows(domain, own_held_out)})
        unlabelled, measured = rows[target]
        if target in lacking:
            few = {target: measured} if len(measured) else {}
            return Split(train, held_out, few, {} if protocol.unseen else {target: unlabelled}, {target: unlabelled})
        if not protocol.unseen:
            return Split(train, held_out, {target: measured}, {target: unlabelled})
        whole = agreed.measures_all(target, protocol)
        count = len(agreed.data.domains[target]) if whole else len(measured)
        return Split(train, held_out, {target: np.arange(count, dtype=np.int64)})

    def _rows(self, site: str, seed: int) -> tuple[Rows, Rows]:
        """Training and held-out rows of a site; only their numbers are known."""
        train, held_out = self.agreed.cards[site].rows[str(seed)]
        return np.arange(train, dtype=np.int64), np.arange(held_out, dtype=np.int64)

    def samples_of(self, data: DataSet) -> Sequence[str]:
        """As in `Plan`: those of the coordinator's own set."""
        return self.unseen

    def _data_for(self, target: str) -> DataSet:
        return encoded_for(self.experiment, self.agreed, target)


def check_budgets(plan: DeployedPlan, *, begun: bool) -> None:
    """Check that every site with a budget can pay for the whole experiment, and may measure models if asked to.

    Args:
        begun: whether the experiment was begun before. What it cost so far is then part of what the sites have
            spent, so only the sites can decide.

    Raises:
        UserError: the message names the site.
    """
    if plan.agreed.privacy and not all(run.split.targets for run in plan.runs):
        raise UserError(
            "protocol.targets: no site measures the model, since those with a budget of privacy hold no samples out "
            "for it: name data.unseen, or sites set privacy.measurement_noise"
        )
    for site, budget in plan.agreed.privacy.items():
        target = next((run.run.target for run in plan.runs if _measures(run, site)), None)
        if target is not None and budget.measurement_noise is None:
            raise UserError(
                f"protocol.targets: '{target}' is measured at site '{site}', which has a budget of privacy and "
                "measures no model: measure elsewhere (data.unseen), or the site sets privacy.measurement_noise"
            )
        if begun:
            continue
        before = [NoisySteps(*kind) for kind in budget.spent]
        asked = [steps for run in plan.runs for steps in _cost(run, site, budget.measurement_noise)]
        estimates = sum(asks_sums(plan, run) for run in plan.runs if run.run.target == site)
        if budget.confidences_noise is not None and estimates:
            asked.append(NoisySteps(budget.confidences_noise, 1.0, estimates))
        epsilon, delta = budget.epsilon, budget.delta
        whole = adaptive_epsilon([*before, *asked], epsilon, delta)
        if whole > epsilon:
            raise UserError(
                f"training.privacy: site '{site}' has spent ε = {adaptive_epsilon(before, epsilon, delta):.3g} of "
                f"{epsilon:g} at δ = {delta:g}; with this experiment it would be {whole:.3g}: ask for more noise, "
                "fewer rounds, methods, targets or seeds, or measure less often (training.measure_every)"
            )


def run_at_sites(experiment: str, run: Run) -> str:
    """The name by which sites know a run."""
    return f"{experiment}-{run.method.display}-{run.target}-seed-{run.seed}"


def asks_sums(plan: DeployedPlan, planned: PlannedRun) -> bool:
    """Whether the target of a run is asked for sums: where another site lacks labels, and it lets them out."""
    target, agreed = planned.run.target, plan.agreed
    gives = target in agreed.cards and agreed.cards[target].gives_confidences
    asked = any(site != target for site in plan.data.unlabelled)
    return asked and target in planned.split.measured and gives and planned.run.metric == "accuracy"


def _measures(planned: PlannedRun, site: str) -> bool:
    return site in planned.split.measured


def _cost(planned: PlannedRun, site: str, deviation: float | None) -> list[NoisySteps]:
    """What a run costs a site: its training, and the measurements of the model on its samples."""
    cost = []
    if site in planned.privacy:
        item = planned.privacy[site]
        cost.append(NoisySteps(item.noise_multiplier, item.sample_rate, item.steps))
    held_out = len(planned.split.held_out.get(site, ()))
    if deviation is not None and (held_out or _measures(planned, site)):
        before_last = (max(1, planned.rounds) - 1) // planned.experiment.training.measure_every
        cost.append(NoisySteps(deviation, 1.0, before_last + 1))
    return cost
