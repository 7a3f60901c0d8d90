"""A federation whose sites are other machines: requests and replies as messages, which a `Transport` carries.

Replies come in any order and are handed on in the order asked, so a run over a network ends in the same bits as one in
a single process. A reply that is late, doubled, of another shape or not finite is refused and recorded, and its site
counts as lost in this exchange.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from fedshift.errors import FedshiftError, KindRefused, Refused, TrainingDiverged
from fedshift.federation.exchange import Answer, Missing, Request
from fedshift.federation.federation import Federation, StepOwner
from fedshift.federation.messages import Content, Reply, Statistics
from fedshift.federation.remote.outbox import Outbox
from fedshift.federation.remote.policy import ACCURACY
from fedshift.federation.remote.reply_checks import Layout, TensorCheck, checked_measures, checked_reply, reply_type
from fedshift.federation.remote.transport import PROTOCOL, Lost, Transport, opened, request_key
from fedshift.federation.remote.wire import Message, Residuals, Wire, body_of, seal
from fedshift.weights import NamedTensors, Weights

HERE = "coordinator"
"""Where a checkpoint keeps what is the coordinator's own; no site may be called so."""

Event = Callable[[dict[str, Any]], None]
"""Told of every step on the way of an exchange, for people who watch."""


class RemoteFederation(Federation):
    """Sites behind a `Transport`.

    recipe and parts: the setting, and what each site is told of its own part. Every request repeats them, so a site
    that was started again needs no memory of the coordinator. like: the network's tensors, to check models against.
    samples: how many each site said that it trains on; a reply cannot claim more, which would outweigh the others.
    """

    def __init__(
        self,
        method: StepOwner,
        transport: Transport,
        *,
        run: str,
        recipe: Mapping[str, Any],
        parts: Mapping[str, Mapping[str, Any]],
        like: Mapping[str, Tensor],
        samples: Mapping[str, int],
        deadline: float,
        wire: Wire = "float32",
        patience: float = 10.0,
        on_event: Event | None = None,
        **options: Any,
    ) -> None:
        super().__init__(method, **options)
        self.transport, self.run = transport, run
        self.deadline, self.wire, self.patience = deadline, wire, patience
        self._recipe, self._parts = recipe, parts
        self._tensors, self._samples = TensorCheck(like), samples
        self._event = on_event or (lambda event: None)
        self._memory: dict[str, dict[str, str]] = {}
        self._kept: dict[str, dict[str, str]] = {}
        self._checkpoint = 0
        self._lost: set[str] = set()
        self._outbox = Outbox(wire)

    # An exchange ------------------------------------------------------------------------------------------------------

    def crossing(self, step: str, site: str, content: Mapping[str, Content]) -> Mapping[str, Content]:
        return self._outbox.write(step, site, content).body.content

    def deliver(self, step: str, requests: Iterator[Request]) -> Generator[Answer[Any] | Missing, None, None]:
        """Send all requests, hand the answers on in the order asked; those of lost sites are left out, and those of
        sites that refuse are `Missing`.
        """
        self._outbox.clear()
        asked: list[Request] = []
        keys: dict[str, str] = {}
        owed: dict[str, Residuals] = {}

        def messages() -> Iterator[tuple[str, Message]]:
            for request in requests:
                asked.append(request)
                written = self._outbox.write(step, request.site, request.content)
                body, owed[request.site] = written.body, written.owed
                header = {
                    "do": "step",
                    "step": step,
                    "envelope": vars(request.envelope),
                    "memory": self._memory.get(request.site, {}),
                    **self._common(request.site),
                }
                keys[request.site] = header["key"] = request_key(header, body.sha256)
                yield request.site, seal(header, body)

        kind = reply_type(self.method, step)
        outgoing = list(messages())
        self._outbox.clear()
        waiting: dict[str, _Taken | Lost] = {}
        arrivals = self._arrivals(step, outgoing)
        del outgoing
        by_site = {request.site: request for request in asked}

        def takes_in() -> bool:
            """Whether another message came."""
            found = next(arrivals, None)
            if found is None:
                return False
            site, message = found
            if site not in by_site:
                self._record(step, site, "refused", "a reply of a site that was not asked")
            elif site in waiting:
                self._record(step, site, "refused", "a second reply to one request")
            else:
                waiting[site] = self._taken(kind, step, by_site[site], message, keys[site])
            return True

        lost: list[Request] = []
        gone = 0
        spent: list[float] = []
        for request in asked:
            while request.site not in waiting and takes_in():
                pass
            outcome = waiting.setdefault(request.site, Lost("did not answer"))
            if isinstance(outcome, _Taken) and outcome.layout is not None:
                while takes_in():  # who is the odd one shows when all have answered
                    pass
                self._compare(step, waiting, len(asked))
                outcome = waiting[request.site]
            if isinstance(outcome, Lost):
                gone += 1
                self._record(step, request.site, "refused" if outcome.refused else "lost", outcome.reason)
                self._may_go_on(step, request.site, len(asked), gone, outcome)
                why = outcome.missing()
                if why is not None:
                    yield Missing(request.site, why)
                else:
                    self._lost.add(request.site)
                    lost.append(request)
                continue
            answer, memory = outcome.answer, outcome.memory
            waiting[request.site] = Lost("handed on")
            self._lost.discard(request.site)
            self._memory[request.site] = memory
            self._outbox.taken(step, request.site, owed[request.site])
            budget = self.budget.get(request.site, 0)
            spent.append(answer.mini_batches / budget if budget else 0.0)
            yield answer
        for request in lost:
            self.forfeit(request.site, spent)

    def _arrivals(
        self, what: str, outgoing: list[tuple[str, Message]]
    ) -> Generator[tuple[str, Message | Lost], None, None]:
        for site, message in outgoing:
            self._event({"what": what, "site": site, "is": "asked", "bytes": message.size, **self._where()})
        patience = dict.fromkeys(self._lost, self.patience)
        for site, reply in self.transport.exchange(iter(outgoing), self.deadline, patience):
            if isinstance(reply, Message):
                self._event({"what": what, "site": site, "is": "answered", "bytes": reply.size, **self._where()})
            yield site, reply

    def _taken(
        self, kind: type[Reply], step: str, request: Request, message: Message | Lost, key: str
    ) -> _Taken | Lost:
        """The answer in a message, or why it cannot be used. Raises what a site raised that no waiting will change."""
        if isinstance(message, Lost):
            return message
        site = request.site
        try:
            header, content, crossed = opened(message, key)
            if "error" in header:
                return self._site_error(site, header)
            mini_batches, memory = header.get("mini_batches"), header.get("memory")
            if not isinstance(mini_batches, int) or isinstance(mini_batches, bool) or mini_batches < 0:
                raise FedshiftError("it does not say how many mini-batches it took")
            left = max(0, request.envelope.mini_batches_left)
            if mini_batches > left:  # what it says also counts for sites that are lost, see `forfeit`
                raise FedshiftError(f"it says that it took more mini-batches than the {left} that it had left")
            if not isinstance(memory, dict) or not all(
                isinstance(item, str) for pair in memory.items() for item in pair
            ):
                raise FedshiftError("it does not say what the site remembers")
            reply = checked_reply(kind, content)
            number = content.get("samples", 0)
            if isinstance(number, int) and not 0 <= number <= self._samples[site]:
                raise FedshiftError(f"it says that it has {number} samples, of {self._samples[site]}")
            layout = self._tensors.check(step, kind, content, request.content)
        except FedshiftError as error:
            if isinstance(error, _Stop):
                raise error.reason from None
            return self._refused(step, site, str(error))
        return _Taken(Answer(site, reply, mini_batches, crossed), memory, layout)

    def _refused(self, step: str, site: str, reason: str) -> Lost:
        self._record(step, site, "refused", reason)
        return Lost(f"its reply was refused: {reason}")

    def _compare(self, step: str, waiting: dict[str, _Taken | Lost], asked: int) -> None:
        """Refuse replies whose models are not such as most sites sent, where nothing else says how they must be."""
        taken = {site: one for site, one in waiting.items() if isinstance(one, _Taken)}
        layouts = {site: one.layout for site, one in taken.items() if one.layout is not None}
        odd = self._tensors.odd_ones(step, layouts, asked)
        for site in layouts:
            waiting[site] = self._refused(step, site, odd[site]) if site in odd else replace(taken[site], layout=None)

    def _site_error(self, site: str, header: Mapping[str, Any]) -> Lost:
        name, text = str(header.get("error")), str(header.get("message"))[:2000]
        stops: dict[str, type[FedshiftError]] = {"Refused": Refused}
        if self.on_refusal == "stop":
            stops["KindRefused"] = KindRefused
        if self.quorum is None:
            stops["TrainingDiverged"] = TrainingDiverged
        if name in stops:
            raise _Stop(stops[name](text))
        return Lost(text, name)

    def _may_go_on(self, step: str, site: str, asked: int, gone: int, outcome: Lost) -> None:
        """Raises FedshiftError when too few sites are left for this exchange."""
        needed = asked if self.quorum is None else min(self.quorum, asked)
        if asked - gone < needed:
            left = f"{asked - gone} of {asked} sites are left and the experiment asks for {needed} (engine.quorum)"
            why = outcome.missing()
            if why is not None:
                raise type(why)(f"round {self.round}, step {step}: {why}; {left}")
            raise FedshiftError(
                f"round {self.round}, step {step}: site '{site}' is lost ({outcome.reason}); {left}; when the site is "
                "back, go on with fedshift deploy resume"
            )

    def _record(self, step: str, site: str, outcome: str, reason: str) -> None:
        self._event({"what": step, "site": site, "is": outcome, "reason": reason[:500], **self._where()})

    def _where(self) -> dict[str, Any]:
        return {"run": self.run, "round": self.round, "exchange": self.progress.exchange}

    def _common(self, site: str) -> dict[str, Any]:
        """What every request repeats."""
        return {
            "protocol": PROTOCOL,
            "run": self.run,
            "setting": self._recipe,
            "part": self._parts[site],
            "kept": self._kept.get(site, {}),
            "checkpoint": self._checkpoint,
            "wire": self.wire,
        }

    # Measuring --------------------------------------------------------------------------------------------------------

    def measure(self, weights: Weights, sites: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Each site's accuracy on its own held-out samples, with the counts per class; lost sites are left out.

        What crosses is counted under the kind ``accuracy``, apart from what the method sends.
        """
        body = body_of({"weights": weights}, self.wire)
        size = sum(value.nbytes for value in body.content.values() if isinstance(value, NamedTensors))
        outgoing: list[tuple[str, Message]] = []
        keys: dict[str, str] = {}
        for site in sites:
            header = {"do": "measure", "round": self.round, **self._common(site)}
            keys[site] = header["key"] = request_key(header, body.sha256)
            outgoing.append((site, seal(header, body)))
            self.ledger.record(0, "measure", site, "down", {"measured": _counted(size)})
        found: dict[str, dict[str, Any]] = {}
        for site, message in self._arrivals("measure", outgoing):
            if isinstance(message, Lost):
                self._record("measure", site, "lost", message.reason)
                self._lost.add(site)
                continue
            try:
                header, _, _ = opened(message, keys.get(site, ""))
                if "error" in header:
                    lost = self._site_error(site, header)
                    self._record("measure", site, "refused" if lost.refused else "lost", lost.reason)
                    if lost.refused:
                        self.note_refusal(site, lost.reason)
                    continue
                if site in found:
                    raise FedshiftError("a second reply to one request")
                found[site] = checked_measures(header.get("measures"), int(self._recipe["classes"]))
            except _Stop as stop:
                raise stop.reason from None
            except FedshiftError as error:
                self._record("measure", site, "refused", str(error))
                continue
            self.ledger.record(
                0, "measure", site, "up", {"measures": _counted(8 * (2 + 2 * len(found[site]["classes"])))}
            )
        return {site: found[site] for site in sites if site in found}

    # Checkpoints ------------------------------------------------------------------------------------------------------

    def save_memory(self, folder: Path) -> dict[str, dict[str, str]]:
        """What each site remembers lies at the site; the checkpoint holds the names of its files. What sites are owed
        lies here.
        """
        self._kept = {site: dict(files) for site, files in self._memory.items()}
        self._checkpoint = self.progress.exchange
        owed = self._outbox.save(folder / HERE, self._checkpoint)
        return {**{site: dict(names) for site, names in self._memory.items()}, **({HERE: owed} if owed else {})}

    def load_memory(self, folder: Path, files: Mapping[str, Mapping[str, str]]) -> None:
        """Sites load what the next request names."""
        self._memory = {site: dict(names) for site, names in files.items() if site != HERE}
        self._kept = {site: dict(names) for site, names in self._memory.items()}
        self._checkpoint = self.progress.exchange
        self._outbox.load(folder / HERE, files.get(HERE, {}))


@dataclass(frozen=True)
class _Taken:
    """A reply that can be used. layout: of its models, when they are still to be compared with those of other sites."""

    answer: Answer[Any]
    memory: dict[str, str]
    layout: Layout | None


class _Stop(FedshiftError):
    """Carries out of a reply's check what ends the run."""

    def __init__(self, reason: FedshiftError) -> None:
        super().__init__(str(reason))
        self.reason = reason


class Measured(Statistics):
    """Stands in the ledger for a model sent to be measured, and for what is said of it."""

    kind = ACCURACY


def _counted(size: int) -> Measured:
    import torch

    return Measured({"bytes": torch.empty(size, dtype=torch.uint8, device="meta")})
