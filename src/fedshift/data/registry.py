"""The data sets by name."""

from __future__ import annotations

from collections.abc import Mapping

from fedshift.class_registry import ClassRegistry
from fedshift.data.domain import DataSource

_SOURCES: ClassRegistry[DataSource] = ClassRegistry(
    "data set",
    DataSource,
    {
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
    },
)
names = _SOURCES.names


def source_class(name: str) -> type[DataSource]:
    """The builder of a data set.

    Raises:
        UserError: there is no data set of that name; names the nearest one.
    """
    return _SOURCES.find(name)


def parse(options: Mapping[str, object]) -> DataSource:
    """The builder that the ``data:`` section of an experiment file describes.

    Raises:
        UserError: the name is missing or unknown.
        pydantic.ValidationError: a field does not fit.
    """
    return source_class(_SOURCES.name_in(options, "data.name")).model_validate(dict(options))
