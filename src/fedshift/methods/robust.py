"""Robust aggregation as an option of every method that averages: ``robust: {rule: trimmed_mean, trim: 1}``.

A rule looks at the replies of an exchange before the method does (`screening`). It leaves sites out, or gives the
method other models in the place of theirs; what the method does with them, its weights included, stays as it is.

* ``norm_clipping`` shortens long updates. The method's weights apply as ever.
* ``krum`` leaves sites out, as if they were missing. The method's weights apply among those that are left.
* ``median``, ``trimmed_mean`` and ``trust`` put one model in the place of all (``one_model``). The mean of equal models
  is that model under any weights, so no share that a site claims counts, and CSAC's distances are zero.

BatchNorm: running means and variances are aggregated like weights. Where a rule measures a length (norms, distances),
it measures parameters and statistics apart, so that neither hides the other. Counters become the lower median.

Every rule reads the model of each single site at the server, so none can stand beside secure aggregation, which shows
the server only their sum.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, get_args

import torch
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
)
from torch import Tensor

from fedshift.errors import UserError, nearest
from fedshift.functional import robust_aggregation as robust
from fedshift.functional.averaging import MeanAccumulator, is_buffer
from fedshift.methods.choices import read_choice
from fedshift.weights import Weights


@dataclass(frozen=True)
class Averaged:
    """Which models in the replies of a call the method averages over the sites.

    Attributes:
        fields: the fields of the reply that hold them. Updates are measured from the content that is sent under the
            same name; where none is sent, from the last that was, and at first from the common start.
        changes: those fields that hold a change or a gradient in place of a model. It is measured from zero.
        at: which sites are asked.
        rules: the rules of robust aggregation that may screen them. ``each``: those that leave every site a model of
            its own, as a method needs that also lets them vote. ``none``: no rule helps, as where a site's own number
            multiplies its model.
    """

    fields: tuple[str, ...] = ("weights",)
    changes: tuple[str, ...] = ()
    at: Literal["sources", "targets"] = "sources"
    rules: Literal["all", "each", "none"] = "all"


Averages = Mapping[str, Averaged]
"""By the name of the call."""


@dataclass(frozen=True)
class Verdict:
    """What a rule makes of an exchange.

    Attributes:
        replaced: from a site's name and model to the model in its place; None leaves the site out.
        report: what ``rounds.jsonl`` says of it.
    """

    replaced: Callable[[str, Weights], Weights | None]
    report: Mapping[str, Any] = field(default_factory=dict)


class Rule(BaseModel, ABC):
    """Base of the rules.

    Attributes:
        one_model: whether the method gets one model in the place of all.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    one_model: ClassVar[bool] = False

    rule: str

    def check(self, sites: int) -> None:
        """Raise UserError where so many replies are too few."""

    def check_sources(self, sources: Sequence[str]) -> None:
        """Raise UserError where these sources do not fit."""

    @abstractmethod
    def judge(self, sites: Sequence[str], models: Iterable[Weights], centre: Weights) -> Verdict:
        """Look at the models of an exchange.

        Args:
            sites: the sites that answered.
            models: their models in the same order; every pass reads them anew.
            centre: what was sent to them.

        Raises:
            UserError: they are too few.
        """


class NormClipping(Rule):
    """Updates that are longer than a bound are shortened to it (Sun et al., 2019).

    A fixed bound is for parameters; BatchNorm statistics always have the sites' median as theirs.
    """

    rule: Literal["norm_clipping"] = "norm_clipping"
    bound: Literal["median"] | PositiveFloat = Field(
        "median", description="longest norm of a site's update; median = the lower median of the sites' norms"
    )

    def judge(self, sites: Sequence[str], models: Iterable[Weights], centre: Weights) -> Verdict:
        norms = [[robust.update_norm(part, centre) for part in _parts(model)] for model in models]
        bounds = [robust.lower_median(column) for column in zip(*norms, strict=True)]
        if self.bound != "median":
            bounds[0] = self.bound
        factors = {
            site: [robust.clip_factor(norm, bound) for norm, bound in zip(length, bounds, strict=True)]
            for site, length in zip(sites, norms, strict=True)
        }
        counters = robust.coordinate_median([_counters(model) for model in models])

        def shorten(site: str, model: Weights) -> Weights:
            return _in_order(model, *map(robust.move_towards, [centre] * 2, _parts(model), factors[site]), counters)

        clipped = {site: factor for site, (factor, _) in factors.items() if factor < 1}
        return Verdict(shorten, {"clipped": clipped, "bound": bounds[0]})


class _OneModel(Rule):
    """A rule that puts one model in the place of all."""

    one_model: ClassVar[bool] = True

    def judge(self, sites: Sequence[str], models: Iterable[Weights], centre: Weights) -> Verdict:
        self.check(len(sites))
        item, report = self.combine(sites, models, centre)
        return Verdict(lambda site, model: item, report)

    @abstractmethod
    def combine(
        self, sites: Sequence[str], models: Iterable[Weights], centre: Weights
    ) -> tuple[Weights, Mapping[str, Any]]:
        """The one model, and what to say of it. Arguments as for `judge`."""


class Median(_OneModel):
    """The coordinate-wise median (Yin et al., ICML 2018)."""

    rule: Literal["median"] = "median"

    def combine(
        self, sites: Sequence[str], models: Iterable[Weights], centre: Weights
    ) -> tuple[Weights, Mapping[str, Any]]:
        return robust.coordinate_median(models), {}


class TrimmedMean(_OneModel):
    """The coordinate-wise mean without the highest and lowest values (Yin et al., ICML 2018)."""

    rule: Literal["trimmed_mean"] = "trimmed_mean"
    trim: NonNegativeInt = Field(1, description="b: sites left out at each end of every number; needs above 2b sites")

    def check(self, sites: int) -> None:
        robust.check_trim(sites, self.trim)

    def combine(
        self, sites: Sequence[str], models: Iterable[Weights], centre: Weights
    ) -> tuple[Weights, Mapping[str, Any]]:
        return robust.trimmed_mean(models, self.trim), {}


class Krum(Rule):
    """The models with the nearest neighbours; the other sites are left out (Blanchard et al., NeurIPS 2017)."""

    rule: Literal["krum"] = "krum"
    faulty: NonNegativeInt = Field(1, description="f: bad sites expected at most; needs 2f + 3 sites")
    keep: PositiveInt = Field(1, description="m: models that the method averages; 1 = Krum, more = multi-Krum")

    def check(self, sites: int) -> None:
        robust.check_krum(sites, self.faulty, self.keep)

    def judge(self, sites: Sequence[str], models: Iterable[Weights], centre: Weights) -> Verdict:
        self.check(len(sites))
        distances = torch.zeros(len(sites), len(sites), dtype=torch.float64)
        for number in range(2):
            apart = robust.squared_distances(_Parts(models, number))
            # In units of the smallest score, which no bad site can make large.
            scores = [score for score in robust.krum_scores(apart, self.faulty) if score > 0]
            distances += apart / min(scores, default=1.0)
        by_name = sorted(range(len(sites)), key=lambda index: sites[index])  # equal scores: whatever the order asked
        kept = {sites[by_name[index]] for index in robust.krum(distances[by_name][:, by_name], self.faulty, self.keep)}
        report = {"left_out": [site for site in sites if site not in kept]}
        return Verdict(lambda site, model: model if site in kept else None, report)


class Trust(_OneModel):
    """Sites are trusted as far as their updates point where a trusted site's does (FLTrust, Cao et al., NDSS 2021).

        g = Σ_k TS_k · (‖g₀‖/‖g_k‖) · g_k / Σ_k TS_k,    TS_k = max(0, cos(g_k, g₀))        (equations 2 to 4)

    The paper's server has data and trains on them itself. Here it is a site of the federation: one that runs at the
    coordinator, or that the coordinator trusts. It trains as the others do, and its own update g₀ has trust 1 and is
    part of the mean. BatchNorm statistics are the mean by trust, none farther from what was sent than the trusted ones.
    """

    rule: Literal["trust"] = "trust"
    trusted: str = Field(description="the site whose update is trusted; it must be a source of every run")

    def check_sources(self, sources: Sequence[str]) -> None:
        if self.trusted not in sources:
            raise UserError(f"trusted: '{self.trusted}' is not among the sources; {nearest(self.trusted, sources)}")

    def combine(
        self, sites: Sequence[str], models: Iterable[Weights], centre: Weights
    ) -> tuple[Weights, Mapping[str, Any]]:
        self.check_sources(sites)
        root = next(model for site, model in zip(sites, models, strict=True) if site == self.trusted)
        lengths = [robust.update_norm(part, centre) for part in _parts(root)]
        mean, trust = MeanAccumulator(), {}
        for site, model in zip(sites, models, strict=True):
            parameters, statistics = _parts(model)
            trust[site] = 1.0 if site == self.trusted else robust.trust_score(parameters, _parts(root)[0], centre)
            length = robust.update_norm(parameters, centre)
            mean.add(
                _in_order(
                    model,
                    robust.move_towards(
                        centre, parameters, lengths[0] / length if length and site != self.trusted else 1.0
                    ),
                    robust.move_towards(
                        centre, statistics, robust.clip_factor(robust.update_norm(statistics, centre), lengths[1])
                    ),
                    _counters(root),
                ),
                trust[site],
            )
        return mean.result(), {"trust": trust}


AnyRule = NormClipping | Median | TrimmedMean | Krum | Trust
RULES: Mapping[str, type[Rule]] = {kind.model_fields["rule"].default: kind for kind in get_args(AnyRule)}


def unfit(rule: type[Rule], averages: Averages) -> str:
    """Why a rule does not go with a method that averages these; empty where it does."""
    kinds = {averaged.rules for averaged in averages.values()}
    if not averages:
        return "averages no models of sites"
    if "none" in kinds:
        return "multiplies models by what sites say of themselves, which no rule looks at"
    if rule.one_model and "each" in kinds:
        return f"needs the model of every site, and {_name(rule)} makes one of all"
    if rule is Trust and any(averaged.at == "targets" for averaged in averages.values()):
        return f"averages models of sites without labels, and for {_name(rule)} the trusted site must be among them"
    return ""


def _name(rule: type[Rule]) -> str:
    return str(rule.model_fields["rule"].default)


def _read(value: Any) -> Any:
    return read_choice(value, "rule", RULES, "rule")


RobustAggregation = Annotated[
    Annotated[AnyRule, Field(discriminator="rule")] | None,
    BeforeValidator(_read),
]
"""The field ``robust`` of a method."""


def _counters(model: Weights) -> Weights:
    return model.select(lambda name: not model[name].is_floating_point())


def _parts(model: Weights) -> tuple[Weights, Weights]:
    """The parameters and the BatchNorm statistics of a model; neither has its counters."""
    floats = model.select(lambda name: model[name].is_floating_point())
    return floats.select(lambda name: not is_buffer(name)), floats.select(is_buffer)


def _in_order(like: Weights, *parts: Weights) -> Weights:
    """Parts of a model put together in the order of its names."""
    whole = {name: tensor for part in parts for name, tensor in part.items()}
    return Weights({name: whole[name] for name in like})


@dataclass(frozen=True)
class _Parts:
    """One part of each model, see `_parts`; every pass reads the models anew."""

    models: Iterable[Weights]
    number: int

    def __iter__(self) -> Iterator[Mapping[str, Tensor]]:
        return (_parts(model)[self.number] for model in self.models)
