"""A misspelt field is refused before torch is imported, in the same words as by the whole check."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

sys.path.insert(0, str(Path(__file__).parents[3] / "docs"))

import list_fields

from fedshift.errors import UserError
from fedshift.experiment.config.experiment import parse
from fedshift.experiment.config.known_fields import check_known

ROOT = Path(__file__).parents[3]
GOOD: dict[str, Any] = {
    "name": "e",
    "data": {"name": "rotated_digits", "per_class": 5},
    "protocol": {"kind": "leave_one_out", "targets": ["D0"], "seeds": [0]},
    "model": {"name": "mlp"},
    "training": {"rounds": 2, "augmentation": {"shear": 0.1}, "privacy": None},
    "methods": [
        "fedavg",
        {"name": "fedprox", "mu": 0.1, "label": "x", "training": {"lr": 0.1}, "server": {"optimizer": "adam"}},
        {"name": "fedavg", "label": "y", "local": [{"name": "mixup"}], "robust": {"rule": "median"}},
    ],
    "engine": {"name": "local", "workers": 1},
    "evaluation": {},
    "search": {"spaces": {"training.lr": {"choices": [0.1, 0.2]}}, "draws": 2},
}
SLIPS: list[tuple[dict[str, Any], str]] = [
    ({"trainin": {}}, "did you mean 'training'"),
    ({"training": {"round": 2}}, "training.round: .*did you mean 'rounds'"),
    ({"training": {"augmentation": {"sheer": 0.1}}}, "training.augmentation.sheer: .*did you mean 'shear'"),
    ({"training": {"epsilon": 1.0}}, "training.epsilon: "),
    ({"protocol": {"kind": "participants", "seed": [0]}}, "protocol.seed: .*did you mean 'seeds'"),
    ({"protocol": {"test_fracton": 0.2}}, "protocol.test_fracton: .*did you mean 'test_fraction'"),
    ({"data": {"name": "rotated_digits", "per_clas": 5}}, "data.per_clas: .*did you mean 'per_class'"),
    ({"data": {"name": "office_home", "folders": "x"}}, "data.folders: .*did you mean 'folder'"),
    ({"model": {"name": "mlp", "hiden": [3]}}, "model.hiden: .*did you mean 'hidden'"),
    ({"engine": {"worker": 2}}, "engine.worker: .*did you mean 'workers'"),
    ({"engine": {"name": "flare", "quorums": 2}}, "engine.quorums: .*did you mean 'quorum'"),
    ({"search": {"spaces": {"training.lr": {"choices": [1]}}, "draw": 2}}, "search.draw: .*did you mean 'draws'"),
    ({"methods": [{"name": "fedprox", "proximal_wait": 1}]}, r"methods\[0\] \(fedprox\).proximal_wait: .*mu for prox"),
    (
        {"methods": ["fedavg", {"name": "fedavg", "label": "b", "training": {"lrr": 1}}]},
        r"methods\[1\].*training.lrr: ",
    ),
]


@pytest.mark.parametrize(("changes", "words"), SLIPS, ids=[words for _, words in SLIPS])
@pytest.mark.case("experiment files", "a misspelt field, before torch is imported")
def test_a_slip_is_told_as_by_the_whole_check(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words) as early:
        check_known(GOOD | changes)
    with pytest.raises(UserError) as late:
        parse(GOOD | changes)
    told = str(late.value)
    if "model" in changes:  # a network's options are told apart
        told = told.replace("model 'mlp' has", "there is").replace(", name", "")
    assert str(early.value) == told


def test_a_good_file_is_not_refused() -> None:
    check_known(GOOD)
    parse(GOOD)


@pytest.mark.parametrize(
    "changes",
    [
        {"data": {"name": "mine.py:Data", "anything": 1}},
        {"model": {"name": "hf:some", "anything": 1}},
        {"methods": [{"name": "mine.py:Method", "anything": 1}, 3]},
        {"methods": [{"name": "fedavg", "training": {"measure_every": 2}}]},
        {"training": 3, "protocol": None, "data": "rotated_digits", "engine": {"name": "no_such"}},
        {"training": {3: 4}},
    ],
)
def test_what_it_does_not_know_is_left_to_the_whole_check(changes: dict[str, Any]) -> None:
    check_known(GOOD | changes)


@pytest.mark.parametrize("path", sorted([*ROOT.glob("examples/*.yaml"), *ROOT.glob("benchmarks/experiments/*.yaml")]))
def test_committed_experiments_are_not_refused(path: Path) -> None:
    content = yaml.safe_load(path.read_text())
    if "methods" in content:  # a site's file is none
        check_known(content)


def test_the_list_is_made_from_the_classes() -> None:
    made = "python docs/list_methods.py makes it anew"
    assert list_fields.FILE.read_text(encoding="utf-8") == list_fields.text(), made


WITHOUT_TORCH = """
import sys
from fedshift.cli import exit_code
from fedshift.cli.app import command
for name in ("check", "run", "search", "features"):
    sys.argv = ["fedshift", name, sys.argv[-1]]
    assert exit_code("fedshift", command) == 2
assert not {"torch", "sklearn", "numpy.linalg.lapack_lite", "matplotlib"} & sys.modules.keys()
"""


@pytest.mark.slow
def test_torch_is_not_imported_for_a_slip(tmp_path: Path) -> None:
    file = tmp_path / "e.yaml"
    file.write_text(yaml.safe_dump(GOOD | {"training": {"round": 2}}))
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH, str(file)], check=True, capture_output=True, text=True)
    assert done.stderr.count("did you mean 'rounds'") == 4
