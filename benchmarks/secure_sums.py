"""What secure sums cost, and what they change: ``python benchmarks/secure_sums.py [--only cost]``.

``cost``: twelve million numbers among 5 and 20 sites, all in this process, with one site lost: seconds of processor at
a site and at the server, and bytes of an upload. ``accuracy``: FedAvg and CSAC on Rotated MNIST and on heart disease,
with ``aggregation: plain`` and ``secure``, and a control. ``round``: seconds of a round of FedAvg over FLARE, three
sites and a network of 4 MB, plain and secure in turn. Each writes its part of results/secure_sums/secure_sums.json.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from safetensors.torch import load_file

import fedshift
from fedshift.deploy.crypto.masked_sums import KeyCard, Order, SecureSite, SecureSum, Upload
from fedshift.federation.messages import Masked, encode
from fedshift.functional.fixed_point import to_fixed
from fedshift.weights import Weights

RESULTS = Path(__file__).parent / "results" / "secure_sums" / "secure_sums.json"
NUMBERS = 12_000_000
ROSTERS = (5, 20)
PARTS = ("cost", "accuracy", "round")
TURNS = ("plain 1", "secure 1", "plain 2", "secure 2")
"""Deployments one after the other, so that what else the machine does meets both alike."""
EXPERIMENTS: dict[str, dict[str, Any]] = {
    "heart disease": {
        "name": "heart",
        "data": {"name": "heart_disease"},
        "protocol": {"kind": "leave_one_out", "targets": "all", "seeds": [0, 1, 2], "test_fraction": 0.2},
        "model": {"name": "mlp", "hidden": [16]},
        "training": {"rounds": 20, "batch_size": 64, "lr": 0.1, "momentum": 0.0},
        "methods": [
            {"name": "fedavg", "local_epochs": 2},
            {"name": "csac", "acquisition_epochs": 10, "calibration_epochs": 2},
        ],
    },
    "Rotated MNIST": {
        "name": "rotated",
        "data": {"name": "rotated_mnist", "per_class": 30},
        "protocol": {
            "kind": "leave_one_out",
            "targets": ["M0", "M45"],
            "seeds": [0, 1, 2],
            "test_fraction": 0.3,
            "base_images": "disjoint",
        },
        "model": {"name": "mnist_cnn", "channels": [16, 32], "hidden": 128},
        "training": {"rounds": 5, "batch_size": 64, "optimizer": "sgd", "lr": 0.1, "momentum": 0.5},
        "methods": [{"name": "fedavg"}, {"name": "csac", "acquisition_epochs": 3, "calibration_epochs": 1}],
    },
}
EXPERIMENTS["Rotated MNIST, small steps"] = {
    **EXPERIMENTS["Rotated MNIST"],
    "name": "rotated_small_steps",
    "training": {**EXPERIMENTS["Rotated MNIST"]["training"], "lr": 0.02, "rounds": 10},
}
"""With steps of 0.1 training makes the last digit of float32 larger and larger; with these it does not."""
T = TypeVar("T")


def time_call(seconds: list[float], do: Callable[[], T]) -> T:
    """The result; the seconds of processor go to the list."""
    began = time.process_time()
    result = do()
    seconds.append(time.process_time() - began)
    return result


def bytes_of(upload: Upload, order: Order) -> int:
    """Bytes of an upload as a message."""

    def rows(of: Mapping[str, bytes]) -> torch.Tensor:
        return torch.tensor([list(of[name]) for name in order.roster], dtype=torch.uint8)

    tensors = {"sum": upload.numbers, "sealed": rows(upload.sealed), "commitments": rows(upload.commitments)}
    return len(encode({"sum": Masked(tensors)}))


def cost(sites: int, folder: Path) -> dict[str, Any]:
    """Seconds and bytes of one sum. The last site is lost after the roster was made."""
    names = [f"s{number:02d}" for number in range(sites)]
    certificates = {name: Ed25519PrivateKey.generate() for name in names}

    def is_verified(card: KeyCard, text: bytes) -> bool:
        try:
            certificates[card.site].public_key().verify(card.signature, text)
        except InvalidSignature:
            return False
        return True

    everyone = {name: SecureSite(name, "run", folder / name, certificates[name].sign, is_verified) for name in names}
    order = Order("run", 1, "fit", "00" * 32, tuple(site.card() for site in everyone.values()))
    answered, weights = names[:-1], torch.randn(NUMBERS)
    spent: dict[str, list[float]] = {part: [] for part in ("integers", "mask", "add", "confirm", "reveal", "unmask")}
    total, plain, size = SecureSum(order), torch.zeros(NUMBERS, dtype=torch.int64), 0
    for name in answered:
        numbers = time_call(spent["integers"], lambda: to_fixed(weights, sites, 1 / sites))
        plain += numbers
        upload = time_call(spent["mask"], lambda: everyone[name].mask(order, numbers))  # noqa: B023 - called at once
        size = size or bytes_of(upload, order)
        time_call(spent["add"], lambda: total.add(name, upload))  # noqa: B023
        everyone[name].forget_uploads(1)
    codes = {
        name: time_call(spent["confirm"], lambda: everyone[name].confirm(order, answered))  # noqa: B023
        for name in answered
    }
    told = {}
    for name in answered:
        to_it = {by: code[name] for by, code in codes.items() if by != name}
        told[name] = time_call(
            spent["reveal"],
            lambda: everyone[name].reveal(order, answered, total.sealed_for(name), to_it),  # noqa: B023
        )
    model = time_call(spent["unmask"], lambda: total.unmask_total(told))
    assert torch.equal(model, plain)
    whole = len(encode({"weights": Weights({"weights": weights})}))
    shares = sites * (28 + 33 * sites) + 32 * sites
    return {
        "sites": sites,
        "lost": 1,
        "numbers": NUMBERS,
        "processor_seconds": {part: round(sum(each) / len(each), 4) for part, each in spent.items()},
        "bytes": {"plain": whole, "secure": size, "formula": 8 * NUMBERS + shares, "shares": shares},
        "ratio": round(size / whole, 5),
    }


def accuracy(options: Mapping[str, Any], folder: Path) -> list[dict[str, Any]]:
    """Each run with plain and secure aggregation: accuracy of the last round in percent, and how far models differ.

    The control is plain, with another library's matrix products: what the last digits of numbers alone change.
    """
    times = {}
    for name, aggregation, products in (
        ("plain", "plain", "default"),
        ("secure", "secure", "default"),
        ("control", "plain", "onednn"),
    ):
        engine = {"name": "local", "workers": 1, "threads": 1, "aggregation": aggregation}
        training = {**options["training"], "matrix_products": products}
        done = fedshift.run({**options, "training": training, "engine": engine, "device": "cpu"}, folder / name)
        times[name] = {run.folder.parts[-3:]: run for run in done.collected.runs}
    rows = []
    for kind, run in times["plain"].items():
        row: dict[str, Any] = {"method": run.result.method, "target": run.result.target, "seed": run.result.seed}
        plain, first = run.result.accuracy("last"), load_file(run.folder / "model.safetensors")
        assert plain is not None
        row["plain"] = plain
        for name in ("secure", "control"):
            other = times[name][kind]
            measured, second = other.result.accuracy("last"), load_file(other.folder / "model.safetensors")
            assert measured is not None
            apart = max((first[key].double() - second[key].double()).abs().max().item() for key in first)
            row[name] = {"accuracy": measured, "difference": measured - plain, "models_apart": apart}
        rows.append(row)
    return rows


def rounds_over_flare(rounds: int = 6) -> dict[str, Any]:
    """Seconds of the rounds of each deployment but its first, in which sites load and make their keys."""
    from bench_network import SITES, deploy, federation

    network, method = {"name": "mlp", "hidden": [1000, 990]}, {"name": "fedavg"}
    seconds: dict[str, list[float]] = {"plain": [], "secure": []}
    results: dict[str, Any] = {"sites": len(SITES), "network_mb": 4.0, "rounds_of_a_deployment": rounds}
    with federation(SITES, ["fedavg"]) as (made, _):
        for label in TURNS:
            way = label.split()[0]
            deployment, *_ = deploy(
                made.coordinator, made.folder, label, method, "float32", model=network, rounds=rounds, aggregation=way
            )
            lines = deployment.folder / "runs" / deployment.name / "fedavg" / "sites" / "seed-0" / "rounds.jsonl"
            records = [json.loads(line) for line in lines.read_text().splitlines()][1:]
            seconds[way] += [record["seconds"] for record in records]
            results[f"{way}_bytes"] = records[-1]["bytes"]
    medians = {way: statistics.median(values) for way, values in seconds.items()}
    return {**results, "seconds": seconds, "medians": medians, "ratio": medians["secure"] / medians["plain"]}


def main(parts: Sequence[str]) -> None:
    whole: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    torch.set_num_threads(1)
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        if "cost" in parts:
            whole["cost"] = [cost(sites, Path(folder) / str(sites)) for sites in ROSTERS]
            whole["machine"] = {
                "cores": os.cpu_count(),
                "load_average_before": round(load, 2),
                "python": sys.version.split()[0],
                "torch": torch.__version__,
            }
        if "accuracy" in parts:
            whole["accuracy"] = {
                name: {"experiment": options, "runs": accuracy(options, Path(folder) / options["name"])}
                for name, options in EXPERIMENTS.items()
            }
    if "round" in parts:
        whole["round"] = {**rounds_over_flare(), "cores": os.cpu_count(), "load_average_before": round(load, 2)}
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps(whole, indent=2) + "\n")


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    arguments.add_argument("--only", choices=PARTS, help="by default all")
    only = arguments.parse_args().only
    main((only,) if only else PARTS)
