"""What a site tells of its table before training: no category, no missing and no filled cells of few rows."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from test_hostile_coordinator import hello

from fedshift.deploy.privacy.table_view import few_samples, leaving, of_many_rows
from fedshift.deploy.remote.requests import PROTOCOL, request_key
from fedshift.deploy.remote.wire import body_of, seal, unseal
from fedshift.deploy.site_file import load_site, read_holding
from fedshift.deploy.site_server import open_site
from fedshift.errors import UserError

ROWS = 60
FIELDS = {"label": "ill", "numeric": ["age"], "categorical": ["ward"]}


def site(folder: Path, wards: Sequence[str], ages: Sequence[Any], fields: Any = FIELDS, **policy: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    lines = [f"{age},{ward},{row % 2},p{row}" for row, (age, ward) in enumerate(zip(ages, wards, strict=True))]
    (folder / "t.csv").write_text("\n".join(["age,ward,ill,who", *lines]) + "\n")
    send = ["weights", "numbers", "accuracy", "statistics"]
    options = {
        "site": "north",
        "data": {"name": "table", "sites": {"north": "t.csv"}, **fields},
        "classes": ["0", "1"],
        "device": "cpu",
        "policy": {"smallest_group": 10, "send": send, **policy},
    }
    (folder / "SITE.yaml").write_text(yaml.safe_dump(options))
    return folder / "SITE.yaml"


def answer(file: Path, **changes: Any) -> tuple[dict[str, Any], str]:
    """What a site answers to a greeting, and its audit log."""
    program = open_site(file, in_service=True)
    body = body_of({})
    header = {"do": "hello", "protocol": PROTOCOL, "run": "r", **hello(**changes)}
    sent = program.handle(seal({"key": request_key(header, body.sha256), **header}, body), "someone")
    return unseal(sent)[0], program.config.audit_log.read_text()


def lines(file: Path) -> str:
    config = load_site(file)
    return "\n".join(leaving(of_many_rows(read_holding(config), config.file.policy), config.file.policy))


AGES = [float(50 + row % 7) for row in range(ROWS)]
WARDS = ["red"] * 30 + ["blue"] * 21 + ["hospice Doe"] * 9


@pytest.mark.threat("rare_categories")
@pytest.mark.case("few rows", "a category of 9 rows at a limit of 10; of 10 rows")
def test_a_category_of_few_rows_does_not_leave(tmp_path: Path) -> None:
    file = site(tmp_path, WARDS, AGES)
    card = answer(file)[0]["card"]
    assert card["given"]["categories"] == [["blue", "red"]]
    assert "Doe" not in json.dumps(card)
    assert card["shape"] == [3]  # age, blue, red
    output = lines(file)
    assert "categories of ward: blue, red" in output
    assert "1 categories of ward in fewer than 10 rows (9 rows)" in output
    assert "Doe" not in output
    ten = ["red"] * 31 + ["blue"] * 10 + ["green"] * 10 + ["hospice Doe"] * 9
    assert answer(site(tmp_path / "ten", ten, AGES))[0]["card"]["given"]["categories"] == [["blue", "green", "red"]]


@pytest.mark.case("few rows", "a card keeps the column that names rows, and its encoding fits its samples")
def test_rare_rows_are_encoded_as_unknown_ones(tmp_path: Path) -> None:
    config = load_site(site(tmp_path, WARDS, AGES, {**FIELDS, "id": "who"}))
    shown = of_many_rows(read_holding(config), config.file.policy)
    table = shown.data.preprocessing.table
    assert table is not None
    assert table["id"] == "who"
    inputs = np.asarray(shown.domain.inputs)
    assert inputs[:30, 2].tolist() == [1] * 30
    assert not inputs[51:, 1:].any()


@pytest.mark.case("few rows", "policy.rare_categories: refuse; counts at the site, none at the coordinator")
def test_a_site_can_refuse_rare_categories(tmp_path: Path) -> None:
    file = site(tmp_path, WARDS, AGES, rare_categories="refuse")
    told, log = answer(file)
    assert "categories of column 'ward' that are in few rows" in told["message"]
    assert "rare_categories" in told["message"]
    assert "rows: 9 (rule" in log
    assert "9" not in told["message"]
    assert "rows: 9 (rule" in lines(file)
    assert "Doe" not in told["message"] + log + lines(file)


@pytest.mark.case("few rows", "3 filled cells of a numeric column: refused with column, count and remedy")
@pytest.mark.parametrize("rare", ["other", "refuse"])
def test_a_mean_of_few_cells_does_not_leave(tmp_path: Path, rare: str) -> None:
    file = site(tmp_path, ["red"] * ROWS, [*AGES[:3], *[""] * (ROWS - 3)], rare_categories=rare)
    told, log = answer(file)
    assert "so few samples of column 'age' (rule policy.smallest_group: 10): leave it out" in told["message"]
    assert "3 rows have a value" not in told["message"]
    assert "3 rows have a value" in log
    assert "3 rows have a value" in lines(file)


@pytest.mark.threat("rare_categories")
@pytest.mark.case("few rows", "3 missing cells: neither their number nor that there are any; mean and deviation stay")
def test_a_few_missing_cells_are_not_told(tmp_path: Path) -> None:
    ages = [*AGES[:-3], "", "", ""]
    file = site(tmp_path, ["red"] * ROWS, ages)
    given = answer(file)[0]["card"]["given"]
    assert (given["count"], given["any_missing"]) == ([ROWS], [False])
    mean = given["total"][0] / ROWS
    assert mean == pytest.approx(np.mean(AGES[:-3]))
    assert given["squares"][0] / ROWS - mean**2 == pytest.approx(np.var(AGES[:-3]))
    assert "stays here: that age is missing in 3 rows" in lines(file)
    many = answer(site(tmp_path / "many", ["red"] * ROWS, [*AGES[:-10], *[""] * 10]))[0]["card"]["given"]
    assert (many["count"], many["any_missing"]) == ([ROWS - 10], [True])


@pytest.mark.case("few rows", "two columns and the held-out part are too small: numbers at the site only")
def test_all_that_is_in_few_rows_is_one_refusal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wards = ["red"] * 14 + ["blue"] * 7
    ages = [*AGES[:3], *[""] * 18]
    file = site(tmp_path, wards, ages, rare_categories="refuse")
    told, _ = answer(file)
    printed = capsys.readouterr().out
    for part in ("column 'age'", "column 'ward'", "held-out samples", "protocol.test_fraction"):
        assert part in told["message"]
        assert part in printed
    for number in ("3 rows", "rows: 7", "held-out samples: 6"):
        assert number not in told["message"]
        assert number in printed
    assert printed.startswith("warning: ")
    assert printed.count("\n") == 1


@pytest.mark.case("few rows", "sites of 8, 15, 24, 40 and 60 samples at a limit of 10, held out by 0, 0.3 and 0.5")
@pytest.mark.parametrize("samples", [8, 15, 24, 40, 60])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.5])
def test_a_site_knows_what_it_will_refuse_for_its_size(samples: int, share: float, tmp_path: Path) -> None:
    """What `site check` says is what a greeting is answered."""
    file = site(tmp_path, ["red"] * samples, AGES[:samples])
    config = load_site(file)
    output = few_samples(read_holding(config).domain, config.file.policy)
    refused = "error" in answer(file, split={"test_fraction": share, "split": "auto"})[0]
    if output is None:
        assert not refused
    elif "no experiment" in output:
        assert refused
    elif "about" in output:
        low, high = (float(text) for text in re.findall(r"0\.\d\d", output))
        assert refused == (share != 0.0 and not low <= share <= high)
    else:
        assert "test_fraction: 0" in output
        assert refused == (share != 0.0)


@pytest.mark.case("few rows", "every category rare and no number: nothing to encode")
def test_nothing_is_left_to_encode(tmp_path: Path) -> None:
    fields = {**FIELDS, "numeric": []}
    told, _ = answer(site(tmp_path, [f"ward {row // 6}" for row in range(ROWS)], AGES, fields))
    assert "no category is in enough rows" in told["message"]


@pytest.mark.threat("rare_categories")
@pytest.mark.case("few rows", "numbers of patients under categorical of SITE.yaml, also those allowed deliberately")
def test_patients_do_not_leave_as_categories(tmp_path: Path) -> None:
    fields = {**FIELDS, "categorical": ["ward", "who"]}
    with pytest.raises(UserError, match="'who' has 60 different values in 60 rows"):
        read_holding(load_site(site(tmp_path, WARDS, AGES, fields)))
    card = answer(site(tmp_path / "b", WARDS, AGES, {**fields, "many_categories": ["who"]}))[0]["card"]
    assert card["given"]["categories"] == [["blue", "red"], []]
    assert "p17" not in json.dumps(card)


@pytest.mark.case("few rows", "site check: a kit's file without statistics under policy.send is told so")
def test_what_a_table_needs_is_foretold(tmp_path: Path) -> None:
    output = lines(site(tmp_path, ["red"] * ROWS, AGES, send=["weights", "numbers", "accuracy"]))
    assert "statistics under policy.send" in output
    assert "mean, deviation and number of values of age" in output


@pytest.mark.case("exports per site", "a site's card tells nothing of how its file is written")
def test_the_layout_of_a_file_does_not_leave(tmp_path: Path) -> None:
    fields = {
        **FIELDS,
        "id": "who",
        "rename": {"whom": "who", "years": "age"},
        "units": {"age": 0.5},
        "missing_values": {"age": 53},
        "encoding": "cp1252",
    }
    file = site(tmp_path, ["red"] * 30 + ["blue"] * 30, AGES, fields)
    (tmp_path / "t.csv").write_text((tmp_path / "t.csv").read_text().replace("age,ward,ill,who", "years,ward,ill,whom"))
    card = answer(file)[0]["card"]
    # The ages are 50 to 56 in turns; 53 means missing in 8 of 60 rows, fewer than the limit, which is not told.
    values = [age / 2 for age in AGES if age != 53]
    assert card["given"]["total"][0] / card["given"]["count"][0] == pytest.approx(np.mean(values))
    assert card["preprocessing"]["table"]["id"] == "who"
    told = json.dumps(card)
    assert not [word for word in ("years", "whom", "cp1252", "units", "rename", "26.5") if word in told]


@pytest.mark.threat("few_samples")
@pytest.mark.case("few rows", "the name of a patient in the column of classes; the same class, listed by a person")
def test_a_class_of_few_rows_that_nobody_listed_does_not_leave(tmp_path: Path) -> None:
    file = site(tmp_path, ["red"] * ROWS, AGES)
    options, table = yaml.safe_load(file.read_text()), tmp_path / "t.csv"
    rows = [line.split(",") for line in table.read_text().splitlines()]
    for number, row in enumerate(rows[1:]):
        row[2] = "Doe Jane" if number == 7 else ("no", "yes")[number % 2]
    table.write_text("\n".join(map(",".join, rows)) + "\n")
    del options["classes"]
    file.write_text(yaml.safe_dump(options))
    told, log = answer(file)
    assert told["error"] == "Refused"
    assert "names of classes that are in few rows (rule policy.smallest_group: 10)" in told["message"]
    assert "Doe" not in json.dumps(told) + log + lines(file)
    assert "rows: 1" in lines(file)
    file.write_text(yaml.safe_dump({**options, "classes": ["no", "yes", "Doe Jane"]}))
    assert answer(file)[0]["card"]["classes"] == ["no", "yes", "Doe Jane"]
    file.write_text(yaml.safe_dump({**options, "policy": {**options["policy"], "smallest_group": 1}}))
    assert "Doe Jane" in answer(file)[0]["card"]["classes"]


@pytest.mark.case("few rows", "classes 0, 1, 2 of few rows tell nothing by their names")
def test_numbered_classes_may_be_rare(tmp_path: Path) -> None:
    file = site(tmp_path, ["red"] * ROWS, AGES)
    table = tmp_path / "t.csv"
    rows = [line.split(",") for line in table.read_text().splitlines()]
    rows[1][2] = "2"
    table.write_text("\n".join(map(",".join, rows)) + "\n")
    options = yaml.safe_load(file.read_text())
    del options["classes"]
    file.write_text(yaml.safe_dump(options))
    assert answer(file)[0]["card"]["classes"] == ["0", "1", "2"]
