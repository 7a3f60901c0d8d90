"""The base of a method that wraps another one. It delegates whatever a subclass does not override."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Self

from pydantic import model_validator

from fedshift.federation.federation import Federation
from fedshift.federation.messages import Content, Reply
from fedshift.federation.replies import About, Bounds
from fedshift.federation.site import Site
from fedshift.methods.base import Method, RunPlan, Samples, State, Traffic, calls_of, in_order
from fedshift.methods.composition.averaging import Averaging
from fedshift.methods.composition.new_site import NewSite
from fedshift.methods.composition.options import Composed
from fedshift.methods.composition.plug_in import LocalOption
from fedshift.methods.traits import Traits
from fedshift.models.network import Network
from fedshift.weights import Weights

_BESIDE = (
    "robust",
    "server",
    "local",
    "training",
    "exchanges_per_epoch",
    "batch_norm_at_new_site",
    "classifier_at_new_site",
    "average",
)
"""Options of every method that a wrapper has for the method behind it."""


class Wrapper(Method):
    """Wraps a method: delegates to `inner` whatever a subclass does not override.

    A subclass gives `inner` and `inside`, which prepares a site for the inner method. It may have functions that sites
    run of its own.

    Attributes:
        own_memory: what it keeps at sites beside what the inner method keeps.
    """

    own_memory: ClassVar[tuple[str, ...]] = ()

    @model_validator(mode="after")
    def _trains_at_sites(self) -> Self:
        if self.inner.traits.pooled or self.inner.traits.target == "labelled":
            raise ValueError(f"{self.inner.name} does not train at source sites; choose a federated method")
        for name in _BESIDE:
            if getattr(self.inner, name) != Composed.model_fields[name].default:
                raise ValueError(f"{name}: write it beside {self.name}, not in the method behind it")
        if (self.average is not None or self.average_rounds > 1) and self.inner.average_rounds > 1:
            raise ValueError(f"average_rounds is set here and for {self.inner.name}; set it once")
        return self

    @property
    @abstractmethod
    def inner(self) -> Method:
        """The method that is wrapped."""

    @abstractmethod
    def inside(self, site: Site) -> AbstractContextManager[None]:
        """What surrounds everything that the inner method runs at a site."""

    @property
    def averaging(self) -> Averaging:
        """As set for the wrapper, or else the inner method's."""
        own = self.average is not None or self.average_rounds > 1
        return super().averaging if own else self.inner.averaging

    def new_site_for(self, input_shape: tuple[int, ...]) -> NewSite:
        """As set for the wrapper, or else the inner method's."""
        own = super().new_site_for(input_shape)
        return self.inner.new_site_for(input_shape) if own == NewSite() else own

    def adjust_traits(self, traits: Traits) -> Traits:
        """The inner method's traits under its own name, and what it keeps at sites beside."""
        inner = self.inner.traits
        memory = tuple(dict.fromkeys((*inner.memory_names, *self.own_memory)))
        return inner.derive(
            name=traits.name,
            settings=traits.settings,
            needs_classes=inner.needs_classes,
            memory_names=memory,
            includes=(),  # `local_for` has the inner method's plug-ins
        )

    @property
    def shares(self) -> tuple[str, ...]:
        """What the inner method shares, and what the wrapper's own functions return."""
        return in_order({*self.inner.shares, *super().shares})

    def local_for(self, input_shape: tuple[int, ...]) -> tuple[LocalOption, ...]:
        return (*self.inner.local_for(input_shape), *self.local)

    def mini_batches(self, batches_per_epoch: int, rounds: int) -> int:
        return self.inner.mini_batches(batches_per_epoch, rounds)

    def target_mini_batches(self, batches_per_epoch: int, rounds: int) -> int:
        return self.inner.target_mini_batches(batches_per_epoch, rounds)

    def traffic(self, plan: RunPlan) -> Traffic:
        return self.inner.traffic(plan)

    def check(self, network: Network) -> None:
        self.inner.check(network)

    def check_samples(self, samples: Samples) -> tuple[str, ...]:
        return self.inner.check_samples(samples)

    def bounds(self, call: str, about: About) -> Bounds:
        return self.inner.bounds(call, about)

    def adapt_network(self, network: Network, sources: int) -> Network:
        return self.inner.adapt_network(network, sources)

    def evaluated_network(self, network: Network, sources: int) -> Network:
        return self.inner.evaluated_network(network, sources)

    @property
    def keeps_own_weights(self) -> bool:
        return self.inner.keeps_own_weights

    def own_weights(self, weights: Weights, memory: Mapping[str, Content]) -> Weights:
        return self.inner.own_weights(weights, memory)

    def personalise(self, federation: Federation, weights: Weights) -> None:
        self.inner.personalise(federation, weights)

    def personal(self, weights: Weights) -> Collection[str]:
        return self.inner.personal(weights)

    def call_owner(self, call: str) -> Method:
        return self if call in calls_of(type(self)) else self.inner.call_owner(call)

    def run_call(self, call: str, site: Site, content: Mapping[str, Any]) -> Reply:
        if self.call_owner(call) is self:
            return super().run_call(call, site, content)
        with self.inside(site):
            return self.inner.run_call(call, site, content)

    def start(self, federation: Federation, weights: Weights) -> State:
        return self.inner.start(federation, weights)

    def round(self, federation: Federation, state: State) -> State:
        return self.inner.round(federation, state)
