"""Tokens: whether the network reads them, and knows them all; and whether a method can work with them."""

from __future__ import annotations

import torch

from fedshift.data.domain import NO_TOKEN, SparseRows
from fedshift.errors import UserError
from fedshift.experiment.fits.about import About
from fedshift.experiment.trial import try_method
from fedshift.methods.base import Method, Samples
from fedshift.models.made_up import reads_tokens
from fedshift.models.own.forward_trial import SAMPLES, forward, line_of, one_line


def network_fits(about: About) -> None:
    """Check that a network of tokens has tokens to read, that tokens have such a network, and that it knows them."""
    options, data = about.experiment.model, about.data
    if data.preprocessing.kind != "tokens":
        if reads_tokens(about.start):
            raise UserError(
                f"model '{options.display}' reads tokens, but data set {data.name} holds numbers: give integers in x, "
                "or a table with a column of text"
            )
        return
    if options.code is None:
        raise UserError(
            f"model '{options.display}' reads numbers, but data set {data.name} holds integers, which are tokens: "
            "choose an hf: network or one of your own; if they are numbers, convert x to float32"
        )
    _check_vocabulary(about)


def _check_vocabulary(about: About) -> None:
    """Raise UserError if the network fails on the largest token, or where there is none."""
    inputs = [domain.inputs for domain in about.data.domains.values() if not isinstance(domain.inputs, SparseRows)]
    largest, least = max(int(domain.max()) for domain in inputs), min(int(domain.min()) for domain in inputs)
    whole = torch.full((SAMPLES, *about.data.input_shape), largest)
    ended = whole.clone()
    ended[:, 1:] = NO_TOKEN
    advice = "does its vocabulary hold it (hf: vocab_size)?"
    tries = [(whole, f"token {largest}, the largest of the data", advice)]
    if least == NO_TOKEN:
        tries.append((ended, f"{NO_TOKEN}, which stands where there is no token", "mask such positions: x != -1"))
    for samples, what, advice in tries:
        try:
            forward(about.start, samples)
        except Exception as error:
            name = about.experiment.model.display
            raise UserError(f"model '{name}' fails on {what}{line_of(error)}: {one_line(error)}; {advice}") from error


def method_fits(about: About, method: Method) -> None:
    """Check, on made-up tokens, that a method does not calculate with them."""
    if about.data.preprocessing.kind == "tokens":
        method.check_samples(Samples(about.data.input_shape, tokens=True))
        planned = next(run for run in about.plan.runs if run.run.method is method)
        try:
            try_method(planned, planned.network())
        except UserError as error:
            cause = error.__cause__ or error
            raise UserError(
                f"methods: {method.display} cannot learn from tokens, with which nobody can calculate "
                f"({one_line(cause)}): choose another method or another setting"
            ) from error
