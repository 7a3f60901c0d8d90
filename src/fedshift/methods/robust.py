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

import math
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
from fedshift.functional.averaging import MeanAccumulator, float64_chunks, is_buffer
from fedshift.methods.choices import read_choice
from fedshift.weights import Weights


@dataclass(frozen=True)
class Averaged:
    """Which models in the replies of a call the method averages over the sites."""

    # the fields of the reply that hold them. Updates are measured from the content that is sent under the same name;
    # where none is sent, from the last that was, and at first from the common start.
    fields: tuple[str, ...] = ("weights",)
    # those fields that hold a change or a gradient in place of a model. It is measured from zero.
    changes: tuple[str, ...] = ()
    at: Literal["sources", "targets"] = "sources"  # which sites are asked
    # the rules of robust aggregation that may screen them. ``each``: those that leave every site a model of its own, as
    # a method needs that also lets them vote. ``none``: no rule helps, as where a site's own number multiplies its
    # model.
    rules: Literal["all", "each", "none"] = "all"


Averages = Mapping[str, Averaged]
"""By the name of the call."""


@dataclass(frozen=True)
class Verdict:
    """What a rule makes of an exchange."""

    # from a site's name and model to the model in its place; None leaves the site out
    replaced: Callable[[str, Weights], Weights | None]
    report: Mapping[str, Any] = field(default_factory=dict)  # what ``rounds.jsonl`` says of it


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

        ``models``: their models in the same order; every pass reads them anew. Raises UserError: they are too few.
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
        norms = [[update_norm(part, centre) for part in _parts(model)] for model in models]
        bounds = [lower_median(column) for column in zip(*norms, strict=True)]
        if self.bound != "median":
            bounds[0] = self.bound
        factors = {
            site: [clip_factor(norm, bound) for norm, bound in zip(length, bounds, strict=True)]
            for site, length in zip(sites, norms, strict=True)
        }
        counters = coordinate_median([_counters(model) for model in models])

        def shorten(site: str, model: Weights) -> Weights:
            return _in_order(model, *map(move_towards, [centre] * 2, _parts(model), factors[site]), counters)

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
        return coordinate_median(models), {}


class TrimmedMean(_OneModel):
    """The coordinate-wise mean without the highest and lowest values (Yin et al., ICML 2018)."""

    rule: Literal["trimmed_mean"] = "trimmed_mean"
    trim: NonNegativeInt = Field(1, description="b: sites left out at each end of every number; needs above 2b sites")

    def check(self, sites: int) -> None:
        check_trim(sites, self.trim)

    def combine(
        self, sites: Sequence[str], models: Iterable[Weights], centre: Weights
    ) -> tuple[Weights, Mapping[str, Any]]:
        return trimmed_mean(models, self.trim), {}


class Krum(Rule):
    """The models with the nearest neighbours; the other sites are left out (Blanchard et al., NeurIPS 2017)."""

    rule: Literal["krum"] = "krum"
    faulty: NonNegativeInt = Field(1, description="f: bad sites expected at most; needs 2f + 3 sites")
    keep: PositiveInt = Field(1, description="m: models that the method averages; 1 = Krum, more = multi-Krum")

    def check(self, sites: int) -> None:
        check_krum(sites, self.faulty, self.keep)

    def judge(self, sites: Sequence[str], models: Iterable[Weights], centre: Weights) -> Verdict:
        self.check(len(sites))
        distances = torch.zeros(len(sites), len(sites), dtype=torch.float64)
        for number in range(2):
            apart = squared_distances(_Parts(models, number))
            # In units of the smallest score, which no bad site can make large.
            scores = [score for score in krum_scores(apart, self.faulty) if score > 0]
            distances += apart / min(scores, default=1.0)
        by_name = sorted(range(len(sites)), key=lambda index: sites[index])  # equal scores: whatever the order asked
        chosen = {sites[by_name[index]] for index in krum(distances[by_name][:, by_name], self.faulty, self.keep)}
        report = {"left_out": [site for site in sites if site not in chosen]}
        return Verdict(lambda site, model: model if site in chosen else None, report)


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
        lengths = [update_norm(part, centre) for part in _parts(root)]
        mean, trust = MeanAccumulator(), {}
        for site, model in zip(sites, models, strict=True):
            parameters, statistics = _parts(model)
            trust[site] = 1.0 if site == self.trusted else trust_score(parameters, _parts(root)[0], centre)
            length = update_norm(parameters, centre)
            mean.add(
                _in_order(
                    model,
                    move_towards(centre, parameters, lengths[0] / length if length and site != self.trusted else 1.0),
                    move_towards(centre, statistics, clip_factor(update_norm(statistics, centre), lengths[1])),
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


Models = Iterable[Mapping[str, Tensor]]


AT_ONCE = 64 << 20
"""Bytes of all sites' numbers that are held side by side."""


_COLUMNS = 65_536
"""Numbers of a model that are sorted at once: sorting needs three times their memory."""


def coordinate_median(models: Models, at_once: int = AT_ONCE) -> Weights:
    """The coordinate-wise median (Yin et al., ICML 2018, Algorithm 1, option I).

    Each number is the median of what the sites have there; of an even number of sites the mean of the two in the
    middle. Fewer than half of the sites can move it only within what the others have. Integers (BatchNorm's counters)
    become their lower median.
    """

    def middle(columns: Tensor) -> Tensor:
        ordered, count = columns.sort(dim=0).values, len(columns)
        low, high = ordered[(count - 1) // 2], ordered[count // 2]
        return low + (high - low) / 2

    return _by_coordinate(models, middle, at_once)


def trimmed_mean(models: Models, trim: int, at_once: int = AT_ONCE) -> Weights:
    """The coordinate-wise trimmed mean (Yin et al., ICML 2018, Algorithm 1, option II).

    Each number is the mean of what the sites have there without the ``trim`` highest and lowest. Up to ``trim`` bad
    sites can move it only within what the others have. Integers become their lower median.
    """

    def mean(columns: Tensor) -> Tensor:
        check_trim(len(columns), trim)
        untrimmed = columns.sort(dim=0).values[trim : len(columns) - trim]
        # Relative to the lowest: the mean of equal numbers is that number.
        return untrimmed[0] + (untrimmed - untrimmed[0]).mean(dim=0)

    return _by_coordinate(models, mean, at_once)


def check_trim(sites: int, trim: int) -> None:
    """Check that trimming leaves a site."""
    if sites <= 2 * trim:
        raise UserError(f"trim: {trim} at each end leaves none of {sites} sites; lower it")


def squared_distances(models: Models, at_once: int = AT_ONCE) -> Tensor:
    """The squared Euclidean distances between all models, over their float tensors, in float64.

    Differences are taken before they are squared, so a huge model does not blur the distances between the others.
    """
    like, count = _check_models(models)
    total = torch.zeros(count, count, dtype=torch.float64)
    floats = {name: tensor for name, tensor in like.items() if tensor.is_floating_point()}
    for _, _, stack in _side_by_side(models, floats, count, at_once):
        for columns in torch.split(stack, _COLUMNS, dim=1):
            numbers = columns.double()
            for row in range(count - 1):
                total[row, row + 1 :] += (numbers[row + 1 :] - numbers[row]).square().sum(dim=1).cpu()
    return total + total.T


def krum_scores(distances: Tensor, faulty: int) -> list[float]:
    """Krum's score of each model: the sum of its n − f − 2 smallest squared distances to the others (section 4).

    Blanchard, El Mhamdi, Guerraoui, Stainer: Machine Learning with Adversaries. NeurIPS 2017.
    """
    count = len(distances)
    check_krum(count, faulty)
    others = distances.masked_fill(torch.eye(count, dtype=torch.bool), math.inf).sort(dim=1).values
    return [math.fsum(row[: count - faulty - 2]) for row in others.tolist()]


def krum(distances: Tensor, faulty: int, keep: int = 1) -> list[int]:
    """Which models Krum (``keep`` 1) or multi-Krum takes: those with the smallest scores."""
    scores = krum_scores(distances, faulty)
    check_krum(len(scores), faulty, keep)
    return sorted(range(len(scores)), key=lambda index: scores[index])[:keep]


def check_krum(sites: int, faulty: int, keep: int = 1) -> None:
    """Check that there are enough sites for Krum, and that ``keep`` need not take a bad one."""
    if sites < 2 * faulty + 3:
        raise UserError(
            f"faulty: {faulty} bad sites need 2·{faulty} + 3 = {2 * faulty + 3} sites, there are {sites}; lower it"
        )
    if not 1 <= keep <= sites - faulty:
        raise UserError(f"keep: {keep} of {sites} sites with {faulty} bad ones; 1 to {sites - faulty} can be kept")


def update_norm(model: Mapping[str, Tensor], centre: Mapping[str, Tensor]) -> float:
    """``‖model − centre‖₂`` over the float tensors of ``model``, in float64."""
    return math.sqrt(_product(model, centre, model))


def lower_median(values: Sequence[float]) -> float:
    """The median; of an even count the lower of the two in the middle, so that a half cannot raise it."""
    return sorted(values)[(len(values) - 1) // 2]


def clip_factor(norm: float, bound: float) -> float:
    """``min(1, bound / norm)``: what an update of this norm is multiplied by (Sun et al., 2019, section 4).

    Sun, Kairouz, Suresh, McMahan: Can You Really Backdoor Federated Learning? arXiv 1911.07963.
    """
    return 1.0 if norm <= bound else bound / norm


def move_towards(centre: Mapping[str, Tensor], model: Mapping[str, Tensor], factor: float) -> Weights:
    """``centre + factor · (model − centre)`` for the float tensors of ``model``; integers are the model's.

    A factor of 1 gives the model itself, bit for bit.
    """
    if factor == 1:
        return Weights(model)
    return Weights(
        {
            name: torch.lerp(centre[name].double(), tensor.double(), factor).to(tensor.dtype)
            if tensor.is_floating_point()
            else tensor
            for name, tensor in model.items()
        }
    )


def trust_score(model: Mapping[str, Tensor], trusted: Mapping[str, Tensor], centre: Mapping[str, Tensor]) -> float:
    """FLTrust's trust in a site: the cosine between its update and the trusted one, or 0 where that is negative.

    Cao, Fang, Liu, Gong: FLTrust: Byzantine-robust Federated Learning via Trust Bootstrapping. NDSS 2021, equation 2.
    """
    norms = update_norm(model, centre) * update_norm(trusted, centre)
    return min(1.0, max(0.0, _product(model, centre, trusted) / norms)) if norms else 0.0


def _product(first: Mapping[str, Tensor], centre: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> float:
    """The inner product of two updates around ``centre``, over float tensors."""
    parts = []
    for name, tensor in first.items():
        if tensor.is_floating_point():
            pairs = zip(float64_chunks(tensor, centre[name]), float64_chunks(second[name], centre[name]), strict=True)
            parts += [torch.dot(left - middle, right - middle).item() for (left, middle), (right, _) in pairs]
    return math.fsum(parts)


def _by_coordinate(models: Models, rule: Callable[[Tensor], Tensor], at_once: int) -> Weights:
    """The model whose every number is ``rule`` of the sites' numbers there, a column of (n, columns) in float64."""
    like, count = _check_models(models)
    result = {name: torch.empty(tensor.shape, dtype=tensor.dtype) for name, tensor in like.items()}
    for name, begin, stack in _side_by_side(models, like, count, at_once):
        whole = result[name].view(-1)
        for columns in torch.split(stack, _COLUMNS, dim=1):
            value = (
                rule(columns.double()) if columns.is_floating_point() else columns.sort(dim=0).values[(count - 1) // 2]
            )
            whole[begin : begin + columns.shape[1]] = value.to(columns.dtype)
            begin += columns.shape[1]
    return Weights(result)


def _check_models(models: Models) -> tuple[dict[str, Tensor], int]:
    """Tensors of the models' shapes and types without memory, and how many models there are."""
    like: dict[str, Tensor] = {}
    count = 0
    for model in models:
        if count:
            Weights(model).check_like(like, f"model {count}")
        else:
            like = {name: torch.empty_like(tensor, device="meta") for name, tensor in model.items()}
        count += 1
    if not count:
        raise UserError("there is no model to aggregate: not one site replied")
    return like, count


def _side_by_side(
    models: Models, like: Mapping[str, Tensor], count: int, at_once: int
) -> Iterator[tuple[str, int, Tensor]]:
    """Pieces of all models side by side: the tensor's name, where the piece begins in it, and (n, numbers).

    Each pass over the models reads as many pieces as fit into ``at_once`` bytes.
    """
    batch: list[tuple[str, int, int]] = []
    room = at_once
    for name, tensor in like.items():
        begin, row = 0, count * tensor.element_size()
        while begin < tensor.numel():
            if room < row and batch:
                yield from _read_pieces(models, like, count, batch)
                batch, room = [], at_once
            end = min(tensor.numel(), begin + max(1, room // row))
            batch.append((name, begin, end))
            room -= (end - begin) * row
            begin = end
    yield from _read_pieces(models, like, count, batch)


def _read_pieces(
    models: Models, like: Mapping[str, Tensor], count: int, batch: Sequence[tuple[str, int, int]]
) -> Iterator[tuple[str, int, Tensor]]:
    """Read these pieces of every tensor, ``(name, begin, end)``, in one pass."""
    stacks = [torch.empty(count, end - begin, dtype=like[name].dtype) for name, begin, end in batch]
    for row, model in enumerate(models):
        for stack, (name, begin, end) in zip(stacks, batch, strict=True):
            stack[row] = model[name].reshape(-1)[begin:end]
    for stack, (name, begin, _) in zip(stacks, batch, strict=True):
        yield name, begin, stack
