"""fedshift: one model across sites whose data cannot be pooled and do not look alike.

>>> import fedshift
>>> results = fedshift.run({"data": {"name": "rotated_digits"}, ...})   # doctest: +SKIP
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedshift.api import check, load, results, run
    from fedshift.data.builders.own import OwnData
    from fedshift.estimator import FederatedClassifier, FederatedRegressor, FederatedSurvival
    from fedshift.experiment.config.experiment import Experiment
    from fedshift.experiment.method_contract import check_method
    from fedshift.experiment.runs.context import Callback
    from fedshift.methods.base import Method
    from fedshift.model import Model

    __version__: str
__all__ = [
    "Callback",
    "Experiment",
    "FederatedClassifier",
    "FederatedRegressor",
    "FederatedSurvival",
    "Method",
    "Model",
    "OwnData",
    "check",
    "check_method",
    "load",
    "results",
    "run",
]

_MODULES = {
    "run": "fedshift.api",
    "load": "fedshift.api",
    "check": "fedshift.api",
    "check_method": "fedshift.experiment.method_contract",
    "results": "fedshift.api",
    "Callback": "fedshift.experiment.runs.context",
    "FederatedClassifier": "fedshift.estimator",
    "FederatedRegressor": "fedshift.estimator",
    "FederatedSurvival": "fedshift.estimator",
    "Experiment": "fedshift.experiment.config.experiment",
    "Method": "fedshift.methods.base",
    "OwnData": "fedshift.data.builders.own",
    "Model": "fedshift.model",
}


def __getattr__(name: str) -> Any:
    # Imported on first use: torch takes seconds to import, and --version and --help do not need it.
    if name == "__version__":
        from fedshift.version import installed_version

        return installed_version()
    if name not in _MODULES:
        raise AttributeError(f"module 'fedshift' has no attribute '{name}'")
    import importlib

    if name.startswith("Federated"):  # scikit-learn's estimators
        from fedshift.extras import reports_installed

        reports_installed(name)
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
