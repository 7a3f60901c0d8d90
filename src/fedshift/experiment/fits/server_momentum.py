"""Momentum of the server, which takes rounds to come up to its speed."""

from __future__ import annotations

from collections.abc import Iterator

from fedshift.experiment.fits.about import About
from fedshift.methods.base import Method
from fedshift.methods.server import Momentum, rounds_to_speed
from fedshift.weights import Weights


def fits(about: About, method: Method) -> Iterator[str]:
    """Say where the rounds are too few for it, a preset's own momentum among them."""
    optimizer = method.at_server(Weights(about.start.state_dict())).optimizer
    if not isinstance(optimizer, Momentum):
        return
    needed = rounds_to_speed(optimizer.beta)
    rounds = next(planned.rounds for planned in about.plan.runs if planned.run.method == method)
    if rounds < needed:
        yield (
            f"methods: {method.display}: momentum {optimizer.beta:g} of the server takes about {needed} rounds to come "
            f"up to its speed, and there are {rounds}; one of {max(0, 10 * (rounds - 3) // rounds) / 10:g} suits them"
        )
