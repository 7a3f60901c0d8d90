"""A trained model from Python: load it, predict with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from fedshift.data.inference import load_for_prediction, samples_in_memory
from fedshift.experiment.predict import TrainedModel, load_model
from fedshift.experiment.runs.run_folder import write_model
from fedshift.models.unet import SegmentationOptions

Samples = Any
"""Samples to predict: an array, tensor, list or pandas data frame, or the path of an image, a folder of images, an .npz
or a .csv. A model of tables reads a data frame with the columns of its table, or a .csv."""


class Model:
    """A trained model with the preprocessing of its run.

    Attributes:
        classes_: the names of the classes, in the order of their probabilities.
        metadata: what the run wrote about the model: method, network, sources, target, versions.
    """

    def __init__(self, trained: TrainedModel) -> None:
        self.trained = trained
        self.classes_: npt.NDArray[np.str_] = np.array(trained.classes)
        self.metadata = trained.metadata

    @classmethod
    def load(cls, path: str | Path, method: str | None = None) -> Self:
        """Load the model of a run.

        Args:
            path: a run's folder or a ``model.safetensors``.
            method: ``file.py:Class``, if a method of your own trained the model. Its code is run.

        Raises:
            UserError: there is no model, it is damaged, or it was not written by fedshift.
        """
        return cls(load_model(Path(path), method))

    def save(self, path: str | Path) -> None:
        """Write the model as one ``.safetensors`` file, which `load` and ``fedshift predict`` read.

        Raises:
            UserError: the file cannot be written.
        """
        write_model(Path(path), self.trained.network.state_dict(), self.metadata)

    def predict(self, X: Samples) -> npt.NDArray[Any]:
        """The class of each sample (n,), by name; for segmentation masks (n, structures, height, width) of bool.

        Raises:
            UserError: the samples are not what the model reads.
        """
        if isinstance(self.trained.options, SegmentationOptions):
            return np.stack(list(self.trained.masks(self._stored(X))))
        names: npt.NDArray[Any] = self.classes_[self.predict_proba(X).argmax(axis=1)]
        return names

    def predict_proba(self, X: Samples) -> npt.NDArray[np.float32]:
        """The probability of each class (n, classes), in the order of ``classes_``.

        Raises:
            UserError: the samples are not what the model reads, or it is a model for segmentation.
        """
        return self.trained.probabilities(self._stored(X))

    def _stored(self, X: Samples) -> Any:
        stored = self.trained.stored
        if isinstance(X, str | Path):
            return load_for_prediction(Path(X), stored)[1]
        return samples_in_memory(X, stored)

    def __repr__(self) -> str:
        said = self.metadata
        target = said.get("unseen") or said.get("adapted_to")
        parts = [
            said["method"]["name"],
            f"sources {', '.join(said['sources'])}",
            *([f"target {target}"] if target else []),
            f"seed {said['seed']}",
            f"classes {', '.join(self.classes_)}",
        ]
        return f"Model({'; '.join(parts)})"
