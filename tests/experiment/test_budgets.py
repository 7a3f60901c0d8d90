"""Every method does the same work, and the sites of a method are done in the same round."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedshift.data.site_data import batches_per_epoch, epoch_batches
from fedshift.errors import UserError
from fedshift.experiment.budgets import budgets, rounds_needed, site_budget
from fedshift.experiment.plan import POOL
from fedshift.experiment.protocols.base import Split
from fedshift.federation.site_runner import SitePlan
from fedshift.federation.training import Training
from fedshift.methods.federated.csac import CSAC
from fedshift.methods.federated.fedavg import FedAvg
from fedshift.methods.pooled.deepall import DeepAll


@given(samples=st.integers(1, 200), batch_size=st.integers(1, 40))
def test_batches_per_epoch_are_those_that_are_drawn(samples: int, batch_size: int) -> None:
    drawn = epoch_batches(samples, batch_size, torch.Generator().manual_seed(0))
    assert len(drawn) == batches_per_epoch(samples, batch_size)


SITE_SIZES = st.dictionaries(st.sampled_from("abcd"), st.integers(1, 90), min_size=1)


@given(
    sizes=SITE_SIZES,
    epochs=st.integers(1, 6),
    acquisition=st.integers(0, 8),
    rounds=st.integers(1, 9),
    batch_size=st.integers(1, 30),
    fixed=st.none() | st.integers(1, 60),
)
def test_equal_work(
    sizes: Mapping[str, int], epochs: int, acquisition: int, rounds: int, batch_size: int, fixed: int | None
) -> None:
    """All methods do the same work in total, and the sites of a method are done in the same round."""
    split = Split({name: np.arange(size) for name, size in sizes.items()}, {}, {"t": np.zeros(0, np.int64)})
    csac = CSAC(acquisition_epochs=acquisition + 1, calibration_epochs=epochs)
    steps = CSAC(label="steps", acquisition_steps=acquisition + 1, calibration_steps=epochs)
    methods = [FedAvg(local_epochs=2), csac, steps, DeepAll()]
    training = Training(rounds=rounds, batch_size=batch_size, mini_batches=fixed)
    per_epoch = {name: batches_per_epoch(size, batch_size) for name, size in sizes.items()}
    needs = [sum(method.mini_batches(number, rounds) for number in per_epoch.values()) for method in methods]
    total = fixed * len(sizes) if fixed else max(needs)
    for method in methods:
        budget = budgets(method, methods, training, split)
        assert total <= sum(budget.values()) < total + len(sizes)
        if method.traits.pooled:
            assert site_budget(budget, [SitePlan(POOL, "source", ())]) == {POOL: sum(budget.values())}
            continue
        assert site_budget(budget, [SitePlan(name, "source", ()) for name in sizes]) == budget
        needed = rounds_needed(method, training, split, budget)
        for name, number in per_epoch.items():
            assert method.mini_batches(number, max(needed, 1)) >= budget[name]
            if needed > 1:  # in the last round every site still has something to do
                assert method.mini_batches(number, needed - 1) < budget[name]


def test_the_pool_spreads_its_work_over_the_rounds() -> None:
    split = Split({"a": np.arange(40), "b": np.arange(10)}, {}, {"t": np.zeros(0, np.int64)})
    methods = [FedAvg(local_epochs=3), DeepAll()]
    training = Training(rounds=7, batch_size=8)
    budget = budgets(methods[1], methods, training, split)
    assert sum(budget.values()) == 3 * 7 * (5 + 2)
    assert rounds_needed(methods[1], training, split, budget) == 7


def test_sites_counted_in_epochs_and_steps_end_together() -> None:
    split = Split({"big": np.arange(400), "small": np.arange(40)}, {}, {"t": np.zeros(0, np.int64)})
    fedavg, csac = FedAvg(), CSAC(acquisition_steps=10, calibration_steps=40)
    training = Training(rounds=5, batch_size=20)
    budget = budgets(fedavg, [fedavg, csac], training, split)
    assert budget == {"big": 382, "small": 39}  # 420 in all, 10 to 1 as the batches of an epoch
    assert rounds_needed(fedavg, training, split, budget) == 20


def test_rounds_until_all_have_used_their_budget() -> None:
    """FedAvg, batches of 2: a has 3 mini-batches a round, b has 1. With 12 and 5 that is 4 and 5 rounds."""
    training = Training(rounds=4, batch_size=2)
    method = FedAvg()
    split = Split({"a": np.arange(6), "b": np.array([0, 2])}, {}, {"t": np.arange(3)})
    assert rounds_needed(method, training, split, {"a": 12, "b": 4}) == 4
    assert rounds_needed(method, training, split, {"a": 12, "b": 5}) == 5
    assert rounds_needed(method, training, split, {"a": 13, "b": 4}) == 5
    csac = CSAC(acquisition_epochs=2, calibration_epochs=1)
    # Acquisition takes 6 and 2 first: 12 leaves 6, which are 2 rounds of 3.
    assert rounds_needed(csac, training, split, {"a": 12, "b": 4}) == 2
    assert rounds_needed(csac, training, split, {"a": 6, "b": 2}) == 0
    # A pool trains on ceil(9 / 4) = 3 in a round, so it needs 3 rounds and not 4.
    assert rounds_needed(DeepAll(), training, split, {"a": 6, "b": 3}) == 3


def test_whole_rounds_or_none_at_all() -> None:
    """CSAC's acquisition takes 10 mini-batches and a round 4: who has no more than the former needs no round."""
    split = Split({"a": np.arange(40)}, {}, {"t": np.zeros(0, np.int64)})
    csac, training = CSAC(acquisition_steps=10, calibration_steps=4), Training(rounds=3, batch_size=20)
    assert [rounds_needed(csac, training, split, {"a": number}, whole=True) for number in (10, 14, 17)] == [0, 1, 1]
    with pytest.raises(UserError, match="less than one of csac"):
        rounds_needed(csac, training, split, {"a": 13}, whole=True)
