"""FedDG-ELCFS on volumes with masks: the meta loss by loops over voxels, its gradient by differences, and copies."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from test_elcfs_masks import boundary, dice
from tiny import data_set
from torch import Tensor, nn

from fedshift.data.builders.scanned_balls import ScannedBalls
from fedshift.data.domain import Preprocessing
from fedshift.data.tasks.objective import Classes
from fedshift.errors import UserError
from fedshift.federation.site import Batch
from fedshift.functional.spectra import low_frequencies
from fedshift.methods.base import Samples
from fedshift.methods.federated.elcfs import ELCFS, _Bank
from fedshift.models.network import Network
from fedshift.weights import Weights

INNER, WEIGHT, TEMPERATURE = 0.3, 0.4, 0.3
assert data_set  # the tiny sites lie beside these tests


def network() -> Network:
    """One convolution, and one score per structure from its maps."""
    torch.manual_seed(5)
    first, last = nn.Conv3d(1, 3, 3, padding=1), nn.Conv3d(3, 2, 1)
    return Network(first, last, embedding_size=3, classes=2, stages={}, alignment_stages=())


def batch() -> tuple[Batch, Tensor]:
    """Two generated volumes with their masks, and copies of them that look otherwise."""
    domain = ScannedBalls(size=16, per_site=2).build().domains["north"]
    inputs = torch.from_numpy(np.asarray(domain.inputs)).float() / 255
    copies = 0.5 * inputs + 0.1 + 0.02 * torch.randn(inputs.shape, generator=torch.Generator().manual_seed(0))
    assert domain.masks is not None
    masks = torch.from_numpy(np.asarray(domain.masks)).float()
    return Batch(inputs, masks, torch.zeros(2), torch.arange(2)), copies


def objective(values: dict[str, Tensor], whole: Batch, copies: Tensor) -> float:
    """L(x; θ) + L(t; θ̂) + γ L_boundary(x, t; θ̂) with θ̂ by one step, in double precision, losses by loops."""
    start = {name: value.clone().requires_grad_(True) for name, value in values.items()}
    masks = whole.targets.double()

    def maps_of(inputs: Tensor, at: dict[str, Tensor]) -> Tensor:
        return F.conv3d(inputs.double(), at["features.weight"], at["features.bias"], padding=1)

    def scores_of(maps: Tensor, at: dict[str, Tensor]) -> Tensor:
        return F.conv3d(maps, at["classifier.weight"], at["classifier.bias"])

    scores = scores_of(maps_of(whole.inputs, start), start)
    found = scores.sigmoid()
    both, sizes = (found * masks).sum((0, 2, 3, 4)), (found + masks).sum((0, 2, 3, 4))
    loss = 1 - ((2 * both + 1e-5) / (sizes + 1e-5)).mean()
    steps = torch.autograd.grad(loss, list(start.values()))
    ahead = {name: (value - INNER * step).detach() for (name, value), step in zip(start.items(), steps, strict=True)}
    there = maps_of(torch.cat([whole.inputs, copies]), ahead)
    answered = scores_of(there[2:], ahead).numpy()
    contrast = boundary(there.numpy(), masks.repeat(2, 1, 1, 1, 1).numpy(), TEMPERATURE)
    return float(loss) + dice(answered, masks.numpy()) + WEIGHT * contrast


def test_a_step_follows_the_gradient_of_the_whole_objective() -> None:
    """Through the inner step: some of the numbers of every tensor, by central differences of the loops."""
    method = ELCFS(boundary_weight=WEIGHT, temperature=TEMPERATURE, inner_rate=INNER)
    model, (whole, copies) = network(), batch()

    def moved_by(loss_of: Any, trained: Network, **_: object) -> float:
        loss = loss_of(whole)
        loss.backward()
        return float(loss)

    site: Any = SimpleNamespace(
        model=lambda weights: model, objective=Classes(), memory={}, minimise=moved_by, samples=2,
        generator_for=lambda purpose: torch.Generator(), weights_of=lambda trained: Weights(trained.state_dict()),
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_Bank, "copies", lambda self, inputs: copies)
        update = method.fit(site, Weights(model.state_dict()))
    start = {name: value.detach().double() for name, value in model.named_parameters()}
    assert update.loss == pytest.approx(objective(start, whole, copies), abs=1e-5)
    draws = np.random.default_rng(0)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        for place in draws.choice(parameter.numel(), min(3, parameter.numel()), replace=False):
            ends = []
            for step in (1e-4, -1e-4):
                moved = {key: value.clone() for key, value in start.items()}
                moved[name].view(-1)[place] += step
                ends.append(objective(moved, whole, copies))
            slope = (ends[0] - ends[1]) / 2e-4
            assert parameter.grad.view(-1)[place].item() == pytest.approx(slope, rel=2e-2, abs=1e-4), name


def test_copies_have_the_amplitudes_of_another_site() -> None:
    """A site's volumes in another scanner's look: NumPy's whole transform, cut to the range of voxels."""
    data = ScannedBalls(size=16, per_site=3).build()
    own, other = (np.asarray(data.domains[site].inputs)[:1] / 255 for site in ("north", "east"))
    method = ELCFS(window=0.1, rates="released", copies="all")
    window = low_frequencies(torch.from_numpy(other), 1, axes=3)
    grey = Preprocessing(kind="features", mean=(0.5,), std=(0.5,))
    site: Any = SimpleNamespace(
        memory={"bank": {"east": {"amplitude": window}}}, device="cpu", generator_for=lambda _: torch.Generator(),
        pixels=lambda inputs: inputs * 0.5 + 0.5, inputs_of=lambda pixels: (pixels - 0.5) / 0.5, preprocessing=grey,
    )  # fmt: skip
    copies = _Bank(method, site).copies((torch.from_numpy(own) - 0.5) / 0.5) * 0.5 + 0.5
    whole, donor = (np.fft.fftn(values[0, 0]) for values in (own, other))
    mixed = np.abs(whole)
    for place in np.ndindex(3, 3, 3):
        at = tuple(part - 1 for part in place)
        mixed[at] = np.abs(donor)[at]
    wanted = np.real(np.fft.ifftn(mixed * np.exp(1j * np.angle(whole)))).clip(0, 1)
    np.testing.assert_allclose(copies[0, 0].numpy(), wanted, atol=1e-6)
    assert abs(copies.mean() - other.mean()) < 0.02 < abs(own.mean() - other.mean())


def test_volumes_that_are_no_pixels_and_parts_are_refused_in_one_line() -> None:
    for samples, message in (
        (Samples((1, 8, 8, 8), are_pixels=False), "store them as uint8"),
        (Samples((1, 8, 8, 8), parts=True), r"leave out data\.patch"),
        (Samples((5,)), "not images"),
    ):
        with pytest.raises(UserError, match=message):
            ELCFS().check_samples(samples)
