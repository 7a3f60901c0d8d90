"""Heart disease at four hospitals, from UCI's raw files: each in turn is unseen. A table and a page of the AUROC.

The files processed.*.data lie in heart_disease_uci below FEDSHIFT_DATA: fedshift datasets heart_disease --fetch
"""

import os

import fedshift

folder = f"{os.environ.get('FEDSHIFT_DATA', 'data')}/heart_disease_uci"
files = {site: f"{folder}/processed.{site}.data" for site in ("cleveland", "hungarian", "switzerland", "va")}
numeric, categorical = "age trestbps chol thalach oldpeak ca", "sex cp fbs restecg exang slope thal"
columns = "age sex cp trestbps chol fbs restecg thalach exang oldpeak slope ca thal num"
data = {"name": "table", "sites": files, "header": "none", "columns": columns.split(), "positive": "num > 0"}
data |= {"numeric": numeric.split(), "categorical": categorical.split(), "missing_values": {"chol": 0, "trestbps": 0}}
training = {"rounds": 10, "batch_size": 32, "lr": 0.1}
experiment = {"name": "heart", "data": data, "model": "mlp", "methods": ["fedavg"], "protocol": {"seeds": [0]}}
results = fedshift.run({**experiment, "training": training, "evaluation": {"headline": "auroc"}})
print(results, results.page(), sep="\n")
