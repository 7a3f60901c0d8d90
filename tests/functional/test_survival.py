"""Cox's partial likelihood where log-hazards are far apart, and with ties, beside sums in exact arithmetic."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedshift.data.registry import parse
from fedshift.functional.survival import partial_likelihood


def log_of_sum(terms: list[tuple[float, float]]) -> float:
    """log Σ w·exp r with Python's numbers, of pairs (w, r)."""
    largest = max(risk for _, risk in terms)
    return largest + math.log(math.fsum(weight * math.exp(risk - largest) for weight, risk in terms))


def by_definition(risks: list[float], times: list[float], events: list[int]) -> float:
    """Efron's form, event by event, from its definition."""
    total, done = 0.0, set[float]()
    for at, event in zip(times, events, strict=True):
        if not event or at in done:
            continue
        done.add(at)
        tied = [i for i, time in enumerate(times) if time == at and events[i]]
        total += sum(risks[i] for i in tied)
        for left_out in range(len(tied)):
            part = 1 - left_out / len(tied)
            terms = [(part if i in tied else 1.0, risks[i]) for i, time in enumerate(times) if time >= at]
            total -= log_of_sum(terms)
    return -total / sum(events)


@pytest.mark.case("losses", "Cox: the sample of the largest log-hazard, 120 above the others, left first")
@pytest.mark.parametrize("far", [0.0, 120.0, 1e4, -1e4])
def test_a_sample_that_left_early_does_not_reach_later_events(far: float) -> None:
    """The two events are of samples 1 and 2: −log(e⁰/(e⁰ + e¹))/2 = 0.6567, and ∓σ(1)/2 = 0.3655."""
    risks = torch.tensor([far, 0.0, 1.0], requires_grad=True)
    loss = partial_likelihood(risks, torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0.0, 1.0, 1.0]))
    loss.backward()
    assert loss.item() == pytest.approx(math.log1p(math.e) / 2, rel=1e-6)
    slope = math.e / (1 + math.e) / 2
    assert risks.grad is not None
    assert risks.grad.tolist() == pytest.approx([0.0, -slope, slope], rel=1e-6)


@given(
    st.lists(st.tuples(st.floats(-1, 1), st.integers(1, 4), st.integers(0, 1)), min_size=1, max_size=8),
    st.sampled_from([1e-3, 1.0, 1e2, 1e3]),
)
def test_it_is_efrons_sum_at_every_scale(samples: list[tuple[float, int, int]], scale: float) -> None:
    risks, times, events = ([sample[part] for sample in samples] for part in range(3))
    if not any(events):
        return
    scaled = [scale * risk for risk in risks]
    expected = by_definition(scaled, [float(time) for time in times], events)
    for dtype, rel in ((torch.float64, 1e-9), (torch.float32, 1e-4)):
        values = torch.tensor(scaled, dtype=dtype, requires_grad=True)
        loss = partial_likelihood(values, torch.tensor(times, dtype=dtype), torch.tensor(events))
        loss.backward()
        assert loss.item() == pytest.approx(expected, rel=rel, abs=rel * max(1.0, scale))
        assert values.grad is not None
        assert bool(values.grad.isfinite().all())
        assert float(values.grad.sum()) == pytest.approx(0, abs=1e-3 if dtype == torch.float32 else 1e-9), (
            "equal shifts of all change nothing"
        )


def test_the_mean_over_samples_is_flambys() -> None:
    """Of log 2 + log 1 over four samples: FLamby divides by all of the mini-batch (arXiv 2210.04620)."""
    times, events = torch.tensor([1.0, 2.0, 0.5, 0.5]), torch.tensor([1.0, 1.0, 0.0, 0.0])
    assert float(partial_likelihood(torch.zeros(4), times, events, "samples")) == pytest.approx(math.log(2) / 4)
    assert float(partial_likelihood(torch.zeros(4), times, events)) == pytest.approx(math.log(2) / 2)


def test_the_data_say_of_what_it_is_the_mean() -> None:
    fields = {"name": "arrays", "sites": {"a": "a.npz", "b": "b.npz"}, "mean_over": "samples"}
    data = parse(fields | {"task": "time_to_event"})
    assert data.objective([]) == {"task": "time_to_event", "mean_over": "samples"}
    with pytest.raises(ValueError, match="task: time_to_event"):
        parse(fields)
