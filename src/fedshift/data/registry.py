"""The data sets by name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from fedshift.class_registry import ClassRegistry
from fedshift.data.domain import DataSource
from fedshift.trust import own_module

_MANIFESTS = Path(__file__).parent / "published" / "manifests"
_SOURCES: ClassRegistry[DataSource] = ClassRegistry(
    "data set",
    DataSource,
    {
        "rotated_digits": "fedshift.data.builders.rotated:RotatedDigits",
        "rotated_mnist": "fedshift.data.builders.rotated:RotatedMnist",
        "rotated_mnist_ghifary": "fedshift.data.builders.rotated:GhifaryMnist",
        "five_digits": "fedshift.data.builders.five_digits:FiveDigits",
        "amazon_reviews": "fedshift.data.builders.amazon_reviews:AmazonReviews",
        "office_caltech_surf": "fedshift.data.builders.office_caltech_surf:OfficeCaltechSurf",
        "pacs": "fedshift.data.builders.pacs:Pacs",
        "pacs_features": "fedshift.data.builders.pacs:PacsFeatures",
        "heart_disease": "fedshift.data.builders.heart_disease:HeartDisease",
        "discs_and_cups": "fedshift.data.builders.discs_and_cups:DiscsAndCups",
        "scanned_balls": "fedshift.data.builders.scanned_balls:ScannedBalls",
        "drawn_letters": "fedshift.data.builders.drawn_letters:DrawnLetters",
        "mask_folder": "fedshift.data.builders.mask_folder:MaskFolder",
        "volume_folder": "fedshift.data.builders.volume_folder:VolumeFolder",
        "image_folder": "fedshift.data.builders.image_folder:ImageFolder",
        "arrays": "fedshift.data.builders.arrays:Arrays",
        "table": "fedshift.data.builders.own_tables:Table",
        "sites": "fedshift.data.builders.at_sites:AtSites",
        **{path.stem: f"fedshift.data.published.source:{path.stem}" for path in sorted(_MANIFESTS.glob("*.yaml"))},
    },
    own_module=own_module,
)
names = _SOURCES.names


def source_class(name: str, folder: Path | None = None) -> type[DataSource]:
    """The builder of a data set.

    Args:
        name: a known name, ``package.module:Class``, or ``file.py:Class``.
        folder: where a relative file is looked up first. The working directory is next.

    Raises:
        UserError: there is no data set of that name; names the nearest one.
    """
    return _SOURCES.find(name, folder=folder)


def parse(options: Mapping[str, object], folder: Path | None = None) -> DataSource:
    """The builder that the ``data:`` section of an experiment file describes.

    Args:
        folder: where a user's own file is looked up first.

    Raises:
        UserError: the name is missing or unknown.
        pydantic.ValidationError: a field does not fit.
    """
    fields = dict(options)
    name = _SOURCES.name_in(fields, "data.name")
    kind = source_class(name, folder)
    if name not in _SOURCES:
        del fields["name"]  # it is where the class stands; the class has a name of its own
        if kind.model_fields["name"].is_required():
            fields["name"] = kind.__name__
    return kind.model_validate(fields)


def is_own(source: DataSource) -> bool:
    """Whether the builder is a user's own class."""
    return source.name not in _SOURCES or source_class(source.name) is not type(source)
