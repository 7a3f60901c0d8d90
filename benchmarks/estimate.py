"""Accuracy at sites without labels, estimated and known: ``python benchmarks/estimate.py [SEED …]``.

Each site of each data set in turn is the one without labels. Its model is the one that never saw it, and the cases with
known truth are the other sites, as the runs that left these out measured them. There are three kinds of targets:

* natural: the site as it is;
* synthetic: the same samples with noise, in another scale or unit, with columns or parts of the image missing, …;
* moved: the same samples drawn again so that class frequencies differ (Dirichlet, 0.3 and 1 a class).

What is known of a target is compared with what `estimate_accuracy` says without its labels. The changes by which the
other sites teach it (`fedshift.evaluation.estimate.changes`) are not these shifts, but some are alike: noise, a scale.
What other federations taught of corrections (`fedshift.evaluation.estimate.prior`) is learned again for each data set,
from the others alone; alarm.py learns warnings of harm, and judges them. It writes results/estimate_SEEDS.json, with
the table learned from all, and prints the tables of estimate.md.
The constants in `fedshift.evaluation.estimate.combination` were chosen on these data sets, the same for all of them.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import expit
from scipy.stats import rankdata

import fedshift
from estimate_lessons import Lesson, learn_correction, lessons
from fedshift.data.domain import DataSet
from fedshift.evaluation.estimate import combination
from fedshift.evaluation.estimate.changes import nearby_answers
from fedshift.evaluation.estimate.combination import LeftOut, estimate_accuracy
from fedshift.evaluation.estimate.correction import Correction
from fedshift.evaluation.estimate.distances import Apart
from fedshift.evaluation.estimate.prior import PUBLIC, Prior
from fedshift.evaluation.estimate.two_classes import FEWEST, MEASURES, by_score, estimates, measures
from fedshift.evaluation.site_metrics import best_threshold
from fedshift.experiment.changed_samples import looked_at, samples_at, samples_of, usual_values
from fedshift.experiment.config.experiment import parse
from fedshift.experiment.estimate import Measured, measured_sites
from fedshift.experiment.features import build_data
from fedshift.experiment.predict import TrainedModel
from fedshift.version import installed_version

RESULTS = Path(__file__).parent / "results"
SETS: dict[str, dict[str, Any]] = {
    "heart_disease": {"data": {}, "model": {"name": "mlp", "hidden": [16]}, "training": (15, 64, 0.1)},
    "office_caltech_surf": {"data": {}, "model": {"name": "mlp", "hidden": [64]}, "training": (15, 32, 0.05)},
    "pacs_features": {"data": {}, "model": {"name": "mlp", "hidden": [64]}, "training": (6, 64, 0.01)},
    "rotated_digits": {
        "data": {"per_class": 60, "size": 8},
        "model": {"name": "mlp", "hidden": [64]},
        "training": (20, 32, 0.1),
    },
    "drawn_letters": {
        "data": {"per_class": 40, "size": 16},
        "model": {"name": "mlp", "hidden": [64]},
        "training": (10, 32, 0.1),
    },
    "amazon_reviews": {
        "data": {"scaling": "log"},
        "model": {"name": "mlp", "hidden": [32]},
        "training": (5, 50, 0.05),
    },
    "five_digits": {
        "data": {"samples_per_domain": 700},
        "model": {"name": "mlp", "hidden": [64]},
        "training": (10, 50, 0.05),
    },
}
"""Data set → its options, the network, and rounds, batch size and rate of FedAvg."""
TUNED = ("heart_disease", "rotated_digits", "pacs_features")
"""AUROC, sensitivity and specificity were tuned on these."""
MOST = 600
"""Samples of a target that are looked at."""
Inputs = NDArray[Any]


@dataclass(frozen=True)
class Outcome:
    """One target: what is known of it and what is said of it, in percent; ``corrected`` before it leans to the usual.

    ``harmful`` is what the frozen table of the prior says, which was learned from these data sets; alarm.py judges it.
    """

    data: str
    seed: int
    site: str
    kind: str
    shift: str
    truth: float
    natural: float
    usual: float
    estimate: float
    low: float
    high: float
    corrected: float
    scores_alone: float
    abstain: bool
    unexplained: float
    far: float
    parts: Mapping[str, float]
    measures: Mapping[str, Mapping[str, float | None]] = field(default_factory=dict)
    harmful: bool = False


def changed_images(images: Inputs, draw: np.random.Generator) -> Iterator[tuple[str, Inputs]]:
    """Images (n, c, h, w) of uint8 as other devices and hands would have them."""
    x = images.astype(np.float32)
    dark = x.copy()
    dark[..., : x.shape[3] // 3] = 0
    blurred = sum(np.roll(x, (i, j), (2, 3)) for i in (-1, 0, 1) for j in (-1, 0, 1)) / 9
    made = {
        "noise 25": x + draw.normal(0, 25, x.shape),
        "noise 70": x + draw.normal(0, 70, x.shape),
        "contrast": (x - 128) * 0.3 + 128,
        "brighter": x + 70,
        "a third missing": dark,
        "negative": 255 - x,
        "blur": blurred,
    }
    for name, changed in made.items():
        yield name, np.clip(np.rint(changed), 0, 255).astype(np.uint8)


def changed_columns(rows: Inputs, mean: Inputs, std: Inputs, draw: np.random.Generator) -> Iterator[tuple[str, Inputs]]:
    """Rows (n, d) in other units, with noise or with columns missing; mean and deviation (d,) are of the sources."""
    width = rows.shape[1]
    some, most = draw.random(width) < 0.3, draw.random(width) < 0.6
    made = {
        "noise 0.7": rows + 0.7 * std * draw.normal(size=rows.shape),
        "noise 2": rows + 2 * std * draw.normal(size=rows.shape),
        "scale 3": 3 * rows,
        "scale 0.3": 0.3 * rows,
        "units of 30 %": np.where(some, 8 * rows, rows),
        "offset of 30 %": np.where(some, rows + 1.5 * std, rows),
        "30 % missing": np.where(some, mean, rows),
        "60 % missing": np.where(most, mean, rows),
    }
    for name, changed in made.items():
        yield name, changed.astype(np.float32)


def synthetic(data: DataSet, site: str, rows: NDArray[np.int64], seed: int) -> Iterator[tuple[str, Inputs]]:
    """The samples of a site under every change."""
    draw = np.random.default_rng([seed, list(data.domains).index(site)])
    inputs = samples_of(data, site, rows)
    if inputs.dtype == np.uint8:
        yield from changed_images(inputs, draw)
        return
    others = [
        samples_of(data, name, np.arange(min(len(domain), 700)))
        for name, domain in data.domains.items()
        if name != site
    ]
    pooled = np.concatenate(others)
    yield from changed_columns(inputs, pooled.mean(axis=0), pooled.std(axis=0), draw)


def with_moved_classes(labels: NDArray[np.int64], classes: int, seed: int) -> Iterator[tuple[str, NDArray[np.int64]]]:
    """Rows drawn again so that class frequencies are those of a draw from a Dirichlet distribution."""
    draw = np.random.default_rng([seed, 1])
    for number, alpha in enumerate((0.3, 1.0, 1.0)):
        there = np.bincount(labels, minlength=classes) > 0
        shares = np.where(there, draw.dirichlet([alpha] * classes), 0)
        counts = draw.multinomial(min(len(labels), MOST), shares / shares.sum())
        rows = [
            draw.choice(np.flatnonzero(labels == number_of_class), count)
            for number_of_class, count in enumerate(counts)
            if count
        ]
        yield f"draw {number}", np.concatenate(rows)


@dataclass(frozen=True)
class Federation:
    """A data set's runs: for each site the model that never saw it, and what it says there."""

    name: str
    seed: int
    data: DataSet
    models: Mapping[str, TrainedModel]
    known: Mapping[str, Measured]
    cases: Mapping[str, LeftOut]
    seconds: float

    @classmethod
    def of(cls, name: str, seed: int, runs: Path, chosen: Mapping[str, Any] | None = None) -> Federation:
        """Train, by what is chosen for the data set (`SETS`), and look."""
        data, results, known = measured_at(name, seed, runs, chosen)
        folder = results.folder / "fedavg"
        models = {site: fedshift.Model.load(folder / site / f"seed-{seed}").trained for site in known}
        cases = {
            site: looked_at(models[site], data, site, known_site.rows, known_site.known)
            for site, known_site in known.items()
        }
        return cls(name, seed, data, models, known, cases, sum(run.seconds for run in results.runs))

    def outcomes(self, prior: Prior) -> Iterator[Outcome]:
        """All targets, by what other data sets taught."""
        for site, known_site in self.known.items():
            others = {name: case for name, case in self.cases.items() if name != site}
            trained, data, seed = self.models[site], self.data, self.seed
            some = np.sort(np.random.default_rng(seed).permutation(len(known_site.rows))[:MOST])
            scores, labels, rows = known_site.known.scores[some], known_site.known.labels[some], known_site.rows[some]
            cases = combination.Cases.of(others, prior)
            outcome = partial(outcome_of, others, cases, self.name, seed, site, accuracy(scores, labels))
            near = partial(nearby_answers, trained.scores, usual=usual_values(data, list(others)))
            there, natural = samples_at(data, list(others)), samples_of(data, site, rows)
            nearby = near(natural)
            yield outcome("natural", "", scores, labels, nearby, there.apart(natural))
            for shift, inputs in synthetic(data, site, rows, seed):
                yield outcome("synthetic", shift, trained.scores(inputs), labels, near(inputs), there.apart(inputs))
            for shift, chosen in with_moved_classes(labels, len(data.classes), seed):
                apart = there.apart(natural[chosen])
                yield outcome("moved", shift, scores[chosen], labels[chosen], nearby[chosen], apart)


def measured_at(
    name: str, seed: int, runs: Path, chosen: Mapping[str, Any] | None = None
) -> tuple[DataSet, fedshift.api.Results, dict[str, Measured]]:
    """Train on a data set, each site left out in turn, and what each site's run measured there."""
    chosen = chosen or SETS[name]
    rounds, batch, rate = chosen["training"]
    experiment = parse(
        {
            "name": name,
            "data": {"name": name, **chosen["data"]},
            "protocol": {"targets": "all", "seeds": [seed]},
            "model": chosen["model"],
            "training": {"rounds": rounds, "batch_size": batch, "lr": rate, "measure_every": rounds},
            "methods": ["fedavg"],
            "engine": {"threads": 1},
            "evaluation": {"resamples": 0},
            "device": "cpu",
        }
    )
    data = build_data(experiment)
    results = fedshift.run(experiment, runs)
    folder = results.folder / "fedavg"
    known = {
        site_scores.site: site_scores
        for site in data.domains
        for site_scores in measured_sites(folder / site / f"seed-{seed}", tuple(data.classes))
        if site_scores.unseen
    }
    return data, results, known


def outcome_of(
    others: Mapping[str, LeftOut],
    cases: combination.Cases,
    data: str,
    seed: int,
    site: str,
    natural: float,
    kind: str,
    shift: str,
    scores: Inputs,
    labels: NDArray[np.int64],
    nearby: Inputs,
    apart: Apart,
) -> Outcome:
    """What is said of one target's scores, and what is known."""
    told = estimate_accuracy(others, scores, cases=cases, nearby=nearby, apart=apart)
    assert told.usual is not None
    scores_alone = in_any_case(cases, scores)[0]
    estimate, low, high = in_any_case(cases, scores, nearby, apart)
    return Outcome(
        data=data,
        seed=seed,
        site=site,
        kind=kind,
        shift=shift,
        truth=accuracy(scores, labels),
        natural=natural,
        usual=told.usual,
        estimate=estimate,
        low=low,
        high=high,
        corrected=100 * expit(cases.middle(combination.read(cases.whole, scores), scores, nearby, apart)[0]),
        scores_alone=scores_alone,
        abstain=told.abstain,
        unexplained=told.unexplained or 0.0,
        far=told.far or 0.0,
        parts=told.parts,
        measures=of_two_classes(others, scores, labels),
        harmful=told.harmful,
    )


def of_two_classes(
    others: Mapping[str, LeftOut], scores: Inputs, labels: NDArray[np.int64]
) -> dict[str, dict[str, float | None]]:
    """AUROC, sensitivity and specificity, known and estimated: of more classes, for the latter half against the first.

    The threshold is the best one of the left-out sites together. A target with fewer than ten of a class has none.
    """
    half = (scores.shape[1] + 1) // 2
    second, positive = scores[:, half:].sum(axis=1), labels >= half
    if min(positive.sum(), (~positive).sum()) < FEWEST:
        return {}
    there = [(other.scores[:, half:].sum(axis=1), other.labels >= half) for other in others.values()]
    every, chosen = (np.concatenate([pair[part] for pair in there]) for part in (0, 1))
    threshold = best_threshold(chosen.astype(np.int64), every) or 0.5
    here = by_score(second, positive, threshold)
    by_name = estimates([by_score(*pair, threshold) for pair in there], here.sum(axis=0))
    truth = dict(zip(MEASURES, 100 * measures(here), strict=True)) | {"auroc": auroc(positive, second)}
    return {
        name: {"truth": float(truth[name]), "estimate": measure.estimate, "low": measure.low, "high": measure.high}
        for name, measure in by_name.items()
    }


def auroc(positive: NDArray[np.bool_], scores: Inputs) -> float:
    """In percent, by ranks."""
    ranks, number = rankdata(scores)[positive], int(positive.sum())
    return 100 * float((ranks.sum() - number * (number + 1) / 2) / (number * (len(scores) - number)))


def in_any_case(
    cases: combination.Cases, scores: Inputs, nearby: Inputs | None = None, apart: Apart | None = None
) -> tuple[float, float, float]:
    """Estimate and interval, also where none would be given: so abstention cannot make the errors smaller."""
    centre, low, high = cases.interval(combination.read(cases.whole, scores), scores, nearby, apart)
    return 100 * centre, 100 * low, 100 * high


def accuracy(scores: Inputs, labels: NDArray[np.int64]) -> float:
    """In percent."""
    return 100 * float((scores.argmax(axis=1) == labels).mean())


def by_set(all_outcomes: list[Outcome], value: Any) -> float:
    """The mean over data sets of a value's mean."""
    names = list(dict.fromkeys(outcome.data for outcome in all_outcomes))
    return float(
        np.mean([np.mean([value(outcome) for outcome in all_outcomes if outcome.data == name]) for name in names])
    )


def summary(all_outcomes: list[Outcome]) -> dict[str, dict[str, float]]:
    """By kind of target: mean absolute errors in points; coverage, width of intervals and abstentions in percent."""
    table = {}
    for kind in ("natural", "synthetic", "moved"):
        of_kind = [outcome for outcome in all_outcomes if outcome.kind == kind]
        errors = np.array([outcome.estimate - outcome.truth for outcome in of_kind])
        given = [outcome for outcome in of_kind if not outcome.abstain]
        table[kind] = {
            "targets": len(of_kind),
            "error": by_set(of_kind, lambda outcome: abs(outcome.estimate - outcome.truth)),
            "error where given": by_set(given, lambda outcome: abs(outcome.estimate - outcome.truth)),
            "from scores alone": by_set(of_kind, lambda outcome: abs(outcome.scores_alone - outcome.truth)),
            "mean of the other sites": by_set(of_kind, lambda outcome: abs(outcome.usual - outcome.truth)),
            **{
                name: by_set(of_kind, lambda outcome, name=name: abs(outcome.parts[name] - outcome.truth))
                for name in of_kind[0].parts
            },
            "covered": by_set(of_kind, lambda outcome: 100 * (outcome.low <= outcome.truth <= outcome.high)),
            "width": by_set(of_kind, lambda outcome: outcome.high - outcome.low),
            "width of an oracle": float(np.quantile(errors, 0.95) - np.quantile(errors, 0.05)),
            "no estimate": by_set(of_kind, lambda outcome: 100 * outcome.abstain),
        }
        for name in MEASURES:
            table[kind] |= of_measure(of_kind, name)
    return table


def of_measure(all_outcomes: list[Outcome], name: str) -> dict[str, float]:
    """Error and width in points, coverage and abstentions in percent, of one measure."""
    known = [outcome for outcome in all_outcomes if name in outcome.measures]
    given = [outcome for outcome in known if outcome.measures[name]["estimate"] is not None]

    def value(outcome: Outcome, part: str) -> float:
        return float(outcome.measures[name][part] or 0.0)

    if not given:
        return {}
    return {
        f"{name} error": by_set(given, lambda outcome: abs(value(outcome, "estimate") - value(outcome, "truth"))),
        f"{name} covered": by_set(
            given, lambda outcome: 100 * (value(outcome, "low") <= value(outcome, "truth") <= value(outcome, "high"))
        ),
        f"{name} width": by_set(given, lambda outcome: value(outcome, "high") - value(outcome, "low")),
        f"{name} no estimate": by_set(known, lambda outcome: 100 * (outcome.measures[name]["estimate"] is None)),
    }


def main() -> None:
    """Measure all data sets with every seed."""
    seeds = [int(text) for text in sys.argv[1:]] or [0]
    all_outcomes: list[Outcome] = []
    began = time.time()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        runs = Path(os.environ.get("ESTIMATE_RUNS", folder))
        federations = [Federation.of(name, seed, runs / f"seed-{seed}") for seed in seeds for name in SETS]
        taught: dict[str, list[Lesson]] = {name: [] for name in SETS}
        for federation in federations:
            taught[federation.name] += lessons(federation.cases)
        for federation in federations:
            all_outcomes += federation.outcomes(
                replace(PUBLIC, correction=learn_correction(_without(federation.name, taught)))
            )
            print(f"{federation.name}, seed {federation.seed}: {time.time() - began:.0f} s", file=sys.stderr)
    result = {
        "command": f"python benchmarks/estimate.py {' '.join(map(str, seeds))}",
        "seconds": round(time.time() - began),
        "seconds of the runs": round(sum(federation.seconds for federation in federations)),
        "versions": {"python": platform.python_version(), "fedshift": installed_version(), "torch": torch.__version__},
        "prior": plain(learn_correction(taught)),
        "summary": summary(all_outcomes),
        "tuned on": list(TUNED),
        "others": summary([outcome for outcome in all_outcomes if outcome.data not in TUNED]),
        "two classes": summary(
            [outcome for outcome in all_outcomes if outcome.data in ("heart_disease", "amazon_reviews")]
        ),
        "by data set": {
            name: summary([outcome for outcome in all_outcomes if outcome.data == name])
            for name in dict.fromkeys(o.data for o in all_outcomes)
        },
        "targets": [asdict(outcome) for outcome in all_outcomes],
    }
    result_file = RESULTS / f"estimate_{'_'.join(map(str, seeds))}.json"
    result_file.write_text(json.dumps(round_numbers(result), indent=1) + "\n", encoding="utf-8")
    for kind, numbers in result["summary"].items():  # type: ignore[attr-defined]
        print(kind, {name: round(value, 1) for name, value in numbers.items()})


def _without(name: str, taught: Mapping[str, list[Lesson]]) -> dict[str, list[Lesson]]:
    """The lessons of the other data sets."""
    return {other: some for other, some in taught.items() if other != name}


def plain(correction: Correction) -> dict[str, Any]:
    """The table as `fedshift.evaluation.estimate.prior` has it."""
    moments = zip(correction.mean, correction.deviation, correction.coefficients, strict=True)
    return {"moments": [[float(number) for number in some] for some in moments]}


def round_numbers(value: Any) -> Any:
    """Numbers to four digits."""
    if isinstance(value, dict):
        return {name: round_numbers(item) for name, item in value.items()}
    if isinstance(value, list):
        return [round_numbers(item) for item in value]
    return round(value, 4) if isinstance(value, float) else value


if __name__ == "__main__":
    main()
