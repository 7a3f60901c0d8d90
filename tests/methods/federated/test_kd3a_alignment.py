"""KD3A's BatchNorm-MMD as a loss: equation (12) on worked numbers, its gradient, its place in the round, its work."""

from __future__ import annotations

import pytest
import torch
from kd3a_setting import BUDGET, kd3a, rounds_of
from torch import nn

from fedshift.methods.federated.kd3a import BatchNormAlignment
from fedshift.models.network import Network
from fedshift.weights import Weights

AFTER = ("features.hidden2.1.weight", "features.hidden2.1.bias", "classifier.weight", "classifier.bias")
"""What stands behind the input of the last BatchNorm layer, so that (12) does not depend on it."""
LOSS = {"batch_norm": "loss", "batch_norm_weight": 0.01}


class TwoLayers(Network):
    """x → w·x → BatchNorm → v·x → BatchNorm, one channel, so that a page of arithmetic says what comes out."""

    def __init__(self) -> None:
        features = nn.Sequential(
            nn.Linear(1, 1, bias=False), nn.BatchNorm1d(1, eps=1e-12), nn.Linear(1, 1, bias=False),
            nn.BatchNorm1d(1, eps=1e-12),
        )  # fmt: skip
        super().__init__(features, nn.Linear(1, 2), embedding_size=1, classes=2, stages={}, alignment_stages=())
        with torch.no_grad():
            features[0].weight.fill_(1.0)
            features[2].weight.fill_(2.0)


def model_of(*moments: tuple[float, float]) -> Weights:
    """The network with a mean and a variance for each of its two BatchNorm layers."""
    weights = dict(TwoLayers().state_dict())
    for layer, (mean, variance) in zip((1, 3), moments, strict=True):
        weights[f"features.{layer}.running_mean"] = torch.tensor([mean])
        weights[f"features.{layer}.running_var"] = torch.tensor([variance])
    return Weights(weights)


MODELS = {
    "north": model_of((0.0, 1.0), (0.0, 4.0)),
    "south": model_of((2.0, 3.0), (0.0, 4.0)),
    "target": model_of((3.0, 3.5), (1.0, 3.0)),
}
SHARES = {"north": 0.25, "south": 0.5, "target": 0.25}
BATCH = torch.tensor([[1.0], [2.0], [3.0], [6.0]])


def test_the_gradient_is_that_of_the_equation() -> None:
    """At weight w layer 1 has mean 3w and mean square 12.5 w²; what normalises after it does not see w."""

    def at(w: float) -> TwoLayers:
        network = TwoLayers().double()
        with torch.no_grad():
            network.features[0].weight.fill_(w)
        return network

    def value(w: float) -> float:
        return BatchNormAlignment(at(w), doubled, SHARES).objective(BATCH.double()).item()

    doubled = {
        site: Weights(
            {name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in model.items()}
        )
        for site, model in MODELS.items()
    }
    network = at(1.2)
    BatchNormAlignment(network, doubled, SHARES).objective(BATCH.double()).backward()
    weight = network.features[0].weight.grad
    # d/dw Σ α [(3w − m)² + (12.5w² − s)²] = Σ α [6(3w − m) + 50w(12.5w² − s)], s = 1, 7 and 12.5.
    moments = {"north": (0.0, 1.0), "south": (2.0, 7.0), "target": (3.0, 12.5)}
    w = 1.2
    by_hand = sum(
        SHARES[site] * (6 * (3 * w - mean) + 50 * w * (12.5 * w**2 - square))
        for site, (mean, square) in moments.items()
    )
    assert float(weight) == pytest.approx(by_hand, rel=1e-6)
    assert float(weight) == pytest.approx((value(w + 1e-6) - value(w - 1e-6)) / 2e-6, rel=1e-5)
    assert network.classifier.weight.grad is None or not network.classifier.weight.grad.any()


def test_it_is_trained_after_aggregation_and_leaves_the_vote_alone() -> None:
    """Distillation, shares and classifier are those of averaged statistics; all before the last BatchNorm moves."""
    (aligned,), _ = rounds_of(kd3a(**LOSS), rounds=1)
    (plain,), _ = rounds_of(kd3a(batch_norm="linear"), rounds=1)
    assert aligned.report == plain.report
    for name, tensor in aligned.weights.items():
        assert torch.equal(tensor, plain.weights[name]) == (name in AFTER), name
    # Without weight nothing is trained for: the weights stay and only the statistics see the target's batches.
    (still,), _ = rounds_of(kd3a(batch_norm="loss", batch_norm_weight=0.0), rounds=1, weight_decay=0.0)
    for name, tensor in still.weights.items():
        moved = "running" in name or "num_batches" in name
        assert torch.equal(tensor, plain.weights[name]) != moved, name


@pytest.mark.parametrize(("exchanges", "steps"), [(1.0, 2), (2.0, 1), (0.5, 2)])
def test_its_mini_batches_are_counted(exchanges: float, steps: int) -> None:
    method = kd3a(aggregations_per_epoch=exchanges, **LOSS)
    _, where = rounds_of(method, rounds=2, budget=BUDGET)
    assert where.progress.used["target"] == 2 * 2 * steps
    assert method.target_mini_batches(2, 2) == 2 * 2 * steps
    assert kd3a(aggregations_per_epoch=exchanges).target_mini_batches(2, 2) == 2 * steps
