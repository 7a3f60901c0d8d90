"""The pooled methods beside DomainBed's own code, at equal steps, on the same images: accuracy at 0 degrees.

    python benchmarks/peers_domainbed.py [--steps 300] [--folder FOLDER]

``peers/domainbed_images.csv`` has, for each angle, the numbers of 640 images in MNIST's training set, which is read
from ``FEDSHIFT_DATA``. ``peers/domainbed_measured.csv`` has what facebookresearch/DomainBed at commit b93c22a1 gave on
them, by steps, method and seed, with its defaults.
"""

from __future__ import annotations

import argparse
import csv
import math
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev

import numpy as np
import yaml
from PIL import Image

import fedshift
from fedshift.data.locate import load_npz, require

HERE = Path(__file__).parent
EXPERIMENT = HERE / "experiments" / "peers_domainbed.yaml"
STEPS_OF_A_ROUND = 20
"""One pass over the 640 images of an angle, 32 at a time."""


def write_sites(folder: Path) -> dict[str, str]:
    """Rotate the images as DomainBed's were, and write a file for each angle: site → its path."""
    mnist = load_npz(require("MNIST", ["mnist.npz"], "Get mnist.npz of Keras."), ["x_train", "y_train"])
    paths = {}
    with (HERE / "peers" / "domainbed_images.csv").open(encoding="utf-8") as file:
        for angle, *numbers in csv.reader(file):
            rows = [int(number) for number in numbers]
            images = [Image.fromarray(image) for image in mnist["x_train"][rows]]
            turned = [np.asarray(image.rotate(int(angle), resample=Image.Resampling.BILINEAR)) for image in images]
            path = folder / f"d{angle}.npz"
            np.savez(path, x=np.stack(turned), y=mnist["y_train"][rows].astype(np.int64))
            paths[path.stem] = str(path)
    return paths


def measured(steps: int) -> Mapping[str, list[float]]:
    """Method → DomainBed's accuracies by seed."""
    found: dict[str, list[float]] = defaultdict(list)
    with (HERE / "peers" / "domainbed_measured.csv").open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if int(row["steps"]) == steps:
                found[row["method"].lower()].append(float(row["accuracy_percent"]))
    return found


def spread(values: Sequence[float]) -> float:
    """The standard error of the mean."""
    return stdev(values) / math.sqrt(len(values))


def main(steps: int, folder: Path) -> None:
    """Run what is missing, and print both."""
    folder.mkdir(parents=True, exist_ok=True)
    experiment = yaml.safe_load(EXPERIMENT.read_text(encoding="utf-8"))
    experiment["name"] = f"peers_domainbed_{steps}"
    experiment["data"]["sites"] = write_sites(folder)
    rounds = steps // STEPS_OF_A_ROUND
    experiment["training"] |= {"rounds": rounds, "measure_every": rounds, "mini_batches": steps}
    ours: dict[str, list[float]] = defaultdict(list)
    for result in fedshift.run(experiment, folder).runs:
        last = result.selected["last"]
        assert last is not None  # a run without one is not read
        ours[result.method].append(last.accuracy)
    theirs = measured(steps)
    print("method      fedshift      DomainBed     difference in standard errors")
    for method, values in ours.items():
        other = theirs[method]
        gap = mean(values) - mean(other)
        error = (spread(values) ** 2 + spread(other) ** 2) ** 0.5
        both = "  ".join(f"{mean(one):5.1f} ±{spread(one):4.2f}  " for one in (values, other))
        print(f"{method:10}  {both}  {gap:+5.1f}  {gap / error:+5.1f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300, choices=(60, 300, 1000))
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "peers_domainbed")
    chosen = parser.parse_args()
    main(chosen.steps, chosen.folder)
