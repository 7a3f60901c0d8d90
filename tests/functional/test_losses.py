"""Shared losses: worked numbers, PyTorch's own label smoothing, gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fedshift.errors import UserError
from fedshift.functional.losses import entropy, entropy_of_logits, proximal_penalty, smoothed_cross_entropy
from fedshift.methods.federated.fedlc import calibrated_scores
from fedshift.methods.federated.fedrod import balanced_scores


@given(st.integers(2, 8), st.integers(1, 9), st.floats(0, 1), st.integers(0, 99))
@settings(max_examples=50)
def test_smoothing_against_torch_and_soft_targets(classes: int, n: int, smoothing: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(n, classes, generator=generator).double() * 3
    labels = torch.randint(classes, (n,), generator=generator)
    expected = F.cross_entropy(logits, labels, label_smoothing=smoothing)
    torch.testing.assert_close(smoothed_cross_entropy(logits, labels, smoothing), expected)
    targets = torch.full_like(logits, smoothing / (classes - 1)).scatter_(1, labels[:, None], 1 - smoothing)
    expected = F.cross_entropy(logits, targets)
    torch.testing.assert_close(smoothed_cross_entropy(logits, labels, smoothing, "others"), expected)


def test_proximal_term_of_a_module_leaves_buffers_alone() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    reference = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model(torch.randn(6, 3))
    assert proximal_penalty(model.named_parameters(), reference, 1.0).item() == 0
    with torch.no_grad():
        model[0].bias.add_(2)
    assert proximal_penalty(model.named_parameters(), reference, 0.5).item() == pytest.approx(0.25 * 4 * 4)
    with pytest.raises(UserError, match=r"0\.weight"):
        proximal_penalty(model.named_parameters(), {}, 1.0)
    with pytest.raises(UserError, match="parameter"):
        proximal_penalty([], reference, 1.0)


def test_worked_numbers_of_entropy() -> None:
    rows = torch.tensor([[0.9, 0.1], [0.2, 0.8]]).double()
    assert entropy(rows).mean().item() == pytest.approx(0.412723, abs=1e-6)
    assert entropy(rows.mean(0)).item() == pytest.approx(0.688119, abs=1e-6)
    assert entropy(rows, 0.0)[0].item() == pytest.approx(torch.distributions.Categorical(rows[0]).entropy().item())


def test_entropy_of_logits_is_that_of_the_definition_and_finite_at_the_end() -> None:
    rows = torch.tensor([[0.7, 0.2, 0.1], [0.25, 0.25, 0.5]], dtype=torch.float64)
    found = entropy_of_logits(rows.log() + 3)
    # −(0.7 ln 0.7 + 0.2 ln 0.2 + 0.1 ln 0.1) and 1.5 ln 2
    assert found.tolist() == pytest.approx([0.8018185525, 1.0397207708], abs=1e-9)
    certain = torch.tensor([[300.0, 0.0, -300.0]], requires_grad=True)
    entropy_of_logits(certain).sum().backward()  # type: ignore[no-untyped-call]
    assert certain.grad is not None
    assert certain.grad.tolist() == [[0.0, 0.0, 0.0]]


def test_scores_of_rare_classes() -> None:
    """Balanced softmax (Ren et al., equation 3): n_y eˢʸ / Σ n_c eˢᶜ. FedLC (equation 8): s_c − τ n_c^(−1/4)."""
    scores, counts = torch.tensor([[0.4, -1.0, 2.0]]).double(), torch.tensor([16, 1, 81])
    weighed = counts * scores.exp()
    torch.testing.assert_close(balanced_scores(scores, counts).softmax(1), weighed / weighed.sum())
    lowered = scores - 0.5 * torch.tensor([1 / 2, 1, 1 / 3]).double()
    torch.testing.assert_close(calibrated_scores(scores, counts, 0.5), lowered)
