"""All methods of the registry, each with options that keep its run short."""

from __future__ import annotations

from typing import Any

import pytest

from fedshift.methods import registry
from fedshift.methods.base import Method

SMALL: dict[str, dict[str, Any]] = {
    "metareg": {"meta_share": 0.75},
    "csac": {"acquisition_epochs": 2, "calibration_epochs": 1},
    "m3sda": {"generator_steps": 1},
    "fada": {"steps_per_round": 6},
    "fedsr": {"steps_per_round": 6},
    "fedl2r": {"steps_per_round": 6},
    "fedcmi": {"steps_per_round": 6},
    "copa": {"local_epochs": 2},
    "fedadg": {"task_epochs": 1, "adversarial_epochs": 1},
    "mdfnet": {"local_epochs": 2, "decay": False, "rho": 1},
}
"""Options that keep a method's run short; a method that is not named runs with its defaults."""
every_method = pytest.mark.parametrize("name", registry.names())


def method_of(name: str, **options: Any) -> Method:
    return registry.parse({"name": name, **SMALL.get(name, {}), **options})
