"""Momentum of the server, which takes rounds to come up to its speed."""

from __future__ import annotations

from collections.abc import Iterator

from fedshift.experiment.fits.about import About
from fedshift.methods.base import Method
from fedshift.methods.composition.options import training_of
from fedshift.methods.server import Momentum, rounds_to_speed


def fits(about: About, method: Method) -> Iterator[str]:
    """Say where the rounds are too few for it."""
    optimizer = method.server
    rounds = training_of(method, about.experiment.training).rounds * method.exchanges_per_epoch
    if not isinstance(optimizer, Momentum) or rounds >= (needed := rounds_to_speed(optimizer.beta)):
        return
    yield (
        f"methods: {method.display}: server: momentum of {optimizer.beta:g} takes about {needed} rounds to come up to "
        f"its speed, and there are {rounds}; one of {max(0, 10 * (rounds - 3) // rounds) / 10:g} suits them"
    )
