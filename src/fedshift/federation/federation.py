"""The federation as a method sees it: the sites that take part, and `ask`, the one way to talk to them."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median_low
from typing import Any, ClassVar, Literal, Protocol

from fedshift.errors import FedshiftError, KindRefused, ReplyRefused, TrainingDiverged, nearest
from fedshift.federation.byte_ledger import Ledger
from fedshift.federation.exchange import Answer, Mean, Missing, R, Replies, Request, Routed, Screening, content_for
from fedshift.federation.messages import Content, PerSite, Reply, promised_kinds, reply_content
from fedshift.federation.randomness import sources_of_round
from fedshift.federation.replies import About, ReplyCheck, reply_type
from fedshift.federation.secure.integer_sums import (
    SMALLEST_ROSTER,
    By,
    SumOnly,
    Total,
    Weighing,
    contribution,
    threshold,
)
from fedshift.federation.site import Envelope, LocalFit, PlugIn, Site
from fedshift.models.network import Network
from fedshift.weights import Weights

OnRefusal = Literal["stop", "leave_out"]
UNLIMITED = 2**31
"""More mini-batches than any exchange has."""
NOT_DRAWN = "sites that were not drawn"


class OfRouting(Protocol):
    """What sealed routing needs of a method's traits."""

    @property
    def routed(self) -> Mapping[str, Routed]: ...


class Calls(Protocol):
    """A method's calls as an engine runs them, what sites remember of them, how to import the method elsewhere."""

    @property
    def kept_at_sites(self) -> tuple[str, ...]: ...

    @property
    def shares(self) -> tuple[str, ...]: ...

    @property
    def keep_own_weights(self) -> bool: ...

    def has(self, call: Callable[..., Any]) -> bool: ...

    def owner(self, call: str) -> Any: ...

    def plug_ins(self, site: Site) -> Sequence[PlugIn]: ...

    def routing(self, call: str) -> Routed | None: ...

    def run(self, call: str, site: Site, content: Mapping[str, Any]) -> Reply: ...

    def in_parts(self, call: str, site: Site, content: Mapping[str, Any]) -> LocalFit: ...

    def recipe(self) -> dict[str, Any]: ...


class CallOwner(Protocol):
    """What an engine needs of a method: its calls and its network."""

    @property
    def calls(self) -> Calls: ...

    @property
    def exchanges_per_epoch(self) -> int: ...

    @property
    def traits(self) -> OfRouting: ...

    def adapt_network(self, network: Network, sources: int) -> Network: ...

    def own_weights(self, weights: Weights, memory: Mapping[str, Content]) -> Weights: ...


@dataclass
class Progress:
    """What a checkpoint stores of a federation: the number of exchanges, and the mini-batches used at each site.

    Those of rounds for which a source was not drawn are among the used ones; ``undrawn`` is their sum over the sites.
    """

    exchange: int = 0
    used: dict[str, int] = field(default_factory=dict)
    undrawn: int = 0


@dataclass
class Turns:
    """Sites that are asked one after the other, and how many of them are missing so far."""

    asked: int
    missing: int = 0


class Federation(ABC):
    """The sites that take part in a run. Methods ask with `ask`; engines subclass this and implement `deliver`.

    Every reply is checked (`replies`). An engine that reads messages from other machines checks them itself and sets
    ``checks_replies``.

    Args:
        method: the method of the run.
        about: what is known of each site, which replies are checked against.
        sources: names of the labelled sites.
        targets: names of the unlabelled sites that take part.
        budget: mini-batches that each site may train on in the whole run.
        rounds: planned rounds.
        seed: of the run, for what the server draws.
        quorum: sites that must answer an exchange, of those asked, for the run to continue without the others;
            None means all.
        on_refusal: whether a site that refuses to send a kind may take part, which `SiteRunner` asks before training.
        on_answer: called with each site that answered and the mini-batches it trained on; once an exchange with
            `NOT_DRAWN` and those that all other sources are charged.
        sums_only: whether replies that hold models are read only as sums (secure aggregation).
        per_round: sources that are drawn for each round, the others are not asked; None: all take part.
    """

    checks_replies: ClassVar[bool] = False

    def __init__(
        self,
        method: CallOwner,
        *,
        about: Mapping[str, About],
        sources: Sequence[str],
        targets: Sequence[str],
        budget: Mapping[str, int],
        rounds: int,
        seed: int,
        quorum: int | None = None,
        on_refusal: OnRefusal = "stop",
        on_answer: Callable[[str, int], None] | None = None,
        sums_only: bool = False,
        per_round: int | None = None,
    ) -> None:
        self.method = method
        self.checks = ReplyCheck(method, about)
        self.quorum = quorum
        self.on_refusal = on_refusal
        self.missing: dict[str, str] = {}
        self.refused: dict[str, list[str]] = {}
        self.sources = tuple(sources)
        self.targets = tuple(targets)
        self.budget = {site: budget.get(site, 0) for site in (*sources, *targets)}
        self.rounds = rounds
        self.seed = seed
        self.sums_only = sums_only
        self.per_round = per_round
        self.ledger = Ledger()
        self.progress = Progress(used=dict.fromkeys((*sources, *targets), 0))
        self.round = 0
        self.finishing = False  # after the last round, when all sites are asked and no budget counts
        self.screening: Screening | None = None
        self._on_answer = on_answer or (lambda site, mini_batches: None)
        self._open: Replies[Any] | None = None
        self._undrawn: dict[str, None] = {}
        self._turns: Turns | None = None

    @abstractmethod
    def deliver(self, call: str, requests: Iterator[Request]) -> Generator[Answer[Any] | Missing, None, None]:
        """Carry the requests to their sites and yield the answers in the same order. Engines implement this.

        A site that is lost, that refuses or whose training diverged is `Missing`.
        """

    def crossing(self, call: str, site: str, content: Mapping[str, Content]) -> Mapping[str, Content]:
        """``content`` as the ledger counts it on its way to ``site``; an engine may send it in a smaller form."""
        return content

    def own_weights(self, site: str, weights: Weights) -> Weights:
        """What predicts at a site that trained, from the published model ``weights``: the same, unless a method keeps
        parts of the model there and the engine can look at them."""
        return weights

    def save_memory(self, folder: Path) -> dict[str, dict[str, str]]:
        """Write what sites remember below ``folder``; return site → entry → file name. Here, sites remember nothing."""
        return {}

    def load_memory(self, folder: Path, files: Mapping[str, Mapping[str, str]]) -> None:
        """Restore what `save_memory` wrote.

        Raises:
            FedshiftError: the engine cannot restore memory.
        """
        if any(files.values()):
            raise FedshiftError(f"{type(self).__name__} cannot restore what sites remember")

    @property
    def drawn(self) -> tuple[str, ...]:
        """The sources that take part in this round; before the first round and after the last, all do."""
        if self.per_round is None or self.round == 0 or self.finishing:
            return self.sources
        return sources_of_round(self.sources, self.per_round, self.seed, self.round)

    def is_exhausted(self) -> bool:
        """Whether every site has used its whole budget."""
        return all(self.progress.used[site] >= self.budget[site] for site in self.progress.used)

    def share(self, site: str) -> int:
        """Mini-batches of one round if ``site`` spreads its budget evenly over the planned rounds."""
        return -(-self.budget[site] // self.rounds)

    def ask(self, call: Callable[..., R], *, to: Sequence[str], **content: Content | PerSite) -> Replies[R]:
        """Run a call of the method at some sites and return one reply from each.

        The call runs when its reply is read, at the latest before the next exchange. Sources that are not drawn for
        this round are not asked.

        Args:
            call: a bound method of this run's method, ``call(site, **content) -> Reply``.
            to: names of the sites.
            content: what the call is given, by argument. Wrap content that differs between sites in `PerSite`.

        Raises:
            FedshiftError: a site is unknown, or content may not travel.
            UserError: a site refuses to send a kind.
        """
        self.settle()
        unknown = [site for site in to if site not in self.progress.used]
        if unknown:
            raise FedshiftError(f"'{unknown[0]}' is not in this federation; {nearest(unknown[0], self.progress.used)}")
        if not self.method.calls.has(call):
            raise FedshiftError("ask takes a call of the method itself, such as self.fit")
        self.progress.exchange += 1
        absent = set(self.sources).difference(self.drawn)
        self._undrawn = {site: None for site in to if site in absent}
        to = tuple(site for site in to if site not in absent)
        if self.sums_only and "weights" in promised_kinds(reply_type(self.method, call.__name__)).values():
            if len(to) < SMALLEST_ROSTER:
                raise FedshiftError(
                    f"secure aggregation sums the replies of at least {SMALLEST_ROSTER} sites; {call.__name__} asks "
                    f"{len(to)}"
                )
            sums: Replies[R] = SumOnly(to, lambda by: self.sum_replies(call.__name__, to, content, by))
            self._open = sums
            return sums
        answers: Generator[tuple[str, R], None, None] = self._exchange(call.__name__, to, content)
        if self.screening is not None:
            answers = self.screening.screen(call.__name__, content, answers)
        self._open = replies = Replies(to, answers)
        return replies

    def ask_further(self, call: Callable[..., R], *, to: Sequence[str], **content: Content | PerSite) -> Replies[R]:
        """As `ask`, but as a part of the last exchange, so that later exchanges draw the same random numbers."""
        self.settle()
        self.progress.exchange -= 1
        return self.ask(call, to=to, **content)

    def ask_in_turn(
        self,
        call: Callable[..., R],
        *,
        to: Sequence[str],
        then: Callable[[str, R], Mapping[str, Content]],
        **content: Content,
    ) -> None:
        """Ask one site after the other, each with what the reply before it led to.

        A missing site counts as in one exchange with all of them. The next site is then sent what it was sent.

        Args:
            call: as for `ask`.
            to: names of the sites, in their order.
            then: from a site and its reply, the content for the next site.
            content: what the first site is sent, by argument.

        Raises:
            FedshiftError: as for `ask`.
        """
        absent = set(self.sources).difference(self.drawn)
        visited, spent, answered = [site for site in to if site not in absent], [], set()
        self._turns = Turns(len(visited))
        sent: Mapping[str, Content] = content
        try:
            for site in visited:
                before = self.progress.used[site]
                for reply in self.ask(call, to=(site,), **sent):
                    sent = then(site, reply)
                    answered.add(site)
                if site in answered and self.budget[site]:
                    spent.append((self.progress.used[site] - before) / self.budget[site])
        finally:
            self._turns = None
        self._undrawn = {site: None for site in to if site in absent}
        for site in to:
            if site not in answered:
                self.forfeit(site, spent)

    def settle(self) -> None:
        """Finish the last exchange if its replies were not all read."""
        if self._open is not None:
            open_replies, self._open = self._open, None
            open_replies.drain()

    def sum_replies(self, call: str, to: tuple[str, ...], content: Mapping[str, Content | PerSite], by: By) -> Mean:
        """The mean of the replies, added as integers: the order of sites and the engine change no bit.

        Raises:
            FedshiftError: fewer sites answered than a sum over a network needs.
        """
        weighing = Weighing.of(by, [self.checks.samples_of(site) for site in to])
        total = Total()
        for site, added in self._exchange(call, to, content, weighing):
            total.add(site, added)
        self.check_number(total.sites, to)
        return total.mean()

    def check_number(self, answered: Sequence[str], asked: Sequence[str]) -> None:
        """Raise FedshiftError unless enough sites answered for a sum."""
        if len(answered) < threshold(len(asked)):
            raise FedshiftError(
                f"round {self.round}: {len(answered)} of {len(asked)} sites answered; secure aggregation needs more "
                "than half"
            )

    def _content_for(self, site: str, name: str, value: Content | PerSite) -> Content:
        """What ``site`` is sent of ``value``."""
        return content_for(site, name, value)

    def _exchange(
        self,
        call: str,
        to: tuple[str, ...],
        content: Mapping[str, Content | PerSite],
        weighing: Weighing | None = None,
    ) -> Generator[tuple[str, Any], None, None]:
        number, shares = self.progress.exchange, self._spent_shares(to, alike=weighing is not None)
        content_of = {
            site: {name: self._content_for(site, name, value) for name, value in content.items()} for site in to
        }

        def requests() -> Iterator[Request]:
            for site in to:
                self.ledger.record(number, call, site, "down", self.crossing(call, site, content_of[site]))
                left = UNLIMITED if self.finishing else self.budget.get(site, 0) - self.progress.used[site]
                yield Request(site, Envelope(number, self.round, shares[site], left), content_of[site])

        turns = self._turns or Turns(len(to))
        missing: list[str] = []
        spent: list[float] = []
        for answer in self.deliver(call, requests()):
            if isinstance(answer, Answer):
                if weighing is None:
                    self.ledger.record(number, call, answer.site, "up", answer.crossed or reply_content(answer.reply))
                if not self.checks_replies:
                    answer = self._check_answer(call, answer, content_of[answer.site], weighing)
            if isinstance(answer, Answer) and weighing is not None:
                self.ledger.record(number, call, answer.site, "up", {"sum": answer.reply.numbers})
            if isinstance(answer, Missing):
                missing.append(answer.site)
                turns.missing += 1
                self.go_on_without(answer, turns.asked, turns.missing)
                continue
            budget = self.budget.get(answer.site, 0)
            spent.append(answer.mini_batches / budget if budget else 0.0)
            self._count_work(answer.site, answer.mini_batches)
            yield answer.site, answer.reply
            del answer  # before the next is read
        usual = _usual(spent)
        for site in missing:
            self._charge(site, usual)
        self._charge_undrawn(usual)

    def _spent_shares(self, sites: Sequence[str], *, alike: bool) -> dict[str, float]:
        """The share of its budget that each site has used, 0 to 1; ``alike``: the mean of these for all.

        What enters a sum depends on nothing that one site alone is told.
        """
        used, budget = self.progress.used, self.budget
        shares = {site: min(1.0, used[site] / budget[site]) if budget.get(site) else 0.0 for site in sites}
        return dict.fromkeys(sites, sum(shares.values()) / len(sites)) if alike and sites else shares

    def _check_answer(
        self, call: str, answer: Answer[Any], sent: Mapping[str, Content], weighing: Weighing | None
    ) -> Answer[Any] | Missing:
        """The answer, its reply as integers if it is ``weighing``; or why its reply cannot be used."""
        try:
            self.checks.check(call, answer.site, type(answer.reply), reply_content(answer.reply), sent)
            if weighing is not None:
                return replace(answer, reply=contribution(answer.reply, weighing))
        except FedshiftError as error:
            kind = TrainingDiverged if isinstance(error, TrainingDiverged) else ReplyRefused
            return Missing(answer.site, kind(f"the reply of site '{answer.site}' in round {self.round}: {error}"))
        return answer

    def go_on_without(self, missing: Missing, asked: int, number: int) -> None:
        """Record a site that is missing from an exchange, so that the run continues without it.

        Args:
            missing: the site and its error.
            asked: how many sites were asked.
            number: how many of them are missing so far.

        Raises:
            FedshiftError: the site's own error, if there is no quorum or too few sites are left for it.
        """
        if self.quorum is None:
            raise missing.ending()
        if asked - number < min(self.quorum, asked):
            raise missing.ending(f"{asked - number} of {asked} sites are left, engine.quorum asks for {self.quorum}")
        if isinstance(missing.error, KindRefused):
            self.note_refusal(missing.site, str(missing.error))
        else:
            self.missing[missing.site] = str(missing.error)

    def note_refusal(self, site: str, reason: str) -> None:
        """Note in the round's record what a site refused to send."""
        reasons = self.refused.setdefault(site, [])
        if reason not in reasons:
            reasons.append(reason)

    def forfeit(self, site: str, spent: Sequence[float]) -> None:
        """Charge an absent site the mean share of the budget that the others spent in this exchange.

        Without the charge, the absent site would have work left when the others have used their budgets. No share
        counts as more than twice the median. Otherwise one site could claim that it spent everything, and the absent
        site would lose its later rounds. A source that is often not drawn is charged without rounding up each time.

        Args:
            site: the absent site.
            spent: the share of its budget that each of the other sites spent.
        """
        self._charge(site, _usual(spent))

    def _charge(self, site: str, share: float | None) -> None:
        """Charge an absent site this share of its budget; None: no other site answered, and it is charged nothing."""
        if share is not None:
            left = max(0, self.budget.get(site, 0) - self.progress.used[site])
            due = self.budget.get(site, 0) * share
            undrawn = site in self._undrawn
            charged = min(left, round(due) if undrawn else math.ceil(due))
            self.progress.undrawn += charged if undrawn else 0
            self._count_work(site, charged)

    def _charge_undrawn(self, share: float | None) -> None:
        """Charge the sources that were not drawn, and report them together: there may be thousands in every round."""
        if share is None or not self._undrawn:
            return
        used, whole = self.progress.used, 0
        for site in self._undrawn:
            budget = self.budget.get(site, 0)
            charged = min(max(0, budget - used[site]), round(budget * share))
            used[site] += charged
            whole += charged
        self.progress.undrawn += whole
        self._on_answer(NOT_DRAWN, whole)

    def _count_work(self, site: str, mini_batches: int) -> None:
        self.progress.used[site] += mini_batches
        self._on_answer(site, mini_batches)


def _usual(spent: Sequence[float]) -> float | None:
    """The mean share that sites spent, none of which counts as more than twice the median; None of no site."""
    if not spent:
        return None
    most = 2 * median_low(spent)
    return sum(min(share, most) for share in spent) / len(spent)
