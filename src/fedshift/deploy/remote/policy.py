"""A site's policy and budget of privacy, and its audit log of every exchange.

Both belong to the site. The coordinator learns enough of the policy to report early that a run cannot work. The site
checks every exchange itself, whatever the coordinator says.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, field_validator, model_validator

from fedshift.deploy.approvals import public_key, same_person
from fedshift.deploy.chained_log import START, append_line, checked_lines, digest_of
from fedshift.errors import FedshiftError, KindRefused, Refused, UserError, nearest
from fedshift.federation.messages import NUMBERS, Content, Masked, Sealed, known_kinds, leaves
from fedshift.federation.plain_values import Closed
from fedshift.files import set_aside
from fedshift.json_objects import read_object, write_object
from fedshift.models import registry as networks
from fedshift.weights import NamedTensors, Weights

ACCURACY = "accuracy"
"""The kind of a site's report after it measured a model on its held-out samples."""
METRICS = "metrics"
"""The kind of what a site adds to that report at the end of a run: AUROC, calibration and so on."""
CONFIDENCES = "confidences"
"""The kind of a site's sums of confidences among right and wrong answers, for an estimate at a site without labels."""
MOMENTS = "moments"
"""The kind of sums of a site's inputs and of their squares, with which other sites compare their samples."""
_DAY = 24 * 3600
_COUNTED = ("call", "measure", "step", "predict")
"""What counts towards the limits of a day and of a round. Version 1 of the requests named a call ``step``."""
_FEW, _MOST_EXPOSED = 16, 0.8
"""How fast the limit of exposure falls with the number of samples, and the most that it is at any site."""
MASKED, SEALED, WEIGHTS = Masked.kind, Sealed.kind, Weights.kind
_AGGREGATES = ("statistics", WEIGHTS, MASKED, SEALED, NUMBERS, ACCURACY, METRICS, CONFIDENCES, MOMENTS)
"""Kinds that summarise many samples: at least `Policy.smallest_group` of them."""


class TrainingBounds(BaseModel):
    """Bounds of how a site trains. What is None is not bound."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    lr: PositiveFloat | None = Field(None, description="highest learning rate, times the largest of layer_rates")
    batch_size: PositiveInt | None = Field(None, description="fewest samples of a mini-batch")
    rounds: PositiveInt | None = Field(None, description="most rounds of a run")
    mini_batches: Annotated[int, Field(ge=0)] | None = Field(None, description="most mini-batches of a run")
    local_epochs: PositiveInt | None = Field(None, description="most passes over the site's data in a round")

    def beyond(self, bounds: TrainingBounds) -> list[str]:
        """What these options ask for beyond ``bounds``, in words. What they do not say is not beyond."""
        asked: list[str] = []
        for name in type(self).model_fields:
            value, bound, least = getattr(self, name), getattr(bounds, name), name == "batch_size"
            if value is not None and bound is not None and (value < bound if least else value > bound):
                asked.append(f"{name} {value:g}, not {'at least' if least else 'at most'} {bound:g}")
        return asked


class Policy(BaseModel):
    """What a site allows. It refuses everything else."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    send: tuple[str, ...] = Field(
        ("weights", NUMBERS, ACCURACY, METRICS),
        description="kinds that may leave: weights, numbers (counts, losses), accuracy (of a model on held-out "
        "samples), metrics (of a run's last model: AUROC, calibration …), statistics (means, sums that encode a "
        "table), confidences (counts and sums of a run's last model, by which a site without labels estimates its "
        "accuracy), moments (sums of each input and of its square, with which such a site compares its own), styles, "
        "spectra, features; masked (a part of a sum of models under secure aggregation) and "
        "sealed (a model that the coordinator cannot open) also wherever weights may",
    )
    secure: Literal["allowed", "required"] = Field(
        "allowed", description="required: a model leaves only masked, as a part of a sum (docs/privacy.md)"
    )
    smallest_sum: Annotated[int, Field(ge=3)] = Field(
        3, description="fewest sites whose sum this site helps to unmask, and that train in the same exchange"
    )
    roster: Literal["first", "any"] | tuple[str, ...] = Field(
        "first",
        description="sites of the sums that this site takes part in, unless it trains with noise: those of its first "
        "sum, for the life of the project, and all of them (first); a list of names, this site's too; any = also "
        "sums that differ by a few sites, which show the models of these",
    )
    colluders: Annotated[int, Field(ge=0, le=1000)] = Field(
        0,
        description="sites of a sum that may work with a coordinator that lies about who answered; of H sites "
        "⌈(H + colluders + 1) / 2⌉ must then answer and unmask",
    )
    peers: dict[str, str] = Field(
        default_factory=dict,
        description="site → SHA-256 of its certificate, as fedshift site check shows it there; a site that is not "
        "listed: the certificate that is seen first or, with secure: required, the one that fedshift site agree allows",
    )
    smallest_group: PositiveInt = Field(
        10, description="fewest samples that an exchange looks at before a model, statistic, count or accuracy leaves"
    )
    rare_categories: Literal["other", "refuse"] = Field(
        "other",
        description="a table's categories, and the missing cells of a column, in fewer rows than smallest_group: not "
        "told, and read as unknown ones together (other); or the site takes no part (refuse)",
    )
    methods: Literal["all"] | tuple[str, ...] = Field(
        "all", description="methods that may run, by name; `package.module:Class` for one you installed yourself"
    )
    models: Literal["first", "all"] | tuple[dict[str, Any], ...] = Field(
        "first",
        description="networks that may be trained: the first that is asked for, and those that fedshift site agree "
        "allows (first); any that comes with fedshift (all); or a list such as [{name: mlp, hidden: [64, 32]}, {name: "
        "package.module:Net}]; code that you installed yourself, timm's and hf's networks run only if it lists them",
    )
    splits: Literal["all"] | PositiveInt = Field(
        5,
        description="most splits (share held out, seed) of the first experiment; others need fedshift site agree; "
        "all = any number",
    )
    training: Literal["any", "first"] | TrainingBounds = Field(
        "any",
        description="how the site trains: bounds such as {lr: 0.1, batch_size: 8, rounds: 100, mini_batches: 2000, "
        "local_epochs: 5}; those of the first experiment, and others that fedshift site agree allows (first); any",
    )
    approvals: Annotated[int, Field(ge=1, le=9)] = Field(
        1,
        description="different people who must agree with fedshift site agree before an agreement holds; above 1, the "
        "first networks, splits, training options and certificates need them, too",
    )
    approvers: dict[str, str] = Field(
        default_factory=dict,
        description="who may agree: name → public key, a line 'ssh-ed25519 …' of OpenSSH, with which the person signs; "
        "none = anybody here, by a name alone",
    )
    exposure: float = Field(
        0.4,
        gt=0,
        le=1,
        description="refuse a model whose update shows single samples: the highest score that may leave, 0 to 1, "
        "more at sites of few samples (docs/leakage.md); 1 = any",
    )
    rounds_per_day: PositiveInt | None = Field(200, description="most rounds in any 24 hours; none = any number")
    measurements_per_day: PositiveInt | None = Field(
        200, description="most models that are measured in any 24 hours; none = any number"
    )
    requests_per_round: PositiveInt = Field(
        100, description="most requests of one round that train or measure; fada asks 2 more than its steps_per_round"
    )

    @field_validator("peers")
    @classmethod
    def _fingerprints(cls, peers: dict[str, str]) -> dict[str, str]:
        plain = {site: text.lower().replace(":", "").replace(" ", "") for site, text in peers.items()}
        for site, text in plain.items():
            if len(text) != 64 or not set(text) <= set("0123456789abcdef"):
                raise ValueError(f"'{site}' is not given the SHA-256 of a certificate, 64 hexadecimal digits")
        return plain

    @field_validator("approvers")
    @classmethod
    def _different_people(cls, approvers: dict[str, str]) -> dict[str, str]:
        plain: dict[str, str] = {}
        for name, text in approvers.items():
            try:
                plain[name] = public_key(text)
            except ValueError as error:
                raise ValueError(f"what is given for '{name}' {error}") from None
        for what, values in (("name", list(map(same_person, plain))), ("key", list(plain.values()))):
            if len(set(values)) < len(values):
                raise ValueError(f"two people have the same {what}")
        return plain

    @model_validator(mode="after")
    def _enough_people(self) -> Self:
        if self.approvers and len(self.approvers) < self.approvals:
            raise ValueError(f"approvers: lists {len(self.approvers)} of the {self.approvals} people who must agree")
        return self

    @field_validator("roster")
    @classmethod
    def _check_roster(cls, roster: str | tuple[str, ...]) -> str | tuple[str, ...]:
        if isinstance(roster, tuple):
            if len(set(roster)) != len(roster) or len(roster) < 3:
                raise ValueError("list three sites or more, each once, or write first or any")
            return tuple(sorted(roster))
        return roster

    @field_validator("send")
    @classmethod
    def _kinds(cls, send: tuple[str, ...]) -> tuple[str, ...]:
        known = every_kind()
        for kind in send:
            if kind not in known:
                raise ValueError(f"unknown kind '{kind}'; {nearest(kind, known)}")
        return send

    @field_validator("models")
    @classmethod
    def _whole_models(cls, listed: str | tuple[dict[str, Any], ...]) -> str | tuple[dict[str, Any], ...]:
        """The listed networks with all their options, as they are compared with those that are asked for."""
        if isinstance(listed, str):
            return listed
        try:
            return tuple(networks.parse(model, permit=_permit_installed).model_dump(mode="json") for model in listed)
        except UserError as error:
            raise ValueError(str(error)) from None

    def permit_network(self, site: str, name: str) -> None:
        """Raise Refused unless `models` lists a network of this name, which does not come with fedshift."""
        listed = () if isinstance(self.models, str) else self.models
        if name not in [model["name"] for model in listed]:
            raise Refused(
                f"site '{site}' refuses network '{name}', which does not come with fedshift (rule policy.models does "
                "not list it)"
            )

    def check_method(self, site: str, method: str, shares: Sequence[str]) -> None:
        """Raise Refused unless ``method`` may run and the kinds that it sends (``shares``) may leave."""
        if self.methods != "all" and method not in self.methods:
            raise Refused(
                f"site '{site}' refuses method '{method}' (rule policy.methods: {', '.join(self.methods)}); a person "
                "there may add it in SITE.yaml"
            )
        for kind in shares:
            self.check_kind(site, kind, f"method '{method}'")

    def lets_out(self, kind: str) -> bool:
        """Whether ``kind`` may leave. Where models may, they may leave masked or sealed, too."""
        if kind in (WEIGHTS, SEALED) and self.secure == "required":
            return False
        return kind in self.send or (kind in (MASKED, SEALED) and WEIGHTS in self.send)

    def check_kind(self, site: str, kind: str, what: str) -> None:
        """Raise KindRefused unless ``kind`` may leave; ``what`` says in the message what holds it."""
        if kind in (WEIGHTS, SEALED) and self.secure == "required":
            raise KindRefused(
                f"site '{site}' sends a model only masked, as a part of a sum, and not for {what} (rule policy.secure: "
                "required); write engine.aggregation: secure"
            )
        if not self.lets_out(kind):
            raise KindRefused(
                f"site '{site}' refuses to send {kind} for {what} (rule policy.send: {', '.join(self.send)}); a person "
                "there may add it in SITE.yaml"
            )

    def check_group(self, site: str, kind: str, samples: int, what: str, remedy: str = "") -> None:
        """Raise Refused if ``kind`` is an aggregate of fewer samples than `smallest_group`.

        The message says how many, for the site; its public text does not, since the rule protects that number.
        """
        if kind in _AGGREGATES and samples < self.smallest_group:
            text = f"site '{site}' refuses to send {kind} of so few samples for {what}"
            rule = f" (rule policy.smallest_group: {self.smallest_group}){remedy and f'; {remedy}'}"
            raise Refused(f"{text}: {samples}{rule}", public=f"{text}{rule}")

    def check_sent(self, site: str, sent: Mapping[str, Any], call: str, samples: int) -> None:
        """Raise Refused unless a reply made of so many ``samples`` may leave; ``sent``: the reply, as `sent_kinds`."""
        for path, piece in sent.items():
            self.check_kind(site, piece["kind"], f"field '{path}' of call {call}")
            self.check_group(site, piece["kind"], samples, f"field '{path}'")

    def exposure_limit(self, samples: int) -> float:
        """The highest exposure that an update of so many samples may have: above `exposure` if they are few.

        With few samples, each stands alone to some degree in honest training, too.
        """
        return max(self.exposure, min(_MOST_EXPOSED, self.exposure + (1 - self.exposure) * _FEW / samples))

    def check_exposure(self, site: str, call: str, score: float, samples: int) -> None:
        """Raise Refused if the update of a call, made of ``samples``, shows single ones, by its `exposure` score."""
        if score > self.exposure_limit(samples):
            raise Refused(
                f"site '{site}' refuses to send what call {call} made: it would show single samples (rule "
                f"policy.exposure: {self.exposure:g}); a network that is wide for so few samples does so, and one that "
                "was crafted to"
            )


class PrivacyBudget(BaseModel):
    """A site's budget of differential privacy, for all that it answers in the life of a project."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    epsilon: PositiveFloat = Field(description="ε: what all answers together may cost; then the site answers no more")
    delta: Annotated[float, Field(gt=0, lt=1)] = Field(
        1e-5, description="δ: probability with which ε may not hold; far below one over the site's samples"
    )
    measurement_noise: Annotated[float, Field(ge=1, le=1e6)] | None = Field(
        None,
        description="deviation of the noise on how many samples a measured model gets right; each measurement costs "
        "ε; none = the site measures no model",
    )
    statistics_noise: Annotated[float, Field(ge=0.5, le=1e6)] | None = Field(
        None,
        description="deviation of the noise on the sums of a table's columns, in parts of what one row can change in "
        "them; they cost ε once; none = the site gives no statistics",
    )
    confidences_noise: Annotated[float, Field(ge=1, le=1e6)] | None = Field(
        None,
        description="deviation of the noise on counts of a run's last model's scores by class, from which a site "
        "without labels estimates its accuracy; each run that leaves this site out costs ε; none = the site gives none",
    )
    ranges: dict[str, tuple[float, float]] = Field(
        default_factory=dict,
        description="with statistics_noise: numeric column: least and largest value, known without looking at the data",
    )
    categories: dict[str, tuple[str | int | float, ...]] = Field(
        default_factory=dict,
        description="with statistics_noise: categorical column: all its categories, known without looking at the data",
    )

    @field_validator("ranges")
    @classmethod
    def _in_order(cls, ranges: dict[str, tuple[float, float]]) -> dict[str, tuple[float, float]]:
        for column, (least, most) in ranges.items():
            if not least < most:
                raise ValueError(f"column '{column}': the least value has to be below the largest one")
        return ranges


def every_kind() -> tuple[str, ...]:
    """The kinds that may leave a site."""
    return (*known_kinds(), ACCURACY, METRICS, CONFIDENCES, MOMENTS)


def _permit_installed(name: str) -> None:
    """Raise UserError for a network in a file: sites name code that is installed."""
    if name.partition(":")[0].endswith(".py"):
        raise UserError(f"model '{name}' is a file; install it as a package and name it package.module:Class")


RECOVER = "put the file back as it was, or give the loss up with fedshift site recover"
"""The ways out for a person whose site lacks what it wrote down."""
RECOVERED = "recover"
"""What a line of the audit log calls a loss that a person gave up: the ledger of privacy was counted anew."""

AGREED = "agree"
"""What a line of the audit log calls an agreement of several people."""


class AuditLog:
    """A site's own log: one line of JSON per exchange, each with the digest of the line before it.

    A changed or removed line breaks the chain, and `check` reports its number. Where the log ended is written down
    beside it, so lines cut off its end are noticed unless that file was changed as well. Then they show in the site's
    ledger of privacy, in a signed export (`fedshift security export`), and in the copy that a sink has.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._rounds: dict[tuple[str, int], tuple[float, int]] = {}
        """(run, round) → time of its first request, and number of its requests."""
        self._measured: list[float] = []
        """Times of measurements."""
        self.rosters = 0
        """How many sets of sites the site had recorded (`deployment.secure.rosters`) when it last masked."""
        self.older_roster: list[str] = []
        """The sites of the last sum that an earlier version masked for, which recorded no sets of sites."""
        self.ledger = 0
        """How many lines the ledger of privacy had when the site last answered with noise."""
        lines, self._last = self.check(path)
        self._size = path.read_bytes().rfind(b"\n") + 1 if lines else 0
        for line in lines:
            self._count(line)

    def append(self, **entry: Any) -> None:
        """Add a line and flush it to the disk; UserError if it cannot be written: then nothing may leave."""
        try:
            whole = {"time": time.time(), **entry}
            line, self._size = append_line(self.path, whole, known=self._size, flush=True, remedy=RECOVER)
        except OSError as error:
            raise UserError(f"cannot write the audit log {self.path}: {error.strerror}; nothing was sent") from None
        except FedshiftError as error:
            raise UserError(f"{error}; nothing was sent") from None
        self._last = digest_of(line)
        self._count(json.loads(line))
        end = _End(size=self._size, last=self._last, ledger=self.ledger).model_dump()
        write_object(end_file(self.path), end, private=True, flush=False)  # one that is behind is no harm

    def check_rate(self, site: str, policy: Policy, run: str, round_number: int, *, measures: bool = False) -> None:
        """Check that one more request is within the policy's limits per round and per day.

        Requests before round 1 count as a round of their own. ``measures``: whether the request has a model measured.

        Refused if a limit is reached.
        """
        since = time.time() - _DAY
        self._rounds = {key: (when, requests) for key, (when, requests) in self._rounds.items() if when >= since}
        self._measured = [when for when in self._measured if when >= since]
        most = policy.measurements_per_day
        if measures and most is not None and len(self._measured) >= most:
            raise Refused(
                f"site '{site}' has measured {most} models in 24 hours (rule policy.measurements_per_day: {most})"
            )
        limit = policy.rounds_per_day
        _, requests = self._rounds.get((run, round_number), (0.0, 0))
        if not requests and limit is not None and len(self._rounds) >= limit:
            raise Refused(f"site '{site}' has done {limit} rounds in 24 hours (rule policy.rounds_per_day: {limit})")
        if requests >= policy.requests_per_round:
            raise Refused(
                f"site '{site}' has answered {requests} requests of round {round_number} (rule "
                f"policy.requests_per_round: {policy.requests_per_round})"
            )

    @property
    def last(self) -> str:
        """The digest of the last line."""
        return self._last

    @property
    def size(self) -> int:
        """The bytes of the file, which other processes of the site may write, too."""
        return self.path.stat().st_size if self.path.exists() else 0

    def _count(self, line: Mapping[str, Any]) -> None:
        self.rosters = max(self.rosters, whole_number(line.get("rosters")))
        if "sha256" not in line and isinstance(roster := line.get("roster"), list):  # only earlier versions' lack it
            self.older_roster = [str(site) for site in roster]
        if isinstance(paid := line.get("ledger"), Mapping):
            lines = whole_number(paid.get("lines"))
            self.ledger = lines if line.get("do") == RECOVERED else max(self.ledger, lines)
        if line.get("do") in _COUNTED and not line.get("refused") and not line.get("again"):
            key = str(line.get("run")), whole_number(line.get("round"))
            when, requests = self._rounds.get(key, (float(line["time"]), 0))
            self._rounds[key] = when, requests + 1
            if line["do"] == "measure":
                self._measured.append(float(line["time"]))

    @staticmethod
    def set_aside(path: Path) -> tuple[Path | None, int]:
        """Give a log that lacks lines, or was changed, another name; the next one begins anew. Returns the new name,
        None if there is no log; and how many lines the ledger had when the log was whole."""
        try:
            end = _end_of(path)
        except FedshiftError:
            end = None
        end_file(path).unlink(missing_ok=True)
        return set_aside(path), 0 if end is None else end.ledger

    @staticmethod
    def check(path: Path) -> tuple[list[dict[str, Any]], str]:
        """Read a log and check its chain of digests, and that it is not shorter than it was.

        Returns the lines, and the digest of the last one.

        Raises:
            FedshiftError: the chain is broken; names the first line that does not fit. Or lines were cut off its end.
        """
        end = _end_of(path)  # before the lines, of which another process may add some meanwhile
        lines = checked_lines(path, RECOVER)
        if end is not None:
            end.check(path, lines)
        return [json.loads(line) for line in lines], digest_of(lines[-1]) if lines else START


class _End(Closed):
    """Where a log ended when its site last wrote to it: its bytes, the digest of its last line, lines of the ledger."""

    size: Annotated[int, Field(ge=0)]
    last: Annotated[str, Field(max_length=64)]
    ledger: Annotated[int, Field(ge=0)] = 0

    def check(self, log: Path, lines: Sequence[str]) -> None:
        """Raise FedshiftError if a log's lines do not go on from here."""
        size, last = 0, START
        for line in lines if self.size else ():
            size, last = size + len(line) + 1, digest_of(line)
            if size >= self.size:
                break
        if size != self.size or (size and last != self.last):
            raise FedshiftError(f"{log}: lines were cut off the end of the log, or it is an older one; {RECOVER}")


def end_file(log: Path) -> Path:
    """The file beside a log that says where it ended."""
    return log.with_name(f"{log.stem}-end.json")


def _end_of(log: Path) -> _End | None:
    """Where a log ended; None if nobody wrote that down: an earlier fedshift wrote the log, or it is a copy alone."""
    end = read_object(end_file(log), RECOVER, older=True)
    return _End.model_validate(end) if end else None


def whole_number(value: object) -> int:
    """``value`` if it is a possible number of rounds, exchanges or mini-batches, else −1."""
    fits = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**53
    return value if fits and isinstance(value, int) else -1


def sent_kinds(content: Mapping[str, Content]) -> dict[str, Any]:
    """Kinds, shapes and bytes of content for the audit log; no values."""
    out: dict[str, Any] = {}
    for path, value in leaves(content):
        if isinstance(value, NamedTensors):
            shapes = {name: list(tensor.shape) for name, tensor in value.items()}
            out[path] = {"kind": value.kind, "bytes": value.nbytes, "shapes": shapes}
        else:
            out[path] = {"kind": NUMBERS}
    return out
