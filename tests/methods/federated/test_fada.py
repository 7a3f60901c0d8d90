"""FADA against its equations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lost import site_of
from tiny import LINEAR, MLP, NORMED, evaluated, federation, run, setting, start_of, step_on, vectors
from torch import Tensor, nn

from fedshift.data.domain import Domain
from fedshift.federation.local.in_process import LocalFederation
from fedshift.federation.randomness import derive_seed
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


def test_variant_one_weighs_all_alike_without_a_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FADA, "_dispersion", lambda *_: pytest.fail("gains were measured"))
    state, _ = run(short(variant="I"), rounds=1)
    assert list(state.report["aggregation_weights"].values()) == [1 / 3] * 3


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_disentangling_losses_are_the_equations(sign: float) -> None:
    """Entropy is raised, and information between the parts lowered, but not below 0; the judges do the opposite."""
    method = short()
    where, _ = begun(method)
    model = setting(method, three(), MLP, 3).build_network()
    parts = Disentangler(site_of(where, "a"), model, 0.3)
    with torch.no_grad():
        parts.critic[2].weight.mul_(sign * 20)
    inputs, labels = everything(where, "a")
    features = model.features[0](inputs)  # type: ignore[index]
    invariant, specific = parts.invariant(features), parts.specific(features)
    joint, other = (
        parts.critic(torch.cat([invariant, part], 1)) for part in (specific, torch.cat([specific[-1:], specific[:-1]]))
    )
    information = joint.mean() - other.exp().mean().log()  # MINE: Belghazi et al., ICML 2018
    known = parts.identifier(specific).log_softmax(1)
    rebuilt = parts.reconstruction(torch.cat([invariant, specific], 1))
    wanted = (known.exp() * known).sum(1).mean() + information.clamp(min=0) + ((rebuilt - features) ** 2).mean()
    torch.testing.assert_close(parts._disentangling(features), 0.3 * wanted)
    judged = -known[range(len(labels)), labels].mean() - information
    torch.testing.assert_close(parts._judging(features, labels), judged)


def test_the_gap_statistic_is_that_of_k_means_clusters() -> None:
    """Three far groups, one pair apart by 2 in each: Σ_r 1/(2n_r) Σ_{i,j} ‖f_i − f_j‖² = 3 · 1/4 · 2 · 4 = 6."""
    method = short(variant="II")
    points = torch.tensor([[0.0, 0], [0, 2], [100, 0], [100, 2], [0, 100], [2, 100]])
    found = [Domain(name, points.numpy(), torch.tensor([0, 1, 2, 0, 1, 2]).numpy()) for name in ("a", "b", "t")]
    where, state = begun(method, found, LINEAR)
    assert method._dispersion(site_of(where, "t"), state.weights) == pytest.approx(6.0)


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


def test_the_private_parts_stay_at_their_source() -> None:
    method = short()
    state, where = run(method)
    assert isinstance(where, LocalFederation)
    private = {name: set(runner.site.memory) for name, runner in where._runners.items()}
    assert private == {"large": {"disentangler"}, "small": {"disentangler"}, "one": {"disentangler"}, "target": set()}
    known = site_of(where, "large").memory.weights("disentangler")
    assert not set(known) & set(state.weights)
    assert "features.invariant.0.weight" in state.weights


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
