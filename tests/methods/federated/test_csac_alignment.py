"""CSAC: L_AL written out, whom its gradients reach, the features of the frozen model, alignment by squared error."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from test_csac import short, site_of
from tiny import CNN, MLP, NORMED, federation, run, start_of
from torch import Tensor

from fedshift.federation.site import Batch, Envelope, Site
from fedshift.functional.attention import cross_layer_attention
from fedshift.functional.mmd import MULTIPLIERS
from fedshift.methods.federated import csac as csac_module
from fedshift.methods.federated.csac import CSAC, Aligner
from fedshift.weights import Weights

# L_AL -----------------------------------------------------------------------------------------------------------------


def alignment_by_definition(ours: list[Tensor], theirs: list[Tensor]) -> Tensor:
    """Σ α_{l,m} MMD(M_l', L_m') with every map, kernel and sum written out; float64."""
    ours, theirs = [one.double() for one in ours], [one.double() for one in theirs]
    number, batch = len(ours), len(ours[0])
    scores = torch.zeros(2, number, number, dtype=torch.float64)
    mmd = torch.zeros(number, number, dtype=torch.float64)
    for left in range(number):
        for right in range(number):
            for a, b in zip(ours[left].flatten(2), theirs[right].flatten(2), strict=True):  # (c, d) each
                scores[0, left, right] += (a.T @ b).mean() / batch
                scores[1, left, right] += (a @ b.T).mean() / batch
            rows = torch.cat([ours[left].flatten(1), theirs[right].flatten(1)])
            squared = (rows[:, None] - rows[None]).square().sum(2)
            kernels = sum(torch.exp(-squared / (2 * scale * squared.mean())) for scale in MULTIPLIERS)
            off = ~torch.eye(batch, dtype=torch.bool)
            same = kernels[:batch, :batch][off].sum() + kernels[batch:, batch:][off].sum()  # type: ignore[index]
            mmd[left, right] = same / (batch * (batch - 1)) - 2 * kernels[:batch, batch:].mean()  # type: ignore[index]
    return (scores.softmax(2).mean(0) * mmd).sum()


def aligner_of(method: CSAC, network: dict[str, object] = CNN) -> tuple[Aligner, Site]:
    where = federation(method, network=network)
    method.start(where, start_of(method, network=network))
    site = site_of(where)
    site.begin(Envelope(2, 1, 0.0, 100))
    reference = site.model(site.memory.weights("local_model")).eval().requires_grad_(False)
    return Aligner(method, site, reference), site


@pytest.mark.parametrize(
    ("network", "stages"), [(CNN, None), (CNN, ("conv1", "hidden")), (MLP, None)], ids=["maps", "mixed", "vectors"]
)
def test_alignment_loss_against_its_definition(network: dict[str, object], stages: tuple[str, ...] | None) -> None:
    aligner, site = aligner_of(short(stages=stages), network)
    model = site.model(start_of(CSAC(), network=network))
    batch = next(iter(site.batches()))
    logits, features = model.with_stages(batch.inputs, aligner.stages)
    loss = aligner(logits, features, batch)
    ours = [layer(features[stage]) for layer, stage in zip(aligner.projections, aligner.stages, strict=False)]
    frozen = site.model(site.memory.weights("local_model")).eval().with_stages(batch.inputs, aligner.stages)[1]
    count = len(aligner.stages)
    theirs = [layer(feature) for layer, feature in zip(aligner.projections[count:], frozen.values(), strict=True)]  # type: ignore[union-attr]
    assert len({one.shape for one in (*ours, *theirs)}) == 1
    assert loss.item() == pytest.approx(alignment_by_definition(ours, theirs).item(), abs=2e-5)


def test_gradients_reach_the_model_and_both_projections_only() -> None:
    aligner, site = aligner_of(short())
    model = site.model()
    batch = next(iter(site.batches()))
    logits, features = model.with_stages(batch.inputs, aligner.stages)
    aligner(logits, features, batch).backward()
    assert len(list(aligner.parameters())) == 2 * 4  # two layers of weight and bias a side
    for parameter in (*aligner.parameters(), model.get_parameter("features.conv1.0.weight")):
        assert parameter.grad is not None
        assert parameter.grad.abs().sum() > 0
    assert model.classifier.weight.grad is None
    assert all(parameter.grad is None for parameter in aligner._reference[0].parameters())


def attention_of(**options: Any) -> Tensor:
    aligner, site = aligner_of(short(**options))
    batch = next(iter(site.batches()))
    features = list(site.model().with_stages(batch.inputs, aligner.stages)[1].values())
    sides = [
        [layer(one) for layer, one in zip(layers, features, strict=True)]
        for layers in (aligner.projections[:2], aligner.projections[2:])
    ]  # type: ignore[index, call-overload]
    return aligner._attention(*(torch.stack(side) for side in sides))


def test_attention_of_the_ablations() -> None:
    both, position, channel = attention_of(), attention_of(attention="position"), attention_of(attention="channel")
    torch.testing.assert_close(both, (position + channel) / 2)
    for found in (both, position, channel, attention_of(scale=True), attention_of(query_key=True)):
        torch.testing.assert_close(found.sum(1), torch.ones(2))
        assert not found.requires_grad
    assert attention_of(alignment="same_layer").tolist() == [[1, 0], [0, 1]]
    assert attention_of(attention="none").tolist() == [[1, 1], [1, 1]]
    assert attention_of(attention="none", uniform_attention="per_row").tolist() == [[0.5, 0.5], [0.5, 0.5]]


def test_queries_and_keys_have_convolutions_of_their_own() -> None:
    """Queries of zeros find every layer alike, whatever the keys are; keys of zeros, too."""
    for zeros in (slice(0, 2), slice(2, 4)):
        aligner, _ = aligner_of(short(query_key=True, attention="position"))
        maps = torch.randn(2, 2, 3, aligner.options.projection_channels, 4, 4)
        whole = aligner._attention(*maps)
        with torch.no_grad():
            for layer in aligner._keys[0][zeros]:
                for value in layer.parameters():
                    value.zero_()
        assert (whole - 0.5).abs().max() > 1e-3
        torch.testing.assert_close(aligner._attention(*maps), torch.full((2, 2), 0.5))


def test_projections_are_reduced_as_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """These maps are halved, for which ``strided`` has the kernel of ``released``: hence by what is asked for."""
    asked: list[object] = []
    real = csac_module.projection_layer

    def noted(*shapes: Any, reduction: Any) -> torch.nn.Module:
        asked.append(reduction)
        return real(*shapes, reduction=reduction)

    monkeypatch.setattr(csac_module, "projection_layer", noted)
    aligner_of(short(projection="strided"))
    assert asked == ["strided"] * 4


@pytest.mark.parametrize("frozen", ["local", "fused"])
@pytest.mark.parametrize("network", [CNN, NORMED], ids=["plain", "batch_norm"])
def test_cached_features_are_those_computed_again(
    monkeypatch: pytest.MonkeyPatch, network: dict[str, object], frozen: str
) -> None:
    """In every step of a run: what the cache gives for a batch is what the frozen model computes for that batch.

    The weights of whole runs are not compared, since they part on rounding alone. A product may round equal rows
    otherwise at another place or batch size (which of them depends on the processor). The site with one sample trains
    on a batch that holds it twice: BatchNorm divides the difference of its two rows, which is rounding, by sqrt(1e-5),
    and the network has two such layers. The MMD with its bandwidth from the data adds to that.
    """
    given = CSAC.calibrate

    def calibrate(self: CSAC, site: Site, weights: Weights) -> Any:
        asked[site.name] = site.memory.weights("local_model") if frozen == "local" else weights
        return given(self, site, weights)

    def compared(self: Aligner, batch: Batch) -> tuple[Tensor, list[Tensor]]:
        logits, features = read(self, batch)
        model = self.site.model(asked[self.site.name]).eval()
        with torch.no_grad():
            expected, stages = model.with_stages(batch.inputs, self.stages)
        for found, wanted in zip((logits, *features), (expected, *stages.values()), strict=True):
            torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
        steps.append(self.site.name)
        return logits, features

    asked: dict[str, Weights] = {}
    steps: list[str] = []
    read = Aligner._frozen
    monkeypatch.setattr(CSAC, "calibrate", calibrate)
    monkeypatch.setattr(Aligner, "_frozen", compared)
    _, where = run(short(calibration_steps=5, logit_mmd=True, frozen=frozen), network=network)
    assert ("frozen_features" in site_of(where).scratch) == (frozen == "local")
    assert steps == 2 * [site for site in ("large", "small", "one") for _ in range(5)]


def test_augmented_samples_are_not_cached() -> None:
    state, where = run(short(), augmentation="ccst")
    assert "frozen_features" not in site_of(where).scratch
    assert state.weights != run(short())[0].weights


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
