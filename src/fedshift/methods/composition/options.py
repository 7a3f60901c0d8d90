"""The options that every method has: its label and setting, and what it is composed with."""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, ClassVar, Self

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
from fedshift.federation.site import PlugIn, Site
from fedshift.federation.training import Training
from fedshift.methods.composition.averaging import AverageOption, Averaging, LastRounds
from fedshift.methods.composition.local import PLUG_INS, LocalPlugIns
from fedshift.methods.composition.new_site import NewSite
from fedshift.methods.composition.plug_in import LocalOption
from fedshift.methods.composition.training_changes import TrainingChanges
from fedshift.methods.robust import RULES, RobustAggregation, unfit
from fedshift.methods.server import ServerOptimizer
from fedshift.methods.settings import PAPER, described, with_setting
from fedshift.methods.symbols import with_names
from fedshift.methods.traits import Traits

_OF_TRAITS = frozenset(field.name for field in fields(Traits)) | {"scenario", "needs_target"}


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

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        if self.robust is not None:
            reason = unfit(type(self.robust), self.traits.averages)
            if reason:
                others = " or ".join(robust_rules(self))
                raise ValueError(f"robust: {self.name} {reason}; " + (f"choose {others}" if others else "leave it out"))
        if self.server is not None and not self.traits.averages:
            raise ValueError(f"server: {self.name} averages no models of sites, so there is no step; leave it out")
        if self.average is not None and self.average_rounds > 1:
            raise ValueError("average: average_rounds is an average over rounds, too; choose one of the two")
        return self

    @model_validator(mode="after")
    def _plug_ins_fit(self) -> Self:
        if self.local and not self.traits.takes_plug_ins:
            raise ValueError(f"local: {self.name} trains several networks, and plug-ins act on one; leave it out")
        names = [plug_in.name for plug_in in self.local]
        if len(set(names)) < len(names):
            raise ValueError("local: a plug-in occurs twice")
        if not self.traits.pooled and any(plug_in.of_two_domains for plug_in in self.local):
            raise ValueError("local: partners: cross_domain is for samples of all domains in one place; leave it out")
        for name in names:
            if name in self.traits.unfit_plug_ins:
                raise ValueError(
                    f"local: {name} does not go with {self.name}, {self.traits.unfit_plug_ins[name]}; leave it out"
                )
        return self

    @model_serializer(mode="wrap")
    def _as_before(self, plain: SerializerFunctionWrapHandler) -> dict[str, Any]:
        written: dict[str, Any] = plain(self)
        if self.training is None:  # private noise is drawn from the settings, which are those of earlier runs
            written.pop("training", None)
        return written

    def own_training(self, training: Training) -> Training:
        """How its sites train in an experiment with this training section.

        Raises:
            ValidationError: the method's changes do not go with it.
        """
        return training if self.training is None else self.training.on(training)

    @property
    def averaging(self) -> Averaging:
        """How the rounds' models become the one that is handed out."""
        return self.average or LastRounds(rounds=self.average_rounds)

    @property
    def kept_at_sites(self) -> tuple[str, ...]:
        """What sites keep between exchanges, for the method and for its plug-ins."""
        return (
            *self.traits.memory_names,
            *(name for plug_in in self._plug_in_options for name in plug_in.memory_names),
        )

    def plug_ins(self, site: Site) -> tuple[PlugIn, ...]:
        """The plug-ins at work in one exchange. A target without labels has none."""
        if site.role != "source":
            return ()
        return tuple(plug_in.at(site) for plug_in in self.local_for(site.data.input_shape))

    def local_for(self, input_shape: tuple[int, ...]) -> tuple[LocalOption, ...]:
        """The plug-ins for samples of this shape: those of ``local``, and what a method adds by itself."""
        return self._plug_in_options

    @property
    def _plug_in_options(self) -> tuple[LocalOption, ...]:
        """The plug-ins of ``local``, and nearest to the loss those of a preset that ``local`` does not name."""
        named = {plug_in.name for plug_in in self.local}
        kinds = [PLUG_INS[name] for name in self.traits.includes if name not in named]
        options = [{name: getattr(self, name) for name in kind.model_fields if name != "name"} for kind in kinds]
        return (*self.local, *(kind.model_validate(given) for kind, given in zip(kinds, options, strict=True)))

    def new_site_for(self, input_shape: tuple[int, ...]) -> NewSite:
        """What the network takes from an unseen site's samples of this shape."""
        return NewSite(self.batch_norm_at_new_site, self.classifier_at_new_site)

    @property
    def composition(self) -> tuple[str, ...]:
        """What it is composed with, in short names."""
        return (
            *(plug_in.name for plug_in in self.local),
            *((self.server.optimizer,) if self.server is not None else ()),
            *((self.robust.rule,) if self.robust is not None else ()),
            *((self.average.kind,) if self.average is not None else ()),
            *((f"mean{self.average_rounds}",) if self.average_rounds > 1 else ()),
            *(("newsite",) if self.batch_norm_at_new_site is not None else ()),
            *(("newclassifier",) if self.classifier_at_new_site is not None else ()),
            *((f"exchanges{self.exchanges_per_epoch}",) if self.exchanges_per_epoch > 1 else ()),
        )

    @property
    def display(self) -> str:
        """The name in tables and folders: the label, or all that it is made of, as in ``csac-released+swa``."""
        own = self.name if self.setting == PAPER else f"{self.name}-{self.setting}"
        return self.label or "+".join((own, *self.composition))

    @property
    def described_setting(self) -> str:
        """The setting and what differs from it, as records name it: ``paper with mixup 0``."""
        return described(type(self), self.traits.settings, self.model_dump(mode="json"))


def robust_rules(method: Composed) -> tuple[str, ...]:
    """The rules of robust aggregation that go with a method."""
    return tuple(name for name, rule in RULES.items() if not unfit(rule, method.traits.averages))
