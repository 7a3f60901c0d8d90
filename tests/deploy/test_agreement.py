"""What sites and coordinator agree on before training: encodings and scales, shapes, classes, clocks, versions."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from asked import SETTING, full_answer
from loopback import Loopback, deploy, losing, options_of, simulate
from outcomes import alike, events, model, one_line
from site_yaml import SITES, edit, site_file, site_files, table_files, write_data
from test_site_budget import draw_secret

from fedshift.deploy.coordinator import check_members, coordinate
from fedshift.deploy.json_files import CARDS
from fedshift.deploy.privacy.ledger import LEDGER
from fedshift.deploy.remote.requests import PROTOCOL, request_key
from fedshift.deploy.remote.transport import Lost
from fedshift.deploy.remote.wire import body_of, seal, unseal
from fedshift.deploy.site_cards import cards_of
from fedshift.deploy.site_file import load_site, read_holding
from fedshift.deploy.site_server import SiteProgram
from fedshift.errors import FedshiftError, UserError
from fedshift.experiment.config.experiment import parse
from fedshift.json_objects import write_object
from fedshift.model import Model
from fedshift.report.advice.words import first_sentence
from fedshift.report.collect import collect
from fedshift.report.report import verdict_of
from fedshift.weights import Weights
from tried import slow_after

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


SECTIONS = {"classes": ["n", "y"]}
SUMS = ["weights", "numbers", "accuracy", "statistics"]


def tables_at(folder: Path, files: dict[str, str], of_site: Any = None, **changes: Any) -> dict[str, Path]:
    """A SITE.yaml for the table of each site."""
    changes = {"send": SUMS, "sections": SECTIONS, **changes}
    return table_files(folder, {site: files[site] for site in SITES}, TABLE, of_site, **changes)


@pytest.mark.parametrize("target", ["west", "east"])
def test_tables_agree_on_one_encoding_without_an_unseen_target(target: str, tmp_path: Path) -> None:
    """The target at the coordinator, or a site that is left out: the bits of a simulation either way."""
    files = write_tables(tmp_path / "tables")
    unseen = {**TABLE, "sites": {"west": files["west"]}} if target == "west" else {}
    places = tables_at(tmp_path, files)
    options = options_of("fedavg", protocol={"targets": [target], "seeds": [0], "test_fraction": 0.3})
    known = {site: file for site, file in files.items() if site in SITES or unseen}
    here = simulate(tmp_path, options, data={**TABLE, "sites": known})
    there, _ = deploy(tmp_path, options, unseen=unseen, transport=Loopback(places))
    assert alike(here, there, target=target, measured=True)
    places["north"].write_text(places["north"].read_text().replace("- statistics", "- spectra"))
    with pytest.raises(UserError, match=r"refuses to send statistics for the encoding .*policy.send"):
        deploy(tmp_path, options, unseen=unseen, transport=Loopback(places))


@pytest.mark.case("deployed predictions", "rows have names at all sites that name any: predictions give them back")
@pytest.mark.case("categories between sites", "deployed: the coordinator warns while it agrees with the sites")
def test_names_of_rows_are_kept_and_codings_compared(tmp_path: Path) -> None:
    files = write_tables(tmp_path / "tables")
    for site in SITES:
        lines = Path(files[site]).read_text().splitlines()
        text = "\n".join(f"{'patient' if row == 0 else f'{site}-{row}'},{line}" for row, line in enumerate(lines))
        Path(files[site]).write_text(text.replace(",m,", ",M,") if site == "south" else text)
    places = tables_at(tmp_path, files, {site: {"id": "patient"} for site in ("south", "east")})
    options = options_of("fedavg", protocol={"targets": ["sites"], "seeds": [0], "test_fraction": 0.3})
    there, _ = deploy(tmp_path, options, unseen={}, transport=Loopback(places))
    run = next(there.rglob("model.safetensors")).parent
    assert Model.load(run).predictions(files["east"])["id"].tolist()[:2] == ["east-1", "east-2"]
    messages = [event["message"] for event in events(tmp_path) if event["what"] == "warning"]
    assert [text for text in messages if "'sex'" in text and "'M' at 'south' is 'm'" in text]
    sentence = first_sentence(verdict_of(collect(there)))
    assert "next site" not in sentence
    assert "at the sites that trained" in sentence or "Take none" in sentence


def test_standardised_arrays_agree_on_one_scale(tmp_path: Path) -> None:
    files = write_data(tmp_path / "data", {**SITES, "west": 30})
    arrays, options = {"name": "arrays", "standardise": True, "classes": ["0", "1", "2"]}, options_of("fedavg")
    places = table_files(tmp_path, {site: files[site] for site in SITES}, arrays, send=SUMS)
    here = simulate(tmp_path, options, data={**arrays, "sites": files})
    unseen = {**arrays, "sites": {"west": files["west"]}}
    assert alike(here, deploy(tmp_path, options, unseen=unseen, transport=Loopback(places))[0])


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


@pytest.mark.parametrize(("off", "message"), slow_after(1, [(-3600.0, "behind"), (3600.0, "ahead of"), (20.0, None)]))
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
def test_requests_of_another_version_are_refused(role: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_what_cannot_be_deployed_is_explained(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    options = {**options_of("fedavg"), "data": {"name": "sites"}, "engine": {"name": "flare"}, **change}
    (tmp_path / "deployment").mkdir()
    write_object(tmp_path / "deployment" / "experiment.json", parse(options).dump())
    with pytest.raises(UserError, match=message):
        coordinate(tmp_path / "deployment", Loopback(site_files(tmp_path)), list(SITES))


EVERY = {"targets": ["sites"], "seeds": [0], "test_fraction": 0.3}
GONE = frozenset({"north", "up"})
"""North is revoked; up has left the project."""


@pytest.mark.case("revoked sites", "targets and dropped sites that are revoked, removed, misspelt")
@pytest.mark.parametrize(
    ("protocol", "message"),
    [
        ({"targets": ["north"]}, "targets: .*'north' was revoked.*fedshift project accept north"),
        ({"targets": ["up"]}, "targets: .*'up' was removed"),
        ({"targets": ["eats"]}, "targets: .*'eats'.*'east'"),
        ({"targets": ["sites"], "drop": ["eats"]}, "drop: .*'eats'.*'east'"),
        ({"targets": ["sites"], "drop": ["east", "south"]}, "no site is left"),
        ({"targets": ["sites"], "drop": ["north"]}, None),
        ({"targets": ["sites"], "drop": ["up"]}, None),
        ({"targets": ["east"]}, None),
        ({"targets": "all"}, None),
    ],
)
def test_names_are_checked_before_anything_starts(protocol: dict[str, Any], message: str | None) -> None:
    whole = options_of({"name": "fedavg"}, protocol={"seeds": [0], **protocol})
    experiment = parse({**whole, "data": {"name": "sites"}, "engine": {"name": "flare"}})
    if message is None:
        check_members(experiment, [*SITES], GONE)
        return
    with one_line(message):
        check_members(experiment, [*SITES], GONE)


def sites_asked(transport: Loopback) -> set[str]:
    return {site for site, _ in transport.asked}


@pytest.mark.case("revoked sites", "a project that grows and shrinks while an experiment is interrupted")
def test_an_experiment_goes_on_with_the_sites_that_it_began_with(tmp_path: Path) -> None:
    files = write_data(tmp_path / "data", {**SITES, "up": 22})
    transport = Loopback({name: site_file(tmp_path, name, files[name], smallest_group=1) for name in files})
    options = options_of({"name": "fedavg"}, protocol=EVERY)

    transport.change = losing(*((site, "call", 2) for site in SITES))
    with pytest.raises(FedshiftError):
        deploy(tmp_path, options, unseen={}, transport=transport, engine={"quorum": 2})
    assert cards_of(tmp_path / "deployment").keys() == SITES.keys()

    def south_is_gone(site: str, header: Mapping[str, Any], answer: Any) -> Any:
        return Lost("its kit was revoked") if site == "south" else answer

    transport.change, transport.asked = south_is_gone, []
    coordinate(tmp_path / "deployment", transport, ["north", "east", "up"])
    assert sites_asked(transport) == SITES.keys(), "up has joined since, and south is revoked"
    warned = [event["message"] for event in events(tmp_path) if event["what"] == "warning"]
    assert any("'up'" in text for text in warned)
    assert any("'south'" in text for text in warned)


@pytest.mark.case("revoked sites", "a first try that failed before training does not bind the next to its sites")
def test_an_experiment_that_never_began_is_of_the_sites_of_now(tmp_path: Path) -> None:
    options = options_of({"name": "fedavg"}, protocol=EVERY)
    with pytest.raises(UserError, match=r"engine\.quorum"):
        deploy(tmp_path, options, unseen={}, engine={"quorum": 4})
    assert not (tmp_path / "deployment" / CARDS).exists()
    folder, transport = deploy(tmp_path, options, sites={"north": 41, "east": 26}, unseen={})
    assert sites_asked(transport) == {"north", "east"}
    assert (folder / "fedavg" / "sites" / "seed-0" / "result.json").exists()


@pytest.mark.slow
@pytest.mark.case("agreements", "three of four sites refuse, for different reasons, one of them for two")
def test_what_all_sites_lack_is_one_answer(tmp_path: Path) -> None:
    files = write_data(tmp_path / "data", {**SITES, "up": 22})
    rules: dict[str, dict[str, Any]] = {
        "north": {"methods": ["csac"], "splits": 1},
        "south": {"send": ["numbers"]},
        "east": {"models": [{"name": "linear"}]},
    }
    places = {name: site_file(tmp_path, name, file, **rules.get(name, {})) for name, file in files.items()}
    transport = Loopback(places)
    options = options_of({"name": "fedavg"}, protocol={**EVERY, "seeds": [0, 1]})
    with pytest.raises(UserError) as raised:
        deploy(tmp_path, options, sites={**SITES, "up": 22}, unseen={}, transport=transport)
    text = str(raised.value)
    assert "\n" not in text
    assert "3 of 4 sites" in text
    parts = dict(zip(("north", "south", "east"), re.split(r"\([123]\) ", text)[1:], strict=True))
    for site, rule in (("north", "methods"), ("north", "splits"), ("south", "send"), ("east", "models")):
        assert parts[site].startswith(f"site '{site}'")
        assert f"policy.{rule}" in parts[site]
        assert "SITE.yaml" in parts[site] or "fedshift site agree" in parts[site]
    assert "site 'up'" not in text
    assert sites_asked(transport) == {*SITES, "up"}
    refused = {event["site"] for event in events(tmp_path) if event["what"] == "hello"}
    assert refused == SITES.keys(), "deploy logs has one line for each"
    mended = Loopback({site: edit(path, policy={"smallest_group": 1}) for site, path in places.items()})
    assert deploy(tmp_path, options, sites={**SITES, "up": 22}, unseen={}, transport=mended)


RANGES = {"age": [0, 120], "pressure": [60, 160]}
CATEGORIES = {"sex": ["f", "m", "x"]}
NOISY: dict[str, Any] = {"statistics_noise": 4.0, "ranges": RANGES, "categories": CATEGORIES}


def place_of(folder: Path, site: str, **privacy: Any) -> Path:
    """The SITE.yaml of a site with a table and a budget of 20."""
    pytest.importorskip("opacus")
    section = {**TABLE, "sites": {site: write_tables(folder / "tables")[site]}}
    sections = {**SECTIONS, "privacy": {"epsilon": 20.0, "delta": 1e-5, **privacy}}
    return site_file(folder, site, section, sections=sections, send=SUMS)


def card(program: SiteProgram) -> dict[str, Any]:
    """What a site answers before a run."""
    from fedshift import __version__

    split = {"test_fraction": 0.3, "split": "auto"}
    header = {"do": "hello", "protocol": PROTOCOL, "run": "r", "version": __version__, "methods": [], "private": True}
    header |= {"on_refusal": "stop", "split": split, "seeds": [0]}
    body = body_of({})
    answer, _, _ = unseal(program.handle(seal({"key": request_key(header, body.sha256), **header}, body), "c"))
    return answer


def lines(program: SiteProgram) -> list[dict[str, Any]]:
    file = program.config.memory / LEDGER
    whole = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return [line for line in whole if line["steps"]]  # the first line is the secret's


def with_secret(site_yaml: Path, secret: bytes) -> SiteProgram:
    config = load_site(site_yaml)
    shutil.rmtree(config.memory, ignore_errors=True)
    draw_secret(config.memory, secret, config.file.site)
    return SiteProgram(config)


@pytest.mark.threat("spent_budget")
def test_statistics_have_noise_and_are_counted_once(tmp_path: Path) -> None:
    """Whatever is asked, and by a new process of the site, too: the same noise, and one line."""
    site_yaml = place_of(tmp_path, "south", **NOISY)
    program = with_secret(site_yaml, bytes(range(32)))
    first = card(program)["card"]
    assert card(SiteProgram(program.config))["card"]["given"] == first["given"]
    (line,) = lines(program)
    assert (line["call"], line["noise_multiplier"], line["sample_rate"], line["steps"]) == ("statistics", 4.0, 1.0, 1)
    assert first["privacy"]["spent"] == [[4.0, 1.0, 1]]
    exact = read_holding(program.config).given
    assert exact is not None
    assert first["given"]["total"] != exact["total"]
    assert first["given"]["any_missing"] == [True, True]
    site_yaml.write_text(site_yaml.read_text().replace("statistics_noise: 4.0", "statistics_noise: 5.0"))
    assert card(SiteProgram(load_site(site_yaml)))["card"]["given"] != first["given"]
    assert len(lines(program)) == 2, "other noise over the same rows is paid for"


def test_noise_is_as_large_as_its_price_and_means_stay(tmp_path: Path) -> None:
    """Over secrets the deviation is 4 · 2 √2 halves of a range, and the mean that of the values within the range."""
    site_yaml = place_of(tmp_path, "south", **{**NOISY, "ranges": {**RANGES, "pressure": [-1e7, 1e7]}})
    totals = []
    for number in range(40):
        given = with_secret(site_yaml, bytes([number]) * 32).holding.given
        assert given is not None
        totals.append(given["total"])
    program = SiteProgram(load_site(site_yaml))
    source = program.holding.source
    exact = source.statistics().total
    age, pressure = np.array(totals).T
    rows = len(program.holding.domain)
    assert np.std(pressure) / 1e7 == pytest.approx(4 * 2 * np.sqrt(2), rel=0.35)
    assert np.mean(pressure) / 1e7 == pytest.approx(0, abs=7)
    assert np.mean(age) == pytest.approx(exact[0], abs=0.35 * 60 * rows)
    assert (np.abs(age - 60 * rows) <= 60 * rows).all(), "no mean lies outside of its range"


@pytest.mark.threat("spent_budget")
def test_a_card_tells_nothing_else_of_a_table(tmp_path: Path) -> None:
    """Of two tables of as many rows: the encoding, the shape and the categories follow from what has noise."""
    site_yaml = place_of(tmp_path, "south", **NOISY)
    program = with_secret(site_yaml, bytes(32))
    told = card(program)["card"]
    file = tmp_path / "tables" / "south.csv"
    # A cell that was missing, an age beyond its range, one category fewer.
    file.write_text(file.read_text().replace(",,", ",99,").replace(",m,", ",f,"))
    other = card(SiteProgram(program.config))["card"]
    assert other["given"]["categories"] == told["given"]["categories"] == [["f", "m", "x"]]
    assert other["shape"] == told["shape"] == [2 + 2 + 3]
    columns = [site_card["preprocessing"]["table"]["numeric"][0] for site_card in (told, other)]
    exact = np.array([float(line.split(",")[0]) for line in file.read_text().splitlines()[1:]])
    assert all(column["mean"] != pytest.approx(exact.mean(), abs=1e-6) for column in columns)
    assert len(lines(program)) == 2, "other data are paid for"


@pytest.mark.threat("spent_budget")
@pytest.mark.parametrize(
    ("privacy", "message"),
    [
        ({}, r"set privacy\.statistics_noise"),
        ({**NOISY, "ranges": {"age": [0, 120]}}, r"privacy\.ranges of column 'pressure'"),
        ({**NOISY, "categories": {}}, r"privacy\.categories of column 'sex'"),
        ({**NOISY, "epsilon": 0.3}, r"costs more than is left \(rule privacy\.epsilon\)"),
    ],
)
def test_without_noise_bounds_or_budget_they_are_refused(privacy: dict[str, Any], message: str, tmp_path: Path) -> None:
    options = options_of({"name": "fedavg"}, training={"rounds": 1, "privacy": {"noise_multiplier": 3.0}})
    transport = Loopback({site: place_of(tmp_path, site, **privacy) for site in SITES})
    unseen = {**TABLE, "sites": {"west": write_tables(tmp_path / "tables")["west"]}}
    with pytest.raises(UserError, match=message):
        deploy(tmp_path, options, unseen=unseen, transport=transport)
    assert not any(lines(program) for program in transport.programs.values())


def test_no_encoding_tells_whether_a_cell_is_above_a_bound(tmp_path: Path) -> None:
    """The coordinator chooses mean and deviation: one so small that some ages become infinite, and others do not."""
    program = with_secret(place_of(tmp_path, "south", **{**NOISY, "epsilon": 0.5}), bytes(32))
    training = {"batch_size": 8, "lr": 0.1, "privacy": {"noise_multiplier": 3.0}}
    messages = []
    for number, std in enumerate((10.0, 50 / float(np.finfo(np.float32).max), 1e-300)):
        columns = [{"name": "age", "mean": 0.0, "std": std}, {"name": "pressure", "mean": 0.0, "std": 1e3}]
        numeric = [{**column, "can_be_missing": True} for column in columns]
        table = {"numeric": numeric, "categorical": [{"name": "sex", "categories": ["f", "m", "x"]}]}
        setting = {
            **SETTING,
            "training": training,
            "draws": {"south": {"noise_multiplier": 3.0, "stream": ""}},
            "input_shape": [7],
            "classes": 2,
            "preprocessing": {"kind": "table", "table": table, "shape": [7]},
        }
        envelope = {"exchange": number, "round": 1, "progress": 0.0, "mini_batches_left": 5}
        start = Weights({"classifier.weight": torch.zeros(2, 7), "classifier.bias": torch.zeros(2)})
        messages.append(full_answer(program, start, setting=setting, envelope=envelope)[0]["message"])
    assert "costs more than is left" in messages[0]
    assert len(set(messages)) == 1


def test_rows_may_not_be_dropped_for_a_cell(tmp_path: Path) -> None:
    """The number of samples is told without noise."""
    site_yaml = place_of(tmp_path, "south", **NOISY)
    options = yaml.safe_load(site_yaml.read_text())
    options["data"]["impute"] = "drop"
    site_yaml.write_text(yaml.safe_dump(options))
    with pytest.raises(UserError, match=r"data\.impute"):
        load_site(site_yaml)
    del options["privacy"]
    site_yaml.write_text(yaml.safe_dump(options))
    assert load_site(site_yaml)


def test_ranges_are_in_order(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="below the largest"):
        load_site(place_of(tmp_path, "south", **{**NOISY, "ranges": {"age": [120, 0]}}))


@pytest.mark.slow
def test_a_run_on_tables_is_private_from_the_first_sum_on(tmp_path: Path) -> None:
    options = options_of(
        {"name": "fedavg"}, training={"rounds": 1, "batch_size": 8, "privacy": {"noise_multiplier": 3}}
    )
    transport = Loopback({site: place_of(tmp_path, site, **NOISY) for site in SITES})
    unseen = {**TABLE, "sites": {"west": write_tables(tmp_path / "tables")["west"]}}
    weights = model(deploy(tmp_path, options, unseen=unseen, transport=transport)[0])
    # Two numbers, two columns that say which are missing, three categories.
    assert (8, 7) in [tuple(tensor.shape) for tensor in weights.values()]
    for program in transport.programs.values():
        assert [line["call"] for line in lines(program)] == ["statistics", "fit"]
