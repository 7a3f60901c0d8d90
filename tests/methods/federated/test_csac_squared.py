"""CSAC's alignment by mean squared error, over every pair of stages with its own attention, and distances in fusion."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from test_csac import short
from test_csac_alignment import aligner_of
from tiny import CNN, federation, start_of

from fedshift.functional.attention import cross_layer_attention
from fedshift.methods.federated.csac import CSAC


def test_mean_squared_error_over_pairs() -> None:
    """Σ_lm α_lm · mean (P_l f_l − P'_m f'_m)²; rows of α are the trained side's stages, columns the frozen side's."""
    aligner, site = aligner_of(short(measure="mse"))
    model = site.model(start_of(CSAC(), network=CNN))
    batch = next(iter(site.batches()))
    logits, features = model.with_stages(batch.inputs, aligner.stages)
    found = aligner(logits, features, batch).item()
    frozen = site.model(site.memory.weights("local_model")).eval().with_stages(batch.inputs, aligner.stages)[1]
    number = len(aligner.stages)
    layers = list(aligner.projections)
    ours = [layer(features[stage]) for layer, stage in zip(layers[:number], aligner.stages, strict=True)]
    theirs = [layer(feature) for layer, feature in zip(layers[number:], frozen.values(), strict=True)]
    shares = cross_layer_attention(torch.stack(ours), torch.stack(theirs))
    expected = crossed = 0.0
    for row, left in enumerate(ours):
        for column, right in enumerate(theirs):
            gap = float((left - right).detach().square().sum()) / left.numel()
            expected += float(shares[row, column]) * gap
            crossed += float(shares[column, row]) * gap
    assert found == pytest.approx(expected, rel=1e-5)
    assert abs(expected - crossed) > 1e-4 * abs(expected), "a mix-up of the sides would not show"


@pytest.mark.parametrize(("distance", "power"), [("l2", 1.0), ("l2", 2.0), ("l1", 1.0), ("cosine", 1.0)])
def test_shares_are_by_the_distance_that_was_chosen(distance: Any, power: float) -> None:
    """Three acquired models, layer by layer: w ∝ d^p, with d from their mean by squares, by sizes, or by the angle."""
    method = short(distance=distance, distance_power=power)
    where = federation(method)
    updates = where.ask(method.acquire, to=where.sources).keep()
    models = {site: update.weights for site, update in updates.items()}
    shares = method.fuse(updates)[1]["aggregation_weights"]
    for key in (name for name in next(iter(models.values())) if name.endswith("weight")):
        mean = np.mean([model[key].double().numpy().ravel() for model in models.values()], axis=0)
        far = {}
        for site, model in models.items():
            own = model[key].double().numpy().ravel()
            angle = 1 - own @ mean / math.sqrt((own @ own) * (mean @ mean))
            far[site] = {"l2": math.dist(own, mean), "l1": np.abs(own - mean).sum(), "cosine": angle}[distance] ** power
        expected = {site: value / sum(far.values()) for site, value in far.items()}
        assert shares[key] == pytest.approx(expected, abs=1e-6), key
