"""A user's own method with a mistake: found on made-up samples, with the line of its file, before anything trains."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import fedshift
from fedshift.errors import UserError
from fedshift.experiment.trial import try_training
from fedshift.federation.training import Training
from fedshift.models import registry as models

HEAD = """

from fedshift.methods import FedAvg, Weights

class Mine(FedAvg):
    traits = FedAvg.traits.derive(name="mine")
"""
ROUND = """
    def round(self, federation, state):
        updates = federation.ask(self.fit, to=federation.sources, weights=state.weights)
"""


def checked(folder: Path, body: str) -> None:
    file = folder / "mine.py"
    file.write_text(HEAD + body)
    fedshift.check(
        {
            "name": "own",
            "data": {"name": "rotated_digits", "per_class": 5, "size": 8},
            "protocol": {"targets": ["D0"], "seeds": [0]},
            "model": "linear",
            "training": {"rounds": 2},
            "methods": [f"{file}:Mine"],
        }
    )


def test_methods_and_networks_without_a_mistake_pass_as_they_were(tmp_path: Path) -> None:
    checked(tmp_path, f"{ROUND}        return state.advance(updates.mean().model())\n")
    options = models.parse({"name": "mlp", "hidden": [4], "batch_norm": True})
    network = models.build(options, (5,), 3, 0).eval()
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    try_training(network, options, Training(rounds=1), (5,))
    assert not network.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in network.state_dict().items())
    assert all(parameter.grad is None for parameter in network.parameters())


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (f"{ROUND}        return state.advance(2 * updates.mean().model())\n", r"\(mine.py, line 10\): TypeError"),
        (f"{ROUND}        return updates.mean().model()\n", r"round\(\) must return state.advance\(...\)"),
        (f"{ROUND}        updates.drain()\n        return state\n", r"round\(\) must return state.advance\(...\)"),
        (f"{ROUND}        return [list(updates) for _ in range(2)]\n", r"\(mine.py, line 10\): .* call .keep\(\)"),
        (
            '\n    def fit(self, site, weights):\n        site.memory["last"] = weights\n',
            r"\(mine.py, line 9\): site memory 'last' is not declared in the method's `memory_names`",
        ),
    ],
    ids=["arithmetic", "weights returned", "round not counted", "read twice", "undeclared memory"],
)
def test_a_mistake_is_told_with_its_line(tmp_path: Path, body: str, said: str) -> None:
    with pytest.raises(UserError, match=f"methods: mine fails on made-up samples.*{said}"):
        checked(tmp_path, body)
