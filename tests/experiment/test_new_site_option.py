"""What adapts to a new site, from an experiment file to a prediction: only what answers at the unseen site changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small import experiment, features, save

import fedshift
from fedshift.errors import UserError
from fedshift.experiment.compatibility import check_fit
from fedshift.experiment.config.experiment import parse
from fedshift.experiment.plan import Plan
from fedshift.experiment.predict import load_model
from fedshift.methods.composition.new_site import NewSite
from fedshift.report.conditions import conditions

UNSEEN = {"protocol": {"targets": ["z"], "seeds": [0]}, "training": {"rounds": 4, "batch_size": 8, "lr": 0.1}}


def options(where: dict[str, str], **changes: Any) -> dict[str, Any]:
    methods = [{"name": "fedavg"}, {"name": "fedavg", "batch_norm_at_new_site": 1}]
    return experiment(where, model={"name": "mlp", "hidden": [8], "batch_norm": True}, methods=methods, **changes)


def test_the_same_model_answers_better_at_a_shifted_site(tmp_path: Path) -> None:
    far = features(4, 60, 4.0)
    where = save(tmp_path, a=features(1, 60), b=features(2, 60), z=far)
    found = fedshift.run(options(where, **UNSEEN), tmp_path / "runs")
    plain, adapted = found.runs
    assert (plain.method, adapted.method) == ("fedavg", "fedavg+newsite")
    models = [load_model(found.folder / run.method / "z" / "seed-0") for run in found.runs]
    assert all(map(np.array_equal, *(list(map(np.asarray, model.network.state_dict().values())) for model in models)))
    assert adapted.selected["last"].accuracy > plain.selected["last"].accuracy + 10
    data = tmp_path / "far.npz"
    np.savez(data, x=far["x"])
    for model, run in zip(models, found.runs, strict=True):
        right = [int(one.predicted) == label for one, label in zip(model.predict(data), far["y"], strict=True)]
        assert run.accuracy() == pytest.approx(100 * np.mean(right), abs=0.02)


def test_the_recipe_turns_the_classifier_for_vectors(tmp_path: Path) -> None:
    """The same weights answer otherwise, in the run and in `predict`; an exported file answers with those weights."""
    far = features(4, 60, 1.0)
    where = save(tmp_path, a=features(1, 60), b=features(2, 60), z=far)
    names = {"kept": {"templates": None}, "turned": {}, "by-option": {"templates": None, "classifier_at_new_site": 16}}
    methods = [{"name": "recipe", "label": label, **one} for label, one in names.items()]
    found = fedshift.run(options(where, **UNSEEN) | {"methods": methods}, tmp_path / "runs")
    models = {run.method: load_model(found.folder / run.method / "z" / "seed-0") for run in found.runs}
    inputs = np.asarray(far["x"], dtype=np.float32)
    kept, turned, by_option = (models[name].scores(inputs) for name in names)
    assert np.abs(kept - turned).max() > 0.01
    np.testing.assert_array_equal(turned, by_option)
    np.testing.assert_array_equal(models["turned"].scores(inputs, adapted=False), kept)
    for run, scores in zip(found.runs, (kept, turned, by_option), strict=True):
        right = 100 * np.mean(scores.argmax(1) == np.asarray(far["y"]))
        assert run.accuracy() == pytest.approx(right, abs=0.02)


def test_pooled_training_turns_its_classifier_as_the_recipe_does(tmp_path: Path) -> None:
    """On the recipe's terms: its plug-in, its turned classifier. Training is that of the row without the new site."""
    far = features(4, 60, 1.0)
    where = save(tmp_path, a=features(1, 60), b=features(2, 60), z=far)
    names = {"kept": {}, "turned": {"classifier_at_new_site": 16}}
    methods = [{"name": "deepall", "label": label, "local": ["dropout"], **one} for label, one in names.items()]
    found = fedshift.run(options(where, **UNSEEN) | {"methods": methods}, tmp_path / "runs")
    kept, turned = (load_model(found.folder / name / "z" / "seed-0") for name in names)
    inputs = np.asarray(far["x"], dtype=np.float32)
    np.testing.assert_array_equal(turned.scores(inputs, adapted=False), kept.scores(inputs))
    by_hand = NewSite(classifier=16).adapt(kept.network, lambda: [torch.from_numpy(inputs)])
    with torch.no_grad():
        expected = by_hand(torch.from_numpy(inputs)).softmax(1).numpy()
    np.testing.assert_allclose(turned.scores(inputs), expected, atol=1e-5)
    assert np.abs(turned.scores(inputs) - kept.scores(inputs)).max() > 0.01
    for run, model in zip(found.runs, (kept, turned), strict=True):
        assert run.accuracy() == pytest.approx(100 * np.mean(model.scores(inputs).argmax(1) == far["y"]), abs=0.02)
    assert conditions(found.runs)["turned"].words == ("pooled samples", "the target's unlabelled samples")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": {"name": "linear"}}, "no BatchNorm"),
        ({"protocol": {"kind": "adapt_to_one"}}, "has no unseen site"),
        (
            {"protocol": {"kind": "adapt_to_one"}, "methods": [{"name": "fedavg", "classifier_at_new_site": 16}]},
            r"classifier_at_new_site: .*has no unseen site",
        ),
    ],
)
def test_where_no_new_site_could_use_it(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    whole = {**options(save(tmp_path, a=features(1), b=features(2), z=features(3))), **changes}
    parsed = parse(whole)
    with pytest.raises(UserError, match=words):
        check_fit(Plan(parsed, parsed.data.build()))
