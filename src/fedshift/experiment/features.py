"""Features of a frozen backbone: computed once at each site, cached, and used in place of the images."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from fedshift.data.checks import check_dataset
from fedshift.data.domain import DataSet, DataSource, Preprocessing
from fedshift.errors import UserError
from fedshift.experiment.config.experiment import Experiment
from fedshift.experiment.feature_cache import SiteFeatures, Watcher, site_features
from fedshift.federation.local.cards import resolve_device
from fedshift.models.networks.frozen import Extractor, Frozen
from fedshift.models.networks.vision import VisionOptions
from fedshift.models.pretrained import must_be_downloaded

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
