"""Base of the pooled methods of domain adaptation: the pool holds the target's samples, too, without labels."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from fedshift.federation.site import Batch, Site
from fedshift.methods.pooled.side_modules import DomainTraining

DomainBatches = tuple[tuple[Batch, ...], Batch]
"""A mini-batch of every source domain, and one of the target's without labels."""


class PooledAdaptation(DomainTraining):
    """Base of methods on a pool of all sources and of the target's samples without labels. A subclass writes `fit`."""

    traits = DomainTraining.traits.derive(
        target="unlabelled",
        unfit_plug_ins={
            **DomainTraining.traits.unfit_plug_ins,
            "augment": "which compares sources with the target: write training.augmentation, which changes both",
        },
    )

    def target_mini_batches(self, batches_per_epoch: int, rounds: int) -> int:
        return self.mini_batches(batches_per_epoch, rounds) if self.traits.needs_target else 0

    def with_target(self, site: Site, due: int) -> Iterator[DomainBatches]:
        """As `of_each`, for methods that always train on the target."""
        for sources, target in self.of_each(site, due):
            assert target is not None  # ensured by the protocol
            yield sources, target


def domain_classifier(features: int, width: int) -> nn.Sequential:
    """A classifier that maps features (n, d) to the logit of "source", (n, 1)."""
    return nn.Sequential(nn.Linear(features, width), nn.ReLU(), nn.Linear(width, 1))
