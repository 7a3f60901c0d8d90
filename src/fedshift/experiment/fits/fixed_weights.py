"""Weights that stay fixed: under adapters, and in a backbone until it thaws."""

from __future__ import annotations

import copy
from collections.abc import Iterator

from fedshift.errors import UserError
from fedshift.experiment.fits.about import About
from fedshift.methods.base import Method
from fedshift.models import registry as models
from fedshift.models.adapters import merge_adapters
from fedshift.models.network import Network
from fedshift.weights import Weights


def fits(about: About) -> Iterator[str]:
    """Say where what is fixed was never trained."""
    training = about.experiment.training
    option = "adapters" if training.adapters is not None else "thaw_after"
    if getattr(training, option) and about.experiment.model.starts_at_random:
        yield (
            f"training.{option}: the weights that stay fixed are drawn at random; give model.pretrained to adapt a "
            "trained network"
        )


def trained_network(about: About, method: Method, sources: int) -> Network:
    """What the sites of a method train in runs with so many sources.

    UserError if the method cannot change a network that has adapters.
    """
    network = copy.deepcopy(about.start)
    if about.experiment.training.adapters is None:
        return method.adapt_network(network, sources)
    plain = models.build(about.experiment.model, about.data.input_shape, len(about.data.classes), 0)
    fault = UserError(
        f"training.adapters: {method.display} changes layers of the network, which it cannot where they are fixed: "
        "write adapters.normalisation: true if these are BatchNorm, or choose another method, such as fedavg"
    )
    try:
        adapted = method.adapt_network(network, sources)
        evaluated = method.evaluated_network(adapted, sources)
        result = merge_adapters(evaluated, Weights(evaluated.state_dict()))
    except (RuntimeError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise fault from error
    wanted = method.evaluated_network(method.adapt_network(plain, sources), sources).state_dict()
    if {name: tensor.shape for name, tensor in result.items()} != {name: wanted[name].shape for name in wanted}:
        raise fault
    return adapted
