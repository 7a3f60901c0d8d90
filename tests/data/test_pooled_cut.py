"""Sites made of pooled data: every sample once, what the rules of the papers say of sizes and mixtures, mistakes."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from fedshift.data.domain import DataSet, Domain, Manifest, Preprocessing, SparseRows
from fedshift.data.pooled_cut import PooledCut, by_class_shares, mixed_counts, pool_domains
from fedshift.errors import UserError
from fedshift.experiment.protocols.adapt_to_one import AdaptToOne
from fedshift.experiment.protocols.leave_one_out import LeaveOneOut
from fedshift.experiment.protocols.participants import Participants

SIZES = st.lists(st.integers(1, 60), min_size=1, max_size=6)
RULES: list[dict[str, Any]] = [{"by": "classes"}, {"by": "sites"}, {"by": "domains"}]


def marked(*sizes: int) -> list[Domain]:
    """Domains whose inputs are the numbers of their samples in the pool, with four classes."""
    starts = np.cumsum([0, *sizes])
    return [
        Domain(
            f"d{k}", np.arange(a, b, dtype=np.float32)[:, None], np.arange(a, b) % 4, ids=tuple(map(str, range(a, b)))
        )
        for k, (a, b) in enumerate(pairwise(starts))
    ]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["by"])
@given(SIZES, st.integers(1, 8), st.floats(0.05, 100), st.floats(0, 1))
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
def test_each_sample_is_at_one_site_with_its_label(
    rule: dict[str, Any], sizes: list[int], sites: int, alpha: float, mix: float
) -> None:
    cut = PooledCut(sites=sites, alpha=alpha, mix=mix, smallest=1, **rule)
    try:
        found = cut.sites_of(marked(*sizes))
    except UserError:  # some site would be empty
        assume(False)
        raise
    assert [one.name for one in found] == [f"site.{number}" for number in range(1, sites + 1)]
    rows = np.concatenate([one.inputs[:, 0] for one in found])  # type: ignore[index]
    assert sorted(rows) == list(range(sum(sizes)))
    assert np.array_equal(np.concatenate([one.labels for one in found]), rows % 4)
    assert [int(name) for one in found for name in one.ids or ()] == rows.tolist()
    again = cut.sites_of(marked(*sizes))
    assert all(np.array_equal(one.inputs, other.inputs) for one, other in zip(found, again, strict=True))


@given(SIZES, st.integers(1, 12), st.floats(0, 1))
def test_counts_of_a_mixture(sizes: list[int], sites: int, mix: float) -> None:
    """Sums are the domains'; λ = 1 is the same mixture; between, the numbers are the ends' mixture within 1."""
    counts, ends = mixed_counts(sizes, sites, mix), [mixed_counts(sizes, sites, end) for end in (0.0, 1.0)]
    for some in (counts, *ends):
        assert some.min() >= 0
        assert some.sum(axis=1).tolist() == sizes
    shares = np.array(sizes)[:, None] / sites
    assert np.abs(ends[1] - shares).max() < 1
    assert np.abs(counts - (mix * shares + (1 - mix) * ends[0])).max() < 1 + 1e-6


@given(SIZES, st.integers(1, 12))
def test_without_mixing_domains_are_whole_or_sites_have_one(sizes: list[int], sites: int) -> None:
    counts = mixed_counts(sizes, sites, 0.0)
    if sites >= len(sizes):
        assert ((counts > 0).sum(axis=0) <= 1).all()
        parts = np.maximum((counts > 0).sum(axis=1), 1)
        assert (np.ptp(np.where(counts > 0, counts, counts.max(axis=1)[:, None]), axis=1) <= 1).all()
        largest = (np.array(sizes) / parts).max()
        divided = [size / (number - 1) for size, number in zip(sizes, parts, strict=True) if number > 1]
        assert sites > sum(sizes) or all(size >= largest - 1e-9 for size in divided)
    else:
        assert ((counts > 0).sum(axis=1) == 1).all()
        assert (counts.sum(axis=0) > 0).all()


@pytest.mark.parametrize(
    ("sizes", "mix", "theirs"),
    [
        ([60, 30, 10], 0.0, [[30, 30, 0, 0], [0, 0, 30, 0], [0, 0, 0, 10]]),
        ([61, 30, 13], 1.0, [[16, 15, 15, 15], [8, 8, 7, 7], [4, 3, 3, 3]]),
        ([61, 30, 13], 0.1, [[29, 29, 2, 1], [1, 1, 28, 0], [1, 0, 0, 12]]),
        ([50, 70, 20, 40], 0.0, [[0, 50], [70, 0], [20, 0], [0, 40]]),
        ([50, 70, 20, 40], 0.3, [[8, 42], [60, 10], [17, 3], [6, 34]]),
        ([100, 100, 100], 0.5, [[67, 17, 16], [17, 67, 16], [17, 17, 66]]),
        ([7, 5, 9], 0.5, [[3, 3, 1, 0, 0, 0, 0], [1, 1, 2, 1, 0, 0, 0], [1, 1, 1, 0, 2, 2, 2]]),
    ],
)
def test_counts_are_those_of_the_authors_code(sizes: list[int], mix: float, theirs: list[list[int]]) -> None:
    """inouye-lab/FedDG_Benchmark, src/splitter.py, NonIIDSplitter.split.

    Commit da58f764cffc98e537209dc799009ffdf2f36574.
    It gives what rounding leaves to the first sites, ours to the sites that lost most: within 1, equal at both ends.
    """
    gap = np.abs(mixed_counts(sizes, len(theirs[0]), mix) - np.array(theirs)).max()
    assert gap <= (0 if mix in (0.0, 1.0) else 1)


def test_worked_mixture_of_the_paper_s_rule() -> None:
    """At 4 sites 60 samples are divided, 30 and 10 are whole; with λ = 0.5 half of it is each site's quarter."""
    assert mixed_counts([60, 30, 10], 4, 0.0).tolist() == [[30, 30, 0, 0], [0, 0, 30, 0], [0, 0, 0, 10]]
    assert mixed_counts([80, 40, 40], 4, 0.5).tolist() == [[30, 30, 10, 10], [5, 5, 25, 5], [5, 5, 5, 25]]
    assert mixed_counts([60, 30, 40], 2, 0.0).tolist() == [[60, 0], [0, 30], [0, 40]]


def test_shares_of_classes_have_the_dirichlet_s_mean_and_spread() -> None:
    """A share of Dirichlet(α, …, α) over C sites has mean 1/C and variance (C − 1)/(C²(Cα + 1))."""
    labels, shares = np.zeros(1000, dtype=np.int64), []
    for seed in range(400):
        parts = by_class_shares(labels, 4, 0.5, np.random.default_rng(seed))
        shares.append([len(part) / 1000 for part in parts])
    assert np.mean(shares, axis=0) == pytest.approx([0.25] * 4, abs=0.04)
    assert np.var(shares) == pytest.approx(3 / (16 * 3), rel=0.1)


def test_the_smaller_alpha_the_more_sites_differ_and_none_is_too_small() -> None:
    def spread(by: Any, alpha: float) -> float:
        found = PooledCut(sites=5, by=by, alpha=alpha, smallest=20).sites_of(marked(400, 200))
        assert min(map(len, found)) >= 20
        if by == "sites":
            assert {len(one) for one in found} == {120}
        return float(np.std([np.bincount(one.labels, minlength=4) / len(one) for one in found], axis=0).mean())

    for by in ("classes", "sites"):
        assert spread(by, 0.3) > 0.15 > 0.08 > spread(by, 1000.0)


def test_what_is_pooled_and_what_stays_whole() -> None:
    def sparse(values: list[float]) -> SparseRows:
        return SparseRows(np.array(values, np.float32), np.zeros(2, np.int64), np.array([0, 1, 2]), 1)

    test = {"train_rows": np.array([0]), "test_rows": np.array([1]), "fixed_split": True}
    whole = pool_domains(
        [Domain(name, sparse(values), np.arange(2), **test) for name, values in (("a", [1, 2]), ("b", [3, 4]))]
    )  # type: ignore[arg-type]
    assert isinstance(whole.inputs, SparseRows)
    assert whole.inputs.dense(np.arange(4))[:, 0].tolist() == [1, 2, 3, 4]
    assert (whole.train_rows.tolist(), whole.test_rows.tolist()) == ([0, 2], [1, 3])  # type: ignore[union-attr]
    assert whole.fixed_split
    data, pool = data_of(*marked(40, 40, 40)), PooledCut(sites=4)
    assert list(LeaveOneOut(targets=("d1",), pool=pool).taking_part(data).domains) == [
        "d1", "site.1", "site.2", "site.3", "site.4",
    ]  # fmt: skip
    found = Participants(common_tests=("d2",), pool=pool).taking_part(data)
    assert sum(len(one) for name, one in found.domains.items() if name != "d2") == 80
    assert len(Participants(common_tests=("d2",), pool=pool).split_of(found, "sites", 0).train) == 4
    for kind in (LeaveOneOut, AdaptToOne, Participants):
        assert "pool" not in kind().model_dump()
        assert kind(pool=PooledCut(sites=3)).model_dump()["pool"]["sites"] == 3


def data_of(*found: Domain) -> DataSet:
    names = tuple("abcd")
    return DataSet("d", {one.name: one for one in found}, names, Preprocessing(kind="features"), Manifest(*[""] * 5))


@pytest.mark.parametrize(
    ("protocol", "match"),
    [
        (LeaveOneOut(pool=PooledCut(sites=2)), "name one target"),
        (Participants(pool=PooledCut(sites=2), sites_each=2), "leave one out"),
        (Participants(pool=PooledCut(sites=13)), "lower it, or pool.smallest"),
        (Participants(pool=PooledCut(sites=2), common_tests=("d0", "d1", "d2")), "left to pool"),
    ],
)
@pytest.mark.case("protocol", "pooled sources: mistakes")
def test_a_mistake_is_one_line(protocol: LeaveOneOut | Participants, match: str) -> None:
    with pytest.raises(UserError, match=match) as caught:
        protocol.taking_part(data_of(*marked(40, 40, 40)))
    assert "\n" not in str(caught.value)


def test_what_rules_cannot_divide_is_refused() -> None:
    grouped = Domain("a", np.zeros((30, 1), np.float32), np.zeros(30, np.int64), groups=np.arange(30))
    with pytest.raises(UserError, match=r"groups.*sites_each"):
        PooledCut(sites=2).sites_of([grouped])
    amounts = Domain("a", np.zeros((30, 1), np.float32), np.zeros(30, np.float32))
    with pytest.raises(UserError, match="write domains"):
        PooledCut(sites=2).sites_of([amounts])
    assert len(PooledCut(sites=2, by="domains").sites_of([amounts])) == 2
    with pytest.raises(UserError, match=r"pool\.sites"):
        PooledCut(sites=2, by="domains", mix=0.0).sites_of(marked(40, 5))
    with pytest.raises(ValidationError):
        PooledCut(sites=2, mix=1.5)
