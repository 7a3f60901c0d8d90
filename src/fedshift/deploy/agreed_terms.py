"""What a site has agreed to in its project: networks, splits of its data, how it trains, certificates of other sites.

The site agrees by itself to the first network whose update may leave, to the first training options likewise (with
``policy.training: first``), and to the splits that the coordinator asks for first. What else is asked for is refused
and noted as a request, until a person at the site agrees to it, or refuses it, with ``fedshift site agree``. The file
is read at every request, so an agreement holds at once. With ``policy.approvals`` above 1 the site agrees to nothing by
itself, and a request waits until so many different people approved it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedshift.deploy.approvals import Approval, Approver, digest_of_terms, valid_approvals
from fedshift.deploy.remote.policy import Policy, TrainingBounds
from fedshift.deploy.remote.requests import SplitRule
from fedshift.digests import Damaged
from fedshift.errors import Refused
from fedshift.federation.training import Training
from fedshift.files import hold_lock
from fedshift.json_objects import read_object, write_object
from fedshift.methods.base import Method
from fedshift.methods.composition.options import training_of
from fedshift.models.network_options import NetworkOptions

TERMS = "agreed.json"
_REMEDY = "restore it, or remove it to agree anew to what is asked first"
_MOST_ASKED, _MOST_REFUSED = 20, 200
"""How many requests wait for a person, and how many that a person refused are remembered. The oldest go first."""
_LONGEST = 200
"""Characters of names that a coordinator gives, as they are noted."""


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class SplitTerm(_Model):
    """One split of a site's data: how it is made, the share that is held out, the seed."""

    test_fraction: float
    split: str
    seed: int


class Peer(_Model):
    """A site, and the SHA-256 of the certificate that it signs with."""

    site: str
    certificate: str


class Terms(_Model):
    """Terms of each kind."""

    models: tuple[dict[str, Any], ...] = ()
    splits: tuple[SplitTerm, ...] = ()
    training: tuple[TrainingBounds, ...] = ()
    peers: tuple[Peer, ...] = ()

    def __bool__(self) -> bool:
        return any(terms for _, terms in self)

    def without(self, other: Terms) -> Terms:
        """These terms but for those of another."""
        rest = {kind: tuple(item for item in terms if item not in getattr(other, kind)) for kind, terms in self}
        return self.model_copy(update=rest)

    def with_terms(self, other: Terms) -> Terms:
        """These terms and those of another. A site has one certificate at a time, the newer one."""
        anew = {peer.site for peer in other.peers}
        old = self.model_copy(update={"peers": tuple(peer for peer in self.peers if peer.site not in anew)})
        return old.model_copy(update={kind: (*terms, *getattr(other.without(old), kind)) for kind, terms in old})


class AskedTerms(_Model):
    """A request that was refused: what the site has not agreed to."""

    number: Annotated[int, Field(ge=1)]  # of the request, which no other of this site has
    lacks: Terms
    coordinator: str = ""  # who asked, by the name in its certificate
    run: str = ""  # the run or the experiment that it was asked for
    when: float = 0.0  # seconds since 1970, of the last time
    times: int = 1
    refused: bool = False  # whether a person refused it
    approvals: tuple[Approval, ...] = ()  # of people, where more than one must agree


class _File(_Model):
    """The content of the file. ``asked``: the newest first."""

    agreed: Terms = Terms()
    asked: tuple[AskedTerms, ...] = ()
    numbers: int = 0


class _OlderList(_Model):
    agreed: tuple[dict[str, Any], ...] = ()
    asked: tuple[dict[str, Any], ...] = ()


class _OlderFile(_Model):
    """The file as it was before requests had numbers: for each kind what was agreed to, and what was asked for."""

    models: _OlderList = _OlderList()
    splits: _OlderList = _OlderList()
    peers: _OlderList = _OlderList()

    def renew(self) -> _File:
        """The same as the file of today. Each request becomes one of its own, of which nobody knows who asked."""
        kinds = {"models": self.models, "splits": self.splits, "peers": self.peers}
        asked = [Terms.model_validate({kind: [item]}) for kind, lists in kinds.items() for item in lists.asked]
        agreed = Terms.model_validate({kind: lists.agreed for kind, lists in kinds.items()})
        requests = [AskedTerms(number=number, lacks=lacks) for number, lacks in enumerate(asked, 1)]
        return _File(agreed=agreed, asked=tuple(reversed(requests)), numbers=len(requests))


class AgreedTerms:
    """The terms of a site, in a file of its memory."""

    def __init__(self, memory: Path, site: str, policy: Policy) -> None:
        self._file, self._site, self._policy = memory / TERMS, site, policy
        self._lock = memory / "agreed.lock"
        self._coordinator, self._run = "", ""

    @contextmanager
    def asked_by(self, coordinator: str, run: str) -> Iterator[None]:
        """Note requests inside the block as those of this coordinator and this run."""
        self._coordinator, self._run = coordinator[:_LONGEST], run[:_LONGEST]
        try:
            yield
        finally:
            self._coordinator, self._run = "", ""

    def check(
        self,
        *,
        agree: bool,
        network: NetworkOptions | None = None,
        splits: Sequence[SplitTerm] = (),
        training: TrainingBounds | None = None,
        announced: TrainingBounds | None = None,
    ) -> None:
        """Raise Refused unless the site trains so; the message names all that it has not agreed to.

        ``agree``: agree to the network and the training options if they are the first. To splits it does at once.
        ``announced``: what bounds the training of all methods of the experiment, where they train differently: agreed
        to in place of ``training`` as the first, since the others follow.
        """
        with hold_lock(self._lock):
            terms = self._read()
            asked = Terms(
                models=() if network is None else (network.model_dump(mode="json"),),
                splits=tuple(splits),
                training=() if training is None else (training,),
            )
            first, lacks = self._sort_terms(terms.agreed, asked)
            if lacks:
                self._note(terms, lacks)
                raise Refused(self._reason(terms, lacks))
            first = first if agree else Terms(splits=first.splits)
            if first.training and announced is not None and not any(item.beyond(announced) for item in first.training):
                first = first.model_copy(update={"training": (announced,)})
            if first:
                self._write(terms.model_copy(update={"agreed": terms.agreed.with_terms(first)}))

    def _sort_terms(self, agreed: Terms, asked: Terms) -> tuple[Terms, Terms]:
        """Of what is asked, what the site agrees to as the first, and what a person must look at."""
        policy, missing = self._policy, asked.without(agreed)
        models = missing.models if policy.models == "first" else ()
        if not isinstance(policy.models, str) and any(model not in policy.models for model in asked.models):
            raise Refused(
                f"site '{self._site}' refuses this network (rule policy.models lists others); a person there may add "
                "it in SITE.yaml"
            )
        splits = missing.splits if policy.splits != "all" else ()
        training = tuple(model for model in missing.training if self._beyond(model, agreed))
        if policy.approvals > 1:
            return Terms(), Terms(models=models, splits=splits, training=training)
        new = bool(splits) and not agreed.splits and policy.splits != "all" and len(splits) <= policy.splits
        first = Terms(
            models=() if agreed.models else models,
            splits=splits if new else (),
            training=() if agreed.training else training,
        )
        return first, Terms(models=models, splits=splits, training=training).without(first)

    def _beyond(self, asked: TrainingBounds, agreed: Terms) -> bool:
        """Whether training options are beyond all that was agreed to."""
        rule = self._policy.training
        if isinstance(rule, TrainingBounds):
            if beyond := asked.beyond(rule):
                raise Refused(
                    f"site '{self._site}' refuses to train so: {'; '.join(beyond)} (rule policy.training); ask for no "
                    "more, or a person there raises its bounds in SITE.yaml"
                )
            return False
        return rule == "first" and not any(not asked.beyond(bounds) for bounds in agreed.training)

    def _reason(self, terms: _File, lacks: Terms) -> str:
        rules = {"models": self._policy.models, "splits": self._policy.splits, "training": self._policy.training}
        named = {"models": "this network", "splits": "these splits", "training": "these training options"}
        texts = [f"{text} (rule policy.{what}: {rules[what]})" for what, text in named.items() if getattr(lacks, what)]
        refused = _refused_terms(terms)
        if lacks.without(refused) != lacks:
            return (
                f"site '{self._site}' does not train with {' and '.join(texts)}: a person there has refused it; ask "
                "them, or ask for something else"
            )
        return (
            f"site '{self._site}' has not agreed to {' and '.join(texts)}; {self._people} there may, with fedshift "
            "site agree"
        )

    @property
    def _people(self) -> str:
        return "a person" if self._policy.approvals == 1 else f"{self._policy.approvals} people"

    def check_peers(self, fingerprints: Mapping[str, str]) -> None:
        """Raise Refused unless each site signs with the certificate that this site has on record for it."""
        with hold_lock(self._lock):
            self._check_peers(fingerprints)

    def _check_peers(self, fingerprints: Mapping[str, str]) -> None:
        terms = self._read()
        known = {**{peer.site: peer.certificate for peer in terms.agreed.peers}, **self._policy.peers}
        by_people = self._policy.secure == "required" or self._policy.approvals > 1
        first = {} if by_people else {site: fingerprints[site] for site in fingerprints if site not in known}
        wrong = [site for site in fingerprints if {**first, **known}.get(site) != fingerprints[site]]
        listed = Terms(peers=tuple(Peer(site=site, certificate=fingerprints[site]) for site in wrong or first))
        if first and not wrong:
            self._write(terms.model_copy(update={"agreed": terms.agreed.with_terms(listed)}))
        if not wrong:
            return
        if any(site in self._policy.peers for site in wrong):
            site = next(site for site in wrong if site in self._policy.peers)
            raise Refused(
                f"site '{self._site}': the certificate of '{site}' is not the one that rule policy.peers lists: it was "
                "issued anew, or somebody else uses its name"
            )
        self._note(terms, listed)
        raise Refused(
            f"site '{self._site}' has not agreed to the certificate of '{wrong[0]}' (rule policy.peers); "
            f"{self._people} there may, with fedshift site agree, after comparing it with what fedshift site check "
            "shows at that site"
        )

    def _note(self, terms: _File, lacks: Terms) -> None:
        """Write down what was asked for and is not agreed to, as the newest request. What was refused is no news."""
        lacks = lacks.without(_refused_terms(terms))
        if not lacks:
            return
        before = next((item for item in terms.asked if not item.refused and item.lacks == lacks), None)
        number, times = (terms.numbers + 1, 1) if before is None else (before.number, before.times + 1)
        new = AskedTerms(
            number=number,
            lacks=lacks,
            coordinator=self._coordinator,
            run=self._run,
            when=time.time(),
            times=times,
            approvals=before.approvals if before is not None else (),
        )
        waiting = [new, *(item for item in terms.asked if not item.refused and item != before)]
        refused = [item for item in terms.asked if item.refused]
        asked = (*waiting[:_MOST_ASKED], *refused)
        self._write(terms.model_copy(update={"asked": asked, "numbers": max(terms.numbers, number)}))

    def requests(self) -> tuple[AskedTerms, ...]:
        """Requests that wait for a person, the newest first."""
        return tuple(item for item in self._read().asked if not item.refused)

    def refusals(self) -> tuple[AskedTerms, ...]:
        """Requests that a person refused, the newest first."""
        return tuple(item for item in self._read().asked if item.refused)

    def in_force(self) -> Terms:
        """What the site has agreed to."""
        return self._read().agreed

    def agree(self, shown: Sequence[AskedTerms], by: Approver | None = None) -> tuple[str, ...]:
        """Agree to requests as they were shown to a person. What was asked since waits for the next time.

        Returns who approved the last request, and whether that is enough: without a name, nobody has to. Refused if
        several people must agree, and nobody says who this is. ``by``: the person, of `approver`. Where several must
        agree, their approval is noted until there are enough.
        """
        with hold_lock(self._lock):
            terms = self._read()
            agreed, noted = terms.agreed, dict[int, tuple[Approval, ...]]()
            approvals: dict[str, Approval] = {}
            for approval in reversed(shown):  # of two certificates of a site the newer one
                approvals = self._approvals(approval, terms, by)
                if len(approvals) < self._policy.approvals and self._counts_people:
                    noted[approval.number] = tuple(approvals.values())
                else:
                    agreed = agreed.with_terms(approval.lacks)
            remaining = (
                approval.model_copy(
                    update={
                        "lacks": approval.lacks.without(agreed),
                        "approvals": noted.get(approval.number, approval.approvals),
                    }
                )
                for approval in terms.asked
            )
            self._write(
                terms.model_copy(
                    update={"agreed": agreed, "asked": tuple(approval for approval in remaining if approval.lacks)}
                )
            )
        return tuple(approval.person for approval in approvals.values())

    @property
    def _counts_people(self) -> bool:
        return self._policy.approvals > 1 or bool(self._policy.approvers)

    def approvals(self, request: AskedTerms) -> tuple[str, ...]:
        """Who has approved a request, by approvals that count."""
        approvals = valid_approvals(request.approvals, self._digest(request), self._policy.approvers)
        return tuple(approval.person for approval in approvals.values())

    def _approvals(self, request: AskedTerms, terms: _File, by: Approver | None) -> dict[str, Approval]:
        if by is None and self._counts_people:
            raise Refused(f"site '{self._site}': {self._people} must agree, by name (rule policy.approvals)")
        noted = [approval for item in terms.asked if item.number == request.number for approval in item.approvals]
        new = [] if by is None else [by.approve(self._digest(request))]
        return valid_approvals([*noted, *new], self._digest(request), self._policy.approvers)

    def _digest(self, request: AskedTerms) -> str:
        return digest_of_terms(self._site, request.lacks)

    def refuse(self, shown: Sequence[AskedTerms]) -> None:
        """Refuse requests for good: they are noted no more. A person may still agree to them, by number."""
        with hold_lock(self._lock):
            terms = self._read()
            numbers = {item.number for item in shown}
            waiting = [item for item in terms.asked if not item.refused and item.number not in numbers]
            new = [item.model_copy(update={"refused": True, "approvals": ()}) for item in shown if not item.refused]
            refused = [*new, *(item for item in terms.asked if item.refused)]
            self._write(terms.model_copy(update={"asked": (*waiting, *refused[:_MOST_REFUSED])}))

    def _read(self) -> _File:
        """The file."""
        content = read_object(self._file, _REMEDY, older=True)
        try:
            if content and content.keys() <= _OlderFile.model_fields.keys():
                return _OlderFile.model_validate_json(json.dumps(content)).renew()
            return _File.model_validate_json(json.dumps(content))
        except ValidationError:
            raise Damaged(self._file, _REMEDY) from None

    def _write(self, terms: _File) -> None:
        write_object(self._file, terms.model_dump(mode="json"), private=True)


def _refused_terms(terms: _File) -> Terms:
    """All terms that a person refused."""
    whole = Terms()
    for item in terms.asked:
        whole = whole.with_terms(item.lacks) if item.refused else whole
    return whole


def split_terms(split: SplitRule, seeds: Sequence[int]) -> list[SplitTerm]:
    """The splits of a request: its rule, with each of some seeds."""
    return [SplitTerm(test_fraction=split.test_fraction, split=split.split, seed=seed) for seed in seeds]


def asked_bounds(
    training: Training, methods: Sequence[Method], *, round_number: int = 0, mini_batches: int | None = None
) -> TrainingBounds:
    """What a request asks for, as the bounds that would just allow it. ``mini_batches``: that the site may still train
    on in this run; None: the request does not say."""
    epochs = [number for method in methods for number in _epochs(method.model_dump(mode="json"))]
    each = [training_of(method, training) for method in methods] or [training]
    known = [number for item in each for number in (mini_batches, item.mini_batches, item.steps) if number is not None]
    return TrainingBounds(
        lr=max(item.lr * max([1.0, *item.layer_rates.values()]) for item in each),
        batch_size=min(item.batch_size for item in each),
        rounds=max(round_number, *(item.rounds for item in each)),
        mini_batches=max(known, default=None),
        local_epochs=max(epochs, default=None),
    )


def _epochs(options: Any) -> Iterator[int]:
    """The values of all options that count passes over a site's data, of a method and of those that it wraps."""
    for name, value in options.items() if isinstance(options, Mapping) else ():
        if isinstance(value, Mapping):
            yield from _epochs(value)
        elif name.endswith("epochs") and isinstance(value, int | float) and value >= 1:
            yield int(value)
