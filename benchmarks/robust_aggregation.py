"""Bad sites against rules of robust aggregation: ``python benchmarks/robust_aggregation.py [SEED …]``.

Rotated digits, D45 unseen. Either the five other domains are five sites, of which one is bad, or each is parted into
two sites, and three of the ten are bad. A bad site is played here, around the sites' data and their replies; methods
and rules know nothing of it. A line for each run goes to results/robust_aggregation/runs.jsonl; runs that have one are
not repeated.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Generator, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from fedshift.data.domain import DataSet, Domain
from fedshift.data.site_data import SiteData
from fedshift.experiment.budgets import site_budget
from fedshift.experiment.compatibility import check_fit
from fedshift.experiment.config.experiment import parse
from fedshift.experiment.environment import threads_set
from fedshift.experiment.features import build_data
from fedshift.experiment.plan import Plan, PlannedRun
from fedshift.experiment.runs.context import Context, Reporter
from fedshift.experiment.runs.evaluator import Evaluator, predictions
from fedshift.experiment.runs.round_loop import train_and_evaluate
from fedshift.experiment.runs.run_folder import RunFolder
from fedshift.federation.exchange import Answer, Missing, Request
from fedshift.federation.local.in_process import LocalFederation
from fedshift.functional.poisoning import wrong_labels
from fedshift.methods.robust import move_towards
from fedshift.weights import Weights

RUNS = Path(__file__).parent / "results" / "robust_aggregation" / "runs.jsonl"
TARGET, TRUSTED = "D45", {5: "D30", 10: "D30a"}
BAD = {5: ("D15",), 10: ("D15a", "D0a", "D60a")}
ATTACKS = ("none", "label_flip", "sign_flip", "scaled", "backdoor")
FACTORS = {"sign_flip": -1.0, "scaled": 10.0}
"""What a bad site multiplies its update by."""
TRIGGER = 3
"""Pixels of the white square in a corner that a backdoor answers to."""
CLASS = 0
"""What a model with the backdoor answers to it."""
METHODS: dict[str, dict[str, Any]] = {
    "fedavg": {"name": "fedavg"},
    "csac": {"name": "csac", "acquisition_epochs": 5, "calibration_epochs": 1},
}


def rules(sites: int) -> dict[str, Any]:
    """The rules by their names in tables; each expects as many bad sites as there are."""
    bad = len(BAD[sites])
    return {
        "mean": None,
        "norm clipping": "norm_clipping",
        "median": "median",
        "trimmed mean": {"rule": "trimmed_mean", "trim": bad},
        "Krum": {"rule": "krum", "faulty": bad},
        "multi-Krum": {"rule": "krum", "faulty": bad, "keep": sites - bad},
        "trust": {"rule": "trust", "trusted": TRUSTED[sites]},
    }


@dataclass(frozen=True)
class Cell:
    """One run."""

    method: str
    sites: int
    attack: str
    rule: str
    seed: int


def cells(seeds: list[int]) -> Iterator[Cell]:
    """All runs, seed by seed. CSAC under the attacks on five sites, with the rules that matter most to it."""
    for seed in seeds:
        for sites in (5, 10):
            for rule in rules(sites):
                yield from (Cell("fedavg", sites, attack, rule, seed) for attack in ATTACKS)
        for rule in ("mean", "norm clipping", "median", "multi-Krum"):
            yield from (Cell("csac", 5, attack, rule, seed) for attack in ATTACKS)


def split_sites(data: DataSet) -> DataSet:
    """Each domain but the target as two sites, of every other row each."""
    domains: dict[str, Domain] = {TARGET: data.domains[TARGET]}
    for name, domain in data.domains.items():
        for number, half in enumerate("ab") if name != TARGET else ():
            rows = np.arange(number, len(domain), 2)
            assert isinstance(domain.inputs, np.ndarray)
            assert domain.groups is not None
            domains[name + half] = Domain(name + half, domain.inputs[rows], domain.labels[rows], domain.groups[rows])
    return replace(data, domains=domains)


def with_trigger(images: Any) -> Any:
    """Images with the trigger."""
    out = images.copy()
    out[..., -TRIGGER:, -TRIGGER:] = 255
    return out


def poison(domain: Domain, attack: str, seed: int) -> Domain:
    """A bad site's data: every label the next class, or every other image with the trigger and its class."""
    if attack in ("label_flip", "scaled"):
        return replace(domain, labels=wrong_labels(domain.labels.astype(np.int64), 1.0, 10, seed, "shift"))
    if attack == "backdoor":
        rows = np.random.default_rng(seed).permutation(len(domain))[: len(domain) // 2]
        images, labels = np.array(domain.inputs), domain.labels.copy()
        images[rows], labels[rows] = with_trigger(images[rows]), CLASS
        return replace(domain, inputs=images, labels=labels)
    return domain


class Attacked(LocalFederation):
    """A federation in which some sites multiply their updates by a factor before they send them."""

    bad: tuple[str, ...]
    factor: float
    start: Weights

    def deliver(self, call: str, requests: Iterator[Request]) -> Generator[Answer[Any] | Missing, None, None]:
        sent: dict[str, Mapping[str, Any]] = {}

        def requests_seen() -> Iterator[Request]:
            for request in requests:
                sent[request.site] = request.content
                yield request

        for answer in super().deliver(call, requests_seen()):
            if isinstance(answer, Answer) and answer.site in self.bad and self.factor != 1:
                centre = sent[answer.site].get("weights", self.start)
                answer = replace(
                    answer, reply=replace(answer.reply, weights=move_towards(centre, answer.reply.weights, self.factor))
                )
            yield answer


def experiment_of(cell: Cell) -> Plan:
    """The plan of one run."""
    experiment = parse(
        {
            "name": "robust_aggregation",
            "data": {"name": "rotated_digits"},
            "protocol": {"targets": [TARGET], "seeds": [cell.seed]},
            "model": {"name": "mlp", "hidden": [64]},
            "training": {"rounds": 20, "batch_size": 64, "lr": 0.2, "momentum": 0.5, "measure_every": 20},
            "methods": [{**METHODS[cell.method], "robust": rules(cell.sites)[cell.rule]}],
            "engine": {"threads": 1},
            "device": "cpu",
        }
    )
    data = build_data(experiment)
    plan = Plan(experiment, split_sites(data) if cell.sites == 10 else data)
    check_fit(plan)
    return plan


def backdoor_rate(planned: PlannedRun, weights: Weights) -> float:
    """Share of the target's test images of other classes that the trigger turns into `CLASS`, in per cent."""
    network = planned.run.method.evaluated_network(planned.network(), len(planned.split.train))
    network.load_state_dict(dict(weights))
    domain, rows = planned.data.domains[TARGET], planned.split.measured[TARGET]
    rows = rows[domain.labels[rows] != CLASS]
    shown = replace(domain, inputs=with_trigger(domain.inputs))
    view = SiteData([(shown, rows, 0)], planned.data.preprocessing, None, torch.device("cpu"))
    return 100 * float((predictions(network.eval(), view) == CLASS).mean())


def carried_out(cell: Cell) -> dict[str, Any]:
    """One run: accuracy at the unseen site after the last round, and how often its trigger works."""
    (planned,) = experiment_of(cell).runs
    bad = BAD[cell.sites] if cell.attack != "none" else ()
    shown = planned.data
    domains = {
        name: poison(domain, cell.attack, cell.seed) if name in bad else domain
        for name, domain in shown.domains.items()
    }
    sites = planned.sites(replace(shown, domains=domains))
    setting = planned.setting("cpu")
    network = setting.build_network()
    where = Attacked(sites, setting, budget=site_budget(planned.budget, sites), rounds=planned.rounds)
    where.bad, where.factor = bad, FACTORS.get(cell.attack, 1.0)
    where.start = Weights(network.state_dict()).clone()
    evaluator = Evaluator(planned.data, planned.split, torch.device("cpu"), planned.experiment.model)
    with tempfile.TemporaryDirectory() as scratch, RunFolder(Path(scratch), planned.identity) as folder:
        folder.write_settings()
        result = train_and_evaluate(Context("cpu", 1, Reporter()), planned, folder, where, evaluator, network)
        weights = Weights(load_file(Path(scratch) / "model.safetensors"))
    return {
        **asdict(cell),
        "accuracy": result.accuracy(),
        "backdoor": backdoor_rate(planned, weights),
        "seconds": round(result.seconds, 2),
        "versions": result.versions,
    }


def finished_runs() -> list[dict[str, Any]]:
    """The runs that are finished."""
    return [json.loads(line) for line in RUNS.read_text(encoding="utf-8").splitlines()] if RUNS.exists() else []


TABLES = (("fedavg", 5), ("fedavg", 10), ("csac", 5))
"""Method and number of sites of each table."""


def table(method: str, sites: int) -> str:
    """Accuracy under each attack and rule, and how often the trigger works, over the seeds that every cell has."""
    rows = [row for row in finished_runs() if (row["method"], row["sites"]) == (method, sites)]
    by_case = {(row["rule"], row["attack"], row["seed"]): row for row in rows}
    names = [rule for rule in rules(sites) if any(row["rule"] == rule for row in rows)]
    keys = [(rule, attack) for rule in names for attack in ATTACKS]
    seeds = [seed for seed in sorted({row["seed"] for row in rows}) if all((*key, seed) in by_case for key in keys)]

    def cell(rule: str, attack: str, value: str) -> str:
        values = [by_case[rule, attack, seed][value] for seed in seeds]
        error = f" ± {stdev(values) / len(values) ** 0.5:.1f}" if len(values) > 1 else ""
        return f"{fmean(values):.1f}{error}"

    versions = rows[0]["versions"]
    used = [row for row in rows if row["seed"] in seeds]
    minutes = sum(row["seconds"] for row in used) / 60
    corner = f"{len(seeds)} seeds, {len(used)} runs, {minutes:.0f} minutes, "
    corner += f"torch {versions['torch']}, numpy {versions['numpy']}"
    lines = [f"| {corner} | nobody bad | " + " | ".join(attack.replace("_", " ") for attack in ATTACKS[1:])]
    lines[0] += " | trigger works |"
    lines.append("|---|" + "---:|" * (len(ATTACKS) + 1))
    for rule in names:
        cells = [cell(rule, attack, "accuracy") for attack in ATTACKS] + [cell(rule, "backdoor", "backdoor")]
        lines.append(f"| {rule} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(seeds: list[int]) -> None:
    """Carry out what is not finished yet."""
    known = {Cell(**{name: row[name] for name in Cell.__dataclass_fields__}) for row in finished_runs()}
    RUNS.parent.mkdir(parents=True, exist_ok=True)
    with threads_set(1):
        for cell in cells(seeds):
            if cell in known:
                continue
            row = carried_out(cell)
            with RUNS.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            print(
                *asdict(cell).values(), f"{row['accuracy']:.1f}", f"{row['backdoor']:.1f}", row["seconds"], flush=True
            )


if __name__ == "__main__":
    if sys.argv[1:] == ["--tables"]:
        print(*(f"{method}\n{table(method, sites)}\n" for method, sites in TABLES), sep="\n")
    else:
        main([int(seed) for seed in sys.argv[1:]] or [0, 1, 2])
