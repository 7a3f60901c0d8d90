"""Tiny sites, networks and runs for tests: made of arrays in memory, trained in milliseconds."""

from __future__ import annotations

import functools
import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tiny_clip import write_clip

from fedshift.data.domain import DataSet, Domain, Manifest, Preprocessing
from fedshift.errors import UserError
from fedshift.experiment.costs import SAMPLES, dry_run
from fedshift.federation.federation import Federation
from fedshift.federation.local.in_process import LocalFederation
from fedshift.federation.local.pool import PoolFederation, WorkerPool
from fedshift.federation.site import Role
from fedshift.federation.site_runner import Setting, SitePlan
from fedshift.federation.training import Training
from fedshift.methods.base import Method, RunPlan, Samples, State, Traffic
from fedshift.methods.on_clip import OnClip
from fedshift.methods.rounds import play_round, start_run
from fedshift.methods.screening import screening_of
from fedshift.methods.traits import Traits
from fedshift.models import registry as models
from fedshift.models.network import Network
from fedshift.models.network_options import NetworkOptions
from fedshift.weights import Weights

CLASSES = 3
IMAGE = Preprocessing(kind="image", channels=1, size=12, mean=(0.5,), std=(0.25,))
VECTOR = Preprocessing(kind="features")
CNN: dict[str, object] = {"name": "mnist_cnn", "channels": [3, 4], "hidden": 6}
MLP: dict[str, object] = {"name": "mlp", "hidden": [8, 6]}
NORMED: dict[str, object] = {"name": "mlp", "hidden": [8, 6], "batch_norm": True}
NORMED_CNN: dict[str, object] = {"name": "digit_cnn", "variant": "paper"}
LINEAR: dict[str, object] = {"name": "linear"}
SIZES = {"large": 41, "small": 5, "one": 1}
"""Sites of a batch size of 8: a last batch of one, fewer samples than a batch, a single sample."""
BUDGET = 60
_FOLDER = tempfile.TemporaryDirectory()
POOL_BUDGET = 24
"""Mini-batches of a run. A site stops after the epochs of its method; a pool trains until its budget is used."""


def images(name: str, number: int, channels: int = 1, size: int = 12) -> Domain:
    """Noisy pictures of one fixed pattern per class, a little brighter or darker at each site."""
    patterns = np.random.default_rng(7).integers(40, 200, (CLASSES, channels, size, size))
    generator = np.random.default_rng(sum(name.encode()))
    labels = np.arange(number, dtype=np.int64) % CLASSES
    noise = generator.integers(-40, 41, (number, channels, size, size)) + generator.integers(-15, 16)
    return Domain(name, np.clip(patterns[labels] + noise, 0, 255).astype(np.uint8), labels)


def vectors(name: str, number: int, width: int = 5) -> Domain:
    """Noisy vectors around one fixed centre per class, shifted at each site."""
    centres = np.random.default_rng(8).normal(size=(CLASSES, width))
    generator = np.random.default_rng(sum(name.encode()))
    labels = np.arange(number, dtype=np.int64) % CLASSES
    noise = generator.normal(size=(number, width)) * 0.3 + generator.normal(size=width) * 0.3
    return Domain(name, (centres[labels] + noise).astype(np.float32), labels)


def domains(network: Mapping[str, object] = CNN, sizes: Mapping[str, int] = SIZES) -> list[Domain]:
    """One domain per entry of ``sizes``, of the kind that ``network`` reads."""
    reads_images = network["name"] in ("mnist_cnn", "digit_cnn")
    return [(images if reads_images else vectors)(name, number) for name, number in sizes.items()]


def normed_for(method: Method) -> dict[str, object]:
    """A network with BatchNorm: on vectors, or on images for a method that works on these alone."""
    try:
        method.check_samples(Samples((5,)))
    except UserError:
        return NORMED_CNN
    return NORMED


def data_set(found: Sequence[Domain]) -> DataSet:
    kind = IMAGE if found[0].inputs.dtype == np.uint8 else VECTOR
    return DataSet("tiny", {domain.name: domain for domain in found}, ("a", "b", "c"), kind, Manifest(*[""] * 5))


def training(**options: Any) -> Training:
    return Training(**{"batch_size": 8, "lr": 0.05, "rounds": 2, **options})


def setting(
    method: Any,
    found: Sequence[Domain],
    network: Mapping[str, object] = CNN,
    seed: int = 3,
    refuse: Sequence[str] = (),
    **options: Any,
) -> Setting:
    """``options`` are those of `Training`."""
    data = data_set(found)
    chosen = network_for(method, network, data.input_shape)
    return Setting(
        method, training(**options), chosen, data.preprocessing, data.input_shape, CLASSES, len(found), seed, "cpu",
        frozenset(refuse),
    )  # fmt: skip


def network_for(method: Any, network: Mapping[str, object], shape: tuple[int, ...]) -> NetworkOptions:
    """``network``, but for a method on CLIP a tiny CLIP."""
    return models.parse(clip_for(shape) if isinstance(method, OnClip) else network, permit=models.any_code)


@functools.cache
def clip_for(shape: tuple[int, ...]) -> dict[str, object]:
    """A tiny CLIP whose image features are the samples themselves, flattened."""
    folder = write_clip(Path(_FOLDER.name) / "x".join(map(str, shape)), width=math.prod(shape))
    return {"name": "clip_text", "pretrained": str(folder), "class_names": ["dog", "cat", "cup"]}


def plans(method: Any, found: Sequence[Domain], roles: Mapping[str, Role] | None = None) -> list[SitePlan]:
    """Every domain as a site with all its rows, or all in one pool for a pooled baseline.

    A method that needs a target gets one more domain without labels, unless ``roles`` name one.
    """
    parts = [(domain, np.arange(len(domain)), number) for number, domain in enumerate(found)]
    extra = []
    traits = getattr(method, "traits", Traits())
    if traits.needs_target and not roles:
        target = unlabelled_like(found[0])
        extra = [(target, np.arange(len(target)), len(parts))]
    if traits.target == "labelled":
        return [SitePlan(extra[0][0].name, "source", extra)]
    if traits.pooled:
        return [SitePlan("pool", "source", parts, extra)]
    parts, roles = parts + extra, {**(roles or {}), **{part[0].name: "target" for part in extra}}
    return [SitePlan(part[0].name, (roles or {}).get(part[0].name, "source"), [part]) for part in parts]


def federation(
    method: Any,
    found: Sequence[Domain] | None = None,
    network: Mapping[str, object] = CNN,
    pool: WorkerPool | None = None,
    budget: int | Mapping[str, int] | None = None,
    rounds: int = 2,
    roles: Mapping[str, Role] | None = None,
    **options: Any,
) -> Federation:
    """A federation of all ``found`` domains, in this process or at a pool. ``options`` as for `setting`."""
    found = domains(network) if found is None else found
    chosen = plans(method, found, roles)
    if budget is None:
        budget = POOL_BUDGET if getattr(method, "traits", Traits()).pooled else BUDGET
    budgets = dict.fromkeys((plan.name for plan in chosen), budget) if isinstance(budget, int) else dict(budget)
    whole = setting(method, found, network, **options)
    if pool is not None:
        return PoolFederation(pool, chosen, whole, budget=budgets, rounds=rounds)
    return LocalFederation(chosen, whole, budget=budgets, rounds=rounds)


def start_of(
    method: Method, found: Sequence[Domain] | None = None, network: Mapping[str, object] = CNN, seed: int = 3
) -> Weights:
    """The common start of a run."""
    built = setting(method, domains(network) if found is None else found, network, seed).build_network()
    return Weights({name: tensor.contiguous() for name, tensor in built.state_dict().items()})


def unlabelled_like(domain: Domain) -> Domain:
    """A target for sites of the same kind of data: 14 samples."""
    made = images("target", 14) if domain.inputs.dtype == np.uint8 else vectors("target", 14)
    return made if made.inputs.shape[1:] == domain.inputs.shape[1:] else Domain("target", domain.inputs, domain.labels)


def evaluated(
    method: Method, weights: Weights, found: Sequence[Domain] | None = None, network: Mapping[str, object] = CNN
) -> Network:
    """The network that a state's weights belong to, holding them."""
    found = domains(network) if found is None else found
    built = method.evaluated_network(setting(method, found, network).build_network(), len(found))
    built.load_state_dict(dict(weights))
    return built.eval()


def step_on(method: Method, where: Federation, state: State) -> State:
    """One more round, as the loop of an experiment does it."""
    state = play_round(method, where, state)
    where.settle()
    return state


def play(
    method: Method,
    found: Sequence[Domain] | None = None,
    network: Mapping[str, object] = CNN,
    rounds: int = 2,
    seed: int = 3,
    **options: Any,
) -> Iterator[tuple[State, Federation]]:
    """The state and the federation after each round of a run. ``options`` as for `federation`."""
    found = domains(network) if found is None else found
    where = federation(method, found, network, rounds=rounds, seed=seed, **options)
    start = start_of(method, found, network, seed)
    where.screening = screening_of(method, start)
    state = start_run(method, where, start)
    where.settle()
    for _ in range(rounds):
        state = step_on(method, where, state)
        yield state, where


def run(method: Method, *arguments: Any, **options: Any) -> tuple[State, Federation]:
    """The state and the federation after the last round. Arguments as for `play`."""
    *_, last = play(method, *arguments, **options)
    return last


def bytes_of(
    method: Method,
    where: Federation,
    network: Mapping[str, object] = CNN,
    rounds: int = 2,
    trained: int = 0,
    found: Sequence[Domain] | None = None,
    roles: Mapping[str, Role] | None = None,
) -> Traffic:
    """What `fedshift check` would say of a run of these sites that trains on so many samples."""
    found = domains(network) if found is None else found
    whole = setting(method, found, network)
    sites = plans(method, found, roles)
    built = whole.build_network()
    samples = {site.name: sum(len(rows) for _, rows, _ in site.parts) for site in sites if site.name in where.sources}
    plan = RunPlan(
        dry=dry_run(method, sites, whole, built, rounds=rounds).of(rounds),
        dry_samples={site: min(SAMPLES, number) for site, number in samples.items()},
        network=built,
        input_shape=whole.input_shape,
        samples=samples,
        targets=len(where.targets),
        rounds=rounds,
        trained=trained,
    )
    return method.traffic(plan)


def assert_close(first: Weights, second: Weights) -> None:
    for key, tensor in first.items():
        torch.testing.assert_close(second[key], tensor, atol=1e-6, rtol=1e-5)
