"""Tables and the page of results that hold further metrics by site: other measures, intervals, warnings."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from fedshift.errors import UserError
from fedshift.evaluation.cautions import cautions
from fedshift.evaluation.records import SiteMetrics
from fedshift.json_objects import write_object
from fedshift.report.collect import collect
from fedshift.report.page import page
from fedshift.report.report import report_of, whole_report
from fedshift.report.run_means import pooled_reliability
from fedshift.report.table_formats import as_json, markdown

Write = Callable[..., Path]


def site(name: str, accuracy: float, auroc: float | None, support: tuple[int, int] = (60, 40)) -> SiteMetrics:
    values = {"accuracy": accuracy} | ({} if auroc is None else {"auroc": auroc})
    return SiteMetrics.model_validate(
        {
            "site": name,
            "part": "target",
            "samples": sum(support),
            "support": list(support),
            "values": values,
            "intervals": {metric: (value - 8, min(value + 4, 100.0)) for metric, value in values.items()},
            "reliability": [(20.0, 10.0, 30), (80.0, 100.0, 10)],
        }
    )


@pytest.fixture
def measured(tmp_path: Path, write_part: Write) -> Path:
    """Two methods at two targets with two seeds; at north 60 % are of one class, at south all but 5 %."""
    values = {"fedavg": {"north": (80, 82), "south": (90, 92)}, "csac": {"north": (84, 86), "south": (96, 98)}}
    for method, by_target in values.items():
        for target, by_seed in by_target.items():
            for seed, accuracy in enumerate(by_seed):
                support = (60, 40) if target == "north" else (95, 5)
                found = site(target, accuracy, accuracy - 10, support)
                write_part(method, target, seed, accuracy, sites=[found], warnings=["something odd"])
    return tmp_path / "runs" / "exp"


def test_other_measures_the_worst_site_and_intervals(measured: Path) -> None:
    rows = json.loads(as_json(report_of(collect(measured), "last", "auroc").table))
    places = [(row["method"], row["target"]) for row in rows]
    assert places == [(row["method"], row["target"]) for row in json.loads(as_json(report_of(collect(measured)).table))]
    first = rows[0]
    assert (first["mean"], first["seeds"], first["majority"]) == (75.0, [74.0, 76.0], 60.0)
    assert first["interval"] == [67.0, 79.0]
    assert "interval" not in rows[2]  # of an average
    with pytest.raises(UserError, match="auroc"):
        report_of(collect(measured), "last", "aurco")
    with pytest.raises(UserError, match="dice"):
        report_of(collect(measured), "last", "dice")
    worst = next(one for one in report_of(collect(measured)).table.more if "worst site" in one.columns)
    cells = {(method, name): cell for method, line in worst.cells.items() for name, cell in line.items() if cell}
    assert cells["fedavg", "worst site"].row.seeds == [80.0, 82.0]
    assert cells["fedavg", "gap between sites"].row.seeds == [10.0, 10.0]
    assert not any(cell.best for cell in cells.values())  # no test says what differs there
    assert "csac north, fedavg north" in markdown(worst)
    text = markdown(next(one for one in report_of(collect(measured)).table.more if "interval" in one.measure.title))
    assert "| fedavg | 73.00 to 85.00 | 83.00 to 95.00 |" in text
    results = [run.result for run in collect(measured).runs][:2]
    first = results[0].sites[0].model_copy(update={"reliability": [(25.0, 40.0, 90)]})
    pooled = pooled_reliability([results[0].model_copy(update={"sites": [first]}), results[1]])
    assert pooled == [(pytest.approx(23.75), pytest.approx(32.5), 120), (80.0, 100.0, 10)]


def test_old_results_have_dashes_and_say_why(experiment: Path) -> None:
    found = report_of(collect(experiment), "last", "auroc").table
    assert {cell for line in found.cells.values() for cell in line.values()} == {None}
    assert "run the experiment again" in markdown(found)
    assert json.loads(as_json(found)) == []


def test_the_headline_is_the_first_table_and_the_pages(measured: Path) -> None:
    write_object(measured / "order.json", {"headline": "auroc"})
    found = collect(measured)
    assert report_of(found).table.measure.name == "AUROC"
    text = page(whole_report(found))
    assert "AUROC in percent" in text
    assert "Accuracy over training" in text


def test_a_method_below_the_majority_class_is_a_warning(measured: Path) -> None:
    (said,) = (text for text in cautions(collect(measured).results) if "less accurate" in text)
    assert "fedavg" in said
    assert "south (91.00 < 95.00)" in said
    assert "csac" not in said
    assert "north" not in said
    text = markdown(report_of(collect(measured)).table)
    assert "north 60.00, south 95.00" in text
    assert said.replace("<", "\\<") in text
    assert "something odd" in text
    assert "south (91.00 &lt; 95.00)" in page(whole_report(collect(measured)))


def test_one_class_and_rates_that_differ_are_warnings(write_part: Write, tmp_path: Path) -> None:
    write_part("fedavg", "north", 0, 90.0, sites=[site("north", 90.0, None, (100, 0))])
    write_part("fedavg", "south", 0, 90.0, sites=[site("south", 90.0, 80.0, (60, 40))])
    said = cautions(collect(tmp_path / "runs" / "exp").results)
    assert any("one class only" in text and "north (cat)" in text and "south" not in text for text in said)
    assert any("60.0 %" in text and "100.0 % at north" in text for text in said)
    found = report_of(collect(tmp_path / "runs" / "exp"), "last", "auroc").table
    assert found.cells["fedavg"]["north"] is None
    assert found.cells["fedavg"]["average"].partial
