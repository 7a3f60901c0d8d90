"""FedAvg with calls that last until a test says so, so that it can kill something in the middle of one."""

from __future__ import annotations

import time
from pathlib import Path

from fedshift.federation.messages import Update
from fedshift.federation.site import Site
from fedshift.methods.federated.fedavg import FedAvg
from fedshift.weights import Weights


class Slow(FedAvg):
    """FedAvg that waits."""

    traits = FedAvg.traits.derive(name="slow_method:Slow")

    gates: str | None = None
    """A folder: a site trains in round 3 when it holds a file ``3`` or ``3-north``. None: at once.

    While it waits, there is a file ``3-north-waits``.
    """
    only_at: str | None = None
    """The site that waits; None: all."""

    def fit(self, site: Site, weights: Weights) -> Update:
        if self.gates is not None and self.only_at in (None, site.name):
            every = Path(self.gates) / str(site.envelope.round)
            notes, waits = (every.with_name(f"{every.name}-{site.name}{end}") for end in ("", "-waits"))
            waits.touch()
            while not (every.exists() or notes.exists()):
                time.sleep(0.02)
        return super().fit(site, weights)
