"""Federated training as a scikit-learn classifier."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_consistent_length, check_is_fitted, validate_data

from fedshift.data.builders.arrays import Arrays
from fedshift.data.builders.in_memory import InMemory
from fedshift.experiment.config.experiment import parse
from fedshift.experiment.predict import from_weights
from fedshift.experiment.runs.every_site import train_everywhere
from fedshift.model import Model

ALL = "all"
"""The name of the only site if no sites are given."""


class FederatedClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """A network that is trained across sites, with scikit-learn's interface.

    ``fit(X, y, sites=…)`` takes the site of each sample. Every site trains on its own samples by the method, as in a
    simulation. Without ``sites`` all samples are at one site.

    To measure how the model does at a site that it was not trained on::

        cross_val_score(FederatedClassifier(), X, y, groups=hospital, cv=LeaveOneGroupOut(), params={"sites": hospital})

    With metadata routing enabled, call ``set_fit_request(sites=True)`` and give ``params={"groups": hospital, "sites":
    hospital}``.

    Args:
        method: the name of a method, or a mapping of its name and options as in an experiment file.
        model: the name of a network, or a mapping of its name and options.
        rounds: as ``training.rounds``.
        batch_size: as ``training.batch_size``.
        lr: as ``training.lr``.
        training: further fields of ``training``.
        standardise: scale every column by mean and deviation, computed from sums of all sites.
        random_state: the seed, or a random state that draws it.
        device: where sites train, such as ``cpu``, ``cuda`` or ``auto``.

    Attributes:
        classes_: the classes.
        sites_: the sites that trained.
        model_: the trained model, a `fedshift.Model`. Its classes are ``classes_`` as text.
        bytes_up_: bytes that left the sites, by kind.
        n_iter_: the rounds that were done.
    """

    def __init__(
        self,
        method: str | Mapping[str, Any] = "fedavg",
        model: str | Mapping[str, Any] = "mlp",
        *,
        rounds: int = 40,
        batch_size: int = 32,
        lr: float = 0.1,
        training: Mapping[str, Any] | None = None,
        standardise: bool = True,
        random_state: int | np.random.RandomState | None = 0,
        device: str = "cpu",
    ) -> None:
        self.method = method
        self.model = model
        self.rounds = rounds
        self.batch_size = batch_size
        self.lr = lr
        self.training = training
        self.standardise = standardise
        self.random_state = random_state
        self.device = device

    def fit(self, X: Any, y: Any, sites: Any = None) -> Self:
        """Train on samples at sites.

        Args:
            X: features (n, d).
            y: classes (n,).
            sites: the site of each sample (n,); None: all at one site.

        Raises:
            ValueError: the samples, classes or sites are not what scikit-learn's classifiers take.
            UserError: an option, the method or the network does not fit.
            TrainingDiverged: weights or losses are no longer finite.
        """
        X, y = validate_data(self, X, y)
        check_classification_targets(y)
        places = np.full(len(y), ALL) if sites is None else np.asarray(sites).astype(str)
        check_consistent_length(X, places)
        self.classes_, numbers = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError("y holds one class only: a classifier needs samples of at least two classes")
        self.sites_ = np.unique(places)
        source = self._source(X, numbers, places)
        experiment = parse(
            {
                "name": "estimator",
                "data": source,
                "protocol": {"seeds": [int(check_random_state(self.random_state).randint(2**31))], "test_fraction": 0},
                "model": self.model,
                "training": {
                    "rounds": self.rounds,
                    "batch_size": self.batch_size,
                    "lr": self.lr,
                    **(self.training or {}),
                },
                "methods": [self.method],
                "device": self.device,
            }
        )
        trained = train_everywhere(experiment, source.build())
        for warning in trained.warnings:
            warnings.warn(warning, stacklevel=2)
        self.model_ = Model(from_weights(trained.weights, trained.metadata, experiment.methods[0], experiment.model))
        self.bytes_up_ = trained.bytes_up
        self.n_iter_ = trained.rounds
        return self

    def predict_proba(self, X: Any) -> npt.NDArray[np.float32]:
        """The probability of each class (n, classes), in the order of ``classes_``."""
        check_is_fitted(self)
        return self.model_.predict_proba(validate_data(self, X, reset=False))

    def predict(self, X: Any) -> npt.NDArray[Any]:
        """The class of each sample (n,)."""
        chosen = self.predict_proba(X).argmax(axis=1)
        found: npt.NDArray[Any] = self.classes_[chosen]
        return found

    def _source(self, X: npt.NDArray[Any], numbers: npt.NDArray[Any], places: npt.NDArray[Any]) -> Arrays:
        """The samples by site, as in an experiment on samples in memory."""
        names = tuple(str(name) for name in self.classes_)
        held = {str(site): InMemory(X[places == site], numbers[places == site]) for site in self.sites_}
        return Arrays(sites=held, classes=names, standardise=self.standardise)
