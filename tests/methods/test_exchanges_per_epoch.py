"""Several exchanges per epoch: with every method that trains on epochs, at equal work."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from every_method import method_of, mostly_slow
from pydantic import ValidationError
from tiny import domains, run

from fedshift.experiment.budgets import budgets, rounds_needed
from fedshift.experiment.protocols.base import Split
from fedshift.federation.training import Training
from fedshift.methods import registry
from fedshift.methods.base import per_round, work_of

BY_STEPS = {"fada", "fedsr", "fedl2r", "fedcmi"}
"""Methods that train on a number of mini-batches in a round."""
CLASSES = [registry.method_class(name) for name in registry.names()]
ON_EPOCHS = [
    kind.name
    for kind in CLASSES
    if not (kind.traits.pooled or kind.traits.target == "labelled" or kind.name in BY_STEPS)
    and kind().mini_batches(9, 3)
]


@pytest.mark.parametrize("name", mostly_slow(ON_EPOCHS))
def test_a_round_trains_on_the_part_of_an_epoch(name: str) -> None:
    """What comes before the first round keeps its whole epochs. Epochs of 4, 1 and, at a target, 2 mini-batches."""
    method = method_of(name, exchanges_per_epoch=3)
    _, where = run(method, domains(sizes={"large": 26, "small": 5}), rounds=1)
    sources, target = work_of(method)
    for site, epoch, trained in (("large", 4, sources), ("small", 1, sources), ("target", 2, target)):
        if site in where.progress.used and not (name == "shot" and trained is sources):  # SHOT's train before round 1
            before, each = trained(epoch, 1) - per_round(trained, epoch), per_round(trained, -(-epoch // 3))
            assert where.progress.used[site] == before + each
            assert each < per_round(trained, epoch) or epoch == 1 or not each


def test_the_work_is_the_same_and_the_rounds_are_more() -> None:
    """Epochs of 12 and 4 mini-batches, 3 rounds of 2 epochs: 72 + 24. A quarter of an epoch: 12 rounds of 6 and 2."""
    split = Split({"a": np.arange(24), "b": np.arange(8)}, {}, {"t": np.arange(3)})
    training = Training(rounds=3, batch_size=2)
    plain, often = (
        registry.parse({"name": "fedavg", "local_epochs": 2, "exchanges_per_epoch": number}) for number in (1, 4)
    )
    csac = registry.parse({"name": "csac", "acquisition_epochs": 1, "calibration_epochs": 1, "exchanges_per_epoch": 2})
    for methods in ([plain, often], [often], [often, csac]):
        assert budgets(often, methods, training, split) == {"a": 72, "b": 24}
        assert rounds_needed(often, training, split, {"a": 72, "b": 24}) == 12
    assert rounds_needed(plain, training, split, {"a": 72, "b": 24}) == 3
    # CSAC: an epoch before the first round, then half of one in each.
    assert budgets(csac, [csac], training, split) == {"a": 48, "b": 16}
    assert rounds_needed(csac, training, split, {"a": 48, "b": 16}) == 6


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"name": "deepall"}, "in one place"),
        ({"name": "oracle"}, "in one place"),
        ({"name": "fada"}, "not on epochs"),
        ({"name": "fedsr"}, "not on epochs"),
        ({"name": "fedavg", "steps_per_round": 4}, "not on epochs"),
        ({"name": "styles", "method": {"name": "fada"}}, "not on epochs"),
    ],
)
def test_what_has_no_epochs_to_divide(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        registry.parse({**options, "exchanges_per_epoch": 2})
    registry.parse(options)


def test_it_is_part_of_the_name() -> None:
    assert "exchanges4" in method_of("fedavg", exchanges_per_epoch=4).display
    assert {kind.name for kind in CLASSES if "steps_per_round" in kind.traits.small} == BY_STEPS
