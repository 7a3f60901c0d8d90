"""CSAC in plain PyTorch, from top to bottom, with the numbers of the paper's equations. Only the images are fedshift's.

Yuan, Ma, Chen, Wu, Lin, Kuang: Collaborative Semantic Aggregation and Calibration for Federated Domain Generalization.
IEEE TKDE 2023.

    python examples/papers/csac.py

Sites are the digits turned by 15 to 75 degrees; nobody trains on those that stand upright. All sites are in one process
here: no message, no budget of work, no privacy. `methods: [csac]` in an experiment is the same algorithm with all that.
Who compares this with the authors' code: that never runs (6) and smooths no labels; `fedshift methods csac` says more.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedshift.data import registry

ROUNDS, ACQUISITION, CALIBRATION = 5, 6, 2
"""Rounds; epochs of local acquisition; epochs of calibration in a round. The paper has 30 and 5 on Rotated MNIST."""
RATE, MOMENTUM, BATCH = 0.05, 0.9, 32
SMOOTHING = 0.1
"""α of local acquisition: what the labels give to all classes alike."""
WEIGHT = 0.6
"""λ of (10)."""
CHANNELS = 32
"""Channels of the shape to which all layers are projected."""
WIDTHS = (1 / 27, 1 / 9, 1 / 3, 1.0, 3.0)
"""Bandwidths of the five kernels, as multiples of the mean squared distance."""

Model = dict[str, Tensor]
Batches = Callable[[int, int, int], Iterator[tuple[Tensor, Tensor]]]
"""Site, round and epochs → mini-batches of images and labels. Round 0 is local acquisition."""


class Net(nn.Module):
    """Two convolutions and two linear layers. Returns the scores, and the layers that are aligned."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(1, 16, 5, padding=2), nn.MaxPool2d(2), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(16, 32, 5, padding=2), nn.MaxPool2d(2), nn.ReLU())
        self.hidden = nn.Sequential(nn.Flatten(), nn.LazyLinear(128), nn.ReLU())
        self.classifier = nn.Linear(128, 10)

    def forward(self, images: Tensor) -> tuple[Tensor, list[Tensor]]:
        first = self.first(images)
        second = self.second(first)
        return self.classifier(self.hidden(second)), [first, second]


# The algorithm ------------------------------------------------------------------------------------------------------


def csac(net: nn.Module, sites: int, batches: Batches, projections: list[nn.ModuleList], rounds: int) -> Model:
    """The fused model after ``rounds``. ``net`` is the common start; ``projections``: of each site."""
    # Local acquisition, once. Each site keeps a frozen copy of its model, L^h.
    local = [acquire(copy.deepcopy(net), batches(site, 0, ACQUISITION)) for site in range(sites)]
    fused = fuse([model.state_dict() for model in local])
    for number in range(1, rounds + 1):
        models = []
        for site in range(sites):
            model = copy.deepcopy(net)
            model.load_state_dict(fused)
            calibrate(model, local[site], projections[site], batches(site, number, CALIBRATION))
            models.append(model.state_dict())
        fused = fuse(models)
    return fused


def acquire(model: nn.Module, batches: Iterator[tuple[Tensor, Tensor]]) -> nn.Module:
    """Cross-entropy on smoothed labels."""
    optimizer = torch.optim.SGD(model.parameters(), RATE, MOMENTUM)
    for images, labels in batches:
        step(optimizer, F.cross_entropy(model(images)[0], labels, label_smoothing=SMOOTHING))
    return model.eval().requires_grad_(False)


def fuse(models: list[Model]) -> Model:
    """Data-free semantic aggregation: the farther a site's layer is from the mean, the more it weighs."""
    fused = {}
    for name in models[0]:
        layers = torch.stack([model[name].double() for model in models])  # G_l^h
        mean = layers.mean(0)  # A_l  (2)
        distances = (layers - mean).flatten(1).norm(dim=1)  # d_l^h  (3)
        equal = torch.full_like(distances, 1 / len(models))
        weights = distances / distances.sum() if distances.any() else equal  # w_l^h  (4)
        fused[name] = torch.tensordot(weights, layers, 1).to(models[0][name].dtype)  # M_l  (2)
    return fused


def calibrate(
    model: nn.Module, local: nn.Module, projections: nn.ModuleList, batches: Iterator[tuple[Tensor, Tensor]]
) -> None:
    """Cross-layer semantic calibration: the fused model learns the labels, and what the local model's layers know."""
    # Momentum begins at zero in every round. The projections go on from one round to the next.
    optimizer = torch.optim.SGD([*model.train().parameters(), *projections.parameters()], RATE, MOMENTUM)
    for images, labels in batches:
        scores, layers = model(images)
        frozen = local(images)[1]
        ours, theirs = projections[: len(layers)], projections[len(layers) :]
        fused = [project(layer) for project, layer in zip(ours, layers, strict=True)]  # M_l(x)'
        known = [project(layer) for project, layer in zip(theirs, frozen, strict=True)]  # L_m(x)'
        attention = semantic_attention(fused, known)
        pairs = [(mine, its) for mine in range(len(fused)) for its in range(len(known))]
        distances = [mmd(fused[mine].flatten(1), known[its].flatten(1)) for mine, its in pairs]
        alignment = sum(
            attention[pair] * distance for pair, distance in zip(pairs, distances, strict=True)
        )  # L_AL  (6)
        step(optimizer, F.cross_entropy(scores, labels) + WEIGHT * alignment)  # L_CB  (10)


@torch.no_grad()
def semantic_attention(fused: list[Tensor], known: list[Tensor]) -> Tensor:
    """α, a row for each layer of the fused model: how well each layer of the local model matches it."""
    a, b = torch.stack(fused).flatten(3), torch.stack(known).flatten(3)  # (layers, samples, channels, positions)
    position = torch.einsum("lncp,mncq->lmnpq", a, b).mean((3, 4))  # AᵀB, averaged over its entries  (7)
    channel = torch.einsum("lncp,mnep->lmnce", a, b).mean((3, 4))  # ABᵀ, likewise  (8)
    return (position.mean(2).softmax(1) + channel.mean(2).softmax(1)) / 2  # (9)


def mmd(x: Tensor, y: Tensor) -> Tensor:
    """Squared MMD with five Gaussian kernels between rows (n, f), n > 1; the estimator of the authors' code  (5)."""
    n = len(x)
    rows = torch.cat([x, y])
    squared = (rows[:, None] - rows[None]).square().sum(2)
    mean = squared.detach().mean()
    kernels = torch.stack([torch.exp(-squared / (2 * width * mean)) for width in WIDTHS]).sum(0)
    others = 1 - torch.eye(n)
    within = ((kernels[:n, :n] + kernels[n:, n:]) * others).sum() / (n * (n - 1))
    return within - 2 * kernels[:n, n:].mean()


def projection(channels: int, size: int, common: int) -> nn.Conv2d:
    """From maps of ``channels`` and ``size`` to `CHANNELS` maps of the ``common`` size, in one convolution."""
    if size == 2 * common:
        return nn.Conv2d(channels, CHANNELS, 3, stride=2, padding=1)
    return nn.Conv2d(channels, CHANNELS, size - common + 1)


def step(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    """A step of gradient descent."""
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


# A run --------------------------------------------------------------------------------------------------------------


def main() -> None:
    """Train on five turned domains and test on the upright one after each number of rounds."""
    data = registry.parse({"name": "rotated_digits", "per_class": 40}).build().domains
    tensors = {
        # Pixels have a mean of 77 of 255 and as large a deviation.
        name: (torch.from_numpy(domain.inputs / 80.0 - 1).float(), torch.from_numpy(domain.labels))
        for name, domain in data.items()
    }
    images, labels = tensors.pop("D0")
    sources = list(tensors.values())
    torch.manual_seed(0)
    net = Net()
    sizes = [(layer.shape[1], layer.shape[2]) for layer in net(images[:1])[1]]
    common = sizes[-1][1]
    projections = [nn.ModuleList(projection(*size, common) for size in (*sizes, *sizes)) for _ in sources]

    def batches(site: int, number: int, epochs: int) -> Iterator[tuple[Tensor, Tensor]]:
        order = torch.Generator().manual_seed(1000 * number + site)
        for _ in range(epochs):
            for rows in torch.randperm(len(sources[site][1]), generator=order).split(BATCH):
                yield sources[site][0][rows], sources[site][1][rows]

    for rounds in (0, ROUNDS):
        net_of = copy.deepcopy(net)
        net_of.load_state_dict(csac(net, len(sources), batches, copy.deepcopy(projections), rounds))
        correct = (net_of(images)[0].argmax(1) == labels).float().mean()
        print(f"after {rounds} rounds: {100 * correct:.1f} % of the upright digits, which no site has")


if __name__ == "__main__":
    main()
