"""Prediction with a finished run's model: the same preparation of inputs, the same network, the method's own scores."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from fedshift.data.domain import Preprocessing
from fedshift.data.inference import load_for_prediction
from fedshift.data.transforms import to_network
from fedshift.errors import UserError
from fedshift.experiment.features import backbone_of
from fedshift.experiment.folder import MODEL
from fedshift.methods import registry as methods
from fedshift.methods.base import Method
from fedshift.models import registry as models
from fedshift.models.network import Network

_BATCH = 256


@dataclass(frozen=True)
class Prediction:
    """One sample's prediction. ``probabilities`` over the classes, in their order, sum to 1."""

    name: str
    predicted: str
    probabilities: tuple[float, ...]


@dataclass(frozen=True)
class TrainedModel:
    """A model file, ready to predict. ``metadata`` is what the run wrote about it."""

    network: Network
    method: Method
    classes: tuple[str, ...]
    preprocessing: Preprocessing
    metadata: dict[str, Any]

    @torch.no_grad()
    def predict(self, data: Path) -> list[Prediction]:
        """Predictions for an image, a folder of images, an .npz or a .csv, in order. UserError for unfit data."""
        extractor, stored = backbone_of(self.preprocessing)
        names, inputs = load_for_prediction(data, stored)
        out: list[Prediction] = []
        for begin in range(0, len(names), _BATCH):
            rows = torch.from_numpy(inputs[begin : begin + _BATCH])
            if extractor is not None:
                rows = extractor(rows).half()  # as they are kept in the cache
            batch = to_network(rows, self.preprocessing, "cpu")
            probabilities = self.method.predict(self.network, batch).softmax(dim=1)
            for name, row in zip(names[begin : begin + _BATCH], probabilities, strict=True):
                out.append(Prediction(name, self.classes[int(row.argmax())], tuple(row.tolist())))
        return out


def load_model(path: Path, own_method: str | None = None) -> TrainedModel:
    """The model in a run's folder or a ``model.safetensors``.

    A model file never decides which code runs: it may name a method that comes with fedshift, and no other. A model of
    somebody's own method needs ``own_method``, the ``file.py:Class`` that the caller trusts.
    Raises UserError when there is none, it is damaged, or it was not written by fedshift.
    """
    file = path / MODEL if path.is_dir() else path
    if not file.is_file():
        found = sorted(path.glob(f"**/{MODEL}")) if path.is_dir() else []
        hint = (
            f"; did you mean {found[0].parent}? ({len(found)} models are below {path})"
            if found
            else ": has the run finished?"
        )
        raise UserError(f"there is no {MODEL} in {path}{hint}" if path.is_dir() else f"there is no file {path}")
    try:
        with safe_open(str(file), framework="pt") as opened:
            metadata = json.loads((opened.metadata() or {})["fedshift"])
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (not a mapping)
        preprocessing = Preprocessing.model_validate(metadata["preprocessing"])
        method = _method(metadata["method"], own_method, file)
        options = {key: value for key, value in metadata["model"].items() if key != "pretrained"}
        sources = len(metadata["sources"])
        network = method.adapt_network(
            models.build(models.parse(options), tuple(metadata["input_shape"]), len(metadata["classes"]), 0), sources
        )
        network = method.evaluated_network(network, sources)
        network.load_state_dict(tensors)
    except (SafetensorError, KeyError, ValueError, TypeError, AttributeError, RuntimeError, OSError):
        raise UserError(f"{file} is damaged or was not written by fedshift") from None
    return TrainedModel(network.eval(), method, tuple(metadata["classes"]), preprocessing, metadata)


def _method(record: dict[str, Any], own_method: str | None, file: Path) -> Method:
    options = {key: value for key, value in record.items() if key != "sha256"}
    behind = options.get("method")  # of a method in front of another one
    if isinstance(behind, Mapping) and behind["name"] not in methods.METHODS:
        raise UserError(f"{file} was made with '{behind['name']}', which does not come with fedshift: it is not opened")
    if options["name"] not in methods.METHODS:
        if own_method is None:
            raise UserError(
                f"{file} was made by a method that does not come with fedshift ('{options['name']}'): if you trust "
                "that code, name it with --method FILE.py:Class"
            )
        options["name"] = own_method
    return methods.parse(options)
