"""A site of a deployed federation: it answers the coordinator's requests.

A site runs only calls of methods that are installed here. Before a call it checks version, method and policy; after it,
everything that would leave. It writes each exchange to its audit log, and keeps its memory on its own disk. It also
keeps its answers since the last checkpoint: when a job died and a request comes again, the site repeats its answer
without training again.
"""

from __future__ import annotations

import contextlib
import hashlib
import shutil
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import ValidationError

from fedshift.data.domain import Rows
from fedshift.data.site_data import SiteData
from fedshift.data.tasks.objective import objective_of
from fedshift.deploy.agreed_terms import AgreedTerms, asked_bounds, split_terms
from fedshift.deploy.features_at_sites import check_text_towers, features_here
from fedshift.deploy.privacy.exposure import ExposureWatch
from fedshift.deploy.privacy.few_rows import check_classes, check_few
from fedshift.deploy.privacy.site_rules import SiteRules
from fedshift.deploy.remote.policy import ACCURACY, AuditLog, TrainingBounds, described, whole_number
from fedshift.deploy.remote.transport import PROTOCOL, request_key
from fedshift.deploy.remote.wire import Message, body_of, error_answer, seal, unseal
from fedshift.deploy.secure.site_seals import SiteSeals
from fedshift.deploy.secure.site_sums import SiteSums, promised_masked, without_body
from fedshift.deploy.site_cards import card_of
from fedshift.deploy.site_estimates import SiteEstimates, threshold_in
from fedshift.deploy.site_file import SiteConfig, file_stamp, load_site, read_holding
from fedshift.deploy.site_requests import (
    RESIDUALS,
    audit_entry,
    check_files,
    digest_of,
    drop_covered,
    envelope_of,
    keep_answer,
    kept_answer,
    narrowed,
    plain_name,
    run_name,
    shared_kinds,
)
from fedshift.errors import FedshiftError, Refused, UserError
from fedshift.evaluation.predictions import UNLABELLED, SitePredictions
from fedshift.experiment.config.error_messages import describe
from fedshift.experiment.environment import resolve_device
from fedshift.experiment.runs.evaluator import answering, scored
from fedshift.federation.local.allocator import keep_freed_memory
from fedshift.federation.messages import Content, promised_kinds, reply_content
from fedshift.federation.replies import reply_type
from fedshift.federation.setting_json import setting_from
from fedshift.federation.site_runner import Setting, SitePlan, SiteRunner
from fedshift.federation.training import Training
from fedshift.methods import registry as methods
from fedshift.methods.base import Method
from fedshift.methods.composition.new_site import NewSite
from fedshift.models import registry as networks
from fedshift.models.adapters import merged
from fedshift.models.network import Network
from fedshift.text import printable
from fedshift.version import installed_version
from fedshift.weights import Weights


def tell_people(error: Exception) -> str:
    """Print an error for the people of this site, whose service has it in its log; return the text."""
    if isinstance(error, FedshiftError):
        print(f"warning: {printable(str(error))}", flush=True)
        return str(error)
    text = "".join(traceback.format_exception(error))
    print(printable(text, keep="\n"), flush=True)
    return text


def open_site(path: Path, *, in_service: bool = False) -> SiteProgram:
    """Make the program of the site that a SITE.yaml describes."""
    return SiteProgram(load_site(path), in_service=in_service)


class SiteProgram:
    """Answers a coordinator's requests at one site, for as long as a job lives.

    Args:
        config: the site's.
        in_service: whether what is printed goes to the log of the site's service, where its people read refusals.
    """

    def __init__(self, config: SiteConfig, *, in_service: bool = False) -> None:
        self.config = config
        self._in_service = in_service
        self.name = config.file.site
        self.policy = config.file.policy
        self.terms = AgreedTerms(config.memory, self.name, self.policy)
        self.log = AuditLog(config.audit_log)
        self.sums = SiteSums(config, self.terms, self.log)
        self.seals = SiteSeals(config, self.terms, self.sums)
        self.rules = SiteRules(config, self.log)
        self.estimates = SiteEstimates(config)
        self.device = resolve_device(config.file.device)
        if config.file.threads is not None:
            torch.set_num_threads(config.file.threads)
        keep_freed_memory()
        self._stamp = self._stamp_now()
        self.holding = self.rules.shown(read_holding(config))
        for warning in self.holding.data.warnings if in_service else ():
            print(f"warning: {printable(warning)}", flush=True)
        self._announced: TrainingBounds | None = None
        self._runner: tuple[str, SiteRunner, dict[str, str]] | None = None
        self._measurer: tuple[str, Network, SiteData] | None = None

    def handle(self, message: Message, coordinator: str) -> Message:
        """Answer a request. An error is an answer, too.

        Args:
            message: the request.
            coordinator: who sent it, for the audit log.
        """
        header: dict[str, Any] = {}
        entry: dict[str, Any] = {"coordinator": coordinator}
        try:
            header, content, _ = unseal(message)
            entry |= audit_entry(header, message)
            if header.get("protocol") != PROTOCOL:
                raise UserError(
                    f"site '{self.name}' speaks version {PROTOCOL} of the requests, the coordinator "
                    f"{header.get('protocol')}: install the same fedshift at both"
                )
            body = hashlib.sha256(message.body).hexdigest()
            if header.get("key") != request_key(header, body):
                raise FedshiftError("a request's key does not fit its content")
            work = {"hello": self._hello, "measure": self._measure, "end": self._end, "sealing_key": self.seals.key}
            work |= {"predict": self._predict, "reading": self.estimates.reading, "estimate": self._estimate}
            work |= {"call": partial(self._call, body), **self.sums.requests}
            do = header.get("do")
            if not isinstance(do, str) or do not in work:
                raise UserError(f"site '{self.name}' does not know the request '{do}'")
            with self.terms.asked_by(coordinator, str(header.get("run"))):
                answer = work[do](header, content, entry)
            entry |= {"sent_bytes": answer.size, "sent_digest": answer.digest}
            self.log.append(**entry)
            return answer
        except Exception as error:
            text = tell_people(error) if self._in_service or not isinstance(error, FedshiftError) else str(error)
            entry.pop("sent", None)
            try:
                self.log.append(**{**entry, "refused" if isinstance(error, Refused) else "failed": text[:500]})
            except UserError as unlogged:
                print(unlogged, flush=True)
                return error_answer(
                    message, UserError(f"site '{self.name}' cannot write its audit log: nothing was sent")
                )
            return error_answer(message, error)

    # Before a run -----------------------------------------------------------------------------------------------------

    def _hello(self, header: Mapping[str, Any], content: Mapping[str, Any], entry: dict[str, Any]) -> Message:
        """Answer with the site's card: versions, shapes, classes, numbers of samples, kinds that may leave."""
        if header["version"] != installed_version():
            raise Refused(
                f"site '{self.name}' has fedshift {installed_version()}, the coordinator {header['version']}: "
                "install the same version at both"
            )
        if header.get("aggregation") == "secure":
            entry["certificate"] = self.sums.identity.fingerprint
        self._check_unchanged()
        rows = {
            str(seed): [len(part) for part in self._rows({**header["split"], "seed": seed})] for seed in header["seeds"]
        }
        self._check_all(
            lambda: self.rules.check_hello(header.get("private"), self.holding),
            *(partial(self._check_method, wanted, header) for wanted in header["methods"]),
            partial(self._check_counts, rows),
            lambda: check_classes(self.name, self.holding, self.policy),
            self._check_statistics,
            partial(self._check_asked, header),
            partial(self._check_sums, header),
        )
        self.rules.pay_statistics(self.holding, entry)
        card = card_of(self.holding, rows, self.policy, self.device) | self.rules.told(rows)
        given = {} if self.holding.given is None else {"encoding": {"kind": "statistics"}}
        entry["sent"] = {"card": {"kind": "numbers"}, **given}
        return seal({"answers": header["key"], "card": card, "time": time.time()}, body_of({}))

    @staticmethod
    def _check_all(*checks: Callable[[], object]) -> None:
        """Make all checks, so that one answer names all that the site refuses.

        Raises:
            Refused: of one check as it says; of several in one line.
        """
        refusals: list[Refused] = []
        for check in checks:
            try:
                check()
            except Refused as error:
                refusals.append(error)
        if len(refusals) == 1:
            raise refusals[0]
        if refusals:
            public = "; ".join(dict.fromkeys(one.public for one in refusals))
            raise Refused("; ".join(dict.fromkeys(map(str, refusals))), public=public)

    def _check_method(self, wanted: Mapping[str, Any], header: Mapping[str, Any]) -> None:
        shares = shared_kinds(self._method(wanted), header, header["on_refusal"])
        only_gets = self.holding.domain.unlabelled and header.get("unseen") is True
        self.policy.check_method(self.name, wanted["name"], () if only_gets else shares)

    def _check_counts(self, rows: Mapping[str, Sequence[int]]) -> None:
        """Raise Refused unless the numbers of training and held-out samples, by seed, may leave."""
        self.policy.check_kind(self.name, "numbers", "how many samples it has")
        check = partial(self.policy.check_group, self.name)
        check("numbers", len(self.holding.domain), "the count of its samples", "leave this site out (protocol.drop)")
        fixed = "let data.split put more rows there" if self.holding.domain.fixed_split else None
        if self.holding.domain.unlabelled and len(self.holding.domain.known):
            fixed = "have more samples labelled, or write site_labels: none"
        for train, held_out in rows.values():
            check("numbers", train, "the count of its training samples", fixed or "lower protocol.test_fraction")
            if held_out:
                remedy = fixed or "raise protocol.test_fraction, or write 0"
                check(ACCURACY, held_out, "the count of its held-out samples", remedy)

    def _check_statistics(self) -> None:
        """Raise Refused unless the statistics for a common encoding may leave, where the data have some."""
        if self.holding.given is None:
            return
        self.policy.check_kind(self.name, "statistics", "the encoding of its data")
        check_few(self.name, self.holding, self.policy)
        # A column may have values for only a few of the samples.
        counts = self.holding.given["count"]
        for filled in [len(self.holding.domain.described), *(counts if isinstance(counts, list) else [counts])]:
            self.policy.check_group(self.name, "statistics", filled, "the encoding of its data")

    def _check_sums(self, header: Mapping[str, Any]) -> None:
        """Raise Refused if a site of this site's sums takes no part in the experiment."""
        together = header.get("sums", ())
        if self.name in together and not (header.get("private") and self.rules.budget is not None):
            self.sums.rosters.check_present(together)

    def _check_asked(self, header: Mapping[str, Any]) -> None:
        """Raise Refused unless the site has agreed to what an experiment will ask for, as far as its hello says."""
        network, permit = header.get("network"), partial(self.policy.permit_network, self.name)
        network = None if network is None else networks.parse(network, permit=permit)
        training = Training.model_validate(header["training"]) if "training" in header else None
        kinds = self._permitted(header["methods"]) if training is not None else []
        bounds = None if training is None else asked_bounds(training, kinds)
        self._announced = bounds if any(kind.training is not None for kind in kinds) else None
        splits = split_terms(header["split"], header["seeds"])
        self.terms.check(agree=False, network=network, splits=splits, training=bounds)
        if network is not None and header.get("texts"):
            check_files(self.name, network)
            check_text_towers(self.name, network, header["texts"])

    def _permitted(self, asked: Sequence[Mapping[str, Any]]) -> list[Method]:
        """Those of the methods that may run; of the others `_check_method` speaks."""
        found: list[Method] = []
        for wanted in asked:
            with contextlib.suppress(Refused):
                found.append(self._method(wanted))
        return found

    def _rows(self, split: Mapping[str, Any]) -> tuple[Rows, Rows]:
        """The rows that train and those that measure; of a site of few labels those without and those with a label."""
        if self.holding.domain.unlabelled:
            known = self.holding.domain.known
            return np.setdiff1d(np.arange(len(self.holding.domain), dtype=np.int64), known), known
        return self.rules.rows(self.holding.domain, split)

    def _method(self, recipe: Mapping[str, Any]) -> Method:
        """The method that a request names.

        Raises:
            Refused: it is not installed here, or may not run.
            UserError: its options are wrong.
        """
        name = recipe["name"]
        self._permit(name)
        kind = methods.method_class(name)
        if kind.traits.pooled:
            raise Refused(f"site '{self.name}' refuses '{name}', which needs the samples themselves")
        try:
            return kind.model_validate(recipe["options"], context={"permit": self._permit})
        except ValidationError as error:
            raise UserError(f"method '{name}': {describe(error, 'methods', kind)}") from None

    def _permit(self, name: Any) -> None:
        """Raise Refused unless a method of this name is installed here and may run, alone or inside a wrapper."""
        allowed = self.policy.methods if self.policy.methods != "all" else ()
        installed = isinstance(name, str) and (name in methods.METHODS or (name in allowed and ".py:" not in name))
        if not installed:
            raise Refused(
                f"site '{self.name}' has no method '{name}' (only methods of the installed fedshift run, and those "
                "that rule policy.methods names as package.module:Class)"
            )
        self.policy.check_method(self.name, name, ())

    def _stamp_now(self) -> str:
        return file_stamp(self.config.file.data, self.config.path.parent)

    def _check_unchanged(self, fingerprint: str | None = None) -> None:
        """Raise UserError if the data are not those that the run began with."""
        stamp = self._stamp_now()
        if stamp != self._stamp and self.rules.shown(read_holding(self.config)).fingerprint == self.holding.fingerprint:
            self._stamp = stamp  # the files were rewritten with the same content
        if stamp != self._stamp or (fingerprint is not None and fingerprint != self.holding.fingerprint):
            raise UserError(
                f"site '{self.name}': the data changed during the run; put the files back and continue with "
                "fedshift deploy resume, or begin a new experiment"
            )

    # Calls ------------------------------------------------------------------------------------------------------------

    def _call(self, body: str, header: Mapping[str, Any], content: Mapping[str, Any], entry: dict[str, Any]) -> Message:
        """Run one call, or repeat the answer to the same request."""
        envelope = envelope_of(header["envelope"])
        run = run_name(header["run"])
        folder = self.config.memory / run
        method = self._method(header["setting"]["method"])
        shares = shared_kinds(method, header, header["setting"]["on_refusal"])
        self.policy.check_method(self.name, header["setting"]["method"]["name"], shares)
        self.log.check_rate(self.name, self.policy, run, envelope.round)
        # Check what the reply's type promises before the call runs, and the reply itself before it leaves.
        promised = promised_kinds(reply_type(method, header["call"]))
        promised = promised_masked(promised) if "sum" in header else promised
        if (sealing := self.seals.begun(header, method, entry)) is not None:
            promised = sealing.promised(promised)
        for field, kind in promised.items():
            self.policy.check_kind(self.name, kind, f"field '{field}' of call {header['call']}")
        self._check_unchanged(header["part"]["fingerprint"])
        self._check_terms(header, method, agree=False)
        runner = self._runner_for(header, method)
        drop_covered(folder, header)
        # Of noise that the coordinator alone decides on, a site without a budget cannot say that it is enough.
        noise = runner.site.training.privacy is not None and self.rules.budget is not None
        summing = self.sums.begun(header, body, method, noise=noise)
        before = kept_answer(folder, header)
        if before is not None and summing is not None:
            before = summing.again(before[0])
        if before is not None:
            answer, held = before
            entry |= {"again": True, "sent": described(held)}
            # The policy may have changed.
            self.policy.check_sent(self.name, entry["sent"], header["call"], runner.site.samples)
            return answer
        memory = runner.site.memory
        self._remember(runner, folder, header["memory"])
        self._runner = None  # a call that fails may leave its memory half written
        content = self.seals.opened(header, runner, method, content, entry)
        with self.rules.paid(header, method, runner.site, entry), ExposureWatch(runner.site) as watch:
            reply, mini_batches = runner.run(header["call"], envelope, content)
        sent = reply_content(reply) if summing is None else summing.contribution(reply, header["call"], runner, content)
        sent = sent if sealing is None else sealing.sealed(reply, header, runner, content)
        entry["sent"] = described(sent)
        looked = runner.site.samples if self.rules.budget else watch.samples()
        self.policy.check_sent(self.name, entry["sent"], header["call"], looked)
        singles = (
            "features" in self.policy.send and "features" in method.calls.shares
        )  # they show single samples anyway
        if not (singles or self.rules.budget):  # with a budget, noise covers samples, and a refusal would tell of them
            entry["exposure"] = round(watch.score(), 3)
            self.policy.check_exposure(self.name, header["call"], entry["exposure"], watch.samples())
        self._check_terms(header, method, agree=True)
        told = {"answers": header["key"], "mini_batches": mini_batches}
        if summing is not None:
            sent, told["layout"] = summing.masked(entry), summing.layout
        written = narrowed(memory, header, sent)
        told["memory"] = memory.save(folder, envelope.exchange)
        self._runner = (digest_of(header), runner, dict(told["memory"]))
        answer = seal(told, written)
        keep_answer(folder, header, answer if summing is None else without_body(answer))  # its upload is kept already
        return answer

    def _check_terms(self, header: Mapping[str, Any], method: Method, *, agree: bool) -> None:
        """Raise Refused unless the site has agreed to the request's network and split; ``agree`` to the first."""
        setting = self._setting(header["setting"], method)
        if setting.classes != len(self.holding.data.classes):
            raise Refused(f"site '{self.name}' refuses a network of {setting.classes} classes; its data have others")
        split, training = header["part"]["split"], None
        if "envelope" in header:  # the request trains
            envelope = envelope_of(header["envelope"])
            training = asked_bounds(
                setting.training, [method], round_number=envelope.round, mini_batches=envelope.mini_batches_left
            )
        splits = split_terms(split, [split["seed"]])
        self.terms.check(
            agree=agree, network=setting.network, splits=splits, training=training, announced=self._announced
        )

    def _runner_for(self, header: Mapping[str, Any], method: Method) -> SiteRunner:
        if self.holding.domain.unlabelled and header["part"]["role"] != "target":
            raise Refused(
                f"site '{self.name}' lacks labels (its data.site_labels) and trains as a target only, not as a "
                f"{header['part']['role']}"
            )
        digest = digest_of(header)
        if self._runner is not None and self._runner[0] == digest:
            return self._runner[1]
        part, recipe = header["part"], header["setting"]
        train, _ = self._rows(part["split"])
        setting = self._setting(recipe, method)
        domain = features_here(self.holding, setting, self.device)
        plan = SitePlan(self.name, part["role"], [(domain, train, int(part["number"]))])
        runner = SiteRunner(plan, setting, memory=(RESIDUALS,))
        self._runner = (digest, runner, {})
        return runner

    def _setting(self, recipe: Mapping[str, Any], method: Method) -> Setting:
        """The setting of a request, on this site's device."""
        whole = {**recipe, "method": method.calls.recipe(), "device": self.device}
        setting = setting_from(whole, partial(self.policy.permit_network, self.name))
        check_files(self.name, method)
        check_files(self.name, setting.network)
        return setting

    def _remember(self, runner: SiteRunner, folder: Path, files: Mapping[str, str]) -> None:
        """Load the memory that the coordinator's request names, unless it is loaded already."""
        assert self._runner is not None
        if self._runner[2] != dict(files):
            for file in files.values():
                plain_name(file)
            runner.site.memory.load(folder, files)

    # Measuring and the end --------------------------------------------------------------------------------------------

    def _measure(self, header: Mapping[str, Any], content: Mapping[str, Any], entry: dict[str, Any]) -> Message:
        """Answer with this site's accuracy under the given weights, on samples that no call trains on."""
        if self.holding.domain.unlabelled and not len(self.holding.domain.known):
            raise Refused(f"site '{self.name}' has no labels (its data.site_labels) and measures no model")
        self.policy.check_kind(self.name, ACCURACY, "measuring a model")
        self.rules.check_measures()
        run, number = run_name(header["run"]), whole_number(header["round"])
        self.log.check_rate(self.name, self.policy, run, number, measures=True)
        method = self._method(header["setting"]["method"])
        self._check_unchanged(header["part"]["fingerprint"])
        self._check_terms(header, method, agree=True)
        _, held_out = self._rows(header["part"]["split"])
        unseen = header["part"]["role"] == "unseen"
        every = not (self.holding.domain.fixed_split or self.holding.domain.unlabelled)
        if unseen and header["part"]["whole"] and every:
            held_out = np.arange(len(self.holding.domain), dtype=np.int64)
        self.policy.check_group(self.name, ACCURACY, len(held_out), "measuring a model")
        network, view = self._network_of(header, method, content, entry, held_out)
        new_site, groups = method.at_sites(view.input_shape).new_site if unseen else None, self.holding.domain.groups
        groups, objective = None if groups is None else groups[held_out], objective_of(view.preprocessing)
        measures = self.rules.measured(header, network, view, objective, groups, new_site, entry)
        if (header.get("whole") or {}).get("sums") is True and objective.task == "classification":
            scores = scored(answering(network, view, new_site), view, objective, groups)
            measures["sums"] = self.estimates.sums(
                run, scores, int(header["setting"]["classes"]), threshold_in(header["whole"]), entry
            )
        return seal({"answers": header["key"], "measures": measures}, body_of({}))

    def _network_of(
        self,
        header: Mapping[str, Any],
        method: Method,
        content: Mapping[str, Content],
        entry: dict[str, Any],
        rows: Rows,
    ) -> tuple[Network, SiteData]:
        """The model in a request, in evaluation mode, and the samples that it is asked about."""
        digest, setting = f"{digest_of(header)} {header['do']}", self._setting(header["setting"], method)
        weights = self.seals.opened_model(header, setting, content, entry)
        if header["do"] == "measure" and header["part"].get("own") is True:
            runner = self._runner_for(header, method)
            self._remember(runner, self.config.memory / run_name(header["run"]), header["memory"])
            weights = method.own_weights(weights, runner.site.memory)
        if self._measurer is None or self._measurer[0] != digest:
            network = method.evaluated_network(setting.build_network(), setting.sources).to(self.device)
            self.rules.check_measured(method, network, setting.input_shape)
            self._measurer = (digest, network, self._view(setting, rows))
        _, network, view = self._measurer
        network.eval().load_state_dict(dict(weights))
        return network, view

    def _view(self, setting: Setting, rows: Rows) -> SiteData:
        domain = features_here(self.holding, setting, self.device)
        return SiteData([(domain, rows, 0)], setting.preprocessing, None, self.device)

    # At a site without labels -----------------------------------------------------------------------------------------

    def _check_unlabelled(self) -> None:
        """Raise Refused where the site has labels."""
        if not self.holding.domain.unlabelled:
            raise Refused(f"site '{self.name}' has labels: it measures models, and keeps no predictions of them")

    def _predict(self, header: Mapping[str, Any], content: Mapping[str, Any], entry: dict[str, Any]) -> Message:
        """Keep the model of a run and its predictions here; nothing of them leaves."""
        self._check_unlabelled()
        run, number = run_name(header["run"]), whole_number(header["round"])
        self.log.check_rate(self.name, self.policy, run, number)
        method = self._method(header["setting"]["method"])
        self._check_unchanged(header["part"]["fingerprint"])
        self._check_terms(header, method, agree=True)
        rest, known = self._rows(header["part"]["split"])
        network, view = self._network_of(header, method, content, entry, rest)
        parts = [(UNLABELLED, rest, view)]
        if len(known):
            parts.append(("target", known, self._view(self._setting(header["setting"], method), known)))
        new_site = method.at_sites(view.input_shape).new_site if header["part"]["role"] == "unseen" else None
        told = [self._answers(network, new_site, *part) for part in parts]
        weights = Weights({name: tensor.cpu() for name, tensor in network.state_dict().items()})
        self.estimates.receive(run, merged(network, weights), told, self.holding, header.get("metadata"))
        entry["sent"] = {}
        return seal({"answers": header["key"]}, body_of({}))

    def _answers(
        self, network: Network, new_site: NewSite | None, part: str, rows: Rows, view: SiteData
    ) -> SitePredictions:
        """What a model says of some rows here."""
        domain = self.holding.domain
        groups = None if domain.groups is None else domain.groups[rows]
        ids = None if domain.ids is None else [domain.ids[row] for row in rows]
        scores = scored(answering(network, view, new_site), view, objective_of(view.preprocessing), groups)
        return SitePredictions(self.name, part, rows, ids, scores)

    def _estimate(self, header: Mapping[str, Any], content: Mapping[str, Any], entry: dict[str, Any]) -> Message:
        """Estimate the accuracy of a run's model here, and keep that here."""
        self._check_unlabelled()
        entry["sent"] = {}
        return self.estimates.estimate(header, self.holding)

    def _end(self, header: Mapping[str, Any], content: Mapping[str, Any], entry: dict[str, Any]) -> Message:
        """End a run: remove the memory of it, but for the key of a sealed model."""
        self.seals.end(header["run"])
        shutil.rmtree(self.config.memory / run_name(header["run"]), ignore_errors=True)
        if header.get("estimates_follow") is not True:
            self.estimates.forget(run_name(header["run"]))
        self._runner = self._measurer = None
        return seal({"answers": header["key"]}, body_of({}))
