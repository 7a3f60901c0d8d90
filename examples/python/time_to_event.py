"""Time to event: who has a relapse sooner? Three made-up hospitals; the third took no part in training."""

import numpy as np
import pandas as pd

import fedshift


def patients(hospital: int, number: int = 150) -> pd.DataFrame:
    """Patients of one hospital. Age and stage raise the hazard; the study ends after 24 months."""
    rng = np.random.default_rng(hospital)
    age, stage = rng.normal(60 + 3 * hospital, 10, number), rng.integers(1, 4, number)
    months = rng.exponential(20 * np.exp(-0.05 * (age - 60) - 0.7 * (stage - 2)))
    return pd.DataFrame({"age": age, "stage": stage, "months": np.minimum(months, 24), "relapse": 1 * (months <= 24)})


sites = {name: patients(number) for number, name in enumerate(["north", "south", "east"])}
experiment = {
    "name": "time_to_event",
    "data": {"sites": sites, "task": "time_to_event", "time": "months", "event": "relapse"},
    "protocol": {"targets": ["east"], "seeds": [0]},
    "model": {"name": "mlp", "hidden": [8]},
    "training": {"rounds": 20, "batch_size": 256, "lr": 0.2},
    "methods": ["alone", "fedavg"],
}

if __name__ == "__main__":  # so that worker processes may import this file
    results = fedshift.run(experiment)
    print(results)  # concordance in percent: 50 is chance
    print(results.predict(sites["east"][:3], method="fedavg"))  # larger: an earlier relapse
