"""Kept answers: numbers by hand, what they do not depend on, and two models of which one has drifted."""

from __future__ import annotations

import pytest
import torch
from seeded import numbers

from fedshift.methods.federated.recipe_unlabelled import kept_answers

BEFORE = torch.tensor([[0.9, 0.1], [0.6, 0.4], [0.45, 0.55], [0.1, 0.9], [0.35, 0.65], [0.7, 0.3]])


@pytest.mark.parametrize(
    ("after", "surest", "wanted"),
    [
        ([0, 0, 1, 1, 1, 0], 0.5, 1.0),  # the same classes
        ([1, 1, 0, 0, 0, 1], 0.5, 0.0),  # every class changed
        ([0, 1, 0, 0, 1, 0], 0.5, 2 / 3),  # the surest are 0, 3 and 5; of these 3 changed
        ([0, 1, 0, 1, 1, 0], 0.5, 1.0),  # only unsure ones changed
        ([0, 1, 0, 0, 1, 0], 1.0, 0.5),  # of all six three changed
        ([1, 0, 1, 1, 1, 0], 0.2, 0.5),  # a fifth of six is two: 0 and 3
    ],
)
def test_kept_answers_by_hand(after: list[int], surest: float, wanted: float) -> None:
    """The classes are nearly equally frequent in BEFORE, so that scaling changes no order and no class."""
    assert kept_answers(BEFORE, torch.eye(2)[after], surest) == pytest.approx(wanted)


def test_the_order_of_samples_and_classes_is_of_no_account_nor_is_the_scale_of_logits() -> None:
    before, after = numbers(40, 5).softmax(1), numbers(40, 5) + 0.5 * numbers(40, 5, seed=1)
    found = kept_answers(before, after)
    assert 0 < found < 1
    rows, columns = torch.randperm(40), torch.randperm(5)
    assert kept_answers(before[rows][:, columns], after[rows][:, columns]) == found
    assert kept_answers(before, (7 * after).softmax(1)) == found


def test_a_model_that_names_one_class_everywhere_is_scaled_first() -> None:
    """It is surest of its favourite class, wrongly. A model that finds the classes keeps what it says beside that."""
    classes = torch.arange(300) % 3
    lean = torch.eye(3).double()[classes]
    before = (torch.tensor([6.0, 0.0, 0.0]).double() + 2 * lean + 0.5 * numbers(300, 3)).softmax(1)
    assert (before.argmax(1) == 0).all()
    assert kept_answers(before, lean) > 0.95
    assert kept_answers(before, before) < 0.5
    assert kept_answers(before, lean[:, [1, 2, 0]]) < 0.05
