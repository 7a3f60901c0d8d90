"""The network: whether it can be made, trained, and used by a method with its options."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from fedshift.experiment.budgets import shortest_epochs
from fedshift.experiment.fits.about import About
from fedshift.experiment.trial import try_training
from fedshift.methods.base import Method, Samples
from fedshift.methods.composition.options import training_of
from fedshift.models.network import Network


def start_fits(about: About) -> None:
    """Check that the network can be made for the samples, and that one of the user's own trains."""
    experiment, start = about.experiment, about.start
    if experiment.model.code is not None:
        try_training(start, experiment.model, experiment.training, about.data.input_shape)


def method_fits(about: About, method: Method, network: Network) -> None:
    """Check that the network has what a method's equations and options need."""
    method.check(network)


def samples_fit(about: About) -> Iterator[str]:
    """What methods say of their options on so many samples."""
    splits = [run.split for run in about.plan.runs]
    for method in about.experiment.methods:
        training = training_of(method, about.experiment.training)
        samples = Samples(
            about.data.input_shape,
            shortest_epochs(training, splits),
            tokens=about.data.preprocessing.kind == "tokens",
            are_pixels=all(getattr(run.inputs, "dtype", None) == np.uint8 for run in about.data.domains.values()),
            parts=about.data.preprocessing.patch is not None,
        )
        yield from method.check_samples(samples)
