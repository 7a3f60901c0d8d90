"""The sections ``protocol`` and ``evaluation`` of an experiment file: their fields and the checks of these."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PositiveFloat,
    PositiveInt,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
)

from fedshift.evaluation.records import SiteMetric


class Section(BaseModel):
    """A section of an experiment file. It is immutable and accepts no unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid")


SitesPerRound = Annotated[int, Field(strict=True, ge=1)] | Annotated[float, Field(strict=True, gt=0, lt=1)]


class _Protocol(Section):
    """Base of the protocols."""

    kind: str = Field(description="the protocol")
    sites_per_round: SitesPerRound | None = Field(
        None,
        description="sources that are drawn for each round: a number, or a share below 1; none: all take part",
    )

    def drawn(self, sources: int) -> int | None:
        """How many of the ``sources`` of a run are drawn for each round; None: all take part."""
        asked = self.sites_per_round
        return asked if asked is None or isinstance(asked, int) else max(1, round(asked * sources))

    @model_serializer(mode="wrap")
    def _as_before(self, plain: SerializerFunctionWrapHandler) -> dict[str, Any]:
        written: dict[str, Any] = plain(self)
        if self.sites_per_round is None:  # private noise is drawn from the settings, which are those of earlier runs
            written.pop("sites_per_round", None)
        return written


class _OneTarget(_Protocol):
    """Base of the protocols in which each domain in turn is the target."""

    targets: Literal["all"] | tuple[str, ...] = Field(
        "all", description="the domains that are the target in turn; sites: none is, and all train one model"
    )
    seeds: Annotated[tuple[Annotated[int, Field(ge=0, lt=2**63)], ...], Field(min_length=1)] = Field(
        (0, 1, 2), description="a list: one run for each; a number alone is one seed, not how many"
    )
    test_fraction: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.3, description="share of every source that is held out; 0 trains on everything and cannot select by source"
    )
    split: Literal["auto", "random", "official"] = Field(
        "auto",
        description="official: the data set's own train/test split; random: stratified; auto: official if it exists",
    )
    drop: tuple[str, ...] = Field((), description="domains that do not take part")
    sites_each: PositiveInt = Field(
        1, description="cut every source into so many sites, in a simulation with a single target; 1: not cut"
    )
    cut_by: Literal["chance", "labels"] = Field(
        "chance", description="how sources are cut: by chance, or so that the sites' classes differ"
    )
    label_skew: PositiveFloat = Field(
        0.5, description="cut_by: labels: the smaller, the more the sites' classes differ (Dirichlet)"
    )

    @field_validator("targets", mode="before")
    @classmethod
    def _one_target(cls, targets: object) -> object:
        return (targets,) if isinstance(targets, str) and targets != "all" else targets

    @field_validator("drop", mode="before")
    @classmethod
    def _one_name(cls, drop: object) -> object:
        return (drop,) if isinstance(drop, str) else drop

    @field_validator("seeds", mode="before")
    @classmethod
    def _one_seed(cls, seeds: object) -> object:
        return (seeds,) if isinstance(seeds, int) else seeds

    @field_validator("seeds")
    @classmethod
    def _no_seed_twice(cls, seeds: tuple[int, ...]) -> tuple[int, ...]:
        if len(set(seeds)) != len(seeds):
            raise ValueError("a seed occurs twice")
        return seeds


class LeaveOneOut(_OneTarget):
    """Each chosen domain in turn is unseen; all others are sources. This measures how a model does at a new site."""

    kind: Literal["leave_one_out"] = Field("leave_one_out", description="the protocol")
    base_images: Literal["disjoint", "shared"] = Field(
        "disjoint",
        description="for domains made from the same base samples: measure the target only on base samples that no "
        "source trained on (disjoint), or on all (shared, as the literature seems to do)",
    )


class AdaptToOne(_OneTarget):
    """Each chosen domain in turn trains without labels and is measured on its held-out samples; all others are sources.

    This measures how a model does at a site without labels. The target's labels are used to measure it and to choose
    its held-out samples, a share of every class, as in the literature. No method and no call sees them.
    """

    kind: Literal["adapt_to_one"] = Field("adapt_to_one", description="the protocol")
    test_fraction: Annotated[float, Field(gt=0, lt=1)] = Field(
        0.2, description="share of every domain that is held out; the target is measured on its held-out samples"
    )
    wrong_labels: dict[str, Annotated[float, Field(ge=0, le=1)]] = Field(
        default_factory=dict, description="source → share of its training labels that is replaced by wrong ones"
    )
    wrong_labels_rule: Literal["uniform", "shift"] = Field(
        "uniform",
        description="uniform: wrong labels are drawn from the other classes; shift: the next class (released code)",
    )

    @model_serializer(mode="wrap")
    def _as_before(self, plain: SerializerFunctionWrapHandler) -> dict[str, Any]:
        written = super()._as_before(plain)
        if self.sites_each == 1:  # runs from before sources could be cut here keep their settings
            for name in ("sites_each", "cut_by", "label_skew"):
                written.pop(name, None)
        return written


Names = Annotated[tuple[str, ...], Field(min_length=1)]


class SourceTarget(_Protocol):
    """Labelled and unlabelled sites train together, and both are measured. This shows whether both sides gain.

    Labelled sites are measured on their held-out samples. Unlabelled sites are measured on all their samples, on which
    they train without labels.
    """

    kind: Literal["source_target"] = Field("source_target", description="the protocol")
    pairs: Literal["all"] | Annotated[tuple[tuple[Names, Names], ...], Field(min_length=1)] = Field(
        "all",
        description="pairs [labelled, unlabelled], each side a site or a list; all: every ordered pair of sites",
    )
    splits: PositiveInt = Field(
        10, description="number of random splits of the labelled sites' samples; their seeds are 0, 1, …"
    )
    labelled_test_fraction: Annotated[float, Field(gt=0, lt=1)] = Field(
        0.5, description="share of a labelled site's samples that is held out to measure it (0.7: the 3:7 split)"
    )

    @field_validator("pairs", mode="before")
    @classmethod
    def _two_sides(cls, pairs: object) -> object:
        if isinstance(pairs, str) or not isinstance(pairs, Sequence):
            return pairs
        return tuple(_pair(pair) for pair in pairs)

    @property
    def seeds(self) -> tuple[int, ...]:
        """The seed of each split."""
        return tuple(range(self.splits))


def _pair(pair: object) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(labelled, unlabelled) site names.

    Raises:
        ValueError: it is not a pair, a side is empty, or a site occurs twice.
    """
    sides = list(pair) if isinstance(pair, Sequence) and not isinstance(pair, str) else []
    if len(sides) != 2:
        raise ValueError("a pair is [labelled, unlabelled], such as [a, b] or [[a, b], c]")
    labelled, unlabelled = ((side,) if isinstance(side, str) else tuple(side or ()) for side in sides)
    for names, role in ((labelled, "labelled"), (unlabelled, "unlabelled")):
        if not names:
            raise ValueError(f"a pair has no {role} site; [labelled, unlabelled] needs at least one of each")
    both = [*labelled, *unlabelled]
    twice = next((name for name in both if both.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"site '{twice}' occurs twice in a pair")
    return labelled, unlabelled


Protocol = LeaveOneOut | AdaptToOne | SourceTarget
PROTOCOLS: dict[str, type[Protocol]] = {  # by `kind`
    "leave_one_out": LeaveOneOut,
    "adapt_to_one": AdaptToOne,
    "source_target": SourceTarget,
}
EXTENT = ("targets", "seeds", "pairs", "splits")
"""Fields that say which runs an experiment has. They are not settings of a single run."""


class Evaluation(Section):
    """What is measured with the model of a run's last round, and what is kept of it."""

    headline: SiteMetric = Field(
        "accuracy", description="the measure of the first table and of the page; accuracy: that of the task"
    )
    predictions: bool = Field(
        True, description="keep the scores of every measured sample in each run's predictions.parquet"
    )
    resamples: Annotated[int, Field(ge=0, le=100_000)] = Field(
        1000, description="bootstrap samples of the intervals over samples; large sites use fewer; 0: no intervals"
    )
