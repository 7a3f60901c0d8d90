"""Which model answers at a site without labels: ``python benchmarks/choice.py RUNS``.

Each site of each data set in turn is the one without labels. From the others alone it is decided whether the common
model (FedAvg) or one adapted there answers, by `fedshift.evaluation.estimate.choice.choose` and by four other rules. It
is compared with what all of them reach there. Runs are kept below RUNS. It writes results/choice.json and prints the
tables of choice.md.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import reduce
from operator import add
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from scipy.special import stdtrit

import fedshift
from estimate import SETS
from fedshift.evaluation.estimate.choice import choose
from fedshift.evaluation.estimate.combination import read
from fedshift.evaluation.estimate.sums import sums_of
from fedshift.experiment.config.experiment import parse
from fedshift.experiment.estimate import Measured, measured_sites

RESULT = Path(__file__).parent / "results" / "choice.json"
COMMON, ADAPTED = "fedavg", ("recipe_unlabelled", "shot", "kd3a")
SEEDS = {
    "heart_disease": (0, 1),
    "office_caltech_surf": (0, 1),
    "rotated_digits": (0,),
    "pacs_features": (0,),
    "five_digits": (0,),
    "amazon_reviews": (0,),
}
"""Without drawn_letters, whose networks with BatchNorm learn nothing in so few rounds."""
TUNED = ("heart_disease", "rotated_digits", "pacs_features")
"""The constants of `choose` were chosen on these."""
MATTERS = 2.0
"""Points from which a decision matters."""
MOST = 400
"""Samples of a target whose scores are read for estimates."""


@dataclass(frozen=True)
class Target:
    """A target: what each method reaches there and at the others, and what is estimated here, in percent."""

    data: str
    seed: int
    site: str
    reached: Mapping[str, float]
    others: Mapping[str, Sequence[float]]
    estimated: Mapping[str, float]

    def gains(self, methods: Sequence[str]) -> dict[str, list[float]]:
        """What adapting gained at the other targets."""
        return {
            name: [there - usual for there, usual in zip(self.others[name], self.others[COMMON], strict=True)]
            for name in methods
        }


def targets(name: str, seed: int, runs: Path) -> list[Target]:
    """All targets of a data set; networks with BatchNorm, 40 % of each target measured."""
    rounds, batch, rate = SETS[name]["training"]
    experiment = parse(
        {
            "name": name,
            "data": {"name": name, **SETS[name]["data"]},
            "protocol": {"kind": "adapt_to_one", "targets": "all", "seeds": [seed], "test_fraction": 0.4},
            "model": {**SETS[name]["model"], "batch_norm": True},
            "training": {"rounds": rounds, "batch_size": batch, "lr": rate, "measure_every": rounds},
            "methods": [COMMON, *ADAPTED],
            "engine": {"threads": 1},
            "evaluation": {"resamples": 0},
            "device": "cpu",
        }
    )
    results = fedshift.run(experiment, runs / f"seed-{seed}")
    sites = list(dict.fromkeys(run.target for run in results.runs))
    reached = {(run.target, run.method): run.accuracy() or 0.0 for run in results.runs}
    known: dict[tuple[str, str], Measured] = {}
    for run in results.runs:
        folder = results.folder / run.method / run.target / f"seed-{seed}"
        (at_target,) = (site for site in measured_sites(folder, tuple(run.classes)) if site.site == run.target)
        known[run.target, run.method] = at_target
    return [_target(name, seed, site, sites, reached, known) for site in sites]


def _target(
    data: str,
    seed: int,
    site: str,
    sites: Sequence[str],
    reached: Mapping[tuple[str, str], float],
    known: Mapping[tuple[str, str], Measured],
) -> Target:
    methods, others = (COMMON, *ADAPTED), [other for other in sites if other != site]
    estimated = {}
    for name in methods:
        sums = [
            sums_of(known[other, name].known.scores[:MOST], known[other, name].known.labels[:MOST]) for other in others
        ]
        estimated[name] = 100 * read(reduce(add, sums), known[site, name].known.scores[:MOST]).centre(0.1)
    return Target(
        data,
        seed,
        site,
        {name: reached[site, name] for name in methods},
        {name: [reached[other, name] for other in others] for name in methods},
        estimated,
    )


def largest_mean(target: Target, methods: Sequence[str]) -> str:
    """The method of the best mean at the other targets."""
    return max((COMMON, *methods), key=lambda name: fmean(target.others[name]))


def nine_of_ten(target: Target, methods: Sequence[str]) -> str:
    """The method that gains at nine of ten further sites (prediction bound: Hahn, 1970)."""
    gains, bounds = target.gains(methods), {}
    for name, values in gains.items():
        spread = max(stdev(values), 2.0) * math.sqrt(1 + 1 / len(values))
        bounds[name] = fmean(values) - float(stdtrit(len(values) - 1, 0.9)) * spread
    return max((name for name in bounds if bounds[name] > 0), key=bounds.__getitem__, default=COMMON)


def larger_estimate(target: Target, methods: Sequence[str]) -> str:
    """The method of the best estimate here."""
    return max((COMMON, *methods), key=target.estimated.__getitem__)


def both(target: Target, methods: Sequence[str]) -> str:
    """By the mean gain at the other targets and the difference of estimates here, in equal parts."""
    gain = {name: fmean(values) for name, values in target.gains(methods).items()} | {COMMON: 0.0}
    return max(gain, key=lambda name: gain[name] + target.estimated[name] - target.estimated[COMMON])


def chosen_method(target: Target, methods: Sequence[str]) -> str:
    """The rule of `Results.choice`."""
    return choose(target.gains(methods)) or COMMON


Rule = Callable[[Target, Sequence[str]], str]
RULES: Mapping[str, Rule] = {
    "the choice": chosen_method,
    "best mean at the other targets": largest_mean,
    "gains at nine of ten further sites": nine_of_ten,
    "best estimate here": larger_estimate,
    "mean gain and estimates here": both,
    "always fedavg": lambda target, methods: COMMON,
    "always recipe_unlabelled": lambda target, methods: "recipe_unlabelled",
}


def best_in_another_run(all_targets: Sequence[Target]) -> Rule:
    """The method that reaches most at the same target with another seed: as much as a site itself tells.

    Its samples are the same in both runs, which differ in the drawn weights and in the part that is measured.
    """

    def rule(target: Target, methods: Sequence[str]) -> str:
        (other,) = (
            one for one in all_targets if (one.data, one.site) == (target.data, target.site) and one.seed != target.seed
        )
        return max((COMMON, *methods), key=other.reached.__getitem__)

    return rule


def in_two_runs(all_targets: Sequence[Target]) -> dict[str, Any]:
    """What the rule and the truth of another run reach, by data set of two seeds."""
    result = {}
    for name in (name for name, seeds in SEEDS.items() if len(seeds) > 1):
        some = [target for target in all_targets if target.data == name]
        rules = {"the choice": chosen_method, "best in another run": best_in_another_run(some)}
        result[name] = {label: summary(some, ADAPTED[:2], rule) for label, rule in rules.items()}
    return result


def summary(all_targets: Sequence[Target], methods: Sequence[str], rule: Rule) -> Any:
    """Regrets in points, right decisions in percent, and gains over the common model."""
    regrets, gains, right = [], [], []
    for target in all_targets:
        able = [target.reached[name] for name in (COMMON, *methods)]
        got = target.reached[rule(target, methods)]
        regrets.append(max(able) - got)
        gains.append(got - target.reached[COMMON])
        if max(able) - min(able) >= MATTERS:
            right.append(max(able) - got < MATTERS)
    return {
        "decisions that matter": len(right),
        "right": round(100 * fmean(right), 1),
        "regret": round(fmean(regrets), 1),
        "worst regret": round(max(regrets), 1),
        "gain": round(fmean(gains), 1),
        "worst loss": round(-min(gains), 1),
    }


def main() -> None:
    """Run, decide, write and print."""
    all_targets = [
        target for name, seeds in SEEDS.items() for seed in seeds for target in targets(name, seed, Path(sys.argv[1]))
    ]
    parts = {
        "all": all_targets,
        "tuned on": [target for target in all_targets if target.data in TUNED],
        "others": [target for target in all_targets if target.data not in TUNED],
    }
    table = {
        f"{part}, {len(methods) + 1} models": {name: summary(some, methods, rule) for name, rule in RULES.items()}
        for methods in (ADAPTED[:1], ADAPTED[:2], ADAPTED)
        for part, some in parts.items()
    }
    listed = [{**asdict(target), "chosen": chosen_method(target, ADAPTED[:2])} for target in all_targets]
    runs = in_two_runs(all_targets)
    result = {"summary": table, "two runs": runs, "targets": listed}
    RESULT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    for part, rules in (table | runs).items():
        print(part)
        for name, numbers in rules.items():
            print(f"  {name}: {numbers}")


if __name__ == "__main__":
    main()
