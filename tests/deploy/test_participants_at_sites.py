"""Deployed sites that measure their own test parts, with models of their own that never leave."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from loopback import deploy, model, options_of, result, same, simulate

from fedshift.deploy.remote.wire import Message, unseal
from fedshift.deploy.site_server import SiteProgram
from fedshift.errors import UserError
from fedshift.federation.messages import leaves
from fedshift.methods import registry
from fedshift.methods.base import PERSONAL
from fedshift.methods.federated.fedper import HEAD
from fedshift.weights import Weights

EVERY: dict[str, Any] = {"kind": "participants", "seeds": [0], "test_fraction": 0.3}
KEEPING = [name for name in registry.names() if PERSONAL in registry.method_class(name)().traits.memory_names]
TUNED = {"name": "fedavg", "fine_tune": {"steps": 3, "lr": 0.2}}


def accuracies(folder: Path, name: str) -> dict[str, dict[str, float]]:
    """Site → its metrics at the end of the run, with its test part."""
    sites = result(folder, name, "sites")["sites"]
    return {site["site"]: site["values"] for site in sites if site["part"] == "target"}


def both(folder: Path, method: dict[str, Any], send: list[str]) -> tuple[Path, Path]:
    """The run folders of a deployment, whose sites let these kinds out, and of its simulation."""
    options = options_of(method, protocol=EVERY)
    deployed, _ = deploy(folder, options, unseen={}, send=send)
    return deployed, simulate(folder, options, unseen={})


@pytest.mark.parametrize("name", ["fedavg", *KEEPING, "fedavg+tuned"])
def test_a_deployment_measures_as_its_simulation(tmp_path: Path, name: str) -> None:
    method = TUNED if name == "fedavg+tuned" else {"name": name, **registry.method_class(name).traits.small}
    tuned = {"fine_tune": {"steps": 2}} if name == "fedbabu" else {}
    send = ["weights", "numbers", "statistics", "accuracy", "metrics"]
    deployed, simulated = both(tmp_path, {**method, **tuned}, send)
    method_folder = next(path.name for path in simulated.iterdir() if path.is_dir())
    assert same(model(deployed, method_folder, "sites"), model(simulated, method_folder, "sites"))
    there, here = accuracies(deployed, method_folder), accuracies(simulated, method_folder)
    assert there.keys() == here.keys() == {"north", "south", "east"}
    assert there == here
    rounds = [
        (folder / method_folder / "sites" / "seed-0" / "rounds.jsonl").read_text() for folder in (deployed, simulated)
    ]
    of_targets = [[json.loads(line)["target_accuracy"] for line in text.splitlines()] for text in rounds]
    assert of_targets[0] == of_targets[1]


def test_a_classifier_of_its_own_is_in_no_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[Message] = []
    handle = SiteProgram.handle

    def note_message(self: SiteProgram, message: Message, coordinator: str) -> Message:
        answers.append(handle(self, message, coordinator))
        return answers[-1]

    monkeypatch.setattr(SiteProgram, "handle", note_message)
    deploy(tmp_path, options_of({"name": "fedper"}, protocol=EVERY), unseen={})
    sent = {path for answer in answers for path, content in leaves(unseal(answer)[1]) if isinstance(content, Weights)}
    tensors = {
        name
        for answer in answers
        for _, content in leaves(unseal(answer)[1])
        for name in (content if isinstance(content, Weights) else ())
    }
    assert sent == {"weights"}
    assert tensors
    assert not any(name.startswith(HEAD) for name in tensors)


def test_prototypes_travel_where_models_may_not(tmp_path: Path) -> None:
    options = options_of({"name": "fedproto"}, protocol=EVERY)
    deployed, _ = deploy(tmp_path, options, unseen={}, send=["numbers", "statistics", "accuracy", "metrics"])
    assert accuracies(deployed, "fedproto") == accuracies(simulate(tmp_path, options, unseen={}), "fedproto")


def test_what_a_site_has_not_allowed_stays(tmp_path: Path) -> None:
    kinds = ["weights", "numbers", "statistics", "accuracy"]
    deployed, _ = deploy(tmp_path, options_of({"name": "ditto"}, protocol=EVERY), unseen={}, send=kinds)
    assert result(deployed, "ditto", "sites")["sites"] == [], "accuracies are told, and no other metrics"


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"protocol": {**EVERY, "validation_fraction": 0.2}}, "validation_fraction"),
        ({"protocol": {**EVERY, "common_tests": ["east"]}}, "common_tests"),
        ({"methods": [{"name": "fedavg", "fine_tune": {"steps": 10_000}}]}, "tunes its model longer"),
        ({"protocol": {"targets": ["sites"], "seeds": [0]}}, "measure the common model"),
    ],
)
def test_what_it_cannot_do_is_refused_in_a_line(tmp_path: Path, changes: dict[str, Any], word: str) -> None:
    with pytest.raises(UserError, match=word):
        deploy(tmp_path, options_of(TUNED, **{"protocol": EVERY, **changes}), unseen={})
