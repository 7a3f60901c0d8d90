"""Golden runs: losses and accuracies of one tiny run of every method, to three decimals.

``python tests/methods/test_golden.py`` writes golden.json anew; a change of it is a change of a method's results and
says so in its commit.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "federation"))

from tiny import NORMED, domains, evaluated, normed_for, run

from fedshift.data.domain import Domain
from fedshift.federation.local import LocalFederation
from fedshift.methods import registry

FILE = Path(__file__).with_name("golden.json")
SIZES = {"north": 30, "south": 22, "west": 14}
OPTIONS: dict[str, dict[str, Any]] = {
    "csac": {"acquisition_epochs": 2, "calibration_epochs": 1},
    "kd3a": {"focus": "shapley", "gate_start": 0.4, "gate_end": 0.5},
    "shot": {"source_epochs": 3},
    "mdfnet": {"decay": False, "rho": 1.0},
    "fada": {"steps_per_round": 10},
    "copa": {"local_epochs": 2},
    "fedadg": {"task_epochs": 1, "adversarial_epochs": 1},
    "dael": {"threshold": 0.4},
    "dsbn": {"first_stage": 0.25},
}


def record(name: str) -> dict[str, Any]:
    """Losses of the last round and the accuracy on all samples after three rounds, on images and on vectors (where a
    method works on these).
    """
    method = registry.parse({"name": name, **OPTIONS.get(name, {})})
    budget = 120 if method.pooled and method.needs_target else 30  # a step of theirs takes a batch of all four domains
    out: dict[str, Any] = {}
    networks = {"images": None, "vectors": NORMED}
    if normed_for(method) is not NORMED:
        del networks["vectors"]
    for kind, network in networks.items():
        found: list[Domain] = domains(**({} if network is None else {"network": network}), sizes=SIZES)
        given: dict[str, Any] = {} if network is None else {"network": network}
        state, where = run(method, found, rounds=3, lr=0.05, momentum=0.9, budget=budget, **given)
        assert isinstance(where, LocalFederation)
        right = total = 0
        model = evaluated(method, state.weights, found, **given)
        for runner in (runner for runner in where._runners.values() if runner.site.role == "source"):
            with torch.no_grad():
                for batch in runner.site.all_batches():
                    right += int((method.predict(model, batch.inputs).argmax(1) == batch.targets).sum())
                    total += len(batch.targets)
        losses = {site: round(value, 3) for site, value in state.report["losses"].items()}
        out[kind] = {"losses": losses, "accuracy": round(100 * right / total, 3)}
    return out


@pytest.mark.parametrize("name", registry.names())
def test_results_are_those_on_record(name: str) -> None:
    golden = json.loads(FILE.read_text(encoding="utf-8"))
    assert name in golden, f"no golden run of '{name}': run `python {Path(__file__).name}` and commit golden.json"
    found = record(name)
    for kind, expected in golden[name].items():
        # Other processors round differently: a thousandth of the loss and one sample of 66 are allowed.
        assert found[kind]["losses"] == pytest.approx(expected["losses"], abs=3e-3)
        assert found[kind]["accuracy"] == pytest.approx(expected["accuracy"], abs=100 / 66 + 1e-6)


if __name__ == "__main__":
    whole = {name: record(name) for name in registry.names()}
    FILE.write_text(json.dumps(whole, indent=2) + "\n", encoding="utf-8")
