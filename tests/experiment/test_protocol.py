"""Who trains on what, and who is tested on what: splits, and sources that are cut into sites."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from adapting import data_of, domain

from fedshift.data.domain import Domain, SparseRows, part_of
from fedshift.errors import UserError
from fedshift.experiment.config.experiment import parse
from fedshift.experiment.protocols.adapt_to_one import AdaptToOne
from fedshift.experiment.protocols.leave_one_out import LeaveOneOut


def test_no_base_image_on_both_sides() -> None:
    """Rotated digits: with disjoint base images none that a source trained on is measured at the target."""
    data = parse({"data": {"name": "rotated_digits", "per_class": 20}, "model": "mnist_cnn", "methods": ["fedavg"]})
    built = data.data.build()
    for seed in range(3):
        careful = LeaveOneOut(test_fraction=0.3).split_of(built, "D30", seed)
        groups = {name: set(built.domains[name].groups[rows].tolist()) for name, rows in careful.train.items()}
        measured = set(built.domains["D30"].groups[careful.measured["D30"]].tolist())
        held_out = {name: set(built.domains[name].groups[rows].tolist()) for name, rows in careful.held_out.items()}
        assert "D30" not in groups
        assert len(measured) == 60  # 30 % of 200
        for name, trained in groups.items():
            assert not trained & measured
            assert trained | held_out[name] == set(range(200))
            assert not trained & held_out[name]
        shared = LeaveOneOut(test_fraction=0.3, base_images="shared").split_of(built, "D30", seed)
        assert len(shared.measured["D30"]) == 200
        assert all(np.array_equal(shared.train[name], careful.train[name]) for name in shared.train)


def test_what_is_trained_on_and_measured_whole() -> None:
    # test_fraction 0 and shared base images: sources train on everything, the target is measured on everything.
    groups = np.arange(30)
    data = data_of(a=domain("a", 30, groups), b=domain("b", 30, groups), c=domain("c", 30, groups))
    split = LeaveOneOut(test_fraction=0, base_images="shared").split_of(data, "b", 0)
    assert {name: len(rows) for name, rows in split.train.items()} == {"a": 30, "c": 30}
    assert {name: len(rows) for name, rows in split.held_out.items()} == {"a": 0, "c": 0}
    assert len(split.measured["b"]) == 30
    with pytest.raises(UserError, match="test_fraction"):
        LeaveOneOut(test_fraction=0).split_of(data, "b", 0)
    data = data_of(a=domain("a", 30), b=domain("b", 20))
    split = LeaveOneOut(test_fraction=0.5).split_of(data, "a", 0)
    assert len(split.measured["a"]) == 30
    assert sorted([*split.train["b"], *split.held_out["b"]]) == list(range(20))
    data = data_of(a=domain("a", 30), b=domain("b", 60), c=domain("c", 60))
    protocol = LeaveOneOut(test_fraction=0.4)
    first, again = protocol.split_of(data, "a", 0), protocol.split_of(data, "a", 0)
    other_target = protocol.split_of(data, "b", 0)
    other_seed = protocol.split_of(data, "a", 1)
    assert np.array_equal(first.train["c"], again.train["c"])
    assert np.array_equal(first.train["c"], other_target.train["c"])
    assert not np.array_equal(first.train["c"], other_seed.train["c"])


def test_official_parts() -> None:
    train, test = np.array([5, 1, 0]), np.array([2, 3, 4])
    known = domain("a", 6, train_rows=train, test_rows=test)
    data = data_of(a=known, b=domain("b", 9))
    auto = LeaveOneOut().split_of(data, "b", 0)
    assert auto.train["a"].tolist() == [0, 1, 5]
    assert auto.held_out["a"].tolist() == [2, 3, 4]
    with pytest.raises(UserError, match=r"'b'.*official"):
        LeaveOneOut(split="official").split_of(data, "a", 0)
    random = [LeaveOneOut(split="random").split_of(data, "b", seed).train["a"].tolist() for seed in range(5)]
    assert any(rows != [0, 1, 5] for rows in random)
    empty = data_of(a=domain("a", 6, train_rows=test[:0], test_rows=test), b=domain("b", 9))
    with pytest.raises(UserError, match="'a' has no training samples"):
        LeaveOneOut().split_of(empty, "b", 0)


@pytest.mark.parametrize("protocol", [LeaveOneOut, AdaptToOne])
@pytest.mark.parametrize(("sites_each", "grouped"), [(1, False), (4, False), (4, True)])
def test_sources_are_cut_into_sites_that_share_no_sample(
    protocol: type[LeaveOneOut | AdaptToOne], sites_each: int, grouped: bool
) -> None:
    """Every sample of a source is at one of its sites, with its label; groups stay together; the target is whole."""
    groups = np.arange(30) // 2 if grouped else None
    marked = [replace(domain(name, 30, groups), inputs=np.arange(60, dtype=np.float32).reshape(30, 2)) for name in "ab"]
    data = data_of(a=marked[0], b=marked[1])
    found = protocol(targets=("b",), sites_each=sites_each).taking_part(data).domains
    names = ["a"] if sites_each == 1 else [f"a.{number}" for number in range(1, sites_each + 1)]
    assert list(found) == [*names, "b"]
    rows = [found[name].inputs[:, 0] / 2 for name in names]  # type: ignore[index]
    assert sorted(np.concatenate(rows)) == list(range(30))
    for name, own in zip(names, rows, strict=True):
        assert np.array_equal(found[name].labels, own % 3)
    if grouped:
        at = [{int(row) // 2 for row in own} for own in rows]
        assert sum(map(len, at)) == 15


def test_cut_by_labels_the_sites_classes_differ() -> None:
    data = data_of(a=domain("a", 300), b=domain("b", 3))

    def spread(**options: Any) -> float:
        found = LeaveOneOut(targets=("b",), sites_each=5, **options).taking_part(data).domains
        sizes = [len(one) for name, one in found.items() if name != "b"]
        assert sizes == [60] * 5
        shares = [np.bincount(one.labels, minlength=3) / 60 for name, one in found.items() if name != "b"]
        return float(np.std(shares, axis=0).mean())

    assert spread(cut_by="labels", label_skew=0.1) > 0.25 > 0.12 > spread(cut_by="labels", label_skew=100.0)
    assert spread() < 0.12


def test_rows_of_a_sparse_site_and_of_its_own_split() -> None:
    dense = np.array([[0, 1, 0], [2, 0, 3], [0, 0, 0], [4, 0, 0]], np.float32)
    indptr = np.array([0, 1, 3, 3, 4])
    sparse = SparseRows(dense[dense > 0], np.array([1, 0, 2, 0]), indptr, 3)
    whole = Domain("a", sparse, np.arange(4), train_rows=np.array([0, 3]), test_rows=np.array([1, 2]))
    part = part_of(whole, np.array([3, 1]), "a.1")
    assert isinstance(part.inputs, SparseRows)
    assert part.inputs.dense(np.arange(2)).tolist() == [[4, 0, 0], [2, 0, 3]]
    assert (part.train_rows.tolist(), part.test_rows.tolist()) == ([0], [1])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"targets": "all"}, "one target"),
        ({"targets": ("a", "b")}, "one target"),
        ({"targets": ("b",), "sites_each": 31}, "30 samples"),
    ],
)
def test_what_cannot_be_cut(options: dict[str, Any], said: str) -> None:
    data = data_of(a=domain("a", 30), b=domain("b", 30))
    with pytest.raises(UserError, match=said):
        LeaveOneOut(**{"sites_each": 2, **options}).taking_part(data)


def test_wrong_labels_and_settings_of_cut_sources() -> None:
    # No site has the source's name, so its labels would silently stay true.
    data = data_of(a=domain("a", 30), b=domain("b", 30))
    with pytest.raises(UserError, match="wrong_labels"):
        AdaptToOne(targets=("b",), wrong_labels={"a": 0.5}, sites_each=2).taking_part(data)
    # Runs are told apart by their settings: a new field would make finished runs start again.
    fields = {"sites_each", "cut_by", "label_skew"}
    assert not fields & set(AdaptToOne().model_dump())
    assert fields <= set(AdaptToOne(sites_each=2).model_dump())
    assert fields <= set(LeaveOneOut().model_dump())
