"""FLamby's FedAvg on Fed-Heart-Disease beside ours, in turns: ``python benchmarks/peers_flamby.py FOLDER``.

FLamby must be importable (owkin/FLamby at edacf54d; NumPy 2 has no np.NaN, which its data set writes: np.nan).
FOLDER has UCI's four ``processed.*.data``. Ours needs no FLamby; it reads the raw numbers of ``peers/flamby_heart.npz``
below ``FEDSHIFT_DATA`` and scales each centre by its own training rows (``standardise: per_site``), as FLamby does.
Both print accuracy at the four centres, and processor seconds after the imports: data, training and measuring.
"""

from __future__ import annotations

import argparse
import importlib
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

import fedshift
from fedshift.data.locate import load_npz, require
from peers import HERE
from peers_cost import FLAMBY

CENTRES = ("cleveland", "hungarian", "switzerland", "va")


def theirs(folder: Path, seed: int) -> list[float]:
    """FLamby's accuracies in percent, with its own split, scaling, network and loop."""
    heart, strategies, utils = (
        importlib.import_module(f"flamby.{part}") for part in ("datasets.fed_heart_disease", "strategies", "utils")
    )

    def loader(centre: int, train: bool) -> Any:
        rows = heart.FedHeartDisease(center=centre, train=train, data_path=str(folder))
        return torch.utils.data.DataLoader(rows, batch_size=heart.BATCH_SIZE, shuffle=train)

    train, test = ([loader(centre, part) for centre in range(len(CENTRES))] for part in (True, False))
    torch.manual_seed(seed)
    network = heart.Baseline()
    torch.manual_seed(seed)
    strategy = strategies.FedAvg(
        train, network, heart.BaselineLoss(), torch.optim.SGD, 0.001, num_updates=100, nrounds=15
    )
    metrics = utils.evaluate_model_on_tests(strategy.run()[0], test, heart.metric)
    return [100 * float(metrics[f"client_test_{centre}"]) for centre in range(len(CENTRES))]


def ours(folder: Path, seed: int) -> list[float]:
    """The same of fedshift, from the numbers as the centres wrote them."""
    arrays = load_npz(require("FLamby's heart disease", ["peers/flamby_heart.npz"], FLAMBY))
    sites = {}
    for number, name in enumerate(CENTRES):
        rows = arrays["site"] == number
        sites[name] = str(folder / f"{name}.npz")
        split = np.where(arrays["train"][rows], "train", "test")
        np.savez(sites[name], x=arrays["x_raw"][rows], y=arrays["y"][rows], split=split)
    experiment = yaml.safe_load((HERE / "experiments" / "peers_heart.yaml").read_text(encoding="utf-8"))
    experiment["data"] |= {"sites": sites, "standardise": "per_site"}
    experiment["protocol"] = {"kind": "participants", "seeds": [seed]}
    experiment |= {"methods": experiment["methods"][:1], "engine": {"threads": 1}, "device": "cpu"}
    (run,) = fedshift.run(experiment, folder / f"runs-{seed}").runs
    by_site = {site.site: site.values for site in run.sites if site.part == "target"}
    return [float(by_site[name]["label_accuracy"]) for name in CENTRES]


def main(folder: Path, seeds: list[int]) -> None:
    """Both of each seed, one after the other."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        for turn, seed in enumerate([seeds[0], *seeds]):  # the first turn also loads libraries, and is not shown
            for name, run, where in (("FLamby", theirs, folder), ("fedshift", ours, Path(scratch, str(turn)))):
                where.mkdir(exist_ok=True)
                begin = time.process_time()
                values = run(where, seed)
                if turn:
                    line = "  ".join(f"{centre} {value:.2f}" for centre, value in zip(CENTRES, values, strict=True))
                    print(f"seed {seed}  {name:8}  {line}  {time.process_time() - begin:.2f} s")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="has processed.cleveland.data and the three others")
    parser.add_argument("--seeds", type=int, nargs="+", default=[42, 43, 44, 45, 46])
    chosen = parser.parse_args()
    main(chosen.folder, chosen.seeds)
