"""Data of a user's own file: found beside the experiment, named by its checksum, encoded without the unseen site."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from calling import Cli
from small import experiment, features, save, sites, write

import fedshift
from fedshift.errors import UserError
from fedshift.experiment.config.experiment import Experiment, parse
from fedshift.experiment.features import build_data

FILE = """
from pathlib import Path
import numpy as np
from fedshift import OwnData

class Sites(OwnData):
    folder: Path
    options = {"standardise": True}

    def read(self):
        return {file.stem: tuple(np.load(file)[name] for name in "xy") for file in sorted(self.folder.glob("*.npz"))}
"""
METHOD = """
from fedshift.methods.federated.fedavg import FedAvg

class Mine(FedAvg):
    def fit(self, site, weights):
        return super().fit(site, MODEL)
"""


def own(folder: Path, text: str = FILE, **changes: Any) -> Experiment:
    (folder / "my_data.py").write_text(text)
    save(folder / "clinic", **{name: features(seed) for seed, name in enumerate("abc")})
    options = experiment({}, **changes)
    return parse({**options, "data": {"name": "my_data.py:Sites", "folder": "clinic"}}, folder)


def test_it_is_what_arrays_of_the_same_numbers_are(tmp_path: Path) -> None:
    mine = own(tmp_path)
    files = {name: tmp_path / "clinic" / f"{name}.npz" for name in "abc"}
    arrays = parse(experiment({}) | {"data": {"name": "arrays", "sites": files, "standardise": True}})
    for source in ("", "b"):
        one, other = (build_data(given, given.data.without(source) if source else None) for given in (mine, arrays))
        assert np.array_equal(one.domains["c"].inputs, other.domains["c"].inputs)
        assert one.preprocessing == other.preprocessing
    assert mine.data.without("b").build().preprocessing != build_data(mine).preprocessing
    assert mine.data.without("b").without("b") == mine.data.without("b")


def test_runs_name_the_file_by_its_checksum_and_other_processes_find_it(tmp_path: Path) -> None:
    mine = own(tmp_path, protocol={"targets": ["a"], "seeds": [0]})
    (run,) = fedshift.run(mine, tmp_path / "runs").runs
    data = run.options["data"]
    assert data["name"] == "my_data.py:Sites"
    assert len(data["sha256"]) == 64
    assert str(tmp_path) not in str(data)
    assert parse(mine.dump()).dump() == mine.dump()
    changed = own(tmp_path, FILE + "\n# changed\n", protocol={"targets": ["a"], "seeds": [0]})
    with pytest.raises(UserError, match=r"my_data\.py has changed"):
        fedshift.run(changed, tmp_path / "runs")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("def read", "def raed"), "no method read"),
        (("return {", "return 1 / 0, {"), "read() fails: ZeroDivisionError"),
        (("return {", "return not {"), "must return a mapping"),
        (("standardise", "standardize"), "standardize"),
        (("class Sites", "class Site"), "has no data set 'Sites'"),
        (("import numpy", "import nunpy"), "cannot be imported"),
        (("def read(self):", "def read(self)"), "cannot be imported"),
        (("folder: Path", "folder: Paht"), "Paht"),
    ],
)
def test_one_line_for_each_mistake(cli: Cli, tmp_path: Path, change: tuple[str, str], message: str) -> None:
    save(tmp_path / "clinic", a=features(1), b=features(2))
    (tmp_path / "my_data.py").write_text(FILE.replace(*change))
    options = experiment({}) | {"data": {"name": "my_data.py:Sites", "folder": "clinic"}}
    assert message in cli("check", write(tmp_path / "e.yaml", options)).error()


def test_a_mistake_in_a_method_file_shows_before_training_and_its_run_is_replaced(cli: Cli, tmp_path: Path) -> None:
    method = tmp_path / "mine.py"
    method.write_text(METHOD)
    options = experiment(sites(tmp_path), methods=[{"name": "mine.py:Mine", "label": "mine"}])
    options["protocol"] = {"targets": ["a"], "seeds": [0]}
    file, runs = write(tmp_path / "e.yaml", options), ("--runs", tmp_path / "runs")
    line = cli("check", file).error()
    assert "mine.py, line 6" in line
    assert "MODEL" in line
    with pytest.raises(NameError):
        fedshift.run(file, tmp_path / "runs")
    method.write_text(METHOD.replace("MODEL", "weights"))
    result = cli("run", file, *runs)
    assert result.code == 0, result.err
    assert "unfinished" not in result.out
    method.write_text(METHOD.replace("MODEL", "weights") + "# changed\n")
    assert "mine.py has changed since" in cli("run", file, *runs).error()
