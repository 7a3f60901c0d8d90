"""Whether intervals from labels cover, and which months raise an alarm: ``python benchmarks/labels.py``.

*Labels*: samples of a data set on which a logistic regression was not fitted are drawn as ``fedshift label`` does, a
thousand times, and intervals from their labels are compared with what all of them have. Then as many are drawn as 30
labels say that an interval of `WIDTH` points needs.

*Months*: those of a site that no model saw are drawn from its samples, as they are, in another unit, and with other
class frequencies, and ``fedshift monitor`` reads each. Sites of public tables are made: quarters by one column.

It writes results/labels.json and prints the tables of estimate.md.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from sklearn.datasets import load_breast_cancer, load_diabetes, load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import fedshift
from estimate import round_numbers
from fedshift.evaluation.estimate import combination
from fedshift.evaluation.estimate.labelling import Drawn, Interval, accuracy_of, auroc_of, draw, labels_needed
from fedshift.experiment import estimate as estimates

RESULTS = Path(__file__).parent / "results"
DRAWS, NUMBERS, FIRST, WIDTH = 1000, (10, 30, 100), 30, 15.0
HISTORIES, MONTHS, SIZE = 8, 12, 80
"""Histories of so many months of so many samples; the last one is drawn in three ways."""
RARE = 0.1
"""The share of the more frequent class after the change of class frequencies."""
Inputs = NDArray[Any]
Labels = NDArray[np.int64]


def breast_cancer() -> pd.DataFrame:
    """Wisconsin's; sites are quarters of the mean texture, which is of the dye."""
    table = load_breast_cancer(as_frame=True)
    return table.data.assign(outcome=np.where(table.target == 1, "benign", "malignant"))


def diabetes() -> pd.DataFrame:
    """Efron's: whether the disease got worse than in half of the patients; sites are quarters of age."""
    table = load_diabetes(as_frame=True, scaled=False)
    return table.data.assign(outcome=np.where(table.target > table.target.median(), "worse", "same"))


def heart_disease() -> pd.DataFrame:
    """UCI's, of four hospitals; columns that some of them lack are left out, and a cholesterol of 0 is none."""
    folder, frames = Path(os.environ["FEDSHIFT_DATA"]) / "heart_disease_uci", []
    for site in ("cleveland", "hungarian", "switzerland", "va"):
        table = pd.read_csv(folder / f"processed.{site}.data", names=[*HEART, "num"], na_values="?")
        frames.append(table.assign(site=site, outcome=np.where(table.num > 0, "ill", "healthy")))
    table = pd.concat(frames, ignore_index=True).drop(columns=["num", "fbs", "restecg", "slope", "ca", "thal"])
    return table.assign(chol=table.chol.replace(0, np.nan))


def digits() -> pd.DataFrame:
    """Scikit-learn's, of ten classes."""
    table = load_digits(as_frame=True)
    return table.data.assign(outcome=table.target)


HEART = ("age", "sex", "cp", "trestbps", "chol", "fbs", "restecg", "thalach", "exang", "oldpeak", "slope", "ca", "thal")
SETS: Mapping[str, Callable[[], pd.DataFrame]] = {
    "breast_cancer": breast_cancer,
    "diabetes": diabetes,
    "heart_disease": heart_disease,
    "digits": digits,
}
SITES_BY = {"breast_cancer": "mean texture", "diabetes": "age", "heart_disease": "site"}
UNITS = {"breast_cancer": ("worst area", 0.01), "diabetes": ("s1", 1 / 38.67), "heart_disease": ("chol", 1 / 38.67)}
"""A column, and by what it changes: mm² to cm², mg/dl to mmol/l."""


def score(table: pd.DataFrame) -> tuple[Inputs, Labels]:
    """Scores and labels of the seven tenths on which a logistic regression was not fitted."""
    columns = table.drop(columns=["outcome", "site"], errors="ignore")
    inputs = columns.fillna(columns.mean()).to_numpy(dtype=np.float64)
    labels = np.unique(table["outcome"].astype(str), return_inverse=True)[1]
    fitted, rest, of_fitted, of_rest = train_test_split(inputs, labels, test_size=0.7, random_state=0, stratify=labels)
    model = make_pipeline(StandardScaler(), LogisticRegression(max_iter=200)).fit(fitted, of_fitted)
    return np.asarray(model.predict_proba(rest)), np.asarray(of_rest, dtype=np.int64)


def intervals(scores: Inputs, labels: Labels, drawn: Drawn) -> tuple[Interval, Interval | None]:
    """Of the accuracy and, for two classes, of the AUROC."""
    chosen = drawn.rows
    accuracy = accuracy_of(scores[chosen].argmax(axis=1) == labels[chosen], drawn)
    return accuracy, auroc_of(labels[chosen], scores[chosen, 1], drawn) if scores.shape[1] == 2 else None


def coverage(scores: Inputs, labels: Labels) -> Iterator[dict[str, Any]]:
    """How often intervals hold what all samples have, in percent, and how wide they are, in points."""
    truths = [100 * float((scores.argmax(axis=1) == labels).mean())]
    truths += [100 * float(roc_auc_score(labels, scores[:, 1]))] if scores.shape[1] == 2 else []
    for number in NUMBERS:
        for strata in (False, True):
            if strata and not draw(scores, number, strata=True).stratified:
                continue
            found = [intervals(scores, labels, draw(scores, number, seed, strata=strata)) for seed in range(DRAWS)]
            for at, (name, truth) in enumerate(zip(("accuracy", "auroc"), truths, strict=False)):
                there = [interval for pair in found if (interval := pair[at]) is not None]
                yield {
                    "labels": number,
                    "strata": strata,
                    "measure": name,
                    "truth": truth,
                    "given": 100 * len(there) / DRAWS,
                    "covered": 100 * float(np.mean([item.low <= truth <= item.high for item in there])),
                    "width": float(np.mean([item.width for item in there])),
                }


def width_reached(scores: Inputs, labels: Labels) -> dict[str, Any]:
    """Widths after as many labels as the first ones say that it takes."""
    numbers, widths = [], []
    for seed in range(DRAWS):
        first = intervals(scores, labels, draw(scores, FIRST, seed, strata=False))[0]
        numbers.append(labels_needed(first, FIRST, len(labels), WIDTH))
        widths.append(intervals(scores, labels, draw(scores, numbers[-1], seed, strata=False))[0].width)
    middle = [float(share) for share in np.quantile(widths, (0.1, 0.5, 0.9))]
    return {"needed": float(np.median(numbers)), "of": len(labels), "widths": middle}


def read_once() -> None:
    """Keep what an estimate reads of the runs, which is the same in every month."""
    looked_at, source_of, cases_of = estimates._looked_at, estimates._source_of, combination.Cases.of
    known: dict[Any, Any] = {}

    def kept(key: Any, compute: Callable[[], Any]) -> Any:
        if key not in known:
            known[key] = compute()
        return known[key]

    class Read(estimates._Read):
        def __init__(self, source: Any) -> None:
            super().__init__(source)
            self._read = kept(("data", id(source)), list)

    estimates._source_of = cache(source_of)
    estimates._Read = Read  # type: ignore[misc]
    estimates._looked_at = lambda run, item, read: kept((run, item.site), lambda: looked_at(run, item, read))
    combination.Cases.of = staticmethod(  # type: ignore[assignment, method-assign]
        lambda sites: kept(tuple(map(id, sites.values())), lambda: (cases_of(sites), sites))[0]
    )


def made_sites(name: str, table: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """The table in parts, by its sites or in quarters of a column."""
    by = SITES_BY[name]
    if by == "site":
        return {str(site): rows.drop(columns="site") for site, rows in table.groupby("site")}
    quarter = pd.qcut(table[by].rank(method="first"), 4, labels=False)
    return {f"quarter {number + 1}": table[quarter == number] for number in range(4)}


def leave_each_out(name: str, sites: Mapping[str, pd.DataFrame], folder: Path) -> fedshift.Results:
    """FedAvg with each site left out."""
    for site, rows in sites.items():
        rows.to_csv(folder / f"{site}.csv", index=False)
    columns = [column for column in next(iter(sites.values())) if column != "outcome"]
    files = {site: str(folder / f"{site}.csv") for site in sites}
    return fedshift.run(
        {
            "name": name,
            "data": {"name": "table", "sites": files, "label": "outcome", "numeric": columns},
            "protocol": {"seeds": [0]},
            "model": {"name": "mlp", "hidden": [16]},
            "training": {"rounds": 15, "batch_size": 32, "lr": 0.05, "measure_every": 15},
            "methods": ["fedavg"],
            "engine": {"threads": 1},
            "evaluation": {"resamples": 0},
            "device": "cpu",
        },
        folder / "runs",
    )


def last_months(name: str, rows: pd.DataFrame, generator: np.random.Generator) -> Iterator[tuple[str, pd.DataFrame]]:
    """The last month as those before, in another unit, and with other class frequencies."""
    column, factor = UNITS[name]
    month = rows.sample(SIZE, replace=True, random_state=generator)
    yield "alike", month
    yield "another unit", month.assign(**{column: factor * month[column]})
    frequent = rows["outcome"] == rows["outcome"].mode()[0]
    shares = np.where(frequent, RARE / frequent.mean(), (1 - RARE) / (1 - frequent.mean()))
    yield "class frequencies", rows.sample(SIZE, replace=True, weights=shares, random_state=generator)


def months(name: str, site: str, rows: pd.DataFrame, results: fedshift.Results, folder: Path) -> dict[str, Any]:
    """Alarms in percent of months, and the log's bytes a month."""
    model, generator = results.model(target=site), np.random.default_rng(0)
    alike: list[list[bool]] = []
    noticed: dict[str, list[bool]] = {}
    sizes = []
    for history in range(HISTORIES):
        log = folder / f"{site} {history}.jsonl"
        for _ in range(MONTHS - 1):
            month = model.monitor(rows.sample(SIZE, replace=True, random_state=generator), log)
            alike.append([month.alarm, bool(month.drift), month.harmful, bool(month.unlike)])
        before = log.read_bytes()
        for kind, last in last_months(name, rows, generator):
            log.write_bytes(before)
            month = model.monitor(last, log)
            noticed.setdefault(kind, []).append(month.alarm)
            sizes.append(log.stat().st_size / MONTHS)
    alarm, drift, harmful, unlike = (100 * float(share) for share in np.mean(alike, axis=0))
    return {
        "site": site,
        "months": len(alike),
        "false alarms": alarm,
        "drift": drift,
        "harmful": harmful,
        "unlike": unlike,
        **{f"noticed: {kind}": 100 * float(np.mean(seen)) for kind, seen in noticed.items()},
        "bytes": float(np.mean(sizes)),
    }


def main() -> None:
    """Draw labels and months of every set."""
    torch.set_num_threads(1)
    result = dict[str, Any]()
    read_once()
    for name, load in SETS.items():
        table = load()
        scores, labels = score(table)
        result[name] = {"intervals": list(coverage(scores, labels)), "reached": width_reached(scores, labels)}
        print(name, json.dumps(result[name], indent=1), flush=True)
        if name not in SITES_BY:
            continue
        sites = made_sites(name, table)
        with tempfile.TemporaryDirectory() as folder:
            results = leave_each_out(name, sites, Path(folder))
            result[name]["months"] = [
                months(name, site, sites[site], results, Path(folder)) for site in list(sites)[1::2]
            ]
        print(json.dumps(result[name]["months"], indent=1), flush=True)
    (RESULTS / "labels.json").write_text(json.dumps(round_numbers(result), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
