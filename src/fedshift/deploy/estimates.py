"""The coordinator's part in estimates at sites without labels: it carries sums and readings, and sees no estimate.

Where a labelled site is the target of a run, it sends sums of what that run's model says of its samples. When all runs
are over, each such site reads its scores with the sums of the others, once, and each site without labels is told both
of all of them. It then estimates by itself. With ``engine.aggregation: secure`` the coordinator gets up to five masked
sums over the left-out sites and no site's part of them (`fedshift.evaluation.estimate.pooled`); masks, codes and shares
are those of sums of models.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any

from pydantic import RootModel

from fedshift.deploy.crypto.masked_sums import KeyAnswer, KeyCard, SecureSum
from fedshift.deploy.deployed_plan import DeployedPlan, asks_sums, run_at_sites
from fedshift.deploy.event_log import EventLog
from fedshift.deploy.handshake import sources_encoding
from fedshift.deploy.json_files import read_stored
from fedshift.deploy.remote.orders import order_to_mask, second_exchange, upload_of
from fedshift.deploy.remote.requests import (
    EndRequest,
    EstimateRequest,
    InputsAnswer,
    InputsRequest,
    KeyRequest,
    MaskRequest,
    ReadingAnswer,
    ReadingRequest,
    Request,
)
from fedshift.deploy.remote.transport import Done, Lost, Transport, ask_sites
from fedshift.errors import FedshiftError
from fedshift.evaluation.estimate.combination import FEWEST_SITES
from fedshift.evaluation.estimate.plain_sums import (
    GivenDistances,
    GivenInputs,
    GivenPooled,
    GivenSite,
    GivenSums,
    check_classes,
    given_distances,
    given_inputs,
    given_pooled,
    given_whole,
    plain_inputs,
    plain_sums,
)
from fedshift.evaluation.estimate.pooled import FEWEST, Distances, Pooled, first_length, moments_of, whole_of
from fedshift.evaluation.estimate.sums import Numbers
from fedshift.evaluation.estimate.two_classes import MEASURES
from fedshift.experiment.plan import PlannedRun, Run
from fedshift.federation.messages import Content
from fedshift.federation.plain_values import Frozen
from fedshift.federation.secure.integer_sums import threshold
from fedshift.functional.fixed_point import from_fixed
from fedshift.json_objects import write_object

OVER = "estimates.json"
_MOST_LOOKED = 300
"""Sites that tell of their changed samples: what more of them tell is too long for a request."""
_REMEDY = "delete it, and sites estimate again"
_TENSORS = 3
"""Tensors of a masked part."""


_Summed = tuple[GivenPooled | None, GivenInputs | None]
"""Masked sums of scores, and of inputs."""


class Estimates:
    """Asks the sites of an experiment for all that estimates need.

    Args:
        folder: of the deployment.
        deadline: seconds to wait for an answer.
        log: is told of sites that do not answer.
    """

    def __init__(self, plan: DeployedPlan, transport: Transport, folder: Path, deadline: float, log: EventLog) -> None:
        self.folder, self.transport, self.log = folder, transport, log
        self._plan, self._deadline, self._classes = plan, deadline, len(plan.data.classes)
        self._pooled: dict[str, _Summed] = {}
        self._masking: dict[str, Sequence[str]] = {}
        """By the name of sums the sites that have keys of them."""

    def hand_over(self) -> None:
        """Let sites without labels estimate what to expect of their models. What failed is tried again later."""
        over = set(read_estimated(self.folder))
        names = {self._name(run.run): run for run in self._plan.runs}
        waiting = {name: run for name, run in names.items() if run.split.predicted and name not in over}
        over |= {name for name, run in waiting.items() if self._estimates(name, run)}
        if waiting:
            note_estimated(self.folder, over)
        if waiting and over.issuperset(waiting):
            for sums, sites in self._masking.items():  # they may forget their keys of the sums
                self._end(sums, sites)
            for name, run in names.items():  # and their scores
                self._end(name, [site for site in run.split.targets if site in self._plan.agreed.sites])

    def _name(self, run: Run) -> str:
        return run_at_sites(self._plan.experiment.name, run)

    def _end(self, run: str, sites: Sequence[str]) -> None:
        ask_sites(self.transport, dict.fromkeys(sites, EndRequest(run=run)), self._deadline, Done)

    def _beside(self, run: Run) -> list[PlannedRun]:
        """The runs of the same method and seed."""
        return [item for item in self._plan.runs if (item.run.method, item.run.seed) == (run.method, run.seed)]

    def _estimates(self, name: str, planned: PlannedRun) -> bool:
        """Tell the target of a run what is known; whether it has estimated."""
        site, secure = planned.run.target, self._plan.experiment.engine.sums_only
        known = {} if secure else self._known_sites(planned.run)
        if len(known) > _MOST_LOOKED:
            known = {site: given.model_copy(update={"looked": None}) for site, given in known.items()}
        looked = [of_site for of_site, given in known.items() if given.looked is not None]
        pooled, inputs = self._pooled_for(planned.run) if secure else (None, None)
        if len(looked) >= FEWEST_SITES:
            inputs = self.summed_inputs(planned, looked)
        chosen = read_stored(Threshold, threshold_file(self.folder, name), _REMEDY, older=True)
        request = EstimateRequest(
            run=name,
            known=known,
            preprocessing=sources_encoding(self._plan.agreed, site),
            threshold=None if chosen is None else chosen.threshold,
            pooled=pooled,
            inputs=inputs,
        )
        answer = ask_sites(self.transport, {site: request}, self._deadline, Done)[site]
        lost, sites = isinstance(answer, Lost), len(known) if pooled is None else pooled.whole.sites
        reason = answer.reason if isinstance(answer, Lost) else f"from {sites} sites; it stays there"
        told = {"site": site, "run": name, "is": "lost" if lost else "made", "reason": reason[:500]}
        self.log.event({"what": "estimate", **told})
        if lost:
            self.log.warn(f"site '{site}' has no estimate of run {name}: {reason}; fedshift deploy resume tries again")
        return not lost

    def _known_sites(self, run: Run) -> dict[str, GivenSite]:
        """Sums and reading of each site that was left out of a run beside this one, as this one's target is told."""
        names = {item.run.target: self._name(item.run) for item in self._beside(run) if item.run.target != run.target}
        kept = {site: kept_sums(sums_file(self.folder, name)).get(site) for site, name in names.items()}
        sums = {site: given for site, given in kept.items() if given is not None}
        for given in sums.values():
            check_classes(given, self._classes)
        known: dict[str, GivenSite] = {}
        for site, given in sums.items() if len(sums) > 1 else ():
            together = reduce(add, (item.sums for other, item in sums.items() if other != site))
            others = GivenSums.model_validate(plain_sums(together))
            request = ReadingRequest(run=names[site], sums=others, number=sorted(sums).index(site))
            answer = ask_sites(self.transport, {site: request}, self._deadline, ReadingAnswer)[site]
            if isinstance(answer, Lost):
                self._warn_no_case(site, names[site], answer)
            else:
                known[site] = GivenSite(sums=given, **dict(answer.answer))
        return known

    def _warn_no_case(self, site: str, run: str, answer: Lost) -> None:
        self.log.warn(f"site '{site}' is no case of the estimates of {run}: {answer.reason}")

    def tells_inputs(self, site: str) -> bool:
        """Whether sums of a site's inputs may leave it."""
        cards = self._plan.agreed.cards
        return site in cards and cards[site].gives_moments

    def summed_inputs(self, planned: PlannedRun, sites: Iterable[str]) -> GivenInputs | None:
        """Sums of the inputs of those sites that tell them, in the encoding of a run.

        Returns None where none of them does; where they do not fit each other; and with ``engine.aggregation: secure``,
        since no site sends its own alone then.
        """
        name, asked = self._name(planned.run), [*filter(self.tells_inputs, sites)]
        if not asked or self._plan.experiment.engine.sums_only:
            return None
        request = InputsRequest(run=name, preprocessing=planned.data.preprocessing)
        moments, none = [], f"estimates of {name} read no sums of inputs"
        answers = ask_sites(self.transport, dict.fromkeys(asked, request), self._deadline, InputsAnswer)
        for site, answer in answers.items():
            if isinstance(answer, Lost):
                self.log.warn(f"{none} of site '{site}', which gives none: {answer.reason}")
            else:
                moments.append(answer.answer.inputs.moments)
        if len({len(item.total) for item in moments}) > 1:
            self.log.warn(f"{none}: those of the sites are of different samples")
            return None
        if not moments:
            return None
        self.log.event({"what": "estimate", "is": "inputs", "run": name, "sites": len(moments)})
        return GivenInputs.model_validate(plain_inputs(reduce(add, moments)))

    # Masked sums over left-out sites ----------------------------------------------------------------------------------

    def _pooled_for(self, run: Run) -> _Summed:
        """What a site without labels is told of the sites that were left out of runs beside its own: the sums of scores
        and of inputs. None if there are too few sites, or a sum could not be made, of which the log is told."""
        name = f"{self._plan.experiment.name}-{run.method.display}-seed-{run.seed}-sums"
        if name not in self._pooled:
            left_out = (item.run for item in self._beside(run) if asks_sums(self._plan, item))
            try:
                scores = {item.target: self._name(item) for item in left_out}
                self._pooled[name] = self._pool(name, scores, run.target)
            except FedshiftError as error:
                self.log.warn(f"there are no sums over left-out sites of {name}: {error}")
                self._pooled[name] = None, None
        return self._pooled[name]

    def _pool(self, name: str, scores: Mapping[str, str], target: str) -> _Summed:
        """The sums for a target; ``scores``: by left-out site the run of which it keeps scores."""
        if len(scores) < FEWEST:
            raise FedshiftError(f"{len(scores)} sites send confidences, and a sum is of {FEWEST} or more")
        cards = self._keys(name, list(scores))
        total, sites = self._sum(name, 1, scores, cards, first_length(self._classes))
        first = whole_of(total, len(sites), self._classes)
        whole, cards = given_whole(first), {site: cards[site] for site in sites}
        total, sites = self._sum(name, 2, scores, cards, 2, whole=whole)
        unexplained, far = (float(part) for part in total / len(sites))
        told, cards = min(1.0, max(0.0, unexplained)), {site: cards[site] for site in sites}
        total, _ = self._sum(name, 3, scores, cards, 1 + len(MEASURES), whole=whole, unexplained=told)
        self.log.event({"what": "estimate", "is": "summed", "run": name, "sites": len(sites)})
        pooled = given_pooled(Pooled(first, unexplained, far, float(total[0]), total[1:]))
        some = {site: card for site, card in cards.items() if self.tells_inputs(site)}
        if len(some) < FEWEST:
            return pooled, None
        try:
            distances, inputs = self._sum_inputs(name, scores, some, target)
        except FedshiftError as error:
            self.log.warn(f"there are no sums of inputs of {name}: {error}")
            return pooled, None
        return pooled.model_copy(update={"distances": distances}), inputs

    def _sum_inputs(
        self, name: str, scores: Mapping[str, str], cards: Mapping[str, KeyCard], target: str
    ) -> tuple[GivenDistances, GivenInputs]:
        """How far each site's inputs are from those of the others, and the sums of inputs.

        Raises:
            FedshiftError: too few sites gave some, or masks did not cancel.
        """
        encoding = sources_encoding(self._plan.agreed, target)
        values = math.prod(encoding.shape or self._plan.data.input_shape)
        total, sites = self._sum(name, 4, scores, cards, 1 + 2 * values, preprocessing=encoding)
        inputs, cards = given_inputs(moments_of(total)), {site: cards[site] for site in sites}
        if len(sites) >= FEWEST:
            total, sites = self._sum(name, 5, scores, cards, 4, preprocessing=encoding, inputs=inputs)
        if len(sites) < FEWEST:
            raise FedshiftError(f"{len(sites)} sites gave some, and a sum is of {FEWEST} or more")
        return given_distances(Distances.of(total, len(sites))), inputs

    def _keys(self, name: str, sites: Sequence[str]) -> dict[str, KeyCard]:
        self._masking[name] = sites
        request = KeyRequest(do="key", run=name)
        cards: dict[str, KeyCard] = {}
        for site, answer in ask_sites(self.transport, dict.fromkeys(sites, request), self._deadline, KeyAnswer).items():
            if isinstance(answer, Lost):
                self._warn_no_case(site, name, answer)
            else:
                cards[site] = answer.answer.of(site)
        if len(cards) < FEWEST:
            raise FedshiftError(f"{len(cards)} sites gave a key, and a sum is of {FEWEST} or more")
        return cards

    def _sum(
        self, name: str, step: int, scores: Mapping[str, str], cards: Mapping[str, KeyCard], length: int, **fields: Any
    ) -> tuple[Numbers, list[str]]:
        """A sum of so many numbers (n,), and the sites that it is of."""
        request = MaskRequest(
            run=name,
            step=step,
            scores={site: scores[site] for site in cards},
            cards={site: card.entry for site, card in sorted(cards.items())},
            threshold=threshold(len(cards), self._plan.agreed.colluders(list(cards))),
            **fields,
        )
        order = order_to_mask(request)
        added = SecureSum(order)
        self._ask(
            request,
            {site: {} for site in cards},
            _TENSORS,
            lambda site, content: added.add(site, upload_of(content, order, 1 + length)[0]),
        )
        total = added.unmask_total(second_exchange(added, self._ask))
        if int(total[0]) != len(added.answered):
            raise FedshiftError("the masks of the sites did not cancel: one of them lied")
        return from_fixed(total[1:]).numpy(), added.answered

    def _ask(
        self,
        request: Request,
        content: Mapping[str, Mapping[str, Content]],
        tensors: int,
        read: Callable[[str, Any], Any],
    ) -> dict[str, Any]:
        """As `orders.AskAgain`; the log is told of those whose answer is none."""
        result: dict[str, Any] = {}
        requests = dict.fromkeys(content, request)
        for site, answer in ask_sites(self.transport, requests, self._deadline, Done, content, tensors).items():
            try:
                if isinstance(answer, Lost):
                    raise FedshiftError(answer.reason)
                result[site] = read(site, answer.content)
            except FedshiftError as error:
                self.log.warn(f"site '{site}' gives nothing to a sum over left-out sites: {error}")
        return result


# Files of a deployment ------------------------------------------------------------------------------------------------


class _KeptSums(RootModel[dict[str, GivenSums]]):
    """The sums of a run's targets, by site."""


class Threshold(Frozen):
    """The threshold that a run's sources chose, if they did."""

    threshold: float | None = None


class _Estimated(Frozen):
    """The runs of which there are estimates."""

    runs: tuple[str, ...] = ()


def sums_file(folder: Path, run: str) -> Path:
    """The file for the sums of a run's target."""
    return folder / "sums" / f"{run}.json"


def threshold_file(folder: Path, run: str) -> Path:
    """The file for the threshold that a run's sources chose."""
    return folder / "thresholds" / f"{run}.json"


def keep_sums(file: Path, sums: Mapping[str, GivenSums | None]) -> None:
    """Keep the sums of a run's targets, until all runs are over."""
    plain = {site: of_site.model_dump(mode="json") for site, of_site in sums.items() if of_site is not None}
    if plain:
        write_object(file, plain, indent=None)


def kept_sums(file: Path) -> dict[str, GivenSums]:
    """What `keep_sums` kept, by site; empty if there is nothing."""
    sums = read_stored(_KeptSums, file, _REMEDY, older=True)
    return {} if sums is None else sums.root


def note_estimated(folder: Path, runs: Collection[str]) -> None:
    """Note of which runs there are estimates."""
    write_object(folder / OVER, {"runs": sorted(runs)})


def read_estimated(folder: Path) -> tuple[str, ...]:
    """The runs that were noted."""
    noted = read_stored(_Estimated, folder / OVER, _REMEDY, older=True)
    return () if noted is None else noted.runs
