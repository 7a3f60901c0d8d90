"""Sums through the seam: the same in every engine, near the plain mean, and nothing of a single site is read."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterator
from typing import Any, ClassVar

import pytest
import torch
from tiny import CNN, NORMED, domains, federation, normed_for, start_of, step_on

from fedshift.errors import FedshiftError, TrainingDiverged, UserError
from fedshift.experiment.fits.secure_sums import check_sums
from fedshift.federation.exchange import Answer, Missing, Request
from fedshift.federation.federation import Federation
from fedshift.federation.local.pool import WorkerPool
from fedshift.federation.messages import Update
from fedshift.federation.plain_values import parse_json
from fedshift.federation.secure.integer_sums import ALL, Layout, LayoutEntry, Total, Weighing, contribution, threshold
from fedshift.federation.site import Role, Site
from fedshift.functional.fixed_point import FRACTION_BITS
from fedshift.methods import registry
from fedshift.methods.base import Method, State
from fedshift.methods.federated.fedavg import FedAvg
from fedshift.methods.index import ENTRIES, with_sums
from fedshift.methods.rounds import start_run
from fedshift.weights import Weights
from tried import slow_after

SIZES = {"large": 23, "middle": 12, "small": 9}
UNLABELLED = {"other": 13, "target": 9, "third": 17}


def played(
    name: str, secure: bool, network: dict[str, Any], rounds: int = 1, **options: Any
) -> tuple[State, Federation]:
    """A state after some rounds of a method at three sites."""
    pool = options.pop("pool", None)
    lost: tuple[str, ...] = options.pop("lost", ())
    method = registry.parse({"name": name, **registry.method_class(name).traits.small, **options})
    targets = UNLABELLED if method.traits.needs_target else {}
    found = domains(network, {**SIZES, **targets})
    roles: dict[str, Role] = dict.fromkeys(targets, "target")
    where = federation(method, found, network, pool=pool, rounds=rounds, roles=roles)
    where.sums_only = secure
    if lost:
        where.quorum = 1
        losing(where, *lost)
    state = start_run(method, where, start_of(method, found, network))
    where.settle()
    for _ in range(rounds):
        state = step_on(method, where, state)
    return state, where


def apart(first: Weights, second: Weights) -> float:
    """The largest difference; BatchNorm's counters, whose sum gives a mean and no maximum, are left out."""
    floats = [name for name in first if first[name].is_floating_point()]
    return max((first[name].double() - second[name].double()).abs().max().item() for name in floats)


def takes_vectors(name: str) -> bool:
    return normed_for(registry.parse({"name": name, **registry.method_class(name).traits.small})) is NORMED


@pytest.mark.parametrize("name", slow_after(12, with_sums()))
def test_secure_is_plain_within_the_resolution(name: str) -> None:
    network = NORMED if takes_vectors(name) else CNN
    plain, _ = played(name, False, network)
    secure, where = played(name, True, network)
    assert plain.weights.keys() == secure.weights.keys()
    assert apart(plain.weights, secure.weights) < 2e-5
    up = where.ledger.total["up"]
    assert up["masked"] > 0
    assert "weights" not in up


@pytest.mark.parametrize(
    "options", [{}, {"granularity": "module"}, {"distance_power": 2.0}, {"aggregation": "average"}]
)
def test_csac_from_sums_is_csac(options: dict[str, Any]) -> None:
    plain, _ = played("csac", False, NORMED, **options)
    secure, where = played("csac", True, NORMED, **options)
    assert apart(plain.weights, secure.weights) < 1e-5
    fedavg, _ = played("csac", False, NORMED, aggregation="average")
    if options.get("aggregation") != "average":  # the shares matter here by far more than the tolerance
        assert apart(plain.weights, fedavg.weights) > 1e-3
    asked = {entry.call for entry in where.ledger.entries}
    assert ("weigh" in asked) == (options.get("aggregation") != "average")


@pytest.mark.parametrize(
    "options",
    [{"setting": "practical", "readiness": 9.0, "lend": 0.05, "local_epochs": 2}, {"lost": ("large", "other")}],
)
def test_mdfnet_from_sums_is_mdfnet(options: dict[str, Any]) -> None:
    """With both groups at work, mini-batches lent to labelled sites, and sites that are lost."""
    plain, before = played("mdfnet", False, NORMED, rounds=3, r="round", **options)
    secure, where = played("mdfnet", True, NORMED, rounds=3, r="round", **options)
    assert apart(plain.weights, secure.weights) < 2e-5
    assert before.progress == where.progress
    assert {entry.call for entry in where.ledger.entries} == {"fit", "fit_unlabelled"}
    assert plain.report["losses"].keys() >= {"middle", "target"}
    assert set(secure.report["losses"]) == {ALL}
    assert secure.report["aggregation_weights"] == {}
    entropies = plain.report["cross_entropies"]
    assert secure.report["cross_entropies"][ALL] == pytest.approx(sum(entropies.values()) / len(entropies), abs=1e-6)


@pytest.mark.threat("sum_unequal_work")
def test_no_site_of_a_sum_can_be_told_to_do_nothing() -> None:
    """What mdfnet moves between sites is the one thing that differs between them; a site that trains hides others."""
    method = registry.parse({"name": "mdfnet"})
    found = domains(NORMED, {**SIZES, **UNLABELLED})
    where = federation(method, found, NORMED, roles=dict.fromkeys(UNLABELLED, "target"))
    where.sums_only, start = True, start_of(method, found, NORMED)
    idle = dict.fromkeys((*SIZES, *UNLABELLED), -1000)
    where.ask(method.fit, to=where.sources, weights=start, r=0.0, extra=idle).mean("uniform")  # type: ignore[attr-defined]
    assert all(where.progress.used[site] == 1 for site in SIZES)


class Alone(FedAvg):
    """Says that it reads sums, and asks for the sum of one."""

    def round(self, federation: Federation, state: State) -> State:
        replies = [federation.ask(self.fit, to=(site,), weights=state.weights) for site in federation.sources]
        return state.advance(replies[0].mean().model())


@pytest.mark.threat("sum_of_one")
def test_a_sum_of_one_cannot_be_asked_for() -> None:
    found, method = domains(NORMED, SIZES), Alone()
    where = federation(method, found, NORMED)
    where.sums_only = True
    with pytest.raises(FedshiftError, match="at least 3 sites; fit asks 1"):
        step_on(method, where, State(start_of(method, found, NORMED)))


@pytest.mark.slow
def test_a_pool_ends_in_the_same_bits(pool: WorkerPool) -> None:
    """Also where a site is lost, which changes the bits."""
    for name in ("fedavg", "csac"):
        ends = [played(name, True, NORMED, rounds=2, lost=lost)[0].weights for lost in ((), ("middle",))]
        assert not ends[0].equal(ends[1])
        for lost, here in zip(((), ("middle",)), ends, strict=True):
            there, where = played(name, True, NORMED, rounds=2, pool=pool, lost=lost)
            assert here.equal(there.weights)
            assert tuple(where.missing) == lost


def test_sums_by_hand() -> None:
    replies = {
        "a": Update(Weights({"w": torch.tensor([1.0, -2.0]), "seen": torch.tensor(4)}), 1, 0.5),
        "b": Update(Weights({"w": torch.tensor([5.0, 2.0]), "seen": torch.tensor(8)}), 3, 1.5),
    }
    weighing = Weighing.of("samples", [1, 3])
    total = Total()
    for site, reply in replies.items():
        total.add(site, contribution(reply, weighing))
    mean = total.mean()
    assert mean.model()["w"].tolist() == [4.0, 1.0]
    assert mean.model()["seen"].item() == 7  # a counter is rounded
    assert mean.numbers == {"loss": {ALL: 1.25}}
    assert (mean.shares, mean.answered) == ({}, 2)
    half = 2**FRACTION_BITS // 4  # a has a quarter of the samples
    added = contribution(replies["a"], weighing)
    assert added.numbers["sum"].tolist() == [1, half, half // 2, half, -2 * half, 4 * half]
    assert Layout.read(parse_json(LayoutEntry, added.layout.entry.model_dump_json(), "it")) == added.layout


def test_a_whole_number_is_summed_and_a_text_is_not() -> None:
    weighing = Weighing.of("uniform", [4])
    total = Total()
    total.add("a", contribution(Update(Weights({}), 4, 3), weighing))
    assert total.mean().numbers == {"loss": {ALL: 3.0}}
    with pytest.raises(FedshiftError, match="'loss' is a str"):
        contribution(Update(Weights({}), 4, "low"), weighing)  # type: ignore[arg-type]


def test_a_mask_that_is_left_is_noticed() -> None:
    total = Total()
    for site in "abc":
        total.add(site, contribution(Update(Weights({"w": torch.ones(2)}), 4, 0.1), Weighing.of("uniform", [1, 1, 1])))
    assert total.numbers is not None
    total.numbers += 2**63 - 1 - torch.randint(2**62, total.numbers.shape)
    with pytest.raises(FedshiftError, match="did not cancel"):
        total.mean()


SIZE = ["weights", "weights", "w", "torch.float32"]


@pytest.mark.parametrize(
    "described",
    [
        None,
        [],
        [[1], []],
        [["loss"], [[*SIZE, [-1]]]],
        [["loss"], [[*SIZE, [2**41]]]],
        [["loss"], [[*SIZE, [True]]]],
        [["loss"], [["weights", "pickle", "w", "torch.float32", [2]]]],
    ],
)
def test_a_layout_that_is_none_is_refused(described: Any) -> None:
    with pytest.raises(FedshiftError, match=r"does not describe|it cannot be read"):
        Layout.read(parse_json(LayoutEntry, json.dumps(described), "it"))


class Curious(FedAvg):
    """Says that it reads sums, and reads something else."""

    traits = FedAvg.traits.derive(server_reads="sums")
    how: ClassVar[Callable[[Any], Any]]

    def round(self, federation: Federation, state: State) -> State:
        replies = federation.ask(self.fit, to=federation.sources, weights=state.weights)
        type(self).how(replies)
        return state.advance(state.weights)


@pytest.mark.parametrize(
    "how",
    [
        lambda replies: list(replies),
        lambda replies: dict(replies.items()),
        lambda replies: replies.keep(),
        lambda replies: replies.only(),
        lambda replies: replies.numbers("loss"),
        lambda replies: replies.drain(),
        lambda replies: replies.mean({"large": 1.0, "middle": 0.0, "small": 0.0}),
        lambda replies: (replies.mean(), replies.mean("uniform")),
        lambda replies: None,
    ],
)
def test_a_single_reply_cannot_be_read(how: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Curious, "how", how, raising=False)
    method = Curious()
    where = federation(method, domains(NORMED, SIZES), NORMED)
    where.sums_only = True
    with pytest.raises(FedshiftError, match="secure aggregation"):
        step_on(method, where, State(start_of(method, domains(NORMED, SIZES), NORMED)))


def losing(where: Federation, *lost: str) -> Federation:
    """The federation, some of whose sites are lost in every exchange."""
    carry = where.deliver

    def deliver(call: str, requests: Iterator[Request]) -> Generator[Answer[Any] | Missing, None, None]:
        for answer in carry(call, requests):
            gone = answer.site in lost
            yield Missing(answer.site, FedshiftError(f"site '{answer.site}' is lost")) if gone else answer

    where.deliver = deliver  # type: ignore[method-assign]
    return where


def test_a_site_that_is_lost_is_in_no_sum() -> None:
    found, method = domains(NORMED, SIZES), FedAvg()
    sums = {}
    for secure in (False, True):
        where = losing(federation(method, found, NORMED), "middle")
        where.quorum, where.sums_only = 1, secure
        sums[secure] = step_on(method, where, State(start_of(method, found, NORMED))).weights
        assert list(where.missing) == ["middle"]
    assert apart(sums[False], sums[True]) < 1e-6


def test_half_of_the_sites_is_not_enough() -> None:
    assert [threshold(roster) for roster in (3, 4, 5, 50)] == [2, 3, 3, 26]
    found, method = domains(NORMED, SIZES), FedAvg()
    where = losing(federation(method, found, NORMED), "middle", "small")
    where.quorum, where.sums_only = 1, True
    with pytest.raises(FedshiftError, match="1 of 3 sites answered"):
        step_on(method, where, State(start_of(method, found, NORMED)))


class Large(FedAvg):
    """Its sites send a model that fits no fixed-point sum."""

    def fit(self, site: Site, weights: Weights) -> Update:
        buffers = {name: value for name, value in weights.items() if name.endswith("running_var")}
        return Update(weights.merge({name: value + 1e12 for name, value in buffers.items()}), site.samples, 0.0)


@pytest.mark.threat("sum_overflow")
def test_what_is_too_large_is_refused_and_not_clipped() -> None:
    found, method = domains(NORMED, SIZES), Large()
    where = federation(method, found, NORMED)
    where.sums_only = True
    with pytest.raises(FedshiftError, match="too large for a sum") as caught:
        step_on(method, where, State(start_of(method, found, NORMED)))
    assert not isinstance(caught.value, TrainingDiverged)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"name": "kd3a"}, "reads models of kd3a's sites: choose fedavg"),
        ({"name": "feddg_ga"}, "reads norms"),
        ({"name": "csac", "aggregation": "similarity"}, "reads norms"),
        ({"name": "elcfs", "weighting": "rounded"}, "reads norms"),
        ({"name": "fedavg", "robust": "median"}, "without robust"),
        ({"name": "fedavg", "robust": "norm_clipping"}, "reads norms"),
        ({"name": "styles", "method": {"name": "fedomg"}}, "reads models"),
        ({"name": "deepall"}, "reads models"),
    ],
)
def test_what_cannot_run_is_refused_before_training(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said) as caught:
        check_sums(registry.parse(options), 3)
    assert "\n" not in str(caught.value)


def test_two_sites_are_too_few() -> None:
    check_sums(FedAvg(), 3)
    with pytest.raises(UserError, match="needs 3 labelled sites"):
        check_sums(FedAvg(), 2)
    check_sums(registry.parse({"name": "mdfnet"}), 3, 3)
    with pytest.raises(UserError, match="needs 3 sites without labels for mdfnet"):
        check_sums(registry.parse({"name": "mdfnet"}), 3, 1)


def test_a_method_of_a_stranger_reads_models_unless_it_says_otherwise() -> None:
    assert Method.traits.server_reads == "models"
    assert all(ENTRIES[name].rules for name in with_sums())
