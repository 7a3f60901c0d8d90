"""A site of a deployed federation: it answers the coordinator's requests.

A site runs only calls of methods that are installed here. Before a call it checks version, method and policy; after it,
everything that would leave. It writes each exchange to its audit log, and keeps its memory on its own disk. It also
keeps its answers since the last checkpoint: when a job died and a request comes again, the site repeats its answer
without training again.
"""

from __future__ import annotations

import contextlib
import shutil
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import ValidationError

from fedshift.data.domain import Domain, Preprocessing, Rows
from fedshift.data.site_data import SiteData
from fedshift.data.site_scale import scale_domain
from fedshift.data.tasks.objective import objective_of
from fedshift.deploy.agreed_terms import AgreedTerms, asked_bounds, split_terms
from fedshift.deploy.features_at_sites import check_text_towers, features_here
from fedshift.deploy.kept_scores import KeptScores
from fedshift.deploy.privacy.exposure import ExposureWatch
from fedshift.deploy.privacy.site_rules import SiteRules
from fedshift.deploy.privacy.table_view import check_classes, check_few
from fedshift.deploy.remote.policy import ACCURACY, AuditLog, TrainingBounds, sent_kinds
from fedshift.deploy.remote.requests import (
    Asked,
    CallAnswer,
    CallRequest,
    EndRequest,
    EstimateRequest,
    Hello,
    MeasureAnswer,
    MeasureRequest,
    PredictRequest,
    RunRequest,
    SeedSplit,
    SitePart,
    asked_in,
)
from fedshift.deploy.remote.transport import Done, answer_of
from fedshift.deploy.remote.wire import Message, body_of, error_answer, seal, unseal
from fedshift.deploy.secure.site_seals import Sealing, SiteSeals
from fedshift.deploy.secure.site_sums import SiteEstimateSums, SiteSums, Summing, promised_masked, without_body
from fedshift.deploy.site_cards import card_of
from fedshift.deploy.site_estimates import SiteEstimates, threshold_of
from fedshift.deploy.site_file import SiteConfig, file_stamp, load_site, read_holding
from fedshift.deploy.site_inputs import SiteInputs
from fedshift.deploy.site_requests import (
    RESIDUALS,
    audit_entry,
    check_files,
    drop_covered,
    keep_answer,
    kept_answer,
    narrow_reply,
    shared_kinds,
)
from fedshift.errors import FedshiftError, Refused, UserError
from fedshift.evaluation.predictions import UNLABELLED, SitePredictions
from fedshift.experiment.config.error_messages import describe
from fedshift.experiment.runs.evaluator import answering, score
from fedshift.federation.local.allocator import keep_freed_memory
from fedshift.federation.local.cards import resolve_device
from fedshift.federation.messages import promised_kinds, reply_content
from fedshift.federation.plain_values import fault_of
from fedshift.federation.replies import reply_type
from fedshift.federation.setting_json import MethodRecipe, SettingRecipe, setting_from
from fedshift.federation.site_runner import Setting, SitePlan, SiteRunner
from fedshift.federation.training import Training
from fedshift.methods import registry as methods
from fedshift.methods.base import Method
from fedshift.methods.composition.new_site import NewSite
from fedshift.models import registry as networks
from fedshift.models.adapters import merge_adapters
from fedshift.models.network import Network
from fedshift.text import printable
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


@dataclass
class Call:
    """A request for a call, and what the checks before it find out."""

    asked: Asked[CallRequest]
    method: Method
    folder: Path
    samples: int = 0  # of the site, once its runner is known
    sealing: Sealing | None = None  # the request to seal the reply, if it is one

    @property
    def request(self) -> CallRequest:
        """What is asked."""
        return self.asked.request


class SiteProgram:
    """Answers a coordinator's requests at one site, for as long as a job lives. ``in_service``: whether what is printed
    goes to the log of the site's service, where its people read refusals."""

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
        self.estimates, self.inputs = SiteEstimates(config), SiteInputs(config)
        self.device = resolve_device(config.file.device)
        if config.file.threads is not None:
            torch.set_num_threads(config.file.threads)
        keep_freed_memory()
        self._stamp = self._stamp_now()
        self.holding = self.rules.public_view(read_holding(config))
        for warning in self.holding.data.warnings if in_service else ():
            print(f"warning: {printable(warning)}", flush=True)
        self._announced: TrainingBounds | None = None
        self._works: dict[str, Callable[[Asked[Any]], Message]] = {
            "hello": self._hello,
            "key": self.sums.key,
            "sealing_key": self.seals.key,
            "call": self._call,
            "confirm": self.sums.confirm,
            "unmask": self.sums.unmask,
            "measure": self._measure,
            "predict": self._predict,
            "inputs": lambda asked: self.inputs.give(asked, self.holding),
            "reading": self.estimates.reading,
            "mask": SiteEstimateSums(self.sums, self.estimates, self.inputs, lambda: self.holding).mask,
            "estimate": self._estimate,
            "end": self._end,
        }
        self._runner: tuple[str, SiteRunner, dict[str, str]] | None = None
        self._measurer: tuple[tuple[str, str], Network, SiteData] | None = None

    def handle(self, message: Message, coordinator: str) -> Message:
        """Answer a request. An error is an answer, too."""
        entry: dict[str, Any] = {"coordinator": coordinator}
        try:
            header, content, _ = unseal(message)
            entry |= audit_entry(header, message)
            asked = asked_in(self.name, message, header, content, entry)
            with self.terms.asked_by(coordinator, asked.request.run):
                answer = self._works[asked.request.do](asked)
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

    def _hello(self, asked: Asked[Hello]) -> Message:
        """Answer with the site's card: versions, shapes, classes, numbers of samples, kinds that may leave."""
        hello, entry = asked.request, asked.entry
        if hello.aggregation == "secure":
            entry["certificate"] = self.sums.identity.fingerprint
        self._check_unchanged()
        splits = [SeedSplit(**dict(hello.split), seed=seed) for seed in hello.seeds]
        rows = {str(split.seed): [len(part) for part in self._rows(split)] for split in splits}
        self._check_all(
            lambda: self.rules.check_hello(hello.private, self.holding),
            *(partial(self._check_method, wanted, hello) for wanted in hello.methods),
            partial(self._check_counts, rows),
            lambda: check_classes(self.name, self.holding, self.policy),
            self._check_statistics,
            partial(self._check_asked, hello),
            partial(self._check_sums, hello),
        )
        self.rules.pay_statistics(self.holding, entry)
        card = card_of(self.holding, rows, self.policy, self.device) | self.rules.card_additions(rows)
        given = {} if self.holding.given is None else {"encoding": {"kind": "statistics"}}
        entry["sent"] = {"card": {"kind": "numbers"}, **given}
        return seal({"answers": asked.key, "card": card, "time": time.time()}, body_of({}))

    @staticmethod
    def _check_all(*checks: Callable[[], object]) -> None:
        """Make all checks, so that one answer names all that the site refuses."""
        refusals: list[Refused] = []
        for check in checks:
            try:
                check()
            except Refused as error:
                refusals.append(error)
        if len(refusals) == 1:
            raise refusals[0]
        if refusals:
            public = "; ".join(dict.fromkeys(refusal.public for refusal in refusals))
            raise Refused("; ".join(dict.fromkeys(map(str, refusals))), public=public)

    def _check_method(self, wanted: MethodRecipe, hello: Hello) -> None:
        shares = shared_kinds(self._method(wanted), hello, hello.on_refusal)
        only_gets = self.holding.domain.unlabelled and hello.unseen
        self.policy.check_method(self.name, wanted.name, () if only_gets else shares)

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

    def _check_sums(self, hello: Hello) -> None:
        """Raise Refused if a site of this site's sums takes no part in the experiment."""
        if self.name in hello.sums and not (hello.private and self.rules.budget is not None):
            self.sums.rosters.check_present(hello.sums)

    def _check_asked(self, hello: Hello) -> None:
        """Raise Refused unless the site has agreed to what an experiment will ask for, as far as its hello says."""
        permit = partial(self.policy.permit_network, self.name)
        network = None if hello.network is None else networks.parse(hello.network, permit=permit)
        training = None if hello.training is None else self._training(hello.training)
        kinds = self._permitted_methods(hello.methods) if training is not None else []
        bounds = None if training is None else asked_bounds(training, kinds)
        self._announced = bounds if any(kind.training is not None for kind in kinds) else None
        splits = split_terms(hello.split, hello.seeds)
        self.terms.check(agree=False, network=network, splits=splits, training=bounds)
        if network is not None and hello.texts:
            check_files(self.name, network)
            check_text_towers(self.name, network, hello.texts)

    def _training(self, options: Mapping[str, Any]) -> Training:
        try:
            return Training.model_validate(options)
        except ValidationError as error:
            raise UserError(f"site '{self.name}': training: {fault_of(error)}") from None

    def _permitted_methods(self, asked: Sequence[MethodRecipe]) -> list[Method]:
        """Those of the methods that may run; of the others `_check_method` speaks."""
        result: list[Method] = []
        for wanted in asked:
            with contextlib.suppress(Refused):
                result.append(self._method(wanted))
        return result

    def _rows(self, split: SeedSplit) -> tuple[Rows, Rows]:
        """The rows that train and those that measure; of a site of few labels those without and those with a label."""
        if self.holding.domain.unlabelled:
            known = self.holding.domain.known
            return np.setdiff1d(np.arange(len(self.holding.domain), dtype=np.int64), known), known
        return self.rules.rows(self.holding.domain, split)

    def _method(self, recipe: MethodRecipe) -> Method:
        """The method that a request names."""
        name = recipe.name
        self._permit(name)
        kind = methods.method_class(name)
        if kind.traits.pooled:
            raise Refused(f"site '{self.name}' refuses '{name}', which needs the samples themselves")
        try:
            return kind.model_validate(recipe.options, context={"permit": self._permit})
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
        if (
            stamp != self._stamp
            and self.rules.public_view(read_holding(self.config)).fingerprint == self.holding.fingerprint
        ):
            self._stamp = stamp  # the files were rewritten with the same content
        if stamp != self._stamp or (fingerprint is not None and fingerprint != self.holding.fingerprint):
            raise UserError(
                f"site '{self.name}': the data changed during the run; put the files back and continue with "
                "fedshift deploy resume, or begin a new experiment"
            )

    # Calls ------------------------------------------------------------------------------------------------------------

    def _call(self, asked: Asked[CallRequest]) -> Message:
        """Run one call, or repeat the answer to the same request."""
        request, entry = asked.request, asked.entry
        call = Call(asked, self._method(request.setting.method), self.config.memory / request.run)
        for check in BEFORE_A_CALL:
            check(self, call)
        runner = self._runner_for(request, call.method)
        call.samples = runner.site.samples
        drop_covered(call.folder, request)
        # Of noise that the coordinator alone decides on, a site without a budget cannot say that it is enough.
        noise = runner.site.training.privacy is not None and self.rules.budget is not None
        summing = self.sums.begin_sum(asked, call.method, noise=noise)
        if (answer := self._again(call, runner, summing)) is not None:
            return answer
        self._remember(runner, call.folder, request.memory)
        self._runner = None  # a call that fails may leave its memory half written
        content = self.seals.open_content(asked, runner, call.method)
        with self.rules.train_and_pay(asked, call.method, runner.site), ExposureWatch(runner.site) as watch:
            reply, mini_batches = runner.run(request.call, request.envelope.envelope, content)
        sent = reply_content(reply) if summing is None else summing.contribution(reply, request.call, runner, content)
        sent = sent if call.sealing is None else call.sealing.seal_reply(reply, request, runner, content)
        entry["sent"] = sent_kinds(sent)
        for look in BEFORE_A_REPLY_LEAVES:
            look(self, call, watch)
        if summing is not None:
            sent = summing.mask(entry)
        memory = runner.site.memory
        written = narrow_reply(memory, request, sent)
        files = memory.save(call.folder, request.envelope.exchange)
        self._runner = (request.digest, runner, dict(files))
        header = CallAnswer(mini_batches=mini_batches, memory=files)
        header = header if summing is None else header.model_copy(update={"layout": summing.layout})
        answer = answer_of(asked.key, header, written)
        kept = answer if summing is None else without_body(answer)  # its upload is kept already
        keep_answer(call.folder, request.envelope.exchange, asked.key, kept)
        return answer

    def _again(self, call: Call, runner: SiteRunner, summing: Summing | None) -> Message | None:
        """The answer that was given to the same request before; None if there was none."""
        before = kept_answer(call.folder, call.request.envelope.exchange, call.asked.key)
        if before is not None and summing is not None:
            before = summing.again(before[0])
        if before is None:
            return None
        answer, held = before
        call.asked.entry.update({"again": True, "sent": sent_kinds(held)})
        # The policy may have changed.
        self.policy.check_sent(self.name, sent_kinds(held), call.request.call, runner.site.samples)
        return answer

    def check_shares(self, call: Call) -> None:
        """Raise Refused unless the method may run, and what it declares to share may leave."""
        setting = call.request.setting
        shares = shared_kinds(call.method, call.request, setting.on_refusal)
        self.policy.check_method(self.name, setting.method.name, shares)

    def check_rate(self, call: Call) -> None:
        """Raise Refused if the site answered too much today, or in this round."""
        self.log.check_rate(self.name, self.policy, call.request.run, call.request.envelope.round)

    def check_promised(self, call: Call) -> None:
        """Raise Refused unless what the reply's type promises may leave, as it leaves: masked, sealed or in clear."""
        promised = promised_kinds(reply_type(call.method, call.request.call))
        promised = promised_masked(promised) if call.request.sum is not None else promised
        call.sealing = self.seals.begin_sealing(call.request, call.method, call.asked.entry)
        if call.sealing is not None:
            promised = call.sealing.sealed_kinds(promised)
        for field, kind in promised.items():
            self.policy.check_kind(self.name, kind, f"field '{field}' of call {call.request.call}")

    def check_data(self, call: Call) -> None:
        """Raise UserError if the data are not those that the run began with."""
        self._check_unchanged(call.request.part.fingerprint)

    def check_terms(self, call: Call) -> None:
        """Raise Refused unless the site has agreed to the network, the split and the training, or to none yet."""
        self._check_terms(call.request, call.method, agree=False)

    def check_sent(self, call: Call, watch: ExposureWatch) -> None:
        """Raise Refused unless the reply, made of so many samples, may leave."""
        looked = call.samples if self.rules.budget else watch.samples()
        self.policy.check_sent(self.name, call.asked.entry["sent"], call.request.call, looked)

    def check_exposure(self, call: Call, watch: ExposureWatch) -> None:
        """Raise Refused if the update shows single samples."""
        singles = (
            "features" in self.policy.send and "features" in call.method.calls.shares
        )  # they show single samples anyway
        if not (singles or self.rules.budget):  # with a budget, noise covers samples, and a refusal would tell of them
            call.asked.entry["exposure"] = round(watch.score(), 3)
            self.policy.check_exposure(self.name, call.request.call, call.asked.entry["exposure"], watch.samples())

    def agree_to_terms(self, call: Call, watch: ExposureWatch) -> None:
        """Agree to network, split and training if they are the first; raise Refused if others are by now."""
        self._check_terms(call.request, call.method, agree=True)

    def _check_terms(self, request: RunRequest, method: Method, *, agree: bool) -> None:
        """Raise Refused unless the site has agreed to the request's network and split; ``agree`` to the first."""
        setting = self._setting(request.setting, method)
        if setting.classes != len(self.holding.data.classes):
            raise Refused(f"site '{self.name}' refuses a network of {setting.classes} classes; its data have others")
        split, training = request.part.split, None
        if isinstance(request, CallRequest):  # it trains
            work = request.envelope
            training = asked_bounds(
                setting.training, [method], round_number=work.round, mini_batches=work.mini_batches_left
            )
        splits = split_terms(split, [split.seed])
        self.terms.check(
            agree=agree, network=setting.network, splits=splits, training=training, announced=self._announced
        )

    def _runner_for(self, request: RunRequest, method: Method) -> SiteRunner:
        part = request.part
        if self.holding.domain.unlabelled and part.role != "target":
            raise Refused(
                f"site '{self.name}' lacks labels (its data.site_labels) and trains as a target only, not as a "
                f"{part.role}"
            )
        if part.role == "unseen":
            raise Refused(f"site '{self.name}' has no part in the training of this run")
        if self._runner is not None and self._runner[0] == request.digest:
            return self._runner[1]
        train, _ = self._rows(part.split)
        setting = self._setting(request.setting, method)
        domain = self._domain(setting, part)
        plan = SitePlan(self.name, part.role, [(domain, train, part.number)])
        runner = SiteRunner(plan, setting, memory=(RESIDUALS,))
        self._runner = (request.digest, runner, {})
        return runner

    def _setting(self, recipe: SettingRecipe, method: Method) -> Setting:
        """The setting of a request, on this site's device."""
        changes = {"method": MethodRecipe.model_validate(method.calls.recipe()), "device": self.device}
        try:
            setting = setting_from(recipe.model_copy(update=changes), partial(self.policy.permit_network, self.name))
        except ValidationError as error:
            raise UserError(f"site '{self.name}': a request's setting cannot be read: {fault_of(error)}") from None
        check_files(self.name, method)
        check_files(self.name, setting.network)
        return setting

    def _remember(self, runner: SiteRunner, folder: Path, files: Mapping[str, str]) -> None:
        """Load the memory that the coordinator's request names, unless it is loaded already."""
        assert self._runner is not None
        if self._runner[2] != files:
            runner.site.memory.load(folder, files)

    # Measuring and the end --------------------------------------------------------------------------------------------

    def _measure(self, asked: Asked[MeasureRequest]) -> Message:
        """Answer with this site's accuracy under the given weights, on samples that no call trains on."""
        request = asked.request
        for check in BEFORE_A_MEASUREMENT:
            check(self, request)
        method = self._method(request.setting.method)
        self._check_unchanged(request.part.fingerprint)
        self._check_terms(request, method, agree=True)
        _, held_out = self._rows(request.part.split)
        unseen = request.part.role == "unseen"
        every = not (self.holding.domain.fixed_split or self.holding.domain.unlabelled)
        if unseen and request.part.whole and every:
            held_out = np.arange(len(self.holding.domain), dtype=np.int64)
        self.policy.check_group(self.name, ACCURACY, len(held_out), "measuring a model")
        network, view = self._network_of(asked, method, held_out)
        new_site, groups = method.at_sites(view.input_shape).new_site if unseen else None, self.holding.domain.groups
        groups, objective = None if groups is None else groups[held_out], objective_of(view.preprocessing)
        measures = self.rules.measure(asked, network, view, objective, groups, new_site)
        if request.whole is not None and request.whole.sums and objective.task == "classification":
            self.estimates.check_gives(masked=request.whole.kept)
            scores = score(answering(network, view, new_site), view, objective, groups)
            case = KeptScores(scores.scores, scores.labels, threshold_of(request.whole.threshold))
            if request.whole.inputs is not None:
                domain = self._domain(self._setting(request.setting, method), request.part)
                model = partial(self._scores_of, network, new_site, view.preprocessing)
                case = self.inputs.look(case, model, domain, held_out, request.whole.inputs)
            case = self.rules.with_noise(asked, case, groups, view.device)
            classes = request.setting.classes
            sums = self.estimates.sums(request.run, case, classes, asked.entry, masked=request.whole.kept)
            measures = measures.model_copy(update={"sums": sums})
        return answer_of(asked.key, MeasureAnswer(measures=measures))

    def _scores_of(
        self, network: Network, new_site: NewSite | None, preprocessing: Preprocessing, inputs: NDArray[Any]
    ) -> NDArray[Any]:
        """What a network says of samples that are none of the site's, as they would be stored."""
        changed = Domain(self.name, inputs, np.zeros(len(inputs), dtype=np.int64))
        view = SiteData([(changed, np.arange(len(inputs)), 0)], preprocessing, None, self.device)
        return score(answering(network, view, new_site), view, objective_of(preprocessing), None).scores

    def check_labelled(self, request: MeasureRequest) -> None:
        """Raise Refused where the site has no labels."""
        if self.holding.domain.unlabelled and not len(self.holding.domain.known):
            raise Refused(f"site '{self.name}' has no labels (its data.site_labels) and measures no model")

    def check_measures(self, request: MeasureRequest) -> None:
        """Raise Refused unless accuracies may leave, by the policy and by the budget of privacy."""
        self.policy.check_kind(self.name, ACCURACY, "measuring a model")
        self.rules.check_measures()

    def check_measured_rate(self, request: MeasureRequest) -> None:
        """Raise Refused if the site measured too much today, or in this round."""
        self.log.check_rate(self.name, self.policy, request.run, request.round, measures=True)

    def _network_of(
        self, asked: Asked[MeasureRequest] | Asked[PredictRequest], method: Method, rows: Rows
    ) -> tuple[Network, SiteData]:
        """The model in a request, in evaluation mode, and the samples that it is asked about."""
        request = asked.request
        digest, setting = (request.digest, request.do), self._setting(request.setting, method)
        weights = self.seals.opened_model(asked, setting)
        if request.do == "measure" and request.part.personal:
            runner = self._runner_for(request, method)
            self._remember(runner, self.config.memory / request.run, request.memory)
            weights = method.own_weights(weights, runner.site.memory)
        if self._measurer is None or self._measurer[0] != digest:
            network = method.evaluated_network(setting.build_network(), setting.sources).to(self.device)
            self.rules.check_measured(method, network, setting.input_shape)
            self._measurer = (digest, network, self._view(setting, request.part, rows))
        _, network, view = self._measurer
        network.eval().load_state_dict(dict(weights))
        return network, view

    def _view(self, setting: Setting, part: SitePart, rows: Rows) -> SiteData:
        return SiteData([(self._domain(setting, part), rows, 0)], setting.preprocessing, None, self.device)

    def _domain(self, setting: Setting, part: SitePart) -> Domain:
        """The site's samples as a request's network reads them, in the site's own scale where its data say so."""
        domain, standardise = (
            features_here(self.holding, setting, self.device),
            self.holding.data.preprocessing.standardise,
        )
        if setting.preprocessing.standardise != standardise:
            raise Refused(f"site '{self.name}' refuses another data.standardise than its own: all sites write the same")
        if standardise is None:
            return domain
        rows = domain.described if part.role == "unseen" else self._rows(part.split)[0]
        return scale_domain(domain, rows, setting.preprocessing)

    # At a site without labels -----------------------------------------------------------------------------------------

    def _check_unlabelled(self) -> None:
        """Raise Refused where the site has labels."""
        if not self.holding.domain.unlabelled:
            raise Refused(f"site '{self.name}' has labels: it measures models, and keeps no predictions of them")

    def _predict(self, asked: Asked[PredictRequest]) -> Message:
        """Keep the model of a run and its predictions here; nothing of them leaves."""
        self._check_unlabelled()
        request = asked.request
        self.log.check_rate(self.name, self.policy, request.run, request.round)
        method = self._method(request.setting.method)
        self._check_unchanged(request.part.fingerprint)
        self._check_terms(request, method, agree=True)
        rest, known = self._rows(request.part.split)
        network, view = self._network_of(asked, method, rest)
        parts = [(UNLABELLED, rest, view)]
        if len(known):
            parts.append(("target", known, self._view(self._setting(request.setting, method), request.part, known)))
        new_site = method.at_sites(view.input_shape).new_site if request.part.role == "unseen" else None
        answers = [self._answers(network, new_site, *part) for part in parts]
        weights = Weights({name: tensor.cpu() for name, tensor in network.state_dict().items()})
        self.estimates.receive(request.run, merge_adapters(network, weights), answers, self.holding, request.metadata)
        asked.entry["sent"] = {}
        return answer_of(asked.key, Done())

    def _answers(
        self, network: Network, new_site: NewSite | None, part: str, rows: Rows, view: SiteData
    ) -> SitePredictions:
        """What a model says of some rows here."""
        domain = self.holding.domain
        groups = None if domain.groups is None else domain.groups[rows]
        ids = None if domain.ids is None else [domain.ids[row] for row in rows]
        scores = score(answering(network, view, new_site), view, objective_of(view.preprocessing), groups)
        return SitePredictions(self.name, part, rows, ids, scores)

    def _estimate(self, asked: Asked[EstimateRequest]) -> Message:
        """Estimate the accuracy of a run's model here, and keep that here."""
        self._check_unlabelled()
        asked.entry["sent"] = {}
        return self.estimates.estimate(asked, self.holding)

    def _end(self, asked: Asked[EndRequest]) -> Message:
        """End a run: remove the memory of it, but for the key of a sealed model."""
        run = asked.request.run
        self.seals.end(run)
        shutil.rmtree(self.config.memory / run, ignore_errors=True)
        if not asked.request.estimates_follow:
            self.estimates.forget(run)
        self._runner = self._measurer = None
        return answer_of(asked.key, Done())


BEFORE_A_CALL: tuple[Callable[[SiteProgram, Call], None], ...] = (
    SiteProgram.check_shares,
    SiteProgram.check_rate,
    SiteProgram.check_promised,
    SiteProgram.check_data,
    SiteProgram.check_terms,
)
"""What is checked before a call runs, in this order, whether it was answered before or not."""
BEFORE_A_REPLY_LEAVES: tuple[Callable[[SiteProgram, Call, ExposureWatch], None], ...] = (
    SiteProgram.check_sent,
    SiteProgram.check_exposure,
    SiteProgram.agree_to_terms,
)
"""What is checked after a call ran, in this order: the site agrees to a network only if its update may leave."""
BEFORE_A_MEASUREMENT: tuple[Callable[[SiteProgram, MeasureRequest], None], ...] = (
    SiteProgram.check_labelled,
    SiteProgram.check_measures,
    SiteProgram.check_measured_rate,
)
"""What is checked before a model is looked at, in this order."""
