"""What replies must be like in later exchanges: what more than half of the sites that were asked have sent."""

from __future__ import annotations

import pytest
from test_hostile_site import HEAD, LIKE, WHOLE, Part

from fedshift.errors import FedshiftError
from fedshift.federation.remote.reply_checks import TensorCheck


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
