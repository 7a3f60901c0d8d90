"""What every method is: a frozen description of its hyper-parameters, server code, and the calls that sites run."""

from __future__ import annotations

import functools
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, Self, TypeVar, cast, runtime_checkable

from pydantic import model_validator

from fedshift.errors import FedshiftError
from fedshift.federation.exchange import Replies, Routed
from fedshift.federation.federation import Federation
from fedshift.federation.messages import KINDS, NUMBERS, Content, Number, Reply, Update, promised_kinds, reply_class
from fedshift.federation.replies import About, Bounds
from fedshift.federation.site import LocalFit, PlugIn, Site
from fedshift.import_paths import place_of
from fedshift.methods.composition.averages import Kept
from fedshift.methods.composition.options import Composed, check_options, plug_ins_of, preparation_of
from fedshift.methods.composition.preparation import Preparation
from fedshift.methods.index import Reads
from fedshift.models.network import Network
from fedshift.weights import Weights


@dataclass(frozen=True)
class State:
    """The state of a run after a round. It is plain data, so a run can be resumed from its file.

    Attributes:
        weights: the model that is evaluated and handed out.
        parts: further content that travels or is kept (a generator, a bank of statistics).
        numbers: small values, such as a threshold.
        report: what the round writes to ``rounds.jsonl``; the next round starts with an empty one. Its ``warnings``, a
            list of sentences, are also shown once and kept in the run's result.
        averaged: what the average over rounds remembers; the run keeps it.
        server: what the server's optimiser remembers; the run keeps it.
    """

    weights: Weights
    round: int = 0
    parts: Mapping[str, Content] = field(default_factory=dict)
    numbers: Mapping[str, Number] = field(default_factory=dict)
    report: Mapping[str, Any] = field(default_factory=dict)
    averaged: Kept = field(default_factory=Kept)
    server: Mapping[str, Weights] = field(default_factory=dict)

    def advance(self, weights: Weights, *, report: Mapping[str, Any] | None = None, **changes: Any) -> State:
        """The state after one more round."""
        return replace(self, weights=weights, round=self.round + 1, report=report or {}, **changes)


@dataclass(frozen=True)
class Traffic:
    """Bytes that leave all sites (up) and reach them (down) in a whole run."""

    up: int
    down: int

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.up + other.up, self.down + other.down)


@dataclass(frozen=True)
class RunPlan:
    """What the bytes of a run depend on.

    Attributes:
        dry: bytes of a dry run of as many rounds, in which sites have few samples and no mini-batches.
        dry_samples: those samples by source.
        network: what sites train.
        input_shape: of a sample.
        samples: training samples by source.
        targets: sites without labels that take part.
        rounds: of the run.
        trained: samples in the mini-batches of the whole run, all sites together.
        sums_only: whether models leave as contributions to sums (secure aggregation).
    """

    dry: Traffic
    dry_samples: Mapping[str, int]
    network: Network
    input_shape: tuple[int, ...]
    samples: Mapping[str, int]
    targets: int
    rounds: int
    trained: int
    sums_only: bool = False


@dataclass(frozen=True)
class Samples:
    """The training samples of an experiment.

    Attributes:
        shape: of one.
        tokens: whether they are tokens, with which nobody can calculate.
        epochs: source → mini-batches of an epoch, in the split in which it has the fewest.
        are_pixels: whether their values go from black to white, as those of images do.
        parts: whether a mini-batch has parts of them.
    """

    shape: tuple[int, ...]
    epochs: Mapping[str, int] = field(default_factory=dict)
    tokens: bool = False
    are_pixels: bool = True
    parts: bool = False


PERSONAL = "personal"
"""The entry of a site's memory with those tensors of a model that predict at this site alone. They never leave it."""
U = TypeVar("U", bound=Update)
Trained = Callable[[int, int], int]
"""Mini-batches of an epoch, and rounds → the mini-batches of a run."""


class Method(Composed, ABC):
    """Base of all methods. A subclass names itself, declares its hyper-parameters as fields, and writes `round`,
    `mini_batches` and what its sites run.

    Every site runs functions ``(self, site, **content) -> Reply`` of the class; `round` asks for them by
    ``federation.ask(self.fit, …)``.

    Attributes:
        traits: what is fixed for the class: its name, citation, tasks, what its server reads, what goes with it.
    """

    @model_validator(mode="after")
    def _options_fit(self) -> Self:
        check_options(self)
        _epochs_to_divide(self)
        return self

    @abstractmethod
    def round(self, federation: Federation, state: State) -> State:
        """One round: talk to the sites, return the next state."""

    @abstractmethod
    def mini_batches(self, batches_per_epoch: int, rounds: int) -> int:
        """How much a source trains in a whole run, what comes before the first round included.

        Args:
            batches_per_epoch: mini-batches in one pass over its data.
            rounds: rounds of the run.

        Returns:
            Mini-batches.
        """

    def target_mini_batches(self, batches_per_epoch: int, rounds: int) -> int:
        """`mini_batches` for a target without labels; most methods do not train there."""
        return 0

    def traffic(self, plan: RunPlan) -> Traffic:
        """Bytes of a run, for `fedshift check`: by default those of a dry run.

        Override it if the bytes depend on the number of samples, or on what is trained.
        """
        return plan.dry

    def start(self, federation: Federation, weights: Weights) -> State:
        """The state before the first round, from the common start ``weights``."""
        return State(weights)

    def check(self, network: Network) -> None:
        """Check that the options fit the network, before any training.

        Raises:
            UserError: they do not.
        """

    def check_samples(self, samples: Samples) -> tuple[str, ...]:
        """Check that the options fit the training samples, before any training.

        Returns:
            Warnings.

        Raises:
            UserError: the method cannot work on such samples.
        """
        return ()

    def adapt_network(self, network: Network, sources: int) -> Network:
        """The network that sites train, made from the experiment's for so many source domains; by default the same."""
        return network

    def evaluated_network(self, network: Network, sources: int) -> Network:
        """The network that predicts, made from the one that sites train. It takes ``state.weights``.

        It maps a batch of inputs to class scores (n, classes), whose softmax is the probabilities. If another
        network predicts at the sources, its ``at`` gives that of a source.
        """
        return network

    def bounds(self, call: str, about: About) -> Bounds:
        """What a site's reply to one of its calls may hold, where only the method knows: shapes and ranges, by field.

        Models need not be declared. A model that the site was sent must come back with the same tensors. A model that
        it was not sent must be the network, or look as at most sites. Other undeclared tensors must be finite.
        """
        return {}

    def own_weights(self, weights: Weights, memory: Mapping[str, Content]) -> Weights:
        """What predicts at a site that trained, from the published model and what the site remembers; by default the
        published model with what the site keeps under `PERSONAL` in place of its own tensors.

        It has the tensors of ``weights``. A site that has not trained yet remembers nothing.
        """
        kept = memory.get(PERSONAL)
        return weights.merge(kept) if isinstance(kept, Weights) else weights

    def personalise(self, federation: Federation, weights: Weights) -> None:
        """What sites do with the run's model after the last round, each for itself; by default nothing.

        It comes beside the budget of mini-batches, and every site is asked, drawn for the last round or not.
        """

    def personal(self, weights: Weights) -> Collection[str]:
        """Parameters of the common model that each site has of its own. A server's optimiser leaves them alone."""
        return ()

    @property
    def calls(self) -> Calls:
        """Its calls, as engines run them at sites."""
        return Calls(self)


def _promised_by(kind: type) -> set[str]:
    """Kinds of content that the calls of a class promise to return."""
    return {kind for reply in calls_of(kind).values() for kind in promised_kinds(reply).values()}


@dataclass(frozen=True)
class Calls:
    """A method's calls, as engines run them at sites: with its plug-ins, and after its preparation of the samples."""

    method: Method

    @property
    def shares(self) -> tuple[str, ...]:
        """Kinds of content that leave a site: numbers, what the calls promise to return, a model where they promise
        nothing, and for a pooled method the samples."""
        promised, prepared = _promised_by(type(self.method)) - {NUMBERS} or {"weights"}, preparation_of(self.method)
        before = set() if prepared is None else _promised_by(type(prepared))
        return in_order({NUMBERS, *promised, *before, *({"raw_data"} if self.method.traits.pooled else ())})

    def has(self, call: Callable[..., Any]) -> bool:
        """Whether a function is a call of the method, or of its preparation."""
        owner = getattr(call, "__self__", None)
        return owner is self.method or (isinstance(owner, Preparation) and owner == preparation_of(self.method))

    def owner(self, call: str) -> Method | Preparation:
        """What has the call of this name: the method, or its preparation."""
        prepared = preparation_of(self.method)
        return self.method if prepared is None or call not in calls_of(type(prepared)) else prepared

    def routing(self, call: str) -> Routed | None:
        """How the models of its replies are handed on; None: the server reads them."""
        return self.method.traits.routed.get(call)

    def run(self, call: str, site: Site, content: Mapping[str, Any]) -> Reply:
        """Run a call at a site."""
        owner, prepared = self.owner(call), preparation_of(self.method)
        around = nullcontext() if prepared is None or owner is prepared else prepared.inside(site)
        with around:
            reply: Reply = getattr(owner, call)(site, **content)
        return reply

    @property
    def kept_at_sites(self) -> tuple[str, ...]:
        """What sites keep between exchanges, for the method and for what it is composed with."""
        prepared = preparation_of(self.method)
        parts = (*plug_ins_of(self.method), *(() if prepared is None else (prepared,)))
        return (*self.method.traits.memory_names, *(name for part in parts for name in part.memory_names))

    @property
    def keep_own_weights(self) -> bool:
        """Whether a site that trained predicts with a model of its own."""
        return PERSONAL in self.method.traits.memory_names or type(self.method).own_weights is not Method.own_weights

    def plug_ins(self, site: Site) -> tuple[PlugIn, ...]:
        """The plug-ins at work in one exchange. A target without labels has none."""
        if site.role != "source":
            return ()
        return tuple(plug_in.at(site) for plug_in in self.method.at_sites(site.data.input_shape).local)

    @property
    def come_in_parts(self) -> bool:
        """Whether every call comes `in_parts`, so that sites can train side by side."""
        return isinstance(self.method, InParts) and self.method.trains_in_parts and preparation_of(self.method) is None

    def in_parts(self, call: str, site: Site, content: Mapping[str, Any]) -> LocalFit:
        """A call at a site, up to its training.

        Raises:
            FedshiftError: it cannot be taken apart.
        """
        if not self.come_in_parts:
            raise FedshiftError(f"{self.method.name} trains in its own way, so its sites cannot train side by side")
        return cast(InParts, self.method).in_parts(call, site, content)

    def recipe(self) -> dict[str, Any]:
        """The class to import and its options, from which another process makes an equal method.

        How it trains is part of a `Setting`.
        """
        method = self.method
        return {"class": place_of(type(method)), "options": method.model_dump(mode="json", exclude={"training"})}


@runtime_checkable
class InParts(Protocol):
    """A method whose sites may train side by side: an engine trains, a call says what and makes the reply."""

    @property
    def trains_in_parts(self) -> bool:
        """Whether it does with its options."""
        ...

    def in_parts(self, call: str, site: Site, content: Mapping[str, Any]) -> LocalFit:
        """One of its calls at a site, up to its training."""
        ...


def reads_of(method: Method) -> Reads:
    """What the server reads of the sites' models with a method's options: a rule of robust aggregation reads more."""
    reads = method.traits.server_reads
    if method.robust is None:
        return reads
    return "norms" if method.robust.rule == "norm_clipping" and reads != "models" else "models"


def work_of(method: Method) -> tuple[Trained, Trained]:
    """How much a method trains at a source, and at a target without labels."""
    return method.mini_batches, method.target_mini_batches


def cost_of(method: Method, input_shape: tuple[int, ...]) -> float:
    """`Traits.relative_cost` with what its plug-ins add for samples of this shape."""
    prepared = preparation_of(method)
    plug_ins = sum(plug_in.cost for plug_in in method.at_sites(input_shape).local)
    return method.traits.relative_cost + plug_ins + (0.0 if prepared is None else prepared.cost)


def per_round(trained: Trained, batches_per_epoch: int) -> int:
    """Mini-batches of one round, of a method's `mini_batches` or `target_mini_batches`."""
    return trained(batches_per_epoch, 2) - trained(batches_per_epoch, 1)


def _epochs_to_divide(method: Method) -> None:
    if method.exchanges_per_epoch == 1:
        return
    if method.traits.pooled or method.traits.target == "labelled":
        raise ValueError(f"exchanges_per_epoch: {method.name} trains in one place; leave it out")
    if all(per_round(trained, 64) == per_round(trained, 128) for trained in work_of(method)):
        raise ValueError(
            f"exchanges_per_epoch: {method.name} trains on a number of mini-batches between two exchanges, not on "
            "epochs; change that number"
        )


@functools.cache
def calls_of(kind: type) -> Mapping[str, type[Reply]]:
    """What sites run of a method or of its preparation, and what it returns: public functions ``(self, site, …)``."""
    calls: dict[str, type[Reply]] = {}
    for name, function in inspect.getmembers(kind, inspect.isfunction):
        if not name.startswith("_") and list(inspect.signature(function).parameters)[1:2] == ["site"]:
            reply = reply_class(function)
            if reply is not None:
                calls[name] = reply
    return calls


def in_order(kinds: Collection[str]) -> tuple[str, ...]:
    """Kinds of content in the order of lists: samples, models, numbers, then the others."""
    return tuple(kind for kind in dict.fromkeys(("raw_data", "weights", NUMBERS, *KINDS)) if kind in kinds)


def trained_mean(
    updates: Replies[U], by: str | Mapping[str, float] = "samples"
) -> tuple[Weights, dict[str, float], dict[str, float]]:
    """The mean of the sites' models, taken in one streaming pass.

    Args:
        updates: what the sites sent.
        by: ``samples`` weights sites by N_k/ΣN (FedAvg), ``uniform`` by 1/K, a mapping by its value for each site.

    Returns:
        The mean model, every site's share of it, and every site's loss; under secure aggregation no shares, and the
        mean loss.

    Raises:
        FedshiftError: no site answered.
    """
    mean = updates.mean(by)
    return mean.model(), mean.shares, mean.numbers["loss"]
