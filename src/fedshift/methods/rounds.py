"""The start of a method and its rounds, as a run plays them."""

from __future__ import annotations

from dataclasses import replace

from fedshift.errors import FedshiftError
from fedshift.federation.federation import Federation
from fedshift.federation.secure.closed import is_closed
from fedshift.methods.base import Method, State
from fedshift.methods.composition.options import preparation_of
from fedshift.methods.server import after_round
from fedshift.weights import Weights


def start_run(method: Method, federation: Federation, weights: Weights) -> State:
    """The state before the first round, from the common start ``weights``, once the samples are prepared."""
    prepared = preparation_of(method)
    if prepared is not None:
        prepared.start(federation)
    return method.start(federation, weights)


def play_round(method: Method, federation: Federation, state: State) -> State:
    """The method's round, and after it the step of the server's optimiser, where there is one.

    Raises FedshiftError: the method returned something else than the next state. Raises TrainingDiverged: it made
    numbers that are not finite of replies that are, or the server's optimiser did.
    """
    federation.round = state.round + 1
    optimizer = method.at_server(state.weights).optimizer
    begun = state if optimizer is None else replace(state, weights=optimizer.start(state.weights, state.server))
    new = method.round(federation, begun)
    if not isinstance(new, State) or new.round != federation.round:
        raise FedshiftError(f"{method.name}: round() must return state.advance(...)")
    # Replies were checked as they came: what is not finite now is the server's own. It cannot read sealed models.
    who, remedy = f"{method.name}, round {new.round}", f"the replies were finite, look at {method.name}'s round"
    if optimizer is None:
        if not is_closed(new.weights):
            new.weights.check_finite(who, remedy)
        return new
    weights, moments = after_round(optimizer, state.weights, new.weights, state.server, method.personal(new.weights))
    weights.check_finite(who, f"{remedy}, or lower the rate of the server's optimiser")
    return replace(new, weights=weights, server=moments)


def finish_run(method: Method, federation: Federation, weights: Weights) -> None:
    """What the method's sites do with the run's model ``weights`` after the last round."""
    federation.finishing = True
    try:
        method.personalise(federation, weights)
        federation.settle()
    finally:
        federation.finishing = False
