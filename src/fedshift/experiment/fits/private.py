"""Private training: noisy steps, under ``training.privacy``."""

from __future__ import annotations

from collections.abc import Iterator

from fedshift.data.tasks.objective import objective_of
from fedshift.errors import UserError
from fedshift.experiment.fits.about import About
from fedshift.experiment.plan import Plan
from fedshift.federation.private_training import check_network
from fedshift.methods import registry
from fedshift.methods.base import Method
from fedshift.methods.composition.options import preparation_of
from fedshift.models.network import Network


def task_fits(about: About) -> None:
    """Check that what is learned has a loss of each sample, whose gradient can be clipped."""
    if about.experiment.training.privacy is None:
        return
    if about.data.task == "segmentation":
        raise UserError(
            "training.privacy: the Dice loss of a mini-batch is no mean of a loss of each sample, so no sample's "
            "gradient can be clipped: leave it out"
        )
    if not objective_of(about.data.preprocessing).by_sample:
        raise UserError(
            "training.privacy: Cox's partial likelihood compares a sample with the others of its mini-batch, so no "
            f"sample's gradient can be clipped, and the data are for {about.data.task}: leave it out"
        )


def network_fits(about: About, method: Method, network: Network) -> None:
    """Check that a method can train this network privately."""
    if about.experiment.training.privacy is not None:
        check_private(method, network, about.data.input_shape)


def check_private(method: Method, network: Network, input_shape: tuple[int, ...]) -> None:
    """Check that a method can train this network privately, here or at a site that was asked to.

    UserError if it cannot.
    """
    # A class that says nothing of its own may train in another way than the one that it derives from.
    plain = preparation_of(method) is None  # what it sends is computed from samples, without noise
    if not (plain and "traits" in vars(type(method)) and method.traits.trains_privately):
        able = [name for name in registry.names() if registry.method_class(name).traits.trains_privately]
        raise UserError(f"training.privacy: {method.display} cannot train privately: choose {', '.join(able)}")
    if method.local:
        raise UserError(
            f"training.privacy: {method.display}: plug-ins of local training are not private: leave out local"
        )
    try:
        check_network(network, input_shape)
    except UserError as error:
        raise UserError(f"training.privacy: {error}") from None


def what_epsilon_means(about: About) -> Iterator[str]:
    """What a reader of ε should know about these data."""
    experiment = about.experiment
    privacy, batch = experiment.training.privacy, experiment.training.batch_size
    if privacy is None:
        return
    smallest, largest_group = _sizes(about.plan)
    for site, size in sorted(largest_group.items()):
        if size > batch:
            yield (
                f"training.batch_size: site '{site}' has a group of {size} samples, more than a mini-batch of {batch}: "
                "it is in a mini-batch as a whole, which is then larger"
            )
    for site, size in sorted(smallest.items()):
        if privacy.delta * size >= 1:
            yield f"training.privacy.delta: {privacy.delta:g} is not below 1/{size}, one over the samples of '{site}'"
    if experiment.protocol.sites_per_round is not None:
        yield (
            "protocol.sites_per_round: ε is that of a site which takes part in every round. That sites are drawn does "
            "not lower it, since the coordinator knows who is drawn"
        )
    if experiment.data.shares:
        yield (
            f"training.privacy: ε does not count the {' and '.join(experiment.data.shares)} that sites send for a "
            "common encoding"
        )


def _sizes(plan: Plan) -> tuple[dict[str, int], dict[str, int]]:
    """The fewest training samples of each source in a run, and the most that one group has."""
    sizes: dict[str, int] = {}
    groups: dict[str, int] = {}
    for planned in plan.runs:
        for site, rows in planned.split.train.items():
            sizes[site] = min(sizes.get(site, len(rows)), len(rows))
            groups[site] = max(groups.get(site, 1), plan.largest_group(site, rows))
    return sizes, groups
