"""Averages over rounds that choose among them."""

from __future__ import annotations

from fedshift.errors import UserError
from fedshift.experiment.fits.about import About
from fedshift.methods.base import Method


def fits(about: About, method: Method) -> None:
    """Check that an average that looks at the sources' held-out parts after every round can do so."""
    every = about.experiment.training.measure_every
    if method.average is None or not method.average.judges:
        return
    if not about.experiment.protocol.holds_out:
        raise UserError(
            f"methods: {method.display}: average: it chooses rounds by the sources' held-out parts, and "
            "protocol.test_fraction is 0: raise it, or choose swa or ema"
        )
    if every > 1:
        raise UserError(
            f"methods: {method.display}: average: it looks at every round, and training.measure_every is {every}: "
            "leave that out, or choose swa or ema"
        )
