"""KD3A in plain PyTorch, from top to bottom, with the numbers of the paper's equations. Only the images are fedshift's.

Feng, You, Chen, Zhang, Zhu, Wu, Wu, Chen: KD3A: Unsupervised Multi-Source Decentralized Domain Adaptation via Knowledge
Distillation. ICML 2021, Algorithm 1.

    python examples/papers/kd3a.py

Sources are the digits turned by 15 to 75 degrees, with labels; the target has those that stand upright, without. All
are in one process here: no message, no budget of work. `methods: [kd3a]` in an experiment is the same with all that.
This is the paper's algorithm, at a constant learning rate. The authors' code has hard labels, Shapley values and other
shares: `fedshift methods kd3a` has the list.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedshift.data import registry

ROUNDS = 10
RATE, MOMENTUM, BATCH = 0.02, 0.9, 32
GATE = (0.9, 0.95)
"""g: confidence from which a teacher votes, at the start and at the end."""
MIXUP = 0.2
"""a of Beta(a, a)."""
UNSUPPORTED = 0.001
"""n_p of a sample for whose winner no teacher is sure."""

Model = dict[str, Tensor]
Batches = Callable[[int, int], Iterator[Tensor]]
"""Site and round → the rows of each mini-batch of an epoch. Site K is the target."""
Data = list[tuple[Tensor, Tensor]]
"""Images and labels of each source."""


class Net(nn.Module):
    """Two convolutions and two linear layers, with BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(1, 16, 5, padding=2), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2))
        self.second = nn.Sequential(nn.Conv2d(16, 32, 5, padding=2), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2))
        self.hidden = nn.Sequential(nn.Flatten(), nn.LazyLinear(128), nn.ReLU())
        self.classifier = nn.Linear(128, 10)

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.classifier(self.hidden(self.second(self.first(images))))
        return scores


# The algorithm ------------------------------------------------------------------------------------------------------


def kd3a(net: nn.Module, sources: Data, target: Tensor, batches: Batches, rounds: int) -> Model:
    """The aggregate after ``rounds``. ``net`` is the common start; ``target``: the target's images."""
    aggregate = copy.deepcopy(net.state_dict())
    samples = [len(labels) for _, labels in sources]
    for number in range(rounds):
        gate = GATE[0] + (GATE[1] - GATE[0]) * number / rounds
        teachers = [
            train(with_weights(net, aggregate), *source, batches(site, number)) for site, source in enumerate(sources)
        ]
        with torch.no_grad():
            said = torch.stack([teacher(target).softmax(1) for teacher in teachers])  # q_1 … q_K
        student = with_weights(net, aggregate)
        distil(student, target, said, gate, batches(len(sources), number))
        shares = domain_weights(consensus_focus(said, gate), samples, len(target))
        aggregate = aggregated([model.state_dict() for model in (*teachers, student)], shares)  # (10)
    return aggregate


def train(model: nn.Module, images: Tensor, labels: Tensor, batches: Iterator[Tensor]) -> nn.Module:
    """An epoch of cross-entropy at a source, with momentum that begins at zero; afterwards it is a teacher."""
    optimizer = torch.optim.SGD(model.parameters(), RATE, MOMENTUM)
    for rows in batches:
        step(optimizer, F.cross_entropy(model(images[rows]), labels[rows]))
    return model.eval()


def distil(student: nn.Module, images: Tensor, said: Tensor, gate: float, batches: Iterator[Tensor]) -> None:
    """The target's model learns what the teachers agree on."""
    optimizer = torch.optim.SGD(student.parameters(), RATE, MOMENTUM)
    for rows in batches:
        consensus, support = knowledge_vote(said[:, rows], gate)
        share, partner = mixture(len(rows))
        inputs = share * images[rows] + (1 - share) * images[rows][partner]
        consensus = share * consensus + (1 - share) * consensus[partner]
        divergence = F.kl_div(student(inputs).log_softmax(1), consensus, reduction="none").sum(1)
        step(optimizer, (support * divergence).mean())  # (6)


def knowledge_vote(said: Tensor, gate: float) -> tuple[Tensor, Tensor]:
    """What teachers agree on: probabilities p (n, C), and n_p, how many teachers do. ``said``: (K, n, C)."""
    confidence, choice = said.max(2)
    sure = confidence > gate  # (3)
    voters = sure | ~sure.any(0)  # all of them, where nobody is sure
    winner = (said * voters[..., None]).sum(0).argmax(1)  # (4)
    agree = sure & (choice == winner)
    support = agree.sum(0)
    averaged = agree | (support == 0)
    consensus = (said * averaged[..., None]).sum(0) / averaged.sum(0)[:, None]  # (5)
    return consensus, torch.where(support > 0, support.to(said.dtype), UNSUPPORTED)


def consensus_focus(said: Tensor, gate: float) -> Tensor:
    """CF_k: what the quality of the consensus loses without teacher k."""

    def quality(some: Tensor) -> Tensor:
        consensus, support = knowledge_vote(some, gate)
        return (support * consensus.amax(1)).sum()  # Q  (7)

    said = said.double()
    whole = quality(said)
    others = [torch.cat([said[:teacher], said[teacher + 1 :]]) for teacher in range(len(said))]
    return torch.stack([whole - quality(some) for some in others])  # (8)


def domain_weights(focus: Tensor, samples: list[int], target: int) -> list[float]:
    """α of every source, then of the target."""
    own = target / (sum(samples) + target)
    value = focus.clamp(min=0) * torch.tensor(samples)
    value = value if value.any() else torch.ones_like(value)
    return [*((1 - own) * value / value.sum()).tolist(), own]  # (9)


def aggregated(models: list[Model], shares: list[float]) -> Model:
    """Weights are averaged. BatchNorm's statistics become those of the mixture of all sites' features (appendix E)."""
    weights = torch.tensor(shares, dtype=torch.float64)

    def mean(name: str, power: int = 1) -> Tensor:
        layers = torch.stack([model[name].double() ** power for model in models])
        return torch.tensordot(weights, layers, 1)

    result = {}
    for name, tensor in models[0].items():
        if name.endswith("num_batches_tracked"):
            value = torch.stack([model[name] for model in models]).amax(0)
        elif name.endswith("running_var"):
            means = name.replace("running_var", "running_mean")
            value = mean(name) + mean(means, power=2) - mean(means) ** 2  # E[σ² + µ²] − E[µ]²
        else:
            value = mean(name)
        result[name] = value.to(tensor.dtype)
    return result


def mixture(size: int) -> tuple[float, Tensor]:
    """λ ~ Beta(a, a), and whom each sample is mixed with."""
    return float(torch.distributions.Beta(MIXUP, MIXUP).sample()), torch.randperm(size)


def with_weights(net: nn.Module, weights: Model) -> nn.Module:
    """A copy of the network with other weights, ready to train."""
    model = copy.deepcopy(net)
    model.load_state_dict(weights)
    return model.train()


def step(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    """A step of gradient descent."""
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


# A run --------------------------------------------------------------------------------------------------------------


def main() -> None:
    """Adapt to the upright digits, which have no labels here."""
    data = registry.parse({"name": "rotated_digits", "per_class": 40}).build().domains
    tensors = {
        name: (torch.from_numpy(domain.inputs / 255).float(), torch.from_numpy(domain.labels))
        for name, domain in data.items()
    }
    images, labels = tensors.pop("D0")
    sources = list(tensors.values())
    torch.manual_seed(0)
    net = Net()
    net(images[:2])  # sizes of the layers

    def batches(site: int, number: int) -> Iterator[Tensor]:
        order = torch.Generator().manual_seed(1000 * number + site)
        yield from torch.randperm(
            len(images) if site == len(sources) else len(sources[site][1]), generator=order
        ).split(BATCH)

    model = with_weights(net, kd3a(net, sources, images, batches, ROUNDS)).eval()
    correct = (model(images).argmax(1) == labels).float().mean()
    print(f"after {ROUNDS} rounds: {100 * correct:.1f} % of the upright digits, whose labels no site has")


if __name__ == "__main__":
    main()
