"""Sites that train side by side, under ``engine.sites``."""

from __future__ import annotations

from fedshift.experiment.config.engine_section import Engine
from fedshift.experiment.fits.about import About
from fedshift.federation.local.stacked import check_side_by_side, faster_side_by_side, no_side_by_side
from fedshift.federation.site_runner import Setting
from fedshift.methods.base import Method
from fedshift.methods.composition.options import training_of
from fedshift.models.network import Network


def fits(about: About, method: Method, network: Network) -> None:
    """Check that the sites of a method can be stacked."""
    if about.engine.sites == "side_by_side":
        plugged = bool(method.at_sites(about.data.input_shape).local)
        training, in_parts = training_of(method, about.experiment.training), method.calls.come_in_parts
        shape = about.data.input_shape
        check_side_by_side(method.display, network, training, shape, in_parts=in_parts, plugged=plugged)


def trains_side_by_side(engine: Engine, method: Method, setting: Setting, network: Network) -> bool:
    """Whether the sites of a run train side by side: where the file says so or, with ``auto``, where it is faster.

    ``setting``: what its sites have in common.
    """
    if engine.sites != "auto":
        return engine.sites == "side_by_side"
    plugged, shape = bool(method.at_sites(setting.input_shape).local), setting.input_shape
    fault = no_side_by_side(
        method.display, network, setting.training, shape, in_parts=method.calls.come_in_parts, plugged=plugged
    )
    on_processor = setting.device == "cpu"
    return on_processor and not fault and faster_side_by_side(network, shape, setting.training.batch_size)
