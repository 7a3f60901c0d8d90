"""The options that every method has: its label and setting, and what it is composed with."""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveInt,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from fedshift.errors import UserError
from fedshift.federation.training import Training
from fedshift.methods.composition.averages import AverageOption, Averaging, LastRounds
from fedshift.methods.composition.local import PLUG_INS, LocalPlugIns
from fedshift.methods.composition.new_site import NewSite
from fedshift.methods.composition.plug_in import LocalOption
from fedshift.methods.composition.preparation import Preparation
from fedshift.methods.composition.prepare import PREPARATIONS, PreparationOption
from fedshift.methods.composition.training_changes import TrainingChanges
from fedshift.methods.robust import RULES, RobustAggregation, unfit
from fedshift.methods.server import ServerOptimizer
from fedshift.methods.settings import PAPER, setting_name, with_setting
from fedshift.methods.symbols import with_names
from fedshift.methods.traits import Traits
from fedshift.weights import Weights

P = TypeVar("P", LocalOption, Preparation)
_LATER = ("training", "prepare")
"""Fields that are not written where they are none: private noise is drawn from the settings, as in earlier runs."""
_OF_TRAITS = frozenset(field.name for field in fields(Traits)) | {"scenario", "needs_target"}


@dataclass(frozen=True)
class AtSites:
    """What is composed at sites."""

    local: tuple[LocalOption, ...]  # plug-ins of the sites' training
    new_site: NewSite  # what the network takes from an unseen site's samples


@dataclass(frozen=True)
class AtServer:
    """What is composed at the server."""

    optimizer: ServerOptimizer  # its step after a round; None: the model is what the method made
    average: Averaging  # how the rounds' models become the one that is handed out


class Composed(BaseModel, ABC):
    """Base of `Method` with what is the same for all: each option is carried out by the run or by the site, and no
    method has code for it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    traits: ClassVar[Traits] = Traits()
    name: ClassVar[str] = ""

    label: str | None = Field(None, description="name in tables and folders; needed when a method appears twice")
    setting: str = Field(PAPER, description="named values of its own options; options given beside it win")

    average_rounds: PositiveInt = Field(
        1, description="the model that is measured and handed out is the mean of those of the last so many rounds"
    )
    average: AverageOption = Field(
        None, description="another average over rounds: swa, ema or swad; see fedshift fields average"
    )
    server: ServerOptimizer = Field(
        None, description="an optimiser of the server, such as momentum: see fedshift fields server"
    )
    robust: RobustAggregation = Field(
        None, description="a rule that bad sites cannot pull away, such as median: see fedshift fields robust"
    )
    batch_norm_at_new_site: NonNegativeInt | None = Field(
        None,
        description="N: an unseen site uses statistics of its own samples in BatchNorm, mixed with the trained ones as "
        "N samples would be (16 suits most); it needs no labels. none: the trained statistics",
    )
    classifier_at_new_site: NonNegativeInt | None = Field(
        None,
        description="N: an unseen site's classifier turns towards the features of its own samples, a trained row "
        "counting for N samples of its class (16 suits most); it needs no labels. none: the trained classifier",
    )
    exchanges_per_epoch: PositiveInt = Field(
        1,
        description="where the method trains for an epoch between two exchanges, it trains on this part of one; so "
        "there are as many times more rounds with the same work",
    )
    local: LocalPlugIns = Field(
        (), description="plug-ins of the sites' training, such as [mixstyle]: see fedshift fields local"
    )
    prepare: PreparationOption = Field(
        None, description="what sources do with their samples before they train: styles, see fedshift fields prepare"
    )
    training: TrainingChanges | None = Field(
        None,
        description="fields of the training section that are otherwise for this method, such as {lr: 0.1}: see "
        "fedshift fields training",
    )

    @classmethod
    def __pydantic_init_subclass__(cls, **options: Any) -> None:
        for name in vars(cls).keys() & _OF_TRAITS:
            raise UserError(
                f"{cls.__module__}: {cls.__name__}.{name} belongs to its traits: write "
                f"traits = {cls.__bases__[0].__name__}.traits.derive({name}=…)"
            )
        cls.name = cls.traits.name

    def adjust_traits(self, traits: Traits) -> Traits:
        """The traits with these options; a method overrides it where an option changes one."""
        return traits

    @model_validator(mode="before")
    @classmethod
    def _options_of_the_setting(cls, options: Any) -> Any:
        if not isinstance(options, Mapping):
            return options
        return with_setting(cls.traits.settings, with_names(cls, options))

    @model_serializer(mode="wrap")
    def _as_before(self, plain: SerializerFunctionWrapHandler) -> dict[str, Any]:
        written: dict[str, Any] = plain(self)
        for name in _LATER:
            if getattr(self, name) is None:
                written.pop(name, None)
        return written

    def at_sites(self, input_shape: tuple[int, ...]) -> AtSites:
        """What the options compose at sites with samples of this shape."""
        return AtSites(plug_ins_of(self), NewSite(self.batch_norm_at_new_site, self.classifier_at_new_site))

    def at_server(self, model: Weights) -> AtServer:
        """What the options compose at the server of a ``model`` with these tensors."""
        return AtServer(self.server, self.average or LastRounds(rounds=self.average_rounds))

    @property
    def display(self) -> str:
        """The name in tables and folders: the label, or all that it is made of, as in ``csac-released+swa``."""
        name = self.name if self.setting == PAPER else f"{self.name}-{self.setting}"
        return self.label or "+".join((name, *composition_of(self)))


# What follows from the options ----------------------------------------------------------------------------------------


def plug_ins_of(method: Composed) -> tuple[LocalOption, ...]:
    """The plug-ins of ``local``, and nearest to the loss those of a preset that ``local`` does not name."""
    named = {plug_in.name for plug_in in method.local}
    return (
        *method.local,
        *(_build_included(method, kind) for name, kind in _kinds(method, PLUG_INS) if name not in named),
    )


def preparation_of(method: Composed) -> Preparation | None:
    """What goes before training: that of ``prepare``, or that of a preset."""
    included = [_build_included(method, kind) for _, kind in _kinds(method, PREPARATIONS)]
    return method.prepare or (included[0] if included else None)


def _kinds(method: Composed, kinds: Mapping[str, type[P]]) -> list[tuple[str, type[P]]]:
    """Those of ``kinds`` that a preset includes."""
    return [(name, kinds[name]) for name in method.traits.includes if name in kinds]


def _build_included(method: Composed, kind: type[P]) -> P:
    """What a preset includes, with the options that are its fields."""
    return kind.model_validate({name: getattr(method, name) for name in kind.model_fields if name != "name"})


def training_of(method: Composed, training: Training) -> Training:
    """How a method's sites train in an experiment with this training section.

    Raises ValidationError: the method's changes do not go with it.
    """
    return training if method.training is None else method.training.on(training)


def composition_of(method: Composed) -> tuple[str, ...]:
    """What a method is composed with, in short names."""
    tuned = type(method).model_fields.get("fine_tune")
    return (
        *((method.prepare.name,) if method.prepare is not None else ()),
        *(plug_in.name for plug_in in method.local),
        *((method.server.optimizer,) if method.server is not None else ()),
        *((method.robust.rule,) if method.robust is not None else ()),
        *((method.average.kind,) if method.average is not None else ()),
        *((f"mean{method.average_rounds}",) if method.average_rounds > 1 else ()),
        *(("newsite",) if method.batch_norm_at_new_site is not None else ()),
        *(("newclassifier",) if method.classifier_at_new_site is not None else ()),
        *((f"exchanges{method.exchanges_per_epoch}",) if method.exchanges_per_epoch > 1 else ()),
        *(("tuned",) if tuned is not None and getattr(method, "fine_tune", None) not in (None, tuned.default) else ()),
    )


def described_setting(method: Composed) -> str:
    """The setting and what differs from it, as records name it: ``paper with mixup 0``."""
    return setting_name(type(method), method.traits.settings, method.model_dump(mode="json"))


def check_options(method: Composed) -> None:
    """Check that a method's options go with each other and with its traits. Raises ValueError: they do not."""
    _server_fits(method)
    _plug_ins_fit(method)
    _preparation_fits(method)


def _server_fits(method: Composed) -> None:
    if method.robust is not None:
        reason = unfit(type(method.robust), method.traits.averages)
        if reason:
            others = " or ".join(robust_rules(method))
            raise ValueError(f"robust: {method.name} {reason}; " + (f"choose {others}" if others else "leave it out"))
    if method.server is not None and not method.traits.averages:
        raise ValueError(f"server: {method.name} averages no models of sites, so there is no step; leave it out")
    if method.average is not None and method.average_rounds > 1:
        raise ValueError("average: average_rounds is an average over rounds, too; choose one of the two")


def _plug_ins_fit(method: Composed) -> None:
    if method.local and not method.traits.takes_plug_ins:
        raise ValueError(f"local: {method.name} trains several networks, and plug-ins act on one; leave it out")
    names = [plug_in.name for plug_in in method.local]
    if len(set(names)) < len(names):
        raise ValueError("local: a plug-in occurs twice")
    if not method.traits.pooled and any(plug_in.of_two_domains for plug_in in method.local):
        raise ValueError("local: partners: cross_domain is for samples of all domains in one place; leave it out")
    for name in names:
        if name in method.traits.unfit_plug_ins:
            raise ValueError(
                f"local: {name} does not go with {method.name}, {method.traits.unfit_plug_ins[name]}; leave it out"
            )


def _preparation_fits(method: Composed) -> None:
    if method.prepare is None:
        return
    if method.traits.pooled or method.traits.target == "labelled":
        raise ValueError(f"prepare: {method.name} does not train at source sites; choose a federated method")
    if any(name in PREPARATIONS for name in method.traits.includes):
        raise ValueError(f"prepare: {method.name} prepares its samples already; leave it out")


def robust_rules(method: Composed) -> tuple[str, ...]:
    """The rules of robust aggregation that go with a method."""
    return tuple(name for name, rule in RULES.items() if not unfit(rule, method.traits.averages))
