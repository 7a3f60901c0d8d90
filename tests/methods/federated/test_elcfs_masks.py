"""FedDG-ELCFS on masks, which is its main setting: the meta loss by loops over pixels, and copies that stay images."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from scipy import ndimage
from tiny import federation, images, start_of
from torch import Tensor, nn

from fedshift.data.domain import Domain
from fedshift.data.tasks.objective import Classes
from fedshift.federation.local.in_process import LocalFederation
from fedshift.federation.site import Batch
from fedshift.methods.federated.elcfs import ELCFS, _Bank
from fedshift.models.network import Network

SIDE = 16


def network() -> Network:
    """One convolution, and one score per structure from its maps."""
    torch.manual_seed(5)
    return Network(
        nn.Conv2d(1, 3, 3, padding=1), nn.Conv2d(3, 2, 1), embedding_size=3, classes=2, stages={}, alignment_stages=()
    )


def batch() -> tuple[Batch, Tensor]:
    """Two images with two structures each, and copies of them that look otherwise."""
    draws = np.random.default_rng(1)
    masks = np.zeros((2, 2, SIDE, SIDE), np.float32)
    masks[0, 0, 3:9, 3:9] = masks[1, 0, 6:12, 4:12] = 1
    masks[0, 1, 5:8, 5:8] = masks[1, 1, 8:10, 6:11] = 1
    inputs = masks.sum(1, keepdims=True) + draws.normal(size=(2, 1, SIDE, SIDE)) * 0.3
    copies = 0.5 * inputs - 0.7 + draws.normal(size=inputs.shape) * 0.2
    whole = Batch(torch.from_numpy(inputs).float(), torch.from_numpy(masks), torch.zeros(2), torch.arange(2))
    return whole, torch.from_numpy(copies).float()


def dice(scores: NDArray[np.float64], masks: NDArray[np.float64]) -> float:
    found, structures = 1 / (1 + np.exp(-scores)), masks.shape[1]
    parts = [
        (2 * (found[:, c] * masks[:, c]).sum() + 1e-5) / (found[:, c].sum() + masks[:, c].sum() + 1e-5)
        for c in range(structures)
    ]
    return 1 - sum(parts) / structures


def boundary(maps: NDArray[np.float64], masks: NDArray[np.float64], temperature: float) -> float:
    """Contours against surroundings: SciPy's morphology, and a loop over pairs."""
    losses = []
    for structure in range(masks.shape[1]):
        embeddings, labels = [], []
        for image, mask in zip(maps, masks[:, structure].astype(bool), strict=True):
            edge = mask & ~ndimage.binary_erosion(mask)
            ring = ndimage.binary_dilation(mask, None, 5) & ~mask
            for label, region in ((1, edge), (0, ring)):
                mean = image[:, region].mean(1)
                embeddings.append(mean / np.linalg.norm(mean))
                labels.append(label)
        pairs = []
        for a, own in enumerate(embeddings):
            others = sum(
                math.exp(own @ other / temperature)
                for other, label in zip(embeddings, labels, strict=True)
                if label != labels[a]
            )
            for p, other in enumerate(embeddings):
                if p != a and labels[p] == labels[a]:
                    near = math.exp(own @ other / temperature)
                    pairs.append(-math.log(near / (near + others)))
        losses.append(sum(pairs) / len(pairs))
    return sum(losses) / len(losses)


@pytest.mark.parametrize("weight", [0.0, 0.4])
def test_the_meta_loss_of_masks(weight: float) -> None:
    """Dice of the copies at θ̂, and γ times the boundary term over images *and* copies, both at θ̂."""
    method, model = ELCFS(boundary_weight=weight, temperature=0.3), network()
    whole, copies = batch()
    ahead = {name: value + 0.1 * torch.randn_like(value) for name, value in model.named_parameters()}
    found = method._meta_loss(SimpleNamespace(objective=Classes()), model, ahead, whole, copies)
    moved = {name: value.detach() for name, value in ahead.items()}

    def maps_of(values: Tensor) -> Tensor:
        return F.conv2d(values, moved["features.weight"], moved["features.bias"], padding=1)

    scores = F.conv2d(maps_of(copies), moved["classifier.weight"], moved["classifier.bias"])
    expected = dice(scores.double().numpy(), whole.targets.double().numpy())
    if weight:
        maps = maps_of(torch.cat([whole.inputs, copies])).double().numpy()
        expected += weight * boundary(maps, whole.targets.double().repeat(2, 1, 1, 1).numpy(), 0.3)
    assert found.item() == pytest.approx(expected, abs=1e-5)


def test_a_copy_is_an_image() -> None:
    """A bright picture takes on the amplitudes of a stark one: what would leave [0, 1] is cut off."""
    bright = images("a", 4)
    bright = Domain("a", np.asarray(bright.inputs) // 3 + 170, bright.labels)
    stark = Domain(
        "b", (np.indices((12, 12)).sum(0) % 12 < 6).astype(np.uint8)[None, None].repeat(4, 0) * 255, bright.labels
    )
    method, found = ELCFS(window=0.2, rates="released"), [bright, stark]
    where = federation(method, found)
    method.start(where, start_of(method, found))
    assert isinstance(where, LocalFederation)
    site = where._runners["a"].site
    inputs = next(iter(site.all_batches())).inputs
    copies = site.pixels(_Bank(method, site).copies(inputs)).numpy()
    own, other = (np.fft.fft2(np.asarray(domain.inputs)[:, 0] / 255) for domain in found)
    mixed = np.abs(own)
    for u in range(-2, 3):
        for v in range(-2, 3):
            mixed[:, u, v] = np.abs(other)[:, u, v]
    plain = np.real(np.fft.ifft2(mixed * np.exp(1j * np.angle(own))))
    assert plain.max() > 1.05 or plain.min() < -0.05
    np.testing.assert_allclose(copies[:, 0], np.clip(plain, 0, 1), atol=1e-5)
