"""Equations of one or two lines against what they say: loops, derivatives, all corners."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedshift.functional import averaging, feature_alignment, mixing, noisy_moments
from fedshift.methods.federated import fedproto, per_fedavg, stablefdg
from fedshift.methods.pooled import rsc

LABELS = st.lists(st.integers(0, 3), min_size=1, max_size=12).map(torch.tensor)


def draws(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@given(LABELS)
def test_next_of_class_goes_round_each_class_once(labels: torch.Tensor) -> None:
    following = stablefdg.next_of_class(labels)
    assert torch.equal(labels[following], labels)
    assert sorted(following.tolist()) == list(range(len(labels)))
    assert sum(int(row) <= at for at, row in enumerate(following)) == len(labels.unique())  # one end for each class


@given(LABELS)
def test_enough_repeated_rows_make_classes_equally_frequent(labels: torch.Tensor) -> None:
    counts = torch.bincount(labels)[labels.unique()]
    lacking = int((counts.max() - counts).sum())
    rows = stablefdg.levelling_rows(labels, lacking, draws())
    assert len({int(count) for count in torch.bincount(torch.cat([labels, labels[rows]])) if count}) == 1


def test_mixup_is_on_the_line_between() -> None:
    x, y = torch.randn(2, 4, 3, generator=draws()).double()
    torch.testing.assert_close(mixing.mixed_inputs(x, y, 0.3) - y, 0.3 * (x - y))
    assert torch.equal(mixing.mixed_inputs(x, y, 1.0), x)


def test_the_classifier_of_means_says_the_nearest_that_is_there() -> None:
    means, points = torch.randn(5, 3, generator=draws(1)), torch.randn(40, 3, generator=draws(2))
    present = torch.tensor([True, True, False, True, True])
    weight, bias = fedproto.nearest_mean_classifier(means, present)
    distances = torch.cdist(points, means).masked_fill(~present, math.inf)
    assert torch.equal((points @ weight.T + bias).argmax(1), distances.argmin(1))


def test_the_hessian_product_is_that_of_autograd() -> None:
    def loss(w: torch.Tensor) -> torch.Tensor:
        return (w**3).sum() + w.prod() + w[0].sin()

    w, v = torch.tensor([0.3, -1.2, 0.8]).double(), torch.tensor([1.0, 0.5, -2.0]).double()
    (product,) = per_fedavg.hessian_product(lambda at: loss(at["w"]), {"w": w}, {"w": v}).values()
    torch.testing.assert_close(product, torch.autograd.functional.hessian(loss, w) @ v, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("features", "muted_features", "share", "muted_samples"), [(0.5, 2, 0.5, 3), (0.25, 1, 1 / 3, 2)]
)
def test_challenged_features_one_sample_at_a_time(
    features: float, muted_features: int, share: float, muted_samples: int
) -> None:
    """RSC for a linear classifier, whose gradient is its weight: the features that count most, where it hurts most."""
    z, weights = torch.randn(6, 4, generator=draws(3)), torch.randn(3, 4, generator=draws(4))
    labels = torch.tensor([0, 1, 2, 0, 1, 2])
    muted = z.clone()
    for row, label in enumerate(labels):
        muted[row, weights[label].argsort()[-muted_features:]] = 0
    rows = torch.arange(6)
    right, without = ((x @ weights.T).softmax(1)[rows, labels] for x in (z, muted))
    hurt_most = (right - without).argsort()[-muted_samples:]
    wanted = z.clone()
    wanted[hurt_most] = muted[hurt_most]
    result = rsc.challenged_features(z, labels, lambda x: x @ weights.T, features, share)
    torch.testing.assert_close(result, wanted)


def test_one_row_changes_sums_by_no_more_and_by_as_much() -> None:
    rows = [(0.0, 0.0, 0.0), *((1.0, u, u * u) for u in np.linspace(-1, 1, 21))]  # the first: a value that is missing
    most = max(math.dist(first, second) for first, second in itertools.product(rows, rows))
    for columns in (1, 3):
        assert noisy_moments.change_of_one_row(columns) == math.sqrt(columns) * most


def test_unscaled_sums_are_those_of_the_values() -> None:
    values = np.random.default_rng(0).uniform((0, -5), (200, 5), (30, 2))
    low, high = np.array([0.0, -5.0]), np.array([200.0, 5.0])

    def sums(x: np.ndarray) -> np.ndarray:
        return np.stack([np.full(2, 30.0), x.sum(0), (x**2).sum(0)], axis=1)

    scaled = np.stack([noisy_moments.within(values[:, at], (low[at], high[at])) for at in range(2)], axis=1)
    np.testing.assert_allclose(noisy_moments.unscale(sums(scaled), low, high), sums(values))


def test_pieces_hold_every_number_once_and_in_order() -> None:
    pairs = [(torch.full((size,), float(size)), torch.arange(float(size))) for size in (3, 70000, 1, 200001, 5)]
    left, right = (torch.cat(side) for side in zip(*averaging.float64_pieces(pairs), strict=True))
    assert left.dtype == torch.float64
    assert torch.equal(left, torch.cat([first for first, _ in pairs]).double())
    assert torch.equal(right, torch.cat([second for _, second in pairs]).double())


def test_coral_is_a_quarter_of_the_mean_squared_difference_of_covariances() -> None:
    """Sun and Saenko: 1/(4 d²) ‖C_S − C_T‖²; with the means, DomainBed: both mean squared differences, no quarter."""
    source, target = (torch.randn(n, 3, generator=draws(n)).double() + n for n in (5, 7))
    gap = np.cov(source.numpy().T) - np.cov(target.numpy().T)
    means = source.mean(0) - target.mean(0)
    found = feature_alignment.coral_distance(source, target).item()
    assert math.isclose(found, (gap**2).sum() / (4 * 3**2), rel_tol=1e-9)
    both = feature_alignment.coral_distance(source, target, "mean_and_covariance").item()
    assert math.isclose(both, (gap**2).mean() + means.square().mean().item(), rel_tol=1e-9)
