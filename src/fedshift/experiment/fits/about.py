"""What the checks of this folder look at: a frozen value, made once for an experiment."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

from fedshift.data.domain import DataSet
from fedshift.data.tasks.objective import objective_of
from fedshift.experiment.config.engine_section import Engine
from fedshift.experiment.config.experiment import Experiment
from fedshift.experiment.plan import Plan
from fedshift.experiment.protocols.base import Roles
from fedshift.methods.base import Method
from fedshift.models.adapters import check_adapters
from fedshift.models.network import Network


@dataclass(frozen=True)
class About:
    """What all runs of an experiment share. It trains nothing, and makes a network when the first check asks for it."""

    plan: Plan

    @property
    def experiment(self) -> Experiment:
        """The experiment."""
        return self.plan.experiment

    @property
    def engine(self) -> Engine:
        """Its engine."""
        return self.plan.experiment.engine

    @property
    def data(self) -> DataSet:
        """The domains that take part."""
        return self.plan.data

    @cached_property
    def roles(self) -> tuple[Roles, ...]:
        """The sources and the targets of each target's runs."""
        return tuple(self.plan.roles(target) for target in self.plan.targets)

    @cached_property
    def fewest_sources(self) -> int:
        """The number of sources of the run that has the fewest."""
        return min(len(sources) for sources, _ in self.roles)

    @cached_property
    def drawn(self) -> int | None:
        """How many sources are drawn for a round of that run; None: all take part."""
        return self.experiment.protocol.number_drawn(self.fewest_sources)

    @cached_property
    def start(self) -> Network:
        """The network that runs start from; its weights are arbitrary.

        UserError if it cannot be made for these data, or cannot have the adapters of the experiment.
        """
        training, data = self.experiment.training, self.data
        start = training.network(self.experiment.model, data.input_shape, len(data.classes), 0)
        if training.adapters is not None:
            check_adapters(start, data.input_shape)
        start.objective = objective_of(data.preprocessing)
        return start


OfExperiment = Callable[[About], Iterator[str] | None]
"""A check: it raises UserError with the reason why something does not fit, and may yield warnings about what does."""
OfMethod = Callable[[About, Method], Iterator[str] | None]
"""The same for each method."""
OfNetwork = Callable[[About, Method, Network], Iterator[str] | None]
"""The same for each network that the sites of a method train: one for each number of sources that runs have."""
