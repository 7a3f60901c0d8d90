# %% [markdown]
# # Train at hospitals A, B and C, and know how the model does at D
#
# Four hospitals with made-up patients, as tables. A, B and C train without pooling their rows. D has no labels: it
# takes no part, and is told how good the model will be there. In Colab: *File → Upload notebook*. Without fedshift, run
# the next line without its `#`.

# %%
# # %pip install "fedshift[report,tables]"

# %%
import numpy as np
import pandas as pd

import fedshift


def hospital(patients: int, older: float, seed: int) -> pd.DataFrame:
    """Patients of one hospital; ``older``: years above the others' mean."""
    draw = np.random.default_rng(seed)
    age = draw.normal(60 + older, 10, patients)
    pressure = draw.normal(125 + 0.5 * (age - 60), 12, patients)
    risk = 0.12 * (age - 62) + 0.06 * (pressure - 127) + draw.normal(0, 1, patients)
    return pd.DataFrame({"age": age.round(), "pressure": pressure.round(), "ill": np.where(risk > 0, "yes", "no")})


tables = {"A": hospital(300, -3, 1), "B": hospital(240, 2, 2), "C": hospital(180, 0, 3)}
tables["A"].head()

# %% [markdown]
# Each of the three is left out in turn. That is the only way to know what a model does at a hospital that took no part.

# %%
experiment = {
    "name": "three_hospitals",
    "data": {"name": "table", "sites": tables, "label": "ill", "numeric": ["age", "pressure"]},
    "protocol": {"kind": "leave_one_out", "seeds": [0, 1]},
    "model": {"name": "mlp", "hidden": [16]},
    "training": {"rounds": 15, "batch_size": 32, "lr": 0.1},
    "methods": ["alone", "fedavg"],
}
results = fedshift.run(experiment)
results

# %%
print(results.verdict())

# %% [markdown]
# Now hospital D, without its labels. Its patients are predicted; the interval says how many predictions are right.

# %%
fourth = hospital(150, 4, 4)
unlabelled = fourth.drop(columns="ill")
model = results.model(method="fedavg", target="C", seed=0)
model.predict(unlabelled)[:10]

# %%
print(model.estimate(unlabelled))

# %% [markdown]
# Here the patients are made up, so the truth is known.

# %%
truth = 100 * (model.predict(unlabelled) == fourth["ill"].to_numpy()).mean()
print(f"right: {truth:.1f} %")
