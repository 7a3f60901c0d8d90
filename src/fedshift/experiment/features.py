"""Features of a frozen backbone: computed once at each site, kept in the cache, and used in place of the images.

A file of the cache belongs to three things: the images, the backbone's weights and the transform before it. Their
checksums name it and stand in its header, beside a checksum of the features (float16). Nothing else matters, so another
method, label, seed or name of a site finds the same file. What was computed when a run was cut off is gone on with.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from fedshift.data.checks import checked
from fedshift.data.domain import DataSet, DataSource, Domain, Preprocessing, SparseRows
from fedshift.data.locate import cache_dir
from fedshift.errors import UserError
from fedshift.experiment.config.experiment import Experiment
from fedshift.experiment.environment import resolve_device
from fedshift.files import write_bytes
from fedshift.models import registry as models
from fedshift.models.frozen import Extractor, Frozen

Half = npt.NDArray[np.float16]
_BATCH = 64
_LARGEST = float(np.finfo(np.float16).max)


class Watcher:
    """Told how the extraction goes on. This one says nothing."""

    def extraction(self, site: str, images: int, done: int) -> None:
        """The images of a site are gone through; ``done`` of them were before."""

    def extracted(self, images: int) -> None:
        """So many more are done."""

    def warn(self, message: str) -> None:
        """Something a person should know that stops nothing."""


@dataclass(frozen=True)
class SiteFeatures:
    """One site's features (n, d) as they are kept. seconds: what computing them took now, 0 if they were there."""

    features: Half
    path: Path
    computed: int
    seconds: float


def built(experiment: Experiment, source: DataSource | None = None, watcher: Watcher | None = None) -> DataSet:
    """The experiment's data as methods train on them: features where the network's backbone is frozen.

    source: another encoding of the same data. Raises UserError when the data are no images or features cannot be made.
    """
    data = (source or experiment.data).build()
    options = experiment.model
    if not isinstance(options, Frozen):
        return data
    domains = {
        name: replace(data.domains[name], inputs=found.features.astype(np.float32))
        for name, found in all_features(experiment, data, watcher or Watcher())
    }
    extractor = extractor_for(options, data.preprocessing, data.name)
    record = {
        "model": options.model_dump(mode="json"),
        "weights": weights_fingerprint(options, extractor),
        "images": data.preprocessing.model_dump(mode="json"),
    }
    preprocessing = Preprocessing(kind="features", backbone=record)
    return checked(DataSet(data.name, domains, data.classes, preprocessing, data.manifest))


def all_features(experiment: Experiment, data: DataSet, watcher: Watcher) -> Iterator[tuple[str, SiteFeatures]]:
    """The features of every site's images in turn, with its name. Raises UserError as `site_features` does."""
    options = experiment.model
    if not isinstance(options, Frozen):
        raise UserError("model: only model frozen has features to compute; write {name: frozen, backbone: …, head: …}")
    models.check_task(options, data.task, data.name)
    extractor = extractor_for(options, data.preprocessing, data.name)
    weights = weights_fingerprint(options, extractor)
    device = resolve_device(experiment.device)
    for name, domain in data.domains.items():
        yield name, site_features(domain, options, extractor, weights, device, watcher)


def extractor_for(options: Frozen, preprocessing: Preprocessing, what: str) -> Extractor:
    """The backbone for images that are stored as ``preprocessing`` says. Raises UserError for anything but images."""
    if preprocessing.kind != "image" or preprocessing.shape is None:
        shape = "×".join(map(str, preprocessing.shape or ()))
        raise UserError(
            f"model.backbone: {options.backbone.name} reads images, but {what} gives {preprocessing.kind} of {shape} "
            "numbers; for features that are ready write the head itself as model, such as mlp"
        )
    return options.extractor(preprocessing.shape)


def site_features(
    domain: Domain, options: Frozen, extractor: Extractor, weights: str, device: str, watcher: Watcher
) -> SiteFeatures:
    """The features of one site's images: from the cache, or computed now and put there. weights: their fingerprint.

    Raises UserError when the file of that name belongs to another backbone, the features are too large for float16, or
    the cache cannot be written.
    """
    assert not isinstance(domain.inputs, SparseRows)
    header = {
        "backbone": options.backbone.name,
        "images": images_fingerprint(domain),
        "weights": weights,
        "transform": _sha256(json.dumps(options.transform()).encode()),
    }
    key = _sha256(json.dumps(header, sort_keys=True).encode())
    path = cache_dir() / f"features-{options.backbone.name}-{key}.safetensors"
    known = _read(path, header, watcher)
    if known is not None:
        return SiteFeatures(known, path, 0, 0.0)
    part = path.with_suffix(".part")
    try:
        with open(part, "a+b") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX)  # another process may be at the same images: what it made is taken
            known = _read(path, header, Watcher())
            if known is not None:
                return SiteFeatures(known, path, 0, 0.0)
            began = time.perf_counter()
            features, before = _extracted(domain, extractor.to(device), device, stream, watcher)
            seconds = time.perf_counter() - began
            write_bytes(path, _packed(features, header))
            part.unlink()
    except OSError as error:
        raise UserError(
            f"cannot write features to {path.parent} ({error.strerror}): free some space or set FEDSHIFT_CACHE "
            "elsewhere"
        ) from error
    return SiteFeatures(features, path, len(features) - before, seconds)


def _extracted(domain: Domain, extractor: Extractor, device: str, stream: Any, watcher: Watcher) -> tuple[Half, int]:
    """All features, in batches that are written as they come; and how many of them an earlier run had written."""
    images = domain.inputs
    assert isinstance(images, np.ndarray)
    first = _half(extractor(torch.from_numpy(images[:1].copy()).to(device)), domain.name)
    width = first.shape[1]
    size = 2 * width * _BATCH
    stream.seek(0)
    whole = stream.read()
    before = min(len(images), len(whole) // size * _BATCH)
    stream.truncate(2 * width * before)
    parts = [np.frombuffer(whole[: 2 * width * before], dtype=np.float16).reshape(before, width)]
    watcher.extraction(domain.name, len(images), before)
    for begin in range(before, len(images), _BATCH):
        batch = torch.from_numpy(images[begin : begin + _BATCH].copy()).to(device)
        rows = _half(extractor(batch), domain.name)
        stream.write(rows.tobytes())
        stream.flush()
        os.fsync(stream.fileno())
        parts.append(rows)
        watcher.extracted(len(rows))
    return np.concatenate(parts), before


def _half(features: torch.Tensor, site: str) -> Half:
    values = features.float().cpu().numpy()
    if not (np.abs(values) <= _LARGEST).all():
        raise UserError(
            f"model.backbone: features of site '{site}' are not finite or beyond {_LARGEST:g}: do the weights fit the "
            "backbone, and its scale the weights?"
        )
    return np.asarray(values, dtype=np.float16)


def _packed(features: Half, header: Mapping[str, str]) -> bytes:
    metadata = {**header, "sha256": _sha256(features.tobytes())}
    return save({"features": torch.from_numpy(features.copy())}, {"fedshift": json.dumps(metadata)})


def _read(path: Path, header: Mapping[str, str], watcher: Watcher) -> Half | None:
    """The features in a file, None where there is none or it is damaged; UserError where it is another backbone's."""
    if not path.exists():
        return None
    try:
        with safe_open(str(path), framework="pt") as opened:
            found = json.loads((opened.metadata() or {})["fedshift"])
            features: Half = opened.get_tensor("features").numpy()
    except (SafetensorError, KeyError, ValueError, OSError):
        watcher.warn(f"{path} was cut off or is damaged: its features are computed again")
        return None
    differs = [name for name, value in header.items() if found.get(name) != value]
    if differs:
        raise UserError(
            f"{path} holds features of another backbone than the experiment's (other {' and '.join(differs)}): "
            "remove the file and run again"
        )
    if _sha256(features.tobytes()) != found.get("sha256"):
        watcher.warn(f"{path} is damaged: its features are computed again")
        return None
    return features


def backbone_of(preprocessing: Preprocessing) -> tuple[Extractor | None, Preprocessing]:
    """The frozen backbone that a trained model's features come from, none for most, and how its images are stored.

    Raises UserError when the weights are not there or not those of the training.
    """
    record = preprocessing.backbone
    if record is None:
        return None, preprocessing
    try:
        options = Frozen.model_validate(record["model"])
        stored = Preprocessing.model_validate(record["images"])
    except (KeyError, ValueError):
        raise UserError(
            "the model file does not say which backbone made its features: use a whole model file"
        ) from None
    extractor = extractor_for(options, stored, "the model file")
    if weights_fingerprint(options, extractor) != record.get("weights"):
        raise UserError(
            f"the model was trained on features of other weights of {options.backbone.name} than those that "
            "FEDSHIFT_WEIGHTS or torchvision gives now: find the weights it was trained with"
        )
    return extractor, stored


def images_fingerprint(domain: Domain) -> str:
    """A checksum of a site's stored images, in their order; not of labels or names."""
    assert not isinstance(domain.inputs, SparseRows)
    digest = hashlib.sha256(json.dumps(list(domain.inputs.shape)).encode())
    for begin in range(0, len(domain.inputs), 1024):
        digest.update(np.ascontiguousarray(domain.inputs[begin : begin + 1024]).data)
    return digest.hexdigest()[:32]


def weights_fingerprint(options: Frozen, extractor: Extractor) -> str:
    """A checksum of the backbone's weights and of how it is built; not of where the file with the weights lies."""
    built_as = options.backbone.model_dump(mode="json", exclude={"pretrained"})
    digest = hashlib.sha256(json.dumps(built_as, sort_keys=True).encode())
    for name, tensor in extractor.state_dict().items():
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().numpy().data)
    return digest.hexdigest()[:32]


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:32]
