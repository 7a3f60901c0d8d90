"""Sites that train side by side, under ``engine.sites``."""

from __future__ import annotations

from collections.abc import Iterator

from fedshift.experiment.fits.about import About
from fedshift.federation.local.stacked import check_side_by_side
from fedshift.methods.base import Method
from fedshift.models.network import Network


def fits(about: About, method: Method, network: Network) -> Iterator[str]:
    """Check that the sites of a method can be stacked."""
    if about.engine.sites == "side_by_side":
        plugged = bool(method.local_for(about.data.input_shape))
        training, in_parts = method.own_training(about.experiment.training), method.trains_in_parts
        check_side_by_side(method.display, network, training, in_parts=in_parts, plugged=plugged)
    yield from ()
