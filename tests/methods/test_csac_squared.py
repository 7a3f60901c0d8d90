"""CSAC's alignment by mean squared error, over every pair of stages with its own attention."""

from __future__ import annotations

import pytest
import torch
from test_csac import aligner_of, short
from tiny import CNN, start_of

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
