"""The code of DomainBed or PFLlib beside ours: ``python benchmarks/peers_beside.py PEER CHECKOUT METHOD …``.

PEER is domainbed or pfllib. CHECKOUT is a clone of facebookresearch/DomainBed at b93c22a1 or of TsingZ0/PFLlib at
d832e76f, whose requirements are installed; nothing in it is edited. It trains on the samples of `peers.py`: six angles
for ``--steps``, or ten clients for ``--rounds``. Each method is printed as theirs and as ours, in percent by seed.

Two things are put in place of theirs while they run. DomainBed's network for small images becomes the one of 100 hidden
units. PFLlib's network of this shape takes a logarithm of its features when the head is split off; here it does not.
Its seed is fixed in its code; here ``--seeds`` set it.
"""

from __future__ import annotations

import argparse
import importlib
import re
import subprocess  # nosec B404
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
import yaml
from torch import Tensor, nn

import fedshift
from peers import COMPARISONS, HERE, STEPS_OF_A_ROUND

DRAWN, HIDDEN, CLASSES = 32, 100, 10
"""Images of a domain in a step, hidden units, digits."""
PFLLIB = {
    # Ours: its name there, and its options there where its defaults switch the method off or are others
    "fedprox": ("FedProx", "-mu 0.1"),
    "feddyn": ("FedDyn", "-al 0.1"),
    "moon": ("MOON", "-mu 1 -tau 0.5"),
    "ditto": ("Ditto", "-mu 0.1"),
    "alone": ("Local", ""),
    "fedavg": ("FedAvg", ""),
    "scaffold": ("SCAFFOLD", ""),
    "fedper": ("FedPer", ""),
    "fedrep": ("FedRep", ""),
    "fedala": ("FedALA", ""),
    "fedrod": ("FedROD", ""),
    "fedbabu": ("FedBABU", ""),
    "fedproto": ("FedProto", "-lam 1"),
}
RUN_PFLLIB = """
import runpy, sys, torch
from flcore.trainmodel import models
seed, seeded = int(sys.argv.pop(1)), torch.manual_seed
torch.manual_seed = lambda _: seeded(seed)
models.DNN.forward = lambda self, x: self.fc(torch.relu(self.fc1(torch.flatten(x, 1))))
runpy.run_path("main.py", run_name="__main__")
"""


def _part(name: str) -> Any:
    return importlib.import_module(f"domainbed.{name}")


def _plain_name(name: str) -> str:
    """A method's name without what spellings differ in."""
    return re.sub(r"[^a-z]", "", name.lower())


def domainbed(checkout: Path, method: str, folder: Path, steps: int, seed: int) -> float:
    """DomainBed's accuracy at 0 degrees, with its default settings for these digits."""
    sys.path.insert(0, str(checkout))
    algorithms, networks, hparams = map(_part, ("algorithms", "networks", "hparams_registry"))
    (name,) = [entry for entry in algorithms.ALGORITHMS if _plain_name(entry) == _plain_name(method)]
    networks.Featurizer = lambda shape, _: _Features(int(np.prod(shape)))
    torch.manual_seed(seed)
    np.random.seed(seed)  # noqa: NPY002 - DomainBed draws from it
    settings = hparams.default_hparams(name, "RotatedMNIST") | {"batch_size": DRAWN}
    algorithm = algorithms.get_algorithm_class(name)((1, 28, 28), CLASSES, 5, settings)
    images = {path.stem: _images(path) for path in sorted(folder.glob("d*.npz"))}
    unseen = images.pop("d0")
    drawn = [
        _drawn(*pair, torch.Generator().manual_seed(seed * 10 + turn)) for turn, pair in enumerate(images.values())
    ]
    algorithm.train()
    for _ in range(steps):
        algorithm.update([next(domain) for domain in drawn], None)
    algorithm.eval()
    with torch.no_grad():
        return 100 * float((algorithm.predict(unseen[0]).argmax(1) == unseen[1]).float().mean())


class _Features(nn.Sequential):
    """A layer of hidden units, which says how many they are as DomainBed's networks do."""

    n_outputs = HIDDEN

    def __init__(self, numbers: int) -> None:
        super().__init__(nn.Flatten(), nn.Linear(numbers, HIDDEN), nn.ReLU())


def _images(path: Path) -> tuple[Tensor, Tensor]:
    arrays = np.load(path)
    return torch.from_numpy(arrays["x"]).float().div(255).unsqueeze(1), torch.from_numpy(arrays["y"])


def _drawn(x: Tensor, y: Tensor, draws: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
    """Mini-batches without an image twice in a pass."""
    while True:
        for rows in torch.split(torch.randperm(len(x), generator=draws), DRAWN):
            yield x[rows], y[rows]


def pfllib(checkout: Path, method: str, folder: Path, rounds: int, seed: int) -> float:
    """PFLlib's mean accuracy of the clients after so many rounds."""
    name, options = PFLLIB[_plain_name(method)]
    data = "MNIST_clients"
    for path in folder.glob("c*.npz"):
        arrays = np.load(path)
        for part in ("train", "test"):
            rows = arrays["split"] == part
            written = checkout / "dataset" / data / part / f"{path.stem[1:]}.npz"
            written.parent.mkdir(parents=True, exist_ok=True)
            np.savez(written, data=np.array({"x": arrays["x"][rows], "y": arrays["y"][rows]}, dtype=object))
    command = f"{seed} -data {data} -m DNN -algo {name} -nc 10 -gr {rounds} -eg {rounds} -lbs 10 -lr 0.05 -dev cpu"
    system = checkout / "system"
    run = [sys.executable, "-c", RUN_PFLLIB, *command.split(), *options.split()]
    printed = subprocess.run(run, cwd=system, check=True, capture_output=True, text=True).stdout  # nosec B603
    accuracies = re.findall(r"Test Accuracy: ([\d.]+)", re.sub(r"Std Test Accuracy.*", "", printed))
    return 100 * float(accuracies[-1])


PEERS = {"domainbed": ("angles", domainbed), "pfllib": ("clients", pfllib)}


def ours(comparison: str, method: str, folder: Path, length: int, seeds: Sequence[int]) -> list[float]:
    """Our accuracy of each seed."""
    chosen = COMPARISONS[comparison]
    experiment: dict[str, Any] = yaml.safe_load((HERE / "experiments" / chosen.experiment).read_text(encoding="utf-8"))
    rows = {_plain_name(row.get("label", row["name"])): row for row in experiment["methods"]}
    experiment["data"]["sites"] = chosen.write(folder)
    experiment["protocol"]["seeds"] = list(seeds)
    experiment["methods"] = [_shortened(rows[_plain_name(method)], length, experiment["training"]["rounds"])]
    rounds = length // STEPS_OF_A_ROUND if comparison == "angles" else length
    steps = length if comparison == "angles" else 30 * length
    experiment["training"] |= {"rounds": rounds, "measure_every": rounds, "mini_batches": steps}
    with tempfile.TemporaryDirectory() as runs:
        results = sorted(fedshift.run(experiment, runs).runs, key=lambda run: run.seed)
    return [mean(last.sites.values()) for run in results if (last := run.selected["last"]) is not None]


def _shortened(row: Mapping[str, Any], rounds: int, written: int) -> dict[str, Any]:
    """A method whose own mini-batches are those of fewer rounds."""
    steps = row.get("training", {}).get("mini_batches")
    return dict(row) if steps is None else {**row, "training": {"mini_batches": steps * rounds // written}}


def main(peer: str, checkout: Path, methods: Sequence[str], length: int, seeds: Sequence[int]) -> None:
    """Both of each method."""
    torch.set_num_threads(1)
    comparison, theirs = PEERS[peer]
    for method in methods:
        with tempfile.TemporaryDirectory() as text:
            folder = Path(text)
            mine = ours(comparison, method, folder, length, seeds)
            other = [theirs(checkout.resolve(), method, folder, length, seed) for seed in seeds]
        for name, values in ((peer, other), ("fedshift", mine)):
            print(
                f"{method:14} {name:10} {mean(values):6.2f}   " + " ".join(f"{value:.2f}" for value in values),
                flush=True,
            )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peer", choices=list(PEERS))
    parser.add_argument("checkout", type=Path)
    parser.add_argument(
        "methods", nargs="+", metavar="METHOD", help="as in the table of the page, such as erm or fedala"
    )
    parser.add_argument("--steps", type=int, default=60, help="of domainbed; a multiple of 20")
    parser.add_argument("--rounds", type=int, default=20, help="of pfllib")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    chosen = parser.parse_args()
    length = chosen.steps if chosen.peer == "domainbed" else chosen.rounds
    main(chosen.peer, chosen.checkout, chosen.methods, length, chosen.seeds)
