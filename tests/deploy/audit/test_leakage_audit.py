"""The leakage audit on data of seconds: what recovers samples, what does not, and that it repeats."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
import pytest
from small import experiment, features, images, save

import fedshift
from fedshift.deploy.audit.attacks import Case, Watcher
from fedshift.deploy.audit.leakage import LeakageAudit, audit_leakage, picture
from fedshift.deploy.remote.policy import Policy
from fedshift.errors import UserError
from fedshift.experiment.config.experiment import parse

MLP = {"name": "mlp", "hidden": [12]}


def tiny(seed: int, samples: int) -> dict[str, Any]:
    return images(seed, samples, size=6)


def options(folder: Path, kind: Any = tiny, samples: int = 24, **changes: Any) -> dict[str, Any]:
    where = save(folder, a=kind(1, 20), b=kind(2, samples), c=kind(3, 20))
    return experiment(where, **{"model": MLP, **changes})


def audit(folder: Path, *, kind: Any = tiny, samples: int = 24, **rest: Any) -> LeakageAudit:
    asked = {
        key: rest.pop(key)
        for key in ("site", "batches", "attack", "iterations", "starts", "repeats", "watcher", "policy")
        if key in rest
    }
    made = parse(options(folder, kind, samples, **rest))
    return audit_leakage(made, **{"batches": (1,), "iterations": 60, "starts": 2, **asked})


def pick(result: LeakageAudit, exchange: str, attack: str, batch: int = 1) -> Case:
    [case] = [c for c in result.cases if (c.exchange, c.attack, c.batch) == (exchange, attack, batch)]
    return case


@pytest.mark.slow
def test_one_gradient_gives_the_sample_away_and_an_epoch_does_not(tmp_path: Path) -> None:
    audit_result = audit(tmp_path, batches=(1, 2), iterations=80)
    assert [(case.exchange, case.batch, case.attack) for case in audit_result.cases] == [
        ("batch", 1, "l2"),
        ("batch", 1, "cosine"),
        ("batch", 1, "analytic"),
        ("epoch", 1, "l2"),
        ("epoch", 1, "cosine"),
        ("epoch", 1, "analytic"),
        ("batch", 2, "l2"),
        ("batch", 2, "cosine"),
        ("epoch", 2, "l2"),
        ("epoch", 2, "cosine"),
    ]
    assert (audit_result.site, audit_result.target, audit_result.samples) == ("b", "a", 18)
    assert (pick(audit_result, "batch", "l2").steps, pick(audit_result, "epoch", "l2").steps) == (0, 18)
    exact = pick(audit_result, "batch", "analytic")
    assert fmean(exact.mse) < 1e-8
    assert exact.ssim == pytest.approx([1.0], abs=1e-4)
    searched, later = pick(audit_result, "batch", "l2"), pick(audit_result, "epoch", "l2")
    assert fmean(searched.mse) < 1e-4 < searched.guess_mse
    assert fmean(later.mse) > 100 * fmean(searched.mse)
    assert fmean(pick(audit_result, "epoch", "analytic").mse) > 1e-3
    for case in audit_result.cases:
        assert case.originals.shape == case.reconstructions.shape == (case.batch, 1, 6, 6)
        assert 0 <= case.reconstructions.min() <= case.reconstructions.max() <= 1
        assert case.mse == pytest.approx(((case.originals - case.reconstructions) ** 2).mean((1, 2, 3)), abs=1e-7)
        assert case.correlation is None
        if case.exchange == "batch" and case.batch == 1:
            assert (case.labels_right, case.labels_by, case.labels) == (1, "sign", case.inferred)
        if case.exchange == "epoch":
            assert case.labels_right is None
            assert fmean(case.mse) > 0.4 * case.guess_mse  # about what the mean sample is worth
    record = json.dumps(audit_result.record(), allow_nan=False)
    assert "originals" not in record
    assert picture(audit_result.cases).startswith(b"\x89PNG")


def test_crafted_networks_read_samples_that_the_policy_keeps(tmp_path: Path) -> None:
    """The experiment's network and one of the coordinator's choice, in both layouts."""
    quick: dict[str, Any] = {"samples": 60, "iterations": 1, "starts": 1, "attack": "l2"}
    audit_result = audit(tmp_path, **quick)
    assert [(case.chosen, case.layout) for case in audit_result.crafted] == [
        (False, "bins"), (False, "traps"), (True, "bins"), (True, "traps"),
    ]  # fmt: skip
    assert all(case.samples == audit_result.samples for case in audit_result.crafted)
    wide = [case for case in audit_result.crafted if case.chosen]
    assert max(case.read for case in wide) > 0.5 * audit_result.samples
    assert all(case.refused == "policy.exposure: 0.4" for case in wide)
    json.dumps(audit_result.record(), allow_nan=False)
    pinned = audit(tmp_path, policy=Policy(exposure=1, models=(MLP,)), **quick)
    assert [case.refused for case in pinned.crafted] == [None, None, "policy.models", "policy.models"]
    assert [case.read for case in pinned.crafted] == [case.read for case in audit_result.crafted]


def test_of_a_network_with_convolutions_only_the_chosen_one_is_crafted(tmp_path: Path) -> None:
    cnn = {"name": "mnist_cnn", "channels": [2, 2], "hidden": 4}
    audit_result = audit(tmp_path, model=cnn, iterations=1, starts=1, attack="l2")
    assert [case.chosen for case in audit_result.crafted] == [True, True]
    assert audit_result.crafted[0].network["name"] == "mlp"


@pytest.mark.slow
def test_vectors_have_no_ssim(tmp_path: Path) -> None:
    audit_result = audit(tmp_path, kind=features, attack="l2", iterations=100)
    case = pick(audit_result, "batch", "l2")
    assert not audit_result.images
    assert (case.psnr, case.ssim, case.guess_psnr, case.guess_ssim) == (None, None, None, None)
    assert (case.correlation, case.reconstructions.shape) == (pytest.approx([1.0], abs=1e-3), (1, 5))
    assert pick(audit_result, "batch", "analytic").correlation == pytest.approx([1.0], abs=1e-6)


@pytest.mark.slow  # the import of transformers takes seconds
def test_tokens_are_refused_in_a_line(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    sizes = {
        "vocab_size": 9,
        "hidden_size": 4,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "intermediate_size": 4,
    }
    tokens = {"x": np.ones((6, 3), int), "y": np.arange(6) % 2}
    where = save(tmp_path, a=tokens, b=tokens)
    with pytest.raises(UserError, match="holds tokens"):
        audit_leakage(parse(experiment(where, model={"name": "hf:bert", **sizes})))


def test_repeats_are_of_other_samples_and_give_bounds(tmp_path: Path) -> None:
    once, three = (audit(tmp_path, kind=features, attack="l2", iterations=2, repeats=number) for number in (1, 3))
    for case, all_three in zip(once.cases, three.cases, strict=True):
        assert (case.bounds, case.repeats, all_three.repeats) == (None, 1, 3)
        assert all_three.correlation is not None
        assert len(all_three.correlation) == len(set(all_three.mse)) == len(all_three.labels) == 3
        assert all_three.correlation[:1] == case.correlation
        assert all_three.bounds is not None
        low, high = all_three.bounds
        assert (low + high) / 2 == pytest.approx(fmean(all_three.correlation))
        # Student's t with two degrees of freedom: 4.303 standard errors.
        assert (high - low) / 2 == pytest.approx(4.3027 * stdev(all_three.correlation) / 3**0.5, rel=1e-4, abs=1e-9)
    json.dumps(three.record(), allow_nan=False)


def four(folder: Path, kind: Any, **changes: Any) -> LeakageAudit:
    """An audit where a sum has three sites."""
    where = save(folder, a=kind(1, 20), b=kind(2, 24), c=kind(3, 20), d=kind(4, 48))
    made = parse(experiment(where, model=MLP, **changes))
    return audit_leakage(made, batches=(1,), iterations=2, starts=1)


@pytest.mark.slow
def test_a_sum_hides_what_a_single_site_shows(tmp_path: Path) -> None:
    result = four(tmp_path, tiny)
    assert [(case.exchange, case.sites, case.attack) for case in result.cases] == [
        (exchange, sites, attack)
        for sites in (1, 3)
        for exchange in ("batch", "epoch")
        for attack in ("l2", "cosine", "analytic")
    ]
    alone, summed = (case for case in result.cases if (case.exchange, case.attack) == ("batch", "analytic"))
    assert fmean(alone.mse) < 1e-8
    assert fmean(summed.mse) > 1e-3
    searched = result.cases[6]
    assert searched.reconstructions.shape == searched.originals.shape == (3, 1, 6, 6)  # one sample of each site
    assert (len(searched.labels), len(searched.inferred)) == (3, 3)
    assert alone.originals.tolist() in searched.originals[:, None].tolist()  # the single site's is among them
    assert result.cases[9].steps > result.cases[3].steps == result.samples
    assert picture(result.cases).startswith(b"\x89PNG")


def test_the_sum_of_equal_samples_shows_the_sample(tmp_path: Path) -> None:
    """What is attacked is the weighted mean of the sites: where all are equal, it is what each sends."""

    def same(seed: int, samples: int) -> dict[str, Any]:
        drawn = images(1, samples, size=6)
        return {"x": np.repeat(drawn["x"][:1], samples, 0), "y": np.arange(samples) % 3}

    result = four(tmp_path, same, training={"rounds": 1, "lr": 0.05, "momentum": 0.9})
    for case in result.cases:
        if case.attack == "analytic":
            assert fmean(case.mse) < 1e-6
    for alone, summed in zip(result.cases[:6], result.cases[6:], strict=True):
        assert summed.guess_mse == pytest.approx(alone.guess_mse, abs=1e-9)


@pytest.mark.slow
def test_an_epoch_of_one_step_is_a_gradient(tmp_path: Path) -> None:
    """A site with a single mini-batch sends its gradient, whatever the exchange is called; momentum, weight decay
    and the layers' own learning rates hide nothing.
    """
    training = {"rounds": 1, "lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}
    training["layer_rates"] = {"features": 0.5}
    audit_result = audit(tmp_path, samples=1, iterations=60, training=training)
    whole = pick(audit_result, "epoch", "analytic")
    assert (whole.steps, whole.labels_right, audit_result.samples) == (1, 1, 1)
    assert fmean(whole.mse) < 1e-6
    assert fmean(pick(audit_result, "epoch", "l2").mse) < 1e-3
    case = pick(audit(tmp_path, samples=4, batches=(3,), iterations=1), "epoch", "l2", 3)
    assert case.labels_right == (Counter(case.labels) & Counter(case.inferred)).total() <= 3


@pytest.mark.slow  # three audits
def test_the_same_again(tmp_path: Path) -> None:
    def numbers(result: LeakageAudit) -> list[dict[str, Any]]:
        records = [case.record() for case in result.cases]
        return [{key: value for key, value in record.items() if key != "seconds"} for record in records]

    first, second = (audit(tmp_path, batches=(1, 2), iterations=20) for _ in range(2))
    assert numbers(first) == numbers(second)
    for left_case, other in zip(first.cases, second.cases, strict=True):
        np.testing.assert_array_equal(left_case.reconstructions, other.reconstructions)
    protocol = {"targets": ["a"], "seeds": [7], "test_fraction": 0.3}
    assert numbers(audit(tmp_path, batches=(1, 2), iterations=20, protocol=protocol)) != numbers(first)
    # A size is attacked in the same way whatever else is.
    alone = audit(tmp_path, batches=(2,), iterations=20)
    assert numbers(alone) == numbers(first)[-4:]


class Counting(Watcher):
    def __init__(self) -> None:
        self.total, self.titles, self.done = 0, list[str](), 0

    def begin(self, evaluations: int) -> None:
        self.total = evaluations

    def case(self, title: str) -> None:
        self.titles.append(title)

    def advance(self, number: int) -> None:
        self.done += number


@pytest.mark.slow
def test_a_watcher_hears_of_every_evaluation(tmp_path: Path) -> None:
    watcher = Counting()
    audit(tmp_path, batches=(1, 2, 2), iterations=25, starts=3, watcher=watcher)
    assert watcher.total == watcher.done == 2 * 2 * 2 * 25 * 3
    assert (watcher.titles[0], len(watcher.titles)) == ("batch, 1, l2", 11)
    assert watcher.titles[-1] == "crafted networks"


@pytest.mark.slow
def test_other_networks_and_training(tmp_path: Path) -> None:
    """Convolutions, BatchNorm, dropout, augmentation, Adam: everything runs and gives finite numbers."""
    cnn = {"name": "mnist_cnn", "channels": [2, 2], "hidden": 4}
    drop = {"name": "mlp", "hidden": [6], "dropout": 0.5, "batch_norm": True}
    adam = {"rounds": 1, "optimizer": "adam", "lr": 0.01, "augmentation": "digits"}

    def larger(seed: int, samples: int) -> dict[str, Any]:
        return images(seed, samples, size=12)

    for model, kind, training in ((cnn, larger, adam), (drop, tiny, {"rounds": 1, "clip_norm": 0.1})):
        made = parse(options(tmp_path, kind, model=model, training=training))
        audit_result = audit_leakage(made, batches=(3,), iterations=8, starts=1)
        assert {case.attack for case in audit_result.cases} == {"l2", "cosine"}
        for case in audit_result.cases:
            assert np.isfinite([*case.mse, *(case.ssim or ()), case.distance or 0.0]).all()


def test_after_training(tmp_path: Path) -> None:
    made = options(tmp_path, samples=24)
    folder = fedshift.run(made, tmp_path / "runs").folder / "fedavg" / "a" / "seed-0"
    audit_result = audit_leakage(parse(made), batches=(1,), iterations=5, starts=1, model=folder)
    assert str(folder) in audit_result.weights
    assert fmean(pick(audit_result, "batch", "analytic").mse) < 1e-6
    before = audit_leakage(parse(made), batches=(1,), iterations=5, starts=1)
    assert pick(before, "batch", "l2").distance != pick(audit_result, "batch", "l2").distance
    other = parse(options(tmp_path, model={"name": "mlp", "hidden": [5]}))
    with pytest.raises(UserError, match="holds another network than the experiment's mlp"):
        audit_leakage(other, model=folder)


def test_what_is_sent_more_often_than_once_an_epoch_is_said(tmp_path: Path) -> None:
    often = [{"name": "kd3a", "aggregations_per_epoch": 5}]
    shown = {"methods": often, "protocol": {"kind": "adapt_to_one", "targets": ["a"]}}
    audit_result = audit_leakage(parse(options(tmp_path, **shown)), batches=(2,), iterations=1, starts=1)
    steps = next(case.steps for case in audit_result.cases if case.exchange == "epoch")
    note, *sums = audit_result.notes
    assert sums[0] == "no sum was attacked: a sum needs 3 labelled sites, here are 2"
    assert "kd3a cannot run with aggregation: secure" in sums[1]
    assert f"kd3a sends its model after {round(steps / 5)} of the {steps} mini-batches" in note
    shown["methods"] = [{"name": "kd3a"}]
    assert audit_leakage(parse(options(tmp_path, **shown)), batches=(2,), iterations=1, starts=1).notes == (*sums,)


def test_sites(tmp_path: Path) -> None:
    every = {"targets": "all", "seeds": [0], "test_fraction": 0.3}
    quick = {"iterations": 1, "starts": 1}
    assert (audit(tmp_path, protocol=every, **quick).site, audit(tmp_path, protocol=every, **quick).target) == (
        "b",
        "a",
    )
    audit_result = audit(tmp_path, protocol=every, site="a", **quick)
    assert (audit_result.site, audit_result.target) == ("a", "b")
    adapt = {"kind": "adapt_to_one", "targets": ["b"], "seeds": [3], "test_fraction": 0.2}
    audit_result = audit(tmp_path, protocol=adapt, site="c", **quick)
    assert (audit_result.site, audit_result.target, audit_result.seed) == ("c", "b", 3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"site": "bb"}, "--site: no site is called 'bb'; did you mean 'b'"),
        ({"site": "a"}, "--site: 'a' is the experiment's only target and sends no gradient; known: b, c"),
        ({"batches": (1, 19)}, "--batch 19: site 'b' has only 18 training samples"),
        ({"batches": ()}, "whole numbers of at least 1"),
        ({"iterations": 0}, "whole numbers of at least 1"),
        ({"attack": "cosin"}, "--attack: 'cosin' is not an attack; did you mean 'cosine'"),
    ],
)
def test_what_cannot_be_audited(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        audit(tmp_path, **changes)


def test_batch_norm_needs_two_samples(tmp_path: Path) -> None:
    made = parse(options(tmp_path, model={"name": "mlp", "hidden": [6], "batch_norm": True}))
    with pytest.raises(UserError, match="BatchNorm, which cannot train on one sample; give --batch 4 --batch 8"):
        audit_leakage(made)
