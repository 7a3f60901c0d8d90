"""The coordinator's side of a deployed experiment: agree with the sites, then every (method, target, seed) in turn.

It knows names, shapes, classes and numbers of samples; samples are only those of its own unseen set, where it has one.
An engine calls `coordinate` in the process of its job; all that has to outlive the job lies in the deployment's folder.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedshift import __version__
from fedshift.data import agreement
from fedshift.data import registry as data_registry
from fedshift.data.builders.at_sites import AtSites
from fedshift.data.domain import DataSet, Domain, Manifest, Preprocessing, Rows
from fedshift.errors import FedshiftError, UserError, nearest
from fedshift.evaluation.records import RoundRecord
from fedshift.experiment.environment import data_fingerprint, resolve_device, threads_set, versions
from fedshift.experiment.evaluate import Evaluator
from fedshift.experiment.loop import check_fit, run_folder, write_order
from fedshift.experiment.part import Context, Reporter, conduct
from fedshift.experiment.protocol import (
    Part,
    Split,
    budgets,
    domain_rows,
    rounds_needed,
    site_budget,
    site_plans,
    unseen_rows,
)
from fedshift.experiment.schema import (
    AdaptToOne,
    Experiment,
    FlareEngine,
    LeaveOneOut,
    SourceTarget,
    method_name,
    parse,
)
from fedshift.federation.local import Setting
from fedshift.federation.recipes import setting_recipe
from fedshift.federation.remote import Lost, RemoteFederation, Transport, ask_plain
from fedshift.files import write_bytes
from fedshift.methods.base import Method
from fedshift.models.network import Network
from fedshift.models.options import NetworkOptions
from fedshift.weights import Weights

EXPERIMENT, CARDS, PROGRESS = "experiment.json", "cards.json", "progress.jsonl"
CLOCKS_APART = 60.0
"""Seconds by which clocks may differ before the coordinator says so."""
EVERY_SITE = "sites"
"""As a target: no site is left out, and the model is measured on the held-out samples of all of them."""


def check_deployable(experiment: Experiment) -> FlareEngine:
    """The engine of an experiment that can be deployed. Raises UserError for one that cannot."""
    if not isinstance(experiment.engine, FlareEngine):
        raise UserError("engine.name: write engine: {name: flare} in an experiment that is deployed")
    if not isinstance(experiment.data, AtSites):
        raise UserError(
            f"data.name: {experiment.data.name} lies on this machine; write data: {{name: sites}}, and each site its "
            "own data in its SITE.yaml (fedshift project try plays such a federation with data on this machine)"
        )
    if isinstance(experiment.protocol, SourceTarget):
        raise UserError("protocol.kind: source_target is a simulation; deploy leave_one_out or adapt_to_one")
    for method in experiment.methods:
        if method.pooled:
            raise UserError(f"methods: {method.display} needs all samples in one place and cannot be deployed")
        name = method_name(method)
        if name.partition(":")[0].endswith(".py"):
            raise UserError(
                f"methods: {method.display} is a file, and no code travels; install it as a package at every site and "
                "name it package.module:Class, which sites must allow in policy.methods"
            )
    if isinstance(experiment.protocol, AdaptToOne) and experiment.protocol.wrong_labels:
        raise UserError("protocol.wrong_labels: only a simulation can make labels wrong; sites keep theirs")
    return experiment.engine


@dataclass(frozen=True)
class Agreed:
    """What the sites and the coordinator agree on before training.

    data: one domain per site, without samples, then the coordinator's own. rows: site → seed → (train, held out).
    """

    data: DataSet
    own: DataSet | None
    rows: Mapping[str, Mapping[str, Sequence[int]]]
    grouped: Mapping[str, bool]
    fingerprints: Mapping[str, str]
    given: Mapping[str, Mapping[str, Any]] | None
    """What each site gives for an encoding common to all, where there is one to agree on."""

    @property
    def sites(self) -> tuple[str, ...]:
        return tuple(self.rows)


def coordinate(folder: Path, transport: Transport, sites: Sequence[str]) -> None:
    """Run what is not finished of the deployment in ``folder``.

    Raises Again when the run has to go on in a new job, UserError and FedshiftError for what ends it.
    """
    experiment = parse(json.loads((folder / EXPERIMENT).read_text(encoding="utf-8")))
    engine = check_deployable(experiment)
    watch = _Watch(folder / PROGRESS)
    dropped = experiment.protocol.drop if isinstance(experiment.protocol, AdaptToOne) else ()
    with threads_set(engine.thread_count()):
        agreed = agree(experiment, transport, [site for site in sites if site not in dropped], folder, engine, watch)
        for warning in agreed.data.warnings:
            watch.warn(warning)
        targets = targets_of(experiment, agreed)
        check_fit(experiment, agreed.data, targets)
        fingerprint = _fingerprint(agreed)
        context = Context(
            experiment,
            agreed.data,
            fingerprint,
            resolve_device(experiment.device),
            torch.get_num_threads(),
            None,
            watch,
        )
        runs = folder / "runs" / experiment.name
        write_order(experiment, targets, runs)
        parts = [
            Part(method, target, seed)
            for seed in experiment.protocol.seeds
            for target in targets
            for method in experiment.methods
        ]
        watch.begin(len(parts))
        for part in parts:
            _one(context, agreed, part, transport, engine, runs, watch)


def _one(
    context: Context,
    agreed: Agreed,
    part: Part,
    transport: Transport,
    engine: FlareEngine,
    runs: Path,
    watch: _Watch,
) -> None:
    """One run from its last checkpoint, or its beginning, to its result."""
    experiment, method = context.experiment, part.method
    agreed = encoded_for(experiment, agreed, part.target)
    context = replace(context, data=agreed.data)
    split = split_for(experiment, agreed, part)
    place = run_folder(experiment, split, context.fingerprint, part, runs)
    place.identity["wire"] = engine.wire
    place.check_identity()
    finished = place.result()
    if finished is not None:
        watch.finished(part, finished, resumed=True)
        return
    deadline = time.monotonic() + 60
    while not place.acquire():  # a job that has just died may still hold it
        if time.monotonic() > deadline:
            raise FedshiftError(f"{place.path} is held by another job")
        time.sleep(0.5)
    with place:
        budget = budgets(method, experiment.methods, experiment.training, split)
        setting = Setting(
            method=method,
            training=experiment.training,
            network=experiment.model,
            preprocessing=agreed.data.preprocessing,
            input_shape=agreed.data.input_shape,
            classes=len(agreed.data.classes),
            sources=len(split.train),
            seed=part.seed,
            device=context.device,
            refuse=frozenset(engine.refuse),
            on_refusal=engine.on_refusal,
        )
        network = setting.build_network().to(context.device)
        plans = site_plans(method, agreed.data, split)
        run = f"{experiment.name}-{method.display}-{part.target}-seed-{part.seed}"
        numbers = {plan.name: (plan.role, plan.parts[0][2]) for plan in plans}
        federation = RemoteFederation(
            method,
            transport,
            run=run,
            recipe=_recipe(setting),
            parts={site: _part(experiment, agreed, part, site, numbers.get(site)) for site in agreed.sites},
            like=network.state_dict(),
            deadline=engine.deadline,
            quorum=engine.quorum,
            on_refusal=engine.on_refusal,
            wire=engine.wire,
            patience=engine.patience,
            on_event=watch.event,
            sources=[plan.name for plan in plans if plan.role == "source"],
            targets=[plan.name for plan in plans if plan.role == "target"],
            budget=site_budget(budget, plans),
            rounds=max(1, rounds_needed(method, experiment.training, split, budget)),
            on_answer=watch.trained,
        )
        place.claim()
        evaluator = _AtSites(agreed, split, federation, part, torch.device(context.device), experiment.model)
        result = conduct(context, part, place, federation, evaluator, split, network)
        ask_plain(transport, "end", run, {site: {} for site in agreed.sites}, engine.patience)
        watch.finished(part, result, resumed=False)


def _recipe(setting: Setting) -> dict[str, Any]:
    """The setting as sites are told it: the method by its registered name, and not where anything lies."""
    recipe = setting_recipe(setting)
    assert isinstance(setting.method, Method)
    recipe["method"] = {"name": method_name(setting.method), "options": recipe["method"]["options"]}
    del recipe["device"]
    return recipe


def _part(
    experiment: Experiment, agreed: Agreed, part: Part, site: str, number: tuple[str, int] | None
) -> dict[str, Any]:
    """What a site is told of its own part in a run."""
    role, place = number or ("unseen", 0)
    shared = isinstance(experiment.protocol, LeaveOneOut) and experiment.protocol.base_images == "shared"
    return {
        "role": role,
        "number": place,
        "split": _split_rule(experiment) | {"seed": part.seed},
        "whole": role == "unseen" and (not agreed.grouped[site] or shared),
        "fingerprint": agreed.fingerprints[site],
    }


def _split_rule(experiment: Experiment) -> dict[str, Any]:
    assert not isinstance(experiment.protocol, SourceTarget)  # as `check_deployable` made sure
    return {"test_fraction": experiment.protocol.test_fraction, "split": experiment.protocol.split}


# Before training ------------------------------------------------------------------------------------------------------


def agree(
    experiment: Experiment,
    transport: Transport,
    sites: Sequence[str],
    folder: Path,
    engine: FlareEngine,
    watch: _Watch,
) -> Agreed:
    """Ask every site who it is. Raises UserError, naming the site, where versions, shapes or classes differ.

    The first time all sites must answer. Later a site that is lost stands in by what it said then.
    """
    header = {
        "version": __version__,
        "methods": [
            {"name": method_name(method), "options": method.model_dump(mode="json")} for method in experiment.methods
        ],
        "split": _split_rule(experiment),
        "seeds": list(experiment.protocol.seeds),
        "on_refusal": engine.on_refusal,
    }
    asked = time.time()
    answers = ask_plain(transport, "hello", experiment.name, dict.fromkeys(sites, header), engine.deadline)
    stored = folder / CARDS
    before: dict[str, Any] = json.loads(stored.read_text(encoding="utf-8")) if stored.exists() else {}
    cards: dict[str, Any] = {}
    for site in sites:
        answer = answers.get(site, Lost("did not answer"))
        if isinstance(answer, Lost):
            watch.event({"what": "hello", "site": site, "is": "lost", "reason": answer.reason})
            if answer.error or site not in before:
                raise UserError(f"site '{site}' cannot take part: {answer.reason}")
            cards[site] = before[site]
            continue
        difference = clock_difference(answer.get("time"), asked, answer["arrived"])
        if abs(difference) > CLOCKS_APART:
            watch.warn(
                f"site '{site}': its clock is {abs(difference):.0f} s {'ahead of' if difference > 0 else 'behind'} the "
                "coordinator's: set the one that is wrong, or certificates will be refused and the logs' times not fit"
            )
        cards[site] = answer["card"]
        if site in before and before[site]["fingerprint"] != answer["card"]["fingerprint"]:
            raise UserError(
                f"site '{site}': the data changed since the run began; put them back and go on with fedshift deploy "
                "resume, or begin a new experiment under another name"
            )
    agreed = _agreed(experiment, cards)
    write_bytes(stored, (json.dumps(cards, indent=2) + "\n").encode())
    return agreed


def clock_difference(said: Any, asked: float, arrived: float) -> float:
    """Seconds by which a site's clock is ahead of this machine's, at least; 0 when it fits.

    said: the site's time when it answered, which was between ``asked`` and ``arrived`` of the clock here.
    """
    if not isinstance(said, int | float):
        raise FedshiftError("a site does not say what time it is")
    return max(said - arrived, 0.0) + min(said - asked, 0.0)


def _agreed(experiment: Experiment, cards: Mapping[str, Mapping[str, Any]]) -> Agreed:
    try:
        first_name, first = next(iter(cards.items()))
        given = {site: card["given"] for site, card in cards.items() if card["given"] is not None}
        tables = bool(given) and all(card["preprocessing"]["kind"] == "table" for card in cards.values())
        if given and len(given) < len(cards):
            lacking = next(site for site in cards if site not in given)
            raise UserError(
                f"sites differ in how inputs are prepared: '{lacking}' gives no sums to standardise with, "
                f"'{next(iter(given))}' does"
            )
        for site, card in cards.items():
            for what, key in (("classes", "classes"), ("a sample's type", "type"), ("a sample's shape", "shape")):
                if card[key] != first[key] and not (key == "shape" and tables):
                    raise UserError(
                        f"sites differ in {what}: '{first_name}' has {_short(first[key])}, '{site}' has "
                        f"{_short(card[key])}; agree on them in each SITE.yaml (classes: lists all of the federation)"
                    )
            if card["preprocessing"] != first["preprocessing"] and not given:
                raise UserError(
                    f"sites differ in how inputs are prepared: '{first_name}' has {_short(first['preprocessing'])}, "
                    f"'{site}' has {_short(card['preprocessing'])}"
                )
        shape, classes = tuple(int(size) for size in first["shape"]), tuple(str(name) for name in first["classes"])
        preprocessing = Preprocessing.model_validate(first["preprocessing"])
        if given:
            preprocessing = agreement.agreed(given, preprocessing)
            shape = preprocessing.shape or shape
        domains = {site: _without_samples(site, int(card["samples"]), shape) for site, card in cards.items()}
        rows = {
            site: {seed: [int(n) for n in pair] for seed, pair in card["rows"].items()} for site, card in cards.items()
        }
        warnings = tuple(
            f"site '{site}' has {name} {card['versions'].get(name)}, this coordinator {version}: last bits may differ "
            "from a simulation"
            for site, card in cards.items()
            for name, version in versions().items()
            if name in ("torch", "numpy") and card["versions"].get(name) != version
        )
        fingerprints = {site: str(card["fingerprint"]) for site, card in cards.items()}
        grouped = {site: bool(card["grouped"]) for site, card in cards.items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise FedshiftError(f"what a site says of itself cannot be read ({type(error).__name__})") from None
    own = _own_set(experiment, shape, classes, preprocessing)
    for name in own.domains if own else ():
        if name in cards:
            raise UserError(f"data.unseen: '{name}' is also the name of a site; rename one of them")
    data = DataSet(
        name="sites",
        domains={**domains, **(own.domains if own else {})},
        classes=classes,
        preprocessing=preprocessing,
        manifest=Manifest("Data at sites", "the sites", "the sites'", "", ""),
        warnings=warnings,
    )
    return Agreed(data, own, rows, grouped, fingerprints, given or None)


def encoded_for(experiment: Experiment, agreed: Agreed, target: str) -> Agreed:
    """The same in an encoding in which an unseen ``target`` has no say."""
    if agreed.given is None:
        return agreed
    unseen = isinstance(experiment.protocol, LeaveOneOut)
    given = {site: one for site, one in agreed.given.items() if not (unseen and site == target)}
    preprocessing = agreement.agreed(given, agreed.data.preprocessing)
    shape = preprocessing.shape or agreed.data.input_shape
    own = _own_set(experiment, shape, agreed.data.classes, preprocessing)
    domains = {site: _without_samples(site, len(agreed.data.domains[site]), shape) for site in agreed.sites}
    whole = {**domains, **(own.domains if own else {})}
    return replace(agreed, data=replace(agreed.data, domains=whole, preprocessing=preprocessing), own=own)


def _own_set(
    experiment: Experiment, shape: tuple[int, ...], classes: tuple[str, ...], preprocessing: Preprocessing
) -> DataSet | None:
    """The coordinator's own unseen set. Raises UserError unless it fits what the sites hold."""
    assert isinstance(experiment.data, AtSites)
    if experiment.data.unseen is None:
        return None
    source = data_registry.parse(experiment.data.unseen)
    if "classes" in type(source).model_fields and getattr(source, "classes", None) is None:
        source = source.model_copy(update={"classes": classes})
    if source.shares:
        return source.encoded(preprocessing, classes)
    data = source.build()
    for what, there, here in (
        ("classes", classes, data.classes),
        ("a sample's shape", shape, data.input_shape),
        ("how inputs are prepared", preprocessing, data.preprocessing),
    ):
        if there != here:
            raise UserError(
                f"data.unseen: it differs from the sites in {what}: {_short(here)} here, {_short(there)} there"
            )
    return data


def _short(value: Any) -> str:
    text = ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    return text if len(text) <= 80 else f"{text[:77]}…"


def _without_samples(name: str, samples: int, shape: tuple[int, ...]) -> Domain:
    """A domain of which only the size is known here: arrays of the right shape that take no memory and hold zeros."""
    inputs = np.broadcast_to(np.zeros((), dtype=np.float32), (samples, *shape))
    return Domain(name, inputs, np.broadcast_to(np.zeros((), dtype=np.int64), (samples,)))


def _fingerprint(agreed: Agreed) -> str:
    own = data_fingerprint(agreed.own) if agreed.own else ""
    return "+".join([*(agreed.fingerprints[site] for site in agreed.sites), *([own] if own else [])])


def targets_of(experiment: Experiment, agreed: Agreed) -> tuple[str, ...]:
    """The targets in turn: as the protocol names them; ``all``: the coordinator's own domains, else every site."""
    assert not isinstance(experiment.protocol, SourceTarget)  # as `check_deployable` made sure
    named = experiment.protocol.targets
    own = tuple(agreed.own.domains) if agreed.own else ()
    if named == "all":
        return own if own and isinstance(experiment.protocol, LeaveOneOut) else agreed.sites
    for target in named:
        if target == EVERY_SITE and isinstance(experiment.protocol, LeaveOneOut):
            continue
        if target not in (*agreed.sites, *own):
            raise UserError(f"protocol.targets: no site is called '{target}'; {nearest(target, (*agreed.sites, *own))}")
        if target in own and isinstance(experiment.protocol, AdaptToOne):
            raise UserError(f"protocol.targets: '{target}' lies at the coordinator and cannot take part in training")
    return tuple(named)


def split_for(experiment: Experiment, agreed: Agreed, part: Part) -> Split:
    """The rows of one run: how many at each site, and which of the coordinator's own."""

    def rows(site: str) -> tuple[Rows, Rows]:
        train, held_out = agreed.rows[site][str(part.seed)]
        return np.arange(train, dtype=np.int64), np.arange(held_out, dtype=np.int64)

    sources = [site for site in agreed.sites if site != part.target]
    if not sources:
        raise UserError(f"protocol.targets: no site is left to train when '{part.target}' is the target")
    train = {site: rows(site)[0] for site in sources}
    held_out = {site: rows(site)[1] for site in sources}
    for site, chosen in train.items():
        if len(chosen) == 0:
            raise UserError(f"protocol: site '{site}' has no training samples left; lower protocol.test_fraction")
    if part.target == EVERY_SITE:
        return Split(train, held_out, {site: chosen for site, chosen in held_out.items() if len(chosen)})
    if agreed.own is not None and part.target in agreed.own.domains:
        assert isinstance(experiment.protocol, LeaveOneOut)
        domain = agreed.own.domains[part.target]
        own_held_out = domain_rows(experiment.protocol, domain, part.seed)[1]
        return Split(train, held_out, {part.target: unseen_rows(experiment.protocol, domain, own_held_out)})
    if isinstance(experiment.protocol, LeaveOneOut):
        count = agreed.rows[part.target][str(part.seed)][1]
        if not agreed.grouped[part.target] or experiment.protocol.base_images == "shared":
            count = len(agreed.data.domains[part.target])
        return Split(train, held_out, {part.target: np.arange(count, dtype=np.int64)})
    unlabelled, measured = rows(part.target)
    return Split(train, held_out, {part.target: measured}, {part.target: unlabelled})


# Measuring ------------------------------------------------------------------------------------------------------------


class _AtSites:
    """Measures a model where the samples are: at the sites, and here on the coordinator's own."""

    def __init__(
        self,
        agreed: Agreed,
        split: Split,
        federation: RemoteFederation,
        part: Part,
        device: torch.device,
        model: NetworkOptions,
    ) -> None:
        own = agreed.own is not None and part.target in agreed.own.domains
        self._here = Evaluator(agreed.own, Split({}, {}, split.measured), device, model) if own and agreed.own else None
        self._targets = [] if own else list(split.measured)
        self._sources = [site for site, rows in split.held_out.items() if len(rows)]
        self._federation, self._classes = federation, len(agreed.data.classes)

    def measure(self, method: Method, network: Network, weights: Weights) -> dict[str, Any]:
        """As `Evaluator.measure`; raises FedshiftError when the target's own site does not answer."""
        asked = list(dict.fromkeys([*self._sources, *self._targets]))
        found = self._federation.measure(weights, asked) if asked else {}
        missing = [site for site in self._targets if site not in found]
        if missing and len(missing) == len(self._targets):
            raise FedshiftError(
                f"round {self._federation.round}: target '{missing[0]}' did not measure the model; when it is back, go "
                "on with fedshift deploy resume"
            )
        sources = {site: found[site]["accuracy"] for site in self._sources if site in found}
        if self._here is not None:
            return {**self._here.measure(method, network, weights), "source_accuracy": sources}
        targets = [found[site] for site in self._targets if site in found]
        pairs = [[target["classes"][number] for target in targets] for number in range(self._classes)]
        return {
            "target_accuracy": {site: found[site]["accuracy"] for site in self._targets if site in found},
            "source_accuracy": sources,
            "per_class": [_recall(pair) for pair in pairs],
        }


def _recall(pairs: Sequence[tuple[int, int] | None]) -> float | None:
    """Accuracy in percent of one class over some sites; None where it is absent, or a site does not say."""
    if any(pair is None for pair in pairs):
        return None
    right, of = sum(pair[0] for pair in pairs if pair), sum(pair[1] for pair in pairs if pair)
    return 100.0 * right / of if of else None


# Being watched --------------------------------------------------------------------------------------------------------


class _Watch(Reporter):
    """Writes what happens as lines of JSON beside the run, for `fedshift deploy` to show."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def event(self, event: Mapping[str, Any]) -> None:
        """One thing that happened."""
        with open(self._path, "a", encoding="utf-8") as lines:
            lines.write(json.dumps({"time": time.time(), **event}) + "\n")

    def begin(self, parts: int) -> None:
        self.event({"what": "experiment", "is": "begun", "parts": parts})

    def part(self, part: Part, mini_batches: int, done: int) -> None:
        self.event({"what": "run", "is": "begun", **_name(part), "mini_batches": mini_batches, "done": done})

    def trained(self, site: str, mini_batches: int) -> None:
        self.event({"what": "trained", "site": site, "mini_batches": mini_batches})

    def round(self, part: Part, record: RoundRecord) -> None:
        accuracy, sources = record.target_mean, record.source_mean
        self.event({"what": "round", **_name(part), "round": record.round, "accuracy": accuracy, "sources": sources})

    def finished(self, part: Part, result: Any, resumed: bool) -> None:
        self.event({"what": "run", "is": "finished", **_name(part), "accuracy": result.accuracy(), "before": resumed})

    def warn(self, message: str) -> None:
        self.event({"what": "warning", "message": message})


def _name(part: Part) -> dict[str, Any]:
    return {"method": part.method.display, "target": part.target, "seed": part.seed}
