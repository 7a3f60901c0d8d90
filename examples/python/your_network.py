"""Your network: a module from a file of your own, on made-up scans of three hospitals, under FedAvg and CSAC."""

from pathlib import Path

import numpy as np

import fedshift

NETWORK = f"{Path(__file__).parents[1] / 'small_net.py'}:SmallNet"


def scans(seed: int, noise: float):
    """Volumes (n, channels, depth, height, width), every second one with a bright cube, and their labels."""
    rng = np.random.default_rng(seed)
    labels = np.arange(24) % 2
    volumes = rng.normal(0, noise, (24, 1, 8, 8, 8)).astype(np.float32)
    volumes[labels == 1, :, 2:6, 2:6, 2:6] += 1
    return volumes, np.array(["clear", "finding"])[labels]


hospitals = {"north": scans(0, 0.2), "south": scans(1, 0.4), "west": scans(2, 0.6)}
experiment = {
    "name": "your_network",
    "data": {"name": "arrays", "sites": hospitals},
    "protocol": {"targets": ["west"], "seeds": [0]},
    "model": {"name": NETWORK, "width": 4},
    "training": {"rounds": 2, "batch_size": 8, "lr": 0.05},
    "methods": ["fedavg", {"name": "csac", "acquisition_epochs": 1, "calibration_epochs": 1}],
}

if __name__ == "__main__":
    for sentence in fedshift.check(experiment).model_notes:  # the classifier and the stages, found by themselves
        print(sentence)
    results = fedshift.run(experiment)
    print(results)
    run = results.collected.runs[0].folder
    model = fedshift.Model.load(run, network=NETWORK)  # a model file never decides which code runs
    print(model.predict(hospitals["west"][0])[:4])
    print(model.export("torchscript", "exported_network").file)
