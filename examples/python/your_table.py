"""Your table: does a model of two hospitals' patients work at the third one? Each in turn is the unseen target."""

from pathlib import Path

import fedshift

tables = Path(__file__).parents[1] / "tables"
experiment = {
    "name": "your_table",
    "data": {
        "name": "table",
        "sites": {site: tables / f"{site}.csv" for site in ("north", "south", "east")},
        "label": "outcome",
        "numeric": ["age", "pressure"],
        "categorical": ["sex"],
    },
    "protocol": {"kind": "leave_one_out", "seeds": [0]},
    "model": {"name": "mlp", "hidden": [16]},
    "training": {"rounds": 5, "batch_size": 32, "lr": 0.1},
    "methods": [{"name": "alone"}, {"name": "fedavg"}],
}

if __name__ == "__main__":  # so that worker processes may import this file
    results = fedshift.run(experiment)
    print(results)  # the table; results.to_frame() has a row for each run
    print(results.predict(tables / "east.csv", method="fedavg", target="east")[:5])
