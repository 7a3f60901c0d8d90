"""FADA against its equations."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from tiny import CNN, LINEAR, MLP, NORMED, domains, evaluated, federation, run, setting, start_of, step_on, vectors
from torch import Tensor, nn

from fedshift.data.domain import Domain
from fedshift.federation.local.in_process import LocalFederation
from fedshift.federation.local.pool import WorkerPool
from fedshift.federation.randomness import derive_seed
from fedshift.federation.site import Site
from fedshift.methods.base import State
from fedshift.methods.federated.fada import FADA, Disentangler, add_update
from fedshift.models.network import Network
from fedshift.weights import Weights

ROLES: dict[str, Any] = {"a": "source", "b": "source", "t": "target"}


def short(**options: Any) -> FADA:
    return FADA(**{"steps_per_round": 3, "identifier_width": 5, **options})


def three(width: int = 8) -> list[Domain]:
    """Two sources and a target of one mini-batch each."""
    return [vectors("a", width), vectors("b", width), vectors("t", width)]


def everything(where: Any, site: str) -> tuple[Tensor, Tensor]:
    """A site's samples and labels, read past what the method may see."""
    inputs, labels, _ = next(iter(where._runners[site].site.data.all_batches(500)))
    return inputs, labels


def site_of(where: Any, name: str) -> Site:
    found: Site = where._runners[name].site
    return found


def begun(method: FADA, found: list[Domain] | None = None, network: Any = MLP, **options: Any) -> tuple[Any, State]:
    """A federation, two sources and a target, and its state before round 1."""
    found = three() if found is None else found
    options = {"momentum": 0.0, "budget": 60, "roles": ROLES, **options}
    where = federation(method, found, network, **options)
    return where, method.start(where, start_of(method, found, network))


def own_identifier(seed: int, site: str, width: int, hidden: int = 5) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(seed, "identifier", site))
        return nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, 1))


def descended(model: Network, loss: Tensor, rate: float = 0.05) -> dict[str, Tensor]:
    """The model's weights after one step of plain gradient descent."""
    slopes = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    after = {name: value.detach().clone() for name, value in model.state_dict().items()}
    for (name, _), slope in zip(model.named_parameters(), slopes, strict=True):
        if slope is not None:
            after[name] -= rate * slope
    return after


# The equations --------------------------------------------------------------------------------------------------------


def test_a_round_of_one_step_is_the_equation() -> None:
    """Both identifiers, both sources and the target, then equal weights (variant I), written out."""
    strength, rate = 0.7, 0.02
    method = short(variant="I", steps_per_round=1, adversarial_weight=strength, identifier_rate=rate)
    where, state = begun(method, seed=4)
    start = state.weights.clone()
    built = setting(method, three(), MLP, 3).build_network()
    samples = {site: everything(where, site) for site in ROLES}
    state = step_on(method, where, state)

    features = {site: built.features(inputs) for site, (inputs, _) in samples.items()}
    target_loss = torch.zeros(())
    sources, identifier_losses = [], []
    for site in ("a", "b"):
        judge = own_identifier(4, site, 6)
        optimizer = torch.optim.Adam(judge.parameters(), lr=rate)
        source, target = (torch.sigmoid(judge(features[name].detach())) for name in (site, "t"))
        loss = -source.log().mean() - (1 - target).log().mean()
        identifier_losses.append(loss.item())
        loss.backward()
        optimizer.step()
        fooled = -torch.sigmoid(judge(features[site])).log().mean()
        target_loss = target_loss - strength * torch.sigmoid(judge(features["t"])).log().mean()
        scores = built.classifier(features[site]).log_softmax(1)
        right = -scores[torch.arange(8), samples[site][1]].mean()
        assert state.report["losses"][site] == pytest.approx(right.item(), abs=1e-5)
        sources.append(descended(built, right + strength * fooled))
        known: Any = state.parts["identifiers"]
        for name, value in judge.state_dict().items():
            torch.testing.assert_close(known[site][name], value, atol=1e-6, rtol=1e-5)
    assert state.report["identifier_loss"] == pytest.approx(sum(identifier_losses) / 2, abs=1e-5)
    after = descended(built, target_loss)
    for name, found in state.weights.items():
        expected = (sources[0][name] + sources[1][name]) / 2 + after[name] - start[name]
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(
    ("gain", "before", "after", "expected"),
    [
        ("relative", 2.0, (1.0, 1.8, 2.4), (0.461488, 0.309344, 0.229168)),
        ("absolute", 2.0, (1.5, 1.9, 2.2), (0.461488, 0.309344, 0.229168)),
        ("relative", 2.0, (1.3, 1.3, 1.3), (1 / 3, 1 / 3, 1 / 3)),
        ("relative", 0.0, (1.0, 5.0, 0.0), (1 / 3, 1 / 3, 1 / 3)),
    ],
)
def test_attention_is_the_softmax_of_gains(
    gain: Any, before: float, after: tuple[float, ...], expected: tuple[float, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    told = iter((before, *after))
    monkeypatch.setattr(FADA, "_dispersion", lambda *_: next(told))
    state, _ = run(short(variant="II", gain=gain), rounds=1)
    assert list(state.report["aggregation_weights"].values()) == pytest.approx(expected, abs=1e-6)


def test_variant_one_weighs_all_alike_without_a_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FADA, "_dispersion", lambda *_: pytest.fail("gains were measured"))
    state, _ = run(short(variant="I"), rounds=1)
    assert list(state.report["aggregation_weights"].values()) == [1 / 3] * 3


def test_the_gap_statistic_is_that_of_k_means_clusters() -> None:
    """Three far groups, one pair apart by 2 in each: Σ_r 1/(2n_r) Σ_{i,j} ‖f_i − f_j‖² = 3 · 1/4 · 2 · 4 = 6."""
    method = short(variant="II")
    points = torch.tensor([[0.0, 0], [0, 2], [100, 0], [100, 2], [0, 100], [2, 100]])
    found = [Domain(name, points.numpy(), torch.tensor([0, 1, 2, 0, 1, 2]).numpy()) for name in ("a", "b", "t")]
    where, state = begun(method, found, LINEAR)
    assert method._dispersion(site_of(where, "t"), state.weights) == pytest.approx(6.0)


def test_the_aggregate_is_the_weighted_mean_and_the_targets_own_update(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Weights] = {}
    original = FADA.aggregate

    @functools.wraps(original)
    def spied(self: FADA, site: Site, gradients: Any, models: Any) -> Any:
        turn = site.scratch["turn"]
        reply = original(self, site, gradients, models)
        seen.update({**models, "own": site.weights_of(turn.model), "start": turn.start})
        return reply

    monkeypatch.setattr(FADA, "aggregate", spied)
    state, _ = run(short(variant="II", adversarial_weight=1.0), rounds=1)
    shares = state.report["aggregation_weights"]
    assert len(set(shares.values())) > 1
    for name, found in state.weights.items():
        mean = sum(share * seen[source][name] for source, share in shares.items())
        torch.testing.assert_close(found, mean + seen["own"][name] - seen["start"][name], atol=1e-6, rtol=1e-5)


def test_a_shift_is_an_update_of_parameters_alone() -> None:
    own, start, model = (
        Weights({"w": torch.tensor([value]), "bn.running_mean": torch.tensor([value])}) for value in (5.0, 1.0, 3.0)
    )
    found = add_update(own, start, model)
    assert (found["w"].item(), found["bn.running_mean"].item()) == (7.0, 5.0)


def test_batch_norm_statistics_are_those_of_the_targets_data() -> None:
    method = short(variant="II")
    state, where = run(method, network=NORMED)
    model = evaluated(method, state.weights, network=NORMED)
    inputs, _ = everything(where, "target")
    layer = model.features.get_submodule("hidden1")
    assert isinstance(layer, nn.Sequential)
    reached = layer[0](inputs)
    torch.testing.assert_close(layer[1].running_mean, reached.mean(0), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(layer[1].running_var, reached.var(0), atol=1e-5, rtol=1e-4)


def test_without_adversary_the_target_moves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """With weight 0, one source and one round, the result is that source's model."""
    found, roles = [vectors("a", 20), vectors("t", 20)], {"a": "source", "t": "target"}
    seen: list[Weights] = []
    original = FADA.finish

    @functools.wraps(original)
    def spied(self: FADA, site: Site, gradients: Any) -> Any:
        seen.append((update := original(self, site, gradients)).weights)
        return update

    monkeypatch.setattr(FADA, "finish", spied)
    method = short(variant="I", adversarial_weight=0.0)
    where, state = begun(method, found, roles=roles)
    state = step_on(method, where, state)
    for name, tensor in state.weights.items():
        torch.testing.assert_close(tensor, seen[0][name], atol=1e-7, rtol=1e-6)


# Disentangling --------------------------------------------------------------------------------------------------------


def test_disentangling_steps_are_the_equations() -> None:
    method = short(disentangling_weight=0.6)
    where, state = begun(method)
    site = site_of(where, "a")
    model = site.model(state.weights)
    parts = Disentangler(site, model, method.disentangling_weight)
    features, labels = torch.randn(8, 6, generator=torch.Generator().manual_seed(1)), everything(where, "a")[1]
    invariant = model.features[1]  # type: ignore[index]

    def information(p: Tensor, q: Tensor) -> Tensor:
        joint = parts.critic(torch.cat([p, q], 1))
        other = parts.critic(torch.cat([p, torch.cat([q[-1:], q[:-1]])], 1))
        return joint.mean() - other.exp().mean().log()

    judges = [*parts.identifier.parameters(), *parts.critic.parameters()]
    judged = [*invariant.parameters(), *parts.specific.parameters(), *parts.reconstruction.parameters()]
    p, q = invariant(features).detach(), parts.specific(features).detach()
    right = -parts.identifier(q).log_softmax(1)[torch.arange(8), labels].mean()
    slopes = torch.autograd.grad(right - information(p, q), judges)
    after = [value.detach() - 0.05 * slope for value, slope in zip(judges, slopes, strict=True)]
    before = [value.detach().clone() for value in judged]

    original = parts._disentangling
    losses: list[float] = []

    def between(given: Tensor) -> Tensor:
        for value, expected in zip(judges, after, strict=True):  # the judges went first
            torch.testing.assert_close(value.detach(), expected, atol=1e-6, rtol=1e-5)
        p, q = invariant(features), parts.specific(features)
        sure = parts.identifier(q).softmax(1)
        confusion = (sure * (sure + 1e-5).log()).sum(1).mean()
        gap = (parts.reconstruction(torch.cat([p, q], 1)) - features).square().mean()
        whole = 0.6 * (confusion + information(p, q).clamp(min=0) + gap)
        wanted.extend(torch.autograd.grad(whole, judged))
        losses.append(whole.item())
        return original(given)

    wanted: list[Tensor] = []
    parts._disentangling = between  # type: ignore[method-assign]
    parts.learn(features, labels)
    assert losses
    for value, old, slope in zip(judged, before, wanted, strict=True):
        torch.testing.assert_close(value.detach(), old - 0.05 * slope, atol=1e-6, rtol=1e-5)
    assert not torch.equal(judged[0].detach(), before[0])
    for value, expected in zip(judges, after, strict=True):  # and rested while the others were trained
        torch.testing.assert_close(value.detach(), expected, atol=1e-6, rtol=1e-5)


def test_the_private_parts_stay_at_their_source() -> None:
    method = short()
    state, where = run(method)
    assert isinstance(where, LocalFederation)
    private = {name: set(runner.site.memory) for name, runner in where._runners.items()}
    assert private == {"large": {"disentangler"}, "small": {"disentangler"}, "one": {"disentangler"}, "target": set()}
    known = site_of(where, "large").memory.weights("disentangler")
    assert not set(known) & set(state.weights)
    assert "features.invariant.0.weight" in state.weights


@pytest.mark.parametrize("variant", ["I", "II", "III"])
@pytest.mark.parametrize("network", [CNN, MLP], ids=["images", "vectors"])
def test_a_single_source(network: dict[str, object], variant: Any) -> None:
    state, _ = run(short(variant=variant), domains(network)[:1], network)
    assert list(state.report["aggregation_weights"].values()) == [1.0]
    state.weights.check_finite(variant)


def test_budgets_are_used_up_whoever_ends_first() -> None:
    """Sites usually have equal budgets. Where they do not, those with some left go on; none trains too much."""
    budget = {"large": 7, "small": 4, "one": 2, "target": 5}
    method = short()
    where = federation(method, budget=budget, rounds=3)
    state = method.start(where, start_of(method))
    while not where.is_exhausted():
        state = step_on(method, where, state)
    assert where.progress.used == budget
    assert state.round == 3
    state.weights.check_finite("a run of unequal budgets")


def test_nothing_of_a_round_is_kept_for_the_next() -> None:
    _, where = run(short())
    assert isinstance(where, LocalFederation)
    assert all("turn" not in runner.site.scratch for runner in where._runners.values())


@pytest.mark.slow
def test_same_bits_in_one_process_and_in_two(pool: WorkerPool) -> None:
    options: dict[str, Any] = {
        "network": NORMED,
        "momentum": 0.9,
        "reset_optimizer_each_round": False,
        "budget": {"large": 5, "small": 4, "one": 6, "target": 5},
    }
    here, _ = run(short(), **options)
    there, _ = run(short(), pool=pool, **options)
    assert here.weights == there.weights
    assert here.report == there.report
    assert dict(here.parts) == dict(there.parts)


def test_it_adapts_to_a_shifted_target() -> None:
    method = short(steps_per_round=10)
    state, where = run(method, network=NORMED, rounds=6, lr=0.1, momentum=0.9)
    model = evaluated(method, state.weights, network=NORMED)
    inputs, labels = everything(where, "target")
    with torch.no_grad():
        assert (model(inputs).argmax(1) == labels).float().mean() > 0.9
