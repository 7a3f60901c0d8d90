"""Prediction with the model of a finished run, with the preprocessing and the network of that run."""

from __future__ import annotations

import itertools
import json
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fedshift.data.builders.mask_folder import mask_file
from fedshift.data.builders.table_labels import Labelling
from fedshift.data.domain import Preprocessing
from fedshift.data.inference import (
    Stored,
    further_pages,
    known_labels,
    load_for_prediction,
    rows_to_predict,
    samples_in_memory,
    stored_sides,
    table_to_predict,
)
from fedshift.data.input_guard import ImageStatistics, InputShift, feature_shift, image_shift, table_shift
from fedshift.data.site_scale import check_several, of_these
from fedshift.data.table_files import SiteFormat
from fedshift.data.tables import encoding_of
from fedshift.data.tasks.objective import Objective, objective_of
from fedshift.data.transforms import to_network
from fedshift.digests import check_filled
from fedshift.errors import UserError
from fedshift.experiment.config.error_messages import describe
from fedshift.experiment.config.trusted_code import trusted_method, trusted_network
from fedshift.experiment.features import backbone_of
from fedshift.experiment.runs.run_folder import MODEL, SEALED_MODEL
from fedshift.methods.base import Method
from fedshift.models import registry as models
from fedshift.models.network import Network
from fedshift.models.network_options import NetworkOptions
from fedshift.models.networks.frozen import Extractor
from fedshift.models.networks.unet import SegmentationOptions
from fedshift.models.own.bounded import Bounded
from fedshift.models.own.forward_trial import one_line, told_of
from fedshift.models.sliding import scores_of
from fedshift.weights import Weights

_BATCH = 500
"""Samples in a batch, as where a run measures: the last bits of a product may depend on it."""
_MASKS = 16
"""Images in a batch for segmentation, where every pixel has a score."""
_LARGEST_SAMPLE = 2**25
"""Numbers in a sample that a model file may ask for: an image of 3,300 by 3,300 pixels in colour."""
_PARTS, _SMALL = 4, 10_000_000
"""A network may hold this many times the numbers in its file, plus this many."""


@dataclass(frozen=True)
class Prediction:
    """The prediction for one sample."""

    name: str  # the sample's name
    predicted: str | float  # the class, the names of the labels that it has, or the value in the label's unit
    probabilities: tuple[float, ...]  # one per class, in the order of the classes; none for regression
    label: str | None = None  # the class that the data say; None if they say none


Warn = Callable[[str], None]
"""Is told what is unusual about samples to predict."""


def warn_in_python(text: str) -> None:
    """Warn as Python libraries do, at the line that calls a method of `fedshift.Model`."""
    warnings.warn(text, stacklevel=5)


def check_scores(scores: npt.NDArray[np.float32], names: Sequence[str]) -> None:
    """Refuse samples of which a model says no number, as of values that are too large for it.

    UserError if there are some; it names the first.
    """
    lost = np.flatnonzero(~np.isfinite(scores).all(axis=1))
    if len(lost):
        raise UserError(
            f"the model says no number of {len(lost)} of {len(names)} samples, the first is '{names[lost[0]]}': mend "
            "their values, which are too large, or leave them out"
        )


@dataclass(frozen=True)
class ToPredict:
    """Samples to predict, as the network's preprocessing reads them."""

    names: Sequence[str]  # of the samples
    inputs: Stored  # the samples
    shift: InputShift  # how they differ from the training data
    source: Any  # the table, or what they were read from
    left_out: str | None = None  # a warning of pages and frames that are not among them; None: there are none
    scale: str | None = None  # says that they are read in a scale of their own; None: they are not

    def check(self, accept_shift: bool, warn: Warn = warn_in_python) -> None:
        """Refuse samples that are too unlike the training data, unless they are accepted; warn of unusual ones.

        UserError if they are refused.
        """
        self.shift.check(accept=accept_shift)
        for warning in (self.shift.warning, self.left_out, self.scale):
            if warning is not None:
                warn(warning)


@dataclass(frozen=True)
class TrainedModel:
    """The model of a run, ready to predict. ``metadata`` is what the run wrote about it."""

    network: Network
    method: Method
    classes: tuple[str, ...]
    preprocessing: Preprocessing
    metadata: dict[str, Any]
    options: NetworkOptions

    def read(self, data: Path | Any, written: SiteFormat | None = None) -> ToPredict:
        """Read an image, a folder of images, an .npz or a table, or samples in memory, and compare them with the
        training data.

        ``written``: how a table is written, where it differs from those of the training; None: as these. UserError if
        the data do not fit the model.
        """
        table = table_to_predict(data, self.stored, written)
        if table is not None:
            named, rows = rows_to_predict(self.stored, table)
            shift = InputShift()
            if self.stored.table is not None:
                own_scale = self.stored.standardise is not None
                shift = table_shift(table, encoding_of(self.stored), own_scale=own_scale)
            return ToPredict(named, rows, shift, table, scale=self._scale(len(rows)))
        names, inputs = (load_for_prediction if isinstance(data, Path) else samples_in_memory)(data, self.stored)
        left_out = further_pages(data) if isinstance(data, Path) and self.stored.kind == "image" else None
        return ToPredict(names, inputs, self._shift(inputs, data), data, left_out, self._scale(len(inputs)))

    def _scale(self, samples: int) -> str | None:
        if self.preprocessing.standardise is None or not samples:
            return None
        check_several(samples)
        return f"the {samples} samples are scaled by their own mean and deviation: give all of one site, of no other"

    def _shift(self, inputs: Stored, data: Path | Any) -> InputShift:
        if self.stored.kind != "image":
            return feature_shift(inputs, self.stored)
        known = self.image_statistics
        sides = stored_sides(data) if isinstance(data, Path) and known is not None and known.side is not None else ()
        return image_shift(inputs.astype(np.uint8, copy=False), known, sides)

    def predict(
        self,
        data: Path | Any,
        *,
        accept_shift: bool = False,
        warn: Warn = warn_in_python,
        written: SiteFormat | None = None,
    ) -> list[Prediction]:
        """Predictions for an image, a folder of images, an .npz or a .csv, in order; or for samples in memory.

        A network that adapts to a new site takes the samples for those of one such site.

        Args:
            accept_shift: whether to predict data that do not look like the training data at all.
            warn: is told in what they look unusual.
            written: as for `read`.

        Raises:
            UserError: the data do not fit the model, look too unlike its training data, or it is a model for
                segmentation (see `write_masks`).
        """
        samples = self.read(data, written)
        samples.check(accept_shift, warn)
        names, inputs = samples.names, samples.inputs
        scores, objective = self.scores(inputs), self.objective
        check_scores(scores, names)
        text = objective.predictions(scores, np.array(self.classes, dtype=object)).tolist()
        told = scores.tolist() if objective.has_probabilities else [()] * len(names)
        labels = known_labels(samples.source, names, self.classes, self.labelling) or [None] * len(names)
        return [
            Prediction(name, objective.in_words(item, self.classes), tuple(row), label)
            for name, item, row, label in zip(names, text, told, labels, strict=True)
        ]

    @cached_property
    def labelling(self) -> Labelling | None:
        """How the training tables named the class of a row."""
        text = self.metadata.get("labelled_by")
        return None if text is None else Labelling.model_validate(text)

    @cached_property
    def image_statistics(self) -> ImageStatistics | None:
        """What the model file says of its training images as a whole."""
        text = self.metadata.get("training_images")
        return None if text is None else ImageStatistics.model_validate(text)

    @cached_property
    def objective(self) -> Objective:
        """What the network learned."""
        return objective_of(self.preprocessing)

    @property
    def stored(self) -> Preprocessing:
        """The preprocessing of what `scores` reads: with a frozen backbone that of its images."""
        return self._backbone[1]

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape of one such sample."""
        images = self.stored.channels, self.stored.size, self.stored.size
        return self.stored.shape or tuple(size for size in images if size) or tuple(self.metadata["input_shape"])

    @property
    def extractor(self) -> Extractor | None:
        """The frozen backbone in front of the network, where there is one."""
        return self._backbone[0]

    @property
    def segments(self) -> bool:
        """Whether it predicts masks, not classes."""
        return isinstance(self.options, SegmentationOptions) or bool(self.metadata.get("masks"))

    @cached_property
    def _backbone(self) -> tuple[Extractor | None, Preprocessing]:
        return backbone_of(self.preprocessing)

    def probabilities(self, inputs: Stored) -> npt.NDArray[np.float32]:
        """`scores` of a model that gives probabilities; UserError for any other."""
        if not self.objective.has_probabilities:
            raise UserError(f"this model is for {self.objective.task} and gives no probabilities: ask for predictions")
        return self.scores(inputs)

    @torch.no_grad()
    def scores(self, inputs: Stored, adapted: bool = True) -> npt.NDArray[np.float32]:
        """What the model says of each sample: the probability of each class (n, classes), or the value (n, 1).

        Args:
            inputs: samples as `fedshift.data.inference` makes them.
            adapted: whether a network that adapts to a new site takes the samples for those of one such site.

        Raises:
            UserError: it is a model for segmentation.
        """
        if self.segments:
            raise UserError("this model predicts masks: name a folder for them with --masks FOLDER")
        extractor, preprocessing = self.extractor, self._at(inputs)

        def batches(order: Tensor | None = None) -> Iterator[Tensor]:
            for part in (slice(begin, begin + _BATCH) for begin in range(0, len(inputs), _BATCH)):
                rows = torch.from_numpy(inputs[part if order is None else order[part].numpy()])
                if extractor is not None:
                    rows = extractor(rows).half()  # float16, as in the cache
                yield to_network(rows, preprocessing, "cpu")

        network = self.network
        none = np.zeros((0, len(self.classes)), dtype=np.float32)
        with told_of(self.options, "predicting with it"):
            if adapted and len(inputs) and self.metadata.get("unseen"):
                new_site = self.method.at_sites(tuple(self.metadata["input_shape"])).new_site
                network = new_site.adapt(network, lambda: batches(new_site.order(len(inputs))))
            outputs = [network(batch).double() for batch in batches()]  # as a run computes what it notes of a sample
        return np.concatenate([none, *(self.objective.scores(batch).float().numpy() for batch in outputs)])

    def _at(self, inputs: Stored) -> Preprocessing:
        """The preprocessing of these samples, as those of one site."""
        return of_these(inputs, self.preprocessing) if len(inputs) else self.preprocessing

    @torch.no_grad()
    def masks(self, inputs: Stored) -> Iterator[npt.NDArray[np.bool_]]:
        """The predicted masks of each sample, (structures, height, width).

        UserError if it is a model for classification.
        """
        if not self.segments:
            raise UserError("this model predicts classes, not masks: leave out --masks")
        together, preprocessing = _MASKS if inputs.ndim == 4 else 1, self._at(inputs)
        for begin in range(0, len(inputs), together):
            batch = to_network(torch.from_numpy(inputs[begin : begin + together]), preprocessing, "cpu")
            yield from self.options.masks(scores_of(self.network, batch, self.preprocessing.patch))

    def write_masks(
        self, data: Path, folder: Path, *, accept_shift: bool = False, warn: Warn = warn_in_python
    ) -> list[tuple[Path, float]]:
        """Write the predicted masks as ``folder/<structure>/<name>.png``: black and white, in the network's input size.

        Args:
            data: an image, a folder of images or an .npz.
            accept_shift, warn: as for `predict`.

        Returns:
            Each file, and the share of its pixels that is white.

        Raises:
            UserError: the data do not fit the model or look too unlike its training data, it is a model for
                classification, a name leads out of the folder,
                or a file cannot be written.
        """
        if not self.segments:
            raise UserError("this model predicts classes, not masks: leave out --masks")
        samples = self.read(data)
        samples.check(accept_shift, warn)
        names, inputs = samples.names, samples.inputs
        if inputs.ndim != 4:
            raise UserError("masks of volumes are no images: in Python, fedshift.Model.load(RUN).predict(X) gives them")
        files = {(structure, name): mask_file(folder, structure, name) for name in names for structure in self.classes}
        out: list[tuple[Path, float]] = []
        for name, masks in zip(names, self.masks(inputs), strict=True):
            for structure, mask in zip(self.classes, masks, strict=True):
                file = files[structure, name]
                try:
                    file.parent.mkdir(parents=True, exist_ok=True)
                    Image.fromarray(mask.astype(np.uint8) * 255).save(file)
                except OSError as error:
                    raise UserError(f"cannot write the mask {file}: {error.strerror or error}") from None
                out.append((file, float(mask.mean())))
        return out


def how_written(fields: Mapping[str, Any] | None) -> SiteFormat | None:
    """How a table to predict is written, by fields of a data section; None if there are no fields.

    UserError if there is no such field, or its value does not fit.
    """
    if not fields:
        return None
    try:
        return SiteFormat.model_validate(dict(fields))
    except ValidationError as error:
        raise UserError(describe(error, "data", SiteFormat)) from None


def load_model(path: Path, own_method: str | Method | None = None, own_network: Any = None) -> TrainedModel:
    """Load a trained model.

    A model file never decides which code runs: it may name a method that comes with fedshift, and no other. Nor does it
    decide how much memory is used: its tensors are compared with the network before either is allocated.

    Args:
        path: a run's folder or a ``model.safetensors``.
        own_method: a method that the caller trusts, if the model is of a user's own: ``file.py:Class``, or the method.
        own_network: a network that the caller trusts, if the model is of one that does not come with fedshift: its
            name, or the class, function or module itself.

    Raises:
        UserError: there is no model, it is damaged, or it was not written by fedshift.
    """
    file = path / MODEL if path.is_dir() else path
    if not file.is_file():
        result = sorted(path.glob(f"**/{MODEL}")) if path.is_dir() else []
        hint = ": has the run finished?"
        if result:
            hint = f"; did you mean {result[0].parent}? ({len(result)} models are below {path})"
        elif (path / SEALED_MODEL).is_file():
            hint = f", but a {SEALED_MODEL}: open it at a site that may read it, with fedshift site open"
        raise UserError(
            f"there is no {MODEL} in {path}{hint}"
            if path.is_dir()
            else f"there is no file {path}: give a run's folder or a {MODEL}"
        )
    check_filled(file)
    try:
        with safe_open(str(file), framework="pt") as opened:
            metadata = json.loads((opened.metadata() or {})["fedshift"])
            shapes = {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
            preprocessing = Preprocessing.model_validate(metadata["preprocessing"])
            method = trusted_method(metadata["method"], own_method, file)
            chosen = trusted_network(metadata["model"], own_network, file)
            classes = tuple(str(name) for name in metadata["classes"])
            _check_sizes(metadata, preprocessing, shapes)
            few = {**metadata, "sources": metadata["sources"][: len(shapes)]}  # a part for a source has tensors
            network = _fitting(method, chosen, few, shapes)
            network.load_state_dict({name: opened.get_tensor(name) for name in shapes})
            trained = TrainedModel(network.eval(), method, classes, preprocessing, metadata, chosen)
            _ = trained.labelling, trained.image_statistics
    except _Unfit as error:
        name = chosen.display
        raise UserError(f"{file} does not fit the network {name}: give the one it was trained with{error}") from None
    except (SafetensorError, KeyError, ValueError, TypeError, AttributeError, RuntimeError, RecursionError, OSError):
        way = "give the model.safetensors of a run; a model.sealed is opened with fedshift site open"
        raise UserError(f"{file} is damaged or was not written by fedshift: {way}") from None
    return trained


class _Unfit(Exception):
    """A file does not fit a network of the caller's. As text, why, as the end of a sentence."""


def _fitting(
    method: Method, options: NetworkOptions, metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
) -> Network:
    """The network that predicts, which holds tensors of the ``shapes`` in a file; its weights are arbitrary."""
    largest = _PARTS * sum(map(math.prod, shapes.values())) + _SMALL
    if not any(":" in network.name for network in options.networks()):
        with torch.device("meta"):  # takes no memory, whatever the file says
            _check_fit(shapes, largest, *_networks(method, options, metadata))
        return _networks(method, options, metadata)[1]
    # Code of others may read the tensors that it makes, so it makes them, but not more of them than the file warrants.
    try:
        with Bounded(largest):
            trained, evaluated = _networks(method, options, metadata)
        _check_fit(shapes, largest, trained, evaluated)
    except (ValueError, TypeError, AttributeError, KeyError, RuntimeError) as error:
        raise _Unfit(f" ({one_line(error)})") from error
    return evaluated


def from_weights(
    weights: Weights, metadata: Mapping[str, Any], method: Method, options: NetworkOptions
) -> TrainedModel:
    """The trained model of weights that were never in a file. ``metadata``: what its file would say about it."""
    _, network = _networks(method, options, metadata)
    network.load_state_dict(dict(weights))
    preprocessing = Preprocessing.model_validate(metadata["preprocessing"])
    return TrainedModel(network.eval(), method, tuple(metadata["classes"]), preprocessing, dict(metadata), options)


def _networks(method: Method, options: NetworkOptions, metadata: Mapping[str, Any]) -> tuple[Network, Network]:
    """The network that the sites of the run trained, and the one that predicts."""
    sources = len(metadata["sources"])
    shape, classes = tuple(metadata["input_shape"]), len(metadata["classes"])
    if metadata.get("parts") is not None:
        options.take_structure(shape, classes, metadata["parts"])
    built = models.build(options, shape, classes, 0)
    built.objective = objective_of(Preprocessing.model_validate(metadata["preprocessing"]))
    trained = method.adapt_network(built, sources)
    return trained, method.evaluated_network(trained, sources)


def _check_sizes(metadata: Mapping[str, Any], preprocessing: Preprocessing, shapes: Mapping[str, Any]) -> None:
    """Raise ValueError for samples or classes of which the tensors in a file cannot be a model."""
    stored: Any = preprocessing.backbone["images"] if preprocessing.backbone else {}
    sizes = [metadata["input_shape"]]
    for text in (preprocessing.model_dump(), stored):
        sizes += [text.get("shape") or (), (text.get("channels") or 1, *2 * (text.get("size") or 1,))]
    for shape in sizes:
        if math.prod(int(size) for size in shape) > _LARGEST_SAMPLE:
            raise ValueError("a sample is too large")
    if len(metadata["classes"]) > sum(map(math.prod, shapes.values())):
        raise ValueError("too many classes")


def _check_fit(shapes: Mapping[str, tuple[int, ...]], largest: int, trained: Network, evaluated: Network) -> None:
    """Raise ValueError unless a file holds the tensors of the network that predicts, and neither is ``largest``.

    What sites train may have a part that the file lacks, such as a generator.
    """
    if shapes != {name: tuple(tensor.shape) for name, tensor in evaluated.state_dict().items()}:
        raise ValueError("the tensors are not those of the network")
    for network in (trained, evaluated):
        size = sum(tensor.numel() for tensor in itertools.chain(network.parameters(), network.buffers()))
        if size > largest:
            raise ValueError("the network is much larger than the file")
