"""A method in front of another one: what it changes is inside the other's steps, the rest is the other's."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Self

from pydantic import model_validator
from torch import Tensor

from fedshift.data.domain import Task
from fedshift.federation.federation import Federation
from fedshift.federation.messages import Reply
from fedshift.federation.site import Site
from fedshift.methods.base import Method, RunPlan, State, Traffic
from fedshift.models.network import Network
from fedshift.weights import Weights


class _Both:
    """A class attribute that holds, on an instance, what the method behind has, then what is its own.

    On the class, where the method behind is not known yet, what most methods have stands for it.
    """

    def __init__(self, name: str, own: str) -> None:
        self._name, self._own = name, own

    def __get__(self, instance: InFront | None, owner: type[InFront]) -> tuple[str, ...]:
        behind: tuple[str, ...] = getattr(Method if instance is None else instance.inner, self._name)
        return tuple(dict.fromkeys((*behind, *getattr(owner, self._own))))


class InFront(Method):
    """Hands everything to `inner` that a subclass does not do itself.

    A subclass gives `inner` and `inside`. own_shares, own_memory: the kinds it lets out and what it keeps at sites, in
    addition to the method behind. own_steps: names of its steps; every other step is the method's behind.
    """

    shares: ClassVar[tuple[str, ...]] = _Both("shares", "own_shares")  # type: ignore[assignment]
    memory_names: ClassVar[tuple[str, ...]] = _Both("memory_names", "own_memory")  # type: ignore[assignment]
    own_shares: ClassVar[tuple[str, ...]] = ()
    own_memory: ClassVar[tuple[str, ...]] = ()
    own_steps: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        for step in cls.own_steps:
            if not callable(getattr(cls, step, None)):
                raise TypeError(f"{cls.__name__}.own_steps names '{step}', which is no method of the class")

    @model_validator(mode="after")
    def _trains_at_sites(self) -> Self:
        if self.inner.pooled or self.inner.supervised_target:
            raise ValueError(f"{self.inner.name} does not train at source sites; choose a federated method")
        return self

    @property
    @abstractmethod
    def inner(self) -> Method:
        """The method behind."""

    @abstractmethod
    def inside(self, site: Site) -> AbstractContextManager[None]:
        """What surrounds every step of the method behind at a site."""

    @property
    def needs_target(self) -> bool:  # type: ignore[override]
        """Whether a target without labels takes part in the method behind."""
        return self.inner.needs_target

    @property
    def one_target(self) -> bool:  # type: ignore[override]
        """Whether the method behind adapts to one target, no more."""
        return self.inner.one_target

    @property
    def uses_held_out(self) -> bool:  # type: ignore[override]
        """Whether sites look at their held-out parts in the method behind."""
        return self.inner.uses_held_out

    @property
    def tasks(self) -> tuple[Task, ...]:  # type: ignore[override]
        """What the method behind can learn."""
        return self.inner.tasks

    @property
    def relative_cost(self) -> float:  # type: ignore[override]
        """Seconds of a mini-batch beside plain cross-entropy."""
        return self.inner.relative_cost

    def mini_batches(self, batches_per_epoch: int, rounds: int) -> int:
        return self.inner.mini_batches(batches_per_epoch, rounds)

    def target_mini_batches(self, batches_per_epoch: int, rounds: int) -> int:
        return self.inner.target_mini_batches(batches_per_epoch, rounds)

    def traffic(self, plan: RunPlan) -> Traffic:
        return self.inner.traffic(plan)

    def check(self, network: Network) -> None:
        self.inner.check(network)

    def check_samples(self, input_shape: tuple[int, ...]) -> tuple[str, ...]:
        return self.inner.check_samples(input_shape)

    def check_steps(self, steps: Mapping[str, int]) -> tuple[str, ...]:
        return self.inner.check_steps(steps)

    def adapt_network(self, network: Network, sources: int) -> Network:
        return self.inner.adapt_network(network, sources)

    def evaluated_network(self, network: Network, sources: int) -> Network:
        return self.inner.evaluated_network(network, sources)

    def network_at(self, network: Network, site: str, sources: Sequence[str]) -> Network:
        return self.inner.network_at(network, site, sources)

    def predict(self, network: Network, inputs: Tensor) -> Tensor:
        return self.inner.predict(network, inputs)

    def step_owner(self, step: str) -> Method:
        return self if step in self.own_steps else self.inner.step_owner(step)

    def run_step(self, step: str, site: Site, content: Mapping[str, Any]) -> Reply:
        if self.step_owner(step) is self:
            return super().run_step(step, site, content)
        with self.inside(site):
            return self.inner.run_step(step, site, content)

    def start(self, federation: Federation, weights: Weights) -> State:
        return self.inner.start(federation, weights)

    def round(self, federation: Federation, state: State) -> State:
        return self.inner.round(federation, state)
