"""Names of the data sets and the classes that build them; a module is imported only when its data set is asked for."""

from __future__ import annotations

import importlib
from collections.abc import Mapping

from fedshift.data.domain import DataSource
from fedshift.errors import UserError, nearest

SOURCES: Mapping[str, str] = {
    "rotated_digits": "fedshift.data.builders.rotated:RotatedDigits",
    "rotated_mnist": "fedshift.data.builders.rotated:RotatedMnist",
    "rotated_mnist_ghifary": "fedshift.data.builders.ghifary:GhifaryMnist",
    "five_digits": "fedshift.data.builders.five_digits:FiveDigits",
    "amazon_reviews": "fedshift.data.builders.amazon_reviews:AmazonReviews",
    "office_caltech_surf": "fedshift.data.builders.office_caltech_surf:OfficeCaltechSurf",
    "pacs": "fedshift.data.builders.pacs:Pacs",
    "pacs_features": "fedshift.data.builders.pacs_features:PacsFeatures",
    "heart_disease": "fedshift.data.builders.heart_disease:HeartDisease",
    "discs_and_cups": "fedshift.data.builders.discs_and_cups:DiscsAndCups",
    "mask_folder": "fedshift.data.builders.mask_folder:MaskFolder",
    "image_folder": "fedshift.data.builders.image_folder:ImageFolder",
    "arrays": "fedshift.data.builders.arrays:Arrays",
    "table": "fedshift.data.builders.table:Table",
    "sites": "fedshift.data.builders.at_sites:AtSites",
}


def names() -> tuple[str, ...]:
    """Every known data set, in the order of the documentation."""
    return tuple(SOURCES)


def source_class(name: str) -> type[DataSource]:
    """The builder of the named data set. Raises UserError, with the nearest known name, for an unknown one."""
    if name not in SOURCES:
        raise UserError(f"unknown data set '{name}'; {nearest(str(name), SOURCES)}")
    module, _, attribute = SOURCES[name].partition(":")
    found: type[DataSource] = getattr(importlib.import_module(module), attribute)
    return found


def parse(options: Mapping[str, object]) -> DataSource:
    """The builder described by the ``data:`` part of an experiment file.

    Raises UserError for a missing or unknown name, `pydantic.ValidationError` for fields that do not fit.
    """
    name = options.get("name")
    if not isinstance(name, str):
        raise UserError(f"data.name is missing: say which data set; {nearest('', SOURCES)}")
    return source_class(name).model_validate(dict(options))
