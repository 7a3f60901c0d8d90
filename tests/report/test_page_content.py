"""What the page shows: the numbers of the table, for every reader, with files of every figure."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from urllib.parse import unquote

import numpy as np
import pytest
from page_tables import read

from fedshift.evaluation.predictions import SitePredictions, as_parquet
from fedshift.evaluation.records import RoundRecord, RunResult, SiteMetrics
from fedshift.evaluation.site_bytes import MOST_SITES, SiteBytes, site_bytes
from fedshift.evaluation.site_metrics import Scored
from fedshift.experiment.budgets import budgets
from fedshift.experiment.config.experiment import parse
from fedshift.experiment.plan import common_settings
from fedshift.experiment.protocols.base import Split
from fedshift.json_objects import write_object
from fedshift.report.advice.words import DIFFERENCES, short_kind
from fedshift.report.collect import Collected, collect
from fedshift.report.conditions import role_of
from fedshift.report.details import Details, _sites, experiment_file
from fedshift.report.html import render
from fedshift.report.mistakes import predictions_of
from fedshift.report.page import DARK, LIGHT, page
from fedshift.report.plots import accuracy_at_targets, reliability
from fedshift.report.report import report_of, verdict_of, whole_report
from fedshift.report.run_means import weights_by_layer
from fedshift.report.sections.blocks import Figure, Grid, Text
from fedshift.report.sections.predictions import predictions_section
from fedshift.report.sections.results import _listings, grids, sites_grid
from fedshift.report.table_formats import as_json, markdown

Write = Callable[..., Path]


def files(text: str) -> dict[str, list[list[str]]]:
    """The CSV files of the figures by name."""
    links = re.findall(r'<a download="([^"]*)\.csv" href="data:text/csv;charset=utf-8,([^"]*)"', text)
    return {name: list(csv.reader(io.StringIO(unquote(content), newline=""))) for name, content in links}


def test_page_table_and_json_have_the_same_numbers(experiment: Path) -> None:
    collected = collect(experiment)
    text, table = page(whole_report(collected)), report_of(collected).table
    head, *body = read(text).tables["Accuracy in percent"]
    names = [name for name, _ in head]
    assert names[:2] == ["method", "average"], "a small screen shows the average"
    on_page = {(line[0][0].split()[0], names[at]): line[at] for line in body for at in range(1, len(names))}
    rows = json.loads(as_json(table))
    assert rows
    for row in rows:
        shown, exact = on_page[row["method"], row["target"]]
        assert exact == row["mean"]
        assert shown.split()[0].rstrip("*") == f"{row['mean']:.2f}"
        assert f"{row['mean']:.2f}" in markdown(table)
    numbers = files(text)["accuracy-per-target"]
    assert {(line[0], line[1]): float(line[2]) for line in numbers[1:]} == pytest.approx(
        {(row["method"], row["target"]): row["mean"] for row in rows}, rel=1e-5
    )
    by_round = files(text)["accuracy-per-site"][1:]
    found = {(target, method, number): float(mean) for target, method, number, mean, _ in by_round}
    assert found["M15", "fedavg", "1"] == 82.5, "mean of 81.5 and 83.5"
    assert found["M5", "csac", "2"] == 75.0
    expected = verdict_of(collected).plain()["expected"]
    averages = {row["method"]: row["mean"] for row in rows if row["target"] == "average"}
    assert expected["mean"] in averages.values()
    assert f"{expected['mean']:.2f} %" in text[: text.index('id="result"')], "the verdict heads the page"


def test_what_left_each_site_is_what_the_results_say(tmp_path: Path, write_part: Write) -> None:
    """Every number on the page is that of `result.json`, and those of all sites add up to the table of costs."""
    for target, seed, scale in (("a", 0, 1), ("a", 1, 3), ("b", 0, 10)):
        others = {name: weight * scale for name, weight in {"a": 100, "b": 200, "c": 200}.items() if name != target}
        sites = {
            name: {"up": {"weights": size, "numbers": 8}, "down": {"weights": 50}} for name, size in others.items()
        }
        write_part(
            "fedavg",
            target,
            seed,
            50.0,
            bytes_up={"weights": sum(others.values()), "numbers": 16},
            bytes_down={"weights": 100},
            bytes_by_site=SiteBytes.model_validate({"number": 2, "sites": sites}),
        )
    write_part("old", "a", 0, 50.0)  # a run of before
    text, found = page(whole_report(collect(tmp_path / "runs" / "exp"))), collect(tmp_path / "runs" / "exp").results
    head, *body = read(text).tables["What left each site, in a run"]
    names = [name for name, _ in head]
    assert names == ["method", "site", "runs", "sent: numbers", "sent: models", "sent to it: models"]
    assert {line[0][0] for line in body} == {"fedavg"}
    for way, kind in (("up", "numbers"), ("up", "weights"), ("down", "weights")):
        column = names.index(f"{'sent' if way == 'up' else 'sent to it'}: {short_kind(kind)}")
        own = {
            site: [
                run.bytes_by_site.sites[site][way][kind] for run in found if run.bytes_by_site and site != run.target
            ]
            for site in "abc"
        }
        assert {site: (line[2][1], line[column][1]) for line in body for site in line[1][0].split(", ")} == {
            site: (len(sizes), sum(sizes) / len(sizes)) for site, sizes in own.items()
        }
        whole = sum(line[2][1] * line[column][1] * len(line[1][0].split(", ")) for line in body)  # type: ignore[operator]
        assert whole == sum(getattr(run, f"bytes_{way}").get(kind, 0) for run in found if run.method == "fedavg")


def test_the_range_over_very_many_sites(write_part: Write) -> None:
    many = {f"site-{n}": {"up": {"weights": n}, "down": {"weights": 7}} for n in range(MOST_SITES + 1)}
    folder = write_part("fedavg", "a", 0, 50.0, bytes_by_site=site_bytes(many))
    _, *body = read(page(whole_report(collect(folder.parents[2])))).tables["What left each site, in a run"]
    assert [(line[1][0].split()[0], line[2][1], line[3][1]) for line in body] == [
        ("least", 0.0, 7.0), ("median", MOST_SITES / 2, 7.0), ("most", MOST_SITES, 7.0),
    ]  # fmt: skip
    assert all(f"{MOST_SITES + 1}" in line[1][0] for line in body)


def test_a_pool_is_told_from_a_site(write_part: Write) -> None:
    raw = {"up": {"raw_data": 9}, "down": {}}
    sites = {"Liverpool": raw, "b": raw, "pool": {"up": {"weights": 4}, "down": {}}}
    folder = write_part("deepall", "a", 0, 50.0, bytes_by_site=site_bytes(sites))
    text = page(whole_report(collect(folder.parents[2])))
    rows = {line[1][0] for line in read(text).tables["What left each site, in a run"][1:]}
    assert rows == {"b, Liverpool", "pool"}
    assert "pool: the place" in text
    del sites["pool"]
    folder = write_part("deepall", "a", 1, 50.0, experiment="other", bytes_by_site=site_bytes(sites))
    assert "pool: the place" not in page(whole_report(collect(folder.parents[2])))


def test_every_reader_can_use_it(experiment: Path) -> None:
    text = page(whole_report(collect(experiment)))
    found = read(text)
    assert found.scopes == {"col", "row"}
    assert text.count("<table") == len(re.findall(r"<table[^>]*>\s*<caption>[^<]", text)), "every table has a title"
    assert found.regions == text.count("<table") + text.count("<figure"), "whatever scrolls can be reached by key"
    figures = re.findall(r'<figure id="figure-([^"]*)">(.*?)</figure>', text, flags=re.S)
    assert figures
    assert all('class="svg-file"' in body and "aria-label" in body and "<figcaption>" in body for _, body in figures)
    assert {name for name, _ in figures} == set(files(text)), "every figure has its numbers"
    assert text.count("<h1>") == 1
    assert 'lang="en"' in text
    assert "aria-sort" in text


def luminance(color: str) -> float:
    channels = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("colors", [LIGHT, DARK], ids=["light", "dark"])
def test_contrast(colors: dict[str, str]) -> None:
    """WCAG 2: 4.5 for text and links, 3 for lines of a figure."""

    def contrast(one: str, other: str) -> float:
        low, high = sorted((luminance(colors[one]), luminance(colors[other])))
        return (high + 0.05) / (low + 0.05)

    for text in ("ink", "faint", "s0"):
        for ground in ("paper", "wash"):
            assert contrast(text, ground) >= 4.5, (text, ground)
    assert all(contrast(f"s{number}", "paper") >= 3 for number in range(8))
    assert LIGHT.keys() == DARK.keys()


def details(collected: Collected) -> Details:
    found = whole_report(collected).details
    assert found is not None
    return found


def shown(block: Grid | None) -> list[list[str]]:
    """The text of a grid as the page shows it."""
    assert block is not None
    (rows,) = read(render("grids.html", grids=[block])).tables.values()
    return [[text for text, _ in row] for row in rows]


def test_who_sees_samples_is_said_at_every_method(write_part: Write) -> None:
    write_part("fedavg", "t", 0, 50.0)
    write_part("alone", "t", 0, 50.0, options={"method": {"name": "alone"}})
    collected = collect(write_part("deepall", "t", 0, 50.0, bytes_up={"raw_data": 9}).parents[2])
    roles = {result.method: role_of(result) for result in collected.results}
    _, *body = shown(grids(report_of(collected).table, roles)[0])
    assert [line[0] for line in body] == ["alone each site alone", "deepall not private", "fedavg samples stay"]


def test_sizes_and_classes_of_sites(write_part: Write) -> None:
    sizes = {"training_samples": {"a": 70}, "held_out_samples": {"a": 30}, "measured_samples": {"t": 100}}
    found = SiteMetrics(site="t", part="target", samples=100, support=[75, 25], values={})
    folder = write_part("m", "t", 0, 75.0, data=sizes, sites=[found])
    names, *body = shown(sites_grid(details(collect(folder)).sites))
    lines = {line[0]: dict(zip(names, line, strict=True)) for line in body}
    assert (lines["a"]["training"], lines["a"]["held out"], lines["a"]["measured"]) == ("70", "30", "–")
    assert (lines["t"]["measured"], lines["t"]["cat, %"], lines["t"]["<dog>, %"]) == ("100", "75.0", "25.0")


def test_metrics_show_no_empty_columns_and_count_the_classes(write_part: Write) -> None:
    """Three classes have no sensitivity; two targets of equal sizes share a sentence."""
    values = {"accuracy": 50.0, "auroc": 75.0}
    for target in ("a", "b", "c"):
        support = [1200, None, 3] if target != "c" else [1, 2, 3]
        site = {"site": target, "part": "target", "samples": 1205, "support": support, "values": values}
        folder = write_part(
            "fedavg", target, 0, 50.0, classes=["x", "y", "z"], sites=[SiteMetrics.model_validate(site)]
        )
    text = page(whole_report(collect(folder.parents[2])))
    head, *rows = read(text).tables["Metrics of the last round"]
    assert [name for name, _ in head] == ["method", "target", "most frequent", "accuracy", "AUROC"]
    assert [line[-1][1] for line in rows] == [75.0] * 3
    assert "Sensitivity" not in text
    assert "Samples at a, b: 1,200 of x, – of y, 3 of z." in text
    assert "Samples at c: 1 of x, 2 of y, 3 of z." in text


def test_panels_layers_shares_and_reliability() -> None:
    low, high = {"a": ([1, 2], [10.0, 20.0], None)}, {"a": ([1, 2], [80.0, 95.0], None)}
    axes = accuracy_at_targets({"x": high, "y": low, "z": high, "u": low}).axes
    assert all(ax.get_ylim()[0] <= 10 and ax.get_ylim()[1] >= 95 for ax in axes)

    def line(number: int, share: float) -> RoundRecord:
        weights = {"conv": {"a": share, "b": 1 - share}, "head": {"a": 0.5, "b": 0.5}}
        return RoundRecord(round=number, target_accuracy={}, seconds=1, mini_batches=1, aggregation_weights=weights)

    found = weights_by_layer([[line(1, 0.5), line(2, 0.9)], [line(1, 0.5), line(2, 0.7)]])
    assert list(found) == ["conv", "head"]
    rounds, mean, _ = found["conv"]["a"]
    assert (rounds, mean) == ([1, 2], [0.5, pytest.approx(0.8)])
    assert weights_by_layer([[line(1, 0.5).model_copy(update={"aggregation_weights": {"a": 1.0}})]]) == {}

    def run(*classes: str) -> RunResult:
        return RunResult.model_construct(
            data={"training_samples": {"a": 10}},
            classes=list(classes),
            sites=[SiteMetrics.model_construct(site="a", support=[4, 6], samples=10)],
        )

    alike, other = _sites([run("cat", "dog"), run("cat", "dog")]), _sites([run("cat", "dog"), run("cat", "fox")])
    assert (alike.ranges["a"]["training"], alike.shares) == ((10, 10), {"a": [40.0, 60.0]})
    assert (other.ranges, other.shares) == (alike.ranges, {})
    figure = reliability({"fedavg": [(20.0, 30.0, 5), (80.0, 60.0, 5)]})
    assert figure.axes[0].get_lines()[-1].get_xydata().tolist() == [[20.0, 30.0], [80.0, 60.0]]
    assert figure.axes[0].get_xlabel().startswith("score")


@pytest.mark.parametrize("training", [{"rounds": 8}, {"rounds": 8, "mini_batches": 70}])
def test_the_file_on_the_page_is_the_experiment(write_part: Write, training: dict[str, int]) -> None:
    """Records of runs give back the file that they were made from. Sites differ in size, so budgets are rounded."""
    given = parse(
        {
            "name": "exp",
            "data": {"name": "rotated_digits", "per_class": 5, "size": 8},
            "protocol": {"targets": ["a", "b"], "seeds": [0, 3]},
            "model": {"name": "linear"},
            "training": training,
            "methods": [{"name": "deepall"}, {"name": "csac", "setting": "practical"}],
        }
    )
    sizes = {"a": 100, "b": 333, "c": 210}
    for method in given.methods:
        for target in ("a", "b"):
            rows = {site: np.arange(size) for site, size in sizes.items() if site != target}
            split = Split(train=rows, held_out={}, measured={}, unlabelled={})
            budget = budgets(method, given.methods, given.training, split)
            options = common_settings(given, method)
            options |= {"training": {**options["training"], "mini_batches": budget}, "target": target, "seed": 0}
            options |= {"engine": given.dump()["engine"], "device": given.device, "versions": {"torch": "2.4"}}
            data = {"training_samples": {site: len(found) for site, found in rows.items()}}
            for seed in (0, 3):
                folder = write_part(method.display, target, seed, 50.0, options=options, data=data).parents[2]
    write_object(folder / "order.json", {"methods": ["deepall", "csac"]})
    assert parse(experiment_file(collect(folder))).dump() == given.dump()


def test_the_page_says_why_it_shows_no_mistakes(write_part: Write) -> None:
    folder = write_part("m", "t", 0, 50.0)
    section = predictions_section(predictions_of(collect(folder.parents[2]).runs, "m"))
    (said,) = section.blocks
    assert isinstance(said, Text)
    assert "no confusion matrices" in said.text


def test_mistakes_of_the_chosen_method(write_part: Write) -> None:
    labels = np.array([0, 0, 1, 1])
    for seed, scores in enumerate([[0.1, 0.99, 0.8, 0.4], [0.1, 0.95, 0.8, 0.7]]):
        given = np.array([[1 - score, score] for score in scores], dtype=np.float32)
        scored = Scored(labels, given.argmax(1), given)
        folder = write_part("m", "t", seed, 50.0)
        kept = SitePredictions("t", "target", np.arange(4), ["w", "x", "y", "z"], scored)
        (folder / "predictions.parquet").write_bytes(as_parquet([kept], ["cat", "<dog>"], {}))
    section = predictions_section(predictions_of(collect(folder.parents[2]).runs, "m"))
    drawn = [block for block in section.blocks if isinstance(block, Figure)]
    tables = read(render("grids.html", grids=[block for block in section.blocks if isinstance(block, Grid)])).tables
    _, *worst = tables["Worst mistakes of m"]
    assert [[text for text, _ in line] for line in worst] == [
        ["x", "t", "cat", "<dog>", "97", "2 of 2"],
        ["z", "t", "<dog>", "cat", "30", "1 of 2"],
    ]
    _, cat, dog = tables["Confusion matrix of m"]
    assert [exact for _, exact in cat[2:]] == [50.0, 50.0]
    assert [exact for _, exact in dog[2:]] == [25.0, 75.0]
    roc = list(csv.reader(io.StringIO(drawn[0].csv, newline="")))
    assert roc[1][:4] == ["t", "m", "0", "0"]
    assert roc[-1][:4] == ["t", "m", "100", "100"]


@pytest.mark.parametrize("number", [1, 5, 6, 7, 8, 20])
def test_many_differences_unfold_and_none_is_lost(number: int) -> None:
    lines = tuple(f"line {at}" for at in range(number))
    first, *more = _listings(DIFFERENCES, lines)
    assert first.items[-1] == lines[-1]  # says how they were corrected
    assert sorted([*first.items, *(line for part in more for line in part.items)]) == sorted(lines)
    assert [(part.folds, part.title) for part in more] == [(True, f"{number - 6} more differences")] * (number > 7)
