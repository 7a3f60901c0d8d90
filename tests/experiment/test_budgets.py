"""Every method does the same work, and the sites of a method are done in the same round."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
import torch
from adapting import data_of, domain
from hypothesis import given, settings
from hypothesis import strategies as st

from fedshift.data.site_data import batches_per_epoch, epoch_batches
from fedshift.errors import UserError
from fedshift.experiment.budgets import budgets, rounds_needed, site_budget
from fedshift.experiment.plan import site_plans
from fedshift.experiment.protocols.base import Split
from fedshift.federation.training import Training
from fedshift.methods.base import Method
from fedshift.methods.federated.csac import CSAC
from fedshift.methods.federated.fedavg import FedAvg
from fedshift.methods.federated.kd3a import KD3A
from fedshift.methods.federated.oracle import Oracle
from fedshift.methods.pooled.deepall import DeepAll
from fedshift.methods.pooled.source_only import SourceOnly


@given(samples=st.integers(1, 200), batch_size=st.integers(1, 40))
def test_batches_per_epoch_are_those_that_are_drawn(samples: int, batch_size: int) -> None:
    drawn = epoch_batches(samples, batch_size, torch.Generator().manual_seed(0))
    assert len(drawn) == batches_per_epoch(samples, batch_size)


@settings(max_examples=60)
@given(
    sizes=st.dictionaries(st.sampled_from("abcd"), st.integers(1, 90), min_size=1),
    target=st.none() | st.integers(1, 90),
    exchanges=st.sampled_from([0.2, 0.5, 1.0, 2.0, 10.0]),
    epochs=st.tuples(st.integers(1, 9), st.integers(1, 6)),
    rounds=st.integers(1, 9),
    batch_size=st.integers(1, 30),
    fixed=st.none() | st.integers(1, 60),
)
def test_equal_work(
    sizes: Mapping[str, int],
    target: int | None,
    exchanges: float,
    epochs: tuple[int, int],
    rounds: int,
    batch_size: int,
    fixed: int | None,
) -> None:
    """All methods do the same work, a target's mini-batches included, and no site is done before the others."""
    (first, then), all_sizes = epochs, {**sizes, **({} if target is None else {"t": target})}
    rows = {name: np.arange(size) for name, size in all_sizes.items()}
    measured, unlabelled = ({"t": np.zeros(0, np.int64)}, {}) if target is None else ({}, {"t": rows.pop("t")})
    split = Split(rows, {}, measured, unlabelled)
    steps = CSAC(label="steps", acquisition_steps=first, calibration_steps=then)
    csac = CSAC(acquisition_epochs=first, calibration_epochs=then)
    methods: list[Method] = [FedAvg(local_epochs=2), csac, steps, DeepAll()]
    methods += [] if target is None else [KD3A(aggregations_per_epoch=exchanges), SourceOnly(), Oracle()]
    training = Training(rounds=rounds, batch_size=batch_size, mini_batches=fixed)
    every = {name: batches_per_epoch(size, batch_size) for name, size in all_sizes.items()}
    extra = {"t": every["t"]} if target is not None else {}
    needs = [
        sum(method.mini_batches(every[name], rounds) for name in sizes)
        + sum(method.target_mini_batches(number, rounds) for number in extra.values())
        for method in methods
    ]
    total = fixed * len(sizes) if fixed else max(needs)
    data = data_of(**{name: domain(name, size) for name, size in all_sizes.items()})
    for method in methods:
        budget = budgets(method, methods, training, split)
        assert total <= sum(budget.values()) < total + len(every)
        allowed = site_budget(budget, site_plans(method, data, split))
        assert sum(allowed.values()) == sum(budget.values())
        needed = rounds_needed(method, training, split, budget)
        if method.traits.pooled or method.traits.target == "labelled":
            assert len(allowed) == 1
            assert needed <= rounds
            continue
        assert set(allowed) == set(every)
        assert allowed == {**dict.fromkeys(every, 0), **budget}
        assert (budget.get("t", 0) > 0) == method.traits.needs_target
        for name in every if method.traits.needs_target else sizes:
            trained = method.target_mini_batches if name == "t" else method.mini_batches
            assert trained(every[name], max(needed, 1)) >= budget[name]
            if needed > 1:  # in the last round every site still has something to do
                assert trained(every[name], needed - 1) < budget[name]


def test_rounds_by_hand() -> None:
    split = Split({"a": np.arange(40), "b": np.arange(10)}, {}, {"t": np.zeros(0, np.int64)})
    methods = [FedAvg(local_epochs=3), DeepAll()]
    training = Training(rounds=7, batch_size=8)
    budget = budgets(methods[1], methods, training, split)
    assert sum(budget.values()) == 3 * 7 * (5 + 2)
    assert rounds_needed(methods[1], training, split, budget) == 7
    split = Split({"big": np.arange(400), "small": np.arange(40)}, {}, {"t": np.zeros(0, np.int64)})
    fedavg, csac = FedAvg(), CSAC(acquisition_steps=10, calibration_steps=40)
    training = Training(rounds=5, batch_size=20)
    budget = budgets(fedavg, [fedavg, csac], training, split)
    assert budget == {"big": 382, "small": 39}  # 420 in all, 10 to 1 as the batches of an epoch
    assert rounds_needed(fedavg, training, split, budget) == 20
    # FedAvg, batches of 2: a has 3 mini-batches a round, b has 1. With 12 and 5 that is 4 and 5 rounds.
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
    # CSAC's acquisition takes 10 mini-batches and a round 4: who has no more than the former needs no round.
    split = Split({"a": np.arange(40)}, {}, {"t": np.zeros(0, np.int64)})
    csac, training = CSAC(acquisition_steps=10, calibration_steps=4), Training(rounds=3, batch_size=20)
    assert [rounds_needed(csac, training, split, {"a": number}, whole=True) for number in (10, 14, 17)] == [0, 1, 1]
    with pytest.raises(UserError, match="less than one of csac"):
        rounds_needed(csac, training, split, {"a": 13}, whole=True)
