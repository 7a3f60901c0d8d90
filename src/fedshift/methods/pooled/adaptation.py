"""Base of the pooled methods of domain adaptation: their rounds, their batches, and modules besides the model.

The model that is evaluated is an ordinary network. Discriminators, second classifiers and the like stay in the pool's
memory, drawn from the experiment's seed. So a model file holds nothing that prediction does not use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import ClassVar, TypeVar

import torch
from torch import Tensor, nn

from fedshift.federation.federation import Federation
from fedshift.federation.messages import Update
from fedshift.federation.randomness import derive_seed
from fedshift.federation.site import Batch, Site
from fedshift.methods.base import State
from fedshift.methods.pooled.deepall import DeepAll
from fedshift.models.network import Network

B = TypeVar("B")
M = TypeVar("M", bound=nn.Module)
DomainBatches = tuple[tuple[Batch, ...], Batch]
"""A mini-batch of every source domain, and one of the target's without labels."""


class PooledAdaptation(DeepAll):
    """Base of methods on a pool of all sources and of the target's samples without labels. A subclass writes `fit`."""

    scenario: ClassVar[str] = "target without labels"
    memory_names: ClassVar[tuple[str, ...]] = ("optimizer", "parts")
    needs_target: ClassVar[bool] = True

    def target_mini_batches(self, batches_per_epoch: int, rounds: int) -> int:
        return self.mini_batches(batches_per_epoch, rounds) if self.needs_target else 0

    def round(self, federation: Federation, state: State) -> State:
        (pool,) = federation.sources
        due = federation.round * federation.share(pool) - federation.progress.used[pool]
        update = federation.ask(self.fit, to=federation.sources, weights=state.weights, steps=max(0, due)).only()
        return state.advance(update.weights, report={"losses": {pool: update.loss}})

    def batches(self, site: Site, due: int) -> Iterator[tuple[tuple[Batch, ...], Batch | None]]:
        """Mini-batches of all domains together, until ``due`` of them are used or none is left.

        An optimiser step uses one of every domain. A remainder of ``due`` that is too small for this is used in the
        next round; in the last round it makes a step, too.
        """
        domains = site.domains + (site.unlabelled is not None)
        last = due >= site.envelope.mini_batches_left
        return site.domain_batches(-(-due // domains) if last else due // domains)

    def with_target(self, site: Site, due: int) -> Iterator[DomainBatches]:
        """As `batches`, for methods that always train on the target."""
        for sources, target in self.batches(site, due):
            assert target is not None  # ensured by the protocol
            yield sources, target

    def progress(self, site: Site) -> float:
        """The share of the run's mini-batches that are done, with those of the current optimiser step."""
        begun, left = site.envelope.progress, site.envelope.mini_batches_left
        return begun + (1 - begun) * site.mini_batches / max(1, left)

    def parts(self, site: Site, build: Callable[[], M]) -> M:
        """The modules besides the model: drawn from the experiment's seed at first, later from the pool's memory."""
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(derive_seed(site.seed, site.name, "parts"))
            module = build()
        if "parts" in site.memory:
            module.load_state_dict(dict(site.memory.weights("parts")))
        return site.place(module)

    def trained(
        self,
        site: Site,
        batches: Iterable[B],
        loss_of: Callable[[B], Tensor],
        model: Network,
        parts: nn.Module | None = None,
    ) -> Update:
        """Train the model and the modules besides it together, and remember the latter."""
        modules = [model] if parts is None else [model, parts]
        loss = site.minimise_over(batches, loss_of, *modules, remember="optimizer")
        if parts is not None:
            site.memory["parts"] = site.weights_of(parts)
        return Update(site.weights_of(model), site.samples, loss)


def domain_classifier(features: int, width: int) -> nn.Sequential:
    """A classifier that maps features (n, d) to the logit of "source", (n, 1)."""
    return nn.Sequential(nn.Linear(features, width), nn.ReLU(), nn.Linear(width, 1))
