"""Features of a frozen backbone: computed once at each site, cached, and used in place of the images."""

from __future__ import annotations

import hashlib
import io
import json
import os
import time
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save

from fedshift.claims import hold_claim
from fedshift.data.checks import check_dataset
from fedshift.data.domain import DataSet, DataSource, Domain, Preprocessing, SparseRows
from fedshift.data.locate import cache_dir
from fedshift.encryption import present_key, read_private, write_private
from fedshift.errors import UserError
from fedshift.experiment.config.experiment import Experiment
from fedshift.federation.local.cards import resolve_device
from fedshift.files import write_bytes
from fedshift.models.networks.frozen import Extractor, Frozen
from fedshift.models.networks.vision import VisionOptions
from fedshift.models.pretrained import must_be_downloaded

Half = npt.NDArray[np.float16]
_BATCH = 64
_CRC = 4
"""Bytes of a batch's checksum."""
_LARGEST = float(np.finfo(np.float16).max)


class Watcher:
    """Receives the progress of the extraction. This base class ignores it."""

    def extraction(self, site: str, images: int, done: int) -> None:
        """The extraction of a site's images begins. ``done`` of them were computed before."""

    def on_extracted(self, images: int) -> None:
        """This many further images are done."""

    def warn(self, message: str) -> None:
        """A warning for the user. The extraction continues."""


@dataclass(frozen=True)
class SiteFeatures:
    """The features of one site."""

    features: Half  # (n, d), float16, as in the cache
    path: Path  # the cache file
    computed: int  # how many of the n were computed now
    seconds: float  # how long that took; 0 if none was


def site_features(domain: Domain, extractor: Extractor, device: str, watcher: Watcher) -> SiteFeatures:
    """The features of one site's images, from the cache; or computed now and written to the cache.

    UserError if the cache file belongs to another backbone or cannot be written, or the features do not fit into
    float16.
    """
    assert not isinstance(domain.inputs, SparseRows)
    header = {
        "backbone": extractor.name,
        "images": images_fingerprint(domain),
        "weights": extractor.fingerprint,
        "transform": _sha256(json.dumps(extractor.transform).encode()),
    }
    key = _sha256(json.dumps(header, sort_keys=True).encode())
    path = cache_dir() / f"features-{extractor.name}-{key}.safetensors"
    known = _read(path, header, watcher)
    if known is not None:
        return SiteFeatures(known, path, 0, 0.0)
    part = path.with_suffix(".part")
    try:
        # Waits if another process extracts the same images, then uses its result.
        with hold_claim(part) as claim, _batches_in(part) as stream:
            known = _read(path, header, Watcher())
            if known is not None:
                return SiteFeatures(known, path, 0, 0.0)
            began = time.perf_counter()
            features, before = _extract(domain, extractor.to(device), device, stream, watcher)
            seconds = time.perf_counter() - began
            claim.check()
            write = write_bytes if present_key() is None else write_private
            write(path, _pack(features, header))
            part.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(
            f"cannot write features to {path.parent} ({error.strerror}): free some space, or set FEDSHIFT_CACHE "
            "to another folder"
        ) from error
    return SiteFeatures(features, path, len(features) - before, seconds)


def _batches_in(part: Path) -> Any:
    """Where batches wait for the rest: a file, or the memory if a key is set, since they would be in clear there."""
    return open(part, "a+b") if present_key() is None else io.BytesIO()


def _extract(domain: Domain, extractor: Extractor, device: str, stream: Any, watcher: Watcher) -> tuple[Half, int]:
    """All features, and how many of them an earlier call had written. Each batch is written when it is computed."""
    images = domain.inputs
    assert isinstance(images, np.ndarray)
    first = _half(extractor(torch.from_numpy(images[:1].copy()).to(device)), domain.name)
    parts = _batches_before(stream, first.shape[1], watcher)
    before = _BATCH * len(parts)
    watcher.extraction(domain.name, len(images), before)
    for begin in range(before, len(images), _BATCH):
        batch = torch.from_numpy(images[begin : begin + _BATCH].copy()).to(device)
        rows = _half(extractor(batch), domain.name)
        stream.write(_with_checksum(rows.tobytes(), begin // _BATCH))
        stream.flush()
        if not isinstance(stream, io.BytesIO):
            os.fsync(stream.fileno())
        parts.append(rows)
        watcher.on_extracted(len(rows))
    return np.concatenate(parts), before


def _batches_before(stream: Any, width: int, watcher: Watcher) -> list[Half]:
    """The whole batches that an earlier call wrote, up to the first damaged one, behind which the file is cut off."""
    result: list[Half] = []
    size = 2 * width * _BATCH
    stream.seek(0)
    while len(piece := stream.read(size + _CRC)) == size + _CRC:
        if piece != _with_checksum(piece[:size], len(result)):
            watcher.warn(
                f"{stream.name} is damaged: its features are computed again from image {_BATCH * len(result)} on"
            )
            break
        result.append(np.frombuffer(piece, dtype=np.float16, count=width * _BATCH).reshape(_BATCH, width))
    stream.truncate((size + _CRC) * len(result))
    return result


def _with_checksum(batch: bytes, number: int) -> bytes:
    return batch + zlib.crc32(batch, number).to_bytes(_CRC)


def _half(features: torch.Tensor, site: str) -> Half:
    values = features.float().cpu().numpy()
    if not (np.abs(values) <= _LARGEST).all():
        raise UserError(
            f"model.backbone: features of site '{site}' are not finite or exceed {_LARGEST:g}: check that the weights "
            "are those of this backbone and that its options scale images as the weights expect"
        )
    return np.asarray(values, dtype=np.float16)


def _pack(features: Half, header: Mapping[str, str]) -> bytes:
    metadata = {**header, "sha256": _digest_of(features, header)}
    return save({"features": torch.from_numpy(features.copy())}, {"fedshift": json.dumps(metadata)})


def _digest_of(features: Half, header: Mapping[str, str]) -> str:
    about = [sorted(header.items()), str(features.dtype), features.shape]
    return _sha256(b"".join((json.dumps(about).encode(), features.tobytes())))


def _unpack(path: Path) -> tuple[dict[str, str], Half]:
    """What `_pack` made, from its file: the description and the features."""
    if present_key() is None:
        with safe_open(str(path), framework="pt") as opened:
            about, features = (opened.metadata() or {})["fedshift"], opened.get_tensor("features")
    else:
        whole = read_private(path)
        # safetensors reads its metadata from files only: JSON, behind its length in eight bytes.
        top = json.loads(whole[8 : 8 + int.from_bytes(whole[:8], "little")])
        about, features = top["__metadata__"]["fedshift"], load(whole)["features"]
    return json.loads(about), features.numpy()


def _read(path: Path, header: Mapping[str, str], watcher: Watcher) -> Half | None:
    """The features in a file; None if there is no file or it is damaged."""
    if not path.exists():
        return None
    try:
        result, features = _unpack(path)
        written = result.pop("sha256")
        # Files of an earlier fedshift have the second.
        if written != _digest_of(features, result) and written != _sha256(features.tobytes()):
            raise ValueError
    except (SafetensorError, KeyError, ValueError, TypeError, AttributeError, OSError, UserError):
        damaged = "incomplete or damaged" if present_key() is None else "damaged, or written with another key"
        watcher.warn(f"{path} is {damaged}: its features are computed again")
        return None
    differs = [name for name, value in header.items() if result.get(name) != value]
    if differs:
        raise UserError(
            f"{path} holds features of another backbone than the experiment's (other {' and '.join(differs)}): "
            "remove the file and run again"
        )
    return features


def images_fingerprint(domain: Domain) -> str:
    """A checksum of a site's stored images in their order, without labels and names."""
    assert not isinstance(domain.inputs, SparseRows)
    digest = hashlib.sha256(json.dumps(list(domain.inputs.shape)).encode())
    for begin in range(0, len(domain.inputs), 1024):
        digest.update(np.ascontiguousarray(domain.inputs[begin : begin + 1024]).data)
    return digest.hexdigest()[:32]


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:32]


_WIDEST = 10_000
"""Features of a backbone, or pixels on a side of its images, that a model file may ask for."""


def build_data(experiment: Experiment, source: DataSource | None = None, watcher: Watcher | None = None) -> DataSet:
    """The experiment's data as methods train on them: features if the network's backbone is frozen.

    ``source``: builds the data in another encoding; by default the experiment's own. UserError if the backbone is
    frozen, but the data are not images or features cannot be computed.
    """
    data = (source or experiment.data).build()
    if not isinstance(experiment.model, Frozen):
        return data
    extractor, features = all_features(experiment, data, watcher or Watcher())
    preprocessing = features_preprocessing(extractor, data.preprocessing)
    domains = {
        name: replace(data.domains[name], inputs=result.features.astype(np.float32)) for name, result in features
    }
    result = check_dataset(DataSet(data.name, domains, data.classes, preprocessing, data.manifest))
    return replace(result, warnings=data.warnings)


def features_preprocessing(extractor: Extractor, images: Preprocessing) -> Preprocessing:
    """What a model file and a deployment say of features."""
    record = {
        "model": extractor.options.record(),
        "weights": extractor.fingerprint,
        "images": images.model_dump(mode="json"),
    }
    return Preprocessing(kind="features", backbone=record)


def all_features(
    experiment: Experiment, data: DataSet, watcher: Watcher
) -> tuple[Extractor, Iterator[tuple[str, SiteFeatures]]]:
    """The frozen backbone; and each site's name and the features of its images, one site after another.

    UserError if the model has no frozen backbone, or as in `site_features`.
    """
    options = experiment.model
    device = resolve_device(experiment.device)
    if not isinstance(options, Frozen):
        raise UserError("model: only model frozen has features to compute; write {name: frozen, backbone: …, head: …}")
    extractor = options.build_extractor(data.preprocessing, data.name, data.task)
    sites = data.domains.items()
    return extractor, ((name, site_features(domain, extractor, device, watcher)) for name, domain in sites)


def backbone_of(preprocessing: Preprocessing) -> tuple[Extractor | None, Preprocessing]:
    """The frozen backbone and the preprocessing of a trained model.

    The model file may come from a stranger, so nothing is downloaded for it.

    Returns:
        The frozen backbone that computed the model's features, None for a model without one; and the preprocessing of
        the backbone's images, or the model's own.

    Raises:
        UserError: the backbone's weights are missing, or are not those of the training.
    """
    record = preprocessing.backbone
    if record is None:
        return None, preprocessing
    try:
        options = Frozen.model_validate(record["model"])
        stored = Preprocessing.model_validate(record["images"])
    except (KeyError, ValueError):
        raise UserError(
            "the model file does not name the backbone of its features: use the model.safetensors of a run"
        ) from None
    _check_backbone(options)
    extractor = options.build_extractor(stored, "the model file")
    if extractor.fingerprint != record.get("weights"):
        raise UserError(
            f"the model was trained on features of {options.backbone.name} with other weights than those found in "
            "FEDSHIFT_WEIGHTS or torchvision now: put the weights of the training there"
        )
    return extractor, stored


def _check_backbone(options: Frozen) -> None:
    """Raise UserError for a backbone whose weights would be downloaded, or that no run can have trained on."""
    absurd = UserError("the model file asks for a backbone, or for images, of absurd size: use a whole model file")
    if (options.size or 0) > _WIDEST:
        raise absurd
    backbone = options.backbone
    if not isinstance(backbone, VisionOptions):  # its weights lie in a folder, and none are downloaded
        return
    if must_be_downloaded(backbone.pretrained, backbone.name):
        raise UserError(
            f"the model needs torchvision's weights of {backbone.name}, which are not on this machine, and nothing is "
            "downloaded for a model file; if you trust it, write model: frozen with this backbone in an experiment and "
            "run fedshift features, which downloads them"
        )
    if (backbone.bottleneck or 0) > _WIDEST:
        raise absurd
