"""The federation: the sites a method can talk to, and the one way to talk to them."""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from fedshift.errors import FedshiftError, KindRefused, TrainingDiverged, nearest
from fedshift.federation.exchange import Answer, Missing, R, Replies, Request
from fedshift.federation.ledger import Ledger
from fedshift.federation.messages import KINDS, NUMBERS, Content, PerSite, Reply, reply_content
from fedshift.federation.site import Envelope, Site
from fedshift.models.network import Network
from fedshift.weights import NamedTensors

OnRefusal = Literal["stop", "leave_out"]


class StepOwner(Protocol):
    """What an engine needs to know of a method: where it can be imported, its options, what its sites remember."""

    @property
    def memory_names(self) -> tuple[str, ...]: ...

    @property
    def shares(self) -> tuple[str, ...]: ...

    def adapt_network(self, network: Network, sources: int) -> Network: ...

    def step_owner(self, step: str) -> StepOwner: ...

    def run_step(self, step: str, site: Site, content: Mapping[str, Any]) -> Reply: ...

    def recipe(self) -> dict[str, Any]: ...


@dataclass
class Progress:
    """How far the sites are: what a checkpoint stores of a federation."""

    exchange: int = 0
    used: dict[str, int] = field(default_factory=dict)


class Federation(ABC):
    """The sites that take part. A method talks to them with `ask`; how the words travel is the engine's business.

    budget: site → mini-batches it may train on in the whole run. rounds: planned rounds. quorum: sites that must answer
    an exchange, of those asked, for the run to go on without the others; none = all. on_refusal: whether the run also
    goes on without a site that refuses to send a kind.
    """

    def __init__(
        self,
        method: StepOwner,
        *,
        sources: Sequence[str],
        targets: Sequence[str],
        budget: Mapping[str, int],
        rounds: int,
        quorum: int | None = None,
        on_refusal: OnRefusal = "stop",
        on_answer: Callable[[str, int], None] | None = None,
    ) -> None:
        self.method = method
        self.quorum = quorum
        self.on_refusal = on_refusal
        self.missing: dict[str, str] = {}
        self.refused: dict[str, list[str]] = {}
        self.sources = tuple(sources)
        self.targets = tuple(targets)
        self.budget = {site: budget.get(site, 0) for site in (*sources, *targets)}
        self.rounds = rounds
        self.ledger = Ledger()
        self.progress = Progress(used=dict.fromkeys((*sources, *targets), 0))
        self.round = 0
        self._on_answer = on_answer or (lambda site, mini_batches: None)
        self._open: Replies[Any] | None = None

    @abstractmethod
    def deliver(self, step: str, requests: Iterator[Request]) -> Generator[Answer[Any] | Missing, None, None]:
        """Carry the requests to their sites and yield the answers in the same order (engines implement this).

        A site whose training went wrong or that refuses is `Missing`; an engine may also leave lost sites out.
        """

    def crossing(self, step: str, site: str, content: Mapping[str, Content]) -> Mapping[str, Content]:
        """``content`` as it goes to ``site``, for the ledger; an engine may make it smaller on the way."""
        return content

    def save_memory(self, folder: Path) -> dict[str, dict[str, str]]:
        """Write what sites remember below ``folder``; returns site → entry → file name. Here: they remember nothing."""
        return {}

    def load_memory(self, folder: Path, files: Mapping[str, Mapping[str, str]]) -> None:
        """Restore what sites remember. Raises FedshiftError when the engine cannot."""
        if any(files.values()):
            raise FedshiftError(f"{type(self).__name__} cannot restore what sites remember")

    def exhausted(self) -> bool:
        """Whether every site has used up its mini-batches."""
        return all(self.progress.used[site] >= self.budget[site] for site in self.progress.used)

    def share(self, site: str) -> int:
        """Mini-batches of one round if ``site`` spreads its budget evenly over the planned rounds."""
        return -(-self.budget[site] // self.rounds)

    def ask(self, step: Callable[..., R], *, to: Sequence[str], **content: Content | PerSite) -> Replies[R]:
        """Run ``step`` at the sites ``to`` with the same ``content`` and collect one reply from each.

        step: a method's own bound function ``step(site, **content) -> Reply``. Content that differs between sites is
        wrapped in `PerSite`. Steps run when the replies are gone over, at the latest before the next exchange. Raises
        FedshiftError for an unknown site or content that may not travel, UserError when a site refuses to send a
        kind.
        """
        self.settle()
        unknown = [site for site in to if site not in self.progress.used]
        if unknown:
            raise FedshiftError(f"'{unknown[0]}' is not in this federation; {nearest(unknown[0], self.progress.used)}")
        if getattr(step, "__self__", None) is not self.method.step_owner(step.__name__):
            raise FedshiftError("ask takes a step of the method itself, such as self.fit")
        self.progress.exchange += 1
        replies = Replies(tuple(to), self._exchange(step.__name__, tuple(to), content))
        self._open = replies
        return replies

    def settle(self) -> None:
        """Bring an exchange that was not gone over to its end."""
        if self._open is not None:
            open_replies, self._open = self._open, None
            open_replies.drain()

    def _exchange(
        self, step: str, to: tuple[str, ...], content: Mapping[str, Content | PerSite]
    ) -> Generator[tuple[str, Any], None, None]:
        number = self.progress.exchange

        def requests() -> Iterator[Request]:
            for site in to:
                own = {name: _content_for(site, name, value) for name, value in content.items()}
                self.ledger.record(number, step, site, "down", self.crossing(step, site, own))
                used, budget = self.progress.used[site], self.budget.get(site, 0)
                yield Request(
                    site, Envelope(number, self.round, min(1.0, used / budget) if budget else 0.0, budget - used), own
                )

        missing: list[str] = []
        spent: list[float] = []
        for answer in self.deliver(step, requests()):
            if isinstance(answer, Answer):
                sent = reply_content(answer.reply)
                self.ledger.record(number, step, answer.site, "up", answer.crossed or sent)
                try:
                    for tensors in _tensors(sent):
                        tensors.check_finite(f"the reply of site '{answer.site}' in round {self.round}")
                except TrainingDiverged as error:
                    answer = Missing(answer.site, error)
            if isinstance(answer, Missing):
                missing.append(answer.site)
                self.go_on_without(answer, len(to), len(missing))
                continue
            budget = self.budget.get(answer.site, 0)
            spent.append(answer.mini_batches / budget if budget else 0.0)
            self._worked(answer.site, answer.mini_batches)
            yield answer.site, answer.reply
        for site in missing:
            self.forfeit(site, spent)

    def go_on_without(self, missing: Missing, asked: int, number: int) -> None:
        """Note a site that is missing, the ``number``-th of those ``asked``: its reply cannot be used.

        Raises what happened there when too few are left, or nobody allowed to go on without a site (`quorum`).
        """
        refused = isinstance(missing.error, KindRefused)
        if self.quorum is None or (refused and self.on_refusal == "stop"):
            raise missing.error
        if asked - number < min(self.quorum, asked):
            raise type(missing.error)(
                f"{missing.error}; {asked - number} of {asked} sites are left, engine.quorum asks for {self.quorum}"
            )
        if refused:
            self.note_refusal(missing.site, str(missing.error))
        else:
            self.missing[missing.site] = str(missing.error)

    def note_refusal(self, site: str, reason: str) -> None:
        """Remember, for the round's record, what a site did not let out."""
        reasons = self.refused.setdefault(site, [])
        if reason not in reasons:
            reasons.append(reason)

    def forfeit(self, site: str, spent: Sequence[float]) -> None:
        """A site that misses an exchange loses as large a part of its work as the others did in it (``spent``), or the
        run would go on for it alone.
        """
        if spent:
            left = max(0, self.budget.get(site, 0) - self.progress.used[site])
            self._worked(site, min(left, math.ceil(self.budget.get(site, 0) * sum(spent) / len(spent))))

    def _worked(self, site: str, mini_batches: int) -> None:
        self.progress.used[site] += mini_batches
        self._on_answer(site, mini_batches)


def _content_for(site: str, name: str, value: Content | PerSite) -> Content:
    """The part of ``value`` that ``site`` gets."""
    if not isinstance(value, PerSite):
        return value
    if site not in value.of:
        raise FedshiftError(
            f"'{name}' differs between sites and has nothing for '{site}'; it is for {sorted(value.of)}"
        )
    return value.of[site]


def _tensors(content: Mapping[str, Any]) -> Iterator[NamedTensors]:
    for value in content.values():
        if isinstance(value, NamedTensors):
            yield value
        elif isinstance(value, Mapping):
            yield from _tensors(value)


def known_kinds() -> tuple[str, ...]:
    """Every kind of content, as a policy may name it."""
    return tuple(itertools.chain(KINDS, (NUMBERS,)))
