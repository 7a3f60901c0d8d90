"""A frozen backbone in a deployment: each site computes the features of its own images, once, with its own copy.

Nothing of the backbone is sent. Sites and coordinator say by checksum which weights they have, so a site with others
stops the experiment before training.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from fedshift.data.domain import DataSet, Domain, Preprocessing
from fedshift.deploy.site_file import Holding
from fedshift.errors import Refused, UserError
from fedshift.experiment.features import Watcher, features_preprocessing, site_features
from fedshift.federation.site_runner import Setting
from fedshift.models.network_options import NetworkOptions
from fedshift.models.networks.clip import ClipText
from fedshift.models.networks.frozen import Extractor, Frozen


def features_for(
    options: Frozen, shape: tuple[int, ...], preprocessing: Preprocessing, unseen: DataSet | None, device: str
) -> tuple[Preprocessing, tuple[int, ...], DataSet | None]:
    """How the sites' images are then prepared, their shape as features, and the features of the coordinator's images.

    UserError if the samples are not images, or the backbone cannot read them. ``shape``: of a stored image, on which
    the sites agree.
    """
    extractor = options.build_extractor(preprocessing, "data at sites").to(device)
    width = extractor(torch.zeros(1, *shape, dtype=torch.uint8, device=device)).shape[1]
    preprocessed = features_preprocessing(extractor, preprocessing)
    if unseen is not None:
        domains = {name: _with_features(domain, extractor, device) for name, domain in unseen.domains.items()}
        unseen = replace(unseen, domains=domains, preprocessing=preprocessed)
    return preprocessed, (width,), unseen


def features_here(holding: Holding, setting: Setting, device: str) -> Domain:
    """A site's samples as a request's network reads them: features, where its backbone is frozen.

    Refused if the site has other weights than the coordinator, or the request fits no images of the site; UserError if
    the samples have another shape than the request says. ``setting``: the request's; its network names no file but
    weights of this site.
    """
    options, record = setting.network, setting.preprocessing.backbone
    if not isinstance(options, Frozen) or record is None:
        return holding.encode(setting.preprocessing, setting.input_shape)
    domain, images = holding.domain, holding.data.preprocessing
    extractor = options.build_extractor(images, f"site '{domain.name}'")
    if features_preprocessing(extractor, images).backbone != record:
        raise Refused(
            f"site '{domain.name}': its images, or the weights of {options.backbone.name} in its FEDSHIFT_WEIGHTS, are "
            "not those that the coordinator describes"
        )
    features = _with_features(domain, extractor, device)
    if tuple(features.inputs.shape[1:]) != tuple(setting.input_shape):
        raise UserError(f"site '{domain.name}': samples have the shape {tuple(features.inputs.shape[1:])}")
    return features


def _with_features(domain: Domain, extractor: Extractor, device: str) -> Domain:
    return replace(domain, inputs=site_features(domain, extractor, device, Watcher()).features.astype(np.float32))


def text_towers(network: NetworkOptions) -> dict[str, str]:
    """Folder → checksum of the text towers that sites need and nobody sends."""
    return {str(part.pretrained): part.fingerprint() for part in network.networks() if isinstance(part, ClipText)}


def check_text_towers(site: str, network: NetworkOptions, theirs: Mapping[str, Any]) -> None:
    """Raise Refused if a text tower of this site is another one than the coordinator's. ``network``: the request's; it
    names no file but weights of this site. ``theirs``: what `text_towers` gave at the coordinator."""
    for folder, checksum in text_towers(network).items():
        if theirs.get(folder) != checksum:
            raise Refused(
                f"site '{site}': {folder} in its FEDSHIFT_WEIGHTS is another CLIP than the coordinator's: copy the "
                "same folder to both"
            )
