"""A trained model from Python: load it, predict with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from fedshift.data.domain import DataSource
from fedshift.data.input_guard import InputShift
from fedshift.evaluation.estimate.combination import Estimate
from fedshift.evaluation.records import RunResult
from fedshift.evaluation.stored import RESULT, read_result, read_stored
from fedshift.experiment.estimate import estimate_at, left_out_sums
from fedshift.experiment.export import Exported, checked_repository, export, push
from fedshift.experiment.handing_out import check_adapted
from fedshift.experiment.labelling import ToLabel, samples_to_label
from fedshift.experiment.model_card import model_card
from fedshift.experiment.monitor import ALARMS, BASELINE, Month, monitor
from fedshift.experiment.predict import TrainedModel, how_written, load_model
from fedshift.experiment.runs.run_folder import model_file
from fedshift.extras import import_extra
from fedshift.files import write_bytes
from fedshift.onnx_model import write_left_out

if TYPE_CHECKING:
    import pandas

    from fedshift.methods.base import Method

Samples = Any
"""Samples to predict: an array, tensor, list or pandas data frame, or the path of an image, a folder of images, an .npz
or a table. A model of tables reads a data frame with the columns of its table, or a CSV, Excel or Parquet file."""
Written = Mapping[str, Any] | None
"""How a table is written, as fields of a data section such as ``{"decimal": ","}``; None: as those of the training."""

_CARD = "README.md"


class Model:
    """A trained model with the preprocessing of its run.

    Attributes:
        classes_: the names of the classes, in the order of their probabilities.
        metadata: what the run wrote about the model: method, network, sources, target, versions.
        result: the result of its run, if the model was loaded from the run's folder.
        folder: from which it was loaded; None if it was not.

    Example:
        >>> from fedshift import FederatedClassifier
        >>> X, y = np.repeat([[0.0], [0.1], [0.9], [1.0]], 10, axis=0), np.repeat(["low", "high"], 20)
        >>> model = FederatedClassifier(model="linear", rounds=5).fit(X, y).model_
        >>> model.predict([[0.05], [0.95]]).tolist()
        ['low', 'high']
    """

    def __init__(self, trained: TrainedModel, result: RunResult | None = None, folder: Path | None = None) -> None:
        self.trained = trained
        self.result = result
        self.folder = folder
        self.classes_: npt.NDArray[np.str_] = np.array(trained.classes)
        self.metadata = trained.metadata

    @classmethod
    def load(cls, path: str | Path, method: str | Method | None = None, network: Any = None) -> Self:
        """Load the model of a run.

        Args:
            path: a run's folder or a ``model.safetensors``.
            method: ``file.py:Class``, if a method of your own trained the model. Its code is run.
            network: ``file.py:Class``, or the class, function or module itself, if the model is of a network of your
                own. Its code is run; a module is copied, and its weights do not matter.

        Raises:
            UserError: there is no model, it is damaged, or it was not written by fedshift.
        """
        path = Path(path)
        finished = path.is_dir() and read_stored(path / RESULT) is not None
        folder = path if path.is_dir() else path.parent
        return cls(load_model(path, method, network), read_result(path / RESULT) if finished else None, folder)

    def save(self, path: str | Path) -> None:
        """Write the model as one ``.safetensors`` file, which `load` and ``fedshift predict`` read.

        Raises:
            UserError: the file cannot be written.
        """
        write_bytes(Path(path), model_file(self.trained.network.state_dict(), self.metadata))

    def export(self, to: str, folder: str | Path, accept_shift: bool = False, push_to: str | None = None) -> Exported:
        """Write the model for other programs, after a check that its outputs agree, and a model card beside it.

        Beside ``onnx`` there is also what `OnnxModel.estimate` needs, if runs beside the model's left other sites out.

        Args:
            to: ``onnx``, ``torchscript`` or ``safetensors``.
            folder: the folder to write to.
            accept_shift: whether to write also a model that was adapted to a site whose samples are too unlike.
            push_to: the repository on Hugging Face's hub, ``OWNER/NAME``, that gets both files; None: none.

        Raises:
            UserError: the format or the folder cannot be used, or a package is missing; or the model is not handed out,
                or the hub refuses it.
            FedshiftError: the outputs differ. Nothing is written.
        """
        repository = None if push_to is None else checked_repository(push_to)
        check_adapted(self.trained, self.folder, accept=accept_shift)
        card = self.card()
        written = export(self.trained, to, Path(folder))
        write_bytes(Path(folder) / _CARD, card.encode())
        if to == "onnx":
            write_left_out(written.file, left_out_sums(self.trained, self.folder))
        if repository is not None:
            written = replace(written, pushed=push(repository, Path(folder), [written.file.name, _CARD]))
        return written

    def card(self) -> str:
        """A model card in Hugging Face's format: data, sites, method, measures, limits, and what left the sites.

        Raises:
            UserError: huggingface_hub is not installed.
        """
        return model_card(self.trained, self.result)

    def predict(self, X: Samples, accept_shift: bool = False, written: Written = None) -> npt.NDArray[Any]:
        """The class of each sample (n,), by name; for segmentation masks (n, structures, height, width) of bool; for
        regression the value (n,) in the label's unit; for time to event the logarithm of the relative hazard (n,); for
        several labels 0 and 1 (n, labels).

        Samples that look unusual give a warning (see `shift`), and with ``accept_shift`` are predicted however unusual.

        Raises:
            UserError: the samples are not what the model reads, or look too unlike its training data.
        """
        if self.trained.segments:
            return np.stack(list(self.trained.masks(self._read_inputs(X, accept_shift, written))))
        return self.trained.objective.predictions(
            self.trained.scores(self._read_inputs(X, accept_shift, written)), self.classes_
        )

    def predict_proba(self, X: Samples, accept_shift: bool = False, written: Written = None) -> npt.NDArray[np.float32]:
        """The probability of each class (n, classes), or of each label, in the order of ``classes_``.

        Raises:
            UserError: the samples are not what the model reads or look too unlike its training data, or it is a model
                for segmentation or regression.
        """
        return self.trained.probabilities(self._read_inputs(X, accept_shift, written))

    def shift(self, X: Samples, written: Written = None) -> InputShift:
        """How samples differ from the training data: for each column the shares of unknown categories, of values
        outside the training range and of missing ones, and the overlap of the whole column.

        Raises:
            UserError: the samples are not what the model reads.
        """
        return self.trained.read(_samples(X), how_written(written)).shift

    def estimate(self, X: Samples, written: Written = None, source: DataSource | None = None) -> Estimate:
        """The accuracy to expect on samples without labels, in percent, with an interval of 90 %, or why there is none.

        It needs the runs beside that of the model, each of which left another site out: see `estimate_accuracy`.
        The samples of these sites are read where the run says they are, or from ``source``.

        Raises:
            UserError: the samples are not what the model reads, or it does not tell classes apart.
        """
        return estimate_at(self.trained, self.folder, _samples(X), how_written(written), source)

    def to_label(
        self, X: Samples, number: int = 50, seed: int = 0, strata: bool | None = None, written: Written = None
    ) -> ToLabel:
        """Samples to have labelled (``rows``).

        ``measure({row: label})`` of what it returns says what their labels tell of the accuracy and the AUROC on all
        samples, with intervals of 90 %, and how many more a narrower one takes.

        Args:
            X: samples of a site without labels.
            number: how many to label.
            seed: of the draw; a longer list holds a shorter one.
            strata: whether they are drawn by confidence; None: where that is expected to help.
            written: how a table is written.

        Raises:
            UserError: the samples are not what the model reads, or it does not tell classes apart.
        """
        asked = how_written(written)
        return samples_to_label(self.trained, _samples(X), number, seed, strata=strata, written=asked)

    def monitor(
        self,
        X: Samples,
        log: str | Path,
        month: str | None = None,
        alarms: float = ALARMS,
        baseline: int = BASELINE,
        written: Written = None,
    ) -> Month:
        """Compare a new month's samples with the training data and the first months, and add a line to the log, which
        holds sums alone. ``alarm`` says whether somebody should look.

        Raises:
            UserError: the samples are not what the model reads, or the log is of another model or has the month.
        """
        asked, where = how_written(written), Path(log)
        return monitor(
            self.trained, self.folder, _samples(X), where, month, alarms=alarms, baseline=baseline, written=asked
        )

    def predictions(self, X: Samples, accept_shift: bool = False, written: Written = None) -> pandas.DataFrame:
        """One row per sample: id, label if the samples say it, predicted class, and ``score_<class>`` for each class.

        Ids and labels come from the columns of a table that named and labelled the training rows. For files the name
        of an image or the row's number is the id, and the name of an image's folder or ``y`` of an ``.npz`` the label.

        Raises:
            UserError: pandas is not installed, or the samples are not what the model reads or look too unlike its
                training data.
        """
        frames = import_extra("pandas", extra="tables", what="predictions")
        check_adapted(self.trained, self.folder, accept=accept_shift)
        result = self.trained.predict(_samples(X), accept_shift=accept_shift, written=how_written(written))
        columns: dict[str, Any] = {"id": [item.name for item in result]}
        if any(item.label is not None for item in result):
            columns["label"] = [item.label for item in result]
        columns["predicted"] = [item.predicted for item in result]
        for number, name in enumerate(self.classes_):
            columns[f"score_{name}"] = [item.probabilities[number] for item in result]
        return frames.DataFrame(columns)

    def _read_inputs(self, X: Samples, accept_shift: bool, written: Written) -> Any:
        check_adapted(self.trained, self.folder, accept=accept_shift)
        samples = self.trained.read(_samples(X), how_written(written))
        samples.check(accept_shift)
        return samples.inputs

    def __repr__(self) -> str:
        text = self.metadata
        target = text.get("unseen") or text.get("adapted_to")
        parts = [
            text["method"]["name"],
            f"sources {', '.join(text['sources'])}",
            *([f"target {target}"] if target else []),
            f"seed {text['seed']}",
            f"classes {', '.join(self.classes_)}",
        ]
        return f"Model({'; '.join(parts)})"


def _samples(X: Samples) -> Samples:
    return Path(X) if isinstance(X, str) else X
