"""What sites do with their samples before they train, under ``prepare``."""

from __future__ import annotations

from fedshift.errors import UserError
from fedshift.experiment.fits.about import About
from fedshift.methods.base import Method
from fedshift.methods.composition.options import preparation_of
from fedshift.models.network import Network


def fits(about: About, method: Method, network: Network) -> None:
    """Check that it goes with the network, the samples and the number of sources."""
    prepared = preparation_of(method)
    if prepared is not None:
        sources = min(len(labelled) for labelled, _ in about.roles)
        try:
            prepared.check(network, about.data.input_shape, sources)
        except UserError as error:
            raise UserError(f"methods: {method.display}: {error}") from None
