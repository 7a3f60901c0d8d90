"""The role of each site in a run, and which of its rows train, are held out and are measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from fedshift.data.domain import DataSet, Domain, Rows
from fedshift.data.site_data import batches_per_epoch
from fedshift.data.splits import cut, part_rows, split_kind
from fedshift.data.tasks.objective import objective_of
from fedshift.errors import UserError, nearest
from fedshift.evaluation.records import ERRORS
from fedshift.evaluation.summary import AVERAGE
from fedshift.evaluation.tasks.measuring import measuring_of
from fedshift.experiment.config.sections import AdaptToOne, LeaveOneOut, Protocol, SourceTarget
from fedshift.federation.training import Training
from fedshift.files import names_a_folder
from fedshift.functional.poisoning import wrong_labels
from fedshift.methods.base import Method
from fedshift.methods.composition.new_site import NewSite
from fedshift.methods.robust import Trust

EVERY_SITE = "sites"
"""The target that leaves no site out: all train, and the model is measured on the samples that they hold out."""


@dataclass(frozen=True)
class Split:
    """Rows of one (target, seed), by site.

    Args:
        train: rows that each source trains on.
        held_out: rows that each source holds out; may be empty.
        measured: rows that each target is measured on.
        unlabelled: rows that each target trains on without labels.
    """

    train: Mapping[str, Rows]
    held_out: Mapping[str, Rows]
    measured: Mapping[str, Rows]
    unlabelled: Mapping[str, Rows] = field(default_factory=dict)


def targets_of(protocol: Protocol, data: DataSet) -> tuple[str, ...]:
    """The domains that are the target in turn, or the names of the pairs.

    Raises:
        UserError: a target does not exist or is named twice, the data have one domain only, or a domain's name cannot
            name a folder.
    """
    if len(data.domains) < 2:
        raise UserError(
            f"data: {protocol.kind} needs at least 2 domains, but there is only '{next(iter(data.domains))}'"
        )
    for name in data.domains:
        if not names_a_folder(name):
            raise UserError(
                f"data: site '{name[:80]}' cannot name a folder (no '/', no '\\', no '.' at the beginning, at most 255 "
                "bytes); rename it"
            )
        if name == AVERAGE:
            raise UserError(f"data: a site cannot be called '{AVERAGE}', the name of a column in tables; rename it")
    if isinstance(protocol, SourceTarget):
        return tuple(_pairs(protocol, data))
    if protocol.targets == "all":
        return tuple(data.domains)
    for target in protocol.targets:
        if target not in data.domains and target == EVERY_SITE:
            _check_every_site(protocol)
        elif target not in data.domains:
            raise UserError(f"protocol.targets: no domain is called '{target}'; {nearest(target, data.domains)}")
        if protocol.targets.count(target) > 1:
            raise UserError(f"protocol.targets: '{target}' is named twice; name it once")
    if not protocol.targets:
        raise UserError("protocol.targets: name at least one domain, or write all")
    return protocol.targets


def _check_every_site(protocol: LeaveOneOut | AdaptToOne) -> None:
    """Raise UserError where the protocol knows no model of all sites."""
    if not isinstance(protocol, LeaveOneOut):
        raise UserError(
            f"protocol.targets: '{EVERY_SITE}' trains one model at all sites, with their labels, and {protocol.kind} "
            "needs a target without: write protocol.kind: leave_one_out"
        )


def _pairs(protocol: SourceTarget, data: DataSet) -> dict[str, tuple[tuple[str, ...], tuple[str, ...]]]:
    """Name of a pair, such as "north-south" or "north+west-south": its labelled and its unlabelled sites."""
    chosen = protocol.pairs
    if chosen == "all":
        chosen = tuple(((first,), (second,)) for first in data.domains for second in data.domains if first != second)
    named = {}
    for labelled, unlabelled in chosen:
        for name in (*labelled, *unlabelled):
            if name not in data.domains:
                raise UserError(f"protocol.pairs: no domain is called '{name}'; {nearest(name, data.domains)}")
        pair = f"{'+'.join(labelled)}-{'+'.join(unlabelled)}"
        if pair in named:
            raise UserError(
                f"protocol.pairs: '{pair}' is given twice, or two pairs have this name; remove one, or rename a site"
            )
        named[pair] = labelled, unlabelled
    return named


def roles_of(protocol: Protocol, data: DataSet, target: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The sources and the targets, in the order of the data.

    Args:
        protocol: the protocol.
        data: the domains.
        target: a target, whose sources are all other domains; `EVERY_SITE`, of which all are; or the name of a pair.
    """
    if not isinstance(protocol, SourceTarget):
        return tuple(name for name in data.domains if name != target), (target,)
    labelled, unlabelled = _pairs(protocol, data)[target]
    return (
        tuple(name for name in data.domains if name in labelled),
        tuple(name for name in data.domains if name in unlabelled),
    )


def split_of(protocol: Protocol, data: DataSet, target: str, seed: int) -> Split:
    """The rows of one (target, seed). They are the same for every method.

    Raises:
        UserError: a source has no sample to train on, or the target has none to be measured on.
    """
    if isinstance(protocol, SourceTarget):
        return _pair_split(protocol, data, target, seed)
    rows = {name: domain_rows(protocol, domain, seed) for name, domain in data.domains.items()}
    train = {name: pair[0] for name, pair in rows.items() if name != target}
    held_out = {name: pair[1] for name, pair in rows.items() if name != target}
    for name, chosen in train.items():
        if len(chosen) == 0:
            _check_groups(data, name)
            raise UserError(f"protocol: site '{name}' has no training samples left; lower protocol.test_fraction")
    if target not in rows:
        measured_there = {name: chosen for name, chosen in held_out.items() if len(chosen)}
        if not measured_there:
            raise UserError("protocol.test_fraction: no site holds out a sample to measure the model on; raise it")
        return Split(train, held_out, measured_there)
    if isinstance(protocol, LeaveOneOut):
        if len(rows[target][1]) == 0 and protocol.base_images != "shared":
            _check_groups(data, target)
        return Split(train, held_out, {target: unseen_rows(protocol, data.domains[target], rows[target][1])})
    unlabelled, measured = rows[target]
    if len(unlabelled) == 0 or len(measured) == 0:
        _check_groups(data, target)
        raise UserError(
            f"protocol: '{target}' has {len(unlabelled)} samples to adapt to and {len(measured)} to be measured on; "
            "change protocol.test_fraction"
        )
    return Split(train, held_out, {target: measured}, {target: unlabelled})


def _check_groups(data: DataSet, name: str) -> None:
    """Raise UserError where a site cannot be split because all its samples are in one group, whatever the fraction."""
    groups = data.domains[name].groups
    if groups is None or len(groups) < 2 or (groups != groups[0]).any():
        return
    if data.name == "image_folder":
        raise UserError(
            f"all {len(groups)} images of site '{name}' have the same patient ID, so the site cannot be split: set "
            "data.patient to study, series or file if the export gave one ID to all, or leave the site out"
        )
    raise UserError(
        f"all {len(groups)} samples of site '{name}' are in one group, so the site cannot be split: give it several "
        "groups or none, or leave the site out"
    )


def _pair_split(protocol: SourceTarget, data: DataSet, target: str, seed: int) -> Split:
    """Labelled sites train on some rows and are measured on the others. Unlabelled sites use all rows for both.

    Where the data fix their test rows, every site trains on the others and is measured on these.
    """
    labelled, unlabelled = roles_of(protocol, data, target)
    train, held_out = {}, {}
    for name in labelled:
        domain = data.domains[name]
        kind = split_kind(domain, "auto" if domain.fixed_split else "random")
        train[name], held_out[name] = part_rows(domain, protocol.labelled_test_fraction, seed, kind)
        if len(train[name]) == 0 or len(held_out[name]) == 0:
            _check_groups(data, name)
            raise UserError(
                f"protocol: labelled site '{name}' has {len(domain)} sample(s), {len(train[name])} to train on and "
                f"{len(held_out[name])} to be measured on; change protocol.labelled_test_fraction or leave it out"
            )
    used, measured = {}, {}
    for name in unlabelled:
        domain = data.domains[name]
        whole = np.arange(len(domain), dtype=np.int64)
        used[name], measured[name] = part_rows(domain, 0, seed, "official") if domain.fixed_split else (whole, whole)
    return Split(train, held_out, measured, used)


def unseen_rows(protocol: LeaveOneOut, domain: Domain, held_out: Rows) -> Rows:
    """The rows that an unseen target is measured on: all, or those of base samples that no source trained on.

    Of a split that the data fix, the test rows.

    Raises:
        UserError: there are no such base samples.
    """
    if domain.fixed_split:
        return held_out
    if domain.groups is None or protocol.base_images == "shared":
        return np.arange(len(domain), dtype=np.int64)
    if protocol.test_fraction == 0:
        raise UserError(
            "protocol.test_fraction: 0 leaves no base sample to test the target on; choose a fraction, or write "
            "base_images: shared to test on base samples that the sources trained on"
        )
    if len(held_out) == 0:
        raise UserError(
            f"protocol: no base sample of '{domain.name}' is held out to test on; raise protocol.test_fraction or "
            "write base_images: shared"
        )
    return held_out


def domain_rows(protocol: LeaveOneOut | AdaptToOne, domain: Domain, seed: int) -> tuple[Rows, Rows]:
    """The training and the held-out rows of one domain. They do not depend on other domains."""
    return part_rows(domain, protocol.test_fraction, seed, split_kind(domain, protocol.split))


def shortest_epochs(training: Training, splits: Iterable[Split]) -> dict[str, int]:
    """Source → mini-batches of an epoch, in the split in which it has the fewest."""
    fewest: dict[str, int] = {}
    for split in splits:
        for site, rows in split.train.items():
            steps = batches_per_epoch(len(rows), training.batch_size)
            fewest[site] = min(steps, fewest.get(site, steps))
    return fewest


def taking_part(protocol: Protocol, data: DataSet) -> DataSet:
    """The data without the domains in ``protocol.drop``, and with the sources cut as ``protocol.sites_each`` says.

    Raises:
        UserError: ``drop`` or ``wrong_labels`` names a domain that does not exist, or a source with wrong labels is
            also a target or is cut.
    """
    if isinstance(protocol, SourceTarget):
        return data
    wrong = protocol.wrong_labels if isinstance(protocol, AdaptToOne) else {}
    for field_name, names in (("drop", protocol.drop), ("wrong_labels", wrong)):
        for name in names:
            if name not in data.domains:
                raise UserError(f"protocol.{field_name}: no domain is called '{name}'; {nearest(name, data.domains)}")
    targets = data.domains if protocol.targets == "all" else protocol.targets
    for name in wrong:
        if name in targets and name not in protocol.drop:
            others = ", ".join(other for other in targets if other != name)
            raise UserError(
                f"protocol.wrong_labels: '{name}' is a target too, and a run with it as the target has no wrong label "
                f"in it: write protocol.targets: [{others}]"
            )
    if wrong and protocol.sites_each > 1:
        raise UserError("protocol.wrong_labels: names whole sources, which protocol.sites_each cuts; leave one out")
    kept = {name: domain for name, domain in data.domains.items() if name not in protocol.drop}
    if protocol.sites_each > 1:
        return replace(data, domains=_cut(protocol, kept), columns={})
    columns = {name: own for name, own in data.columns.items() if name in kept}
    return replace(data, domains=kept, columns=columns) if protocol.drop else data


def _cut(protocol: LeaveOneOut | AdaptToOne, domains: Mapping[str, Domain]) -> dict[str, Domain]:
    """The domains, the sources cut into sites; the target stays whole.

    Raises:
        UserError: there is not exactly one target, so that a source of one run would be the target of another.
    """
    if protocol.targets == "all" or len(protocol.targets) != 1:
        raise UserError("protocol.sites_each: name one target, such as protocol.targets: [M0]; only sources are cut")
    found: dict[str, Domain] = {}
    for name, domain in domains.items():
        whole = name == protocol.targets[0]
        parts = [domain] if whole else cut(domain, protocol.sites_each, protocol.cut_by, protocol.label_skew)
        twice = next((part.name for part in parts if not whole and part.name in domains), None)
        if twice is not None:
            raise UserError(
                f"protocol.sites_each: a part of '{name}' would be called '{twice}', as a site is: rename it"
            )
        found.update((part.name, part) for part in parts)
    return found


def new_site_of(
    protocol: Protocol, method: Method, input_shape: tuple[int, ...], split: Split | None = None
) -> NewSite | None:
    """How a method's network adapts to an unseen target before it predicts there; None where no target is unseen.

    ``split``: of the run, in which targets may have trained; None: they have not.
    """
    unseen = isinstance(protocol, LeaveOneOut) and (split is None or not set(split.measured) <= set(split.train))
    return method.new_site_for(input_shape) if unseen else None


def check_drawn(methods: Sequence[Method], quorum: int | None, drawn: int, sources: int) -> None:
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


def with_wrong_labels(protocol: Protocol, data: DataSet, split: Split, seed: int) -> DataSet:
    """The data with a share of wrong training labels at malicious sources. Held-out labels stay true.

    Raises:
        UserError: the labels are no classes.
    """
    if not isinstance(protocol, AdaptToOne) or not protocol.wrong_labels:
        return data
    if data.task != "classification":
        raise UserError(
            "protocol.wrong_labels: masks, numbers and times have no other class to replace the true one; leave it out"
        )
    domains = dict(data.domains)
    for name, share in protocol.wrong_labels.items():
        if name not in split.train:  # not a source in this run
            continue
        labels = domains[name].labels.copy()
        rows = split.train[name]
        true = labels[rows].astype(np.int64)
        labels[rows] = wrong_labels(true, share, len(data.classes), seed, protocol.wrong_labels_rule)
        domains[name] = replace(domains[name], labels=labels)
    return replace(data, domains=domains)


def check_compared(protocol: Protocol, data: DataSet) -> None:
    """Check that the protocol can compare what the task is measured by.

    Raises:
        UserError: it cannot.
    """
    if isinstance(protocol, SourceTarget) and measuring_of(objective_of(data.preprocessing)).metric in ERRORS:
        raise UserError(
            "protocol.kind: source_target compares by the harmonic mean of both sides, which is near the smaller "
            f"number, so the better side's of two errors, and {data.task} is compared by errors: use leave_one_out or "
            "adapt_to_one"
        )
