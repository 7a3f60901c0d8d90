"""``benchmarks/papers.py``: our numbers beside the published ones, from a small catalogue."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
import torch
import yaml
from calling import Cli, called

from fedshift.evaluation.records import RoundRecord, RunResult
from fedshift.evaluation.selection import selected_rounds
from fedshift.json_objects import write_object
from fedshift.weights import Weights
from paper_tables.catalogue import read
from paper_tables.distances import ACROSS, WITHIN, distances

EXPERIMENT = {
    "name": "tiny",
    "data": {"name": "rotated_digits", "per_class": 2, "angles": [0, 15, 30]},
    "protocol": {"targets": ["D0", "D15"], "seeds": [0, 1]},
    "model": {"name": "mlp", "hidden": [2]},
    "training": {"rounds": 1},
    "methods": [{"name": "fedavg"}, {"name": "fedavg", "label": "better"}],
    "evaluation": {"resamples": 0, "predictions": False},
    "engine": {"name": "local", "threads": 1},
    "device": "cpu",
}
ENTRIES = [
    {
        "name": "table",
        "paper": "A paper",
        "shows": "Table 1",
        "experiments": ["tiny"],
        "panels": [
            {
                "published": "numbers",
                "rows": {"Better": "better", "FedAvg": "fedavg"},
                "columns": {"zero": "D0", "average": "average"},
                "baseline": "FedAvg",
            },
            {"title": "curves", "kind": "rounds", "rows": {"FedAvg": "fedavg"}},
            {"title": "weights", "kind": "weights", "site": "D30", "rows": {"FedAvg": "fedavg"}},
            {"title": "at D15", "kind": "rounds", "rows": {"FedAvg": {"method": "fedavg", "target": "D15"}}},
            {"title": "a layer", "kind": "weights", "layer": "layer", "rows": {"FedAvg": {"method": "fedavg"}}},
        ],
    },
    {
        "name": "elsewhere",
        "paper": "A paper",
        "shows": "Table 2",
        "missing": "Its images.",
        "panels": [{"published": "numbers", "rows": {"FedAvg": ""}, "columns": {"average": "average"}}],
    },
    {"name": "folder", "paper": "B paper", "shows": "Table 1", "experiments": [{"file": "folder", "set": ["name=f"]}]},
]
PUBLISHED = {
    "numbers": {
        "source": "A paper, Table 1",
        "rows": {
            "Better": {"zero": [90.0, 0.5], "average": [91.0, None]},
            "FedAvg": {"zero": [80.0, None], "average": [85.5, None]},
            "Other": {"zero": [1.0, None], "average": [2.0, None]},
        },
    }
}


def finish(folder: Path, method: str, target: str, seed: int, accuracy: float) -> None:
    """Write a run of two rounds whose last accuracy is ``accuracy``."""
    place = folder / "results" / "tiny" / method / target / f"seed-{seed}"
    place.mkdir(parents=True)
    rounds = [
        RoundRecord(
            round=number,
            target_accuracy={target: accuracy - 2 + number},
            seconds=1.0,
            mini_batches=number,
            bytes={},
            aggregation_weights={"D30": 0.25 * number, "layer": {"D15": 0.1 * number, "D30": 0.2 * number}},
        )
        for number in (1, 2)
    ]
    (place / "rounds.jsonl").write_text("".join(record.model_dump_json() + "\n" for record in rounds))
    result = RunResult(
        method=method,
        target=target,
        seed=seed,
        selected=selected_rounds(rounds),
        classes=["0", "1"],
        rounds=2,
        seconds=1.0,
        mini_batches=2,
        threads=1,
        device="cpu",
        options={},
        data={},
    )
    (place / "result.json").write_text(result.model_dump_json())


@pytest.fixture
def papers(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    """Call ``python benchmarks/papers.py ARGUMENTS`` in this process."""
    from papers import main

    return called("papers.py", main, monkeypatch, capsys)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A catalogue whose experiment lacks one run: fedavg at D15 with seed 1."""
    (tmp_path / "experiments").mkdir()
    (tmp_path / "experiments" / "tiny.yaml").write_text(yaml.safe_dump(EXPERIMENT))
    images = {**EXPERIMENT, "data": {"name": "image_folder", "root": "no-such-folder"}}
    (tmp_path / "experiments" / "folder.yaml").write_text(yaml.safe_dump(images))
    (tmp_path / "papers.yaml").write_text(yaml.safe_dump(ENTRIES, sort_keys=False))
    (tmp_path / "published.json").write_text(json.dumps(PUBLISHED))
    for seed in (0, 1):
        for target, accuracy in (("D0", 80.0), ("D15", 90.0)):
            finish(tmp_path, "better", target, seed, accuracy + 4 + seed)
            if (target, seed) != ("D15", 1):
                finish(tmp_path, "fedavg", target, seed, accuracy + seed)
    return tmp_path


def line(text: str, *words: str) -> list[str]:
    """The words of the first line that begins with ``words``."""
    return next(found for row in text.splitlines() if (found := row.split())[: len(words)] == list(words))


def test_the_list_says_what_is_finished_and_what_is_missing(
    papers: Cli, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    long = "a-name-that-is-typed"
    (folder / "papers.yaml").write_text(yaml.safe_dump([ENTRIES[0], {**ENTRIES[1], "name": long}, ENTRIES[2]]))
    text = papers("list", "--folder", folder).out
    assert line(text, long), "no name is broken into two lines"
    assert "7 of 8 runs finished" in text
    assert "Its images." in text
    assert "no-such-folder" in "".join(text.split()), "a long path is whole"


def test_differences_to_the_published_row(papers: Cli, folder: Path) -> None:
    said = papers("table", "table", "--folder", folder, "--no-run")
    assert said.code == 0, said.err
    rows = [row.split() for row in said.out.splitlines()]
    ours = rows.index(["Better", "ours", "84.50", "±0.50", "89.50", "±0.50"])
    assert rows[ours + 1] == ["published", "90.00", "±0.50", "91.00"]
    assert rows[ours + 2] == ["difference", "-5.50", "-1.50"]
    assert line(said.out, "FedAvg", "ours") == [
        "FedAvg",
        "ours",
        "80.50",
        "±0.50",
        "85.00",
    ]  # one seed has both targets
    assert "Better over FedAvg, average over targets: ours +4.00 (1 seed), published +5.50" in said.out
    assert "Other" in line(said.out, "published", "rows")


def test_other_data_have_no_difference_and_fewer_targets_no_average(papers: Cli, folder: Path) -> None:
    entries = [{**ENTRIES[0], "panels": [{**ENTRIES[0]["panels"][0], "comparable": False}]}]
    (folder / "papers.yaml").write_text(yaml.safe_dump(entries, sort_keys=False))
    for seed in (0, 1):
        place = folder / "results" / "tiny" / "better" / "D15" / f"seed-{seed}"
        (place / "result.json").unlink()
    said = papers("table", "table", "--folder", folder, "--no-run")
    assert line(said.out, "Better", "ours")[-1] == "–"
    assert "difference" not in said.out


@pytest.mark.slow
def test_a_figure_and_its_numbers(papers: Cli, folder: Path) -> None:
    said = papers("figure", "table", "--folder", folder, "--out", folder / "out", "--no-run")
    assert said.code == 0, said.err
    assert (folder / "out" / "table.svg").read_text().count("(published)") == 2
    rows = list(csv.reader((folder / "out" / "table.csv").read_text().splitlines()))
    assert ["", "Better", "published", "zero", "90.0000", "0.5000"] in rows
    assert ["", "Better", "ours", "average", "89.5000", "0.5000"] in rows
    assert [row[3:5] for row in rows if row[0] == "curves"] == [["1", "84.0000"], ["2", "85.0000"]]
    assert [row[3:5] for row in rows if row[0] == "weights"] == [["1", "0.2500"], ["2", "0.5000"]]
    assert [row[4] for row in rows if row[0] == "at D15"] == ["89.0000", "90.0000"]
    assert [(row[1], row[4]) for row in rows if row[0] == "a layer"] == [
        ("D15", "0.1000"),
        ("D15", "0.2000"),
        ("D30", "0.2000"),
        ("D30", "0.4000"),
    ]


def test_distances_within_a_domain_and_across() -> None:
    """By hand: both sites of a are 2 apart, and 3 and 1 from the site of b; the norms are 2, 4 and 5."""
    at = {"a.1": 2.0, "a.2": 4.0, "b.1": 5.0}
    models = {site: Weights({"w.weight": torch.tensor([[x]]), "w.bias": torch.tensor([x])}) for site, x in at.items()}
    norm = (2 + 4 + 5) / 3
    found = distances(models)
    assert found[WITHIN] == pytest.approx({"w": 2 / norm})
    assert found[ACROSS] == pytest.approx({"w": (3 + 1) / 2 / norm})


def test_features_are_drawn_by_class_and_by_site(papers: Cli, folder: Path) -> None:
    panels = [{"title": by, "kind": "features", "by": by, "rows": {"FedAvg": "fedavg"}} for by in ("class", "site")]
    (folder / "papers.yaml").write_text(yaml.safe_dump([{**ENTRIES[0], "panels": panels}]))
    points = [{"class": "9", "site": "D0", "x": 1.5, "y": -2.0}, {"class": "9", "site": "D15", "x": 3.0, "y": 4.0}]
    write_object(folder / "results" / "tiny" / "features.json", {"fedavg": points, "better": points[:1]})
    assert papers("figure", "table", "--folder", folder, "--out", folder, "--no-run").code == 0
    assert [row[:2] + row[3:5] for row in csv.reader((folder / "table.csv").read_text().splitlines()[1:])] == [
        ["class", "9", "1.5", "-2.0000"],
        ["class", "9", "3", "4.0000"],
        ["site", "D0", "1.5", "-2.0000"],
        ["site", "D15", "3", "4.0000"],
    ]


def test_a_leakage_record_is_drawn_by_the_better_attack(papers: Cli, folder: Path) -> None:
    entry = {**ENTRIES[0], "panels": [{"kind": "leakage"}]}
    (folder / "papers.yaml").write_text(yaml.safe_dump([entry]))
    record = folder / "results" / "tiny" / "leakage.json"
    cases = [{"exchange": "batch", "batch": 4, "ssim": ssim} for ssim in ([0.1, 0.3], [0.5, 0.7])]
    write_object(record, {"cases": cases})
    assert papers("figure", "table", "--folder", folder, "--out", folder, "--no-run").code == 0
    assert "gradient of a mini-batch,ours,4,0.6000," in (folder / "table.csv").read_text()
    record.write_text("{}")
    assert "leakage.json" in papers("figure", "table", "--folder", folder, "--no-run").error()


def test_bench_runs_what_is_unfinished_and_nothing_else(
    papers: Cli, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    catalogue, asked = read(folder), []
    monkeypatch.setattr("papers.run_experiment", lambda *given: asked.append(given[:2]))
    assert papers("table", "table", "--folder", folder).code == 0
    assert papers("figure", "table", "--folder", folder, "--out", folder).code == 0
    assert [(experiment.name, runs) for experiment, runs in asked] == [("tiny", folder / "results")] * 2
    finish(folder, "fedavg", "D15", 1, 91.0)
    assert catalogue.state(catalogue.entry("table").experiments[0]).done
    assert (papers("table", "table", "--folder", folder).code, len(asked)) == (0, 2)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("table", "tabel"), "table"),
        (("table", "elsewhere"), "Its images."),
        (("table", "folder"), "no-such-folder"),
        (("figure", "folder"), "no-such-folder"),
        (("figure", "folder", "--no-run"), "--run"),
    ],
)
def test_what_cannot_be_done_is_one_line(papers: Cli, folder: Path, words: tuple[str, ...], said: str) -> None:
    assert said in papers(*words, "--folder", folder).error()


def test_without_the_benchmarks_folder(papers: Cli, tmp_path: Path) -> None:
    assert "papers.yaml" in papers("list", "--folder", tmp_path).error()


def test_a_typing_error_in_the_catalogue_is_named(papers: Cli, folder: Path) -> None:
    (folder / "papers.yaml").write_text(yaml.safe_dump([{"name": "x", "paper": "p", "shows": "s"}]))
    assert "name an experiment" in papers("list", "--folder", folder).error()
