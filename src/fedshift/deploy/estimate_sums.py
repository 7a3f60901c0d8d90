"""The coordinator's part in masked sums over left-out sites: it gets three sums, and no site's part of them.

See `fedshift.evaluation.estimate.pooled`. Masks, codes and shares are those of sums of models.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from fedshift.deploy.crypto.at_server import SecureSum
from fedshift.deploy.crypto.keys import KeyAnswer, KeyCard
from fedshift.deploy.deployed_plan import DeployedPlan, asks_sums, run_at_sites
from fedshift.deploy.event_log import EventLog
from fedshift.deploy.remote.orders import key_entry, order_to_mask, second_exchange, upload_of
from fedshift.deploy.remote.requests import EndRequest, KeyRequest, MaskRequest, UnmaskRequest
from fedshift.deploy.remote.transport import Done, Lost, Transport, ask_for_content, ask_plain
from fedshift.errors import FedshiftError
from fedshift.evaluation.estimate.plain_sums import GivenPooled, given_pooled, given_whole
from fedshift.evaluation.estimate.pooled import FEWEST, Pooled, first_length, whole_of
from fedshift.evaluation.estimate.sums import Numbers
from fedshift.evaluation.estimate.two_classes import MEASURES
from fedshift.experiment.plan import Run
from fedshift.federation.messages import Content
from fedshift.federation.secure.integer_sums import threshold
from fedshift.functional.fixed_point import from_fixed

T = TypeVar("T")
_TENSORS = 3
"""Tensors of a masked part."""


class EstimateSums:
    """Masked sums for the estimates of an experiment: three for each method and seed."""

    def __init__(self, plan: DeployedPlan, transport: Transport, deadline: float, log: EventLog) -> None:
        self._plan, self._transport, self._deadline, self._log = plan, transport, deadline, log
        self._made: dict[str, GivenPooled | None] = {}
        self._asked: dict[str, Sequence[str]] = {}

    def of(self, run: Run) -> GivenPooled | None:
        """What a site without labels is told of the sites that were left out of runs beside its own.

        None if there are too few sites, or a sum could not be made, of which the log is told.
        """
        name = f"{self._plan.experiment.name}-{run.method.display}-seed-{run.seed}-sums"
        if name not in self._made:
            try:
                self._made[name] = self._pool_sums(name, self._scores(run))
            except FedshiftError as error:
                self._log.warn(f"there are no sums over left-out sites of {name}: {error}")
                self._made[name] = None
        return self._made[name]

    def end(self) -> None:
        """Let sites forget their keys of the sums."""
        for name, sites in self._asked.items():
            ask_plain(self._transport, dict.fromkeys(sites, EndRequest(run=name)), self._deadline, Done)

    def _scores(self, run: Run) -> dict[str, str]:
        """By left-out site, the run of which it keeps scores."""
        same = [item for item in self._plan.runs if (item.run.method, item.run.seed) == (run.method, run.seed)]
        asked = [item.run for item in same if asks_sums(self._plan, item)]
        return {item.target: run_at_sites(self._plan.experiment.name, item) for item in asked}

    def _pool_sums(self, name: str, scores: Mapping[str, str]) -> GivenPooled:
        if len(scores) < FEWEST:
            raise FedshiftError(f"{len(scores)} sites send confidences, and a sum is of {FEWEST} or more")
        cards = self._keys(name, list(scores))
        classes = len(self._plan.data.classes)
        added = _Sums(self, name, scores)
        total, sites = added.make(1, cards, first_length(classes))
        first = whole_of(total, len(sites), classes)
        whole = given_whole(first)
        cards = {site: cards[site] for site in sites}
        total, sites = added.make(2, cards, 2, whole=whole)
        unexplained, far = (float(part) for part in total / len(sites))
        cards = {site: cards[site] for site in sites}
        total, _ = added.make(3, cards, 1 + len(MEASURES), whole=whole, unexplained=min(1.0, max(0.0, unexplained)))
        self._log.event({"what": "estimate", "is": "summed", "run": name, "sites": len(sites)})
        return given_pooled(Pooled(first, unexplained, far, float(total[0]), total[1:]))

    def _keys(self, name: str, sites: Sequence[str]) -> dict[str, KeyCard]:
        self._asked[name] = sites
        request = KeyRequest(do="key", run=name)
        answers = ask_plain(self._transport, dict.fromkeys(sites, request), self._deadline, KeyAnswer)
        cards: dict[str, KeyCard] = {}
        for site in sites:
            answer = answers.get(site, Lost("did not answer"))
            if isinstance(answer, Lost):
                self._log.warn(f"site '{site}' is no case of the estimates of {name}: {answer.reason}")
            else:
                cards[site] = answer.answer.of(site)
        if len(cards) < FEWEST:
            raise FedshiftError(f"{len(cards)} sites gave a key, and a sum is of {FEWEST} or more")
        return cards

    def ask(
        self, requests: Mapping[str, tuple[Any, Mapping[str, Content]]], tensors: int, read: Callable[[str, Any], T]
    ) -> dict[str, T]:
        """What sites answer, by site; the log is told of those whose answer is none."""
        result: dict[str, T] = {}
        answers = ask_for_content(self._transport, requests, self._deadline, tensors)
        for site in requests:
            answer = answers.get(site, Lost("did not answer"))
            try:
                if isinstance(answer, Lost):
                    raise FedshiftError(answer.reason)
                result[site] = read(site, answer)
            except FedshiftError as error:
                self._log.warn(f"site '{site}' gives nothing to a sum over left-out sites: {error}")
        return result

    def colluders(self, sites: Sequence[str]) -> int:
        """The most of what these sites expect."""
        return self._plan.agreed.colluders(sites)


@dataclass(frozen=True)
class _Sums:
    """Makes the sums of a name: over the sites that keep ``scores``, by site the run of which."""

    asking: EstimateSums
    name: str
    scores: Mapping[str, str]

    def make(self, step: int, cards: Mapping[str, KeyCard], length: int, **fields: Any) -> tuple[Numbers, list[str]]:
        """A sum of so many numbers (n,), and the sites that it is of."""
        request = MaskRequest(
            run=self.name,
            step=step,
            scores={site: self.scores[site] for site in cards},
            cards={site: key_entry(card) for site, card in sorted(cards.items())},
            threshold=threshold(len(cards), self.asking.colluders(list(cards))),
            **fields,
        )
        order = order_to_mask(request)
        added = SecureSum(order)

        def read(site: str, content: Mapping[str, Content]) -> str:
            upload, _ = upload_of(content, order, 1 + length)
            added.add(site, upload)
            return site

        self.asking.ask(dict.fromkeys(cards, (request, {})), _TENSORS, read)

        def again(asks: UnmaskRequest, content: Mapping[str, Mapping[str, Content]], *how: Any) -> dict[str, Any]:
            return self.asking.ask({site: (asks, sent) for site, sent in content.items()}, *how)

        total = added.unmask_total(second_exchange(added, again))
        if int(total[0]) != len(added.answered):
            raise FedshiftError("the masks of the sites did not cancel: one of them lied")
        return from_fixed(total[1:]).numpy(), added.answered
