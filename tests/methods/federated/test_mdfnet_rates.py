"""MDFNet's learning rate at every site, what stays there from round to round, its masks and its reconstruction."""

from __future__ import annotations

import pytest
import torch

from fedshift.methods.masks import Mask


def test_a_hard_mask_is_open_from_even_odds_on() -> None:
    mask = Mask(5, hard=True).eval()
    mask.logits.data = torch.tensor([-2.0, -1e-6, 0.0, 0.3, 2.0])
    assert mask(torch.ones(2, 5)).tolist() == [[0, 0, 1, 1, 1]] * 2
    soft = Mask(5, hard=False).eval()
    soft.logits.data = mask.logits.data
    assert soft(torch.ones(1, 5))[0].tolist() == pytest.approx([0.119203, 0.5, 0.5, 0.574443, 0.880797], abs=1e-5)
