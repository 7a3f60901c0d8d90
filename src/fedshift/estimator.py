"""Federated training as scikit-learn estimators: of classes, of a quantity, of the time to an event."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_consistent_length, check_is_fitted, validate_data

from fedshift.data.builders.arrays import Arrays
from fedshift.data.builders.in_memory import InMemory, as_list
from fedshift.data.identifiers import names_single_rows
from fedshift.data.table_files import is_number
from fedshift.evaluation.measuring import concordance
from fedshift.experiment.config.experiment import parse
from fedshift.experiment.predict import from_weights
from fedshift.experiment.runs.every_site import train_everywhere
from fedshift.model import Model
from fedshift.trust import own_words

ALL = "all"
"""The name of the only site if no sites are given."""


@dataclass(eq=False, repr=False)
class _Federated(BaseEstimator):  # type: ignore[misc]
    """What the estimators share: their options, and training."""

    method: str | Mapping[str, Any] = "fedavg"
    model: str | Mapping[str, Any] = "mlp"
    _: KW_ONLY
    rounds: int = 40
    batch_size: int = 32
    lr: float = 0.1
    training: Mapping[str, Any] | None = None
    standardise: bool = True
    random_state: int | np.random.RandomState | None = 0
    device: str = "cpu"

    def _train(self, X: npt.NDArray[Any], labels: npt.NDArray[Any], sites: Any, names: tuple[str, ...]) -> None:
        """Train on checked samples.

        Args:
            X: features (n, d).
            labels: class numbers or quantities (n,), or times and events (n, 2).
            sites: the site of each sample (n,); None: all at one site.
            names: the classes, or the name of what is predicted.
        """
        places = np.full(len(X), ALL) if sites is None else np.asarray(sites).astype(str)
        check_consistent_length(X, places)
        X = X.astype(np.float32) if X.dtype.kind in "iu" else X  # integers would be tokens
        self.sites_ = np.unique(places)
        held = {str(site): InMemory(X[places == site], labels[places == site]) for site in self.sites_}
        source = Arrays(sites=held, classes=names, standardise=self.standardise, **self._task())
        options = {
            "name": "estimator",
            "data": source,
            "protocol": {"seeds": [int(check_random_state(self.random_state).randint(2**31))], "test_fraction": 0},
            "model": self.model,
            "training": {"rounds": self.rounds, "batch_size": self.batch_size, "lr": self.lr, **(self.training or {})},
            "methods": [self.method],
            "device": self.device,
        }
        with own_words():
            experiment = parse(options)
        trained = train_everywhere(experiment, source.build())
        for warning in trained.warnings:
            warnings.warn(warning, stacklevel=2)
        self.model_ = Model(from_weights(trained.weights, trained.metadata, experiment.methods[0], experiment.model))
        self.bytes_up_ = trained.bytes_up
        self.n_iter_ = trained.rounds

    def _task(self) -> dict[str, Any]:
        """The fields of the data that say what is learned."""
        return {}


class FederatedClassifier(ClassifierMixin, _Federated):  # type: ignore[misc]
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
        _check_no_text(X)
        X, y = validate_data(self, X, y)
        check_classification_targets(y)
        if names_single_rows(Counter(map(str, y.tolist()))):
            raise ValueError(
                f"y has {len(np.unique(y))} different values in {len(y)} samples: it names samples and does not class "
                "them, and its values would be written into the model: give classes"
            )
        self.classes_, numbers = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError("y holds one class only: a classifier needs samples of at least two classes")
        names = tuple(str(name) for name in self.classes_)
        self._train(X, numbers.astype(np.int64), sites, names)
        return self

    def predict_proba(self, X: Any) -> npt.NDArray[np.float32]:
        """The probability of each class (n, classes), in the order of ``classes_``."""
        check_is_fitted(self)
        return self.model_.predict_proba(_new_samples(self, X), accept_shift=True)

    def predict(self, X: Any) -> npt.NDArray[Any]:
        """The class of each sample (n,)."""
        chosen = self.predict_proba(X).argmax(axis=1)
        result: npt.NDArray[Any] = self.classes_[chosen]
        return result


@dataclass(eq=False, repr=False, kw_only=True)
class FederatedRegressor(RegressorMixin, _Federated):  # type: ignore[misc]
    """A network that predicts a quantity, trained across sites, with scikit-learn's interface.

    It is used as `FederatedClassifier` is. The quantity is standardised by its mean and deviation over the sites, and
    predictions come back in its own unit.

    Args:
        method: the name of a method for regression, or a mapping of its name and options.
        model: the name of a network, or a mapping of its name and options.
        loss: ``squared``, ``absolute`` or ``huber``.
        rounds: as ``training.rounds``.
        batch_size: as ``training.batch_size``.
        lr: as ``training.lr``.
        training: further fields of ``training``.
        standardise: scale every column by mean and deviation, computed from sums of all sites.
        random_state: the seed, or a random state that draws it.
        device: where sites train, such as ``cpu``, ``cuda`` or ``auto``.

    Attributes:
        sites_: the sites that trained.
        model_: the trained model, a `fedshift.Model`.
        bytes_up_: bytes that left the sites, by kind.
        n_iter_: the rounds that were done.
    """

    loss: str = "squared"

    def fit(self, X: Any, y: Any, sites: Any = None) -> Self:
        """Train on samples at sites.

        Args:
            X: features (n, d).
            y: quantities (n,).
            sites: the site of each sample (n,); None: all at one site.

        Raises:
            ValueError: the samples, quantities or sites are not what scikit-learn's regressors take.
            UserError: an option, the method or the network does not fit.
            TrainingDiverged: weights or losses are no longer finite.
        """
        _check_no_text(X)
        _check_numbers("y", y)
        X, y = validate_data(self, X, y, y_numeric=True)
        self._train(X, y.astype(np.float32), sites, ("y",))
        return self

    def predict(self, X: Any) -> npt.NDArray[Any]:
        """The quantity of each sample (n,)."""
        check_is_fitted(self)
        return self.model_.predict(_new_samples(self, X), accept_shift=True)

    def _task(self) -> dict[str, Any]:
        return {"task": "regression", "loss": self.loss}


@dataclass(eq=False, repr=False, kw_only=True)
class FederatedSurvival(_Federated):
    """A network that says who has an event sooner, trained across sites, with scikit-survival's interface.

    ``y`` is a structured array with two fields: whether the event was seen (boolean), then the time until the event or
    until the sample was seen last. `sksurv.util.Surv` makes such arrays; scikit-survival itself is not needed::

        y = np.array([(True, 3.5), (False, 7.0)], dtype=[("event", bool), ("time", float)])

    It is used as `FederatedClassifier` is. Sites train by Cox's partial likelihood, so a mini-batch should be large.

    Args:
        method: the name of a method for time_to_event, or a mapping of its name and options.
        model: the name of a network, or a mapping of its name and options.
        rounds: as ``training.rounds``.
        batch_size: as ``training.batch_size``; a sample is compared with those of its own mini-batch.
        lr: as ``training.lr``.
        training: further fields of ``training``.
        standardise: scale every column by mean and deviation, computed from sums of all sites.
        random_state: the seed, or a random state that draws it.
        device: where sites train, such as ``cpu``, ``cuda`` or ``auto``.

    Attributes:
        sites_: the sites that trained.
        model_: the trained model, a `fedshift.Model`.
        bytes_up_: bytes that left the sites, by kind.
        n_iter_: the rounds that were done.
    """

    batch_size: int = 256

    def fit(self, X: Any, y: Any, sites: Any = None) -> Self:
        """Train on samples at sites.

        Args:
            X: features (n, d).
            y: events and times, structured (n,).
            sites: the site of each sample (n,); None: all at one site.

        Raises:
            ValueError: the samples, events, times or sites are not what scikit-survival's estimators take.
            UserError: an option, the method or the network does not fit.
            TrainingDiverged: weights or losses are no longer finite.
        """
        _check_no_text(X)
        X = validate_data(self, X)
        labels = _times_and_events(y)
        check_consistent_length(X, labels)
        if not labels[:, 1].any():
            raise ValueError("y holds no event: who has one sooner cannot be learned from such samples")
        self._train(X, labels.astype(np.float32), sites, ("event",))
        return self

    def predict(self, X: Any) -> npt.NDArray[Any]:
        """The risk of each sample (n,), larger where the event is said to be sooner: the log of a relative hazard."""
        check_is_fitted(self)
        return self.model_.predict(_new_samples(self, X), accept_shift=True)

    def score(self, X: Any, y: Any) -> float:
        """Harrell's concordance of the predictions, from 0 to 1; 0.5 is chance.

        Raises:
            ValueError: no two samples can be compared.
        """
        result = concordance(self.predict(X), _times_and_events(y))
        if result is None:
            raise ValueError("y: no two samples can be compared, since no event was seen before another time")
        return result / 100

    def _task(self) -> dict[str, Any]:
        return {"task": "time_to_event"}


def _new_samples(estimator: Any, X: Any) -> npt.NDArray[Any]:
    """Samples to predict, checked as those of training."""
    _check_no_text(X)
    new_samples: npt.NDArray[Any] = validate_data(estimator, X, reset=False)
    return new_samples


def _check_numbers(name: str, values: Any) -> None:
    """Raise ValueError for an array or a list of text, naming no value of it."""
    if _is_text(values):
        raise ValueError(
            f"{name} holds text, and the estimator takes numbers: convert it, with numpy.asarray({name}, dtype=float) "
            "where it is numbers that are written as text"
        )


def _is_text(values: Any) -> bool:
    """Whether values are an array or a list of text. Columns of a data frame have types of their own."""
    try:
        return isinstance(values, np.ndarray | list | tuple) and np.asarray(values).dtype.kind in "US"
    except ValueError:  # rows of different lengths, of which scikit-learn speaks
        return False


def _check_no_text(X: Any) -> None:
    """Raise ValueError for a column of text, naming no value of it; numpy's own message would show one."""
    columns: dict[str, Any] = {}
    if hasattr(X, "columns"):
        columns = {f"column '{name}'": X[name] for name in X.columns}
    elif isinstance(X, np.ndarray) and X.ndim == 2 and X.dtype.kind in "OU":
        columns = {f"column {index}": column for index, column in enumerate(X.T)}
    for name, column in columns.items():
        values = as_list(column) if np.asarray(column).dtype.kind in "OUST" else []
        words = [value for value in values if isinstance(value, str | bytes) and not is_number(str(value))]
        if words:
            raise ValueError(
                f"X: {name} holds text, {len(set(words))} different values in {len(values)} rows, and the estimator "
                "takes numbers: drop it if it names rows, else encode it, with sklearn's OneHotEncoder for example"
            )
    _check_numbers("X", X)


def _times_and_events(y: Any) -> npt.NDArray[np.float64]:
    """Times, and events as 0 or 1, (n, 2), of scikit-survival's structured array.

    Raises:
        ValueError: it is none.
    """
    given = np.asarray(y)
    fields = given.dtype.names or ()
    if given.ndim != 1 or len(fields) != 2 or given[fields[0]].dtype.kind != "b":
        raise ValueError(
            "y must be a structured array with two fields, whether the event was seen (bool) and the time, as "
            "sksurv.util.Surv.from_arrays makes it"
        )
    events, times = given[fields[0]], given[fields[1]].astype(np.float64)
    if not (np.isfinite(times) & (times >= 0)).all():
        raise ValueError("y: times must be finite and 0 or more")
    return np.stack([times, events.astype(np.float64)], axis=1)
