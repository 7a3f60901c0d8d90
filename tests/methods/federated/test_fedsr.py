"""FedSR, FedL2R and FedCMI against their equations, step by step, and what is shared, private and averaged."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny import MLP, evaluated, federation, run, start_of, vectors
from torch import Tensor
from torch.distributions import Normal, kl_divergence

from fedshift.federation.local.in_process import LocalFederation
from fedshift.federation.randomness import generator
from fedshift.methods.base import Method
from fedshift.methods.federated.fedavg import FedAvg
from fedshift.methods.federated.fedsr import FedCMI, FedL2R, FedSR
from fedshift.weights import Weights


def one_round(method: Method, steps: int, **options: Any) -> Weights:
    """One site of 8 samples, one round of plain gradient descent."""
    options = {"momentum": 0.0, "lr": 0.05, "batch_size": 8, **options}
    return run(method, [vectors("alone", 8)], MLP, rounds=1, **options)[0].weights


def by_hand(method: Any, steps: int, *, deterministic: bool) -> dict[str, Tensor]:
    """The same with plain tensors: mlp 5-8-6, a code of Z numbers, a linear classifier."""
    found = [vectors("alone", 8)]
    tensors = {name: value.clone() for name, value in start_of(method, found, MLP).items()}
    where = federation(method, found, MLP, rounds=1, batch_size=8)
    assert isinstance(where, LocalFederation)
    site = where._runners["alone"].site
    site.begin(type(site.envelope)(1, 1, 0.0, 100))
    noise = generator(3, "alone", 1, "codes")
    for batch in site.batches(steps=steps):
        values = {name: value.clone().requires_grad_() for name, value in tensors.items()}
        hidden = batch.inputs
        for layer in ("hidden1", "hidden2"):
            place = f"features.backbone.{layer}.0"
            hidden = (hidden @ values[f"{place}.weight"].T + values[f"{place}.bias"]).relu()
        out = hidden @ values["features.encoder.linear.weight"].T + values["features.encoder.linear.bias"]
        loss = torch.zeros(())
        if deterministic:
            codes = out
        else:
            half = out.shape[1] // 2
            mean, scale = out[:, :half], (1 + out[:, half:].exp()).log()
            codes = mean + scale * torch.randn(mean.shape, generator=noise)
            labels = batch.targets
            reference = Normal(
                values["features.encoder.references.means"][labels],
                F.softplus(values["features.encoder.references.raw_scales"][labels]),
            )
            divergence = kl_divergence(Normal(mean, scale), reference).sum(1).mean()
            loss = loss + getattr(method, "cmi_weight", 0) * divergence
        loss = loss + getattr(method, "l2r_weight", 0) * sum((code**2).sum() for code in codes) / len(codes)
        logits = codes @ values["classifier.weight"].T + values["classifier.bias"]
        loss = loss - logits.log_softmax(1)[torch.arange(8), batch.targets].mean()
        slopes = torch.autograd.grad(loss, list(values.values()))
        tensors = {name: values[name].detach() - 0.05 * slope for name, slope in zip(values, slopes, strict=True)}
    return tensors


@pytest.mark.parametrize(
    ("method", "deterministic"),
    [
        (FedSR(steps_per_round=3, l2r_weight=0.2, cmi_weight=0.3), False),
        (FedCMI(steps_per_round=3, cmi_weight=0.3, representation=4), False),
        (FedL2R(steps_per_round=3, l2r_weight=0.2, representation=4), True),
    ],
    ids=["fedsr", "fedcmi", "fedl2r"],
)
def test_a_round_is_the_equations(method: Method, deterministic: bool) -> None:
    found, expected = one_round(method, 3), by_hand(method, 3, deterministic=deterministic)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, atol=2e-6, rtol=1e-5, msg=lambda text, name=name: name + text)
        assert not torch.equal(found[name], start_of(method, [vectors("alone", 8)], MLP)[name]), name


def test_only_l2r_remains_without_the_divergence_and_the_sampling() -> None:
    """FedL2R without its norm is FedAvg with one more layer."""
    options: dict[str, Any] = {"network": MLP, "rounds": 2}
    parts = run(FedL2R(l2r_weight=0, steps_per_round=None, weighting="samples"), **options)[0]

    class Deeper(FedAvg):
        def adapt_network(self, network: Any, sources: int) -> Any:
            return FedL2R().adapt_network(network, sources)

    assert parts.weights == run(Deeper(), **options)[0].weights


def test_the_parts_have_no_option_of_the_other() -> None:
    assert set(FedSR.model_fields) == set(FedL2R.model_fields) | set(FedCMI.model_fields)
    assert set(FedL2R.model_fields) & {"cmi_weight", "share_reference", "learned_factor", "samples"} == set()
    assert set(FedCMI.model_fields) & {"l2r_weight", "norm"} == set()


def test_a_common_reference_travels_and_a_private_one_stays() -> None:
    sizes = {}
    for shared in (True, False):
        method = FedCMI(share_reference=shared, representation=7, cmi_weight=0.5)
        state, where = run(method)
        assert isinstance(where, LocalFederation)
        sizes[shared] = start_of(method).nbytes
        names = {name for name in state.weights if "references" in name}
        kept = {name: runner.site.memory.get("references") for name, runner in where._runners.items()}
        if shared:
            assert names == {f"features.encoder.references.{part}" for part in ("means", "raw_scales")}
            assert set(kept.values()) == {None}
        else:
            assert not names
            large, small = (kept[site]["means"] for site in ("large", "small"))  # type: ignore[index]
            assert not torch.equal(large, small)  # each its own
            assert large.shape == (3, 7)
    assert sizes[True] - sizes[False] == 4 * 2 * 3 * 7  # 4·2·C·Z


def test_the_learned_factor_is_trained() -> None:
    state, _ = run(FedCMI(learned_factor=True, cmi_weight=0.5))
    assert state.weights["features.encoder.references.factor"].item() != 1.0


def test_a_prediction_is_the_mean_over_samples_and_depends_on_nothing_else() -> None:
    method = FedSR(samples=6)
    network = evaluated(method, start_of(method))
    inputs = torch.rand(5, 1, 12, 12)
    with torch.no_grad():
        torch.rand(3)
        scores = network(inputs)
        torch.testing.assert_close(scores.exp().sum(1), torch.ones(5))
        assert torch.equal(scores, network(inputs))
        for row in range(5):  # alone as in a batch
            torch.testing.assert_close(network(inputs[row : row + 1])[0], scores[row])
        out = network.features.encoder.linear(network.features.backbone(inputs))  # type: ignore[operator, union-attr]
        mean, scale = out[:, :6], F.softplus(out[:, 6:])
        draws = generator("prediction")
        each = []
        for _ in range(6):
            z = mean + scale * torch.randn(1, 6, generator=draws)
            each.append((z @ network.classifier.weight.T + network.classifier.bias).softmax(1))  # type: ignore[union-attr, operator]
    torch.testing.assert_close(scores.exp(), sum(each) / 6)
    assert not torch.allclose(scores, FedSR(samples=1).evaluated_network(network, 3)(inputs))


def test_the_deterministic_variant_has_no_samples() -> None:
    method = FedL2R()
    network = evaluated(method, start_of(method))
    inputs = torch.rand(3, 1, 12, 12)
    with torch.no_grad():
        assert torch.equal(network(inputs), network(inputs))
        assert torch.equal(network(inputs), network.classifier(network.features(inputs)))
