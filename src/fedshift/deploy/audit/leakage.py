"""Audits what an attacker could reconstruct of a site's samples from what the site sends in an experiment.

Two exchanges are attacked: the gradient of one mini-batch, as methods send it that exchange every batch (FADA), and the
change of the model in a local epoch, as methods send it that exchange models (FedAvg, KD3A). The attacker knows the
network, the weights before, the learning rate, momentum and weight decay, the number of samples and the size of a
mini-batch. Both are also attacked in the sum over all labelled sites, which is what the server sees with
``aggregation: secure``. A third attack sends crafted networks, whose answers the site's policy may refuse. An attack
that fails proves nothing about better attacks.
"""

from __future__ import annotations

import io
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fedshift.data.domain import DataSet
from fedshift.data.site_data import SiteData, batches_per_epoch
from fedshift.deploy.audit.attacks import Attacker, Case, Exchange, Search, Watcher, seen_by_attacker, together
from fedshift.deploy.audit.crafted import CraftedCase, crafted_cases
from fedshift.deploy.remote.policy import Policy
from fedshift.errors import UserError, nearest
from fedshift.experiment.config.experiment import Experiment
from fedshift.experiment.environment import threads_set, versions
from fedshift.experiment.features import build_data
from fedshift.experiment.plan import Plan, PlannedRun, Run
from fedshift.experiment.predict import load_model
from fedshift.experiment.privacy import draws_of
from fedshift.federation.local.cards import resolve_device
from fedshift.federation.secure.integer_sums import SMALLEST_ROSTER
from fedshift.federation.site import Site
from fedshift.federation.site_memory import SiteMemory
from fedshift.methods.base import reads_of
from fedshift.methods.composition.options import training_of
from fedshift.models.network import Network
from fedshift.report.plots import INK, PAPER

EXCHANGES: tuple[Exchange, ...] = ("batch", "epoch")
ATTACKS: dict[str, tuple[Search, ...]] = {"l2": ("l2",), "cosine": ("cosine",), "both": ("l2", "cosine")}


@dataclass(frozen=True)
class LeakageAudit:
    """The result of `audit_leakage`. ``weights``: which weights were attacked. ``notes``: what was not attacked."""

    experiment: dict[str, Any]
    data: str
    fingerprint: str
    images: bool
    site: str
    samples: int
    target: str
    seed: int
    model: str
    parameters: int
    weights: str
    iterations: int
    starts: int
    repeats: int
    device: str
    threads: int
    versions: dict[str, str]
    seconds: float
    processor_seconds: float
    notes: tuple[str, ...]
    cases: tuple[Case, ...]
    crafted: tuple[CraftedCase, ...]

    def record(self) -> dict[str, Any]:
        """Plain data without the samples."""
        return {
            **vars(self),
            "notes": list(self.notes),
            "cases": [case.record() for case in self.cases],
            "crafted": [case.record() for case in self.crafted],
        }


def audit_leakage(
    experiment: Experiment,
    *,
    site: str | None = None,
    batches: Sequence[int] = (1, 4, 8),
    attack: str = "both",
    iterations: int = 300,
    starts: int = 4,
    repeats: int = 1,
    model: Path | None = None,
    policy: Policy | None = None,
    watcher: Watcher | None = None,
) -> LeakageAudit:
    """Attack what a source site of the experiment sends, alone and in the sum over all sources.

    The weights attacked are the initial ones, or those of a trained model.

    Under ``training.privacy`` the gradient and the epoch are clipped and noisy, with the noise of the experiment's own
    size of mini-batch. The site is also sent crafted networks (`crafted`), whose answers its policy may refuse.

    A network that begins with a fully connected layer is also inverted analytically, at mini-batches of 1. UserError if
    the site or attack is unknown, the site or network cannot make a mini-batch of that size, or the model does not fit.

    Args:
        site: name of a source; None means the first one.
        batches: sizes of the site's mini-batches.
        attack: ``l2`` (Zhu et al.), ``cosine`` (Geiping et al.) or ``both``.
        iterations: evaluations of the gradient in each attempt.
        starts: attempts from different noise; the best one counts.
        repeats: how many times sites send other mini-batches, and epochs in another order, with other noise.
        model: folder of a run whose weights are attacked; None means the initial weights.
        policy: the site's, under which a coordinator sends crafted networks; None means the default one.
    """
    began, worked = time.perf_counter(), time.process_time()
    watcher = watcher or Watcher()
    if attack not in ATTACKS:
        raise UserError(f"--attack: '{attack}' is not an attack; {nearest(attack, ATTACKS)}")
    sizes = list(dict.fromkeys(batches))
    if not sizes or min(sizes) < 1 or iterations < 1 or starts < 1 or repeats < 1:
        raise UserError("--batch, --iterations, --starts and --repeats: give whole numbers of at least 1")
    plan = Plan(experiment, experiment.protocol.taking_part(build_data(experiment)))
    whole = plan.data
    if whole.task != "classification":
        raise UserError(f"data set {whole.name} is for {whole.task}, and the audit only attacks classification")
    if whole.preprocessing.kind == "tokens":
        raise UserError(
            f"data set {whole.name} holds tokens, and the audit reconstructs numbers; an update of an embedding tells "
            "which tokens a site has in any case; 'fedshift audit membership' works"
        )
    target, name = target_and_site(plan, site)
    seed = experiment.protocol.seeds[0]
    data, split = plan.data_of(target, seed), plan.split(target, seed)
    shown = experiment.protocol.with_wrong_labels(data, split, seed)
    device, threads = resolve_device(experiment.device), experiment.engine.thread_count()
    sources = [name, *(other for other in plan.roles(target)[0] if other != name)]
    parts = {source: (shown.domains[source], split.train[source], 0) for source in sources}
    trained = training_of(experiment.methods[0], experiment.training)
    views = {
        source: SiteData([part], data.preprocessing, trained.augmentation, device) for source, part in parts.items()
    }
    view = views[name]
    network = _network(experiment, data, seed, model).to(device).train()
    _check_sizes(sizes, view, network, name)
    planned = PlannedRun(plan, Run(experiment.methods[0], target, seed))
    draws = draws_of(planned.privacy, planned.identity) if planned.privacy else {}
    attacks = ATTACKS[attack]
    summed = [size for size in sizes if not _no_sum(size, views)]
    watcher.begin(2 * (len(sizes) + len(summed)) * len(attacks) * iterations * starts * repeats)

    def attack_together(size: int, names: Sequence[str], number: int) -> list[Case]:
        """Both exchanges, at a size of mini-batch, of these sites together, in a repeat."""
        training = trained.for_classes(data.classes).model_copy(update={"batch_size": size})
        sites, classes = [], len(data.classes)
        for source in names:
            samples, noise, memory = views[source], draws.get(source), SiteMemory(())
            if noise is not None and number:
                noise = replace(noise, stream=f"{noise.stream} {number}")
            of_repeat = (classes, 1, training, memory, seed + number, samples.device, network, samples)
            sites.append(Site(source, "source", *of_repeat, draws=noise))
        attacker = Attacker(sites, data, size, iterations, starts, watcher)
        return [case for exchange in EXCHANGES for case in attacker.cases(exchange, attacks)]

    with threads_set(threads):
        cases = [
            together(same)
            for size in sizes
            for some in ([(name,), tuple(views)] if size in summed else [(name,)])
            for same in zip(*(attack_together(size, some, number) for number in range(repeats)), strict=True)
        ]
        watcher.case("crafted networks")
        plain = SiteData([parts[name]], data.preprocessing, None, device)
        rest = [(domain, np.arange(len(domain)), 0) for key, domain in shown.domains.items() if key != name]
        others = SiteData(rest, data.preprocessing, None, device)
        crafted = tuple(crafted_cases(plain, others, data, experiment.model, policy or Policy(), seed))
    return LeakageAudit(
        experiment=experiment.dump(),
        data=data.name,
        fingerprint=plan.fingerprint,
        images=len(data.input_shape) == 3,
        site=name,
        samples=view.samples,
        target=target,
        seed=seed,
        model=experiment.model.display,
        parameters=sum(parameter.numel() for parameter in network.parameters()),
        weights=f"initial, seed {seed}" if model is None else str(model),
        iterations=iterations,
        starts=starts,
        repeats=repeats,
        device=device,
        threads=threads,
        versions=versions(),
        seconds=time.perf_counter() - began,
        processor_seconds=time.process_time() - worked,
        notes=(*_notes(experiment, view.samples, sizes), *_notes_on_sums(experiment, sizes, views)),
        cases=tuple(cases),
        crafted=crafted,
    )


def target_and_site(plan: Plan, site: str | None) -> tuple[str, str]:
    """The first target for which ``site`` is a source, and the site; None means any site."""
    targets, data = plan.targets, plan.data
    if site is not None and site not in data.domains:
        raise UserError(f"--site: no site is called '{site}'; {nearest(site, data.domains)}")
    for target in targets:
        sources = [name for name in plan.roles(target)[0] if site in (None, name)]
        if sources:
            return target, sources[0]
    others = [name for name in data.domains if name != site]
    raise UserError(
        f"--site: '{site}' is the experiment's only target and sends no gradient; known: {', '.join(others)}"
    )


def _network(experiment: Experiment, data: DataSet, seed: int, model: Path | None) -> Network:
    network = experiment.training.network(experiment.model, data.input_shape, len(data.classes), seed)
    if model is None:
        return network
    trained = load_model(model)
    try:
        network.load_state_dict(trained.network.state_dict())
    except RuntimeError:
        raise UserError(
            f"--model: {model} holds another network than the experiment's {experiment.model.display} for "
            f"{len(data.classes)} classes"
        ) from None
    return network


def _check_sizes(sizes: Sequence[int], view: SiteData, network: Network, name: str) -> None:
    for size in sizes:
        if size > view.samples:
            raise UserError(f"--batch {size}: site '{name}' has only {view.samples} training samples")
    if 1 in sizes:
        try:
            with torch.no_grad():
                seen_by_attacker(network)(view.batch(torch.zeros(1, dtype=torch.int64))[0])
        except ValueError:  # from BatchNorm, which needs several values per feature
            others = " ".join(f"--batch {size}" for size in sizes if size > 1) or "--batch 2"
            raise UserError(
                f"--batch 1: the network has BatchNorm, which cannot train on one sample; give {others}"
            ) from None


def _notes(experiment: Experiment, samples: int, sizes: Sequence[int]) -> Iterator[str]:
    if experiment.training.privacy is not None:
        yield "crafted networks meet a site that trains without noise: one with a budget of privacy refuses to"
    for method in experiment.methods:
        if "raw_data" in method.calls.shares:
            yield f"{method.display} sends the samples themselves: there is nothing to reconstruct"
        other = sorted(set(method.calls.shares) - {"weights", "numbers", "raw_data"})
        if other:
            yield f"{method.display} also sends {', '.join(other)}, which is not attacked here"
        for size in sizes:
            epoch = batches_per_epoch(samples, size)
            between = method.mini_batches(epoch, 2) - method.mini_batches(epoch, 1)
            if 0 < between < epoch and not method.traits.pooled:
                yield (
                    f"{method.display} sends its model after {between} of the {epoch} mini-batches of an epoch "
                    f"(batches of {size}): what that shows lies between the exchanges 'batch' and 'epoch'"
                )


def _no_sum(size: int, views: Mapping[str, SiteData]) -> str:
    """Why no sum of mini-batches of this size is attacked; empty if one is."""
    if len(views) < SMALLEST_ROSTER:
        return f"a sum needs {SMALLEST_ROSTER} labelled sites, here are {len(views)}"
    few = [source for source, view in views.items() if view.samples < size]
    return f"site '{few[0]}' has fewer than {size} training samples" if few else ""


def _notes_on_sums(experiment: Experiment, sizes: Sequence[int], views: Mapping[str, SiteData]) -> Iterator[str]:
    for why in dict.fromkeys(_no_sum(size, views) for size in sizes):
        if why:
            yield f"no sum was attacked: {why}"
    for method in experiment.methods:
        if reads_of(method) != "sums" and not method.traits.pooled:
            yield f"{method.display} cannot run with aggregation: secure: its server sees what single sites send"


_MOST = 8
_TITLES = {"batch": "gradient of one mini-batch", "epoch": "model after one epoch"}


def picture(cases: Sequence[Case]) -> bytes:
    """A PNG with a row for each size and attack, a column for each exchange and number of sites in the sum.

    Each place shows 8 originals above their reconstructions.
    """
    from matplotlib.figure import Figure

    rows = list(dict.fromkeys((case.batch, case.attack) for case in cases))
    columns = list(dict.fromkeys((exchange, case.sites) for exchange in EXCHANGES for case in cases))
    places = {(case.batch, case.attack, case.exchange, case.sites): case for case in cases}
    figure = Figure(figsize=(5.5 * len(columns), 0.6 + 1.6 * len(rows)), layout="constrained", facecolor=PAPER)
    every = figure.subplots(len(rows), len(columns), squeeze=False)
    for axes, (size, attack, exchange, sites) in zip(
        every.flat, [(*row, *column) for row in rows for column in columns], strict=True
    ):
        axes.set_axis_off()
        case = places.get((size, attack, exchange, sites))
        if case is None:
            continue
        axes.imshow(_mosaic(case), vmin=0, vmax=1, cmap="gray", interpolation="nearest")
        assert case.ssim is not None
        score = sum(case.ssim) / len(case.ssim)
        of = f", sum of {sites} sites" if sites > 1 else ""
        title = f"{_TITLES[exchange]}{of}, size {size}, {attack}: SSIM {score:.2f}"
        axes.set_title(title, fontsize=8, color=INK, loc="left")
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=130, metadata={"Software": None})
    return buffer.getvalue()


def _mosaic(case: Case) -> npt.NDArray[np.float32]:
    """Two rows of up to 8 images with white lines between them: (h, w) grey, or (h, w, 3)."""
    lines = []
    for images in (case.originals, case.reconstructions):
        shown = images[:_MOST].transpose(0, 2, 3, 1)
        if shown.shape[3] != 3:  # grey, or channels that are not colours
            shown = shown.mean(axis=3, keepdims=True)
        # Every picture is as wide as eight images, so that all have the same scale.
        blank = np.ones((_MOST - len(shown), *shown.shape[1:]), dtype=np.float32)
        framed = np.pad(np.concatenate([shown, blank]), ((0, 0), (1, 1), (1, 1), (0, 0)), constant_values=1)
        lines.append(np.concatenate(list(framed), axis=1))
    whole = np.concatenate(lines, axis=0)
    return whole if whole.shape[2] == 3 else whole[:, :, 0]
