"""Segmentation from the experiment file to table, page and predicted masks; what does not go with it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import fedshift
from fedshift.api import Results
from fedshift.cli.app import app
from fedshift.data.builders.discs_and_cups import DiscsAndCups
from fedshift.data.checks import check_dataset
from fedshift.data.domain import Domain
from fedshift.deploy.audit.leakage import audit_leakage
from fedshift.errors import UserError
from fedshift.evaluation.metrics import harmonic_mean
from fedshift.evaluation.stored import read_rounds
from fedshift.experiment.config.experiment import parse
from fedshift.experiment.predict import load_model
from fedshift.functional.losses import task_loss
from fedshift.models import registry
from fedshift.models.networks.unet import UNet
from fedshift.report.page import page
from fedshift.report.report import report_of, whole_report

TINY: dict[str, Any] = {
    "name": "tiny",
    "data": {"name": "discs_and_cups", "size": 32, "per_site": 6},
    "protocol": {"targets": "east", "seeds": [0], "test_fraction": 0.34},
    "model": {"name": "unet", "levels": 3, "width": 4, "threshold": 0.5},
    "training": {"rounds": 3, "batch_size": 2, "optimizer": "adam", "lr": 0.01},
    "methods": [{"name": "deepall"}, {"name": "fedavg"}, {"name": "elcfs", "window": 0.05}],
    "engine": {"threads": 1},
    "device": "cpu",
}
FROZEN = {"name": "frozen", "backbone": {"name": "resnet18", "pretrained": True}}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return fedshift.run(TINY, tmp_path_factory.mktemp("runs"))


@pytest.mark.slow
def test_records_hold_dice_and_hd95(finished: Results) -> None:
    for run in finished.runs:
        assert run.metric == "dice"
        assert run.classes == ["cup", "disc"]
        last = run.selected["last"]
        assert 0 < last.hd95 < 31 * 2**0.5
        assert last.accuracy == pytest.approx(np.mean([value for value in last.per_class if value is not None]))
        assert len(last.per_class) == 2
        assert last.source_accuracy is not None
        folder = finished.folder / run.method / "east" / "seed-0"
        records = read_rounds(folder / "rounds.jsonl")
        assert records[-1].hd95_mean == last.hd95
        assert set(records[-1].source_accuracy) == {"north", "south", "west"}
        losses = list(records[-1].losses.values())
        assert all(0 < loss < 3 for loss in losses)
    assert {run.method: sorted(run.bytes_up) for run in finished.runs} == {
        "deepall": ["numbers", "raw_data", "weights"],
        "fedavg": ["numbers", "weights"],
        "elcfs": ["numbers", "spectra", "weights"],
    }


@pytest.mark.slow
def test_tables_and_page_name_the_metric(finished: Results) -> None:
    text = finished.markdown()
    assert "Dice coefficient in percent, n = 1 seed" in text
    assert "HD95, the 95th percentile of the Hausdorff distance, in pixels (less is better), n = 1 seed" in text
    assert "ccuracy" not in text
    told = CliRunner().invoke(app, ["table", str(finished.folder), "--format", "latex"])
    assert told.stdout.count(r"\begin{tabular}") == 2
    rows = json.loads(CliRunner().invoke(app, ["table", str(finished.folder), "--format", "json"]).stdout)
    assert [row["method"] for row in rows if row["target"] == "east"] == ["deepall", "fedavg", "elcfs"]
    text = page(whole_report(finished.collected))
    for words in (
        "Dice coefficient over training",
        "HD95",
        "Per structure",
        "dice coefficient, %",
    ):
        assert words in text
    dice = report_of(finished.collected).table
    (distance,) = dice.more
    assert (dice.measure.less_is_better, distance.measure.less_is_better) == (False, True)
    for table in (dice, distance):
        cells = [table.cells[method]["east"] for method in table.methods]
        assert not any(cell.best for cell in cells if cell is not None)


@pytest.mark.slow
@pytest.mark.usefixtures("shared_workers")
def test_workers_give_the_same_weights(finished: Results, tmp_path: Path) -> None:
    pool = fedshift.run({**TINY, "engine": {"threads": 1, "workers": 2}}, tmp_path)
    for method in ("fedavg", "elcfs"):
        one, two = (
            load_file(runs / method / "east" / "seed-0" / "model.safetensors")
            for runs in (finished.folder, pool.folder)
        )
        assert all(torch.equal(one[key], two[key]) for key in one)


@pytest.mark.slow
def test_masks_are_predicted_into_a_folder(finished: Results, tmp_path: Path) -> None:
    images = DiscsAndCups(size=32, per_site=6).build().domains["north"].inputs
    (tmp_path / "images").mkdir()
    for index in range(2):
        Image.fromarray(np.asarray(images)[index].transpose(1, 2, 0)).save(tmp_path / "images" / f"eye{index}.png")
    run = finished.folder / "fedavg" / "east" / "seed-0"
    told = CliRunner().invoke(app, ["predict", str(run), str(tmp_path / "images"), "--masks", str(tmp_path / "out")])
    assert told.exit_code == 0, told.output
    model = load_model(run)
    scores = model.network((torch.from_numpy(np.asarray(images)[:2]).float() / 255 - 0.5) / 0.5)
    expected = UNet(levels=3, width=4, threshold=0.5).masks(scores.detach())
    for index in range(2):
        for number, structure in enumerate(("cup", "disc")):
            file = tmp_path / "out" / structure / f"eye{index}.png"
            assert str(file) in told.stdout
            np.testing.assert_array_equal(np.asarray(Image.open(file)) > 0, expected[index, number])
    with pytest.raises(UserError, match="--masks FOLDER"):
        model.predict(tmp_path / "images")


@pytest.mark.parametrize(
    "structure", ["../escaped", "..", ".", "", "cup/left", "{folder}/escaped", "..\\escaped", "cup\nleft", "cup\0"]
)
def test_a_model_file_does_not_say_where_masks_go(structure: str, finished: Results, tmp_path: Path) -> None:
    run = finished.folder / "fedavg" / "east" / "seed-0"
    classes = [structure.replace("{folder}", str(tmp_path)), "disc"]
    metadata = {"fedshift": json.dumps({**load_model(run).metadata, "classes": classes})}
    save_file(load_file(run / "model.safetensors"), tmp_path / "model.safetensors", metadata)
    Image.new("RGB", (32, 32)).save(tmp_path / "eye.png")
    before = set(tmp_path.rglob("*"))
    with pytest.raises(UserError, match="name of a folder") as caught:
        load_model(tmp_path).write_masks(tmp_path / "eye.png", tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert set(tmp_path.rglob("*")) == before


def test_masks_do_not_follow_a_link_out_of_their_folder(finished: Results, tmp_path: Path) -> None:
    for name in ("out", "elsewhere"):
        (tmp_path / name).mkdir()
    (tmp_path / "out" / "disc").symlink_to(tmp_path / "elsewhere")
    Image.new("RGB", (32, 32)).save(tmp_path / "eye.png")
    model = load_model(finished.folder / "fedavg" / "east" / "seed-0")
    with pytest.raises(UserError, match=str(tmp_path / "out")):
        model.write_masks(tmp_path / "eye.png", tmp_path / "out")
    assert not list((tmp_path / "elsewhere").iterdir())


@pytest.mark.slow
def test_both_sides_of_a_pair_and_a_style_before_training(tmp_path: Path) -> None:
    protocol = {"kind": "source_target", "pairs": [[["north", "south"], "east"]], "splits": 1}
    methods = [{"name": "fedavg"}, {"name": "ccst", "style_space": "pixel", "style_mode": "overall"}]
    found = fedshift.run({**TINY, "protocol": protocol, "methods": methods}, tmp_path)
    whole = report_of(found.collected).table
    titles = [each.measure.title for each in (whole, *whole.more)]
    assert titles == [
        "Harmonic mean of both Dice coefficients",
        "Dice coefficient at the labelled sites, part held out",
        "Dice coefficient at the unlabelled sites",
        "HD95 at the unlabelled sites",
        "Proxy A-distance",
    ]
    text = found.markdown()
    assert "ccuracy" not in text
    shown = page(whole_report(found.collected))
    for words in (
        "harmonic mean of the Dice coefficients on both sides",
        "harmonic mean, %",
        "HD95 at the unlabelled sites",
    ):
        assert words in shown
    for row in found.rows():
        assert row["harmonic_mean"] == pytest.approx(harmonic_mean(row["accuracy_source"], row["accuracy_target"]))
        assert row["gain"] == {}
    assert {run.metric for run in found.runs} == {"dice"}
    one, two = (
        load_file(found.folder / name / "north+south-east" / "seed-0" / "model.safetensors")
        for name in ("fedavg", "ccst")
    )
    assert any(not torch.equal(one[key], two[key]) for key in one)


# Training on masks ----------------------------------------------------------------------------------------------------


def test_the_dice_loss_is_minimised() -> None:
    data = DiscsAndCups(size=32, per_site=4).build()
    network = registry.build(UNet(levels=3, width=4), (3, 32, 32), 2, seed=0)
    inputs = (torch.from_numpy(np.asarray(data.domains["north"].inputs)).float() / 255 - 0.5) / 0.5
    masks = torch.from_numpy(np.asarray(data.domains["north"].masks)).float()
    optimizer = torch.optim.Adam(network.parameters(), lr=0.01)
    losses = []
    for _ in range(25):
        optimizer.zero_grad()
        loss = task_loss(network(inputs), masks)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.1


# What does not go together --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"methods": ["csac"]}, r"csac .*classification.* segmentation: choose fedavg, "),
        ({"model": FROZEN}, r"'frozen' .*classification"),
        ({"model": "mnist_cnn"}, r"model\.name: 'mnist_cnn' .*classification.* choose unet"),
        ({"data": "rotated_digits", "protocol": {"targets": "D0"}}, r"'unet' .*segmentation"),
        ({"engine": {"refuse": ["spectra"]}}, r"sites refuse spectra, which elcfs shares"),
        ({"model": {"name": "unet"}, "data": {"name": "discs_and_cups", "size": 40}}, r"multiples of 16"),
    ],
)  # fmt: skip
def test_told_before_training(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    for call in (lambda options: fedshift.run(options, tmp_path), fedshift.check):
        with pytest.raises(UserError, match=message) as caught:
            call({**TINY, **changes})
        assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_windows_structures_and_labels_that_do_not_fit(tmp_path: Path) -> None:
    found = fedshift.check({**TINY, "methods": ["elcfs"]})
    assert any("window of 3×3 is exchanged" in warning for warning in found.warnings)
    assert found.methods[0].bytes_up > 0
    assert all(domain.missing == () for domain in found.domains)
    data = DiscsAndCups(size=32, per_site=3).build()
    north = data.domains["north"]
    masks = north.masks.copy()
    masks[:, 0] = 0
    bare = Domain("north", north.inputs, north.labels, masks=masks)
    warnings = check_dataset(replace(data, domains={**data.domains, "north": bare}, warnings=())).warnings
    assert "site 'north' has no sample of structure cup: reported per structure, not an error" in warnings
    wrong = {"kind": "adapt_to_one", "targets": "east", "wrong_labels": {"north": 0.5}}
    with pytest.raises(UserError, match=r"protocol\.wrong_labels: masks"):
        fedshift.run({**TINY, "protocol": wrong, "methods": ["fedavg"]}, tmp_path)
    with pytest.raises(UserError, match=r"segmentation.*the audit"):
        audit_leakage(parse(TINY), batches=[1], attack="l2", iterations=1, starts=1)
