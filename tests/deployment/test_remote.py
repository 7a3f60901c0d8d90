"""A deployed run over messages, without a network: the same bits as in the local engine, and what goes wrong."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from loopback import (
    ADAPT,
    SITES,
    Loopback,
    Without,
    deploy,
    events,
    model,
    options_of,
    result,
    same,
    simulate,
    site_file,
    write_data,
)

from fedshift.deployment.coordinator import coordinate
from fedshift.deployment.site_file import load_site
from fedshift.deployment.site_server import SiteProgram
from fedshift.errors import FedshiftError, TrainingDiverged, UserError
from fedshift.experiment.config.experiment import parse
from fedshift.experiment.runs.experiment_loop import run_experiment
from fedshift.federation.remote.policy import AuditLog
from fedshift.federation.remote.transport import Lost, request_key
from fedshift.federation.remote.wire import Message, body_of, seal, unseal
from fedshift.weights import Weights

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
    for direction in ("bytes_up", "bytes_down"):
        assert theirs[direction].pop("accuracy") > 0
        assert theirs[direction] == ours[direction]


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
    assert result(here, "fedavg", "east")["selected"] == result(there, "fedavg", "east")["selected"]
    assert ("east", "fit") not in transport.asked


def test_nobody_need_be_left_out(tmp_path: Path) -> None:
    options = options_of({"name": "fedavg"}, protocol={"targets": ["sites"], "seeds": [0]})
    there, _ = deploy(tmp_path, options, unseen={})
    last = json.loads((there / "fedavg/sites/seed-0/rounds.jsonl").read_text().splitlines()[-1])
    assert set(last["target_accuracy"]) == set(SITES) == set(last["source_accuracy"])


TABLE = {"name": "table", "label": "outcome", "numeric": ["age", "pressure"], "categorical": ["sex"]}


def write_tables(folder: Path) -> dict[str, str]:
    """A CSV file per site; a missing value and a category that only one site has."""
    draws = np.random.default_rng(0)
    folder.mkdir(parents=True, exist_ok=True)
    for number, site in enumerate((*SITES, "west")):
        rows = ["age,pressure,sex,outcome"]
        for row in range(24 + 3 * number):
            pressure = "" if site == "south" and row == 3 else f"{draws.normal(100 + number, 9):.3f}"
            age, sex = f"{draws.normal(50 + 20 * (row % 2), 9):.2f}", "fmx"[row % (2 + (site == "east"))]
            rows.append(f"{age},{pressure},{sex},{'ny'[row % 2]}")
        (folder / f"{site}.csv").write_text("\n".join(rows) + "\n")
    return {site: str(folder / f"{site}.csv") for site in (*SITES, "west")}


def begin(folder: Path, options: dict[str, Any], unseen: dict[str, Any] | None) -> Path:
    """A deployment's folder."""
    place = folder / "deployment"
    place.mkdir()
    whole = {**options, "data": {"name": "sites", "unseen": unseen}, "engine": {"name": "flare", "threads": 1}}
    (place / "experiment.json").write_text(json.dumps(parse(whole).dump()))
    return place


def simulated(folder: Path, options: dict[str, Any], data: dict[str, Any]) -> Path:
    return run_experiment(parse({**options, "data": data, "engine": {"threads": 1}}), folder / "simulated")


@pytest.mark.parametrize("target", ["west", "east"])
def test_tables_agree_on_one_encoding_without_an_unseen_target(target: str, tmp_path: Path) -> None:
    """The target at the coordinator, or a site that is left out: the bits of a simulation either way."""
    files = write_tables(tmp_path / "tables")
    places = {}
    for site in SITES:
        places[site] = site_file(tmp_path, site, "", send=["weights", "numbers", "accuracy", "statistics"])
        whole = yaml.safe_load(places[site].read_text())
        whole |= {"data": {**TABLE, "sites": {site: files[site]}}, "classes": ["n", "y"]}
        places[site].write_text(yaml.safe_dump(whole))
    own = {"west": files["west"]} if target == "west" else {}
    options = options_of({"name": "fedavg"}, protocol={"targets": [target], "seeds": [0], "test_fraction": 0.3})
    here = simulated(tmp_path, options, {**TABLE, "sites": {**{site: files[site] for site in SITES}, **own}})
    place = begin(tmp_path, options, {**TABLE, "sites": own} if own else None)
    coordinate(place, Loopback(places), list(SITES))
    there = place / "runs" / "tiny"
    assert same(model(here, "fedavg", target), model(there, "fedavg", target))
    assert result(here, "fedavg", target)["selected"] == result(there, "fedavg", target)["selected"]

    places["north"].write_text(places["north"].read_text().replace("- statistics", "- spectra"))
    with pytest.raises(UserError, match=r"refuses to send statistics for the encoding .*policy.send"):
        coordinate(place, Loopback(places), list(SITES))


def test_standardised_arrays_agree_on_one_scale(tmp_path: Path) -> None:
    files = write_data(tmp_path / "data", {**SITES, "west": 30})
    arrays = {"name": "arrays", "standardise": True, "classes": ["0", "1", "2"]}
    places = {}
    for site in SITES:
        places[site] = site_file(tmp_path, site, "", send=["weights", "numbers", "accuracy", "statistics"])
        whole = yaml.safe_load(places[site].read_text()) | {"data": {**arrays, "sites": {site: files[site]}}}
        places[site].write_text(yaml.safe_dump(whole))
    options = options_of({"name": "fedavg"})
    here = simulated(tmp_path, options, {**arrays, "sites": files})
    place = begin(tmp_path, options, {**arrays, "sites": {"west": files["west"]}})
    coordinate(place, Loopback(places), list(SITES))
    assert same(model(here, "fedavg", "west"), model(place / "runs" / "tiny", "fedavg", "west"))


# What goes wrong on the way -----------------------------------------------------------------------------------------


class Killed(Exception):
    """Stands for a process that dies."""


@pytest.mark.parametrize(("name", "wire"), [("fedavg", "float32"), ("csac", "bf16"), ("fedavg", "int8")])
def test_a_run_killed_anywhere_goes_on_to_the_same_bits(name: str, wire: str, tmp_path: Path) -> None:
    """The coordinator dies before or after any answer, and with it every site's process; all is made anew from disk."""
    options = options_of({"name": name, **METHODS[name]})
    engine = {"wire": wire}
    whole, transport = deploy(tmp_path / "whole", options, engine=engine)
    last = 0
    for when in range(1, len(transport.asked) + 1, 3):
        count = 0

        def die(site: str, header: dict[str, Any], answer: Any, when: int = when) -> Any:
            nonlocal count
            count += 1
            if count == when:
                raise Killed
            return answer

        folder = tmp_path / str(when)
        files = write_data(folder / "data", SITES)
        places = {site: site_file(folder, site, files[site]) for site in SITES}
        with pytest.raises(Killed):
            deploy(folder, options, transport=Loopback(places, die), engine=engine)
        again, second = deploy(folder, options, transport=Loopback(places), engine=engine)
        assert same(model(whole, name, "west"), model(again, name, "west")), when
        last = len(second.asked)
    assert 0 < last < len(transport.asked)


def test_a_request_that_comes_again_is_not_trained_again(tmp_path: Path) -> None:
    options = options_of({"name": "fedavg"})
    files = write_data(tmp_path / "data", SITES)
    places = {site: site_file(tmp_path, site, files[site]) for site in SITES}

    def die(site: str, header: dict[str, Any], answer: Any) -> Any:
        if header["do"] == "step" and header["envelope"]["exchange"] == 2 and site == "east":
            raise Killed
        return answer

    with pytest.raises(Killed):
        deploy(tmp_path, options, transport=Loopback(places, die))
    deploy(tmp_path, options, transport=Loopback(places))
    log = [json.loads(line) for line in (tmp_path / "north/memory/audit.jsonl").read_text().splitlines()]
    steps = [(line["exchange"], line.get("again", False)) for line in log if line["do"] == "step"]
    assert steps == [(1, False), (2, False), (2, True), (3, False)]


@pytest.mark.parametrize("how", ["late", "error", "diverged", "garbage", "nan", "shape", "other", "fields"])
def test_a_reply_that_cannot_be_used_is_recorded_and_the_quorum_goes_on(how: str, tmp_path: Path) -> None:
    def spoil(site: str, header: dict[str, Any], answer: Any) -> Any:
        if not (site == "south" and header["do"] == "step" and header["envelope"]["round"] == 2):
            return answer
        if how == "late":
            return Lost("no reply within 5 s")
        if how == "error":
            return seal({"error": "FedshiftError", "message": "its disk is full"}, body_of({}))
        if how == "diverged":
            return seal({"error": "TrainingDiverged", "message": "site 'south' in round 2: no number"}, body_of({}))
        if how == "garbage":
            return Message(answer.header, answer.body[:-7], answer.digest)
        said, content, _ = unseal(answer)
        found = content["weights"]
        assert isinstance(found, Weights)
        name, tensor = next(iter(found.items()))
        if how == "nan":
            content["weights"] = found.merge({name: tensor * float("nan")})
        elif how == "shape":
            content["weights"] = found.merge({name: tensor[:-1]})
        elif how == "other":
            said["answers"] = "0" * 64
        else:
            content["more"] = 1
        return seal(said, body_of(content))

    files = write_data(tmp_path / "data", SITES)
    places = {site: site_file(tmp_path, site, files[site]) for site in SITES}
    options = options_of({"name": "fedavg"})
    there, _ = deploy(tmp_path, options, transport=Loopback(places, spoil), engine={"quorum": 2})
    found = [event for event in events(tmp_path) if event.get("is") in ("lost", "refused")]
    assert {(event["site"], event["round"]) for event in found} == {("south", 2)}
    assert ("refused" in {event["is"] for event in found}) == (how not in ("late", "error", "diverged"))
    lines = [json.loads(line) for line in (there / "fedavg/west/seed-0/rounds.jsonl").read_text().splitlines()]
    assert [set(line["aggregation_weights"]) for line in lines] == [set(SITES), {"north", "east"}, set(SITES)]
    assert [list(line["extra"].get("missing", {})) for line in lines] == [[], ["south"], []]


@pytest.mark.parametrize("quorum", [None, 3])
def test_training_that_went_wrong_at_a_site_ends_the_run_without_enough_others(
    quorum: int | None, tmp_path: Path
) -> None:
    def spoil(site: str, header: dict[str, Any], answer: Any) -> Any:
        if site != "south" or header["do"] != "step":
            return answer
        return seal({"error": "TrainingDiverged", "message": "site 'south' in round 1: no number"}, body_of({}))

    files = write_data(tmp_path / "data", SITES)
    places = {site: site_file(tmp_path, site, files[site]) for site in SITES}
    transport = Loopback(places, spoil)
    with pytest.raises(TrainingDiverged, match="site 'south' in round 1: no number"):
        deploy(tmp_path, options_of({"name": "fedavg"}), transport=transport, engine={"quorum": quorum})


def test_a_lost_site_without_a_quorum_ends_the_run_with_a_clear_message(tmp_path: Path) -> None:
    def lose(site: str, header: dict[str, Any], answer: Any) -> Any:
        return Lost("no reply within 5 s") if site == "south" and header["do"] == "step" else answer

    files = write_data(tmp_path / "data", SITES)
    places = {site: site_file(tmp_path, site, files[site]) for site in SITES}
    with pytest.raises(FedshiftError, match=r"'south' is lost .*deploy resume.*engine\.quorum"):
        deploy(tmp_path, options_of({"name": "fedavg"}), transport=Loopback(places, lose))
    there, _ = deploy(tmp_path, options_of({"name": "fedavg"}), transport=Loopback(places))  # it is back
    assert same(
        model(there, "fedavg", "west"), model(simulate(tmp_path, options_of({"name": "fedavg"})), "fedavg", "west")
    )


def test_a_site_that_misses_a_round_leaves_the_documented_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lose(site: str, header: dict[str, Any], answer: Any) -> Any:
        late = site == "south" and header["do"] == "step" and header["envelope"]["round"] == 2
        return Lost("no reply within 5 s") if late else answer

    options = options_of({"name": "fedavg"})
    files = write_data(tmp_path / "data", SITES)
    places = {site: site_file(tmp_path, site, files[site]) for site in SITES}
    there, _ = deploy(tmp_path, options, transport=Loopback(places, lose), engine={"quorum": 2})
    monkeypatch.setattr(Without, "absent", {("south", 2)})
    monkeypatch.setattr("fedshift.experiment.runs.one_run.LocalFederation", Without)
    here = simulate(tmp_path, options)
    assert same(model(here, "fedavg", "west"), model(there, "fedavg", "west"))


def test_a_second_reply_is_refused(tmp_path: Path) -> None:
    files = write_data(tmp_path / "data", SITES)
    places = {site: site_file(tmp_path, site, files[site]) for site in SITES}
    doubled = Loopback(places, lambda site, header, answer: [answer, answer] if site == "north" else answer)
    options = options_of({"name": "fedavg"})
    there, _ = deploy(tmp_path, options, transport=doubled)
    assert same(model(simulate(tmp_path, options), "fedavg", "west"), model(there, "fedavg", "west"))
    assert any("second reply" in event.get("reason", "") for event in events(tmp_path))


def test_replies_in_any_order_give_the_same_bits(tmp_path: Path) -> None:
    files = write_data(tmp_path / "data", SITES)
    backwards = Loopback({site: site_file(tmp_path, site, files[site]) for site in SITES})
    backwards.backwards = True
    options = options_of({"name": "csac", **METHODS["csac"]})
    there, _ = deploy(tmp_path, options, transport=backwards)
    assert same(model(simulate(tmp_path, options), "csac", "west"), model(there, "csac", "west"))


def test_a_site_that_is_lost_before_the_run_goes_on_stands_in_by_its_card(tmp_path: Path) -> None:
    files = write_data(tmp_path / "data", SITES)
    places = {site: site_file(tmp_path, site, files[site]) for site in SITES}
    options = options_of({"name": "fedavg"})

    def die(site: str, header: dict[str, Any], answer: Any) -> Any:
        if header["do"] == "step" and header["envelope"]["round"] == 2:
            raise Killed
        return answer

    with pytest.raises(Killed):
        deploy(tmp_path, options, transport=Loopback(places, die))
    away = Loopback(places, lambda site, header, answer: Lost("away") if site == "east" else answer)
    there, _ = deploy(tmp_path, options, transport=away, engine={"quorum": 2})
    assert (there / "fedavg/west/seed-0/result.json").exists()
    with pytest.raises(UserError, match="site 'east' cannot take part: away"):
        deploy(tmp_path / "new", options, transport=away, engine={"quorum": 2})


@pytest.mark.parametrize(("wire", "share"), [("bf16", 0.5), ("int8", 0.3)])
def test_narrow_weights_take_fewer_bytes_and_learn_as_well(wire: str, share: float, tmp_path: Path) -> None:
    options = options_of({"name": "fedavg"}, training={"rounds": 8, "batch_size": 8, "lr": 0.1})
    exact, _ = deploy(tmp_path / "exact", options)
    narrow, _ = deploy(tmp_path / "narrow", options, engine={"wire": wire})
    whole, less = result(exact, "fedavg", "west"), result(narrow, "fedavg", "west")
    for direction in ("bytes_up", "bytes_down"):
        assert less[direction]["weights"] <= share * 1.2 * whole[direction]["weights"]
    assert less["selected"]["last"]["accuracy"] >= whole["selected"]["last"]["accuracy"] - 10


@pytest.mark.parametrize(("wire", "bound"), [("bf16", 0.2), ("int8", 0.4)])
def test_small_steps_are_not_lost_in_rounding(wire: str, bound: float, tmp_path: Path) -> None:
    """A round changes the weights by less than rounding does; what was rounded away comes with the next message, both
    ways. How far from the exact run's weights, as a part of the way that training went.
    """

    def end(folder: str, rounds: int, lr: float, wire: str) -> torch.Tensor:
        options = options_of({"name": "fedavg"}, training={"rounds": rounds, "batch_size": 8, "lr": lr})
        there, _ = deploy(tmp_path / folder, options, engine={"wire": wire})
        return torch.cat([tensor.double().reshape(-1) for tensor in model(there, "fedavg", "west").values()])

    start, exact = end("start", 1, 1e-12, "float32"), end("exact", 20, 0.001, "float32")
    assert (end("narrow", 20, 0.001, wire) - exact).norm() < bound * (exact - start).norm()


# What a site refuses ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "method", "rule"),
    [
        ({"methods": ["csac"]}, {"name": "fedavg"}, "policy.methods: csac"),
        ({"methods": ["styles"]}, {"name": "styles", "method": "fedavg"}, "policy.methods: styles"),
        ({"send": ["numbers", "accuracy"]}, {"name": "fedavg"}, "policy.send"),
        ({"send": ["weights", "numbers"]}, {"name": "fedavg"}, "policy.send"),
        ({"smallest_group": 20}, {"name": "fedavg"}, "policy.smallest_group: 20"),
        ({"rounds_per_day": 2}, {"name": "fedavg"}, "policy.rounds_per_day: 2"),
    ],
)
def test_a_refusal_names_the_rule_and_ends_the_run(
    policy: dict[str, Any], method: dict[str, Any], rule: str, tmp_path: Path
) -> None:
    files = write_data(tmp_path / "data", SITES)
    every = {"send": ["weights", "numbers", "accuracy", "styles"]}
    places = {site: site_file(tmp_path, site, files[site], **every) for site in SITES}
    places["south"] = site_file(tmp_path, "south", files["south"], **{**every, **policy})
    with pytest.raises(UserError, match=rf"site 'south' .*\(rule {rule}"):
        deploy(tmp_path, options_of(method), transport=Loopback(places))
    log = [json.loads(line) for line in (tmp_path / "south/memory/audit.jsonl").read_text().splitlines()]
    assert rule in log[-1]["refused"]
    if "rounds_per_day" not in rule and policy.get("send") != ["weights", "numbers"]:
        assert not any(line["do"] == "step" for line in log), "before any training"


SETTING: dict[str, Any] = {
    "method": {"name": "fedavg", "options": {}},
    "training": {},
    "network": {"name": "linear"},
    "preprocessing": {"kind": "features"},
    "input_shape": [5],
    "classes": 3,
    "sources": 3,
    "seed": 0,
    "refuse": [],
    "on_refusal": "stop",
}


def request(program: SiteProgram, **changes: Any) -> dict[str, Any]:
    """What a site answers to a request for a call with something in it changed."""
    header = {
        "do": "step",
        "protocol": 1,
        "run": "r",
        "step": "fit",
        "envelope": {"exchange": 1, "round": 1, "progress": 0.0, "mini_batches_left": 5},
        "memory": {},
        "kept": {},
        "checkpoint": 0,
        "wire": "float32",
        "setting": SETTING,
        "part": {
            "role": "source",
            "number": 0,
            "whole": False,
            "fingerprint": program.holding.fingerprint,
            "split": {"test_fraction": 0.3, "split": "auto", "seed": 0},
        },
        **changes,
    }
    start = Weights({"classifier.weight": torch.zeros(3, 5), "classifier.bias": torch.zeros(3)})
    body = body_of({"weights": start})
    answer, _, _ = unseal(program.handle(seal({"key": request_key(header, body.sha256), **header}, body), "someone"))
    return answer


@pytest.fixture
def program(tmp_path: Path) -> SiteProgram:
    files = write_data(tmp_path / "data", SITES)
    return SiteProgram(load_site(site_file(tmp_path, "north", files["north"])))


def test_a_whole_request_is_answered(program: SiteProgram) -> None:
    assert "error" not in request(program)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"step": "round"}, "not a call"),
        ({"step": "mini_batches"}, "not a call"),
        ({"step": "_own"}, "not a call"),
        ({"step": "__init__"}, "not a call"),
        ({"step": 3}, "not a call"),
        ({"do": "shell"}, "does not know"),
        ({"protocol": 2}, "install the same fedshift"),
        ({"run": "../../etc"}, "names a file"),
        ({"memory": {"optimizer": "../../secret"}}, "names a file"),
        ({"key": "../../x"}, "key"),
        ({"setting": {"method": {"name": "os:system", "options": {}}}}, "has no method"),
        ({"setting": {"method": {"name": "/tmp/x.py:Y", "options": {}}}}, "has no method"),
        ({"setting": {"method": {"name": "deepall", "options": {}}}}, "needs the samples"),
        ({"setting": {"method": {"name": "fedavg", "options": {"local_epochs": -1}}}}, "local_epochs"),
        ({"setting": None}, "failed"),
        ({"envelope": {"exchange": "one"}}, "envelope"),
        ({"part": None}, "failed"),
    ],
)
def test_a_strange_request_is_answered_with_an_error(changes: dict[str, Any], what: str, program: SiteProgram) -> None:
    answer = request(program, **changes)
    assert what in answer["message"], answer
    assert "Traceback" not in answer["message"]


@pytest.mark.parametrize("form", [str, lambda name: {"name": name}], ids=["name", "mapping"])
def test_no_code_comes_in_with_a_wrapper(form: Any, program: SiteProgram, tmp_path: Path) -> None:
    evil = tmp_path / "evil.py"
    evil.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n", encoding="utf-8")
    for name in (f"{evil}:Y", "os:system"):
        options: dict[str, Any] = {"method": form(name)}
        for _ in range(2):  # in one wrapper, and in two
            answer = request(program, setting={"method": {"name": "styles", "options": options}})
            assert f"has no method '{name}'" in answer["message"], answer
            options = {"method": {"name": "styles", **options}}
    assert not (tmp_path / "ran").exists()


def test_requests_with_anything_in_them_never_crash_a_site(program: SiteProgram) -> None:
    draws = random.Random(1)
    strange = [None, -1, 0, 10**30, "", "x" * 500, [], {}, [[]], True, 1.5, "../..", {"a": None}]
    names = ["do", "run", "step", "key", "envelope", "memory", "kept", "checkpoint", "wire", "setting", "part"]
    for _ in range(300):
        request(program, **{draws.choice(names): draws.choice(strange)})
    later = {"exchange": 1, "round": 2, "progress": 0.0, "mini_batches_left": 5}
    assert "error" not in request(program, envelope=later)
    AuditLog.check(program.config.audit_log)


# Found before training ----------------------------------------------------------------------------------------------


def test_sites_that_differ_are_found_before_training(tmp_path: Path) -> None:
    files = write_data(tmp_path / "data", SITES)

    def spoiled(**arrays: Any) -> Loopback:
        with np.load(files["south"]) as found:
            np.savez(tmp_path / "other.npz", **{"x": found["x"], "y": found["y"], **arrays})
        places = {site: site_file(tmp_path, site, files[site]) for site in SITES}
        places["south"] = site_file(tmp_path, "south", str(tmp_path / "other.npz"))
        return Loopback(places)

    wider = spoiled(x=np.zeros((17, 9), dtype=np.float32))
    with pytest.raises(UserError, match=r"sites differ in a sample's shape: 'north' has 5, 'south' has 9"):
        deploy(tmp_path, options_of({"name": "fedavg"}), transport=wider)
    assert {what for _, what in wider.asked} == {"hello"}

    other = Loopback({site: site_file(tmp_path, site, files[site]) for site in SITES})
    place = site_file(tmp_path, "south", files["south"])
    place.write_text(place.read_text().replace("- '2'", "- '2'\n- '3'"))
    other.programs["south"] = SiteProgram(load_site(place))
    with pytest.raises(UserError, match=r"sites differ in classes: 'north' has 0, 1, 2, 'south' has 0, 1, 2, 3"):
        deploy(tmp_path, options_of({"name": "fedavg"}), transport=other)


@pytest.mark.parametrize(("off", "said"), [(-3600.0, "behind"), (3600.0, "ahead of"), (20.0, None)])
def test_clocks_that_differ_are_said(off: float, said: str | None, tmp_path: Path) -> None:
    def wrong(site: str, header: dict[str, Any], answer: Any) -> Any:
        if site != "south" or header["do"] != "hello":
            return answer
        found, content, _ = unseal(answer)
        return seal({**found, "time": found["time"] + off}, body_of(content))

    files = write_data(tmp_path / "data", SITES)
    places = {site: site_file(tmp_path, site, files[site]) for site in SITES}
    deploy(tmp_path, options_of({"name": "fedavg"}), transport=Loopback(places, wrong))
    found = [event["message"] for event in events(tmp_path) if event["what"] == "warning"]
    if said is None:
        assert found == []
    else:
        (line,) = found
        assert re.fullmatch(rf"site 'south': its clock is 3[56]\d\d s {said} the coordinator's: [^\n]*", line)


def test_another_version_is_refused_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedshift.deployment.handshake.__version__", "9.9")
    with pytest.raises(UserError, match=r"9\.9.* same version"):
        deploy(tmp_path, options_of({"name": "fedavg"}))


def test_data_that_change_during_a_run_end_it(tmp_path: Path) -> None:
    files = write_data(tmp_path / "data", SITES)
    places = {site: site_file(tmp_path, site, files[site]) for site in SITES}
    touched = False

    def touch(site: str, header: dict[str, Any], answer: Any) -> Any:
        nonlocal touched
        if not touched and header["do"] == "step" and header["envelope"]["round"] == 2:
            touched = True
            with np.load(files["east"]) as found:
                changed = {"x": found["x"] + 1, "y": found["y"]}
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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"methods": [{"name": "deepall"}]}, "all samples in one place"),
        ({"data": "rotated_digits"}, "lies on this machine"),
        ({"engine": {"name": "local"}}, "engine: {name: flare}"),
        ({"protocol": {"targets": ["nowhere"]}}, "no site is called 'nowhere'"),
    ],
)
def test_experiments_that_cannot_be_deployed_are_explained(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    files = write_data(tmp_path / "data", SITES)
    transport = Loopback({site: site_file(tmp_path, site, files[site]) for site in SITES})
    options = {**options_of({"name": "fedavg"}), "data": {"name": "sites"}, "engine": {"name": "flare"}, **change}
    place = tmp_path / "deployment"
    place.mkdir()
    (place / "experiment.json").write_text(json.dumps(parse(options).dump()))
    with pytest.raises(UserError, match=message):
        coordinate(place, transport, list(SITES))


# The audit log ------------------------------------------------------------------------------------------------------


def test_the_audit_log_is_a_chain(tmp_path: Path) -> None:
    deploy(tmp_path, options_of({"name": "fedavg"}))
    log = tmp_path / "north/memory/audit.jsonl"
    lines, last = AuditLog.check(log)
    assert [line["do"] for line in lines] == ["hello", *["step", "measure"] * 3, "end"]
    step = lines[1]
    assert step["method"] == "fedavg"
    assert step["step"] == "fit"
    assert step["sent"]["weights"]["kind"] == "weights"
    assert step["sent"]["weights"]["shapes"]["classifier.bias"] == [3]
    assert step["sent"]["samples"] == {"kind": "numbers"}
    assert step["sent_bytes"] > step["sent"]["weights"]["bytes"]
    assert len(step["received_digest"]) == len(step["sent_digest"]) == len(last) == 64

    text = log.read_text()
    for spoiled in (
        text.replace('"step": "fit"', '"step": "fat"', 1),
        "\n".join([*text.splitlines()[:2], *text.splitlines()[3:]]) + "\n",
        text.replace("\n", "\n\n", 1),
    ):
        log.write_text(spoiled)
        with pytest.raises(FedshiftError, match=r"audit.jsonl, line \d+: the log was changed here"):
            AuditLog.check(log)
    log.write_text(text + '{"half a li')  # the machine stopped while it was written
    assert AuditLog.check(log) == (lines, last)


def test_nothing_leaves_that_cannot_be_logged(program: SiteProgram, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    answer = request(program)
    assert "nothing was sent" in answer["message"]
