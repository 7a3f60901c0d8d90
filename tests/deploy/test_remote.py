"""A deployed run over messages, without a network: the same bits as in the local engine, and what goes wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from loopback import (
    ADAPT,
    SITES,
    Killed,
    Loopback,
    deploy,
    killed_when,
    model,
    options_of,
    result,
    same,
    simulate,
    site_file,
    site_files,
    write_data,
)
from safetensors.torch import load_file

from fedshift.deploy.coordinator import coordinate
from fedshift.errors import FedshiftError, UserError

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


@pytest.mark.parametrize("name", METHODS)
def test_same_bits_as_the_local_engine_with_the_unseen_set_at_the_coordinator(name: str, tmp_path: Path) -> None:
    options = options_of({"name": name, **METHODS[name]})
    there, _ = deploy(tmp_path, options)
    here = simulate(tmp_path, options)
    assert same(model(here, name, "west"), model(there, name, "west"))
    ours, theirs = result(here, name, "west"), result(there, name, "west")
    assert ours["selected"] == theirs["selected"]
    assert ours["sites"] == theirs["sites"]
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


@pytest.mark.parametrize(("name", "options"), [("kd3a", {}), ("shot", {}), ("fada", {"steps_per_round": 2})])
def test_models_go_by_way_of_the_target(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    whole = options_of({"name": name, **options}, protocol=ADAPT)
    there, _ = deploy(tmp_path, whole, unseen={}, send=["weights", "numbers", "accuracy", "features", "statistics"])
    here = simulate(tmp_path, whole, unseen={})
    assert same(model(here, name, "east"), model(there, name, "east"))
    assert result(here, name, "east")["selected"] == result(there, name, "east")["selected"]


def test_a_site_can_be_the_unseen_one(tmp_path: Path) -> None:
    options = options_of({"name": "fedavg"}, protocol={"targets": ["east"], "seeds": [0]})
    there, transport = deploy(tmp_path, options, unseen={})
    here = simulate(tmp_path, options, unseen={})
    assert same(model(here, "fedavg", "east"), model(there, "fedavg", "east"))
    ours, theirs = result(here, "fedavg", "east"), result(there, "fedavg", "east")
    assert ours["selected"] == theirs["selected"]
    assert ours["sites"] == theirs["sites"] != []
    assert ("east", "fit") not in transport.asked


def test_nobody_need_be_left_out(tmp_path: Path) -> None:
    options = options_of({"name": "fedavg"}, protocol={"targets": ["sites"], "seeds": [0]})
    there, _ = deploy(tmp_path, options, unseen={})
    last = json.loads((there / "fedavg/sites/seed-0/rounds.jsonl").read_text().splitlines()[-1])
    assert set(last["target_accuracy"]) == set(SITES) == set(last["source_accuracy"])


# What goes wrong on the way -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "wire"), [("fedavg", "float32"), ("csac", "bf16"), ("fedavg", "int8")])
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
        assert same(model(whole, name, "west"), model(again, name, "west")), when
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
