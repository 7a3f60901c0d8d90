"""What the coordinator and the sites of a deployed experiment agree on before training."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedshift.data import agreement
from fedshift.data import registry as data_registry
from fedshift.data.builders.at_sites import AtSites
from fedshift.data.domain import UNKNOWN, DataSet, Dense, Domain, Manifest, Preprocessing
from fedshift.deploy.event_log import EventLog
from fedshift.deploy.features_at_sites import features_for, text_towers
from fedshift.deploy.remote.requests import Hello, SplitRule
from fedshift.deploy.remote.transport import Heard, Lost, Transport, ask_sites
from fedshift.deploy.site_cards import SPENT, Card, GivenPrivacy, HelloAnswer, cards_of, check_rows, noted_spending
from fedshift.errors import UserError
from fedshift.evaluation.estimate.combination import FEWEST_SITES
from fedshift.experiment.config.engine_section import FlareEngine
from fedshift.experiment.config.experiment import Experiment, method_name
from fedshift.experiment.environment import versions
from fedshift.experiment.protocols.base import DeployedProtocol
from fedshift.federation.local.cards import resolve_device
from fedshift.federation.setting_json import MethodRecipe
from fedshift.models.networks.frozen import Frozen
from fedshift.text import one_line
from fedshift.version import installed_version

CLOCKS_APART = 60.0
"""Seconds by which clocks may differ before the coordinator says so."""


@dataclass(frozen=True)
class Agreed:
    """What the sites and the coordinator agree on before training."""

    data: DataSet  # one domain per site, without samples, then the coordinator's own
    unseen: DataSet | None  # the set that the coordinator has (data.unseen); None without one
    # the statistics of each site for a common encoding, if the data need one
    given: Mapping[str, Mapping[str, Any]] | None
    cards: Mapping[str, Card]
    # the column that names a row in the tables of all sites that name one; predictions give it back
    id: str | None = None

    @property
    def sites(self) -> tuple[str, ...]:
        return tuple(self.cards)

    @property
    def privacy(self) -> dict[str, GivenPrivacy]:
        """The budget of each site that has one, and what it has spent, as its card says."""
        return {site: card.privacy for site, card in self.cards.items() if card.privacy is not None}

    def colluders(self, sites: Iterable[str]) -> int:
        """How many of these sites may work with a coordinator that lies about who answered."""
        return max(self.cards[site].colluders if site in self.cards else 0 for site in sites)

    def in_one_roster(self, site: str) -> bool:
        """Whether a site takes part in sums of one set of sites only, unless it trains with noise."""
        return site in self.cards and self.cards[site].one_roster

    def in_groups(self, site: str) -> bool:
        """Whether a site keeps samples of one person together when it splits them."""
        return site in self.cards and self.cards[site].grouped

    def measures_all(self, site: str, protocol: DeployedProtocol) -> bool:
        """Whether an unseen site is measured on all its samples, not on those that it would hold out."""
        card = self.cards[site]
        return not card.fixed_split and protocol.measures_all(card.grouped)


def agree(
    experiment: Experiment, transport: Transport, sites: Sequence[str], folder: Path, engine: FlareEngine, log: EventLog
) -> Agreed:
    """Ask every site for its card, and check that the cards fit together.

    At the beginning of a run all sites must answer. Later the first card of a site that is lost stands for it.

    Raises:
        UserError: sites cannot take part, and the message has what each of them lacks; or their versions, shapes or
            classes differ.
    """
    hello = Hello(
        run=experiment.name,
        version=installed_version(),
        methods=tuple(
            MethodRecipe(name=method_name(method), options=method.model_dump(mode="json"))
            for method in experiment.methods
        ),
        network=experiment.model.model_dump(mode="json"),
        texts=text_towers(experiment.model),
        training=experiment.training.model_dump(mode="json"),
        split=SplitRule(**experiment.protocol.for_deployment().split_rule()),
        unseen=experiment.protocol.unseen,
        seeds=tuple(experiment.protocol.seeds),
        on_refusal=engine.on_refusal,
        aggregation=engine.aggregation,
        private=experiment.training.privacy is not None,
        routing=engine.routing,
        # all that may be in one sum: not one that is the only target
        sums=tuple(site for site in sites if engine.sums_only and experiment.protocol.named_targets != (site,)),
    )
    asked = time.time()
    answers = ask_sites(transport, dict.fromkeys(sites, hello), engine.deadline, HelloAnswer)
    before, cards = cards_of(folder), dict[str, Card]()
    faults: list[UserError] = []
    for site in sites:
        try:
            cards[site] = _card(site, answers[site], before.get(site), experiment, log)
            _warn_of_clock(site, answers[site], asked, log)
        except UserError as error:
            if site not in before or engine.quorum is None:
                faults.append(error)
                continue
            # The run has begun and may do without this site: no answer of it can end the run.
            log.event({"what": "hello", "site": site, "is": "lost", "reason": str(error)[:500]})
            log.warn(f"the run goes on without an answer of site '{site}': {error}")
            cards[site] = before[site]
            check_rows(site, before[site], experiment.protocol.seeds)
    _check_all_take_part(faults, len(sites))
    agreed = _agreement_of(experiment, cards)
    budgets = {site: card.privacy for site, card in cards.items()}
    warnings, spent_again = noted_spending(folder.parent / SPENT, budgets)
    for warning in warnings:
        log.warn(warning)
    _check_all_take_part([UserError(fault) for fault in spent_again], len(sites))
    return agreed


def _check_all_take_part(faults: Sequence[UserError], sites: int) -> None:
    """Raise UserError with the faults of all sites: whoever has to ask their people does so once."""
    if len(faults) == 1:
        raise faults[0]
    if faults:
        listed = " ".join(f"({number}) {fault}" for number, fault in enumerate(faults, 1))
        raise UserError(f"{len(faults)} of {sites} sites cannot take part: {listed}")


def _card(
    site: str, answer: Heard[HelloAnswer] | Lost, before: Card | None, experiment: Experiment, log: EventLog
) -> Card:
    """The card of a site: the one it sent now or, if it did not answer, the one it sent when the run began."""
    if isinstance(answer, Lost):
        log.event({"what": "hello", "site": site, "is": "lost", "reason": answer.reason})
        if answer.error or before is None:
            named = answer.reason.startswith(f"site '{site}'")
            raise UserError(answer.reason if named else f"site '{site}' cannot take part: {answer.reason}")
        check_rows(site, before, experiment.protocol.seeds)
        return before
    card = answer.answer.card
    check_rows(site, card, experiment.protocol.seeds)
    if before is not None and before.fingerprint != card.fingerprint:
        raise UserError(
            f"site '{site}': the data changed since the run began; put them back and go on with fedshift deploy "
            "resume, or begin a new experiment under another name"
        )
    return card


def _warn_of_clock(site: str, answer: Heard[HelloAnswer] | Lost, asked: float, log: EventLog) -> None:
    """Warn if a site's clock is wrong."""
    if isinstance(answer, Lost):
        return
    difference = clock_difference(answer.answer.time, asked, answer.arrived)
    if abs(difference) > CLOCKS_APART:
        log.warn(
            f"site '{site}': its clock is {abs(difference):.0f} s {'ahead of' if difference > 0 else 'behind'} the "
            "coordinator's: set the one that is wrong, or certificates will be refused and the logs' times not fit"
        )


def clock_difference(site_time: float, asked: float, arrived: float) -> float:
    """Seconds by which a site's clock is ahead of this machine's, at least; 0 when it fits, negative when it is behind.
    ``asked``: when it was asked, by the clock here; ``arrived``: when its answer arrived, by the clock here."""
    return max(site_time - arrived, 0.0) + min(site_time - asked, 0.0)


def _agreement_of(experiment: Experiment, cards: Mapping[str, Card]) -> Agreed:
    first = next(iter(cards.values()))
    given = {site: card.given.model_dump(mode="json") for site, card in cards.items() if card.given is not None}
    _check_alike(cards, given)
    shape, classes, preprocessing = first.shape, first.classes, _preparation(first.preprocessing)
    if given:
        preprocessing = _encoding(given, preprocessing)
        shape = preprocessing.shape or shape
    unseen = _unseen_set(experiment, shape, classes, preprocessing)
    for name in unseen.domains if unseen else ():
        if name in cards:
            raise UserError(f"data.unseen: '{name}' is also the name of a site; rename one of them")
    if isinstance(experiment.model, Frozen):
        device = resolve_device(experiment.device)
        preprocessing, shape, unseen = features_for(experiment.model, shape, preprocessing, unseen, device)
    domains = {
        site: _without_samples(site, card.samples, shape, unlabelled=card.unlabelled, tokens=card.type == "int64")
        for site, card in cards.items()
    }
    data = DataSet(
        name="sites",
        domains={**domains, **(unseen.domains if unseen else {})},
        classes=classes,
        preprocessing=preprocessing,
        manifest=Manifest("Data at sites", "the sites", "the sites'", "", ""),
        warnings=_warnings_of(experiment, cards),
    )
    return Agreed(data, unseen, given or None, cards, _common_id(cards))


def _check_alike(cards: Mapping[str, Card], given: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse sites whose data cannot be learned from together; ``given``: the sums of those that give any."""
    first_name, first = next(iter(cards.items()))
    tables = bool(given) and all(card.preprocessing.kind == "table" for card in cards.values())
    if given and len(given) < len(cards):
        lacking = next(site for site in cards if site not in given)
        raise UserError(
            f"sites differ in how inputs are prepared: '{lacking}' gives no sums to standardise with, "
            f"'{next(iter(given))}' does"
        )
    for site, card in cards.items():
        for what, key in (("classes", "classes"), ("a sample's type", "type"), ("a sample's shape", "shape")):
            here, there = getattr(first, key), getattr(card, key)
            if there != here and not (key == "shape" and tables):
                raise UserError(
                    f"sites differ in {what}: '{first_name}' has {_short(here)}, '{site}' has "
                    f"{_short(there)}; agree on them in each SITE.yaml (classes: lists all of the federation)"
                )
        if _objective_text(card) != _objective_text(first):
            raise UserError(
                f"sites differ in what is learned: '{first_name}' has {_objective_text(first)}, '{site}' has "
                f"{_objective_text(card)}; agree on data.task and data.loss in each SITE.yaml"
            )
        if card.preprocessing.standardise != first.preprocessing.standardise:
            raise UserError(
                f"sites differ in data.standardise, which '{first_name}' or '{site}' has as per_site: write the same"
            )
        if _preparation(card.preprocessing) != _preparation(first.preprocessing) and not given:
            raise UserError(
                f"sites differ in how inputs are prepared: '{first_name}' has {_short(first.preprocessing)}, '{site}' "
                f"has {_short(card.preprocessing)}"
            )


def _preparation(preprocessing: Preprocessing) -> Preprocessing:
    """How inputs are prepared; of text without how a site's own file is written."""
    return preprocessing.model_copy(update={"table": None}) if preprocessing.kind == "tokens" else preprocessing


def _warnings_of(experiment: Experiment, cards: Mapping[str, Card]) -> tuple[str, ...]:
    """What a person should know before the run begins."""
    warnings = tuple(
        f"site '{site}' has {name} {card.versions.get(name)}, this coordinator {version}: last bits may differ "
        "from a simulation"
        for site, card in cards.items()
        for name, version in versions().items()
        if name in ("torch", "numpy") and card.versions.get(name) != version
    )
    if not experiment.engine.sums_only:  # such a site refuses to begin, unless engine.on_refusal leaves it out
        warnings += tuple(
            f"site '{site}' sends models only masked (rule policy.secure) and is left out: write "
            "engine.aggregation: secure"
            for site, card in cards.items()
            if card.secure == "required"
        )
    lacking = [site for site, card in cards.items() if card.unlabelled]
    tell = sum(card.gives_moments for card in cards.values() if not card.unlabelled)
    rest = "the moments of other sites" if tell >= FEWEST_SITES else "scores alone"
    for site, card in cards.items() if lacking else ():
        if not card.unlabelled and not card.gives_confidences:
            rule = "policy.send" if card.privacy is None else "privacy.epsilon"
            warnings += (
                f"site '{site}' sends no confidences (rule {rule}): what to expect at '{lacking[0]}', which has no "
                "labels, rests on other sites",
            )
        elif not card.unlabelled and card.changeable and not card.gives_moments:
            rule = "policy.send" if card.privacy is None else "privacy.epsilon"
            warnings += (
                f"site '{site}' sends no moments (rule {rule}): what to expect at '{lacking[0]}', which has no labels, "
                f"rests on {rest}",
            )
    return warnings


def _common_id(cards: Mapping[str, Card]) -> str | None:
    """The column that names rows, if all sites that have one call it the same."""
    tables = [card.preprocessing.table or {} for card in cards.values()]
    names = {name for table in tables if isinstance(name := table.get("id"), str)}
    (name,) = names if len(names) == 1 else (None,)
    return name


def _objective_text(card: Card) -> str:
    """The task and the loss of a site's data, without the label's scale, on which sites agree only later."""
    objective = card.preprocessing.objective
    if objective is None:
        return "classification"
    return one_line(", ".join(f"{name} {objective[name]}" for name in sorted(objective) if name not in ("mean", "std")))


def _encoding(
    given: Mapping[str, Mapping[str, Any]], preprocessing: Preprocessing, labelled: Sequence[str] | None = None
) -> Preprocessing:
    """As `agreement.agreed`; what it raises holds names that sites gave."""
    try:
        return agreement.common_encoding(given, preprocessing, labelled)
    except UserError as error:
        raise UserError(one_line(str(error))) from None


def encoded_for(experiment: Experiment, agreed: Agreed, target: str) -> DataSet:
    """The agreed data, in an encoding computed without the unseen ``target``."""
    if agreed.given is None:
        return agreed.data
    unseen = experiment.protocol.unseen
    preprocessing = _encoding_without(agreed, {target} if unseen else set(), target)
    shape = preprocessing.shape or agreed.data.input_shape
    held_here = _unseen_set(experiment, shape, agreed.data.classes, preprocessing)
    domains = {
        site: _without_samples(
            site, len(domain), shape, unlabelled=domain.unlabelled, tokens=agreed.data.preprocessing.kind == "tokens"
        )
        for site, domain in agreed.data.domains.items()
        if site in agreed.cards
    }
    whole = {**domains, **(held_here.domains if held_here else {})}
    return replace(agreed.data, domains=whole, preprocessing=preprocessing)


def sources_encoding(agreed: Agreed, target: str) -> Preprocessing:
    """The encoding computed from the sites that trained with their labels, with which a target's samples compare."""
    return agreed.data.preprocessing if agreed.given is None else _encoding_without(agreed, {target}, target)


def _encoding_without(agreed: Agreed, left_out: Collection[str], target: str) -> Preprocessing:
    """The agreed encoding without some sites, and without those that lack labels and are not the target."""
    lacking = {site for site in agreed.data.unlabelled if site != target}
    without = {*left_out, *lacking}
    statistics = {site: told for site, told in (agreed.given or {}).items() if site not in without}
    labelled = [site for site in statistics if site != target]
    return _encoding(statistics, agreed.data.preprocessing, labelled)


def _unseen_set(
    experiment: Experiment, shape: tuple[int, ...], classes: tuple[str, ...], preprocessing: Preprocessing
) -> DataSet | None:
    """The coordinator's own unseen set."""
    assert isinstance(experiment.data, AtSites)
    if experiment.data.unseen is None:
        return None
    source = data_registry.parse(experiment.data.unseen)
    if "classes" in type(source).model_fields and getattr(source, "classes", None) is None:
        source = source.model_copy(update={"classes": classes})
    if source.shares:
        return source.encode(preprocessing, classes)
    data = source.build()
    for what, there, here in (
        ("classes", classes, data.classes),
        ("a sample's shape", shape, data.input_shape),
        ("how inputs are prepared", _preparation(preprocessing), _preparation(data.preprocessing)),
    ):
        if there != here:
            raise UserError(
                f"data.unseen: it differs from the sites in {what}: {_short(here)} here, {_short(there)} there"
            )
    return data


def _short(value: Any) -> str:
    text = one_line(", ".join(map(str, value)) if isinstance(value, tuple) else str(value))
    return text if len(text) <= 80 else f"{text[:77]}…"


def _without_samples(
    name: str, samples: int, shape: tuple[int, ...], *, unlabelled: bool = False, tokens: bool = False
) -> Domain:
    """A domain of which only the size is known here: arrays of the right shape that take no memory and hold zeros."""
    numbers = np.broadcast_to(np.zeros((), dtype=np.float32), (samples, *shape))
    inputs: Dense = np.broadcast_to(np.zeros((), dtype=np.int64), numbers.shape) if tokens else numbers
    label = np.full((), UNKNOWN if unlabelled else 0, dtype=np.int64)
    return Domain(name, inputs, np.broadcast_to(label, (samples,)), unlabelled=unlabelled)
