"""adapt_to_one without a domain, and with sources whose labels are wrong."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from adapting import adapting, data_of, domain, model_of
from small import features, outcome, save, sites

import fedshift
from fedshift.errors import UserError
from fedshift.experiment.protocols.adapt_to_one import AdaptToOne
from fedshift.experiment.protocols.leave_one_out import LeaveOneOut


@pytest.mark.slow
def test_a_dropped_domain_takes_no_part(tmp_path: Path) -> None:
    """The same bits as without its file."""
    where = sites(tmp_path)
    dropped = fedshift.run(adapting(where, {"drop": ["c"], "targets": "all"}), tmp_path / "runs")
    without = {name: path for name, path in where.items() if name != "c"}
    whole = fedshift.run(adapting(without, {"targets": "all"}), tmp_path / "other")
    assert {run.target for run in dropped.runs} == {"a", "b"}
    assert dropped.rows() == whole.rows()
    for run in dropped.runs:
        assert run.data["training_samples"].keys() == {"a", "b"} - {run.target}
        assert model_of(tmp_path / "runs", run.method, run.target) == model_of(
            tmp_path / "other", run.method, run.target
        )
    assert [domain.name for domain in fedshift.check(adapting(where, {"drop": ["c"]})).domains] == ["a", "b"]


def test_wrong_labels_are_those_of_training_rows_of_the_named_source() -> None:
    data = data_of(a=domain("a", 30), b=domain("b", 90), c=domain("c", 45))
    before = {name: one.labels.copy() for name, one in data.domains.items()}
    protocol = AdaptToOne(wrong_labels={"b": 0.5, "a": 1.0})  # a is the target: it has no labels to make wrong
    split = protocol.split_of(data, "a", 0)
    shown = protocol.with_wrong_labels(data, split, 0)
    changed = np.flatnonzero(shown.domains["b"].labels != before["b"])
    assert len(changed) == round(len(split.train["b"]) / 2)
    assert set(changed) <= set(split.train["b"])
    assert shown.domains["a"] is data.domains["a"]
    assert shown.domains["c"] is data.domains["c"]
    assert shown.domains["b"].inputs is data.domains["b"].inputs
    for name, labels in before.items():  # what is measured is the data as they were
        assert np.array_equal(data.domains[name].labels, labels)
    again = protocol.with_wrong_labels(data, split, 0)
    assert np.array_equal(again.domains["b"].labels, shown.domains["b"].labels)
    other = protocol.with_wrong_labels(data, split, 1)
    assert not np.array_equal(other.domains["b"].labels, shown.domains["b"].labels)
    assert AdaptToOne().with_wrong_labels(data, split, 0) is data
    assert LeaveOneOut().with_wrong_labels(data, split, 0) is data
    data = data_of(a=domain("a", 30), b=domain("b", 90))
    protocol = AdaptToOne(wrong_labels={"b": 1.0}, wrong_labels_rule="shift")
    split = protocol.split_of(data, "a", 0)
    shown, rows = protocol.with_wrong_labels(data, split, 0).domains["b"].labels, split.train["b"]
    assert np.array_equal(shown[rows], (data.domains["b"].labels[rows] + 1) % 3)
    held_out = split.held_out["b"]
    assert np.array_equal(shown[held_out], data.domains["b"].labels[held_out])


def test_names_of_wrong_labels_and_targets() -> None:
    # Its turn as the target would be a run without a wrong label, averaged with the others.
    data = data_of(a=domain("a", 30), b=domain("b", 90), c=domain("c", 45))
    for protocol in (AdaptToOne(wrong_labels={"b": 0.5}), AdaptToOne(wrong_labels={"b": 0.5}, targets=("a", "b"))):
        with pytest.raises(UserError, match=r"wrong_labels: 'b' is a target too.*targets: \[a"):
            protocol.taking_part(data)
    assert AdaptToOne(wrong_labels={"b": 0.5}, targets=("a", "c")).taking_part(data) is data
    assert list(AdaptToOne(wrong_labels={"b": 0.5}, drop=("b",)).taking_part(data).domains) == ["a", "c"]
    data = data_of(north=domain("north", 30), south=domain("south", 90))
    for field in ({"drop": ("soth",)}, {"wrong_labels": {"soth": 0.1}}):
        with pytest.raises(
            UserError, match=rf"^protocol\.{next(iter(field))}: no domain is called 'soth'; did you mean 'south'\?"
        ):
            AdaptToOne(**field).taking_part(data)
    assert AdaptToOne().taking_part(data) is data
    assert LeaveOneOut().taking_part(data) is data
    # A malicious domain that is dropped does no harm: one experiment file serves both.
    both = AdaptToOne(drop=("south",), wrong_labels={"south": 0.5})
    assert list(both.taking_part(data).domains) == ["north"]


def test_what_is_measured_has_true_labels(tmp_path: Path) -> None:
    """Sources that all say the next class teach that, and neither the target nor a held-out part confirms it."""
    where = save(tmp_path, a=features(1, 90), b=features(2, 90), c=features(3, 90))
    training = {"rounds": 6, "batch_size": 8, "lr": 0.2, "momentum": 0.9}
    methods = ["fedavg", "source_only", "oracle"]
    true = fedshift.run(adapting(where, training=training, methods=methods), tmp_path / "true")
    wrong = {"wrong_labels": {"b": 1.0, "c": 1.0}, "wrong_labels_rule": "shift"}
    false = fedshift.run(adapting(where, wrong, training=training, methods=methods), tmp_path / "false")
    for one, other in zip(true.runs, false.runs, strict=True):
        if one.method == "oracle":  # it has the target's labels, which nobody touched
            assert model_of(tmp_path / "true", "oracle") == model_of(tmp_path / "false", "oracle")
            continue
        before, after = one.selected["last"], other.selected["last"]
        assert before.accuracy > 75 > 25 > after.accuracy, one.method
        assert before.source_accuracy > 75 > 25 > after.source_accuracy, one.method
    with pytest.raises(UserError, match=r"another experiment: protocol\.wrong_labels"):
        fedshift.run(adapting(where, training=training, methods=methods), tmp_path / "false")


@pytest.mark.slow
@pytest.mark.usefixtures("shared_workers")
def test_wrong_labels_in_a_pool_of_processes(tmp_path: Path) -> None:
    """Each seed has its own wrong labels; a worker must not go on with those of the part before."""
    where = sites(tmp_path)
    protocol = {"targets": ["a", "b"], "seeds": [0, 1], "wrong_labels": {"c": 0.5}}
    options = adapting(where, protocol, methods=["kd3a", "source_only"])
    fedshift.run(options, tmp_path / "here")
    fedshift.run({**options, "engine": {"name": "local", "threads": 1, "workers": 2}}, tmp_path / "there")
    assert outcome(tmp_path / "there") == outcome(tmp_path / "here")
    fedshift.run(adapting(where, {**protocol, "wrong_labels": {}}, methods=["kd3a"]), tmp_path / "true")
    assert model_of(tmp_path / "true", "kd3a", "b", 1) != model_of(tmp_path / "here", "kd3a", "b", 1)
