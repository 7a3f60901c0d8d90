"""What a deployed site does for secure sums: it gives its key, masks its contribution, and helps to unmask the sum.

**Of whom.** The record of the sites of its sums holds for the life of its project. Two sums of like models whose sites
differ by a few show the models of these (So et al., Securing Secure Aggregation, AAAI 2023). That any two sets differ
by at least m sites is not enough: of four such sets an integer combination can be of fewer. Here each site has one set,
so the sets of the honest sites are a partition of them, and a linear combination of sums has the same factor for all
honest sites of a set: it is of all of these or of none.

**For estimates.** A left-out site also masks what it says of its kept scores, as with models. So the coordinator, and
the site without labels, know what `fedshift.evaluation.estimate.pooled` reads of all left-out sites together, and of
none alone.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from fedshift.deploy.agreed_terms import AgreedTerms
from fedshift.deploy.chained_log import append_line, checked_lines
from fedshift.deploy.crypto.masked_sums import KeyAnswer, Order, SecureSite, signed_text
from fedshift.deploy.kept_scores import KeptScores
from fedshift.deploy.remote.orders import (
    confirmed_content,
    order_in,
    order_of,
    order_to_mask,
    revealed_content,
    sealed_of,
    upload_content,
)
from fedshift.deploy.remote.policy import MASKED, AuditLog, Policy, sent_kinds
from fedshift.deploy.remote.requests import Asked, CallRequest, KeyRequest, MaskRequest, UnmaskRequest, run_name
from fedshift.deploy.remote.transport import Done, answer_of
from fedshift.deploy.remote.wire import Message, body_of, reseal
from fedshift.deploy.secure.identity import Identity
from fedshift.deploy.site_estimates import SiteEstimates
from fedshift.deploy.site_file import Holding, SiteConfig
from fedshift.deploy.site_inputs import SiteInputs
from fedshift.errors import FedshiftError, Refused, TrainingDiverged
from fedshift.evaluation.estimate.combination import read
from fedshift.evaluation.estimate.doubtful_rows import share_of_copies
from fedshift.evaluation.estimate.plain_sums import GivenSums, check_classes, plain_sums
from fedshift.evaluation.estimate.pooled import first_part, second_part, third_part
from fedshift.evaluation.estimate.sums import Numbers
from fedshift.federation.messages import NUMBERS, Content, Reply, reply_content
from fedshift.federation.plain_values import Frozen
from fedshift.federation.replies import About, ReplyCheck
from fedshift.federation.secure.integer_sums import LayoutEntry, Weighing, contribution
from fedshift.federation.site_runner import SiteRunner
from fedshift.files import flush_folder, hold_lock
from fedshift.functional.fixed_point import to_fixed
from fedshift.methods.base import Method, reads_of
from fedshift.weights import Weights

ROSTERS, LOCK = "rosters.jsonl", "rosters.lock"
_LEFT = (
    "where one has left for good, a person at each site writes the new set into its SITE.yaml (policy.roster: [...]), "
    "and the next experiment begins from another start"
)


class _Line(Frozen):
    """A line of the record. What chains it to the others is read by `checked_lines`."""

    roster: tuple[str, ...]


class Rosters:
    """The record of one site: a line for each set of sites that differs from the one before it. ``log``: the site's
    audit log, whose lines say how long the record was when they were written; None: not compared."""

    def __init__(self, memory: Path, site: str, policy: Policy, log: AuditLog | None = None) -> None:
        self._file, self._lock = memory / ROSTERS, memory / LOCK
        self._site, self._rule, self._log = site, policy.roster, log
        memory.mkdir(parents=True, exist_ok=True)

    @property
    def one_set(self) -> bool:
        """Whether the site takes part in sums of one set of sites only."""
        return self._rule != "any"

    def recorded_sets(self) -> list[list[str]]:
        """The sets, oldest first; Refused if the record was changed, or is shorter than the audit log says."""
        try:
            known = [list(_Line.model_validate_json(line).roster) for line in checked_lines(self._file)]
        except (FedshiftError, ValidationError) as error:
            raise Refused(f"site '{self._site}': {error}") from None
        counted = self._log.rosters if self._log is not None else 0
        if len(known) < counted:
            raise Refused(
                f"site '{self._site}': {self._file} has {len(known)} of the {counted} sets of sites that the "
                "audit log counts: put the file back; without it the site masks nothing"
            )
        return known

    def sets(self) -> list[list[str]]:
        """The sets of sites of all sums, oldest first, with that of an earlier version if no other is known."""
        older = self._log.older_roster if self._log is not None else []
        return self.recorded_sets() or ([older] if older else [])

    def check(self, roster: Sequence[str]) -> int:
        """How many sets are recorded; Refused if the site may not mask for these sites."""
        known = self.recorded_sets()
        allowed = self._allowed_set(known) or list(roster)
        if self.one_set and allowed != list(roster):
            other = sorted({*allowed} ^ {*roster})
            raise Refused(
                f"site '{self._site}' takes part in sums of {', '.join(allowed)}, and not of a set that differs by "
                f"{', '.join(other)}: the difference of two sums shows the models of these (rule policy.roster); let "
                f"all of them take part, or write training.privacy; {_LEFT}"
            )
        return len(known)

    def check_present(self, sites: Collection[str]) -> None:
        """Raise Refused if a site of the one set is absent from an experiment of these sites."""
        allowed = self._allowed_set(self.recorded_sets()) if self.one_set else []
        absent = [site for site in allowed if site not in sites]
        if absent:
            raise Refused(
                f"site '{self._site}' takes part in sums of {', '.join(allowed)} only (rule policy.roster), and "
                f"{', '.join(absent)} takes no part: let all of them take part, or write training.privacy; {_LEFT}"
            )

    def _allowed_set(self, known: Sequence[list[str]]) -> list[str]:
        """The one set of sites that the rule allows; empty if the first sum decides.

        An earlier version's sums count: it wrote their sites in the audit log alone.
        """
        if isinstance(self._rule, tuple):
            return list(self._rule)
        older = self._log.older_roster if self._log is not None else []
        return known[-1] if known else older

    def note(self, roster: Sequence[str], run: str) -> int:
        """As `check`, and write the set down before anything masked leaves. Again it changes nothing."""
        with hold_lock(self._lock):
            number = self.check(roster)
            if number and self.recorded_sets()[-1] == list(roster):
                return number
            try:
                append_line(self._file, {"roster": list(roster), "run": run}, flush=True)
                flush_folder(self._file.parent)
            except OSError as error:
                raise Refused(
                    f"site '{self._site}' cannot write {self._file}: {error.strerror}; nothing was sent"
                ) from None
            return number + 1


_HIDDEN = (Weights.kind, NUMBERS)
"""Kinds that a site which masks lets leave as parts of a sum. Others have to be allowed as they are."""
FOLDER = "sums"
"""In the site's memory of a run: its key, the keys of others, and what it masked and unmasked."""


class SiteSums:
    """The part of a site's program that knows of secure sums."""

    def __init__(self, config: SiteConfig, terms: AgreedTerms, log: AuditLog | None = None) -> None:
        self.name, self.policy = config.file.site, config.file.policy
        self.rosters = Rosters(config.memory, self.name, self.policy, log)
        self._config, self._terms = config, terms

    @cached_property
    def identity(self) -> Identity:
        """The certificate and key of the site's kit."""
        return Identity.of_kit(self._config.kit, self.name)

    def site(self, run: str, verified: Collection[str] = ()) -> SecureSite:
        """The protocol at this site for a run; ``verified``: sites whose cards were checked."""
        return SecureSite(
            self.name,
            run,
            self._config.memory / run_name(run) / FOLDER,
            self.identity.sign,
            lambda card, text: card.site in (self.name, *verified),  # its own key it knows
            self.policy.smallest_sum,
            self.identity.certificate,
            self.policy.colluders,
        )

    # Requests ---------------------------------------------------------------------------------------------------------

    def key(self, asked: Asked[KeyRequest]) -> Message:
        """Answer with the signed key of a run, which is made if the run has none here."""
        self.policy.check_kind(self.name, MASKED, "secure aggregation")
        card = self.site(asked.request.run).card()
        asked.entry["key"] = card.public.hex()
        return answer_of(asked.key, KeyAnswer(card=card.entry))

    def begin_sum(self, asked: Asked[CallRequest], method: Method, *, noise: bool = False) -> Summing | None:
        """The sum that a request to run a call asks for; None if it asks for the reply itself.

        Refused if the sum is not one that this site takes part in. ``noise``: whether the site trains with noise, which
        holds whatever sums the coordinator gets.
        """
        request = asked.request
        if request.sum is None:
            return None
        if reads_of(method) != "sums":  # the sum could be nearly a single model
            raise Refused(f"site '{self.name}': {method.name} with these options is not made of sums alone")
        order, weighing = order_in(request, asked.body)
        self._check_work(request, order)
        site = self.site_of(order, noise=noise)
        site.forget_uploads(request.checkpoint)
        whole = f"{asked.body} {json.dumps(request.setting.plain(), sort_keys=True)}"
        question = hashlib.sha256(whole.encode()).hexdigest()
        rosters = None if noise else self.rosters
        return Summing(site, order, weighing, request.setting.input_shape, question, rosters)

    def site_of(self, order: Order, *, noise: bool) -> SecureSite:
        """The protocol at this site for a sum. Refused if the sites are not those of sums that this site takes part in,
        or one's key is not its own. ``noise``: whether what this site adds has noise of its own."""
        if not noise:
            self.rosters.check(order.roster)
        result = {
            card.site: self.identity.check(
                card.site, card.certificate, signed_text(order.run, card.site, card.public), card.signature
            )
            for card in order.cards
            if card.site != self.name
        }
        self._terms.check_peers(result)
        return self.site(order.run, result)

    def _check_work(self, request: CallRequest, order: Order) -> None:
        """Check what the others of the roster are asked for, which is the same for all or the masks do not cancel.

        A site that is asked to do no work contributes what it was sent, which the coordinator knows.
        """
        envelope, asked = request.envelope, request.sum.envelopes if request.sum is not None else {}
        working = [site for site, item in asked.items() if item.mini_batches_left > 0 and item.progress < 1]
        # Learning rates follow from the progress.
        alike = {(item.exchange, item.round, item.progress) for item in asked.values()} == {
            (envelope.exchange, envelope.round, envelope.progress)
        }
        if not alike or asked.get(self.name) != envelope or set(asked) != set(order.roster):
            raise Refused(f"site '{self.name}': the sites of the roster are not asked for the same")
        if self.name in working and len(working) < self.policy.smallest_sum:
            raise Refused(
                f"site '{self.name}' takes part in sums in which at least {self.policy.smallest_sum} sites train, not "
                f"{len(working)} (rule policy.smallest_sum)"
            )

    def confirm(self, asked: Asked[UnmaskRequest]) -> Message:
        """Answer with the codes that confirm to the others who is in a sum."""
        order, answered = self._in_sum(asked)
        return self._answer(asked, confirmed_content(self.site(order.run).confirm(order, answered)))

    def unmask(self, asked: Asked[UnmaskRequest]) -> Message:
        """Answer with the shares that take the masks off a sum."""
        order, answered = self._in_sum(asked)
        reveal = self.site(order.run).reveal(order, answered, *sealed_of(asked.content))
        return self._answer(asked, revealed_content(reveal, order, answered))

    def _in_sum(self, asked: Asked[UnmaskRequest]) -> tuple[Order, list[str]]:
        """What a sum is of, and who is in it, as a request of the second exchange says."""
        self.policy.check_kind(self.name, MASKED, "secure aggregation")
        order, answered = order_of(asked.request.run, asked.request.order), list(asked.request.answered)
        exchange = {"call": order.call[:100], "exchange": order.exchange, "answered": answered[: len(order.roster)]}
        asked.entry.update(exchange)
        return order, answered

    @staticmethod
    def _answer(asked: Asked[UnmaskRequest], sent: dict[str, Content]) -> Message:
        asked.entry["sent"] = sent_kinds(sent)
        return answer_of(asked.key, Done(), body_of(sent))


def promised_masked(kinds: Mapping[str, str]) -> dict[str, str]:
    """The kinds of a reply's fields, by field, as they leave in a sum."""
    return {"sum": MASKED, **{field: kind for field, kind in kinds.items() if kind not in _HIDDEN}}


class Summing:
    """One request to a site that asks for a masked contribution.

    Refused if the roster is too small, has another key than before, or this exchange was masked for another one.
    ``question``: a digest of what is asked. ``rosters``: the record of the sites of earlier sums; None where noise
    hides what their differences show.
    """

    def __init__(
        self,
        site: SecureSite,
        order: Order,
        weighing: Weighing,
        input_shape: tuple[int, ...],
        question: str,
        rosters: Rosters | None,
    ) -> None:
        self.order, self._question, self._rosters = order, question, rosters
        self._site, self._weighing, self._input_shape = site, weighing, input_shape
        self._kept = site.kept_upload(order)
        self._numbers: Tensor | None = None
        self.layout: LayoutEntry | None = None
        """What the integers stand for."""

    def contribution(
        self, reply: Reply, call: str, runner: SiteRunner, sent: Mapping[str, Content]
    ) -> dict[str, Content]:
        """A reply as integers, not masked yet, after the check that the server makes of replies that it can read.

        FedshiftError if the reply is not what the call promises, or holds a number that is too large for a sum. The
        coordinator is not told the numbers, which are those of a single model. Refused if the call is about a model
        about which something else was asked before.
        """
        site, method = runner.site, runner.method
        self._check_worked(site.worked)
        memory = method.traits.asked_once.get(call) if isinstance(method, Method) else None
        if memory is not None:
            self._site.once(body_of({"model": site.memory[memory]}).sha256, self._question)
        about = About(site.network, site.samples, self._input_shape, site.classes, site.training)
        try:
            ReplyCheck(method, {site.name: about}).check(call, site.name, type(reply), reply_content(reply), sent)
            result = contribution(reply, self._weighing)
        except FedshiftError as error:
            diverged = isinstance(error, TrainingDiverged)
            why = "training diverged: lower training.lr" if diverged else "it does not fit, or is too large for a sum"
            text = f"site '{site.name}': its reply to call {call}: "
            raise type(error)(f"{text}{error}", public=f"{text}{why}; the site's audit log says more") from None
        self._numbers = result.numbers["sum"]
        self.layout = result.layout.entry
        return {"sum": result.numbers}

    def _check_worked(self, share: float) -> None:
        """Raise Refused if the coordinator let this site do less work than the method wants of every site alike.

        Then another site would outweigh it in the sum; and a sum with some of its work less one with all would show
        the rest. Of sets of any sites, whose budgets can differ by those rounds in which one was lost, half is enough.
        """
        if self._rosters is not None and share < (1.0 if self._rosters.one_set else 0.5):
            raise Refused(
                f"site '{self._site.site}' takes part in sums in which no site's work is more than twice that of the "
                "others, and was let do a part of it only (mini_batches_left)"
            )

    def mask(self, entry: dict[str, Any]) -> dict[str, Content]:
        """What leaves in place of the contribution. It is on the disk before this returns, and its roster as well."""
        assert self._numbers is not None  # made by `contribution`
        entry["roster"], whole = list(self.order.roster), False
        if self._rosters is not None:
            entry["rosters"], whole = self._rosters.note(self.order.roster, self.order.run), self._rosters.one_set
        upload = self._kept or self._site.mask(self.order, self._numbers, whole=whole)
        sent: dict[str, Content] = {"sum": upload_content(upload, self.order)}
        entry["sent"] = sent_kinds(sent)
        return sent

    def again(self, answer: Message) -> tuple[Message, Mapping[str, Content]] | None:
        """The answer to a request that comes again, from its kept header and upload; None if it was not kept."""
        if self._kept is None:
            return None
        content: dict[str, Content] = {"sum": upload_content(self._kept, self.order)}
        # The same header with the body that is kept elsewhere.
        return reseal(answer, body_of(content)), content


def without_body(answer: Message) -> Message:
    """An answer to keep without its body, which is kept elsewhere."""
    return reseal(answer, body_of({}))


_OF_SCORES = 3
"""So many sums are of scores, the others of inputs."""


class SiteEstimateSums:
    """The part of a site's program that masks what it says for estimates elsewhere."""

    def __init__(
        self, sums: SiteSums, estimates: SiteEstimates, inputs: SiteInputs, holding: Callable[[], Holding]
    ) -> None:
        self._sums, self._estimates, self._inputs, self._holding = sums, estimates, inputs, holding

    def mask(self, asked: Asked[MaskRequest]) -> Message:
        """Answer with a masked part of one of the sums.

        Refused if it may not leave, or the sum is not one that this site takes part in; FedshiftError if there are no
        scores, or the sums that it is told are not of this site.
        """
        request, entry, noise = asked.request, asked.entry, self._estimates.noisy
        self._estimates.check_gives(masked=True)
        order = order_to_mask(request)
        site = self._sums.site_of(order, noise=noise)
        entry |= {"step": request.step, "roster": list(order.roster)}
        upload, whole = site.kept_upload(order), False
        if upload is None:
            numbers = self._numbers(request, order)
            if not noise:
                entry["rosters"], whole = self._sums.rosters.note(order.roster, order.run), self._sums.rosters.one_set
            upload = site.mask(order, numbers, whole=whole)
        sent: dict[str, Content] = {"sum": upload_content(upload, order)}
        entry["sent"] = sent_kinds(sent)
        return answer_of(asked.key, Done(), body_of(sent))

    def _numbers(self, request: MaskRequest, order: Order) -> Tensor:
        """A one, and this site's part, as integers (n,), not masked yet."""
        keys = hashlib.sha256(" ".join(card.public.hex() for card in order.cards).encode()).hexdigest()
        run = request.scores[self._sums.name]
        kept = self._estimates.kept_for(run, f"sum {order.run}", keys if request.step == 1 else None)
        if request.step > _OF_SCORES:
            numbers = self._inputs.part(self._holding(), request.preprocessing, request.inputs)
        else:
            numbers = _part(self._sums.name, request, kept, noise=self._estimates.noisy)
        try:
            part = to_fixed(torch.from_numpy(numbers), len(order.cards))
        except FedshiftError:
            raise FedshiftError(f"site '{self._sums.name}' has values that are too large for masked sums") from None
        return torch.cat([torch.ones(1, dtype=torch.int64), part])


def _part(name: str, request: MaskRequest, kept: KeptScores, *, noise: bool) -> Numbers:
    """A site's part of the sum that is asked for; ``noise``: whether its scores are those that noise allows."""
    mine = kept.sums
    if request.step == 1:
        return first_part(mine, 0.0 if noise else share_of_copies(kept.scores))
    if request.whole is None or (request.step == 3 and request.unexplained is None):
        raise FedshiftError("a request to mask lacks the sums before it")
    check_classes(request.whole.sums, len(mine.confusion))
    whole = request.whole.whole
    try:
        others = GivenSums.model_validate(plain_sums(whole.others(mine))).sums
    except ValueError:
        raise Refused(f"site '{name}' is not in the sum that it is told") from None
    reading = read(others, kept.scores)
    if request.step == 2:
        return second_part(reading)
    return third_part(whole, request.unexplained or 0.0, mine, reading)
