"""What replies must be like: as more than half of the sites asked have sent before, and possible."""

from __future__ import annotations

import pytest
from test_hostile_site import HEAD, LIKE, WHOLE, Part

from fedshift.errors import FedshiftError
from fedshift.federation.remote.reply_checks import checked_measures
from fedshift.federation.replies.layouts import TensorCheck


@pytest.mark.parametrize(("asked", "agreed"), [(2, True), (3, True), (4, False), (5, False)])
def test_two_that_answer_alike_decide_for_later_if_they_are_most_of_those_asked(asked: int, agreed: bool) -> None:
    check = TensorCheck(LIKE)
    layout = check.check("step", Part, {"classifier": HEAD}, {})
    assert layout is not None
    assert not check.odd_ones("step", {"a": layout, "b": layout}, asked)
    if agreed:
        with pytest.raises(FedshiftError):
            check.check("step", Part, {"classifier": WHOLE}, {})
    else:
        assert check.check("step", Part, {"classifier": WHOLE}, {}) is not None


@pytest.mark.parametrize("accuracy", [-0.5, 100.5])
def test_an_accuracy_lies_between_0_and_100(accuracy: float) -> None:
    good = {"accuracy": 100.0, "samples": 4, "classes": [[2, 2], [2, 2]]}
    for possible in (0, 100):
        assert checked_measures({**good, "accuracy": possible}, 2)["accuracy"] == possible
    with pytest.raises(FedshiftError, match="accuracy"):
        checked_measures({**good, "accuracy": accuracy}, 2)
