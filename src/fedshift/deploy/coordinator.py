"""The coordinator's side of a deployed experiment: agree with the sites, then carry out every run in turn.

The coordinator knows names, shapes, classes and numbers of samples. The only samples that it may hold are those of an
unseen set of its own. An engine calls `coordinate` in the process of its job; all that has to outlive the job lies in
the deployment's folder.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fedshift.data.builders.at_sites import AtSites
from fedshift.data.site_data import batches_per_epoch
from fedshift.deploy.deployed_plan import DeployedPlan, asks_sums, check_budgets, run_at_sites
from fedshift.deploy.estimates import Estimates, keep_sums, sums_file, threshold_file
from fedshift.deploy.event_log import EventLog
from fedshift.deploy.handshake import agree
from fedshift.deploy.json_files import CARDS, DEPLOY_AGAIN, members
from fedshift.deploy.remote.remote_federation import RemoteFederation
from fedshift.deploy.remote.requests import EndRequest, Measures, SeedSplit, SitePart, inputs_bytes
from fedshift.deploy.remote.sealed_federation import SealedFederation
from fedshift.deploy.remote.secure_federation import SecureFederation
from fedshift.deploy.remote.transport import Done, Transport, ask_sites
from fedshift.deploy.site_cards import write_cards
from fedshift.errors import FedshiftError, UserError, nearest
from fedshift.evaluation.records import Part, SiteMetrics
from fedshift.evaluation.site_metrics import common_threshold
from fedshift.experiment.budgets import site_budget
from fedshift.experiment.compatibility import check_fit
from fedshift.experiment.config.engine_section import FlareEngine
from fedshift.experiment.config.experiment import Experiment, method_name, parse
from fedshift.experiment.environment import threads_set
from fedshift.experiment.fits.sealed_routing import measured_parts
from fedshift.experiment.plan import PlannedRun, Run, model_metadata
from fedshift.experiment.protocols.base import EVERY_SITE, Split
from fedshift.experiment.runs.context import Context
from fedshift.experiment.runs.evaluator import Evaluator, Final
from fedshift.experiment.runs.round_loop import train_and_evaluate
from fedshift.experiment.runs.run_folder import RunFolder, run_folder, write_order
from fedshift.extras import reports_installed
from fedshift.federation.local.cards import resolve_device
from fedshift.federation.secure.integer_sums import threshold
from fedshift.federation.setting_json import MethodRecipe, SettingRecipe, setting_recipe
from fedshift.federation.site import Role
from fedshift.federation.site_runner import Setting, SitePlan, about_sites
from fedshift.json_objects import read_object, write_object
from fedshift.methods.base import PERSONAL, Method
from fedshift.methods.composition.fine_tune import FineTune
from fedshift.models.network import Network
from fedshift.weights import Weights

EXPERIMENT, PROGRESS = "experiment.json", "progress.jsonl"
_RULES = ("deadline", "quorum", "on_refusal", "wire", "patience", "grace")
"""What a federation takes of the engine's options."""


def check_deployable(experiment: Experiment) -> FlareEngine:
    """The engine of an experiment that can be deployed; UserError for any other."""
    if not isinstance(experiment.engine, FlareEngine):
        raise UserError("engine.name: write engine: {name: flare} in an experiment that is deployed")
    if not isinstance(experiment.data, AtSites):
        raise UserError(
            f"data.name: {experiment.data.name} lies on this machine; write data: {{name: sites}}, and each site its "
            "own data in its SITE.yaml (fedshift project try plays such a federation with data on this machine)"
        )
    experiment.protocol.for_deployment()
    for network in experiment.model.networks():
        folder = network.name.rpartition(":")[0]
        if folder.endswith(".py") or folder == "bundle":
            raise UserError(
                f"model.name: {network.display} is a file, and no code travels; install it as a package at every site "
                "and name it package.module:Class, which sites must list in policy.models"
            )
    for method in experiment.methods:
        if method.traits.pooled:
            raise UserError(f"methods: {method.display} needs all samples in one place and cannot be deployed")
        name = method_name(method)
        if name.partition(":")[0].endswith(".py"):
            raise UserError(
                f"methods: {method.display} is a file, and no code travels; install it as a package at every site and "
                "name it package.module:Class, which sites must allow in policy.methods"
            )
    return experiment.engine


def check_members(experiment: Experiment, sites: Sequence[str], revoked: Collection[str]) -> None:
    """Check that the sites that an experiment names are there, before anything starts.

    UserError if a target or a dropped site is not there, or no site is left. ``revoked``: the sites that the
    coordinator refuses, with those that have left the project.
    """
    protocol = experiment.protocol
    present = [site for site in sites if site not in revoked]
    has_unseen = isinstance(experiment.data, AtSites) and experiment.data.unseen is not None
    for target in protocol.named_targets:
        if target in revoked and target in sites:
            raise UserError(
                f"protocol.targets: the kit of site '{target}' was revoked: name another site, or take it back with "
                f"fedshift project accept {target}"
            )
        if target in revoked:
            raise UserError(f"protocol.targets: site '{target}' was removed from the project: name another site")
    known = {"targets": (protocol.named_targets, (*sites, EVERY_SITE)), "drop": (protocol.left_out, (*sites, *revoked))}
    for field, (named, names) in known.items():
        unknown = [name for name in named if name not in names]
        if unknown and not (has_unseen and field == "targets"):
            raise UserError(f"protocol.{field}: no site is called '{unknown[0]}'; {nearest(unknown[0], present)}")
    if not set(present) - set(protocol.left_out):
        raise UserError("no site is left: all are revoked (fedshift project accept) or in protocol.drop")


def coordinate(folder: Path, transport: Transport, sites: Sequence[str]) -> None:
    """Run what is not finished of the deployment in ``folder``. NewJobNeeded if the run has to go on in a new job;
    UserError, FedshiftError if the run ends. ``sites``: those of the project that are not revoked."""
    reports_installed("a coordinator")
    experiment = parse(read_object(folder / EXPERIMENT, DEPLOY_AGAIN, older=True))
    engine = check_deployable(experiment)
    log = EventLog(folder / PROGRESS)
    begun = (folder / CARDS).exists()
    dropped = experiment.protocol.left_out
    with threads_set(engine.thread_count()):
        names = members(folder, sites, dropped)
        for site in [site for site in sites if begun and site not in (*names, *dropped)]:
            log.warn(f"site '{site}' joined after this experiment began: a new name takes it in")
        agreed = agree(experiment, transport, names, folder, engine, log)
        plan = DeployedPlan(experiment, agreed)
        for warning in (*agreed.data.warnings, *plan.site_differences):
            log.warn(warning)
        check_fit(plan)
        for warning in _check_sums(plan):
            log.warn(warning)
        _check_measured(plan)
        check_deployed(plan.experiment.methods, by_site=plan.experiment.protocol.by_site)
        check_tuning(plan)
        check_budgets(plan, begun=begun)
        write_cards(folder, agreed.cards)  # from now on the sites of the run are these
        context = Context(resolve_device(experiment.device), torch.get_num_threads(), log)
        write_order(plan, folder / "runs" / experiment.name)
        log.begin(len(plan.runs))
        estimates = Estimates(plan, transport, folder, engine.deadline, log)
        for planned in plan.runs:
            _carry_out(context, plan, planned, engine, estimates)
        estimates.hand_over()


def _carry_out(
    context: Context, plan: DeployedPlan, planned: PlannedRun, engine: FlareEngine, estimates: Estimates
) -> None:
    """Carry out one run from its last checkpoint, or its beginning, to its result."""
    experiment, run, sites = plan.experiment, planned.run, plan.agreed.sites
    transport, log = estimates.transport, estimates.log
    folder = run_folder(planned, estimates.folder / "runs" / experiment.name)
    folder.check_identity()
    finished = folder.result()
    if finished is not None:
        log.on_finished(run, finished, resumed=True)
        return
    _wait_for(folder)
    with folder:
        setting = planned.setting(context.device)
        network = setting.build_network().to(context.device)
        plans = planned.sites(planned.data)
        name = run_at_sites(experiment.name, run)
        numbers = {site.name: (site.role, site.parts[0][2]) for site in plans}
        plain = SealedFederation if engine.routing == "sealed" else RemoteFederation
        colluders = plan.agreed.colluders(item.name for item in plans)
        whole = bool(_strict(plan, plans))
        secure = partial(SecureFederation, memory=folder.memory, whole=whole, colluders=colluders)
        kind = secure if engine.sums_only else plain
        federation = kind(
            run.method,
            transport,
            run=name,
            recipe=_recipe(setting),
            parts={site: _part(plan, run, site, numbers.get(site)) for site in sites},
            about=about_sites(plans, setting, network),
            **{name: getattr(engine, name) for name in _RULES},
            on_event=log.event,
            sources=[site.name for site in plans if site.role == "source"],
            targets=[site.name for site in plans if site.role == "target"],
            budget=site_budget(planned.budget, plans),
            rounds=max(1, planned.rounds),
            per_round=planned.drawn,
            seed=run.seed,
            on_answer=log.on_trained,
        )
        folder.write_settings()
        evaluator = _AtSites(plan, planned, federation, torch.device(context.device), estimates)
        result = train_and_evaluate(context, planned, folder, federation, evaluator, network)
        over = EndRequest(run=name, estimates_follow=bool(plan.data.unlabelled))
        ask_sites(transport, dict.fromkeys(sites, over), engine.patience, Done)
        log.on_finished(run, result, resumed=False)


def _check_measured(plan: DeployedPlan) -> None:
    """Raise UserError where the coordinator's own samples would have to be measured by a sealed model."""
    for run in plan.runs if plan.experiment.engine.routing == "sealed" else ():
        if run.run.target in plan.unseen and any(way.in_model for way in run.run.method.traits.routed.values()):
            raise UserError(
                f"engine.routing: sealed hides parts of the trained model of {run.run.method.display} from the "
                f"coordinator, which would have to measure it on its own '{run.run.target}': let a site be the target, "
                "or leave it out"
            )


def check_deployed(methods: Sequence[Method], *, by_site: bool) -> None:
    """Raise UserError where sites have models of their own, and the protocol has them measure the common one."""
    for method in methods if not by_site else ():
        if PERSONAL in method.traits.memory_names:
            raise UserError(
                f"methods: {method.display} makes a model of each site's own, and deployed sites measure the common "
                "model: write protocol.kind: participants, or leave it out (and fine_tune)"
            )


def check_tuning(plan: DeployedPlan) -> None:
    """Raise UserError where sites would train longer after the last round than in all rounds.

    A site has agreed to a number of mini-batches.
    """
    for planned in plan.runs:
        tuned: FineTune | None = getattr(planned.run.method, "fine_tune", None)
        if tuned is None:
            continue
        sites = planned.sites(planned.data)
        for site in sites:
            budget = site_budget(planned.budget, sites)[site.name]
            samples = sum(len(rows) for _, rows, _ in site.parts)
            batches = batches_per_epoch(samples, planned.training.batch_size)
            if (tuned.steps or (tuned.epochs or 1) * batches) > budget:
                raise UserError(
                    f"methods: {planned.run.method.display} tunes its model longer at site '{site.name}' than all "
                    f"rounds train it ({budget} mini-batches): lower fine_tune, or raise training.rounds"
                )


def _strict(plan: DeployedPlan, sites: Sequence[SitePlan]) -> list[str]:
    """Those of the sites that take part in sums of one set of sites only: no noise of theirs hides differences."""
    private = plan.experiment.training.privacy is not None
    noisy = plan.agreed.privacy if private else ()
    return [site.name for site in sites if plan.agreed.in_one_roster(site.name) and site.name not in noisy]


def _check_rosters(plan: DeployedPlan) -> None:
    """Raise UserError where a site would be in sums of two sets of sites, of which it refuses the second."""
    before: dict[str, tuple[set[str], str]] = {}
    for planned in plan.runs:
        sites = planned.sites(planned.data)
        for role in ("source", "target"):
            group = [site for site in sites if site.role == role]
            names = {site.name for site in group}
            for site in _strict(plan, group):
                known, target = before.setdefault(site, (names, planned.run.target))
                if known != names:
                    differ = ", ".join(f"'{item}'" for item in sorted(known ^ names))
                    raise UserError(
                        f"site '{site}' would be in sums with and without {differ} (targets '{target}' and "
                        f"'{planned.run.target}'), whose difference shows single models, and refuses the second (rule "
                        "policy.roster): name one target, or write training.privacy for sites with a budget"
                    )
                if planned.drawn:
                    raise UserError(
                        f"protocol.sites_per_round: site '{site}' has no budget of privacy, and takes part in sums of "
                        "one set of sites only (rule policy.roster): leave it out"
                    )


def _check_sums(plan: DeployedPlan) -> tuple[str, ...]:
    """Raise UserError where sites refuse the sums of a run; return warnings."""
    if not plan.experiment.engine.sums_only:
        return ()
    _check_rosters(plan)
    weak: dict[str, None] = {}
    for planned in plan.runs:
        sources = [site.name for site in planned.sites(planned.data) if site.role == "source"]
        number = planned.drawn or len(sources)
        for site in sources:
            card = plan.agreed.cards[site]
            if threshold(number, card.colluders) > number:
                raise UserError(
                    f"site '{site}' expects {card.colluders} colluding sites (rule policy.colluders) of "
                    f"the {number} that train: lower it there"
                )
            if card.smallest_sum > number:
                raise UserError(
                    f"site '{site}' takes part in sums of at least {card.smallest_sum} sites (rule "
                    f"policy.smallest_sum), and only {number} train "
                    + ("in a round " if planned.drawn else "")
                    + f"when '{planned.run.target}' is the target"
                )
        colluders = plan.agreed.colluders(sources)
        needed = threshold(number, colluders)
        if 2 * needed - number < 2 and not _strict(plan, planned.sites(planned.data)):
            weak[
                f"{needed} of {number} sites unmask a sum: one that works with a coordinator that lies about who "
                "answered is enough to unmask others; where the coordinator is one of the hospitals, write "
                "policy.colluders: 1 at each site"
            ] = None
    return (*weak,)


def _wait_for(folder: RunFolder) -> None:
    """Take the folder for this job; a job that has just died may still hold it."""
    deadline = time.monotonic() + 60
    while not folder.acquire():
        if time.monotonic() > deadline:
            raise FedshiftError(f"{folder.path} is held by another job")
        time.sleep(0.5)


def _recipe(setting: Setting) -> SettingRecipe:
    """The setting as it is sent to sites: the method by its registered name, and no paths."""
    recipe = setting_recipe(setting)
    assert isinstance(setting.method, Method)
    fields = {name: getattr(recipe, name) for name in recipe.model_fields_set - {"device"}}
    fields["method"] = MethodRecipe(name=method_name(setting.method), options=recipe.method.options)
    # Each site draws its noise from a secret of its own, so only its amount is told.
    fields["draws"] = {site: replace(draws, stream="") for site, draws in recipe.draws.items()}
    return SettingRecipe(**fields)


def _part(plan: DeployedPlan, run: Run, site: str, role: tuple[Role, int] | None) -> SitePart:
    """What a site is told of its own part in a run; ``role``: its role and domain number, None for an unseen one."""
    protocol = plan.experiment.protocol.for_deployment()
    personal = {"personal": True} if protocol.by_site and run.method.calls.keep_own_weights else {}
    return SitePart(
        **personal,
        role=role[0] if role else "unseen",
        number=role[1] if role else 0,
        split=SeedSplit(**protocol.split_rule(), seed=run.seed),
        whole=role is None and plan.agreed.measures_all(site, protocol),
        fingerprint=plan.agreed.cards[site].fingerprint,
    )


# Evaluation -----------------------------------------------------------------------------------------------------------


class _AtSites:
    """Evaluates a model where the samples are: at the sites, and here on the coordinator's own."""

    def __init__(
        self,
        plan: DeployedPlan,
        planned: PlannedRun,
        federation: RemoteFederation,
        device: torch.device,
        estimates: Estimates,
    ) -> None:
        data, measured_here = planned.data, planned.run.target in plan.unseen
        split = measured_parts(planned.run.method, plan.experiment.engine.routing, planned.split)
        self._resamples, model = plan.experiment.evaluation.resamples, plan.experiment.model
        here = Split({}, {}, split.measured)
        new_site = plan.experiment.protocol.new_site_of(planned.run.method, data.input_shape)
        self._here = Evaluator(data, here, device, model, self._resamples, new_site) if measured_here else None
        self._targets = [] if measured_here else list(split.measured)
        self._sources = [site for site, rows in split.held_out.items() if len(rows)]
        self._federation, self._classes = federation, len(data.classes)
        self._predicted = [*split.predicted]
        self._sums, self._estimates, self._planned = asks_sums(plan, planned), estimates, planned
        self._looks = len(self._targets) == 1 and estimates.tells_inputs(self._targets[0])
        self._kept = {"kept": True} if plan.experiment.engine.sums_only else {}

    def measure(self, network: Network, weights: Weights) -> dict[str, Any]:
        """As `Evaluator.measure`."""
        result = self._ask(weights, list(dict.fromkeys([*self._sources, *self._targets])))
        record = self._record(result)
        return record if self._here is None else {**self._here.measure(network, weights), **record}

    def final(self, network: Network, weights: Weights) -> Final:
        """As `Evaluator.final`. The sources are asked before the target, since they choose its threshold."""
        sources = [site for site in self._sources if site not in self._targets]
        result = self._ask(weights, sources, part="held_out")
        threshold = common_threshold(_metrics(result, sources, "held_out"))
        asked: dict[str, Any] = {"resamples": self._resamples, "threshold": threshold}
        asked |= {"sums": True, **self._kept} if self._sums else {}
        trained, folder, run = self._planned.split.train, self._estimates.folder, self._federation.run
        if self._sums and self._looks and (inputs := self._estimates.summed_inputs(self._planned, trained)) is not None:
            asked["inputs"] = inputs
            for site in filter(self._estimates.tells_inputs, trained):
                self._federation.ledger.record(0, "inputs", site, "up", {"inputs": inputs_bytes(inputs)})
        result |= self._ask(weights, self._targets, part="target", **asked)
        if self._sums:
            sums = {site: result[site].sums for site in self._targets if site in result}
            keep_sums(sums_file(folder, run), sums)
        if self._predicted:
            write_object(threshold_file(folder, run), {"threshold": threshold})
            self._federation.hand_out(weights, self._predicted, model_metadata(self._planned))
        record, held_out = self._record(result), _metrics(result, sources, "held_out")
        if self._here is not None:
            here = self._here.final(network, weights, threshold)
            return Final({**here.record, **record}, (*here.sites, *held_out), here.predictions)
        return Final(record, (*_metrics(result, self._targets, "target"), *held_out))

    def _ask(self, weights: Weights, sites: Sequence[str], **whole: Any) -> dict[str, Any]:
        """What sites report of a model."""
        targets = [site for site in self._targets if site in sites]
        measure = self._federation.measure(weights, sites, targets, **whole) if sites else {}
        if targets and not any(site in measure for site in targets):
            raise FedshiftError(
                f"round {self._federation.round}: target '{targets[0]}' did not measure the model; when it is back, go "
                "on with fedshift deploy resume"
            )
        return measure

    def _record(self, measures: Mapping[str, Measures]) -> dict[str, Any]:
        """The fields of a `RoundRecord` that sites report."""
        sources = {site: measures[site].accuracy for site in self._sources if site in measures}
        if self._here is not None:
            return {"source_accuracy": sources}
        targets = [measures[site] for site in self._targets if site in measures]
        counted = self._classes if all(target.classes for target in targets) else 0  # of a quantity there are none
        pairs = [[target.classes[number] for target in targets] for number in range(counted)]
        return {
            "target_accuracy": {site: measures[site].accuracy for site in self._targets if site in measures},
            "source_accuracy": sources,
            "per_class": [_recall(pair) for pair in pairs] if self._targets else [],
        }


def _metrics(measures: Mapping[str, Measures], sites: Sequence[str], part: Part) -> list[SiteMetrics]:
    """What sites said of the last round, under the names and parts that they have here."""
    metrics = {site: measures[site].metrics for site in sites if site in measures}
    return [
        metric.model_copy(update={"site": site, "part": part}) for site, metric in metrics.items() if metric is not None
    ]


def _recall(pairs: Sequence[tuple[int, int] | None]) -> float | None:
    """Accuracy in percent of one class over some sites; None where it is absent, or a site does not say."""
    if any(pair is None for pair in pairs):
        return None
    right, of = sum(pair[0] for pair in pairs if pair), sum(pair[1] for pair in pairs if pair)
    return 100.0 * right / of if of else None
