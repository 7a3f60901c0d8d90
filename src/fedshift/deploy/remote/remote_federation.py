"""A federation whose sites are other machines. A `Transport` carries requests and replies as messages.

Replies arrive in any order and are handed on in the order asked, so a run over a network gives the same bits as one in
a single process. A reply that is late, doubled, of another shape or not finite is refused and recorded, and its site
counts as lost in this exchange.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from fedshift.deploy.remote.incoming import Grace, Spool, Stop, Taken
from fedshift.deploy.remote.outbox import HERE, Outbox
from fedshift.deploy.remote.requests import (
    CallAnswer,
    CallRequest,
    MeasureAnswer,
    Measured,
    MeasureRequest,
    Measures,
    PredictRequest,
    SitePart,
    Whole,
    Work,
    check_measures,
    for_ledger,
    report_bytes,
    sums_bytes,
)
from fedshift.deploy.remote.transport import Done, Lost, Sign, SiteError, Transport, drain, heard, open_answer, stamp
from fedshift.deploy.remote.wire import Message, Residuals, Wire, body_of
from fedshift.errors import FedshiftError, KindRefused, Refused, TrainingDiverged
from fedshift.federation.exchange import Answer, Missing, Request
from fedshift.federation.federation import CallOwner, Federation
from fedshift.federation.messages import Content, Reply
from fedshift.federation.replies import About, Layout, checked_reply, reply_type
from fedshift.federation.secure.closed import in_two
from fedshift.federation.setting_json import SettingRecipe
from fedshift.weights import NamedTensors, Weights

Event = Callable[[dict[str, Any]], None]
"""Called with each event of an exchange (asked, answered, lost, refused), for people who watch."""


@dataclass
class _Exchange:
    """What was asked, and what has come in and is not handed on yet."""

    call: str
    kind: type[Reply]
    asked: Mapping[str, Request]
    keys: Mapping[str, str]
    arrivals: Generator[tuple[str, Message | Lost | Sign], None, None]
    grace: Grace
    spool: Spool
    waiting: dict[str, Taken | Lost] = field(default_factory=dict)

    def stop_if_over(self) -> None:
        """Wait no longer for the sites that are missing, if their time is over."""
        missing = self.asked.keys() - self.waiting.keys()
        if self.grace.over(missing):
            self.arrivals.close()
            self.waiting.update(dict.fromkeys(missing, self.grace.too_late))

    def keep(self, site: str, taken: Taken | Lost, message: Message | Lost, *, awaited: bool) -> None:
        """Keep what a site answered; unless it is awaited, its message may go to a file."""
        # Whether an open field fits shows when all have answered, so such an exchange waits for all.
        self.grace.note_answer(usable=isinstance(taken, Taken) and taken.layout is None)
        if isinstance(taken, Taken) and isinstance(message, Message) and not awaited:
            held = self.spool.hold(message)
            if held is not None and held.paths:  # then its answer need not wait in memory
                taken = replace(taken, answer=None, held=held)
        self.waiting[site] = taken


class RemoteFederation(Federation):
    """Sites behind a `Transport`.

    Every request repeats ``recipe`` and the site's entry of ``parts``: a restarted site needs no memory of the run.

    Args:
        deadline: seconds that an exchange waits for answers.
        patience: seconds in which a site that was lost before must fetch its request.
        grace: seconds that sites are waited for once a quorum has answered; None: until the deadline.
    """

    checks_replies: ClassVar[bool] = True

    def __init__(
        self,
        method: CallOwner,
        transport: Transport,
        *,
        run: str,
        recipe: SettingRecipe,
        parts: Mapping[str, SitePart],
        about: Mapping[str, About],
        deadline: float,
        wire: Wire = "float32",
        patience: float = 10.0,
        grace: float | None = None,
        on_event: Event | None = None,
        **options: Any,
    ) -> None:
        super().__init__(method, about=about, **options)
        self.transport, self.run = transport, run
        self.deadline, self.wire, self.patience, self.grace = deadline, wire, patience, grace
        self._recipe, self._parts = recipe, parts
        self._event = on_event or (lambda event: None)
        self._memory: dict[str, dict[str, str]] = {}
        self._kept: dict[str, dict[str, str]] = {}
        self._checkpoint = 0
        self._lost: set[str] = set()
        self._outbox = Outbox(wire)

    # An exchange ------------------------------------------------------------------------------------------------------

    def crossing(self, call: str, site: str, content: Mapping[str, Content]) -> Mapping[str, Content]:
        return self._outbox.write(call, site, content).body.content

    def deliver(self, call: str, requests: Iterator[Request]) -> Generator[Answer[Any] | Missing, None, None]:
        """Send all requests and yield the answers in the order asked."""
        self._outbox.clear()
        asked: dict[str, Request] = {}
        keys: dict[str, str] = {}
        residuals: dict[str, Residuals] = {}
        outgoing: list[tuple[str, Message]] = []
        for request in requests:
            asked[request.site] = request
            outgoing.append((request.site, self._message_to(call, request, keys, residuals)))
        self._outbox.clear()
        with Spool() as spool:
            yield from self._receive(call, asked, outgoing, keys, residuals, spool)

    def _message_to(
        self, call: str, request: Request, keys: dict[str, str], residuals: dict[str, Residuals]
    ) -> Message:
        site, written = request.site, self._outbox.write(call, request.site, request.content)
        envelope = vars(request.envelope)
        if self.finishing:  # a site has agreed to a number of mini-batches
            envelope = {**envelope, "mini_batches_left": self.budget[site]}
        memory = self._memory.get(site, {})
        whole = CallRequest(call=call, envelope=Work(**envelope), memory=memory, **self._common(site))
        keys[site], message = stamp(whole, written.body)
        residuals[site] = written.residuals
        return message

    def _receive(
        self,
        call: str,
        asked: Mapping[str, Request],
        outgoing: list[tuple[str, Message]],
        keys: Mapping[str, str],
        residuals: Mapping[str, Residuals],
        spool: Spool,
    ) -> Generator[Answer[Any] | Missing, None, None]:
        """Send requests and yield the answers in the order asked; those that come too early wait in the spool."""
        grace = Grace(self.grace, self.quorum, len(asked), self._lost)
        kind, arrivals = reply_type(self.method, call), self._arrivals(call, outgoing)
        exchange = _Exchange(call, kind, asked, keys, arrivals, grace, spool)
        for site in asked:
            outcome = self._outcome(exchange, site)
            if isinstance(outcome, Lost):
                self._record(call, site, "refused" if outcome.refused else "lost", outcome.reason)
                yield self._missing(call, site, outcome)
                continue
            exchange.waiting[site] = Lost("handed on")
            self._lost.discard(site)
            self._memory[site] = outcome.memory
            self._outbox.note_delivery(call, site, residuals[site])
            assert outcome.answer is not None
            yield outcome.answer
            del outcome  # before the next is read

    def _outcome(self, exchange: _Exchange, site: str) -> Taken | Lost:
        """The answer of a site, for which what comes before it is taken in, or why there is none."""
        waiting = exchange.waiting
        while site not in waiting and self._takes_in(exchange, site):
            pass
        outcome = waiting.setdefault(site, Lost("did not answer"))
        if isinstance(outcome, Taken) and outcome.layout is not None:
            while self._takes_in(exchange, site):  # open fields can be compared only when all sites have answered
                pass
            self._compare(exchange.call, waiting, len(exchange.asked))
            outcome = waiting[site]
        if isinstance(outcome, Taken) and outcome.held is not None:
            return self._read_reply_of(exchange, site, exchange.spool.take(outcome.held))
        return outcome

    def _takes_in(self, exchange: _Exchange, awaited: str) -> bool:
        """Take in what comes next; False when nothing more will come."""
        if (result := next(exchange.arrivals, None)) is None:
            return False
        site, message = result
        if message is Sign.QUIET:
            exchange.stop_if_over()
        elif isinstance(message, Sign):
            exchange.grace.note_fetch(site)
        elif site not in exchange.asked:
            self._record(exchange.call, site, "refused", "a reply from a site that was not asked")
        elif site in exchange.waiting:
            self._record(exchange.call, site, "refused", "a second reply to one request")
        else:
            exchange.keep(site, self._read_reply_of(exchange, site, message), message, awaited=site == awaited)
        return True

    def _read_reply_of(self, exchange: _Exchange, site: str, message: Message | Lost) -> Taken | Lost:
        return self._read_reply(exchange.kind, exchange.call, exchange.asked[site], message, exchange.keys[site])

    def _arrivals(
        self, what: str, outgoing: list[tuple[str, Message]]
    ) -> Generator[tuple[str, Message | Lost | Sign], None, None]:
        patience = dict.fromkeys(self._lost, self.patience)
        asked = map(partial(self._note, what, "asked"), drain(outgoing))
        with closing(self.transport.exchange(asked, self.deadline, patience)) as arrivals:
            yield from map(partial(self._note, what, "answered"), arrivals)  # a loop would hold each until the next

    def _note(self, what: str, happened: str, carried: tuple[str, Any]) -> tuple[str, Any]:
        site, message = carried
        if isinstance(message, Message):
            self._event({"what": what, "site": site, "is": happened, "bytes": message.size, **self._where()})
        return carried

    def _read_reply(
        self, kind: type[Reply], call: str, request: Request, message: Message | Lost, key: str
    ) -> Taken | Lost:
        """The answer in a message, or why it cannot be used."""
        if isinstance(message, Lost):
            return message
        site = request.site
        try:
            result = open_answer(CallAnswer, message, key, self.checks.most_tensors(request.content))
            answer = result.answer
            if isinstance(answer, SiteError):
                return self._site_error(site, answer)
            answer.check(max(0, request.envelope.mini_batches_left), self.method.calls.kept_at_sites)
            reply, layout = self.reply_of(kind, call, request, answer, result.content)
        except Stop as stop:
            raise stop.reason from None
        except FedshiftError as error:
            return self._refuse(call, site, str(error))
        except Exception as error:  # nothing that a site sends may end the run
            return self._refuse(call, site, f"it cannot be read ({type(error).__name__})")
        return Taken(Answer(site, reply, answer.mini_batches, result.crossed), answer.memory, layout)

    def reply_of(
        self, kind: type[Reply], call: str, request: Request, answer: CallAnswer, content: Mapping[str, Any]
    ) -> tuple[Reply, Layout | None]:
        """The reply in a message, and the layout of its open fields; raises FedshiftError if it is not as declared."""
        return checked_reply(kind, content), self.checks.check(call, request.site, kind, content, request.content)

    def _refuse(self, call: str, site: str, reason: str) -> Lost:
        self._record(call, site, "refused", reason)
        return Lost(f"its reply was refused: {reason}")

    def _compare(self, call: str, waiting: dict[str, Taken | Lost], asked: int) -> None:
        """Refuse replies whose open fields differ from those of most sites."""
        taken = {site: item for site, item in waiting.items() if isinstance(item, Taken)}
        layouts = {site: item.layout for site, item in taken.items() if item.layout is not None}
        odd = self.checks.odd_ones(call, layouts, asked)
        for site in layouts:
            waiting[site] = self._refuse(call, site, odd[site]) if site in odd else replace(taken[site], layout=None)

    def _site_error(self, site: str, error: SiteError) -> Lost:
        """The error that a site answered with. It ends the run only if the run cannot do without the site."""
        lost = error.as_lost()
        name, text = lost.error, lost.reason
        kinds: tuple[type[FedshiftError], ...] = (Refused, KindRefused, TrainingDiverged)
        kind = next((kind for kind in kinds if kind.__name__ == name), None)
        if kind is not None and not text.startswith(f"site '{site}'"):  # it may name another site
            text = f"site '{site}' answers: {text}"
        if kind is not None and self.quorum is None:
            raise Stop(kind(text))
        return Lost(text, name)

    def _missing(self, call: str, site: str, outcome: Lost) -> Missing:
        """Why a site gave no usable reply. One that did not answer has only ``patience`` seconds the next time."""
        if (why := outcome.missing()) is not None:
            return Missing(site, why)
        self._lost.add(site)
        return Missing(
            site,
            FedshiftError(f"round {self.round}, call {call}: site '{site}' is lost ({outcome.reason})"),
            "when the site is back, continue with fedshift deploy resume"
            + ("; with engine.quorum the others go on without it" if self.quorum is None else ""),
        )

    def _record(self, call: str, site: str, outcome: str, reason: str) -> None:
        self._event({"what": call, "site": site, "is": outcome, "reason": reason[:500], **self._where()})

    def _where(self) -> dict[str, Any]:
        return {"run": self.run, "round": self.round, "exchange": self.progress.exchange}

    def _common(self, site: str) -> dict[str, Any]:
        """The fields of `RunRequest`, which every request of the run repeats."""
        return {
            "run": self.run,
            "setting": self._recipe,
            "part": self._parts[site],
            "kept": self._kept.get(site, {}),
            "checkpoint": self._checkpoint,
            "wire": self.wire,
        }

    # Measuring --------------------------------------------------------------------------------------------------------

    def measure(
        self, weights: Weights, sites: Sequence[str], needed: Collection[str], **whole: Any
    ) -> dict[str, Measures]:
        """Have sites measure a model on their own held-out samples; its bytes are counted as kind ``accuracy``.

        Returns their reports, by site; lost sites are left out. ``needed``: sites to wait for until the deadline, even
        if there is a grace. ``whole``: asks for all metrics (the fields of `requests.Whole`); without them, for the
        accuracy.
        """
        asks = partial(MeasureRequest, round=self.round, whole=Whole(**whole) if whole else None)
        outgoing, keys = self._with_model(asks, weights, sites)
        result, grace = dict[str, Measures](), Grace(self.grace, self.quorum, len(sites), self._lost)
        missing = dict.fromkeys(sites, grace.too_late)
        for site, message in self._arrivals("measure", outgoing):
            if message is Sign.FETCHED:
                grace.note_fetch(site)
            elif isinstance(message, Sign):
                if missing.keys().isdisjoint(needed) and grace.over(missing):
                    break
            elif isinstance(message, Lost):
                missing[site] = message
            else:
                missing.pop(site, None)
                grace.note_answer(usable=site in keys)
                self._take_measures(site, message, keys.get(site, ""), result)
        for site, lost in missing.items():
            self._record("measure", site, "lost", lost.reason)
            self._lost.add(site)
        return {site: result[site] for site in sites if site in result}

    def hand_out(self, weights: Weights, sites: Sequence[str], metadata: Mapping[str, Any]) -> None:
        """Send a run's last model to sites without labels, which keep it; FedshiftError if one does not take it."""
        asks = partial(PredictRequest, round=self.round, metadata=dict(metadata))
        outgoing, keys = self._with_model(asks, weights, sites)
        missing: dict[str, str] = dict.fromkeys(sites, "it did not answer in time")
        for site, message in self._arrivals("predict", outgoing):
            if not isinstance(message, Sign):
                answer = heard(Done, site, message, keys.get(site, ""))
                missing[site] = answer.reason if isinstance(answer, Lost) else ""
        for site, reason in missing.items():
            if reason:
                self._record("predict", site, "lost", reason)
                raise FedshiftError(
                    f"site '{site}' did not take its model: {reason}; when that is put right, continue with fedshift "
                    "deploy resume"
                )

    def _with_model(
        self, asks: Callable[..., MeasureRequest | PredictRequest], weights: Weights, sites: Sequence[str]
    ) -> tuple[list[tuple[str, Message]], dict[str, str]]:
        """Requests with a model, and their keys by site. Only they hold its body: the transport may write it to a
        file."""
        body = body_of(in_two("weights", weights), self.wire)
        size = sum(value.nbytes for value in body.content.values() if isinstance(value, NamedTensors))
        outgoing: list[tuple[str, Message]] = []
        keys: dict[str, str] = {}
        for site in sites:
            held = {"memory": self._memory.get(site, {})} if self._parts[site].personal else {}
            request = asks(**held, **self._common(site))
            keys[site], message = stamp(request, body)
            outgoing.append((site, message))
            sent = for_ledger(Measured if request.do == "measure" else Weights, size)
            self.ledger.record(0, request.do, site, "down", {"model": sent})
        return outgoing, keys

    def _take_measures(self, site: str, message: Message, key: str, reports: dict[str, Measures]) -> None:
        """Add what a site measured to ``reports``, or record why it is refused."""
        try:
            answer = open_answer(MeasureAnswer, message, key).answer
            if isinstance(answer, SiteError):
                self._record_error(site, self._site_error(site, answer))
                return
            if site in reports:
                raise FedshiftError("a second reply to one request")
            check_measures(answer.measures, self._recipe)
            reports[site] = answer.measures
        except Stop as stop:
            raise stop.reason from None
        except FedshiftError as error:
            self._record("measure", site, "refused", str(error))
            return
        sums = reports[site].sums
        told = {} if sums is None else {"sums": sums_bytes(sums)}
        self.ledger.record(0, "measure", site, "up", {"measures": report_bytes(reports[site]), **told})

    def _record_error(self, site: str, lost: Lost) -> None:
        self._record("measure", site, "refused" if lost.refused else "lost", lost.reason)
        if lost.refused:
            self.note_refusal(site, lost.reason)

    # Checkpoints ------------------------------------------------------------------------------------------------------

    def save_memory(self, folder: Path) -> dict[str, dict[str, str]]:
        """Write the rounding residuals, and return the names of all files.

        The memory of a site stays at the site; the checkpoint holds the names of its files.
        """
        self._kept = {site: dict(files) for site, files in self._memory.items()}
        self._checkpoint = self.progress.exchange
        residuals = self._outbox.save(folder / HERE, self._checkpoint)
        return {site: dict(names) for site, names in self._memory.items()} | ({HERE: residuals} if residuals else {})

    def load_memory(self, folder: Path, files: Mapping[str, Mapping[str, str]]) -> None:
        """Restore the rounding residuals. Sites load the files that the next request names."""
        self._memory = {site: dict(names) for site, names in files.items() if site != HERE}
        self._kept = {site: dict(names) for site, names in self._memory.items()}
        self._checkpoint = self.progress.exchange
        self._outbox.load(folder / HERE, files.get(HERE, {}))
