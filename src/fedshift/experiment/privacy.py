"""What privacy an experiment's runs give their sites, and at what ε."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from fedshift.errors import UserError
from fedshift.evaluation.records import SitePrivacy
from fedshift.federation.private_training import Draws, check_network
from fedshift.federation.training import Training
from fedshift.functional.differential_privacy import NoisySteps, epsilon, noise_multiplier, sample_rate
from fedshift.methods import registry
from fedshift.methods.base import Method
from fedshift.models.network import Network

if TYPE_CHECKING:
    from fedshift.experiment.plan import Plan, PlannedRun


def privacy_of(planned: PlannedRun) -> dict[str, SitePrivacy]:
    """What a run costs each site; empty where it is not private.

    Raises:
        UserError: the ε that is asked for cannot be reached.
    """
    training = planned.experiment.training
    if training.privacy is None:
        return {}
    found = {}
    for site, rows in planned.split.train.items():
        grouped = planned.plan.in_groups(site, rows)
        try:
            found[site] = _cost(training, len(rows), planned.budget[site], "group" if grouped else "sample")
        except UserError as error:
            raise UserError(f"training.privacy: site '{site}': {error}") from None
    return found


def _cost(training: Training, samples: int, steps: int, unit: Literal["sample", "group"]) -> SitePrivacy:
    privacy, rate = training.privacy, sample_rate(samples, training.batch_size)
    assert privacy is not None
    sigma = privacy.noise_multiplier
    if sigma is None:
        assert privacy.epsilon is not None
        sigma = noise_multiplier(privacy.epsilon, privacy.delta, rate, steps)
    spent = NoisySteps(sigma, rate, steps)
    return SitePrivacy(
        epsilon=epsilon([spent], privacy.delta),
        delta=privacy.delta,
        unit=unit,
        clip_norm=privacy.clip_norm,
        noise_multiplier=sigma,
        sample_rate=rate,
        steps=steps,
    )


def draws_of(planned: PlannedRun) -> dict[str, Draws]:
    """Where each site of a private run draws its noise from: from the run and the site, so a resumed run repeats it."""
    privacy = planned.privacy
    if not privacy:
        return {}
    identity = {key: value for key, value in planned.identity.items() if key not in ("engine", "device", "versions")}
    identity["data"] = {key: value for key, value in identity["data"].items() if key not in ("root", "sites")}  # paths
    run = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    return {site: Draws(one.noise_multiplier, f"{run} {site}") for site, one in privacy.items()}


@dataclass(frozen=True)
class Spent:
    """What an experiment costs a site.

    Attributes:
        run: ε of its most expensive run.
        together: ε of all runs, for someone who sees the models of all.
        delta: δ of both.
    """

    run: float
    together: float
    delta: float


def spent_by_experiment(plan: Plan) -> dict[str, Spent]:
    """What an experiment costs each site; empty where it is not private."""
    privacy = plan.experiment.training.privacy
    if privacy is None:
        return {}
    runs: dict[str, list[SitePrivacy]] = {}
    for planned in plan.runs:
        for site, one in planned.privacy.items():
            runs.setdefault(site, []).append(one)
    delta = privacy.delta
    return {
        site: Spent(
            max(one.epsilon for one in all_runs),
            epsilon([NoisySteps(one.noise_multiplier, one.sample_rate, one.steps) for one in all_runs], delta),
            delta,
        )
        for site, all_runs in sorted(runs.items())
    }


def check_private(method: Method, network: Network, input_shape: tuple[int, ...]) -> None:
    """Check that a method can train this network privately.

    Raises:
        UserError: it cannot.
    """
    if not vars(type(method)).get("trains_privately", False):
        able = [name for name in registry.names() if vars(registry.method_class(name)).get("trains_privately", False)]
        raise UserError(f"training.privacy: {method.display} cannot train privately: choose {', '.join(able)}")
    if method.local:
        raise UserError(
            f"training.privacy: {method.display}: plug-ins of local training are not private: leave out local"
        )
    try:
        check_network(network, input_shape)
    except UserError as error:
        raise UserError(f"training.privacy: {error}") from None


def privacy_warnings(plan: Plan) -> tuple[str, ...]:
    """What a reader of ε should know about these data."""
    privacy = plan.experiment.training.privacy
    if privacy is None:
        return ()
    found = []
    sizes: dict[str, int] = {}
    groups: dict[str, int] = {}
    for planned in plan.runs:
        for site, rows in planned.split.train.items():
            sizes[site] = min(sizes.get(site, len(rows)), len(rows))
            groups[site] = max(groups.get(site, 1), plan.largest_group(site, rows))
    batch = plan.experiment.training.batch_size
    for site, size in sorted(groups.items()):
        if size > batch:
            found.append(
                f"training.batch_size: site '{site}' has a group of {size} samples, more than a mini-batch of {batch}: "
                "it is in a mini-batch as a whole, which is then larger"
            )
    for site, size in sorted(sizes.items()):
        if privacy.delta * size >= 1:
            found.append(
                f"training.privacy.delta: {privacy.delta:g} is not below 1/{size}, one over the samples of '{site}'"
            )
    if plan.experiment.data.shares:
        found.append(
            f"training.privacy: ε does not count the {' and '.join(plan.experiment.data.shares)} that sites send for a "
            "common encoding"
        )
    return tuple(found)
