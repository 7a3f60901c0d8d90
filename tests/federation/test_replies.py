"""Replies in the local engine are checked as those from other machines: what they hold against what is declared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any

import pytest
import torch
from tiny import CNN, MLP, domains, federation, plans, run, setting, start_of, vectors

from fedshift.errors import FedshiftError, ReplyRefused, TrainingDiverged
from fedshift.federation.federation import Federation
from fedshift.federation.local.in_process import LocalFederation
from fedshift.federation.messages import Between, Features, Reply, Share, Statistics, Update
from fedshift.federation.replies import GROWTH, About, Bounds, ReplyCheck, Tensors, checked_reply
from fedshift.federation.site import Site
from fedshift.federation.site_runner import about_sites
from fedshift.methods import registry
from fedshift.methods.federated.elcfs import ELCFS
from fedshift.methods.federated.fedavg import FedAvg
from fedshift.methods.federated.fednova import FedNova, Normalised
from fedshift.methods.federated.scaffold import Controlled, Scaffold, zeros
from fedshift.methods.rounds import start_run
from fedshift.weights import Weights

WRONG = "small"


@dataclass(frozen=True)
class Told(Reply):
    features: Features
    shares: Mapping[str, Share]
    number: Annotated[int, Between(2, 4)]


class Declares(FedAvg):
    """A method whose call declares what it returns."""

    def tell(self, site: Site) -> Told:
        return Told(Features({"a": torch.zeros(2, 3)}), {site.name: 0.5}, 3)

    def bounds(self, call: str, about: About) -> Bounds:
        return (
            {"features": Tensors({"a": (None, 3)}, rows=about.training.batch_size, low=-1, high=1)}
            if call == "tell"
            else {}
        )


def checks(method: Any = None, model: dict[str, object] = MLP) -> ReplyCheck:
    method = method or Declares()
    found = domains(model)
    whole, sites = setting(method, found, model), plans(method, found)
    return ReplyCheck(method, about_sites(sites, whole, whole.build_network()))


def told(**changes: Any) -> dict[str, Any]:
    return {"features": Features({"a": torch.zeros(2, 3)}), "shares": {"large": 0.5}, "number": 3, **changes}


def features(*shape: int, value: float = 0.0, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    return {"features": Features({"a": torch.full(shape, value, dtype=dtype)})}


def test_what_is_declared_is_let_through() -> None:
    for change in ({}, features(1, 3), features(8, 3, value=1.0), {"shares": {}}, {"number": 4}):
        assert checks().check("tell", "large", Told, told(**change), {}) is None


@pytest.mark.threat("broken_field")
@pytest.mark.parametrize(
    "change",
    [
        features(9, 3),
        features(0, 3),
        features(2, 4),
        features(3),
        features(2, 3, value=1.5),
        features(2, 3, value=-3e38),
        features(2, 3, dtype=torch.float64),
        {"features": Features({"b": torch.zeros(2, 3)})},
        {"features": Features({})},
        {"features": Features({"a": torch.zeros(2, 3), "b": torch.zeros(2, 3)})},
        {"features": Statistics({"a": torch.zeros(2, 3)})},
        {"shares": {"stranger": 0.5}},
        {"shares": {"large": 1.5}},
        {"shares": {"large": float("nan")}},
        {"number": 5},
        {"number": True},
        {"shares": {"large": True}},
    ],
)
def test_what_is_not_declared_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(FedshiftError):
        checks().check("tell", "large", Told, told(**change), {})


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e300])
def test_losses_are_finite(value: float) -> None:
    good = {"weights": Weights({}), "samples": 3, "loss": 0.5}
    assert checked_reply(Update, good)
    with pytest.raises(FedshiftError, match="'loss'"):
        checked_reply(Update, {**good, "loss": value})


def test_a_field_that_no_call_returns_is_refused() -> None:
    with pytest.raises(FedshiftError, match="fields"):
        checked_reply(Update, {"weights": Weights({}), "samples": 3, "loss": 0.5, "more": 1.0})


def test_tensors_that_nobody_declares_are_of_a_type_that_travels() -> None:
    assert checks().check("fit", "large", Told, told(), {}) is None
    with pytest.raises(FedshiftError, match="complex64"):
        checks().check("fit", "large", Told, told(**features(2, 3, dtype=torch.complex64)), {})


def test_what_a_method_declares_need_not_be_near_to_what_was_sent() -> None:
    """SCAFFOLD's control variates are gradients: from zero to 90 in one round is far for a model."""
    method, found = Scaffold(), domains(MLP)
    weights = start_of(method, found, MLP)
    sent = {"weights": weights, "control": zeros(weights)}
    control = Weights({name: value + 90 for name, value in sent["control"].items()})
    content = {"weights": weights, "samples": 5, "loss": 0.5, "control": control}
    assert checks(method).check("train", "small", Controlled, content, sent) is None


@pytest.mark.threat("claimed_samples")
@pytest.mark.parametrize("samples", [0, 6, -1])
def test_a_site_has_between_one_sample_and_those_that_it_said(samples: int) -> None:
    content = {"weights": start_of(FedAvg(), domains(MLP), MLP), "samples": 5, "loss": 0.5}
    sent = {"weights": content["weights"]}
    assert checks().check("fit", "small", Update, content, sent) is None
    with pytest.raises(FedshiftError, match="samples"):
        checks().check("fit", "small", Update, {**content, "samples": samples}, sent)


@pytest.mark.threat("huge_weights")
def test_a_model_is_not_further_from_the_one_that_was_sent_than_training_leads() -> None:
    weights = start_of(FedAvg(), domains(MLP), MLP)
    norm = sum(tensor.double().square().sum() for tensor in weights.values()).sqrt()  # type: ignore[union-attr]
    direction = torch.ones_like(next(iter(weights.values())))
    name, most = next(iter(weights)), GROWTH * (norm + 1) / direction.norm()
    for part, fits in ((0.99, True), (1.01, False)):
        moved = weights.merge({name: weights[name] + part * most.float() * direction})
        content = {"weights": moved, "samples": 5, "loss": 0.5}
        if fits:
            checks().check("fit", "small", Update, content, {"weights": weights})
        else:
            with pytest.raises(FedshiftError, match="norm"):
                checks().check("fit", "small", Update, content, {"weights": weights})


@pytest.mark.threat("huge_weights")
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("running_var", -1e-3),
        ("running_var", 3e38),
        ("running_mean", 1e16),
        ("num_batches_tracked", -1),
        ("num_batches_tracked", 2**40),
    ],
)
def test_running_statistics_are_possible(name: str, value: float) -> None:
    network = {**MLP, "batch_norm": True}
    method, found = FedAvg(), [vectors("small", 9)]
    whole, sites = setting(method, found, network), plans(method, found)
    check = ReplyCheck(method, about_sites(sites, whole, whole.build_network()))
    weights = start_of(method, found, network)
    chosen = next(key for key in weights if key.endswith(name))
    spoilt = weights.merge({chosen: torch.full_like(weights[chosen], value)})
    check.check("fit", "small", Update, {"weights": weights, "samples": 9, "loss": 0.0}, {"weights": weights})
    with pytest.raises(FedshiftError, match=name):
        check.check("fit", "small", Update, {"weights": spoilt, "samples": 9, "loss": 0.0}, {"weights": weights})


@pytest.mark.parametrize("factor", [1e-45, 1e30])
def test_a_factor_that_a_site_says_itself_does_not_blow_up_the_model(factor: float) -> None:
    """FedNova divides by it: too large a one is refused, and one that no step has counts as one step."""

    class Lies(FedNova):
        def train(self, site: Site, weights: Weights) -> Normalised:
            reply = super().train(site, weights)
            return replace(reply, factor=factor) if site.name == WRONG else reply

    method, found = Lies(), domains(MLP, {"large": 20, WRONG: 12, "mid": 17})
    sites = plans(method, found)
    budget = {plan.name: 6 for plan in sites}
    where = LocalFederation(sites, setting(method, found, MLP), budget=budget, rounds=1, quorum=2)
    state = method.round(where, start_run(method, where, start_of(method, found, MLP)))
    where.settle()
    assert set(where.missing) == ({WRONG} if factor > 1 else set())
    assert max(float(tensor.abs().max()) for tensor in state.weights.values()) < 100


class Large(FedAvg):
    """One site sends a model of 3e38."""

    def fit(self, site: Site, weights: Weights) -> Update:
        reply = super().fit(site, weights)
        if site.name != WRONG:
            return reply
        return replace(reply, weights=Weights({name: tensor * 0 + 3e38 for name, tensor in weights.items()}))


class Cut(ELCFS):
    """One site sends spectra of another window."""

    def share_spectra(self, site: Site) -> Any:
        reply = super().share_spectra(site)
        if site.name != WRONG:
            return reply
        return replace(reply, spectra=type(reply.spectra)({"amplitude": reply.spectra["amplitude"][..., :1, :1]}))


@pytest.mark.threat("wrong_spectra")
@pytest.mark.parametrize("method", [Large(), Cut()], ids=["weights", "spectra"])
def test_a_quorum_goes_on_without_the_site(method: Any) -> None:
    found = domains(CNN, {"large": 20, WRONG: 12, "mid": 17})
    whole, sites = setting(method, found, CNN), plans(method, found)
    budget = {plan.name: 6 for plan in sites}
    where = LocalFederation(sites, whole, budget=budget, rounds=2, quorum=2)
    state = start_run(method, where, start_of(method, found, CNN))
    where.round = 1
    state = method.round(where, state)
    where.settle()
    assert set(where.missing) == {WRONG}
    assert f"'{WRONG}'" in where.missing[WRONG]
    state.weights.check_finite("the model")


def test_without_a_quorum_the_run_ends_with_its_name() -> None:
    found = domains(CNN, {"large": 20, WRONG: 12})
    with pytest.raises(TrainingDiverged, match=f"site '{WRONG}' in round 1: 'weights' .* norm"):
        run(Large(), found, CNN)
    with pytest.raises(ReplyRefused, match=f"site '{WRONG}' in round 0: 'spectra/amplitude' "):
        run(Cut(), found, CNN)


def test_numbers_that_are_not_finite_are_divergence() -> None:
    class Broken(FedAvg):
        def fit(self, site: Site, weights: Weights) -> Update:
            return Update(Weights({name: tensor * torch.nan for name, tensor in weights.items()}), site.samples, 0.5)

    with pytest.raises(TrainingDiverged, match="site 'large' in round 1"):
        run(Broken(), [vectors("large", 9)], MLP)


class Silent(Declares):
    """Its call declares nothing of what it returns."""

    def bounds(self, call: str, about: About) -> Bounds:
        return {}


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_no_method_declares_is_finite(value: float) -> None:
    features = Features({"a": torch.full((2, 3), value)})
    with pytest.raises(FedshiftError, match="'features'"):
        checks(Silent()).check("tell", "large", Told, told(features=features), {})


@pytest.mark.threat("claimed_samples")
def test_no_share_of_work_takes_more_than_twice_the_median_from_an_absent_site() -> None:
    where: Federation = federation(FedAvg(), domains(MLP, {"a": 9, "b": 9, "c": 9}), MLP, budget=100)
    where.forfeit("a", [0.25, 1.0])
    assert where.progress.used["a"] == 38
    where.forfeit("b", [0.25, 0.5])
    assert where.progress.used["b"] == 38


@pytest.mark.parametrize("name", [name for name in registry.names() if not registry.method_class(name).traits.pooled])
def test_what_a_method_declares_are_fields_of_its_replies(name: str) -> None:
    from fedshift.methods.base import calls_of

    method = registry.parse({"name": name})
    about = checks(registry.parse({"name": "fedavg"}), CNN)._about["large"]
    declared = {call: method.calls.owner(call).bounds(call, about) for call in calls_of(type(method)) if name != "copa"}
    for call, bounds in declared.items():
        assert set(bounds) <= set(calls_of(type(method.calls.owner(call)))[call].__dataclass_fields__)
