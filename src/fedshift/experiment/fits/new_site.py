"""A network that adapts to an unseen site before it predicts there."""

from __future__ import annotations

from fedshift.data.tasks.objective import CLASSES
from fedshift.errors import UserError
from fedshift.experiment.fits.about import About
from fedshift.methods.base import Method
from fedshift.methods.composition.new_site import turns
from fedshift.models.network import Network
from fedshift.models.normalisation import batch_norms


def fits(about: About, method: Method, network: Network) -> None:
    """Check that there is an unseen site, and that the network can adapt in the way that an option asks for."""
    protocol, unfit = about.experiment.protocol, {}
    if method.batch_norm_at_new_site is not None:
        follows = batch_norms(network)
        unfit["batch_norm_at_new_site"] = "" if follows else "the network has no BatchNorm that follows its data"
    if method.classifier_at_new_site is not None:
        able = turns(method.evaluated_network(network, 1)) and network.objective == CLASSES
        unfit["classifier_at_new_site"] = "" if able else "the network's classifier is not one linear layer for classes"
    for option, reason in unfit.items():
        if not protocol.unseen:
            reason = f"protocol {protocol.kind} has no unseen site"
        if reason:
            raise UserError(f"methods: {method.display}: {option}: {reason}; leave it out")
