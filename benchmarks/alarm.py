"""When an estimate warns of harm: ``python benchmarks/alarm.py``.

Targets, and what an estimate says of each, are those of results/estimate_0_1.json. How far their samples are from those
of the other sites (`fedshift.evaluation.estimate.distances`) is measured here. A shift is harmful that loses ten points
or more against the site as it is; unharmed are sites as they are, and other class frequencies that lose less than
three.

Each data set is judged by what the targets of the others teach, at the sum that five of a hundred unharmed targets
exceed: of the others (``learned``), or of all (``at five``), which tells warnings apart however their sums are chosen.
It writes results/alarm.json, with the table learned from all, and prints the table of estimate.md.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from operator import add
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import logit, stdtr
from sklearn.ensemble import GradientBoostingClassifier
from sklearn.linear_model import LogisticRegression

from estimate import MOST, RESULTS, SETS, measured_at, round_numbers, synthetic, with_moved_classes
from fedshift.evaluation.estimate.combination import DISTANT, LOSS, ODD, PRIOR, harm_signs
from fedshift.evaluation.estimate.distances import Apart, Samples, beyond
from fedshift.evaluation.estimate.input_sums import Moments
from fedshift.experiment.changed_samples import samples_at, samples_of, spread

Numbers = NDArray[np.float64]
HARM, SPARED = 10.0, 3.0
FALSE_ALARMS = 0.05
PENALTY = 30.0
"""On squared coefficients; each data set counts for 40 harmed and 40 unharmed targets. Chosen on all of them."""
OLD, PRESENT = (0, 1, 3), (0, 1, 2, 3, 4, 5)
"""Signs of the alarm before means and scores were read, and all."""
OF_SUMS = (6, 7, 3, 4, 5)
"""Those of a deployed federation: spread and means by sums of the other sites' inputs, and scores."""
LEAST = 10
"""Samples that have a value beside the usual one, so that sums tell it: the default of ``policy.smallest_group``."""
Key = tuple[str, int, str, str, str]
Both = tuple[Apart, Apart]
"""By samples, and by sums over them."""


@dataclass(frozen=True)
class Target:
    """What is known of a target, and what the alarm reads; the last two signs by sums of inputs.

    Attributes:
        below: points by which its accuracy is below the other sites' mean.
    """

    data: str
    site: str
    kind: str
    harmed: bool
    signs: Numbers
    chance: float
    below: float

    @classmethod
    def of(cls, one: Mapping[str, Any], apart: Both, left_out: Sequence[Both]) -> Target | None:
        """From what a result says of it; None between harm and none."""
        loss = one["natural"] - one["truth"]
        spared = one["kind"] == "natural" or (one["kind"] == "moved" and loss < SPARED)
        if loss < HARM and not spared:
            return None
        by_scores = ((one["usual"] - one["corrected"]) / LOSS, one["unexplained"] / ODD, one["far"] / DISTANT)
        signs = harm_signs([item[0] for item in left_out], apart[0], by_scores)
        of_sums = beyond(apart[1], [item[1] for item in left_out])
        below = one["usual"] - one["truth"]
        named = one["data"], one["site"], one["kind"]
        return cls(*named, loss >= HARM, np.array([*signs, *of_sums]), chance_of_harm(one), below)


Sums = Callable[[Sequence[Target], Sequence[Target]], Numbers]
"""Takes targets that teach, and those that are judged."""


def chance_of_harm(one: Mapping[str, Any]) -> float:
    """The probability of ten points or more below the other sites, by the interval's own distribution of errors."""
    low, high, estimate, harm = (
        float(logit(np.clip(value / 100, 0.01, 0.99)))
        for value in (one["low"], one["high"], one["estimate"], one["usual"] - HARM)
    )
    return float(stdtr(PRIOR + 4, 4 * (harm - estimate) / max(high - low, 1e-6)))


def distances(runs: Path) -> Iterator[tuple[Key, Both]]:
    """How far the samples of every target are, and those of each left-out site (kind ``left out``)."""
    for name in SETS:
        for seed in (0, 1):
            data, _, known = measured_at(name, seed, runs / f"seed-{seed}")
            rows = {site: spread(len(data.domains[site])) for site in known}
            moments = {site: Moments.of(samples_of(data, site, some), LEAST) for site, some in rows.items()}
            for site, one in known.items():
                others = [other for other in known if other != site]
                there = partial(_apart, samples_at(data, others), reduce(add, (moments[other] for other in others)))
                some = np.sort(np.random.default_rng(seed).permutation(len(one.rows))[:MOST])
                natural, labels = samples_of(data, site, one.rows[some]), one.known.labels[some]
                yield (
                    (name, seed, site, "left out", ""),
                    there(samples_of(data, site, one.rows[spread(len(one.rows))])),
                )
                yield (name, seed, site, "natural", ""), there(natural)
                for shift, inputs in synthetic(data, site, one.rows[some], seed):
                    yield (name, seed, site, "synthetic", shift), there(inputs)
                for shift, chosen in with_moved_classes(labels, len(data.classes), seed):
                    yield (name, seed, site, "moved", shift), there(natural[chosen])


def _apart(there: Samples, sums: Moments, inputs: NDArray[Any]) -> Both:
    return there.apart(inputs), sums.apart(inputs)


def targets(apart: Mapping[Key, Both]) -> Iterator[Target]:
    """All targets that are harmed or spared."""
    for one in json.loads((RESULTS / "estimate_0_1.json").read_text(encoding="utf-8"))["targets"]:
        name, seed, site = one["data"], one["seed"], one["site"]
        left_out = [
            value
            for (data, number, other, kind, _), value in apart.items()
            if (data, number, kind) == (name, seed, "left out") and other != site
        ]
        target = Target.of(one, apart[name, seed, site, one["kind"], one["shift"]], left_out)
        if target is not None:
            yield target


def learned(known: Sequence[Target], signs: Sequence[int]) -> tuple[Numbers, float]:
    """The weights of a logistic regression, and the sum that five of a hundred unharmed targets exceed."""
    model = LogisticRegression(C=1 / PENALTY, max_iter=2000)
    rows = np.stack([one.signs[list(signs)] for one in known])
    deviation = rows.std(axis=0)
    weights = model.fit(rows / deviation, [one.harmed for one in known], balanced(known)).coef_[0] / deviation
    sums = [[weights @ one.signs[list(signs)] for one in some if not one.harmed] for some in by_set(known).values()]
    return weights, float(np.mean([np.quantile(some, 1 - FALSE_ALARMS) for some in sums]))


def boosted(known: Sequence[Target], judged: Sequence[Target]) -> Numbers:
    """What gradient boosting says of targets, learned from known ones."""
    model = GradientBoostingClassifier(n_estimators=100, max_depth=2, learning_rate=0.06, subsample=0.7, random_state=0)
    signs = slice(len(PRESENT))
    model.fit([one.signs[signs] for one in known], [one.harmed for one in known], balanced(known))
    return np.asarray(model.predict_proba([one.signs[signs] for one in judged])[:, 1])


def balanced(known: Sequence[Target]) -> Numbers:
    """Weights by which a data set's harmed and unharmed targets count for 40 each."""
    groups = [(one.data, one.harmed) for one in known]
    return np.array([40 / groups.count(group) for group in groups])


def by_set(known: Sequence[Target]) -> dict[str, list[Target]]:
    """Targets of each data set."""
    return {name: [one for one in known if one.data == name] for name in dict.fromkeys(one.data for one in known)}


def judged(known: Sequence[Target], sums_of: Sums, *, by_site: bool = False, alike: bool = False) -> dict[str, float]:
    """What is noticed where five of a hundred unharmed targets of all data sets are false alarms.

    Args:
        known: all targets.
        sums_of: what exceeds a limit where it warns.
        by_site: whether a target is judged by what all other sites teach, those of its own data set among them; if not,
            no data set teaches of itself.
        alike: whether only such targets count for unharmed that are within ten points of the other sites.
    """
    parts = [(one.data, one.site) if by_site else one.data for one in known]
    sums, harmed = np.zeros(len(known)), np.array([one.harmed for one in known])
    for part in dict.fromkeys(parts):
        here = np.array([other == part for other in parts])
        teach = [one for one, judged_now in zip(known, here, strict=True) if not judged_now]
        sums[here] = sums_of(teach, [one for one, judged_now in zip(known, here, strict=True) if judged_now])
    unharmed = ~harmed
    if alike:
        unharmed &= np.array([one.below < HARM for one in known])
    limit = np.quantile(sums[unharmed], 1 - FALSE_ALARMS, method="higher")
    return {
        "noticed": 100 * float((sums[harmed] > limit).mean()),
        "false": 100 * float((sums[unharmed] > limit).mean()),
    }


def linear(signs: Sequence[int]) -> Sums:
    """Sums of signs by learned weights, above the learned limit."""

    def sums_of(teach: Sequence[Target], some: Sequence[Target]) -> Numbers:
        weights, alarm = learned(teach, signs)
        return np.array([weights @ one.signs[list(signs)] - alarm for one in some])

    return sums_of


def warnings(known: Sequence[Target], signs: Sequence[int]) -> list[bool]:
    """Of which targets it is warned beyond the limit that the other data sets teach."""
    result: list[bool] = []
    for name, some in by_set(known).items():
        result += (linear(signs)([one for one in known if one.data != name], some) > 0).tolist()
    return result


def at_learned(known: Sequence[Target], signs: Sequence[int]) -> dict[str, float]:
    """What is noticed beyond the limit that the other data sets teach."""
    pairs = list(zip(in_order(known), warnings(known, signs), strict=True))
    return {
        "noticed": 100 * float(np.mean([warned for one, warned in pairs if one.harmed])),
        "false": 100 * float(np.mean([warned for one, warned in pairs if not one.harmed])),
    }


def in_order(known: Sequence[Target]) -> list[Target]:
    """Targets in the order of `warnings`."""
    return [one for some in by_set(known).values() for one in some]


def where(known: Sequence[Target]) -> dict[str, dict[str, int]]:
    """How many targets of which kind there are, and of how many it is warned."""
    groups: dict[str, list[bool]] = {}
    for one, warned in zip(in_order(known), warnings(known, PRESENT), strict=True):
        level = "ten points below the others" if one.below >= HARM else "within ten points of the others"
        for name in (one.kind, level):
            groups.setdefault(f"{'harmed' if one.harmed else 'unharmed'}, {name}", []).append(warned)
    return {name: {"targets": len(some), "warnings": sum(some)} for name, some in sorted(groups.items())}


def plain_sum(*signs: int) -> Sums:
    """Signs added up: nothing is learned."""
    return lambda teach, some: np.array([one.signs[list(signs)].sum() for one in some])


def main() -> None:
    """Measure, learn, judge, write and print."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        apart = dict(distances(Path(os.environ.get("ESTIMATE_RUNS", place))))
    known = list(targets(apart))
    table = {
        "the warning": judged(known, linear(PRESENT)),
        "without scores but what is lost": judged(known, linear((0, 1, 2, 3))),
        "spread, nearest, what is lost": judged(known, linear(OLD)),
        "without the nearest": judged(known, linear((0, 2, 3, 4, 5))),
        "deployed": judged(known, linear(OF_SUMS)),
        "deployed, without means": judged(known, linear((6, 3, 4, 5))),
        "scores": judged(known, plain_sum(3, 4, 5)),
        "probability of harm": judged(known, lambda teach, some: np.array([one.chance for one in some])),
        "boosting": judged(known, boosted),
        "the warning, its other sites known": judged(known, linear(PRESENT), by_site=True),
        "boosting, its other sites known": judged(known, boosted, by_site=True),
        "the warning, unharmed within ten points of the others": judged(known, linear(PRESENT), alike=True),
        "accuracy known": judged(known, lambda teach, some: np.array([one.below for one in some])),
    }
    weights, alarm = learned(known, PRESENT)
    sum_weights, sum_alarm = learned(known, OF_SUMS)
    result = {
        "command": "python benchmarks/alarm.py",
        "harmed": sum(one.harmed for one in known),
        "unharmed": sum(not one.harmed for one in known),
        "learned sum": {
            "the warning": at_learned(known, PRESENT),
            "deployed": at_learned(known, OF_SUMS),
            "deployed, without means": at_learned(known, (6, 3, 4, 5)),
            "before": at_learned(known, OLD),
        },
        "at five": table,
        "where": where(known),
        "weights": weights.tolist(),
        "alarm": alarm,
        "sum weights": sum_weights.tolist(),
        "sum alarm": sum_alarm,
        "targets": [
            {"data": one.data, "harmed": one.harmed, "below": one.below, "signs": one.signs.tolist()} for one in known
        ],
    }
    (RESULTS / "alarm.json").write_text(json.dumps(round_numbers(result), indent=1) + "\n", encoding="utf-8")
    for name, numbers in [*table.items(), *result["learned sum"].items()]:
        print(name, {what: round(value, 1) for what, value in numbers.items()})


if __name__ == "__main__":
    main()
