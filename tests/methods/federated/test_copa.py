"""COPA against its equations: what is averaged, what is collected, what is lent and stays frozen; adaptation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lost import site_of
from tiny import (
    CLASSES,
    MLP,
    NORMED,
    bytes_of,
    domains,
    evaluated,
    federation,
    images,
    run,
    setting,
    start_of,
    step_on,
    vectors,
)
from torch import Tensor, nn

from fedshift.federation.federation import Federation
from fedshift.methods.federated import copa
from fedshift.methods.federated.copa import COPA
from fedshift.methods.federated.fedavg import FedAvg
from fedshift.models import registry as models
from fedshift.models.network import Network
from fedshift.models.normalisation import BatchInstanceNorm2d
from fedshift.weights import Weights

SIZES = {"b": 8, "a": 6, "c": 7}


def short(**options: Any) -> COPA:
    return COPA(**{"local_epochs": 1, **options})


def everything(where: Federation, name: str) -> tuple[Tensor, Tensor]:
    """A site's samples and labels, read past what the method may see."""
    inputs, labels, _ = next(iter(site_of(where, name).data.all_batches(500)))
    return inputs, labels


def mlp(values: dict[str, Tensor], inputs: Tensor) -> Tensor:
    """Features of the tiny mlp, written out."""
    for layer in ("hidden1", "hidden2"):
        inputs = (inputs @ values[f"features.{layer}.0.weight"].T + values[f"features.{layer}.0.bias"]).relu()
    return inputs


def head(values: dict[str, Tensor], number: int, features: Tensor) -> Tensor:
    return features @ values[f"classifier.heads.{number}.weight"].T + values[f"classifier.heads.{number}.bias"]


def test_one_site_alone_is_fedavg() -> None:
    options: dict[str, Any] = {"found": [vectors("alone", 21)], "network": MLP, "rounds": 3, "momentum": 0.9}
    alone, plain = run(short(local_epochs=2), **options)[0], run(FedAvg(local_epochs=2), **options)[0]
    renamed = {name.replace("classifier.heads.0", "classifier"): tensor for name, tensor in alone.weights.items()}
    assert plain.weights == Weights(renamed)


def test_the_answer_is_the_mean_of_all_classifiers() -> None:
    method, found = short(), domains(MLP, SIZES)
    state, where = run(method, found, MLP)
    inputs, _ = everything(where, "a")
    values = dict(state.weights)
    expected = sum(head(values, k, mlp(values, inputs)).softmax(1) for k in range(3)) / 3
    scores = evaluated(method, state.weights, found, MLP)(inputs)
    torch.testing.assert_close(scores.softmax(1), expected)


def test_a_site_changes_its_own_classifier_only() -> None:
    method, found = short(), domains(MLP, SIZES)
    where = federation(method, found, MLP, budget={"a": 9, "b": 0, "c": 0})
    start = start_of(method, found, MLP)
    state = step_on(method, where, method.start(where, start))
    for number, changed in ((0, True), (1, False), (2, False)):
        name = f"classifier.heads.{number}.weight"
        assert torch.equal(state.weights[name], start[name]) != changed


def adapted(method: COPA, rounds: int = 1, **options: Any) -> tuple[Any, Federation]:
    return run(method, domains(MLP, SIZES), MLP, rounds=rounds, **{"momentum": 0.0, **options})


def test_an_adapted_round_is_the_equations() -> None:
    """The target trains the mean of the sources' features on what all classifiers are sure of, and joins the mean."""
    target = federation(short(adaptation=True), domains(MLP, SIZES), MLP)
    inputs, _ = everything(target, "target")
    sources, _ = adapted(short(local_epochs=2), lr=0.2, batch_size=14)  # the same without a target
    values = {name: tensor.clone() for name, tensor in sources.weights.items()}
    answer = sum(head(values, k, mlp(values, inputs)).softmax(1) for k in range(3)) / 3
    best = answer.amax(1).sort().values  # type: ignore[union-attr]
    gap = (best[1:] - best[:-1])[4:10].argmax().item() + 4
    threshold = (best[gap : gap + 2].sum() / 2).item()  # between two samples, far from both
    state, _ = adapted(short(adaptation=True, threshold=threshold, local_epochs=2), lr=0.2, batch_size=14)
    losses = []
    for _ in range(2):
        own = {name: tensor.clone().requires_grad_(name.startswith("features")) for name, tensor in values.items()}
        p = sum(head(own, k, mlp(own, inputs)).softmax(1) for k in range(3)) / 3
        best, labels = p.detach().max(1)  # type: ignore[union-attr]
        sure = best >= threshold
        assert 0 < sure.sum() < len(sure)
        loss = -(sure * (p[torch.arange(len(labels)), labels] + 1e-5).log()).mean()  # type: ignore[index]
        kept = [name for name in own if name.startswith("features")]
        for name, slope in zip(kept, torch.autograd.grad(loss, [own[name] for name in kept]), strict=True):
            values[name] = values[name] - 0.2 * slope
        losses.append(loss.item())
    assert state.report["losses"]["target"] == pytest.approx(sum(losses) / 2, abs=1e-5)
    share = 14 / (14 + sum(SIZES.values()))
    assert state.report["aggregation_weights"]["target"] == pytest.approx(share)
    for name, tensor in state.weights.items():
        expected = (1 - share) * sources.weights[name] + share * values[name] if "features" in name else values[name]
        torch.testing.assert_close(tensor, expected, atol=3e-6, rtol=1e-5)


def test_without_a_sure_answer_the_target_changes_nothing() -> None:
    state, _ = adapted(short(adaptation=True, threshold=1.0))
    plain, _ = adapted(short())
    for name, tensor in state.weights.items():
        torch.testing.assert_close(tensor, plain.weights[name], atol=1e-6, rtol=1e-5)
    assert state.report["confident"] == 0
    assert state.report["losses"]["target"] == 0


def test_images_are_seen_in_a_strong_view() -> None:
    options: dict[str, Any] = {"found": [images("a", 9), images("b", 9)], "rounds": 1}
    method = short(adaptation=True, threshold=0.3)
    assert (
        run(method, **options)[0].weights
        != run(short(adaptation=True, threshold=0.3, strong="none"), **options)[0].weights
    )


def test_pseudo_labels_are_of_the_weak_view(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is seen in training says nothing of how sure the ensemble is: here nothing is seen."""
    options: dict[str, Any] = {"found": [images("a", 9), images("b", 9)], "rounds": 1}
    strict = [0.36 + 0.01 * step for step in range(20)]
    plain = [run(short(adaptation=True, threshold=t, strong="none", steps_per_round=1), **options)[0] for t in strict]
    sure = [state.report["confident"] for state in plain]
    which = next(number for number, share in enumerate(sure) if 0 < share < 1)
    monkeypatch.setattr(copa, "strong_view", lambda inputs, *_: torch.zeros_like(inputs))
    blind = run(short(adaptation=True, threshold=strict[which], steps_per_round=1), **options)[0]
    assert blind.report["confident"] == sure[which]
    assert blind.weights != plain[which].weights


def test_the_labels_of_the_target_change_nothing_and_its_bytes_are_foretold() -> None:
    method = short(adaptation=True, threshold=0.3)
    where = federation(method, domains(NORMED, SIZES), NORMED)
    state = method.start(where, start_of(method, domains(NORMED, SIZES), NORMED))
    with pytest.MonkeyPatch.context() as patch:
        data = site_of(where, "target").data
        patch.setattr(data, "labels", torch.full_like(data.labels, CLASSES - 1))
        changed = step_on(method, where, state)
    again = federation(method, domains(NORMED, SIZES), NORMED)
    assert step_on(method, again, method.start(again, state.weights)).weights == changed.weights
    foretold = bytes_of(method, where, NORMED, rounds=1, found=domains(NORMED, SIZES))
    assert sum(where.ledger.total["up"].values()) == foretold.up
    assert sum(where.ledger.total["down"].values()) == foretold.down
    assert method.target_mini_batches(5, 2) == 10
    assert short().target_mini_batches(5, 2) == 0


def test_options() -> None:
    plain = run(short())[0].weights
    assert run(short(local_epochs=2))[0].weights != plain
    assert run(short(weighting="uniform"))[0].weights != plain
    stepped, where = run(short(steps_per_round=3))
    assert stepped.weights != plain
    assert where.progress.used == {"large": 6, "small": 6, "one": 6}
    one, other = (adapted(short(adaptation=True, threshold=t))[0].weights for t in (0.0, 1.0))
    assert one != other


def resnet() -> Network:
    return models.build(models.parse({"name": "resnet18"}), (1, 32, 32), CLASSES, 0)


def test_the_gate_moves_and_stays_within_its_bounds() -> None:
    """It starts at 1, where a clamp has no gradient: one step without weight decay moves it (Nam and Kim, section 3.2:
    the parameter is clipped after the step)."""
    norm = BatchInstanceNorm2d(nn.BatchNorm2d(4))
    optimizer = torch.optim.SGD(norm.parameters(), lr=0.05)
    inputs = torch.randn(8, 4, 5, 5, generator=torch.Generator().manual_seed(0))
    towards = torch.randn(8, 4, 5, 5, generator=torch.Generator().manual_seed(1))
    for _ in range(20):
        optimizer.zero_grad()
        (norm(inputs) * towards).sum().backward()
        assert norm.gate.grad is not None
        assert bool((norm.gate.grad != 0).all()), "also at the bounds"
        optimizer.step()
    norm(inputs)
    assert bool(((norm.gate >= 0) & (norm.gate <= 1)).all())
    assert 0 < int((norm.gate < 1).sum()) < 4, "two of these channels gain from InstanceNorm"


def test_hybrid_normalisation() -> None:
    """At first it is BatchNorm; with the gate shut every image is normalised by itself."""
    network, plain = COPA().adapt_network(resnet(), 3), short(setting="batch_norm").adapt_network(resnet(), 3)
    norms = [module for module in network.modules() if isinstance(module, BatchInstanceNorm2d)]
    assert len(norms) == sum(type(module) is nn.BatchNorm2d for module in plain.modules()) == 20
    inputs = torch.rand(4, 1, 32, 32)
    torch.testing.assert_close(network(inputs), plain(inputs))
    norm, maps = norms[0], torch.rand(3, 64, 4, 4)
    with torch.no_grad():
        norm.gate.zero_()
        norm.weight.fill_(2.0)
        norm.bias.fill_(0.5)
    centred = maps - maps.mean((2, 3), keepdim=True)
    expected = 2 * centred / (maps.var((2, 3), unbiased=False, keepdim=True) + norm.eps).sqrt() + 0.5
    torch.testing.assert_close(norm.eval()(maps), expected, atol=1e-5, rtol=1e-5)
    with torch.no_grad():
        norm.gate.fill_(0.25)
        whole = (
            2 * (maps - norm.running_mean.view(1, -1, 1, 1)) / (norm.running_var.view(1, -1, 1, 1) + norm.eps).sqrt()
        )  # type: ignore[union-attr]
    torch.testing.assert_close(norm(maps), 0.25 * (whole + 0.5) + 0.75 * expected, atol=1e-5, rtol=1e-5)
    norm.gate.data.fill_(-3.0)  # training may push it out of [0, 1]
    torch.testing.assert_close(norm(maps), expected, atol=1e-5, rtol=1e-5)


def test_a_network_without_batch_norm_of_images_stays_as_it_is() -> None:
    plain, asked = (
        setting(method, domains(NORMED), NORMED).build_network() for method in (short(setting="batch_norm"), short())
    )
    assert Weights(plain.state_dict()) == Weights(asked.state_dict())


def test_lent_classifiers_stand_still_within_a_round() -> None:
    """Three steps on the full batch: with a foreign classifier that moves, the second step would be another."""
    method, found = short(local_epochs=3), domains(MLP, {"b": 8, "a": 8})
    where = federation(method, found, MLP, momentum=0.0, lr=0.4)
    start = method.start(where, start_of(method, found, MLP))
    state = step_on(method, where, start)
    trained = {}
    for number, name in enumerate("ab"):
        inputs, labels = everything(where, name)
        values = {key: tensor.clone() for key, tensor in start.weights.items()}
        moving = [key for key in values if key.startswith(("features", f"classifier.heads.{number}."))]
        losses = []
        for _ in range(3):
            values = {key: tensor.detach().requires_grad_(key in moving) for key, tensor in values.items()}
            found_features = mlp(values, inputs)
            loss = sum(-head(values, k, found_features).log_softmax(1)[torch.arange(8), labels].mean() for k in (0, 1))
            losses.append(loss.item())  # type: ignore[union-attr]
            slopes = torch.autograd.grad(loss, [values[key] for key in moving])  # type: ignore[arg-type]
            values |= {key: values[key] - 0.4 * slope for key, slope in zip(moving, slopes, strict=True)}
        assert state.report["losses"][name] == pytest.approx(sum(losses) / 3, abs=1e-5)
        trained[name] = {key: tensor.detach() for key, tensor in values.items()}
    for key, tensor in state.weights.items():
        parts = [trained[name][key] for name in "ab"]
        expected = sum(parts) / 2 if key.startswith("features") else parts[int(key.split(".")[2])]  # type: ignore[operator]
        torch.testing.assert_close(tensor, expected, atol=3e-6, rtol=1e-5)


def test_classifiers_begin_differently_and_by_the_seed() -> None:
    """Each source's own, drawn like the network's: no two alike, and others for another seed of the experiment."""
    found = domains(MLP, {"b": 8, "a": 8, "c": 8})
    begun = [start_of(short(), found, MLP, seed) for seed in (3, 3, 4)]
    heads = [[start[f"classifier.heads.{number}.weight"] for number in range(3)] for start in begun]
    for first, second in ((0, 1), (0, 2), (1, 2)):
        assert not torch.equal(heads[0][first], heads[0][second])
    for number in range(3):
        assert torch.equal(heads[0][number], heads[1][number])
        assert not torch.equal(heads[0][number], heads[2][number])
        # As PyTorch draws them: uniform within 1/√6.
        assert heads[0][number].abs().max() <= 6**-0.5
