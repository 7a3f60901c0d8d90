"""A deployed run over messages, without a network: the same bits as in the local engine, and what goes wrong."""

from __future__ import annotations

import json
import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from loopback import ADAPT, Killed, Loopback, deploy, killed_when, options_of, simulate
from outcomes import alike, model, one_line, result, same
from safetensors.torch import load_file
from site_yaml import SITES, site_file, site_files, write_data

import fedshift
from fedshift.deploy.coordinator import coordinate
from fedshift.deploy.remote.transport import Transport
from fedshift.deploy.site_cards import card_of
from fedshift.encryption import KEY, new_key
from fedshift.errors import FedshiftError, UserError
from fedshift.evaluation.measuring import rmse
from fedshift.experiment.config.experiment import Experiment
from fedshift.experiment.runs.experiment_loop import run_experiment
from tried import slow_after

METHODS: dict[str, dict[str, Any]] = {
    "fedavg": {"local_epochs": 1},
    "fedprox": {
        "local_epochs": 1,
        "label": "fedprox",
        "robust": "median",
        "local": ["label_gradient", "triplets"],
        "average": {"kind": "swad", "settled": 1},
    },
    "csac": {"acquisition_epochs": 1, "calibration_epochs": 1},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_same_bits_as_the_local_engine_with_the_unseen_set_at_the_coordinator(name: str, tmp_path: Path) -> None:
    options = options_of({"name": name, **METHODS[name]})
    there, _ = deploy(tmp_path, options)
    here = simulate(tmp_path, options)
    assert alike(here, there, name)
    ours, theirs = result(here, name, "west"), result(there, name, "west")
    assert (ours["selected"], ours["sites"]) == (theirs["selected"], theirs["sites"])
    for direction in ("bytes_up", "bytes_down"):
        assert theirs[direction].pop("accuracy") > 0
        assert theirs[direction] == ours[direction]


def test_only_the_sites_that_are_drawn_are_asked_to_train(tmp_path: Path) -> None:
    options = options_of({"name": "scaffold"})
    options["protocol"] |= {"sites_per_round": 2, "seeds": [2]}
    there, transport = deploy(tmp_path, options)
    here = simulate(tmp_path, options)
    runs = [folder / "scaffold/west/seed-2" for folder in (here, there)]
    assert same(*(load_file(run / "model.safetensors") for run in runs))
    rounds = [[json.loads(line) for line in (run / "rounds.jsonl").read_text().splitlines()] for run in runs]
    simulated, asked = ([site for record in records for site in record["extra"]["drawn"]] for records in rounds)
    assert asked == simulated
    assert sorted(site for site, call in transport.asked if call == "train") == sorted(asked)
    assert len(asked) == 2 * 3


@pytest.mark.slow
@pytest.mark.parametrize(("name", "options"), [("kd3a", {}), ("shot", {}), ("fada", {"steps_per_round": 2})])
def test_models_go_by_way_of_the_target(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    whole = options_of({"name": name, **options}, protocol=ADAPT)
    there, _ = deploy(tmp_path, whole, unseen={}, send=["weights", "numbers", "accuracy", "features", "statistics"])
    here = simulate(tmp_path, whole, unseen={})
    assert alike(here, there, name, "east", measured=True)


def test_a_site_can_be_the_unseen_one(tmp_path: Path) -> None:
    options = options_of({"name": "fedavg"}, protocol={"targets": ["east"], "seeds": [0]})
    there, transport = deploy(tmp_path, options, unseen={})
    here = simulate(tmp_path, options, unseen={})
    assert alike(here, there, "fedavg", "east")
    ours, theirs = result(here, "fedavg", "east"), result(there, "fedavg", "east")
    assert ours["selected"] == theirs["selected"]
    assert ours["sites"] == theirs["sites"] != []
    assert ("east", "fit") not in transport.asked


@pytest.mark.parametrize(("name", "wire"), slow_after(1, [("fedavg", "float32"), ("csac", "bf16"), ("fedavg", "int8")]))
def test_a_run_killed_anywhere_goes_on_to_the_same_bits(name: str, wire: str, tmp_path: Path) -> None:
    """The coordinator dies before or after any answer, and with it every site's process; all is made anew from disk."""
    options = options_of({"name": name, **METHODS[name]})
    engine = {"wire": wire}
    whole, transport = deploy(tmp_path / "whole", options, engine=engine)
    last = 0
    for when in range(1, len(transport.asked) + 1, 5):  # at another of the three sites each time
        count = 0

        def die(site: str, header: dict[str, Any], answer: Any, when: int = when) -> Any:
            nonlocal count
            count += 1
            if count == when:
                raise Killed
            return answer

        folder = tmp_path / str(when)
        places = site_files(folder)
        with pytest.raises(Killed):
            deploy(folder, options, transport=Loopback(places, die), engine=engine)
        again, second = deploy(folder, options, transport=Loopback(places), engine=engine)
        assert alike(whole, again, name), when
        last = len(second.asked)
    assert 0 < last < len(transport.asked)


@pytest.mark.threat("between_the_two")
def test_a_request_that_comes_again_is_not_trained_again(tmp_path: Path) -> None:
    options = options_of({"name": "fedavg"})
    places = site_files(tmp_path)
    die = killed_when(lambda site, header: (site, header.get("envelope", {}).get("exchange")) == ("east", 2))
    with pytest.raises(Killed):
        deploy(tmp_path, options, transport=Loopback(places, die))
    deploy(tmp_path, options, transport=Loopback(places))
    log = [json.loads(line) for line in (tmp_path / "north/memory/audit.jsonl").read_text().splitlines()]
    calls = [(line["exchange"], line.get("again", False)) for line in log if line["do"] == "call"]
    assert calls == [(1, False), (2, False), (2, True), (3, False)]


def test_sites_are_told_up_to_where_a_checkpoint_reaches(tmp_path: Path) -> None:
    """They keep their answers since then, and no older ones."""
    told: list[int] = []

    def listening(site: str, header: dict[str, Any], answer: Any) -> Any:
        if site == "north" and header["do"] == "call":
            told.append(header["checkpoint"])
        return answer

    deploy(tmp_path, options_of({"name": "fedavg"}), transport=Loopback(site_files(tmp_path), listening))
    assert len(told) > 1
    assert told == list(range(len(told)))


@pytest.mark.slow
def test_narrow_weights_take_fewer_bytes_and_learn_as_well(tmp_path: Path) -> None:
    options = options_of({"name": "fedavg"}, training={"rounds": 8, "batch_size": 8, "lr": 0.1})
    exact, _ = deploy(tmp_path / "exact", options)
    whole = result(exact, "fedavg", "west")
    for wire, share in (("bf16", 0.5), ("int8", 0.3)):
        narrow, _ = deploy(tmp_path / wire, options, engine={"wire": wire})
        less = result(narrow, "fedavg", "west")
        for direction in ("bytes_up", "bytes_down"):
            assert less[direction]["weights"] <= share * 1.2 * whole[direction]["weights"], wire
        assert less["selected"]["last"]["accuracy"] >= whole["selected"]["last"]["accuracy"] - 10, wire


@pytest.mark.slow
def test_small_steps_are_not_lost_in_rounding(tmp_path: Path) -> None:
    """A round changes the weights by less than rounding does; what was rounded away comes with the next message, both
    ways. How far from the exact run's weights, as a part of the way that training went.
    """

    def end(folder: str, rounds: int, lr: float, wire: str) -> torch.Tensor:
        once = {"measure_every": rounds}  # the weights are all that counts here
        options = options_of({"name": "fedavg"}, training={"rounds": rounds, "batch_size": 8, "lr": lr, **once})
        there, _ = deploy(tmp_path / folder, options, engine={"wire": wire})
        return torch.cat([tensor.double().reshape(-1) for tensor in model(there, "fedavg", "west").values()])

    start, exact = end("start", 1, 1e-12, "float32"), end("exact", 20, 0.001, "float32")
    for wire, bound in (("bf16", 0.2), ("int8", 0.4)):
        assert (end(wire, 20, 0.001, wire) - exact).norm() < bound * (exact - start).norm(), wire


def test_data_that_change_during_a_run_end_it(tmp_path: Path) -> None:
    files = write_data(tmp_path / "data", SITES)
    places = {site: site_file(tmp_path, site, files[site]) for site in SITES}
    touched = False

    def touch(site: str, header: dict[str, Any], answer: Any) -> Any:
        nonlocal touched
        if not touched and header["do"] == "call" and header["envelope"]["round"] == 2:
            touched = True
            with np.load(files["east"]) as arrays:
                changed = {"x": arrays["x"] + 1, "y": arrays["y"]}
            np.savez(files["east"], **changed)
        return answer

    options = options_of({"name": "fedavg"})
    with pytest.raises(FedshiftError, match="site 'east': the data changed during the run"):
        deploy(tmp_path, options, transport=Loopback(places, touch))
    with pytest.raises(UserError, match="site 'east': the data changed since the run began"):
        deploy_again(tmp_path, options, Loopback(places))


def deploy_again(folder: Path, options: dict[str, Any], transport: Loopback) -> None:
    """Go on without writing the data anew."""
    coordinate(folder / "deployment", transport, list(SITES))


HEAVY = ("matplotlib", "pyarrow", "sklearn")


def hide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make this an environment without the extra `report`."""
    for name in list(sys.modules):
        if name.partition(".")[0] in HEAVY:
            monkeypatch.delitem(sys.modules, name)
    for name in HEAVY:
        monkeypatch.setitem(sys.modules, name, None)


@pytest.mark.parametrize("method", slow_after(1, ["fedavg", "csac", "kd3a"]))
def test_sites_train_without_reports_packages(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The coordinator shares their process here, so its own check is taken away."""
    options = options_of({"name": method}, protocol=ADAPT)
    simulated = simulate(tmp_path, options, unseen={})
    hide(monkeypatch)
    monkeypatch.setattr("fedshift.deploy.coordinator.reports_installed", lambda what: None)
    deployed, _ = deploy(tmp_path, options, unseen={})
    assert alike(deployed, simulated, method, "east")


def _holding(**changes: Any) -> Any:
    objective, unlabelled = changes.get("objective"), changes.get("unlabelled", False)
    return SimpleNamespace(
        data=SimpleNamespace(preprocessing=SimpleNamespace(objective=objective)),
        domain=SimpleNamespace(unlabelled=unlabelled),
    )


def _run(folder: Path) -> object:
    return run_experiment(Experiment.model_construct(engine=SimpleNamespace(name="local")), folder)


NEEDS: list[tuple[str, Callable[[Path], object]]] = [
    ("one machine", _run),
    ("a coordinator", lambda folder: coordinate(folder, Transport.__new__(Transport), [])),
    ("FederatedClassifier", lambda _: fedshift.FederatedClassifier),
    ("quantities", lambda _: card_of(_holding(objective={"task": "regression"}), {}, Any, "cpu")),
    ("predictions", lambda _: card_of(_holding(unlabelled=True), {}, Any, "cpu")),
    ("regression", lambda _: rmse(np.zeros(2), np.zeros(2))),
]


@pytest.mark.parametrize(("what", "needs_them"), NEEDS, ids=[what for what, _ in NEEDS])
def test_what_needs_them_says_so_before_anything_is_trained(
    what: str, needs_them: Callable[[Path], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hide(monkeypatch)
    with pytest.raises(UserError, match=r"pip install 'fedshift\[report\]'") as told:
        needs_them(tmp_path)
    assert what in str(told.value)
    assert not list(tmp_path.iterdir())


CSAC = {"name": "csac", "acquisition_epochs": 1, "calibration_epochs": 1}
"""A method whose sites remember something."""
ENGINE = {"wire": "bf16"}  # the coordinator remembers rounding residuals


@pytest.fixture
def wide_open() -> Any:
    before = os.umask(0)
    yield
    os.umask(before)


def cut_short(folder: Path) -> dict[str, Path]:
    """Deploy until the last round's first answer; the sites' files."""
    die = killed_when(lambda site, header: header.get("envelope", {}).get("round") == 3)
    places = site_files(folder)
    with pytest.raises(Killed):
        deploy(folder, options_of(CSAC), transport=Loopback(places, die), engine=ENGINE)
    return places


def kept_files(folder: Path) -> list[Path]:
    """Checkpoints, memory and kept answers of all roles."""
    files = [*folder.glob("*/memory/**/*.safetensors"), *folder.glob("deployment/runs/**/*.safetensors")]
    assert {"checkpoint", "answer", "owed"} <= {path.name.partition("-")[0].partition(".")[0] for path in files}
    assert len(files) > 8
    return files


@pytest.mark.threat("other_user_weights")
def test_files_with_weights_are_for_their_user_only(wide_open: None, tmp_path: Path) -> None:
    cut_short(tmp_path)
    answers = list(tmp_path.glob("*/memory/*/answer-*.json"))
    assert answers
    for path in (*kept_files(tmp_path), *answers):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path


@pytest.mark.slow
@pytest.mark.threat("taken_disk")
def test_an_encrypted_run_goes_on_to_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, _ = deploy(tmp_path / "whole", options_of(CSAC), engine=ENGINE)
    key, folder = new_key(), tmp_path / "encrypted"
    monkeypatch.setenv(KEY, key)
    places = cut_short(folder)
    assert all(path.read_bytes().startswith(b"fedshift encrypted") for path in kept_files(folder))

    monkeypatch.setenv(KEY, new_key())
    with one_line(r"checkpoint.safetensors cannot be decrypted: .*key"):
        deploy(folder, options_of(CSAC), transport=Loopback(places), engine=ENGINE)

    monkeypatch.setenv(KEY, key)
    again, _ = deploy(folder, options_of(CSAC), transport=Loopback(places), engine=ENGINE)
    assert alike(whole, again, "csac")


def test_a_simulation_is_encrypted_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = simulate(tmp_path / "plain", options_of(CSAC))
    monkeypatch.setenv(KEY, new_key())
    written: list[bytes] = []
    from fedshift.federation import message_files

    real = message_files.write_private

    def note_write(path: Path, data: bytes, **options: Any) -> None:
        real(path, data, **options)
        written.append(path.read_bytes()[:18])

    monkeypatch.setattr(message_files, "write_private", note_write)
    encrypted = simulate(tmp_path / "encrypted", options_of(CSAC))
    assert set(written) == {b"fedshift encrypted"}
    assert alike(plain, encrypted, "csac")


def test_a_full_disk_at_a_site_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fedshift.files

    real = fedshift.files.write_bytes

    def full(path: Path, data: bytes, **how: bool) -> None:
        if "south" in path.parts and path.suffix == ".safetensors":
            raise UserError(f"cannot write {path}: No space left on device; free some space")
        real(path, data, **how)

    monkeypatch.setattr("fedshift.encryption.write_bytes", full)
    with pytest.raises(FedshiftError, match=r"site 'south' is lost \(cannot write .*No space left"):
        deploy(tmp_path, options_of({"name": "fedavg"}))


def test_nobody_need_be_left_out(tmp_path: Path) -> None:
    options = options_of("fedavg", protocol={"targets": ["sites"], "seeds": [0]})
    there, _ = deploy(tmp_path, options, unseen={})
    last = json.loads((there / "fedavg/sites/seed-0/rounds.jsonl").read_text().splitlines()[-1])
    assert set(last["target_accuracy"]) == set(SITES) == set(last["source_accuracy"])
