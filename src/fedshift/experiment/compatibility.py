"""Checks, without training, that methods, network, data and the sites' refusals are compatible.

What composes has its checks in a file of ``fits/`` and its place in a list below, whose order is that of the messages:
the first thing that does not fit is named.
"""

from __future__ import annotations

from collections.abc import Iterator

from fedshift.experiment.fits import (
    averages,
    cards,
    comparison,
    drawn_sites,
    fixed_weights,
    networks,
    new_site,
    personal,
    plug_ins,
    precision,
    preparation,
    private,
    quorum,
    refusals,
    robust_rules,
    sealed_routing,
    secure_sums,
    server_momentum,
    side_by_side,
    site_scale,
    target_labels,
    tasks,
    tokens,
)
from fedshift.experiment.fits.about import About, OfExperiment, OfMethod, OfNetwork
from fedshift.experiment.plan import Plan
from fedshift.methods.base import Method

OF_EXPERIMENT: tuple[OfExperiment, ...] = (
    refusals.data_fit,
    private.task_fits,
    site_scale.fits,
    comparison.protocol_fits,
    tasks.network_fits,
    tasks.class_weights_fit,
    comparison.headline_fits,
    comparison.targets_fit,
    quorum.fits,
    precision.fits,
    cards.fits,
    drawn_sites.fits,
    fixed_weights.fits,
    tokens.network_fits,
    networks.start_fits,
)
OF_METHOD_ALONE: tuple[OfMethod, ...] = (
    sealed_routing.fits,
    secure_sums.fits,
    tasks.method_fits,
    precision.method_fits,
    target_labels.fits,
    personal.fits,
    site_scale.method_fits,
)
OF_NETWORK: tuple[OfNetwork, ...] = (
    networks.method_fits,
    preparation.fits,
    side_by_side.fits,
    private.network_fits,
    plug_ins.fits,
    new_site.fits,
)
OF_METHOD_AMONG_SITES: tuple[OfMethod, ...] = (
    tokens.method_fits,
    robust_rules.fits,
    averages.fits,
    server_momentum.fits,
    refusals.method_fits,
)
OF_ALL_RUNS: tuple[OfExperiment, ...] = (networks.samples_fit, private.what_epsilon_means)


def check_fit(plan: Plan) -> tuple[str, ...]:
    """Check, without training, that methods, network, data and the sites' refusals are compatible.

    Returns warnings of the methods about their options on these data, and about sites that will be left out. UserError
    if something is not compatible. The message names the first such thing.
    """
    about = About(plan)
    return tuple(_notes(about))


def _notes(about: About) -> Iterator[str]:
    for check in OF_EXPERIMENT:
        yield from check(about) or ()
    for method in about.experiment.methods:
        yield from _notes_of(about, method)
    for check in OF_ALL_RUNS:
        yield from check(about) or ()


def _notes_of(about: About, method: Method) -> Iterator[str]:
    for check in OF_METHOD_ALONE:
        yield from check(about, method) or ()
    for sources in sorted({len(labelled) for labelled, _ in about.roles}):
        network = fixed_weights.trained_network(about, method, sources)
        for fits in OF_NETWORK:
            yield from fits(about, method, network) or ()
    for check in OF_METHOD_AMONG_SITES:
        yield from check(about, method) or ()
