"""A model that ``fedshift export --to onnx`` wrote, run by ONNX Runtime. Nothing here imports torch.

It compares samples with the training data as `fedshift.Model` does, and estimates its accuracy on samples without
labels from sums of the sites that were left out, which lie beside it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict

from fedshift.data.domain import Preprocessing
from fedshift.data.input_guard import ImageStatistics, InputShift, feature_shift, image_shift, table_shift
from fedshift.data.table_files import Columns, from_columns
from fedshift.data.tables import encode_rows, encoding_of, rows_of
from fedshift.errors import FedshiftError, UserError
from fedshift.evaluation.estimate.combination import NOT_LOOKED_AT, Estimate, KnownSite, estimate_from_sums
from fedshift.evaluation.estimate.doubtful_rows import share_of_copies
from fedshift.evaluation.estimate.plain_sums import GivenSite, known_sites
from fedshift.extras import import_extra
from fedshift.files import write_bytes

MODEL, LEFT_OUT = "model.onnx", "left_out.json"
_BATCH = 500
_CALLED = 0.5
"""The probability above which a sample has one of several labels."""


class TooUnlike(UserError):
    """Samples look too unlike those that a model was trained on."""


def write_left_out(model: Path, sums: dict[str, Any] | None) -> None:
    """Write what an estimate needs beside a model, or remove what another model left there.

    Args:
        sums: see `fedshift.experiment.estimate.left_out_sums`.
    """
    file = model.with_name(LEFT_OUT)
    if sums is None:
        file.unlink(missing_ok=True)
        return
    write_bytes(file, json.dumps({"model": _digest(model.read_bytes()), **sums}).encode())


@dataclass(frozen=True)
class OnnxModel:
    """An exported model, ready to predict.

    Example:
        >>> OnnxModel.load("no-folder")
        Traceback (most recent call last):
        fedshift.errors.UserError: no-folder/model.onnx: there is no such file: fedshift export RUN --to onnx writes it
    """

    session: Any  # of ONNX Runtime
    metadata: dict[str, Any]  # what the run wrote about the model
    classes: tuple[str, ...]  # their names, in the order of the outputs
    preprocessing: Preprocessing  # of the samples that it reads: with a frozen backbone that of its images
    task: str  # what it predicts
    images: ImageStatistics | None  # what is known of its training images
    left_out: dict[str, KnownSite]  # sums of the sites that were left out; none are known if it is empty
    threshold: float  # of two classes, the score from which the second one is called

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Load a model.

        Args:
            path: the folder of an export, or its ``model.onnx``.

        Raises:
            UserError: there is none, it is damaged, of segmentation or of text, or ONNX Runtime is missing.
        """
        file = Path(path) if Path(path).suffix == ".onnx" else Path(path) / MODEL
        if not file.is_file():
            raise UserError(f"{file}: there is no such file: fedshift export RUN --to onnx writes it")
        runtime = import_extra("onnxruntime", extra="export", what="a model in ONNX")
        data = file.read_bytes()
        try:
            session = runtime.InferenceSession(data, providers=["CPUExecutionProvider"])
            metadata = {name: json.loads(value) for name, value in _notes(session).items()}
            network = Preprocessing.model_validate(metadata["preprocessing"])
            stored = network if network.backbone is None else Preprocessing.model_validate(network.backbone["images"])
            task = "classification" if network.objective is None else str(network.objective["task"])
            images = metadata.get("training_images")
            known = None if images is None else ImageStatistics.model_validate(images)
            classes = tuple(map(str, metadata["classes"]))
        except Exception as error:  # ONNX Runtime's errors have no common class
            raise UserError(
                f"{file} is no model of fedshift export, or is damaged ({type(error).__name__}): export it again"
            ) from None
        if metadata.get("masks") or len(session.get_outputs()[0].shape) != 2 or stored.text is not None:
            raise UserError(f"{file}: models of masks or of texts are not served: use fedshift predict")
        left_out, threshold = _left_out(file, data, len(classes))
        return cls(session, metadata, classes, stored, task, known, left_out, threshold)

    def predict(self, rows: Sequence[Any], accept_shift: bool = False) -> dict[str, Any]:
        """What the model says of samples.

        Args:
            rows: for a model of tables objects of column → value, else arrays as they are stored: (d,) numbers,
                (length,) tokens, or images (c, h, w) of 0 to 255.
            accept_shift: whether to predict also samples that look nothing like the training data.

        Returns:
            ``predictions``, one per row: ``id``, ``predicted`` (a class, names of labels, or a value), and
            ``probabilities`` by class, if it has any; and ``warning``: what is unusual about the rows, or None.

        Raises:
            UserError: the rows are not what the model reads.
            TooUnlike: they look too unlike its training data.
        """
        names, inputs, shift = self._read(rows)
        if shift.refusal is not None and not accept_shift:
            raise TooUnlike(f"{shift.refusal}. Mend the data, or predict all the same: accept_shift")
        answers = [self._answer(scores) for scores in self._scores(inputs)]
        predictions = [{"id": name, **item} for name, item in zip(names, answers, strict=True)]
        return {"predictions": predictions, "warning": shift.warning}

    def estimate(self, rows: Sequence[Any]) -> Estimate:
        """The accuracy to expect on samples without labels of a new site, in percent, or why there is no estimate.

        It rests on scores alone: `fedshift.Model.estimate`, which has the runs' data, is surer.

        Args:
            rows: as for `predict`.

        Raises:
            UserError: the rows are not what the model reads, or it does not tell classes apart.
        """
        if self.task != "classification":
            raise UserError(f"estimate is for models that tell classes apart, and this one is for {self.task}")
        _, inputs, shift = self._read(rows)
        outputs = estimate_from_sums(
            self.left_out,
            self._scores(inputs),
            shift.refusal,
            shift.warning,
            self.threshold,
            shift.doubt,
            copied=share_of_copies(inputs),
        )
        return replace(outputs, reasons=(*outputs.reasons, NOT_LOOKED_AT)) if self.left_out else outputs

    def _read(self, rows: Sequence[Any]) -> tuple[list[str], npt.NDArray[Any], InputShift]:
        """Names of samples, the samples as they are stored, and how they differ from the training data."""
        if self.preprocessing.kind == "table":
            table = _table(rows, self.preprocessing)
            names, inputs = encode_rows(self.preprocessing, table)
            return names, inputs, table_shift(table, encoding_of(self.preprocessing))
        samples = _array(rows, self.preprocessing, tuple(self.metadata["input_shape"]))
        names = [str(number) for number in range(len(samples))]
        if self.preprocessing.kind == "image":
            return names, samples, image_shift(samples, self.images)
        return names, samples, feature_shift(samples, self.preprocessing)

    def _scores(self, inputs: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
        """The outputs of samples as they are stored (n, outputs)."""
        samples = inputs if inputs.dtype == np.int64 else inputs.astype(np.float32)
        parts = [samples[begin : begin + _BATCH] for begin in range(0, len(samples), _BATCH)]
        try:
            result = [self.session.run(None, {"samples": part})[0] for part in parts]
        except Exception as error:
            raise UserError(f"rows: ONNX Runtime cannot run the model on them ({type(error).__name__})") from None
        return np.concatenate(result).astype(np.float64)

    def _answer(self, scores: npt.NDArray[np.float64]) -> dict[str, Any]:
        if self.task in ("regression", "time_to_event"):
            return {"predicted": float(scores[0])}
        shares = dict(zip(self.classes, scores.tolist(), strict=True))
        if self.task == "multi_label":
            text = ", ".join(name for name, share in shares.items() if share > _CALLED)
        else:
            text = self.classes[int(scores.argmax())]
        return {"predicted": text, "probabilities": shares}


def _notes(session: Any) -> dict[str, str]:
    notes: dict[str, str] = session.get_modelmeta().custom_metadata_map
    return notes


class _LeftOut(BaseModel):
    """What lies beside an exported model: what is known of the sites that the runs left out."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)
    sites: dict[str, GivenSite]
    threshold: float
    model: str


def _left_out(file: Path, data: bytes, classes: int) -> tuple[dict[str, KnownSite], float]:
    beside = file.with_name(LEFT_OUT)
    if not beside.is_file():
        return {}, 0.5
    try:
        told = _LeftOut.model_validate_json(beside.read_bytes())
        known, threshold, digest = known_sites(told.sites, classes), told.threshold, told.model
    except (ValueError, FedshiftError):
        raise UserError(f"{beside} is damaged: export the model again") from None
    if digest != _digest(data):
        raise UserError(f"{beside} is of another model: export this one again, or remove the file")
    return known, threshold


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _table(rows: Sequence[Any], preprocessing: Preprocessing) -> Columns:
    """The rows of a table; a column that a row lacks has no value there."""
    for number, row in enumerate(rows):
        if not isinstance(row, dict) or not all(isinstance(cell, str | int | float | None) for cell in row.values()):
            raise UserError(f"rows[{number}]: the model reads tables: give an object of column and value")
    encoding = encoding_of(preprocessing)
    numeric = frozenset(column.name for column in encoding.numeric)
    columns = {name: [row.get(name) for row in rows] for name in dict.fromkeys(name for row in rows for name in row)}
    return rows_of(lambda form: from_columns("rows", columns, form, numeric), encoding)


def _array(rows: Sequence[Any], preprocessing: Preprocessing, input_shape: tuple[int, ...]) -> npt.NDArray[Any]:
    kind = preprocessing.kind
    images = (preprocessing.channels, preprocessing.size, preprocessing.size)
    shape = preprocessing.shape or tuple(size for size in images if size) or input_shape
    try:
        values = np.asarray(rows)
    except (ValueError, OverflowError):
        raise UserError(f"rows: samples differ in shape; the model reads {kind} of shape {shape}") from None
    if values.shape[1:] != shape or values.dtype.kind not in ("iu" if kind in ("image", "tokens") else "iuf"):
        what = {"image": "whole numbers, 0 to 255", "tokens": "whole numbers"}.get(kind, "numbers")
        raise UserError(f"rows have shape {values.shape[1:]}; the model reads {kind} of shape {shape}, {what}")
    if kind == "image":
        if values.min() < 0 or values.max() > 255:
            raise UserError("rows: values of images are 0 to 255")
        return values.astype(np.uint8)
    if kind == "tokens":
        return values.astype(np.int64)
    array = values.astype(np.float32)
    if not np.isfinite(array).all():
        raise UserError("rows hold values that are not finite numbers: leave these rows out")
    return array
