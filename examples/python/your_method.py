"""Your method: a trimmed mean of the sites' models beside FedAvg, and a callback that watches both."""

from pathlib import Path

import fedshift

METHOD = Path(__file__).parents[1] / "trimmed_mean.py"


class Watch(fedshift.Callback):
    """Prints the target's accuracy after each round."""

    def after_round(self, run, record, folder):
        print(f"{run.method.display}, round {record.round}: {record.target_mean:.1f} %")


if __name__ == "__main__":
    results = fedshift.run(
        {
            "name": "your_method",
            "data": {"name": "rotated_digits", "per_class": 10, "size": 8},
            "protocol": {"targets": ["D0"], "seeds": [0]},
            "model": {"name": "linear"},
            "training": {"rounds": 3, "batch_size": 32, "lr": 0.1},
            "methods": [{"name": "fedavg"}, {"name": f"{METHOD}:TrimmedMean", "trim": 1}],
        },
        callbacks=[Watch()],
    )
    print(results)
