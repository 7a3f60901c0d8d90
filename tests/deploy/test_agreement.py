"""What sites and coordinator agree on before training: encodings and scales, shapes, classes, clocks, versions."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from loopback import SITES, Loopback, deploy, events, model, options_of, result, same, site_file, site_files, write_data

from fedshift.deploy.coordinator import coordinate
from fedshift.deploy.remote.requests import PROTOCOL
from fedshift.deploy.remote.wire import body_of, seal, unseal
from fedshift.deploy.site_file import load_site
from fedshift.deploy.site_server import SiteProgram
from fedshift.errors import UserError
from fedshift.experiment.config.experiment import parse
from fedshift.experiment.runs.experiment_loop import run_experiment
from fedshift.json_objects import write_object
from fedshift.model import Model
from fedshift.report.advice.words import first_sentence
from fedshift.report.collect import collect
from fedshift.report.report import verdict_of

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
    deployment_folder = folder / "deployment"
    deployment_folder.mkdir()
    whole = {**options, "data": {"name": "sites", "unseen": unseen}, "engine": {"name": "flare", "threads": 1}}
    write_object(deployment_folder / "experiment.json", parse(whole).dump())
    return deployment_folder


def simulate_tables(folder: Path, options: dict[str, Any], data: dict[str, Any]) -> Path:
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
    unseen_files = {"west": files["west"]} if target == "west" else {}
    options = options_of({"name": "fedavg"}, protocol={"targets": [target], "seeds": [0], "test_fraction": 0.3})
    here = simulate_tables(
        tmp_path, options, {**TABLE, "sites": {**{site: files[site] for site in SITES}, **unseen_files}}
    )
    deployment_folder = begin(tmp_path, options, {**TABLE, "sites": unseen_files} if unseen_files else None)
    coordinate(deployment_folder, Loopback(places), list(SITES))
    there = deployment_folder / "runs" / "tiny"
    assert same(model(here, "fedavg", target), model(there, "fedavg", target))
    assert result(here, "fedavg", target)["selected"] == result(there, "fedavg", target)["selected"]

    places["north"].write_text(places["north"].read_text().replace("- statistics", "- spectra"))
    with pytest.raises(UserError, match=r"refuses to send statistics for the encoding .*policy.send"):
        coordinate(deployment_folder, Loopback(places), list(SITES))


@pytest.mark.case("deployed predictions", "rows have names at all sites that name any: predictions give them back")
@pytest.mark.case("categories between sites", "deployed: the coordinator warns while it agrees with the sites")
def test_names_of_rows_are_kept_and_codings_compared(tmp_path: Path) -> None:
    files = write_tables(tmp_path / "tables")
    places = {}
    for site in SITES:
        file = Path(files[site])
        lines = file.read_text().splitlines()
        lines = [f"{'patient' if row == 0 else f'{site}-{row}'},{line}" for row, line in enumerate(lines)]
        file.write_text("\n".join(lines).replace(",m,", ",M,") if site == "south" else "\n".join(lines))
        places[site] = site_file(tmp_path, site, "", send=["weights", "numbers", "accuracy", "statistics"])
        named = {} if site == "north" else {"id": "patient"}
        whole = yaml.safe_load(places[site].read_text())
        whole |= {"data": {**TABLE, **named, "sites": {site: files[site]}}, "classes": ["n", "y"]}
        places[site].write_text(yaml.safe_dump(whole))
    options = options_of({"name": "fedavg"}, protocol={"targets": ["sites"], "seeds": [0], "test_fraction": 0.3})
    deployment_folder = begin(tmp_path, options, None)
    coordinate(deployment_folder, Loopback(places), list(SITES))
    run = next((deployment_folder / "runs").rglob("model.safetensors")).parent
    assert Model.load(run).predictions(files["east"])["id"].tolist()[:2] == ["east-1", "east-2"]
    messages = [event["message"] for event in events(tmp_path) if event["what"] == "warning"]
    assert [text for text in messages if "'sex'" in text and "'M' at 'south' is 'm'" in text]
    sentence = first_sentence(verdict_of(collect(deployment_folder / "runs" / "tiny")))
    assert "next site" not in sentence
    assert "at the sites that trained" in sentence or "Take none" in sentence


def test_standardised_arrays_agree_on_one_scale(tmp_path: Path) -> None:
    files = write_data(tmp_path / "data", {**SITES, "west": 30})
    arrays = {"name": "arrays", "standardise": True, "classes": ["0", "1", "2"]}
    places = {}
    for site in SITES:
        places[site] = site_file(tmp_path, site, "", send=["weights", "numbers", "accuracy", "statistics"])
        whole = yaml.safe_load(places[site].read_text()) | {"data": {**arrays, "sites": {site: files[site]}}}
        places[site].write_text(yaml.safe_dump(whole))
    options = options_of({"name": "fedavg"})
    here = simulate_tables(tmp_path, options, {**arrays, "sites": files})
    deployment_folder = begin(tmp_path, options, {**arrays, "sites": {"west": files["west"]}})
    coordinate(deployment_folder, Loopback(places), list(SITES))
    assert same(model(here, "fedavg", "west"), model(deployment_folder / "runs" / "tiny", "fedavg", "west"))


# Found before training ----------------------------------------------------------------------------------------------


def test_sites_that_differ_are_found_before_training(tmp_path: Path) -> None:
    files = write_data(tmp_path / "data", SITES)

    def spoil_data(**arrays: Any) -> Loopback:
        with np.load(files["south"]) as arrays_of_south:
            np.savez(tmp_path / "other.npz", **{"x": arrays_of_south["x"], "y": arrays_of_south["y"], **arrays})
        places = {site: site_file(tmp_path, site, files[site]) for site in SITES}
        places["south"] = site_file(tmp_path, "south", str(tmp_path / "other.npz"))
        return Loopback(places)

    wider = spoil_data(x=np.zeros((17, 9), dtype=np.float32))
    with pytest.raises(UserError, match=r"sites differ in a sample's shape: 'north' has 5, 'south' has 9"):
        deploy(tmp_path, options_of({"name": "fedavg"}), transport=wider)
    assert {what for _, what in wider.asked} == {"hello"}

    other = Loopback({site: site_file(tmp_path, site, files[site]) for site in SITES})
    site_yaml = site_file(tmp_path, "south", files["south"])
    site_yaml.write_text(site_yaml.read_text().replace("- '2'", "- '2'\n- '3'"))
    other.programs["south"] = SiteProgram(load_site(site_yaml))
    with pytest.raises(UserError, match=r"sites differ in classes: 'north' has 0, 1, 2, 'south' has 0, 1, 2, 3"):
        deploy(tmp_path, options_of({"name": "fedavg"}), transport=other)


@pytest.mark.parametrize(("off", "message"), [(-3600.0, "behind"), (3600.0, "ahead of"), (20.0, None)])
def test_clocks_that_differ_are_said(off: float, message: str | None, tmp_path: Path) -> None:
    def wrong(site: str, header: dict[str, Any], answer: Any) -> Any:
        if site != "south" or header["do"] != "hello":
            return answer
        answer_header, content, _ = unseal(answer)
        return seal({**answer_header, "time": answer_header["time"] + off}, body_of(content))

    deploy(tmp_path, options_of({"name": "fedavg"}), transport=Loopback(site_files(tmp_path), wrong))
    messages = [event["message"] for event in events(tmp_path) if event["what"] == "warning"]
    if message is None:
        assert messages == []
    else:
        (line,) = messages
        assert re.fullmatch(rf"site 'south': its clock is 3[56]\d\d s {message} the coordinator's: [^\n]*", line)


def test_another_version_is_refused_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedshift.deploy.handshake.installed_version", lambda: "9.9")
    with pytest.raises(UserError, match=r"9\.9.* same version"):
        deploy(tmp_path, options_of({"name": "fedavg"}))


@pytest.mark.parametrize("role", ["handshake", "site_server"])
def test_requests_of_another_version_are_refused_in_one_line(
    role: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where both sides call themselves the same version of fedshift. Either side may be the older one."""
    older = f"fedshift.deploy.remote.{'transport' if role == 'handshake' else 'requests'}"
    monkeypatch.setattr(f"{older}.PROTOCOL", PROTOCOL - 1)
    with pytest.raises(UserError) as caught:
        deploy(tmp_path, options_of({"name": "fedavg"}))
    text = str(caught.value)
    assert "\n" not in text
    assert f"version {PROTOCOL}" in text or f"coordinator {PROTOCOL}" in text
    assert "install the same fedshift" in text


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
    transport = Loopback(site_files(tmp_path))
    options = {**options_of({"name": "fedavg"}), "data": {"name": "sites"}, "engine": {"name": "flare"}, **change}
    deployment_folder = tmp_path / "deployment"
    deployment_folder.mkdir()
    write_object(deployment_folder / "experiment.json", parse(options).dump())
    with pytest.raises(UserError, match=message):
        coordinate(deployment_folder, transport, list(SITES))
