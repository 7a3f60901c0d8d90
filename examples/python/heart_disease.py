"""Heart disease at four hospitals, from UCI's raw files: the AUROC at each hospital, which took no part in training.

The files processed.*.data lie in the folder heart_disease_uci below FEDSHIFT_DATA.
"""

import os

import pandas as pd
from sklearn.impute import SimpleImputer
from sklearn.model_selection import LeaveOneGroupOut, cross_validate
from sklearn.pipeline import make_pipeline

from fedshift import FederatedClassifier

columns = ["age", "sex", "cp", "trestbps", "chol", "fbs", "restecg"]
columns += ["thalach", "exang", "oldpeak", "slope", "ca", "thal", "num"]
folder = os.path.join(os.environ.get("FEDSHIFT_DATA", "data"), "heart_disease_uci")
files = {site: f"{folder}/processed.{site}.data" for site in ("cleveland", "hungarian", "switzerland", "va")}
patients = pd.concat({site: pd.read_csv(file, names=columns, na_values="?") for site, file in files.items()})
hospital, ill = patients.index.get_level_values(0), patients.pop("num") > 0
model = make_pipeline(SimpleImputer(add_indicator=True), FederatedClassifier("fedavg", rounds=20))
sites = {"federatedclassifier__sites": hospital}
folds = {"groups": hospital, "cv": LeaveOneGroupOut(), "scoring": ["roc_auc", "accuracy"]}
scores = pd.DataFrame(cross_validate(model, patients, ill, params=sites, **folds), index=list(files))
scores["majority"] = [max(ill[site].mean(), 1 - ill[site].mean()) for site in files]
print(scores[["test_roc_auc", "test_accuracy", "majority"]].round(3))
