"""Checks, without training, that methods, network, data and the sites' refusals are compatible."""

from __future__ import annotations

import copy
from collections.abc import Sequence

from fedshift.data.builders.at_sites import AtSites
from fedshift.data.domain import DataSet
from fedshift.data.tasks.objective import CLASSES, objective_of
from fedshift.errors import UserError, nearest
from fedshift.evaluation.metric_entries import ENTRIES
from fedshift.evaluation.records import ERRORS
from fedshift.evaluation.tasks.measuring import measuring_of
from fedshift.experiment.budgets import shortest_epochs
from fedshift.experiment.config.experiment import Experiment
from fedshift.experiment.costs import privacy_warnings
from fedshift.experiment.environment import resolve_device
from fedshift.experiment.plan import Plan
from fedshift.experiment.privacy import check_private, check_private_task, check_routed, check_sums
from fedshift.experiment.trial import try_training
from fedshift.federation.local.stacked import check_side_by_side
from fedshift.methods import registry
from fedshift.methods.base import Method, Samples
from fedshift.methods.catalogue import NEEDS_CLASSES
from fedshift.methods.composition.new_site import turns
from fedshift.methods.composition.plug_in import LocalOption
from fedshift.methods.robust import Trust
from fedshift.models import registry as models
from fedshift.models.adapters import check_adapters, merged
from fedshift.models.network import Network
from fedshift.models.normalisation import batch_norms
from fedshift.models.products import has_bf16_units
from fedshift.weights import Weights


def check_fit(plan: Plan) -> tuple[str, ...]:
    """Check, without training, that methods, network, data and the sites' refusals are compatible.

    Returns:
        Warnings of the methods about their options on these data, and about sites that will be left out.

    Raises:
        UserError: something is not compatible. The message names the first such thing.
    """
    experiment, data, engine = plan.experiment, plan.data, plan.experiment.engine
    roles = [plan.roles(target) for target in plan.targets]
    warnings: list[str] = []
    for site in engine.refuse_at:
        if site not in data.domains:
            raise UserError(f"engine.refuse_at: no site is called '{site}'; {nearest(site, data.domains)}")
    for kind in experiment.data.shares:
        if kind in engine.refuse or any(kind in kinds for kinds in engine.refuse_at.values()):
            raise UserError(
                f"engine.refuse: sites refuse {kind}, which data set {experiment.data.name} needs for a common "
                "encoding: take the kind out or choose another data set"
            )
    private = experiment.training.privacy is not None
    if private:
        check_private_task(data)
    _check_compared(experiment, data)
    models.check_task(experiment.model, data.task, data.name)
    experiment.training.for_classes(data.classes)
    if experiment.training.class_weights is not None and data.task != "classification":
        raise UserError(f"training.class_weights: an image of data set {data.name} has no single class; leave it out")
    _check_headline(experiment, data)
    _check_measurable(plan)
    numbers = {len(sources) for sources, _ in roles}
    unseen = experiment.protocol.unseen
    most = max(len(sources) + (0 if unseen else len(others)) for sources, others in roles)
    if engine.quorum is not None and engine.quorum > most:
        raise UserError(
            f"engine.quorum: {engine.quorum} sites must answer, but at most {most} train in a run: lower it, or leave "
            "it out to wait for all"
        )
    if experiment.training.precision == "bf16" and not has_bf16_units(resolve_device(experiment.device)):
        warnings.append("training.precision: this device has no units for bf16, so it is no faster than float32")
    fixed = "adapters" if experiment.training.adapters is not None else "thaw_after"
    if getattr(experiment.training, fixed) and experiment.model.starts_at_random:
        given = "give model.pretrained to adapt a trained network"
        warnings.append(f"training.{fixed}: the weights that stay fixed are drawn at random; {given}")
    fewest = min(len(sources) for sources, _ in roles)
    if (drawn := experiment.protocol.drawn(fewest)) is not None:
        _check_drawn(experiment.methods, engine.quorum, drawn, fewest)
        if engine.sums_only and not private:
            raise UserError(
                "protocol.sites_per_round: sums of drawn sites differ by a few, and these differences show single "
                "models, which aggregation: secure hides: leave it out, or write training.privacy"
            )
    start = _start(experiment, data)
    if experiment.model.code is not None:
        try_training(start, experiment.model, experiment.training, data.input_shape)
    fewest_unlabelled = 0 if unseen else min(len(others) for _, others in roles)
    for method in experiment.methods:
        if engine.routing == "sealed":
            warnings += check_routed(method, experiment.training.adapters is not None)
        if engine.sums_only:
            warnings += check_sums(method, fewest if drawn is None else drawn, fewest_unlabelled)
        if data.task not in method.tasks:
            known = {name: registry.method_class(name).tasks for name in registry.names()}
            # A wrapper has the tasks of the method that it wraps, so its class has no list of them.
            fitting = [name for name, tasks in known.items() if isinstance(tasks, tuple) and data.task in tasks]
            raise UserError(
                f"methods: {method.display} is a method for {' and '.join(method.tasks)}{_why(method)}, but data set "
                f"{data.name} is for {data.task}: choose {', '.join(fitting)}"
            )
        for sources in sorted(numbers):
            plain = None
            if experiment.training.adapters is not None:
                plain = models.build(experiment.model, data.input_shape, len(data.classes), 0)
            network = _adapted(method, copy.deepcopy(start), plain, sources)
            method.check(network)
            if engine.sites == "side_by_side":
                kinds = {"in_parts": method.trains_in_parts, "plugged": bool(method.local_for(data.input_shape))}
                check_side_by_side(method.display, network, experiment.training, **kinds)
            if private:
                check_private(method, network, data.input_shape)
            for plug_in in method.local_for(data.input_shape):
                _check_plug_in(method, plug_in, network, data)
        _check_new_site(method, experiment, network)
        if method.robust is not None:
            for labelled, others in roles:
                _check_rule(method, labelled, others, engine.quorum, drawn)
        if method.averaging.judges:
            _check_judged(method, experiment)
        refused = sorted(set(method.shares) & set(engine.refuse))
        if refused:
            raise UserError(
                f"engine.refuse: sites refuse {refused[0]}, which {method.display} shares: choose another method or "
                "take the kind out of engine.refuse"
            )
        asked = {site for sources, others in roles for site in (*sources, *(others if method.needs_target else ()))}
        for site in (site for site in engine.refuse_at if site in asked):
            for kind in sorted(set(method.shares) & set(engine.refuse_at[site])):
                refusal = f"site '{site}' refuses to send {kind}, which {method.display} shares"
                if engine.on_refusal == "stop" or method.pooled:
                    way = "" if method.pooled else " or write engine.on_refusal: leave_out"
                    raise UserError(f"engine.refuse_at: {refusal}: choose another method, take the kind out{way}")
                warnings.append(f"{refusal}: the site is left out of such exchanges")
    samples = Samples(data.input_shape, shortest_epochs(experiment.training, (one.split for one in plan.runs)))
    for method in experiment.methods:
        warnings += method.check_samples(samples)
    return (*warnings, *privacy_warnings(plan))


def _check_compared(experiment: Experiment, data: DataSet) -> None:
    """Raise UserError where the protocol cannot compare what the task is measured by."""
    if experiment.protocol.both_sides and measuring_of(objective_of(data.preprocessing)).metric in ERRORS:
        raise UserError(
            f"protocol.kind: {experiment.protocol.kind} compares by the harmonic mean of both sides, which is near the "
            f"smaller number, so the better side's of two errors, and {data.task} is compared by errors: use "
            "leave_one_out or adapt_to_one"
        )


def _check_drawn(methods: Sequence[Method], quorum: int | None, drawn: int, sources: int) -> None:
    """Check that a round can do without the sources that are not drawn for it.

    Args:
        methods: of the experiment.
        quorum: of its engine.
        drawn: how many are drawn.
        sources: the fewest sources of a run.

    Raises:
        UserError: it cannot.
    """
    if drawn > sources:
        raise UserError(f"protocol.sites_per_round: {drawn} of {sources} sources cannot be drawn; lower it")
    if quorum is not None and quorum > drawn:
        raise UserError(
            f"engine.quorum: {quorum} sites must answer, but {drawn} are drawn for a round "
            "(protocol.sites_per_round): lower it"
        )
    for method in methods:
        if method.pooled or method.target == "labelled":
            why = "trains in one place, where no site can be drawn"
        elif method.needs_target:
            why = "weighs the models of all sources for its target in every round"
        elif isinstance(method.robust, Trust):
            why = f"compares all models with that of '{method.robust.trusted}', which may not be drawn"
        else:
            continue
        raise UserError(
            f"protocol.sites_per_round: {method.display} {why}: choose another method, or leave sites_per_round out"
        )


def _why(method: Method) -> str:
    """Why it is for classification alone, where its equations say so."""
    reason = NEEDS_CLASSES.get(getattr(method, "inner", method).name)
    return f", because {reason}" if reason else ""


def _start(experiment: Experiment, data: DataSet) -> Network:
    """The network that runs start from; its weights are arbitrary.

    Raises:
        UserError: it cannot have the adapters of the experiment.
    """
    start = experiment.training.network(experiment.model, data.input_shape, len(data.classes), 0)
    if experiment.training.adapters is not None:
        check_adapters(start, data.input_shape)
    start.objective = objective_of(data.preprocessing)
    return start


def _adapted(method: Method, network: Network, plain: Network | None, sources: int) -> Network:
    """What the sites of a method train.

    Args:
        method: the method.
        network: the one that runs start from.
        plain: the same without adapters; None if it has none.
        sources: number of source domains.

    Raises:
        UserError: the method cannot change a network that has adapters.
    """
    if plain is None:
        return method.adapt_network(network, sources)
    fault = UserError(
        f"training.adapters: {method.display} changes layers of the network, which it cannot where they are fixed: "
        "write adapters.normalisation: true if these are BatchNorm, or choose another method, such as fedavg"
    )
    try:
        adapted = method.adapt_network(network, sources)
        evaluated = method.evaluated_network(adapted, sources)
        found = merged(evaluated, Weights(evaluated.state_dict()))
    except (RuntimeError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise fault from error
    wanted = method.evaluated_network(method.adapt_network(plain, sources), sources).state_dict()
    if {name: tensor.shape for name, tensor in found.items()} != {name: wanted[name].shape for name in wanted}:
        raise fault
    return adapted


def _check_headline(experiment: Experiment, data: DataSet) -> None:
    """Raise UserError where the headline cannot be measured on these data."""
    headline = experiment.evaluation.headline
    if headline != "accuracy" and data.task == "segmentation":
        raise UserError(
            f"evaluation.headline: {headline} is a measure of classification, but data set {data.name} is for "
            "segmentation, which is compared by the Dice coefficient: leave it out"
        )
    measuring = measuring_of(objective_of(data.preprocessing))
    if headline not in ("accuracy", *measuring.metrics):
        raise UserError(
            f"evaluation.headline: {headline} is no measure of {data.task}, which data set {data.name} is for: choose "
            f"{' or '.join(measuring.metrics)}"
        )
    if "two classes" in ENTRIES[headline].needs and len(data.classes) != 2:
        raise UserError(
            f"evaluation.headline: {headline} needs two classes, but data set {data.name} has {len(data.classes)}: "
            "choose balanced_accuracy or auroc"
        )


def _check_measurable(plan: Plan) -> None:
    """Raise UserError where nothing can be measured at a target."""
    measuring = measuring_of(objective_of(plan.data.preprocessing))
    if measuring.metric != "concordance" or isinstance(plan.experiment.data, AtSites):
        return
    for target in plan.targets:
        split = plan.split(target, plan.experiment.protocol.seeds[0])
        sides = plan.experiment.protocol.compared(split)
        for site, rows in ((site, rows) for side in sides for site, rows in side.items()):
            labels = plan.data.domains[site].labels[rows]
            if measuring.value(labels[:, 0], labels) is None:
                raise UserError(
                    f"data: at site '{site}' no two samples can be compared, since no event was seen before another "
                    "time: take more samples, or do not measure there"
                )


def _check_plug_in(method: Method, plug_in: LocalOption, network: Network, data: DataSet) -> None:
    """Raise UserError where a plug-in of local training does not go with the network or the samples."""
    try:
        if data.task not in plug_in.tasks:
            raise UserError(
                f"{plug_in.name} is for {' and '.join(plug_in.tasks)}, the data for {data.task}; leave it out"
            )
        plug_in.check(network, data.input_shape)
    except UserError as error:
        raise UserError(f"methods: {method.display}: local.{error}") from None


def _check_new_site(method: Method, experiment: Experiment, network: Network) -> None:
    """Raise UserError where a network cannot adapt to an unseen site in the way that an option asks for."""
    unfit = {}
    if method.batch_norm_at_new_site is not None:
        follows = batch_norms(network)
        unfit["batch_norm_at_new_site"] = "" if follows else "the network has no BatchNorm that follows its data"
    if method.classifier_at_new_site is not None:
        fits = turns(method.evaluated_network(network, 1)) and network.objective == CLASSES
        unfit["classifier_at_new_site"] = "" if fits else "the network's classifier is not one linear layer for classes"
    for option, reason in unfit.items():
        if not experiment.protocol.unseen:
            reason = f"protocol {experiment.protocol.kind} has no unseen site"
        if reason:
            raise UserError(f"methods: {method.display}: {option}: {reason}; leave it out")


def _check_judged(method: Method, experiment: Experiment) -> None:
    """Raise UserError where an average that looks at the sources' held-out parts after every round cannot."""
    if not experiment.protocol.holds_out:
        raise UserError(
            f"methods: {method.display}: average: it chooses rounds by the sources' held-out parts, and "
            "protocol.test_fraction is 0: raise it, or choose swa or ema"
        )
    if experiment.training.measure_every > 1:
        raise UserError(
            f"methods: {method.display}: average: it looks at every round, and training.measure_every is "
            f"{experiment.training.measure_every}: leave that out, or choose swa or ema"
        )


def _check_rule(
    method: Method, sources: Sequence[str], others: Sequence[str], quorum: int | None, drawn: int | None
) -> None:
    """Raise UserError where a robust rule cannot work on the replies of these sites, or of those a quorum leaves.

    ``drawn`` is how many sources a round has, None where it has all.
    """
    rule = method.robust
    assert rule is not None
    try:
        rule.check_sources(sources)
        for averaged in method.averages.values():
            asked = (drawn or len(sources)) if averaged.at == "sources" else len(others)
            rule.check(asked)
            if quorum is not None:
                try:
                    rule.check(min(quorum, asked))
                except UserError as error:
                    raise UserError(f"{error}, or raise engine.quorum, which is {quorum}") from None
    except UserError as error:
        raise UserError(f"methods: {method.display}: robust.{error}") from None
