"""Statistics of tables at sites with a budget of privacy: with noise, counted once, or refused."""

from __future__ import annotations

import json
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from loopback import SETTING, SITES, Loopback, full_answer, model, options_of, site_file
from test_agreement import TABLE, begin, write_tables
from test_site_budget import draw_secret

from fedshift.data.builders.own_tables import Table
from fedshift.deploy.coordinator import coordinate
from fedshift.deploy.privacy.ledger import LEDGER
from fedshift.deploy.remote.requests import PROTOCOL, request_key
from fedshift.deploy.remote.wire import body_of, seal, unseal
from fedshift.deploy.site_file import load_site, read_holding
from fedshift.deploy.site_server import SiteProgram
from fedshift.errors import UserError
from fedshift.weights import Weights

pytestmark = pytest.mark.skipif(find_spec("opacus") is None, reason="opacus is not installed")
RANGES = {"age": [0, 120], "pressure": [60, 160]}
CATEGORIES = {"sex": ["f", "m", "x"]}
NOISY: dict[str, Any] = {"statistics_noise": 4.0, "ranges": RANGES, "categories": CATEGORIES}
SEND = ["weights", "numbers", "accuracy", "statistics"]


def place_of(folder: Path, site: str, **privacy: Any) -> Path:
    """The SITE.yaml of a site with a table and a budget of 20."""
    files = write_tables(folder / "tables")
    site_yaml = site_file(folder, site, "", send=SEND)
    options = yaml.safe_load(site_yaml.read_text())
    options |= {"data": {**TABLE, "sites": {site: files[site]}}, "classes": ["n", "y"]}
    site_yaml.write_text(yaml.safe_dump({**options, "privacy": {"epsilon": 20.0, "delta": 1e-5, **privacy}}))
    return site_yaml


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
    assert isinstance(source, Table)
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
    files = write_tables(tmp_path / "tables")
    deployment_folder = begin(tmp_path, options, {**TABLE, "sites": {"west": files["west"]}})
    with pytest.raises(UserError, match=message):
        coordinate(deployment_folder, transport, list(SITES))
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


def test_a_run_on_tables_is_private_from_the_first_sum_on(tmp_path: Path) -> None:
    options = options_of(
        {"name": "fedavg"}, training={"rounds": 1, "batch_size": 8, "privacy": {"noise_multiplier": 3}}
    )
    transport = Loopback({site: place_of(tmp_path, site, **NOISY) for site in SITES})
    files = write_tables(tmp_path / "tables")
    deployment_folder = begin(tmp_path, options, {**TABLE, "sites": {"west": files["west"]}})
    coordinate(deployment_folder, transport, list(SITES))
    weights = model(deployment_folder / "runs" / "tiny", "fedavg", "west")
    # Two numbers, two columns that say which are missing, three categories.
    assert (8, 7) in [tuple(tensor.shape) for tensor in weights.values()]
    for program in transport.programs.values():
        assert [line["call"] for line in lines(program)] == ["statistics", "fit"]
