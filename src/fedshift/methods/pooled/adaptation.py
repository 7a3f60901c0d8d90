"""What the pooled baselines of domain adaptation share: the target's samples without labels lie in the pool, too."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from torch import nn

from fedshift.federation.site import Batch, Site
from fedshift.methods.pooled.training import PooledTraining

DomainBatches = tuple[tuple[Batch, ...], Batch]
"""A mini-batch of every source domain, and one of the target's without labels."""


class PooledAdaptation(PooledTraining):
    """A pool of all sources and of the target's samples without labels; subclasses write `fit`."""

    scenario: ClassVar[str] = "target without labels"
    needs_target: ClassVar[bool] = True

    def target_mini_batches(self, batches_per_epoch: int, rounds: int) -> int:
        return self.mini_batches(batches_per_epoch, rounds) if self.needs_target else 0

    def with_target(self, site: Site, due: int) -> Iterator[DomainBatches]:
        """Batches of every source and of the target, which is always there."""
        for sources, target in self.batches(site, due):
            assert target is not None  # the protocol sees to it
            yield sources, target


def domain_classifier(features: int, width: int) -> nn.Sequential:
    """Features (n, d) → the logit of "source", (n, 1)."""
    return nn.Sequential(nn.Linear(features, width), nn.ReLU(), nn.Linear(width, 1))
