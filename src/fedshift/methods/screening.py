"""Robust aggregation at work: what a method reads of an exchange, after its rule has looked at all replies."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from fedshift.errors import FedshiftError
from fedshift.federation.exchange import R, Replies
from fedshift.federation.messages import Content, PerSite, Reply
from fedshift.methods.base import Method
from fedshift.methods.robust import Averaged, Rule
from fedshift.weights import Weights


def screening_of(method: Method, start: Weights) -> Screening | None:
    """What screens the replies of a run; None where the method has no rule."""
    return None if method.robust is None else Screening(method.robust, method.traits.averages, {"weights": start})


@dataclass
class Screening:
    """Screens the replies of a run's exchanges by a rule.

    Replies are read to the end and kept before the rule looks at them: up to `exchange.KEPT_IN_MEMORY` bytes in memory,
    the others in files. Beside them a rule holds `robust.AT_ONCE` bytes, and two models at most.

    ``averages``: the calls whose replies it is for, and which models in them. ``sent``: the models that were sent last,
    by the name of the content.
    """

    rule: Rule
    averages: Mapping[str, Averaged]
    sent: dict[str, Weights]
    report: dict[str, Any] = field(default_factory=dict)

    def screen(
        self, call: str, content: Mapping[str, Content | PerSite], answers: Generator[tuple[str, R], None, None]
    ) -> Generator[tuple[str, R], None, None]:
        """The replies of an exchange as the method reads them.

        Raises UserError: the replies are too few for the rule, or do not fit what was sent.
        """
        self.sent |= {name: value for name, value in content.items() if isinstance(value, Weights)}
        averaged = self.averages.get(call)
        if averaged is None:
            yield from answers
            return
        kept: Replies[R] = Replies((), answers).keep()
        kept.drain()
        if not kept.sites:
            return
        centre = self._centre(call, averaged, content, next(iter(kept)))
        models = _Models(kept, averaged)
        for site, model in zip(kept.sites, models, strict=True):
            model.check_like(centre, f"the reply of site '{site}'")
        verdict = self.rule.judge(kept.sites, models, centre)
        self.report[call] = dict(verdict.report)
        for site, reply in kept.items():
            chosen = verdict.replaced(site, _whole(reply, averaged))
            if chosen is not None:
                yield site, replace(reply, **{name: _part(chosen, name) for name in averaged.fields})

    def settle(self) -> dict[str, Any]:
        """What the rule did since the last time, by call."""
        report, self.report = self.report, {}
        return report

    def _centre(self, call: str, averaged: Averaged, content: Mapping[str, Content | PerSite], first: Reply) -> Weights:
        if any(isinstance(content.get(name), PerSite) for name in averaged.fields):
            raise FedshiftError(f"robust: {call} sends every site another model; a rule needs one from which all began")
        zero = {name: _zeros(getattr(first, name)) for name in averaged.changes}
        unknown = [name for name in averaged.fields if name not in self.sent | zero]
        if unknown:
            raise FedshiftError(f"robust: '{unknown[0]}' of {call} was sent to no site, so it has no update")
        return _join({name: (self.sent | zero)[name] for name in averaged.fields})


@dataclass(frozen=True)
class _Models:
    """The averaged models of kept replies; every pass reads them anew."""

    replies: Replies[Any]
    averaged: Averaged

    def __iter__(self) -> Iterator[Weights]:
        return (_whole(reply, self.averaged) for reply in self.replies)


def _whole(reply: Reply, averaged: Averaged) -> Weights:
    return _join({name: getattr(reply, name) for name in averaged.fields})


def _zeros(like: Weights) -> Weights:
    return Weights({name: torch.zeros_like(tensor) for name, tensor in like.items()})


def _join(models: Mapping[str, Weights]) -> Weights:
    """Several models as one, whose tensors are named after both."""
    return Weights({f"{name}/{key}": tensor for name, model in models.items() for key, tensor in model.items()})


def _part(model: Weights, name: str) -> Weights:
    """The inverse of `_join`."""
    return Weights(
        {key.removeprefix(f"{name}/"): tensor for key, tensor in model.items() if key.startswith(f"{name}/")}
    )
