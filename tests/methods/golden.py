"""Golden runs: one small run of every method, and how far other processors' rounding moves what is stored of it.

``python tests/methods/golden.py [METHOD …]`` makes golden.json anew, or these methods' part of it. A change of it is a
change of a method's results and says so in its commit.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1] / "federation"))

from tiny import NORMED, domains, evaluated, normed_for, run, start_of

from fedshift.federation.local.in_process import LocalFederation
from fedshift.methods import registry
from fedshift.methods.pooled.side_modules import DomainTraining

FILE = Path(__file__).with_name("golden.json")
SIZES = {"north": 32, "south": 24, "west": 16}
NETWORKS: dict[str, dict[str, object]] = {
    "images": {"name": "mnist_cnn", "channels": [6, 8], "hidden": 16},
    "vectors": {**NORMED, "hidden": [16, 12]},
}
ROUNDS, EPOCHS, BUDGET = 3, 5, 60
NORMED_ALONE = ("fedbn", "silobn")
"""What would be FedAvg on the images' network, which has no BatchNorm."""
SETTINGS: tuple[dict[str, str], ...] = (
    {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41"},
    {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
    {"MKL_CBWR": "COMPATIBLE"},
    {"OMP_NUM_THREADS": "4"},
)
"""What a processor's kernels depend on: instruction sets of torch, oneDNN and MKL, and threads."""
DRAWS = 4
"""Runs in which every product is off by a unit in the last place, at random: other processors, as it were."""
LEARNT = 60
"""Accuracy in per cent, above which a run has learnt something: the largest class has a third of the samples."""
FACTOR, LEAST = 10, 1e-4
"""A tolerance is this many times the largest deviation found, and at least this part of the value (or of 1)."""

TRAINED = tuple(name for name in registry.names() if registry.method_class(name)().mini_batches(9, 3))
"""The methods whose sources train; others would show their start."""

Record = dict[str, dict[str, float]]


def record(name: str, kinds: Collection[str] = tuple(NETWORKS)) -> tuple[Record, dict[str, tuple[int, float]]]:
    """Numbers of the method's runs on images and on vectors; beside them, classes predicted and accuracy in per cent.

    The numbers are continuous in the weights: the last round's mean loss of every site, the cross-entropy and the mean
    squared logit of the final model on all sources' samples, and its distance from the common start.
    """
    tests = registry.method_class(name).traits.tests
    epochs = {"local_epochs": EPOCHS} if "local_epochs" in registry.method_class(name).model_fields else {}
    method = registry.parse({"name": name, **epochs, **tests.golden})
    rates = tests.rates
    numbers: Record = {}
    learnt: dict[str, tuple[int, float]] = {}
    for kind, network in ((kind, NETWORKS[kind]) for kind in kinds):
        if kind == "vectors" and normed_for(method) is not NORMED:
            continue
        if kind == "images" and name in NORMED_ALONE:
            continue
        found = domains(network, SIZES)
        of_all = (method.traits.pooled and method.traits.needs_target) or isinstance(
            method, DomainTraining
        )  # a step takes several batches
        budget = 4 * BUDGET if of_all else BUDGET
        state, where = run(
            method, found, network, rounds=ROUNDS, lr=rates[kind == "vectors"], momentum=0.9, budget=budget
        )
        assert isinstance(where, LocalFederation)
        batches = [
            (batch.inputs, batch.targets, runner.site.name)
            for runner in where._runners.values()
            if runner.site.role == "source"
            for batch in runner.site.all_batches()
        ]
        inputs, labels = (torch.cat([batch[part] for batch in batches]) for part in (0, 1))  # type: ignore[misc]
        with torch.no_grad():
            if method.traits.no_new_site:  # only with what a site keeps does the model predict
                own = {site: where.own_weights(site, state.weights) for _, _, site in batches}
                models = {site: evaluated(method, weights, found, network) for site, weights in own.items()}
                logits = torch.cat([models[site](some) for some, _, site in batches]).double()
            else:
                logits = evaluated(method, state.weights, found, network)(inputs).double()
        start = start_of(method, found, network)
        trained = [key for key, tensor in start.items() if key in state.weights and tensor.is_floating_point()]
        numbers[kind] = {
            **{f"loss of {site}": value for site, value in state.report["losses"].items()},
            "cross-entropy": float(F.cross_entropy(logits, labels)),
            "squared logit": float(logits.square().mean()),
            "distance": float(sum((state.weights[key] - start[key]).double().square().sum() for key in trained)) ** 0.5,
        }
        predicted = logits.argmax(1)
        learnt[kind] = (len(predicted.unique()), 100 * float((predicted == labels).double().mean()))
    return numbers, learnt


@contextmanager
def rounded_otherwise(draw: int) -> Iterator[None]:
    """The outputs of linear layers and convolutions off by one unit in the last place, or not, at random."""
    generator = torch.Generator().manual_seed(draw)
    kept = {layer: layer.forward for layer in (nn.Linear, nn.Conv2d)}

    def moved(layer: type[nn.Module]) -> Any:
        def forward(self: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
            output: torch.Tensor = kept[layer](self, inputs)  # type: ignore[index]
            noise = torch.randint(-1, 2, output.shape, generator=generator)
            return output * (1 + torch.finfo(output.dtype).eps * noise)

        return forward

    for layer in kept:
        layer.forward = moved(layer)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for layer, forward in kept.items():
            layer.forward = forward  # type: ignore[method-assign]


def elsewhere(setting: dict[str, str], names: Sequence[str]) -> dict[str, Record]:
    """The records of these methods as a process with these variables computes them."""
    script = (
        f"import json, golden, torch; torch.set_num_threads({setting.get('OMP_NUM_THREADS', '1')})\n"
        f"print(json.dumps({{name: golden.record(name)[0] for name in {list(names)}}}))"
    )
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": path, **setting},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found: dict[str, Record] = json.loads(done.stdout.splitlines()[-1])
    return found


def runs_of(names: Sequence[str]) -> dict[str, Any]:
    """Values and tolerances of these methods' numbers. Ends the program for a run that learns nothing."""
    values = {}
    for name in names:
        values[name], learnt = record(name)
        for kind, (classes, accuracy) in learnt.items():
            if classes < 3 or accuracy <= LEARNT:
                sys.exit(f"{name} on {kind}: {classes} of 3 classes, {accuracy:.0f} % right; give `tests` other rates")
    others = [elsewhere(setting, names) for setting in SETTINGS]
    for draw in range(DRAWS):
        with rounded_otherwise(draw):
            others.append({name: record(name)[0] for name in names})

    def stored(name: str, kind: str, key: str, value: float) -> dict[str, float]:
        deviation = max(abs(other[name][kind][key] - value) for other in others)
        tolerance = max(FACTOR * deviation, LEAST * max(1.0, abs(value)))
        return {"value": float(f"{value:.7g}"), "tolerance": float(f"{tolerance:.2g}")}

    return {
        name: {
            kind: {key: stored(name, kind, key, value) for key, value in numbers.items()}
            for kind, numbers in kinds.items()
        }
        for name, kinds in values.items()
    }


def write(names: Sequence[str]) -> None:
    """golden.json with new runs of ``names`` and the old ones of the other methods that exist."""
    old = json.loads(FILE.read_text(encoding="utf-8"))["runs"] if FILE.exists() and names != TRAINED else {}
    runs = {**old, **runs_of(names)}
    whole = {
        "form": f"A number holds within its tolerance on any processor: {FACTOR} times the largest deviation found "
        f"under the settings and with products off by a unit in the last place, at least {LEAST:g} of it or of 1.",
        "settings": list(SETTINGS),
        "runs with products off by a unit in the last place": DRAWS,
        # In the order of the file, new ones at its end, so that two branches with new methods change few lines.
        "runs": {name: run for name, run in runs.items() if name in TRAINED},
    }
    FILE.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    torch.set_num_threads(1)
    write(tuple(sys.argv[1:]) or TRAINED)
