"""A remote federation whose server carries and keeps models without reading them.

What a method declares in `Traits.routed` comes sealed for its readers. The method's server code has models of
`ClosedTensor`s in its place, which it can put together, hand on and keep in the run's state, but not compute with.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fedshift.deploy.crypto.masked_sums import KeyAnswer, KeyEntry
from fedshift.deploy.remote.remote_federation import RemoteFederation
from fedshift.deploy.remote.requests import CallAnswer, KeyRequest, Measures, SealAsked
from fedshift.deploy.remote.transport import Lost, ask_sites
from fedshift.errors import FedshiftError
from fedshift.federation.exchange import Answer, Missing, Request
from fedshift.federation.messages import Content, PerSite, Reply
from fedshift.federation.replies import Layout
from fedshift.federation.secure.closed import Box, ClosedTensor, Passage, most_bytes, to_sendable
from fedshift.weights import Weights


class SealedFederation(RemoteFederation):
    """Sites behind a `Transport`. What only some sites may read is sealed with keys of theirs."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._cards: dict[str, KeyEntry] = {}
        self._readers: dict[str, list[str]] | None = None
        """Site → the readers for whom its reply is sealed, while an exchange is under way."""
        self._refusals: dict[str, str] = {}
        """Site → why it refused to measure a model."""

    def deliver(self, call: str, requests: Iterator[Request]) -> Generator[Answer[Any] | Missing, None, None]:
        way = self.method.calls.routing(call)
        try:
            if way is not None:
                asked = list(requests)
                senders = [request.site for request in asked]
                readers = {"target": self.targets, "sender": senders, "all": sorted(self._parts)}[way.readers]
                known = self._with_keys(readers)
                self._readers = {site: [site] if way.readers == "sender" else known for site in senders}
                requests = iter(asked)
            yield from super().deliver(call, requests)
        finally:
            self._readers = None

    def reply_of(
        self, kind: type[Reply], call: str, request: Request, answer: CallAnswer, content: Mapping[str, Any]
    ) -> tuple[Reply, Layout | None]:
        way = self.method.calls.routing(call)
        if way is None or self._readers is None:
            return super().reply_of(kind, call, request, answer, content)
        box = Box.read(content.get(way.field), most_bytes(self.checks.size, len(self.sources)))
        exchange = request.envelope.exchange
        readers = tuple(sorted(self._readers[request.site]))
        if box.passage != Passage(self.run, exchange, call, way.field, request.site, readers):
            raise FedshiftError(f"its sealed model is not that of exchange {exchange} for {' and '.join(readers)}")
        # The rest is checked as always, with zeros in place of the numbers that only the readers can check.
        zeros, closed = box.stand_ins(), box.closed_models()
        reply, layout = super().reply_of(kind, call, request, answer, {**content, way.field: zeros.get("", zeros)})
        return replace(reply, **{way.field: closed.get("", closed)}), layout

    def measure(
        self, weights: Weights, sites: Sequence[str], needed: Collection[str], **whole: Any
    ) -> dict[str, Measures]:
        """As `RemoteFederation.measure`, by the sites that can open the model."""
        boxes = {tensor.origin[0] for tensor in weights.values() if isinstance(tensor, ClosedTensor)}
        able = [site for site in sites if all(site in box.passage.readers for box in boxes)]
        self._refusals.clear()
        measure = super().measure(weights, able, needed, **whole)
        for site in needed:
            if site not in measure and site in self._refusals:
                raise FedshiftError(self._refusals[site])
        return measure

    def _record(self, call: str, site: str, outcome: str, reason: str) -> None:
        if reason.startswith(f"site '{site}'"):
            self._refusals[site] = reason
        super()._record(call, site, outcome, reason)

    def _content_for(self, site: str, name: str, value: Content | PerSite) -> Content:
        sent: Content = to_sendable(super()._content_for(site, name, value))
        return sent

    def _common(self, site: str) -> dict[str, Any]:
        readers = (self._readers or {}).get(site)
        more = {} if readers is None else {"seal": SealAsked(readers={name: self._cards[name] for name in readers})}
        return {**super()._common(site), "routing": "sealed", "at": self.progress.exchange, **more}

    def _with_keys(self, readers: Sequence[str]) -> list[str]:
        """Those of the readers that gave a key, which is asked for once a run."""
        asked = [site for site in readers if site not in self._cards]
        seconds = self.patience if self._lost.issuperset(asked) else self.deadline
        request = KeyRequest(do="sealing_key", run=self.run)
        answers = ask_sites(self.transport, dict.fromkeys(asked, request), seconds, KeyAnswer) if asked else {}
        for site, answer in answers.items():
            if not isinstance(answer, Lost):
                self._cards[site] = answer.answer.card
                continue
            if self.quorum is None or site not in self.sources:
                raise FedshiftError(
                    f"site '{site}' gives no key to seal models for it: {answer.reason}; when that is put right, "
                    "continue with fedshift deploy resume"
                )
            self._record("sealing_key", site, "lost", answer.reason)
            self._lost.add(site)
        return [site for site in readers if site in self._cards]
