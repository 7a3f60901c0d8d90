"""Beside what others' code gave on the same samples, at the same work: ``python benchmarks/peers.py angles|clients``.

* ``angles``: DomainBed's pooled methods, accuracy at 0 degrees (``--steps`` 60, 300 or 1,000).
* ``clients``: PFLlib's methods, mean accuracy over ten clients, each on samples of its own.

``peers/*_images.csv`` has the numbers of the images in MNIST, which is read from ``FEDSHIFT_DATA``. What
facebookresearch/DomainBed at commit b93c22a1 and TsingZ0/PFLlib at commit d832e76f gave on them, by method and seed, is
in ``peers/*_measured.csv``; what fedshift gives is printed beside it and written to ``peers/*_fedshift.csv``.
"""

from __future__ import annotations

import argparse
import csv
import math
import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np
import yaml
from PIL import Image

import fedshift
from fedshift.data.locate import load_npz, require

HERE = Path(__file__).parent
PEERS = HERE / "peers"
STEPS_OF_A_ROUND = 20
"""One pass over the 640 images of an angle, 32 at a time."""
STEPS_OF_A_CLIENT = 600
"""20 passes over 300 images, 10 at a time."""
Numbers = Mapping[str, Sequence[float]]
"""Method → accuracies by seed."""


@dataclass(frozen=True)
class Comparison:
    """An experiment, and what somebody else's code gave.

    Attributes:
        experiment: its file below ``experiments/``.
        peer: whose code it was.
        write: writes a file for each site; site → its path.
    """

    experiment: str
    peer: str
    write: Callable[[Path], dict[str, str]]


def _mnist() -> Mapping[str, Any]:
    return load_npz(require("MNIST", ["mnist.npz"], "Get mnist.npz of Keras."), ["x_train", "y_train"])


def _rows(file: str) -> list[list[str]]:
    with (PEERS / file).open(encoding="utf-8") as lines:
        return list(csv.reader(lines))


def write_angles(folder: Path) -> dict[str, str]:
    """640 images for each angle, rotated as DomainBed's were."""
    mnist, paths = _mnist(), {}
    for angle, *numbers in _rows("domainbed_images.csv"):
        rows = [int(number) for number in numbers]
        images = [Image.fromarray(image) for image in mnist["x_train"][rows]]
        turned = [np.asarray(image.rotate(int(angle), resample=Image.Resampling.BILINEAR)) for image in images]
        path = folder / f"d{angle}.npz"
        np.savez(path, x=np.stack(turned), y=mnist["y_train"][rows].astype(np.int64))
        paths[path.stem] = str(path)
    return paths


def write_clients(folder: Path) -> dict[str, str]:
    """300 images that each client trains on, and 80 on which it is measured: pixels from 0 to 1."""
    mnist, paths = _mnist(), {}
    for client, *numbers in _rows("pfllib_images.csv"):
        rows = [int(number) for number in numbers]
        pixels = mnist["x_train"][rows].reshape(len(rows), -1).astype(np.float32) / 255
        split = np.array(["train"] * 300 + ["test"] * (len(rows) - 300))
        path = folder / f"c{client}.npz"
        np.savez(path, x=pixels, y=mnist["y_train"][rows].astype(np.int64), split=split)
        paths[path.stem] = str(path)
    return paths


def numbers(file: str, steps: int) -> Numbers:
    """The accuracies of a file, by method in small letters, in the order of the file."""
    values: dict[str, list[float]] = defaultdict(list)
    with (PEERS / file).open(encoding="utf-8") as lines:
        for row in csv.DictReader(lines):
            if int(row["steps"]) == steps:
                values[row["method"].lower()].append(float(row["accuracy_percent"]))
    return values


def run(comparison: Comparison, folder: Path, steps: int) -> None:
    """Run what is missing, and write all of it down."""
    folder.mkdir(parents=True, exist_ok=True)
    experiment = yaml.safe_load((HERE / "experiments" / comparison.experiment).read_text(encoding="utf-8"))
    experiment["name"] += f"_{steps}"
    experiment["data"]["sites"] = comparison.write(folder)
    if comparison.peer == "DomainBed":
        rounds = steps // STEPS_OF_A_ROUND
        experiment["training"] |= {"rounds": rounds, "measure_every": rounds, "mini_batches": steps}
    results = fedshift.run(experiment, folder).runs
    cells: dict[tuple[str, int], list[float]] = defaultdict(list)
    for result in results:
        last = result.selected["last"]
        assert last is not None  # a run without one is not read
        cells[result.method, result.seed] += last.sites.values()
    _write(comparison.peer, steps, {key: mean(values) for key, values in cells.items()}, results[0].versions)
    print(f"{sum(result.seconds for result in results):.0f} s of runs, {results[0].threads} thread")


def _write(peer: str, steps: int, accuracies: Mapping[tuple[str, int], float], versions: Mapping[str, str]) -> None:
    """Put these numbers in the place of those of the same steps."""
    path = PEERS / f"{peer.lower()}_fedshift.csv"
    kept = []
    if path.exists():
        with path.open(encoding="utf-8") as file:
            kept = [row for row in csv.DictReader(file) if int(row["steps"]) != steps]
    rows = [
        {"steps": steps, "method": method, "seed": seed, "accuracy_percent": f"{accuracy:.2f}"}
        | {name: versions[name] for name in ("fedshift", "torch")}
        for (method, seed), accuracy in accuracies.items()
    ]
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows([*kept, *rows])


def spread(values: Sequence[float]) -> float:
    """The standard error of the mean; NaN of one value."""
    return stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan


def line(method: str, ours: Sequence[float], theirs: Sequence[float]) -> str:
    """A row of the table in Markdown."""
    cells = [f"{mean(values):.1f} ± {spread(values):.1f}" if values else "–" for values in (ours, theirs)]
    error = math.hypot(spread(ours), spread(theirs)) if theirs else math.nan
    gap = f"{mean(ours) - mean(theirs):+.1f} ({(mean(ours) - mean(theirs)) / error:+.1f})" if error > 0 else "–"
    return f"| {method} | {cells[0]} | {cells[1]} | {gap} |"


COMPARISONS = {
    "angles": Comparison("peers_domainbed.yaml", "DomainBed", write_angles),
    "clients": Comparison("peers_clients.yaml", "PFLlib", write_clients),
}


def table(name: str, steps: int) -> list[str]:
    """The rows that the page has: ours and the peer's."""
    peer = COMPARISONS[name].peer.lower()
    theirs = numbers(f"{peer}_measured.csv", steps)
    return [line(name, ours, theirs.get(name, ())) for name, ours in numbers(f"{peer}_fedshift.csv", steps).items()]


def main(name: str, steps: int, folder: Path | None) -> None:
    """Run what is missing, if there is a folder for it, and print both."""
    if folder is not None:
        run(COMPARISONS[name], folder / name, steps)
    print(f"| method | fedshift | {COMPARISONS[name].peer} | difference (in standard errors) |\n|---|---:|---:|---:|")
    print(*table(name, steps), sep="\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=list(COMPARISONS))
    parser.add_argument("--steps", type=int, default=300, choices=(60, 300, 1000), help="of angles")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "fedshift_peers")
    parser.add_argument("--no-run", action="store_true", help="only print what is committed")
    chosen = parser.parse_args()
    steps = chosen.steps if chosen.name == "angles" else STEPS_OF_A_CLIENT
    main(chosen.name, steps, None if chosen.no_run else chosen.folder)
