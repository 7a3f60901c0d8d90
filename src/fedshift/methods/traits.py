"""What a method is, in one value: where it is from, what it learns from, what its server reads, what goes with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, Protocol, get_args

from fedshift.data.domain import ALL_TASKS, Task
from fedshift.errors import UserError, nearest
from fedshift.federation.exchange import Routed
from fedshift.methods.index import Group, Reads
from fedshift.methods.method_tests import MethodTests
from fedshift.methods.robust import Averages
from fedshift.methods.settings import Settings

Target = Literal["unseen", "unlabelled", "one unlabelled", "labelled"]
"""What a method trains on of the target."""
_OF_ONE_CLASS = ("citation", "group", "advice", "sends", "sites", "needs_classes", "small", "trains_privately")


class HasTraits(Protocol):
    """A method: where an option changes a trait, `adjust_traits` says so."""

    def adjust_traits(self, traits: Traits) -> Traits: ...


@dataclass(frozen=True, kw_only=True)
class Traits:
    """What is fixed for a method's class. ``method.traits`` of an object has them with its options.

    Attributes:
        name: in experiment files.
        citation: authors, where it was published, and the year.
        group: the list of ``fedshift methods`` that it stands in.
        advice: what it is for, and what was measured; every number stands in a table of ``benchmarks``.
        sends: what leaves a site, in words.
        keeps: what stays at each site and predicts there, in words; the common model does the rest.
        no_new_site: whether a site that took no part has nothing to predict with, since each keeps a part of the model
            that no other knows.
        sites: which sites take part, where ``target`` does not say it.
        settings: named values of the options beside the paper's.
        small: options with which a test is short.
        tests: what tests try beside it; a subclass inherits what is tried of each option.
        tasks: what it can learn.
        needs_classes: why it is for classification alone.
        target: what it trains on of the target: nothing (``unseen``), its samples without labels (``one unlabelled``
            where there must be exactly one), or its labels (``labelled``, an upper bound).
        pooled: whether all data lie in one place.
        uses_held_out: whether sites choose by their held-out parts.
        memory_names: what a site keeps between exchanges.
        averages: the calls whose models it averages over sites. Robust aggregation can screen them, and a server's
            optimiser can follow.
        server_reads: what the server's code reads of the replies that hold models: ``sums`` (``replies.mean``) can be
            hidden by secure aggregation; ``norms`` are sums and numbers of single sites; ``models`` are single models.
        sums_per_model: how many different sums of the same models every site learns in a round. With S of them a site
            can solve for the models of S others, so secure aggregation needs S + 2 sites.
        routed: the calls whose replies hold models that the server hands on or keeps and does not read, so that they
            can be sealed for those who do (``engine.routing: sealed``).
        reads_sealed: what the server still reads then.
        asked_once: the calls that ask about a model that a site keeps, and its name in the site's memory. With secure
            aggregation a site answers such a call once for each model, because repeated answers would reveal it.
        takes_plug_ins: whether it takes plug-ins of local training: its sites train one network with `Site.minimise`.
        includes: the plug-ins that make a preset of the method that it derives from; their options are its fields.
        unfit_plug_ins: plug-ins that do not go with it, and why: "which …".
        trains_privately: whether it takes ``training.privacy``: its sites train with `Site.minimise` alone, send
            nothing else that is computed from samples, and its loss is a mean over samples and a ``regulariser``.
        thaws: whether it goes with ``training.thaw_after``; not if it needs gradients of the features at all times.
        own_gradients: whether its sites take gradients or steps beside those of `Site.minimise`. It then goes with
            neither ``training.compile``, which has no second gradients, nor fp16, whose losses `Site.minimise` scales.
        relative_cost: seconds of a mini-batch beside plain cross-entropy, a rough guide for estimates.
    """

    name: str = ""
    citation: str = ""
    group: Group | None = None
    advice: str = ""
    sends: str = ""
    keeps: str = ""
    no_new_site: bool = False
    sites: str = ""
    settings: Settings = field(default_factory=dict)
    small: Mapping[str, Any] = field(default_factory=dict)
    tests: MethodTests = field(default_factory=MethodTests)
    tasks: tuple[Task, ...] = ("classification",)
    needs_classes: str = ""
    target: Target = "unseen"
    pooled: bool = False
    uses_held_out: bool = False
    memory_names: tuple[str, ...] = ("optimizer",)
    averages: Averages = field(default_factory=dict)
    server_reads: Reads = "models"
    sums_per_model: int = 1
    routed: Mapping[str, Routed] = field(default_factory=dict)
    reads_sealed: str = ""
    asked_once: Mapping[str, str] = field(default_factory=dict)
    takes_plug_ins: bool = True
    includes: tuple[str, ...] = ()
    unfit_plug_ins: Mapping[str, str] = field(default_factory=dict)
    trains_privately: bool = False
    thaws: bool = True
    own_gradients: bool = False
    relative_cost: float = 1.0

    def __post_init__(self) -> None:
        given: dict[str, tuple[str, ...]] = {
            "tasks": self.tasks,
            "target": (self.target,),
            "server_reads": (self.server_reads,),
            "group": () if self.group is None else (self.group,),
        }
        for trait, words in given.items():
            for word in words:
                if word not in _WORDS[trait]:
                    raise UserError(
                        f"traits: {self.name}.{trait}: there is no '{word}'; {nearest(word, _WORDS[trait])}"
                    )

    def __get__(self, method: HasTraits | None, kind: type[HasTraits]) -> Traits:
        # A descriptor, so that an object's traits are those with its options wherever they are asked for.
        return self if method is None else method.adjust_traits(self)

    @property
    def needs_target(self) -> bool:
        """Whether the target's samples take part in training."""
        return self.target != "unseen"

    @property
    def scenario(self) -> str:
        """Which sites take part, and whether their data are pooled."""
        return (self.sites or _SITES[self.target]) + (", pooled" if self.pooled else "")

    def derive(self, *, tests: MethodTests | None = None, **changes: Any) -> Traits:
        """The traits of a class derived from the one that has these.

        What is said of one class alone begins anew: its citation and advice, its options for tests, and whether it
        trains privately, which a subclass must look at again.

        Example:
            >>> traits = Traits(name="fedavg", server_reads="sums", trains_privately=True)
            >>> mine = traits.derive(name="mine")
            >>> mine.server_reads, mine.trains_privately
            ('sums', False)

        Raises:
            UserError: there is no such trait, or it has no such value.
        """
        for name in changes.keys() - _NAMES:
            raise UserError(f"traits: there is no '{name}'; {nearest(name, _NAMES)}")
        blank = Traits()
        inherited = self.tests.derive(tests or blank.tests)
        return replace(self, **{name: getattr(blank, name) for name in _OF_ONE_CLASS} | changes, tests=inherited)


_NAMES = frozenset(each.name for each in fields(Traits))
_WORDS: Mapping[str, tuple[str, ...]] = {
    "tasks": ALL_TASKS,
    "target": get_args(Target),
    "server_reads": get_args(Reads),
    "group": get_args(Group),
}
_SITES: Mapping[Target, str] = {
    "unseen": "unseen target",
    "unlabelled": "target without labels",
    "one unlabelled": "target without labels",
    "labelled": "target with labels, an upper bound",
}
