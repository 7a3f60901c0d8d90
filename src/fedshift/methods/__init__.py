"""The methods: one file each, read like its paper. `registry` finds them by name.

All that the author of a method imports comes from here: ``from fedshift.methods import Method, State, Update``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedshift.errors import UserError
    from fedshift.federation.exchange import Replies
    from fedshift.federation.federation import Federation
    from fedshift.federation.messages import (
        Content,
        Features,
        PerSite,
        RawData,
        Reply,
        Spectra,
        Statistics,
        Styles,
        Update,
    )
    from fedshift.federation.site import Batch, Site
    from fedshift.functional.averaging import MeanAccumulator, weighted_average
    from fedshift.functional.losses import task_loss
    from fedshift.methods.base import Method, RunPlan, Samples, State, Traffic, trained_mean
    from fedshift.methods.federated.fedavg import FedAvg, LocalTraining
    from fedshift.methods.robust import Averaged
    from fedshift.methods.settings import Settings
    from fedshift.models.network import Network
    from fedshift.weights import Weights

__all__ = [
    "Averaged",
    "Batch",
    "Content",
    "Features",
    "FedAvg",
    "Federation",
    "LocalTraining",
    "MeanAccumulator",
    "Method",
    "Network",
    "PerSite",
    "RawData",
    "Replies",
    "Reply",
    "RunPlan",
    "Samples",
    "Settings",
    "Site",
    "Spectra",
    "State",
    "Statistics",
    "Styles",
    "Traffic",
    "Update",
    "UserError",
    "Weights",
    "task_loss",
    "trained_mean",
    "weighted_average",
]

_PLACES = {
    "errors": ("UserError",),
    "federation.exchange": ("Replies",),
    "federation.federation": ("Federation",),
    "federation.messages": (
        "Content",
        "Features",
        "PerSite",
        "RawData",
        "Reply",
        "Spectra",
        "Statistics",
        "Styles",
        "Update",
    ),
    "federation.site": ("Batch", "Site"),
    "functional.averaging": ("MeanAccumulator", "weighted_average"),
    "functional.losses": ("task_loss",),
    "methods.base": ("Method", "RunPlan", "Samples", "State", "Traffic", "trained_mean"),
    "methods.federated.fedavg": ("FedAvg", "LocalTraining"),
    "methods.robust": ("Averaged",),
    "methods.settings": ("Settings",),
    "models.network": ("Network",),
    "weights": ("Weights",),
}


def __getattr__(name: str) -> Any:
    # On demand: these import torch, which takes seconds, and they import modules of this package themselves.
    for module, names in _PLACES.items():
        if name in names:
            return getattr(importlib.import_module(f"fedshift.{module}"), name)
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
