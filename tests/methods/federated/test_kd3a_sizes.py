"""KD3A with few sources, many, small targets, and in a pool of processes."""

from __future__ import annotations

import math
from typing import Any

import pytest
from kd3a_setting import RELEASED, kd3a, rounds_of
from kd3a_written import EQUATIONS
from tiny import NORMED, domains, run, vectors

from fedshift.federation.local.pool import WorkerPool
from fedshift.methods.federated.kd3a import KD3A


def test_one_source() -> None:
    """α_1 = N/(N + N_T) whatever the teacher is worth."""
    found = domains(NORMED, {"alone": 26})
    for options in ({}, {"focus": "shapley"}, {"focus": "samples"}, {"focus": "shapley", "focus_permutations": 5}):
        state, _ = run(kd3a(**options), found, NORMED)
        assert state.report["aggregation_weights"] == pytest.approx({"alone": 26 / 40, "target": 14 / 40})
        state.weights.check_finite("one source")


def test_eleven_sources_sample_the_orders() -> None:
    """Beyond ten sources Shapley values are sampled, with a generator of their own: the same in every run."""
    found = domains(NORMED, {f"site-{number}": 3 + number for number in range(11)})
    method = KD3A(focus="shapley", gate_start=0.4, gate_end=0.4)
    state, _ = run(method, found, NORMED, rounds=1)
    again, _ = run(method, found, NORMED, rounds=1)
    assert again.weights == state.weights
    shares = state.report["aggregation_weights"]
    assert len(shares) == 12
    assert sum(shares.values()) == pytest.approx(1)
    assert min(shares.values()) >= 0
    more, _ = run(KD3A(focus="shapley", gate_start=0.4, gate_end=0.4, focus_permutations=400), found, NORMED, rounds=1)
    # Both estimate the same values, from other orders.
    assert more.report["aggregation_weights"] != shares
    assert more.report["aggregation_weights"] == pytest.approx(shares, abs=0.02)
    assert again.report["losses"] == more.report["losses"]


@pytest.mark.parametrize(
    "options", [{}, RELEASED, {"focus": "information_gain"}, {"batch_norm": "loss", "batch_norm_weight": 0.01}]
)
@pytest.mark.parametrize("samples", [1, 2, 5, 9])
def test_a_small_target(samples: int, options: dict[str, Any]) -> None:
    """Fewer samples than a batch, a last batch of one, fewer samples than classes."""
    found = [*domains(NORMED, {"large": 41, "small": 5}), vectors("few", samples)]
    state, where = run(kd3a(**options), found, NORMED, roles={"few": "target"})
    assert where.targets == ("few",)
    passes = 2 if options.get("batch_norm") == "loss" else 1
    assert where.progress.used["few"] == 2 * passes
    state.weights.check_finite("a small target")
    assert all(math.isfinite(loss) for loss in state.report["losses"].values())
    if not options:
        assert state.report["aggregation_weights"]["few"] == pytest.approx(samples / (46 + samples))


@pytest.mark.slow
@pytest.mark.parametrize("case", ["paper", "code", "statistics in the loss", "statistics at home"])
def test_same_bits_in_a_pool(case: str, pool: WorkerPool) -> None:
    method = kd3a(**EQUATIONS[case])
    options: dict[str, Any] = {"momentum": 0.9, "reset_optimizer_each_round": False}
    here, one = rounds_of(method, **options)
    there, many = rounds_of(method, pool=pool, **options)
    for ours, theirs in zip(here, there, strict=True):
        assert theirs.weights == ours.weights
        assert theirs.report == ours.report
    assert many.progress == one.progress
    assert many.ledger.total == one.ledger.total
