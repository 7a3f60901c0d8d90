"""``fedshift site check``, ``agree`` and ``open``: what a site holds, allows and was asked for, and sealed models."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import typer
from pydantic import ValidationError

from fedshift.cli.console import say
from fedshift.data.codings import Categories, missing_cells
from fedshift.data.domain import DataSet, SparseRows
from fedshift.data.site_differences import site_differences
from fedshift.deploy.agreed_terms import AgreedTerms, AskedTerms
from fedshift.deploy.approvals import Approver, approver
from fedshift.deploy.flare import roles
from fedshift.deploy.privacy.ledger import PrivacyLedger, lost_records
from fedshift.deploy.privacy.table_view import few_samples, lacking, leaving, of_many_rows
from fedshift.deploy.proxy import proxy_address, proxy_for
from fedshift.deploy.remote.policy import (
    AGREED,
    MASKED,
    SEALED,
    WEIGHTS,
    AuditLog,
    TrainingBounds,
    every_kind,
)
from fedshift.deploy.secure.identity import Identity
from fedshift.deploy.secure.site_sums import Rosters, SiteSums
from fedshift.deploy.site_file import Holding, SiteConfig, load_site, read_holding
from fedshift.deploy.site_requests import seals_all
from fedshift.digests import Damaged, without_digest
from fedshift.encryption import KEY_FILE, present_key
from fedshift.errors import FedshiftError, Refused, UserError, nearest
from fedshift.experiment.environment import versions
from fedshift.experiment.runs.run_folder import SEALED_MODEL, model_file
from fedshift.federation.local.cards import resolve_device
from fedshift.federation.messages import decode
from fedshift.federation.plain_values import Frozen
from fedshift.files import write_bytes
from fedshift.methods import registry as methods
from fedshift.methods.base import reads_of


def check_site(path: Path) -> None:
    """Read a site's data as a run would; print what they are, and what may and may not leave the site."""
    config = load_site(path)
    holding = read_holding(config)
    domain, data = holding.domain, holding.data
    shape = "×".join(map(str, domain.inputs.shape[1:]))
    say(f"site {config.file.site}: {len(domain)} samples of {shape}, data fingerprint {holding.fingerprint}")
    _say_labels(config, holding)
    if domain.fixed_split:
        train = len(domain.described)
        say(f"split: {train} samples train and {len(domain) - train} are a fixed test set (data.split)")
    say(_values(data))
    if config.file.privacy is None:
        for line in leaving(of_many_rows(holding, config.file.policy), config.file.policy):
            say(line)
    few = few_samples(domain, config.file.policy)
    for warning in (*((few,) if few else ()), *data.warnings, *site_differences(data)):
        say(f"warning: {warning}")
    config.memory.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(config.memory).free
    say(f"disk: {free / 1e9:.1f} GB free at {config.memory}")
    say(f"at rest: {'encrypted' if present_key() else f'not encrypted ({KEY_FILE} is not set)'}")
    say(f"device: {resolve_device(config.file.device)}; " + ", ".join(f"{k} {v}" for k, v in versions().items()))
    _say_policy(config)
    lost = lost_records(config)
    if not lost:
        _say_records(config)
    _say_privacy(config, holding)
    _say_kit(config)
    if lost:
        raise UserError(lost[0])


def _say_labels(config: SiteConfig, holding: Holding) -> None:
    domain, data, site = holding.domain, holding.data, config.file.site
    if domain.unlabelled:
        known = len(domain.known)
        labels = f"few, {known} of {len(domain)}" if known else "none"
        what = "they measure models and train none" if known else "it measures no model"
        say(f"labels: {labels} (data.site_labels): {what}; what it gets is kept at {config.received}")
        if "few_train" in getattr(holding.source, "site_labels", {}).values():
            say(f"few_train: its labels train under a kit and a SITE.yaml of their own, site: {site}.labelled")
    elif data.task == "classification":
        counts = np.bincount(domain.labels, minlength=len(data.classes))
        say("classes: " + ", ".join(f"{name} {count}" for name, count in zip(data.classes, counts, strict=True)))
    else:
        say(f"task: {data.task} of {', '.join(data.classes)}")


def _say_privacy(config: SiteConfig, holding: Holding) -> None:
    if (budget := config.file.privacy) is None:
        return
    measures = budget.measurement_noise
    says = "measures no model" if measures is None else f"measures with noise of {measures:g} samples"
    say(f"privacy: a budget of ε = {budget.epsilon:g} at δ = {budget.delta:g}; trains with noise only, {says}")
    if holding.given is not None and (reason := lacking(holding.given, budget)) is not None:
        say(f"warning: it refuses to send statistics for a common encoding of its data without noise: {reason}")


def _say_records(config: SiteConfig) -> None:
    """What the site wrote down of earlier exchanges, which fits."""
    lines, last = AuditLog.check(config.audit_log)
    sink = f"; a copy goes to a sink ({config.file.sink.kind})" if config.file.sink else ""
    say(f"audit log: {len(lines)} lines, unbroken, last digest {last}{sink}")
    if (budget := config.file.privacy) is not None:
        spent = PrivacyLedger(config.memory, config.file.site, budget, AuditLog(config.audit_log)).epsilon()
        say(f"spent: ε = {spent:.3g} of {budget.epsilon:g} at δ = {budget.delta:g}")


def _values(data: DataSet) -> str:
    """Which cells are missing in the file, before they are filled, and which columns never change."""
    if not data.columns:
        (domain,) = data.domains.values()
        if isinstance(domain.inputs, SparseRows) or domain.inputs.dtype != np.float32:
            return "values: all are finite"
        still = int((domain.inputs.reshape(len(domain), -1).std(axis=0) == 0).sum())
        return f"values: all are finite, {still} columns that never change"
    (columns,) = data.columns.values()
    missing = [
        f"{name} {absent} of {rows}" for name, at in missing_cells(data.columns).items() for absent, rows in at.values()
    ]
    constant = [
        name
        for name, column in columns.items()
        if len(column.names if isinstance(column, Categories) else column.values) == 1
    ]
    return f"missing in the file: {', '.join(missing) or 'none'}; never changes: {', '.join(constant) or 'no column'}"


def _say_policy(config: SiteConfig) -> None:
    policy = config.file.policy
    leaves = [kind for kind in dict.fromkeys((*policy.send, MASKED, SEALED)) if policy.lets_out(kind)]
    say(f"may leave: {', '.join(leaves)}; of at least {policy.smallest_group} samples")
    say(f"never leaves: {', '.join(kind for kind in every_kind() if kind not in leaves)}")
    allowed = []
    for name in methods.names() if policy.methods == "all" else policy.methods:
        kind = methods.method_class(name)
        method = kind()
        models = MASKED if reads_of(method) == "sums" else SEALED if seals_all(method) else WEIGHTS
        shares = {models if share == WEIGHTS else share for share in method.calls.shares}
        if not kind.traits.pooled and all(map(policy.lets_out, shares)):
            allowed.append(name)
    limits = ((policy.rounds_per_day, "rounds"), (policy.measurements_per_day, "measurements"))
    rate = "".join(f"; at most {most} {what} a day" for most, what in limits if most)
    say(f"methods that can run: {', '.join(allowed) or 'none'}{rate}")
    terms = AgreedTerms(config.memory, config.file.site, policy)
    _say_sums(config)
    listed = f"{len(policy.peers)} listed" if policy.peers else "required" if policy.secure == "required" else "first"
    rules = {"models": policy.models, "splits": policy.splits, "training": policy.training, "peers": listed}
    for what, agreed in terms.in_force().model_dump().items():
        listed = "; ".join(map(_term, agreed)) or "none yet"
        say(f"{what} agreed to: {listed} (rule policy.{what}: {_rule(rules[what])})")
    if waiting := terms.requests():
        requests = "1 request waits" if len(waiting) == 1 else f"{len(waiting)} requests wait"
        say(f"asked: {requests} for a person: fedshift site agree {config.path.name}")


def _say_sums(config: SiteConfig) -> None:
    """Which sums the site takes part in, and of whom its sums were so far."""
    policy = config.file.policy
    say(f"secure aggregation: {policy.secure}; sums of at least {policy.smallest_sum} sites")
    with contextlib.suppress(FedshiftError):  # a damaged log is said elsewhere
        rosters = Rosters(config.memory, config.file.site, policy, AuditLog(config.audit_log))
        try:
            known = "; then ".join(", ".join(roster) for roster in rosters.sets()) or "none yet"
            say(f"its sums were of: {known} (rule policy.roster: {_rule(policy.roster)})")
        except Refused as error:
            say(f"warning: {error}")
    if policy.colluders == 0 and (policy.roster == "any" or config.file.privacy is not None):
        say(
            "warning: policy.colluders is 0: in a sum of an odd number of sites, one that works with a coordinator "
            "that lies about who answered is enough to unmask others; the usual coordinator is itself a hospital: "
            "write 1"
        )


def _term(term: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in term.items() if value is not None)


def _rule(rule: object) -> str:
    if isinstance(rule, TrainingBounds):
        return _term(rule.model_dump())
    return f"a list of {len(rule)}" if isinstance(rule, tuple) else str(rule)


def agree_site(
    path: Path,
    yes: bool = False,
    refuse: bool = False,
    only: Sequence[int] = (),
    name: str = "",
    key: Path | None = None,
) -> None:
    """Show one refused request after another, and agree to each or refuse it.

    UserError if both are chosen, or no request has such a number, or the person's name or key is missing. ``only``:
    numbers of requests; none: all that wait. A request that was refused can be chosen, too.
    """
    if yes and refuse:
        raise UserError("choose one of --yes and --refuse")
    config = load_site(path)
    policy = config.file.policy
    by = None if refuse else approver(policy.approvals, policy.approvers, name, key, _asked_passphrase)
    terms = AgreedTerms(config.memory, config.file.site, policy)
    waiting, refused = terms.requests(), terms.refusals()
    known = {str(item.number): item for item in (*waiting, *refused)}
    for number in only:
        if str(number) not in known:
            raise UserError(f"--only {number}: site '{config.file.site}' has no such request; {nearest('', known)}")
    chosen = [known[str(number)] for number in only] if only else waiting
    if not chosen:
        say(f"site {config.file.site}: nothing was asked that it has not agreed to")
    for request in chosen:
        _show_request(request, terms.approvals(request))
        answer = "a" if yes else "r" if refuse else _asked_person()
        say(f"request {request.number}: {_act_on_answer(config, terms, request, answer, by)}")
    if refused and not only:
        say(f"refused before: {', '.join(str(item.number) for item in refused)} (--only NUMBER shows one of them)")


_ANSWERS = {"a": "agreed to", "r": "refused", "l": "left for later"}


def _act_on_answer(
    config: SiteConfig, terms: AgreedTerms, request: AskedTerms, answer: str, by: Approver | None
) -> str:
    """Do what a person answered; say what came of it. Once an agreement of named people holds, the audit log has it."""
    if answer == "r":
        terms.refuse([request])
    if answer != "a":
        return _ANSWERS[answer]
    people = terms.agree([request], by)
    lacking = config.file.policy.approvals - len(people) if by is not None else 0
    if lacking > 0:
        others = "another person" if lacking == 1 else f"{lacking} others"
        return f"approved by {', '.join(people)}; it holds once {others} agreed, too (rule policy.approvals)"
    if people:
        log = AuditLog(config.audit_log)
        log.append(do=AGREED, request=request.number, people=list(people), terms=request.lacks.model_dump())
    return _ANSWERS["a"]


def _asked_passphrase() -> str:
    return str(typer.prompt("passphrase of the key", hide_input=True, default="", show_default=False))


def _asked_person() -> str:
    answer = str(typer.prompt("agree (a), refuse (r), or decide later (l)?", default="l", show_default=False))
    return answer if answer in _ANSWERS else "l"


def _show_request(request: AskedTerms, approved: Sequence[str]) -> None:
    """Who asked, when and for which run, and for what."""
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(request.when)) if request.when else "before"
    times = f", {request.times} times" if request.times > 1 else ""
    who = f" by {request.coordinator} for {request.run}" if request.coordinator else ""
    refused = "; it was refused" if request.refused else ""
    by = f"; approved by {', '.join(approved)}" if approved else ""
    say(f"request {request.number}, last asked {when}{who}{times}{refused}{by}:")
    lacks = request.lacks
    for network in lacks.models:
        say(f"  network: {_term(network)}")
    for split in lacks.splits:
        say(f"  split: {_term(split.model_dump())}")
    for bounds in lacks.training:
        least = {"batch_size": "at least"}
        limits = {name: value for name, value in bounds.model_dump().items() if value is not None}
        say(
            "  training: "
            + ", ".join(f"{name} {least.get(name, 'at most')} {value:g}" for name, value in limits.items())
        )
    for peer in lacks.peers:
        say(f"  certificate of {peer.site}: {peer.certificate}; compare it with what site check shows there")


class _SealedFile(Frozen):
    """What stands beside a sealed model: the metadata of its model file."""

    fedshift: dict[str, Any]


def open_model(model: Path, path: Path, out: Path) -> None:
    """Open a trained model that is sealed for a site, and write it as any other model of a run."""
    from fedshift.deploy.secure.site_seals import SiteSeals

    config, file = load_site(path), model / SEALED_MODEL if model.is_dir() else model
    terms = AgreedTerms(config.memory, config.file.site, config.file.policy)
    seals = SiteSeals(config, terms, SiteSums(config, terms))
    try:
        content, header = decode(without_digest(file.read_bytes(), file))
        weights, metadata = seals.opened_file(content), _SealedFile.model_validate(header).fedshift
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror or error}") from None
    except Refused as error:
        raise UserError(f"{file}: {error}") from None
    except Damaged:
        raise
    except (FedshiftError, ValidationError):
        raise UserError(f"{file} is damaged or is no sealed model: give the {SEALED_MODEL} of a run") from None
    write_bytes(out, model_file(weights, metadata))
    say(f"site {config.file.site}: opened {file}, wrote {out}")


def _say_kit(config: SiteConfig) -> None:
    if not (config.kit / "kit.json").exists():
        say(f"kit: none at {config.kit} yet")
        return
    kit = roles.load_kit(config.kit, "site")
    check_name(config, kit.name)
    roles.check_settings(kit)
    say(f"kit: project {kit.project.name}, valid until {roles.expiry(kit)}, contact {kit.project.contact}")
    say(f"certificate: {Identity.of_kit(kit.folder, kit.name).fingerprint} (SHA-256, for policy.peers of other sites)")
    proxy = proxy_for(kit.project.server, config.file.proxy)
    reason = roles.check_reachable(kit, proxy)
    through = "" if proxy is None else f" through the proxy {':'.join(map(str, proxy_address(proxy)[:2]))}"
    say(f"coordinator: {f'can be reached{through}' if reason is None else f'cannot be reached{through}: {reason}'}")


def check_name(config: SiteConfig, name: str) -> None:
    """Raise UserError if a site's kit is another site's."""
    if config.file.site != name:
        raise UserError(
            f"{config.path}: site is '{config.file.site}', but the kit is for '{name}'; use the kit of this site"
        )
