"""Plug-ins of local training."""

from __future__ import annotations

from fedshift.errors import UserError
from fedshift.experiment.fits.about import About
from fedshift.methods.base import Method
from fedshift.methods.composition.plug_in import LocalOption
from fedshift.models.network import Network


def fits(about: About, method: Method, network: Network) -> None:
    """Check that each goes with the network and the samples."""
    for plug_in in method.at_sites(about.data.input_shape).local:
        try:
            _check(plug_in, about, network)
        except UserError as error:
            where = "local." if plug_in in method.local else ""
            raise UserError(f"methods: {method.display}: {where}{error}") from None


def _check(plug_in: LocalOption, about: About, network: Network) -> None:
    if about.data.task not in plug_in.tasks:
        raise UserError(
            f"{plug_in.name} is for {' and '.join(plug_in.tasks)}, the data for {about.data.task}; leave it out"
        )
    plug_in.check(network, about.data.input_shape)
