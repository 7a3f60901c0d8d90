"""What ε a private run costs a site, where its noise comes from, and which methods can hide what from the server."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from fedshift.data.domain import DataSet
from fedshift.data.tasks.objective import objective_of
from fedshift.errors import UserError
from fedshift.evaluation.records import SitePrivacy
from fedshift.experiment.protocols.base import Split
from fedshift.federation.private_training import check_network
from fedshift.federation.randomness import Draws
from fedshift.federation.secure.sums import SMALLEST_ROSTER
from fedshift.federation.training import Training
from fedshift.functional.differential_privacy import NoisySteps, epsilon, noise_multiplier, sample_rate
from fedshift.methods import registry
from fedshift.methods.base import Method
from fedshift.methods.catalogue import ROUTED, SUMS
from fedshift.models.network import Network


def site_privacy(training: Training, site: str, samples: int, steps: int, *, grouped: bool) -> SitePrivacy:
    """What a private run costs a site.

    Args:
        training: the experiment's; private.
        site: its name.
        samples: on which it trains.
        steps: mini-batches of the run.
        grouped: whether the samples of a group, such as a patient, are protected together.

    Raises:
        UserError: the ε that is asked for cannot be reached.
    """
    try:
        return _cost(training, samples, steps, "group" if grouped else "sample")
    except UserError as error:
        raise UserError(f"training.privacy: site '{site}': {error}") from None


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


def draws_of(privacy: Mapping[str, SitePrivacy], identity: Mapping[str, Any]) -> dict[str, Draws]:
    """Where each site of a private run draws its noise from: from the run and the site, so a resumed run repeats it.

    Args:
        privacy: what the run costs each site; empty unless it is private.
        identity: of the run.
    """
    if not privacy:
        return {}
    of = {key: value for key, value in identity.items() if key not in ("engine", "device", "versions")}
    of["data"] = {key: value for key, value in of["data"].items() if key not in ("root", "sites")}  # paths
    run = hashlib.sha256(json.dumps(of, sort_keys=True).encode()).hexdigest()
    return {site: Draws(one.noise_multiplier, f"{run} {site}") for site, one in privacy.items()}


def check_private_task(data: DataSet) -> None:
    """Check that what is learned has a loss of each sample, whose gradient can be clipped.

    Raises:
        UserError: it has not.
    """
    if data.task == "segmentation":
        raise UserError(
            "training.privacy: the Dice loss of a mini-batch is no mean of a loss of each sample, so no sample's "
            "gradient can be clipped: leave it out"
        )
    if not objective_of(data.preprocessing).by_sample:
        raise UserError(
            "training.privacy: Cox's partial likelihood compares a sample with the others of its mini-batch, so no "
            f"sample's gradient can be clipped, and the data are for {data.task}: leave it out"
        )


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


def check_sums(method: Method, sources: int, unlabelled: int = 0) -> tuple[str, ...]:
    """Check that secure aggregation can hide what a method's sites send.

    Args:
        method: of the run.
        sources: the fewest labelled sites of a round.
        unlabelled: the fewest sites without labels.

    Returns:
        Warnings.

    Raises:
        UserError: it cannot be hidden.
    """
    if method.reads != "sums":
        why = "with robust aggregation " if method.robust is not None else ""
        if not why and method.server_reads == "sums":
            why = "with these options "
        raise UserError(
            f"engine.aggregation: secure lets the server read sums only, but {why}it reads {method.reads} of "
            f"{method.display}'s sites: choose {', '.join(SUMS)}" + (" without robust" if method.robust else "")
        )
    if sources < SMALLEST_ROSTER:
        raise UserError(
            f"engine.aggregation: secure needs {SMALLEST_ROSTER} labelled sites, here a round has {sources}: of "
            "two sites each would know the other's model from the sum"
        )
    if method.needs_target and unlabelled < SMALLEST_ROSTER:
        raise UserError(
            f"engine.aggregation: secure needs {SMALLEST_ROSTER} sites without labels for {method.display}, which sums "
            f"their models by themselves; here a run has {unlabelled}"
        )
    most = method.sums_per_model + 1
    if sources > most:
        return ()
    return (
        f"{method.display} with aggregation: secure among {sources} labelled sites: its sites learn "
        f"{method.sums_per_model} sums of the same models a round, from which each of them can compute the models of "
        f"the others; {most + 1} sites or more prevent it",
    )


def check_routed(method: Method, adapters: bool = False) -> tuple[str, ...]:
    """Check that a method's server leaves models unread, and that nothing else reads them.

    Args:
        method: of the run.
        adapters: whether only adapters are trained.

    Returns:
        Warnings.

    Raises:
        UserError: something would read them.
    """
    if not method.routed:
        raise UserError(
            f"engine.routing: sealed hides models that the server does not read itself, and {method.display} has none: "
            f"choose {', '.join(ROUTED)}, or leave it out"
        )
    if method.robust is not None:
        raise UserError(
            f"engine.routing: sealed hides the models that robust aggregation looks at: leave out one of them "
            f"({method.display})"
        )
    if not any(way.in_model for way in method.routed.values()):
        return ()
    reading = {
        "average": method.average is not None,
        "average_rounds": method.average_rounds > 1,
        "training.adapters": adapters,
    }
    for option in (option for option, asked in reading.items() if asked):
        raise UserError(
            f"engine.routing: sealed hides parts of the trained model of {method.display}, which {option} reads: leave "
            "out one of them"
        )
    if not _target_alone_reads(method):
        return ()
    return (
        f"{method.display} with routing: sealed: only the target can measure the trained model, so there is no "
        "accuracy at the sources, and none to select a round by",
    )


def _target_alone_reads(method: Method) -> bool:
    """Whether only the target reads the trained model."""
    return any(way.in_model and way.readers != "all" for way in method.routed.values())


def measured_parts(method: Method, routing: str, split: Split) -> Split:
    """The rows that a run is measured on: not those of sources that may not read the trained model."""
    if routing != "sealed" or not _target_alone_reads(method):
        return split
    return replace(split, held_out={site: rows[:0] for site, rows in split.held_out.items()})
