"""What a coordinator may ask of a site, and what the site answers: a frozen model for each, parsed once.

`READING` lists what is checked before that, in this order. A field that this version does not know is ignored, though a
request's key covers it; but not in an envelope, and not in what is asked of metrics.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, TypeVar, get_args

import torch
from pydantic import AfterValidator, ConfigDict, Field, StringConstraints

from fedshift.data.domain import Preprocessing
from fedshift.data.tasks.objective import objective_of
from fedshift.deploy.crypto.masked_sums import Encoded, KeyEntry
from fedshift.deploy.remote.policy import ACCURACY, CONFIDENCES, MOMENTS
from fedshift.deploy.remote.wire import Message, Wire
from fedshift.errors import FedshiftError, Refused, UserError
from fedshift.evaluation.estimate.plain_sums import (
    GivenInputs,
    GivenLooks,
    GivenPooled,
    GivenReading,
    GivenSite,
    GivenSums,
    GivenWhole,
    check_classes,
)
from fedshift.evaluation.measuring import Measuring, measuring_of
from fedshift.evaluation.metric_entries import ENTRIES
from fedshift.evaluation.records import Part, SiteMetrics
from fedshift.evaluation.site_metrics import BINS
from fedshift.federation.federation import OnRefusal
from fedshift.federation.messages import Content, Statistics
from fedshift.federation.plain_values import Closed, Frozen, parse_json
from fedshift.federation.secure.integer_sums import By, LayoutEntry
from fedshift.federation.setting_json import MethodRecipe, SettingRecipe
from fedshift.federation.site import Envelope
from fedshift.version import installed_version
from fedshift.weights import NamedTensors

PROTOCOL = 3
"""The version of requests and replies. A site refuses any other. Requests of version 1 named a call ``step``."""
SCORES = ".scores"
"""What a file ends with that holds the scores of a run's last model, beside the run's folder."""
_SUFFIXES = (".json", ".jsonl", ".lock", ".secret", SCORES)
"""Of files in a site's memory that belong to no run."""
_MOST_SITES = 100_000
_MOST_SUMMED = 1000


def plain_name(name: str) -> str:
    """A name from a message that becomes part of a path; FedshiftError if it could lead out of the folder."""
    if not re.fullmatch(r"[\w=+-][\w.=+-]{0,200}", name):
        raise FedshiftError("a message names a file that is not a plain name")
    return name


def run_name(name: str) -> str:
    """The name of a run, whose folder lies beside files of a site's memory; FedshiftError if it is not safe there."""
    if Path(plain_name(name)).suffix in _SUFFIXES:
        raise FedshiftError(f"a run may not have a name that ends with {', '.join(_SUFFIXES)}")
    return name


def _not_none(value: Any) -> Any:
    if value is None:
        raise ValueError("it is there and says nothing")
    return value


NotNone = AfterValidator(_not_none)
"""Of a field that may be left out: a site that is asked for a sum of nothing must not send its model alone."""
RunName = Annotated[str, AfterValidator(run_name)]
FileName = Annotated[str, AfterValidator(plain_name)]
Number = Annotated[int, Field(ge=0, lt=2**53)]
"""Of rounds, exchanges or mini-batches."""


class Request(Frozen):
    """A request of any kind."""

    do: str
    run: str

    def plain(self) -> dict[str, Any]:
        """The header that is sent, but for its key and the version."""
        return {"do": self.do, **self.model_dump(mode="json", by_alias=True, exclude_unset=True)}


# Before a run ---------------------------------------------------------------------------------------------------------


class SplitRule(Frozen):
    """How a site splits its samples, for every seed."""

    test_fraction: float
    split: Literal["auto", "random", "official"]


class Hello(Request):
    """Asks for a site's card, and whether it takes part."""

    do: Literal["hello"] = "hello"
    run: str = ""
    version: str
    methods: tuple[MethodRecipe, ...]
    network: dict[str, Any] | None = None
    # checksums of the encoders of texts that the network needs and nobody sends, by folder
    texts: dict[str, str] = Field(default_factory=dict)
    training: dict[str, Any] | None = None
    split: SplitRule
    unseen: bool = False  # whether the target's samples are used for measuring alone
    seeds: tuple[int, ...]
    on_refusal: OnRefusal
    aggregation: str = ""
    private: bool = False
    routing: str = ""
    sums: tuple[str, ...] = ()  # the sites that may be in one sum


class KeyRequest(Request):
    """Asks for the key of a run: for secure sums (``key``), or to seal models for the site."""

    do: Literal["key", "sealing_key"]
    run: RunName


# In a run -------------------------------------------------------------------------------------------------------------


class Work(Closed):
    """An `Envelope`: what a request tells a site beside the content."""

    exchange: Number
    round: Number
    progress: Annotated[float, Field(ge=0, le=1)]
    mini_batches_left: Number

    @property
    def envelope(self) -> Envelope:
        """The same for the site's runner."""
        return Envelope(self.exchange, self.round, self.progress, self.mini_batches_left)


class SeedSplit(SplitRule):
    """One split of a site's samples."""

    seed: int


class SitePart(Frozen):
    """What a site is told of its own part in a run."""

    model_config = ConfigDict(populate_by_name=True)

    role: Literal["source", "target", "unseen"]
    number: int  # the number of its domain
    split: SeedSplit
    whole: bool  # whether it is measured on all its samples
    fingerprint: str
    personal: Annotated[bool, Field(alias="own")] = False  # whether it is measured with its own model


class SumAsked(Frozen):
    """What a request to mask says of the sum, the same to all its sites."""

    threshold: int  # how many sites must tell shares
    weighing: tuple[By, int, int]  # by what contributions are weighted, the exponent and the number of terms
    cards: dict[str, KeyEntry]  # the keys of the roster
    envelopes: dict[str, Work]  # what each of its sites is asked for


class SealAsked(Frozen):
    """For whom a site seals its reply, with their keys."""

    model_config = ConfigDict(populate_by_name=True)

    readers: Annotated[dict[str, KeyEntry], Field(alias="for")]


class RunRequest(Request):
    """What every request about a run's model repeats: a restarted site needs no memory of the run."""

    run: RunName
    setting: SettingRecipe
    part: SitePart
    memory: dict[str, FileName] = Field(default_factory=dict)  # those that the request builds on
    kept: dict[str, str]  # the files of the site's memory that the last checkpoint names
    checkpoint: int  # the last exchange that the checkpoint covers
    wire: Wire
    aggregation: str = ""
    routing: str = ""
    at: int = 0  # the exchange after which a sealed model is measured
    seal: Annotated[SealAsked | None, NotNone] = None
    sum: Annotated[SumAsked | None, NotNone] = None

    @cached_property
    def digest(self) -> str:
        """A digest of run, setting and part: requests with equal digests use the same runner."""
        covered = [self.run, self.setting.plain(), self.part.model_dump(mode="json", exclude_unset=True)]
        return hashlib.sha256(json.dumps(covered, sort_keys=True).encode()).hexdigest()


class CallRequest(RunRequest):
    """Asks to run a call of the method."""

    do: Literal["call"] = "call"
    call: str
    envelope: Work


class Whole(Closed):
    """How a coordinator asks for all metrics, at the end of a run."""

    part: Part  # what the site is in the run: the target, or a source, of which the held-out samples are measured
    resamples: Annotated[int, Field(ge=0, le=100_000)] = 0  # bootstrap samples of the intervals
    # the score from which a sample of a target is positive; None if no source chose one
    threshold: Annotated[float, Field(ge=0, le=1)] | None = None
    sums: bool = False  # whether sums of confidences are asked for, too
    kept: bool = False  # whether they are kept at the site, for a sum over sites
    # sums of the inputs of the sites that trained, with which the site compares its own and changes them
    inputs: GivenInputs | None = None


class MeasureRequest(RunRequest):
    """Asks for the accuracy of a model at the site, or at the end for all metrics."""

    do: Literal["measure"] = "measure"
    round: Number
    whole: Whole | None = None


class PredictRequest(RunRequest):
    """Hands the last model of a run to a site without labels."""

    do: Literal["predict"] = "predict"
    round: Number
    metadata: dict[str, Any]


class OrderAsked(Frozen):
    """An order in a request to unmask. A site knows from its record whether it masked for this one."""

    exchange: int
    call: str
    content: str
    keys: dict[str, Encoded]
    threshold: int


class UnmaskRequest(Request):
    """Asks for the codes that confirm who is in a sum, or for the shares that unmask it."""

    do: Literal["confirm", "unmask"]
    run: RunName
    round: Number = 0
    order: OrderAsked
    answered: tuple[str, ...]


class InputsRequest(Request):
    """Asks for sums of a site's inputs, in the encoding of a run."""

    do: Literal["inputs"] = "inputs"
    run: RunName
    preprocessing: Preprocessing


class InputsAnswer(Frozen):
    """What a site answers that is asked for sums of its inputs."""

    inputs: GivenInputs


# After a run ----------------------------------------------------------------------------------------------------------


class EndRequest(Request):
    """Ends a run."""

    do: Literal["end"] = "end"
    run: RunName
    estimates_follow: bool = False


class ReadingRequest(Request):
    """Asks what estimators say of the kept scores, from the sums of the other sites."""

    do: Literal["reading"] = "reading"
    run: RunName
    sums: GivenSums
    number: Number = 0  # of the site among all, which decides how its samples are drawn again


class ReadingAnswer(Frozen):
    """What a site answers that is asked for the reading of its scores.

    Attributes:
        reading: of them.
        looked: if it looked at its samples.
        copied: probability that two of the scores are equal.
    """

    reading: GivenReading
    looked: GivenLooks | None = None
    copied: Annotated[float, Field(ge=0, le=1)] = 0.0


class MaskRequest(Request):
    """Asks for a site's part of a sum over left-out sites, masked."""

    do: Literal["mask"] = "mask"
    run: RunName  # the name of the sums, which is that of no run
    step: Annotated[int, Field(ge=1, le=5)]  # which of the five sums of `fedshift.evaluation.estimate.pooled`
    scores: dict[str, RunName]  # of each site of the roster the run whose scores it keeps
    cards: Annotated[dict[str, KeyEntry], Field(max_length=_MOST_SUMMED)]
    threshold: int  # how many of them must tell shares
    whole: GivenWhole | None = None  # the first sum, once it is known
    unexplained: Annotated[float, Field(ge=0, le=1)] | None = None  # the mean of the second, once it is known
    preprocessing: Preprocessing | None = None  # the encoding of inputs, of the last two
    inputs: GivenInputs | None = None  # the fourth sum, once it is known

    @property
    def content(self) -> str:
        """A digest of all but the keys, which masks are bound to."""
        covered = self.model_dump(mode="json", exclude={"cards"})
        return hashlib.sha256(json.dumps(covered, sort_keys=True).encode()).hexdigest()


class EstimateRequest(Request):
    """Tells a site without labels what is known of others: of each, or of all together."""

    do: Literal["estimate"] = "estimate"
    run: RunName
    known: Annotated[dict[str, GivenSite], Field(max_length=_MOST_SITES)]
    preprocessing: Preprocessing  # of the sites that trained, with which its samples compare
    threshold: float | None = None  # that their scores chose
    pooled: GivenPooled | None = None  # of all together, in place of ``known``
    inputs: GivenInputs | None = None  # sums of the inputs of the sites that are known; None where some keep these


KINDS: dict[str, type[Request]] = {
    do: kind
    for kind in (
        *(Hello, KeyRequest, CallRequest, MeasureRequest, PredictRequest, UnmaskRequest, EndRequest),
        *(InputsRequest, ReadingRequest, MaskRequest, EstimateRequest),
    )
    for do in get_args(kind.model_fields["do"].annotation)
}
"""Every request that a site knows."""


# Where the bytes arrive -----------------------------------------------------------------------------------------------

R = TypeVar("R", bound=Request, covariant=True)


@dataclass(frozen=True)
class Asked(Generic[R]):
    """A request at a site."""

    request: R  # what is asked
    content: Mapping[str, Content]  # what it brings
    body: str  # SHA-256 of the content's bytes
    key: str  # of the request
    entry: dict[str, Any]  # of the audit log, to which whoever answers adds


def request_key(header: Mapping[str, Any], body_sha256: str) -> str:
    """A digest of a request. A site that gets the same request again repeats its answer and does not work again.

    The checkpoint's number and files are left out, since they differ when a round is repeated.
    """
    covered = {name: value for name, value in header.items() if name not in ("key", "kept", "checkpoint")}
    return hashlib.sha256(f"{json.dumps(covered, sort_keys=True)}\n{body_sha256}".encode()).hexdigest()


def check_protocol(site: str, header: Mapping[str, Any], body: str) -> None:
    """Raise UserError if the coordinator speaks another version of the requests."""
    if header.get("protocol") != PROTOCOL:
        raise UserError(
            f"site '{site}' speaks version {PROTOCOL} of the requests, the coordinator {header.get('protocol')}: "
            "install the same fedshift at both"
        )


def check_key(site: str, header: Mapping[str, Any], body: str) -> None:
    """Raise FedshiftError unless the key is that of the request."""
    if header.get("key") != request_key(header, body):
        raise FedshiftError("a request's key does not fit its content")


def check_known(site: str, header: Mapping[str, Any], body: str) -> None:
    """Raise UserError if no request has this name."""
    do = header.get("do")
    if not isinstance(do, str) or do not in KINDS:
        raise UserError(f"site '{site}' does not know the request '{do}'")


def check_version(site: str, header: Mapping[str, Any], body: str) -> None:
    """Raise Refused if a run would begin with another version of fedshift: its requests may have other fields."""
    if header.get("do") == "hello" and header.get("version") != installed_version():
        raise Refused(
            f"site '{site}' has fedshift {installed_version()}, the coordinator {header.get('version')}: install the "
            "same version at both"
        )


READING: tuple[Callable[[str, Mapping[str, Any], str], None], ...] = (
    check_protocol,
    check_key,
    check_known,
    check_version,
)
"""What is checked of a header before it is parsed, in this order. Until then it is a mapping of anything."""


def asked_in(
    site: str, message: Message, header: Mapping[str, Any], content: Mapping[str, Content], entry: dict[str, Any]
) -> Asked[Request]:
    """The request in a message; FedshiftError, of one line, if it is none."""
    body = hashlib.sha256(message.body).hexdigest()
    for check in READING:
        check(site, header, body)
    do, key = str(header.get("do")), str(header.get("key"))
    request = parse_json(KINDS[do], message.header, f"site '{site}': the request '{do}'")
    return Asked(request, content, body, key, entry)


_LONGEST_FILE = 255
"""Characters in the name of a file."""
_Count = Annotated[int, Field(ge=0, le=2**53)]
_File = Annotated[str, StringConstraints(max_length=_LONGEST_FILE)]


class CallAnswer(Frozen):
    """What the header of a reply to a call says."""

    answers: str = ""  # the key of the request
    mini_batches: Annotated[int, Field(ge=0)]  # on how many the site trained
    # the files of its memory by entry
    memory: dict[_File, FileName]  # the coordinator names these files in its next request
    layout: LayoutEntry | None = None  # what the integers of a masked contribution stand for

    def check(self, left: int, remembers: Collection[str]) -> None:
        """Check what a site says that it did. FedshiftError if it is impossible. ``left``: mini-batches that the site
        had left."""
        if self.mini_batches > left:  # absent sites are charged by this number, too: see `Federation.forfeit`
            raise FedshiftError(f"it claims more mini-batches than the {left} that it had left")
        if len(self.memory) > len(remembers) + 1:  # and the residuals of rounding
            raise FedshiftError("it does not say what the site remembers")


class Measures(Frozen):
    """A site's report of a measurement."""

    accuracy: float  # in percent; of other tasks than classification, their main metric
    samples: Annotated[int, Field(ge=1, le=2**53)]  # how many were measured
    classes: tuple[tuple[_Count, _Count] | None, ...]  # (right, of) per class; None where it is kept back
    metrics: SiteMetrics | None = None  # at the end of a run, of a site that sends them
    sums: GivenSums | None = None  # of confidences, likewise


class MeasureAnswer(Frozen):
    """What a site answers that is asked to measure a model."""

    measures: Measures


class Measured(Statistics):
    """Stands in the ledger for a model that was sent to be measured, and for the site's report of it."""

    kind = ACCURACY


class Confidences(Statistics):
    """Stands in the ledger for a site's sums of confidences."""

    kind = CONFIDENCES


class SummedInputs(Statistics):
    """Stands in the ledger for a site's sums of inputs."""

    kind = MOMENTS


K = TypeVar("K", bound=NamedTensors)


def for_ledger(kind: type[K], size: int) -> K:
    """Content of ``size`` bytes for the ledger; it takes no memory."""
    return kind({"bytes": torch.empty(size, dtype=torch.uint8, device="meta")})


def sums_bytes(sums: GivenSums) -> Confidences:
    """The numbers in a site's sums of confidences, for the ledger."""
    numbers = 2 + 2 * len(sums.by_confidence[0]) + 2 * len(sums.losses) + sums.sums.answers.size
    return for_ledger(Confidences, 8 * (numbers + (0 if sums.by_score is None else 2 * len(sums.by_score[0]))))


def inputs_bytes(inputs: GivenInputs) -> SummedInputs:
    """The numbers in sums of inputs, for the ledger."""
    return for_ledger(SummedInputs, 8 * (1 + len(inputs.total) + len(inputs.squares) + len(inputs.cubes or ())))


def report_bytes(report: Measures) -> Measured:
    """The numbers in a site's report of a measurement, for the ledger."""
    numbers, metrics = 2 + 2 * len(report.classes), report.metrics
    if metrics is not None:
        numbers += (
            len(metrics.support) + len(metrics.values) + 2 * len(metrics.intervals) + 3 * len(metrics.reliability)
        )
    return for_ledger(Measured, 8 * numbers)


def check_measures(report: Measures, recipe: SettingRecipe) -> None:
    """Raise FedshiftError if the numbers of a site's report are impossible, or of another task."""
    measuring = measuring_of(objective_of(Preprocessing.model_validate(recipe.preprocessing)))
    most = ENTRIES[measuring.metric].high or math.inf
    pairs = [pair for pair in report.classes if pair]
    if not (0 <= report.accuracy <= most and all(right <= of <= report.samples for right, of in pairs)):
        raise FedshiftError("its measurement is not an accuracy")
    counted = recipe.classes if measuring.counts_classes else 0
    if len(report.classes) != counted:
        raise FedshiftError(f"it measured {len(report.classes)} classes, the experiment has {counted}")
    if report.metrics is not None:
        _check_metrics(report.metrics, report.samples, recipe.classes, measuring)
    if report.sums is not None:
        check_classes(report.sums, recipe.classes)
        if report.sums.samples != report.samples:
            raise FedshiftError("its sums of confidences are of another number of samples than it measured")


def _check_metrics(metrics: SiteMetrics, samples: int, classes: int, measuring: Measuring) -> None:
    counts = [count for count in metrics.support if count is not None]
    of_bins = [count for *_, count in metrics.reliability]
    if len(metrics.support) != (classes if measuring.tells_support else 0) or len(of_bins) > BINS:
        raise FedshiftError("its metrics are of another number of classes or bins than they were asked for")
    if (
        metrics.samples != samples
        or (sum(counts) if measuring.counts_classes else max(counts, default=0)) > samples
        or sum(of_bins) > samples
        or (metrics.events or 0) > samples
    ):
        raise FedshiftError("its metrics are of another number of samples than it measured")
    if any(low > high for low, high in metrics.intervals.values()):
        raise FedshiftError("its metrics have an interval whose lower end is above the upper one")
    if not set(measuring.metrics).issuperset((*metrics.values, *metrics.intervals)):
        raise FedshiftError("its metrics are of another task")
