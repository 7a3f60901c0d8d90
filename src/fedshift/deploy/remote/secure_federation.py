"""A remote federation that reads sums of its sites' models only: keys, masked answers, codes by which the sites confirm
to each other who answered, and the shares that unmask.

The keys of a run, and the sites of each sum, are on disk before any site is told of them. So a coordinator
that was killed asks for the same sums again, and gets the answers that the sites kept.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

from fedshift.deploy.crypto.masked_sums import KeyAnswer, KeyCard, KeyEntry, Order, SecureSum
from fedshift.deploy.json_files import read_stored
from fedshift.deploy.remote.incoming import Grace
from fedshift.deploy.remote.orders import (
    order_in,
    second_exchange,
    sum_asked,
    upload_of,
)
from fedshift.deploy.remote.outbox import HERE, Outbox, Written
from fedshift.deploy.remote.remote_federation import RemoteFederation
from fedshift.deploy.remote.requests import CallAnswer, CallRequest, KeyRequest, SumAsked, UnmaskRequest, Work
from fedshift.deploy.remote.transport import Done, Lost, Sign, SiteError, ask_sites, open_answer, stamp
from fedshift.deploy.remote.wire import Message, Residuals, body_of
from fedshift.errors import FedshiftError, KindRefused, Refused, ReplyRefused, UserError
from fedshift.federation.exchange import Answer, Mean, Missing, Request
from fedshift.federation.messages import Content, PerSite, Reply
from fedshift.federation.plain_values import Closed
from fedshift.federation.replies import Layout as OpenFields
from fedshift.federation.secure.integer_sums import (
    ALL,
    SMALLEST_ROSTER,
    By,
    Contribution,
    Layout,
    Total,
    Weighing,
    threshold,
)
from fedshift.json_objects import write_object

RECORD = "sums.json"
_REMEDY = "restore it, or delete the run's folder and run again"
"""The file of keys and sums, in the coordinator's own folder of a run's memory."""
_ENTRY = "sums"


class _Record(Closed):
    """The content of the file."""

    cards: dict[str, KeyEntry]  # the sites' keys
    without: dict[str, tuple[str, str]]  # sites that gave none → error and reason
    answered: dict[str, tuple[str, ...]]  # exchange and call → the sites of their sum, as the sites were told


class SecureFederation(RemoteFederation):
    """Sites behind a `Transport`, whose models are read as masked sums.

    Args:
        memory: the folder of the run's memory, where the keys and the sums under way are written down.
        whole: whether the sites unmask only sums of all that have a key.
        colluders: how many of them may work with a server that lies; decides how many have to answer.
    """

    def __init__(self, *arguments: Any, memory: Path, whole: bool = False, colluders: int = 0, **options: Any) -> None:
        super().__init__(*arguments, sums_only=True, **options)
        self._whole, self._colluders = whole, colluders
        self._shared = self._outbox = _SharedOutbox(self.wire)
        self._file = memory / HERE / RECORD
        self._cards: dict[str, KeyCard] = {}
        self._without: dict[str, list[str]] = {}
        """Sites that gave no key in this run → error and reason."""
        self._answered: dict[str, list[str]] = {}
        """Exchange and call → the sites of their sum, as the sites were told."""
        self._announced: list[str] | None = None
        """The sites of the present sum as they were told before the coordinator was killed; None: it was not."""
        self._weighing: Weighing | None = None
        self._sum: SumAsked | None = None
        self._order: Order | None = None
        self._read()

    # The first exchange: masked answers -------------------------------------------------------------------------------

    def sum_replies(self, call: str, to: tuple[str, ...], content: Mapping[str, Content | PerSite], by: By) -> Mean:
        # The first sum of a run decides who has a key, and other sources may be drawn for the next.
        self._fetch_keys(to if self.per_round is None else self.sources)
        number = self.progress.exchange
        self._announced = self._answered.get(f"{number}-{call}")
        sums: dict[Layout, SecureSum] = {}
        self._weighing = Weighing.of(by, [self.checks.samples_of(site) for site in to])
        self._shared.call = call
        try:
            for site, added in self._exchange(call, to, content, self._weighing):
                assert self._order is not None  # as `deliver` made sure
                sum_ = sums.setdefault(added.layout, SecureSum(self._order))
                upload, _ = upload_of({"sum": added.numbers}, self._order, added.layout.length)
                sum_.add(site, upload)
                del added, upload  # before the next is read
        finally:
            self._weighing = self._sum = self._order = self._shared.call = None
        # Sites whose contribution is laid out otherwise than those of most are in no sum.
        layout = max(sums, key=lambda candidate: len(sums[candidate].answered), default=None)
        answered = sums[layout].answered if layout is not None else []
        for site in (site for other, sum_ in sums.items() if other != layout for site in sum_.answered):
            reason = "it contributes other tensors than most sites"
            self._record(call, site, "refused", reason)
            error = ReplyRefused(f"the reply of site '{site}' in round {self.round}: {reason}")
            self.go_on_without(Missing(site, error), len(to), len(to) - len(answered))
        self.check_number(answered, to)
        self._check_whole(call, answered, to)
        assert layout is not None
        if self._announced is not None and self._announced != answered:
            gone = next(site for site in self._announced if site not in answered)
            raise FedshiftError(
                f"round {self.round}, call {call}: site '{gone}' is in the sum that others may have unmasked already, "
                "and did not answer: when it is back, continue with fedshift deploy resume"
            )
        self._answered[f"{number}-{call}"] = answered
        self._write()
        return self._unmask(call, sums[layout], layout)

    def check_number(self, answered: Sequence[str], asked: Sequence[str]) -> None:
        needed = threshold(len(asked), self._colluders)
        if len(answered) < needed:
            raise FedshiftError(
                f"round {self.round}: {len(answered)} of {len(asked)} sites answered; secure aggregation needs {needed}"
            )

    def _check_whole(self, call: str, answered: Sequence[str], asked: Sequence[str]) -> None:
        """Raise FedshiftError if the sites would refuse to unmask, before any is told who answered."""
        lost = [site for site in asked if site in self._cards and site not in answered]
        if self._whole and lost:
            reason = self.missing.get(lost[0], "")
            raise FedshiftError(
                f"round {self.round}, call {call}: site '{lost[0]}' is not in the sum, and without it the others "
                f"unmask none (rule policy.roster){': ' if reason else ''}{reason}; when that is put right, continue "
                "with fedshift deploy resume"
            )

    def deliver(self, call: str, requests: Iterator[Request]) -> Generator[Answer[Any] | Missing, None, None]:
        if self._weighing is None:
            yield from super().deliver(call, requests)
            return
        asked = list(requests)
        first = asked[0].content
        if any(request.content[name] is not first[name] for request in asked for name in first):
            raise FedshiftError(f"call {call} sends sites different things, so a sum of its replies cannot be masked")
        envelopes = {request.site: request.envelope for request in asked if request.site in self._cards}
        cards = {site: self._cards[site] for site in envelopes}
        self._sum = sum_asked(self._weighing, cards, envelopes, self._colluders)
        whole = CallRequest(call=call, envelope=Work(**vars(asked[0].envelope)), **self._common(asked[0].site))
        self._order, _ = order_in(whole, self._outbox.write(call, ALL, first).body.sha256)
        expected = [site for site in envelopes if self._announced is None or site in self._announced]
        with closing(super().deliver(call, (request for request in asked if request.site in expected))) as answers:
            for request in asked:
                yield next(answers) if request.site in expected else self._not_asked(request.site)

    def reply_of(
        self, kind: type[Reply], call: str, request: Request, answer: CallAnswer, content: Mapping[str, Any]
    ) -> tuple[Reply, OpenFields | None]:
        if self._order is None:
            return super().reply_of(kind, call, request, answer, content)
        layout = Layout.read(answer.layout)
        _, masked = upload_of(content, self._order, layout.length)
        return Contribution(masked, layout), None

    def _common(self, site: str) -> dict[str, Any]:
        more = {} if self._sum is None else {"sum": self._sum}
        return {**super()._common(site), "aggregation": "secure", **more}

    # The second exchange: who answered, and shares --------------------------------------------------------------------

    def _unmask(self, call: str, masked: SecureSum, layout: Layout) -> Mean:
        """The mean of a sum, once enough of its sites told their shares."""
        reasons: list[str] = []
        shares = second_exchange(masked, partial(self._second, reasons), round=self.round)
        total = Total()
        total.sites, total.layout = masked.answered, layout
        try:
            total.numbers = masked.unmask_total(shares)
            return total.mean()
        except FedshiftError as error:
            more = "".join(f"; {reason}" for reason in reasons)
            raise FedshiftError(f"round {self.round}, call {call}: {error}{more}") from None

    def _second(
        self,
        reasons: list[str],
        request: UnmaskRequest,
        content: Mapping[str, Mapping[str, Content]],
        tensors: int,
        read: Callable[[str, Mapping[str, Content]], Any],
    ) -> dict[str, Any]:
        """What the sites of a sum answer to a request of the second exchange, by site; adds why others do not."""
        order, do = request.order, request.do
        outgoing: list[tuple[str, Message]] = []
        keys: dict[str, str] = {}
        for site in content:
            body = body_of(content[site])
            keys[site], asks = stamp(request, body)
            outgoing.append((site, asks))
            self.ledger.record(order.exchange, do, site, "down", body.content)
        answers: dict[str, Any] = {}
        # Once enough sites answered, wait a little for others: what some sent may be wrong.
        seconds = self.patience if self.grace is None else self.grace
        grace, missing = Grace(seconds, order.threshold, len(content), ()), set(content)
        for site, message in self._arrivals(do, outgoing):
            if isinstance(message, Sign):
                if message is Sign.QUIET and grace.over(missing):
                    break
                continue
            try:
                if site not in missing:
                    raise FedshiftError("a second answer, or one that nobody asked for")
                missing.discard(site)
                if isinstance(message, Lost):
                    self._lost.add(site)
                    raise FedshiftError(message.reason)
                result = open_answer(Done, message, keys[site], tensors)
                if isinstance(result.answer, SiteError):
                    raise FedshiftError(result.answer.message[:2000])
                answers[site] = read(site, result.content)
                self.ledger.record(order.exchange, do, site, "up", result.content)
            except FedshiftError as error:
                self._record(do, site, "lost" if isinstance(message, Lost) else "refused", str(error))
                reasons.append(f"site '{site}': {error}")
            grace.note_answer(usable=site in answers)
        return answers

    # Keys -------------------------------------------------------------------------------------------------------------

    def _fetch_keys(self, sites: Sequence[str]) -> None:
        """Ask for the key of each site, once a run."""
        if self._cards:
            return
        cards, without = {}, {}
        request = KeyRequest(do="key", run=self.run)
        answers = ask_sites(self.transport, dict.fromkeys(sites, request), self.deadline, KeyAnswer)
        for site, answer in answers.items():
            if isinstance(answer, Lost):
                without[site] = [answer.error, answer.reason]
            else:
                cards[site] = answer.answer.of(site)
        for number, site in enumerate(without, 1):
            self._record("key", site, "lost", without[site][1])
            if self._whole and without[site][0] != KindRefused.__name__:  # or no sum could ever be with it
                raise FedshiftError(
                    f"site '{site}' gives no key for secure aggregation: {without[site][1]}; a run without it would "
                    "keep the others to sums without it (rule policy.roster): when that is put right, continue with "
                    "fedshift deploy resume"
                )
            self._without[site] = without[site]
            self.go_on_without(self._not_asked(site), len(sites), number)
        if len(cards) < SMALLEST_ROSTER:
            raise FedshiftError(f"{len(cards)} sites gave a key for secure aggregation, which needs {SMALLEST_ROSTER}")
        self._cards = cards
        self._write()

    def _not_asked(self, site: str) -> Missing:
        """A site that has no part in a sum."""
        if site in self._cards:
            return Missing(
                site, FedshiftError(f"site '{site}' did not answer before others were told whom the sum is of")
            )
        name, reason = self._without.get(site, ["", "it had no part in the run's first sum"])
        kind = next((item for item in (KindRefused, Refused, UserError) if item.__name__ == name), FedshiftError)
        text = reason if reason.startswith(f"site '{site}'") else f"site '{site}' gave no key in this run: {reason}"
        return Missing(site, kind(text), "" if name else "when it is back, continue with fedshift deploy resume")

    # The record -------------------------------------------------------------------------------------------------------

    def save_memory(self, folder: Path) -> dict[str, dict[str, str]]:
        before = self._checkpoint
        files = super().save_memory(folder)
        if self._file.exists():
            # What the previous checkpoint covers is over, even if the coordinator is killed before this one is written.
            answered = self._answered.items()
            self._answered = {name: sites for name, sites in answered if int(name.split("-")[0]) > before}
            self._write()
            files.setdefault(HERE, {})[_ENTRY] = self._file.name
        return files

    def load_memory(self, folder: Path, files: Mapping[str, Mapping[str, str]]) -> None:
        residuals = {name: file for name, file in files.get(HERE, {}).items() if name != _ENTRY}
        super().load_memory(folder, {**files, HERE: residuals})

    def _write(self) -> None:
        whole = _Record(
            cards={site: card.entry for site, card in self._cards.items()},
            without={site: (error, reason) for site, (error, reason) in self._without.items()},
            answered={name: tuple(sites) for name, sites in self._answered.items()},
        )
        write_object(self._file, whole.model_dump(mode="json"), private=True)

    def _read(self) -> None:
        whole = read_stored(_Record, self._file, _REMEDY)
        if whole is None:
            return
        self._cards = {site: KeyCard(site, *entry) for site, entry in whole.cards.items()}
        self._without = {site: list(why) for site, why in whole.without.items()}
        self._answered = {name: list(sites) for name, sites in whole.answered.items()}


class _SharedOutbox(Outbox):
    """An outbox that writes the same bytes of a call for all sites, whatever each was sent before.

    With rounded weights, a site gets the common residual of the last content even if it missed that content.
    """

    call: str | None = None

    def write(self, call: str, site: str, content: Mapping[str, Content]) -> Written:
        return super().write(call, ALL if call == self.call else site, content)

    def note_delivery(self, call: str, site: str, residuals: Residuals) -> None:
        super().note_delivery(call, ALL if call == self.call else site, residuals)
