"""When unlabelled sites of MDFNet's practical setting come in, and when their pseudo-labels look collapsed."""

from __future__ import annotations

import math

import pytest
import torch

from fedshift.errors import UserError
from fedshift.functional.losses import entropy_of_logits
from fedshift.functional.mdfnet_schedule import is_ready, names_few_classes, progress_since


def test_the_gate_compares_with_guessing() -> None:
    """ln 10 = 2.302585, a quarter of it 0.575646; for 2 classes 0.173287."""
    assert is_ready(0.5756, 10, 0.25)
    assert not is_ready(0.5757, 10, 0.25)
    assert is_ready(0.1732, 2, 0.25)
    assert not is_ready(0.1733, 2, 0.25)
    assert not is_ready(math.log(7), 7, 1.0)
    with pytest.raises(UserError, match="two classes"):
        is_ready(0.1, 1, 0.25)


def test_progress_begins_where_the_gate_opened() -> None:
    assert [progress_since(0, done, 5) for done in range(5)] == [0, 0.25, 0.5, 0.75, 1]
    assert [progress_since(3, done, 8) for done in (3, 4, 7)] == [0, 0.25, 1]
    assert progress_since(0, 7, 5) == 1  # a run that goes on beyond its plan
    assert progress_since(4, 4, 5) == 0  # one round is left
    assert progress_since(0, 0, 1) == 0


def test_half_of_the_classes_is_few() -> None:
    assert [named for named in range(1, 8) if names_few_classes(named, 7)] == [1, 2, 3]
    assert [named for named in range(1, 5) if names_few_classes(named, 4)] == [1, 2]


def test_entropy_of_logits_is_that_of_the_definition_and_finite_at_the_end() -> None:
    rows = torch.tensor([[0.7, 0.2, 0.1], [0.25, 0.25, 0.5]], dtype=torch.float64)
    found = entropy_of_logits(rows.log() + 3)
    # −(0.7 ln 0.7 + 0.2 ln 0.2 + 0.1 ln 0.1) and 1.5 ln 2
    assert found.tolist() == pytest.approx([0.8018185525, 1.0397207708], abs=1e-9)
    certain = torch.tensor([[300.0, 0.0, -300.0]], requires_grad=True)
    entropy_of_logits(certain).sum().backward()  # type: ignore[no-untyped-call]
    assert certain.grad is not None
    assert certain.grad.tolist() == [[0.0, 0.0, 0.0]]
