"""Your own arrays: one ``.npz`` or HDF5 file per site: ``x`` (images, features, tokens) and ``y`` (class numbers)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
import numpy.typing as npt
from pydantic import Field, model_validator

from fedshift.data.agreement import MOMENTS
from fedshift.data.builders.in_memory import Array, InMemory, SiteSamples
from fedshift.data.checks import check_dataset, check_finite, natural_order
from fedshift.data.databases import Database
from fedshift.data.domain import (
    NO_TOKEN,
    UNKNOWN,
    DataSet,
    DataSource,
    Dense,
    Domain,
    Inputs,
    Labels,
    Manifest,
    Preprocessing,
    Rows,
    SparseRows,
    part_of,
)
from fedshift.data.identifiers import check_classes
from fedshift.data.images import as_channels_first
from fedshift.data.locate import load_arrays
from fedshift.data.site_labels import unknown_labels, unread
from fedshift.data.site_scale import check_scale, sums_of
from fedshift.data.splits import fixed_split
from fedshift.data.tables import moments
from fedshift.data.tasks.task_fields import TaskFields, flags, label_sums, quantities, sites_for_statistics, times
from fedshift.errors import UserError, nearest
from fedshift.text import type_in_words

_LAYOUT = (
    "one .npz or HDF5 file (.h5, .hdf5) per site: x uint8 images (n, c, h, w), (n, h, w) or (n, h, w, c), or float "
    "features (n, d), or uint8 or float volumes (n, c, d, h, w), or integers (n, length), which are tokens, with an "
    "optional mask of that shape, 0 where there is none; y integers or names (n,); optional groups integers (n,), the "
    "same number for samples that must not be split apart; optional split train or test (n,), a fixed test set"
)
_LARGE = 10.0
"""A column with a larger root mean square gives a warning."""
_LOOKED_AT = 100
"""Rows by which it is told whether features are whole numbers."""


class Arrays(TaskFields):
    """One ``.npz`` or HDF5 file per site."""

    name: Literal["arrays"] = "arrays"
    sites: dict[str, SiteSamples] = Field(
        min_length=1, description="site name: its .npz or HDF5 file; in Python also (inputs, labels) or a data set"
    )
    classes: tuple[str, ...] | None = Field(None, description="names of the classes, in the order of their numbers")
    standardise: bool | Literal["per_site"] = Field(
        False,
        description="scale every channel or column by mean and deviation: true: from sums of all sites; per_site: of "
        "each site's own training samples, of a target's own unlabelled ones",
    )
    mean: tuple[float, ...] | None = Field(
        None, description="with std, per channel (of values / 255) or column: constants to scale by, known beforehand"
    )
    std: tuple[Annotated[float, Field(gt=0)], ...] | None = Field(None, description="see mean")
    statistics_from: tuple[str, ...] | None = Field(
        None, description="the sites whose sums are used to standardise; unset: all"
    )

    @model_validator(mode="after")
    def _scales_once(self) -> Self:
        if any(isinstance(held, Database) for held in self.sites.values()):
            raise ValueError("the rows of a database are a table: write name: table, and a query")
        if (self.mean is None) != (self.std is None) or len(self.mean or ()) != len(self.std or ()):
            raise ValueError("mean and std go together, one number each per channel or column")
        if self.mean is not None and self.standardise:
            raise ValueError("give mean and std, or standardise, not both")
        return self

    @classmethod
    def manifest(cls) -> Manifest:
        return Manifest(
            title="Your own arrays",
            source="yours",
            licence="yours",
            how_to_get="numpy.savez('site.npz', x=…, y=…) for each site and give data.sites",
            layout=_LAYOUT,
            notes="Images: value / 255. standardise adds up statistics of the sources (statistics_from: of some of "
            "them), never of a site that is unseen. Without classes, labels must be 0 to C - 1, each at some site.",
        )

    @property
    def shares(self) -> tuple[str, ...]:
        return ("statistics",) if self._over_sites or self.scales_labels else ()

    @property
    def _over_sites(self) -> bool:
        """Whether sites agree on a scale."""
        return self.standardise is True

    def without(self, unseen: str) -> DataSource:
        if not self._over_sites:
            return self.without_labels(unseen)
        chosen = self.statistics_from or self.part_names(self.sites)
        fewer = self.model_copy(update={"statistics_from": tuple(site for site in chosen if site != unseen)})
        return fewer if self.label_statistics_from is None else fewer.without_labels(unseen)

    def without_labels(self, site: str) -> DataSource:
        if not self.scales_labels:
            return self
        chosen = self.label_statistics_from or self.statistics_from or tuple(self.sites)
        return self.model_copy(update={"label_statistics_from": tuple(name for name in chosen if name != site)})

    def gives(self) -> dict[str, Any] | None:
        if not self.shares:
            return None
        ((site, held),) = self.sites.items()
        arrays = _arrays(site, held, self.site_labels.get(site))
        known = np.arange(len(arrays["y"])) if (rows := _split(str(held), arrays)) is None else rows[0]
        count, total, squares = len(known), np.zeros(0), np.zeros(0)
        if self._over_sites and self.held_part is not None:
            inputs = described_inputs(self.build().domains[self.held_part])
            assert not isinstance(inputs, SparseRows)  # files hold none
            count, total, squares = sums_of(inputs)
        elif self._over_sites:
            count, total, squares = sums_of(readable_inputs(str(held), arrays["x"])[known])
        given = {"kind": MOMENTS, "count": count, "total": total.tolist(), "squares": squares.tolist()}
        if self.scales_labels:
            given["label"] = label_sums(quantities(str(held), arrays["y"])[known])
        return given

    def encode(self, preprocessing: Preprocessing, classes: tuple[str, ...]) -> DataSet:
        self.check_objective(preprocessing)
        check_scale(preprocessing, self.standardise)
        return super().encode(preprocessing, classes)

    def build(self) -> DataSet:
        """Domains of uint8 images (n, c, h, w), float32 features (n, d) or int64 tokens (n, length).

        UserError if a file cannot be used; names it.
        """
        self.check_site_labels(self.sites, classes=self.has_classes)
        read = {site: _arrays(site, held, self.site_labels.get(site)) for site, held in self.sites.items()}
        named = self._output_names({site: read[site]["y"] for site in self.labelled_sites(read)})
        domains = {site: self._domain(site, arrays, named) for site, arrays in read.items()}
        classes = named or _numbered_classes({site: domains[site] for site in self.labelled_sites(domains)})
        first = next(iter(domains.values()))
        shape = first.inputs.shape[1:]
        if len(shape) == 3:
            preprocessing = Preprocessing(
                kind="image", channels=shape[0], size=shape[1] if shape[1] == shape[2] else None
            )
        else:
            preprocessing = Preprocessing(kind="tokens" if _are_tokens(first.inputs) else "features")
        if preprocessing.kind == "tokens" and (self.standardise or self.mean is not None):
            raise UserError("data.standardise, mean and std: x holds integers, which are tokens: leave them out")
        if self.mean is not None:
            if len(self.mean) != shape[0]:
                raise UserError(f"data.mean: {len(self.mean)} numbers for samples of {shape[0]} channels or columns")
            preprocessing = preprocessing.model_copy(update={"mean": self.mean, "std": self.std})
        names = dict.fromkeys(self.part_names(domains))
        scaling = sites_for_statistics(self.label_statistics_from or self.statistics_from, names)
        scales = [domains[site] for site in scaling] if self.scales_labels else []
        objective = self.objective([label_sums(domain.labels[domain.described]) for domain in scales])
        scale = "per_site" if self.standardise == "per_site" else None
        preprocessing = preprocessing.model_copy(update={"objective": objective, "standardise": scale})
        told = DataSet(self.name, self.by_labels(domains), classes, preprocessing, self.manifest())
        dataset = check_dataset(replace(told, warnings=tuple(self._unread_labels())))
        if not self._over_sites:
            return replace(dataset, warnings=(*dataset.warnings, *_scale_warning(dataset)))
        parts = self.giving(dataset.domains)
        chosen = sites_for_statistics(self.statistics_from, parts)
        mean, std = _moments([described_inputs(parts[site]) for site in chosen])
        scaled = dataset.preprocessing.model_copy(update={"mean": tuple(mean.tolist()), "std": tuple(std.tolist())})
        return replace(dataset, preprocessing=scaled)

    def _unread_labels(self) -> Iterator[str]:
        """A warning for each file that has labels and is said to have none."""
        for site, held in self.sites.items():
            if self.site_labels.get(site) == "none" and isinstance(held, Path) and "y" in load_arrays(held, (), ["y"]):
                yield unread(site, "labels in an array y")

    def _output_names(self, labels: Mapping[str, Array]) -> tuple[str, ...] | None:
        """What networks have an output for, if it is named: the classes, or what a regression predicts."""
        if self.has_classes:
            return self.classes or _class_names(labels)
        first = next(iter(labels.values()))
        number = first.shape[1] if self.task == "multi_label" and first.ndim == 2 else 1
        if self.classes is not None and len(self.classes) != number:
            raise UserError(f"data.classes: {self.task} needs {number} name(s) here, not {len(self.classes)}")
        return self.classes or (("y",) if number == 1 else tuple(f"label {index}" for index in range(number)))

    def _domain(self, site: str, arrays: Mapping[str, Array], named: tuple[str, ...] | None) -> Domain:
        held = self.sites[site]
        where = f"data file {held} (site '{site}')" if isinstance(held, Path) else f"data of site '{site}'"
        inputs = readable_inputs(where, arrays["x"], arrays.get("mask"))
        y = arrays["y"]
        groups = _integers(where, "groups", arrays["groups"], len(inputs)) if "groups" in arrays else None
        rows = _split(where, arrays)

        def domain(labels: Labels) -> Domain:
            train, test = rows or (None, None)
            return Domain(site, inputs, labels, groups, train, test, fixed_split=rows is not None)

        if not self.has_classes:
            read = {"time_to_event": times, "multi_label": flags}.get(self.task, quantities)
            return domain(read(where, y))
        lacking = site in self.site_labels
        if _is_text(y) and not isinstance(held, Path):
            number_of = {name: number for number, name in enumerate(named or ())} | ({"": UNKNOWN} if lacking else {})
            unknown = next((name for name in y.tolist() if str(name) not in number_of), None)
            if unknown is not None:
                raise UserError(
                    f"{where}: label '{unknown}' is none of data.classes; {nearest(str(unknown), number_of)}"
                )
            y = np.array([number_of[str(name)] for name in y.tolist()], dtype=np.int64)
        if lacking and y.dtype.kind == "f":
            y = np.where(np.isnan(y), UNKNOWN, y)
        labels = _integers(where, "y", y, len(inputs), "; for regression write data.task: regression")
        if len(labels) and labels.min() < (UNKNOWN if lacking else 0):
            advice = f"; of a site without labels write data.site_labels: {{{site}: none}}"
            raise UserError(f"{where}: label {labels.min()} is out of range: labels must be 0 or more{advice}")
        return domain(labels)


def described_inputs(domain: Domain) -> Inputs:
    """The inputs that statistics are made of: those of no fixed test set."""
    return part_of(domain, domain.described, domain.name).inputs if domain.fixed_split else domain.inputs


def _split(where: str, arrays: Mapping[str, Array]) -> tuple[Rows, Rows] | None:
    """The training and test rows of an array ``split``, if there is one."""
    if (split := arrays.get("split")) is None:
        return None
    if split.shape != (len(arrays["x"]),) or split.dtype.kind != "U":
        raise UserError(f"{where}: split is {type_in_words(split.dtype)} {split.shape}, expected train or test (n,)")
    return fixed_split(split.tolist(), lambda row: f"{where}, row {row}")


def _scale_warning(dataset: DataSet) -> tuple[str, ...]:
    """A warning if a column of features is too large for a network to train well."""
    preprocessing = dataset.preprocessing
    is_scaled = preprocessing.mean is not None or preprocessing.standardise is not None
    if len(dataset.input_shape) != 1 or is_scaled or _are_tokens(next(iter(dataset.domains.values())).inputs):
        return ()
    features = [domain.inputs for domain in dataset.domains.values() if not isinstance(domain.inputs, SparseRows)]
    # ``einsum`` adds up in float64 without copying the features, which may fill half of the memory.
    squares = sum(np.einsum("ij,ij->j", rows, rows, dtype=np.float64) for rows in features)
    sizes = np.sqrt(squares / sum(map(len, features)))
    column = int(np.argmax(sizes))
    if sizes[column] <= _LARGE:
        return ()
    whole = all(np.array_equal(rows[:_LOOKED_AT], np.rint(rows[:_LOOKED_AT])) for rows in features)
    advice = "set data.standardise=true" + ("; if they are tokens, give integers in x instead" if whole else "")
    return (
        f"column {column} of the features has a root mean square of {sizes[column]:.4g}: such numbers train badly; "
        f"{advice}",
    )


def _arrays(site: str, held: Path | Database | InMemory, labels: str | None = None) -> dict[str, Array]:
    """Arrays ``x``, ``y`` and perhaps ``groups`` and ``split`` of a site. ``labels``: none, few, …; None: of all."""
    where = f"data of site '{site}'"
    assert not isinstance(held, Database)  # the section refuses it
    if labels == "none":
        if isinstance(held, Path):
            read = load_arrays(held, ["x"], ["groups", "split", "mask"])
        else:
            read = {"x": _as_stored(where, held.inputs(where)), **_mask(where, held)}
        return {**read, "y": unknown_labels(len(read["x"]))}
    if isinstance(held, Path):
        read = load_arrays(held, ["x"], ["y", "groups", "split", "mask"])
        if "y" in read:
            return read
        raise UserError(
            f"data file {held} has no array 'y'; it holds: {', '.join(read)}; if this site has no labels, write "
            f"data.site_labels: {{{site}: none}}"
        )
    inputs, y = held.arrays(where)
    return {"x": _as_stored(where, inputs), "y": y, **_mask(where, held)}


def _mask(where: str, held: InMemory) -> dict[str, Array]:
    mask = held.mask(where)
    return {} if mask is None else {"mask": mask}


def _as_stored(where: str, x: Array) -> Array:
    """Inputs of other libraries as files hold them: images of values in [0, 1] as bytes, other numbers as floats."""
    if x.ndim not in (3, 4):
        return x.astype(np.float32) if x.dtype.kind == "b" or (x.dtype.kind in "iu" and x.ndim != 2) else x
    if x.dtype.kind == "f":
        pixels = x.astype(np.float32)
        if not (pixels >= 0).all() or not (pixels <= 1).all():
            raise UserError(
                f"{where}: images of floats must have values from 0 to 1: leave out any normalisation, and give "
                "data.mean and data.std"
            )
        return np.rint(pixels * 255).astype(np.uint8)
    return x.astype(np.uint8) if x.dtype.kind == "b" else x


def _is_text(y: Array) -> bool:
    return y.dtype.kind == "U" and y.ndim == 1


def _class_names(labels: Mapping[str, Array]) -> tuple[str, ...] | None:
    """The classes of labels that are text; None unless all sites have such labels."""
    words = [site for site, y in labels.items() if _is_text(y)]
    others = [site for site in labels if site not in words]
    if words and others:
        raise UserError(
            f"labels y are text at site '{words[0]}' and numbers at site '{others[0]}': give one kind at all sites"
        )
    if others:
        return None
    for site, y in labels.items():
        rows = Counter(map(str, y.tolist()))
        check_classes(
            f"data of site '{site}'",
            "the array of labels",
            rows,
            "give classes, or write task: regression",
            "data.classes",
        )
    return natural_order({str(label) for y in labels.values() for label in y.tolist()})


def readable_inputs(where: str, x: Array, mask: Array | None = None) -> Dense:
    """Array ``x`` of a file, checked.

    Args:
        mask: of tokens (n, length), 0 where there is none; None: all are tokens.

    Returns:
        uint8 images (n, c, h, w), float32 features (n, d), or int64 tokens (n, length) with `NO_TOKEN` where there is
        none.

    Raises:
        UserError: the array has another shape or type, or values that are not finite.
    """
    if x.ndim in (3, 4):
        if x.dtype != np.uint8:
            raise UserError(
                f"{where}: images x are {type_in_words(x.dtype)}, expected uint8 with values 0 to 255: convert them"
            )
        try:
            return as_channels_first(x.astype(np.uint8, copy=False))
        except ValueError as error:
            raise UserError(f"{where}: {error}; expected {_LAYOUT}") from error
    if x.ndim not in (2, 5):
        raise UserError(f"{where}: x has shape {x.shape}; expected {_LAYOUT}")
    if mask is not None or (x.ndim == 2 and x.dtype.kind in "iu"):
        return _tokens(where, x, mask)
    if x.ndim == 5 and x.dtype == np.uint8:
        return x.astype(np.uint8, copy=False)
    if not np.issubdtype(x.dtype, np.floating):
        raise UserError(f"{where}: features x are {type_in_words(x.dtype)}, expected float32 or float64: convert them")
    with np.errstate(over="ignore"):
        features = x.astype(np.float32)
    check_finite(where, features)
    return features


def _tokens(where: str, x: Array, mask: Array | None) -> npt.NDArray[np.int64]:
    """Integers (n, length) as tokens: `NO_TOKEN` where the mask has 0."""
    if x.dtype.kind not in "iu" or x.ndim != 2:
        raise UserError(f"{where}: a mask goes with tokens, integers x (n, length): leave it out or convert x")
    tokens = x.astype(np.int64)
    if mask is None:
        return tokens
    if mask.shape != x.shape or mask.dtype.kind not in "biuf" or not np.isin(mask, (0, 1)).all():
        raise UserError(f"{where}: mask has shape {mask.shape}, expected 0 and 1 of the shape of x {x.shape}")
    return np.where(mask.astype(np.bool_), tokens, NO_TOKEN)


def _are_tokens(inputs: Inputs) -> bool:
    return not isinstance(inputs, SparseRows) and inputs.dtype == np.int64


def _integers(where: str, name: str, values: Array, samples: int, advice: str = "") -> npt.NDArray[np.int64]:
    if values.ndim != 1:
        raise UserError(f"{where}: {name} has shape {values.shape}, expected one number per sample ({samples},)")
    if len(values) != samples:
        raise UserError(f"{where}: x has {samples} samples but {name} has {len(values)}")
    if values.dtype.kind not in "iubf":
        raise UserError(f"{where}: {name} is {type_in_words(values.dtype)}, expected integers")
    numbers = values.astype(np.float64)
    if not (np.isfinite(numbers) & (numbers == np.floor(numbers))).all():
        raise UserError(f"{where}: {name} holds values that are not whole numbers{advice}")
    return values.astype(np.int64)


def _numbered_classes(domains: dict[str, Domain]) -> tuple[str, ...]:
    """Classes 0 … C - 1, for labels without names. Each must occur at some site."""
    present = sorted({int(label) for domain in domains.values() for label in np.unique(domain.labels)})
    if not present:
        return ()  # `check_dataset` reports empty sites
    gap = next((number for number in range(present[-1] + 1) if number not in present), None)
    if gap is not None:
        highest = present[-1]
        sites = ", ".join(f"'{name}'" for name, domain in domains.items() if highest in domain.labels)
        raise UserError(
            f"data set arrays: label {highest} (site {sites}) is out of range: no site has class {gap}; number the "
            "classes 0 to C - 1, or name all of them in data.classes"
        )
    return tuple(str(number) for number in present)


def _moments(inputs: list[Inputs]) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Mean and deviation per channel (of values / 255) or column, from sums of each site."""
    sums = [sums_of(values) for values in inputs if not isinstance(values, SparseRows)]
    count, total, squares = (sum(parts) for parts in zip(*sums, strict=True))
    return moments(int(count), np.asarray(total), np.asarray(squares))
