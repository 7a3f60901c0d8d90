"""The membership audit: what coins it throws, what it finds in a model that learned by heart, what noise does to it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest
from scipy.stats import beta
from small import experiment, features, save, write

from fedshift.deploy.audit.leakage import audit_leakage
from fedshift.deploy.audit.membership import FEWEST_SHADOWS, audit_membership, guess_coins
from fedshift.deploy.cli.audit import membership_file
from fedshift.errors import UserError
from fedshift.experiment.config.experiment import parse

LOUD = {"rounds": 30, "batch_size": 8, "lr": 0.5, "momentum": 0.9}


def options(folder: Path, **training: Any) -> dict[str, Any]:
    """Labels of site b that nothing predicts, so that a model which is right there knows them by heart."""
    noise = features(2, 40)
    noise["y"] = np.random.default_rng(0).permutation(noise["y"])
    noise["x"] = np.random.default_rng(1).normal(size=(40, 60)).astype(np.float32)
    others = {name: {**features(seed, 12), "x": np.zeros((12, 60), np.float32)} for name, seed in (("a", 1), ("c", 3))}
    where = save(folder, a=others["a"], b=noise, c=others["c"])
    return experiment(where, training={**LOUD, **training})


def test_a_model_that_knows_labels_by_heart_tells_its_members(tmp_path: Path) -> None:
    """With as many trainings as likelihood ratios take at least: half are shadow models."""
    audit_result = audit_membership(parse(options(tmp_path, rounds=12)), site="b", trainings=2 * FEWEST_SHADOWS)
    assert (audit_result.units, audit_result.trainings, audit_result.claimed) == (40, 8, None)
    assert audit_result.accuracy_of_members > 95 > 60 > audit_result.accuracy_of_others
    loss, calibrated, likelihood = audit_result.attacks
    assert loss.guesses == 8 * 2 * 8
    assert loss.right > 115
    assert loss.epsilon > 1
    assert min(calibrated.auc, likelihood.auc) > 75
    at = likelihood.at_rates[0]
    assert (likelihood.name, at.rate, at.members + at.others) == ("likelihood", 0.01, 4 * 40)
    assert at.false / at.others < 0.05 < 0.2 < at.low < at.caught / at.members < at.high


@pytest.mark.slow
def test_under_noise_it_finds_less_than_is_claimed(tmp_path: Path) -> None:
    pytest.importorskip("opacus")
    private = {"noise_multiplier": 8.0, "delta": 0.01}
    path = write(tmp_path / "e.yaml", options(tmp_path, privacy=private, rounds=5))
    membership_file(
        path, [], tmp_path / "out", runs=tmp_path, site="b", trainings=6
    )  # of two, chance alone may claim more
    stored = json.loads((tmp_path / "out" / "membership.json").read_text())
    assert stored["claimed"][0] > 0
    assert all(attack["epsilon"] <= stored["claimed"][0] for attack in stored["attacks"])
    assert [attack["name"] for attack in stored["attacks"]] == ["loss", "calibrated"]
    with pytest.raises(UserError, match="--site"):
        audit_membership(parse(options(tmp_path)), site="x")


@pytest.mark.slow
def test_noise_keeps_a_gradient_from_giving_a_sample_away(tmp_path: Path) -> None:
    """The first layer of a linear model is divided by its bias: clipping alone leaves it readable, noise does not."""
    pytest.importorskip("opacus")
    errors = []
    for sigma in (0.05, 2.0):
        privacy = {"noise_multiplier": sigma, "delta": 0.01, "clip_norm": 1e-3}
        changed = parse(options(tmp_path, privacy=privacy))
        audit_result = audit_leakage(changed, site="b", batches=(1,), iterations=1, starts=1, attack="l2")
        (case,) = [
            candidate
            for candidate in audit_result.cases
            if (candidate.exchange, candidate.attack) == ("batch", "analytic")
        ]
        errors.append(fmean(case.mse) / case.guess_mse)
    assert errors[0] < 0.7 < 1 < errors[1]


def test_the_bounds_are_those_of_clopper_and_pearson() -> None:
    """One training of ten units: two guessed to be in, two out; three of the four rightly."""
    scores = np.arange(10.0)[None]
    coins = np.array([[False, True, True, False, True, False, True, False, True, True]])
    attack = guess_coins("loss", scores, coins)
    assert ((attack.guesses, attack.right), attack.low) == ((4, 3), pytest.approx(beta.ppf(0.025, 3, 2)))
    assert (attack.high, attack.epsilon) == (pytest.approx(beta.ppf(0.975, 4, 1)), 0)
    many = guess_coins("loss", np.tile(scores, (50, 1)), np.tile(np.arange(10) > 4, (50, 1)))
    least = 0.05 ** (1 / 200)  # the one-sided bound if all are right
    assert (many.epsilon, many.auc) == (pytest.approx(math.log(least / (1 - least))), 100)
    assert guess_coins("loss", np.zeros((1, 10)), coins).auc == 50
