"""FedAvg with steps that take a while, so that a test can kill something in the middle of one."""

from __future__ import annotations

import time
from typing import ClassVar

from fedshift.federation.messages import Update
from fedshift.federation.site import Site
from fedshift.methods.federated.fedavg import FedAvg
from fedshift.weights import Weights


class Slow(FedAvg):
    """FedAvg that waits."""

    name: ClassVar[str] = "slow_method:Slow"

    seconds: float = 0.0
    only_at: str | None = None
    """The site that waits; None: all."""

    def fit(self, site: Site, weights: Weights) -> Update:
        time.sleep(self.seconds if self.only_at in (None, site.name) else 0.0)
        return super().fit(site, weights)
