"""Likelihood ratios of shadow models, with worked numbers."""

from __future__ import annotations

import math

import pytest
import torch

from fedshift.functional.membership import PER_SAMPLE, found_at, likelihood_ratios, scaled_confidence


def test_the_scaled_confidence_is_the_logit_of_the_right_class() -> None:
    """Also of three classes, and finite where the probability is rounded to 1."""
    logits = torch.tensor([[0.2, 1.5, -0.3], [1.0, 0.0, 2.0]])
    p = logits.double().softmax(1)[torch.arange(2), torch.tensor([1, 0])]
    found = scaled_confidence(logits, torch.tensor([1, 0]))
    assert torch.allclose(found, (p / (1 - p)).log())
    assert scaled_confidence(torch.tensor([[500.0, 0.0]]), torch.tensor([0])).item() == 500


def test_a_likelihood_ratio_by_hand() -> None:
    """Two samples share their variances, since there are few models: in 44/9 and out 68/9."""
    confidence = torch.tensor([[3.0, 9.0], [2.0, 5.0], [4.0, 1.0], [0.0, 3.0], [-2.0, 7.0], [1.0, 0.0]]).double()
    members = torch.tensor([[1, 0], [1, 1], [1, 0], [0, 1], [0, 0], [0, 1]]).bool()
    # Sample 0, for model 0: in from 2, 4 (mean 3, squares 2); out from 0, -2, 1 (mean -1/3, squares 14/3).
    # Sample 1, for model 0: in from 5, 3, 0 (mean 8/3, squares 38/3); out from 1, 7 (mean 4, squares 18).
    inside, outside = (2 + 38 / 3) / 3, (14 / 3 + 18) / 3
    logs = (math.log(outside) - math.log(inside)) / 2
    expected = [
        -((3 - 3) ** 2) / (2 * inside) + (3 + 1 / 3) ** 2 / (2 * outside) + logs,
        -((9 - 8 / 3) ** 2) / (2 * inside) + (9 - 4) ** 2 / (2 * outside) + logs,
    ]
    assert likelihood_ratios(confidence[:1], confidence[1:], members[1:])[0].tolist() == pytest.approx(expected)


def test_with_many_shadow_models_each_sample_has_its_own_variances() -> None:
    """Of two samples of equal means the one that spreads less tells more; nothing is told of one without shadows."""
    members = (torch.arange(PER_SAMPLE)[:, None].expand(-1, 3) % 2 == 0).clone()
    members[:, 2] = True
    wobble = torch.tensor([1.0, -1.0]).repeat_interleave(2).repeat(PER_SAMPLE // 4).double()
    shadows = members.double() * 4 + wobble[:, None] * torch.tensor([0.5, 2.0, 1.0])
    own = likelihood_ratios(shadows[:1], shadows, members)[0]
    assert own[0] > 4 * own[1] > 0
    assert own[2] == 0
    common = likelihood_ratios(shadows[:1], shadows[4:], members[4:])[0]
    assert common[0] < own[0]


def test_what_is_found_at_a_rate_is_counted_with_a_threshold_of_other_models() -> None:
    scores = torch.tensor([[5.0, 1.0, 0.0, 3.0], [2.0, 4.0, 6.0, 0.0]])
    members = torch.tensor([[True, False, False, True], [False, True, False, True]])
    # Model 0: above 6 nothing. Model 1: above 1, what the other's non-members reach: 4, 6 (a non-member), 2 (another).
    assert found_at(scores, members, 0.1) == (1, 2)
    # With half of two allowed the thresholds are 2 and 0.
    assert found_at(scores, members, 0.5) == (2 + 1, 0 + 2)
    assert found_at(scores, torch.ones_like(members), 0.5) == (0, 0)
