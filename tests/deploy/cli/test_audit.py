"""``fedshift audit leakage``: what it prints and writes, and what it says of mistakes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from calling import Cli
from PIL import Image
from small import experiment, features, images, save, write

QUICK = ("--iterations", "5", "--starts", "1")


def tiny(seed: int, samples: int) -> dict[str, Any]:
    return images(seed, samples, size=6)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    where = save(tmp_path, a=tiny(1, 20), b=tiny(2, 24), c=tiny(3, 20))
    return write(tmp_path / "e.yaml", experiment(where, model={"name": "mlp", "hidden": [8]}))


@pytest.mark.slow
def test_table_record_and_picture(cli: Cli, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = ("audit", "leakage", file, "training.lr=0.1", "--site", "c", "--batch", "1", "--batch", "3", *QUICK)
    output = cli(*arguments)
    assert output.code == 0, output.err
    assert "site c of arrays: 14 training samples; mlp, 323 parameters, weights: initial, seed 0" in output.out
    rows = [line.split() for line in output.out.splitlines() if line.startswith(("gradient", "epoch"))]
    assert [row[:5] for row in rows] == [
        [sent, "1", size, steps, attack]
        for size, every in (("1", ("l2", "cosine", "analytic")), ("3", ("l2", "cosine")))
        for sent, steps in (("gradient", "–"), ("epoch", "14" if size == "1" else "5"))
        for attack in every
    ]
    assert "An attack that fails says nothing about better ones." in output.out
    folder = Path("runs") / "small" / "audit"
    assert output.err.splitlines() == [f"wrote {folder / name}" for name in ("leakage.json", "leakage.png")]
    record = json.loads((folder / "leakage.json").read_text())
    assert record["command"].startswith("fedshift audit leakage")
    assert record["experiment"]["training"]["lr"] == 0.1
    assert {"versions", "threads", "device", "seconds", "fingerprint", "starts"} <= set(record)
    assert len(record["cases"]) == len(rows) == 10
    for case, row in zip(record["cases"], rows, strict=True):
        assert (str(case["batch"]), case["attack"]) == (row[2], row[4])
        assert len(case["mse"]) == len(case["psnr"]) == len(case["ssim"]) == len(case["inferred"]) == case["batch"]
    with Image.open(folder / "leakage.png") as picture:
        assert picture.width > 500
    assert sorted(path.name for path in folder.iterdir()) == ["leakage.json", "leakage.png"]


def test_vectors_have_a_correlation_and_no_picture(cli: Cli, tmp_path: Path) -> None:
    where = save(tmp_path, a=features(1), b=features(2))
    file = write(tmp_path / "e.yaml", experiment(where, methods=["deepall"]))
    output = cli("audit", "leakage", file, "--batch", "1", "--attack", "l2", *QUICK, "--out", tmp_path / "out")
    assert output.code == 0, output.err
    assert "correlation" in output.out
    assert "SSIM" not in output.out
    assert "note: deepall sends the samples themselves" in output.out
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["leakage.json"]


def test_crafted_networks_meet_a_site_file(cli: Cli, file: Path, tmp_path: Path) -> None:
    def rows(*arguments: object) -> list[str]:
        output = cli("audit", "leakage", file, "--batch", "2", *QUICK, "--out", tmp_path / "out", *arguments)
        assert output.code == 0, output.err
        return [line for line in output.out.splitlines() if line.startswith(("own mlp", "chosen mlp"))]

    kept = rows()
    assert [line.split()[0] for line in kept] == ["own", "own", "chosen", "chosen"]
    assert all("refused, policy.exposure" in line for line in kept[2:])
    site_yaml = tmp_path / "SITE.yaml"
    site_yaml.write_text("site: b\ndata: {name: rotated_digits}\npolicy: {exposure: 1}\n")
    assert all("leave" in line for line in rows("--policy", site_yaml))
    assert len(json.loads((tmp_path / "out" / "leakage.json").read_text())["crafted"]) == 4
    gone = cli("audit", "leakage", file, *QUICK, "--out", tmp_path / "out", "--policy", tmp_path / "none.yaml")
    assert "none.yaml" in gone.error()


def test_the_table_fits_a_terminal(cli: Cli, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    output = cli("audit", "leakage", file, "--batch", "2", *QUICK, "--out", tmp_path / "out")
    header = next(line for line in output.out.splitlines() if line.startswith("sent"))
    assert header.split() == (
        ["sent", "sites", "size", "steps", "attack", "MSE", "PSNR", "guess", "SSIM", "guess", "labels"]
    )
    assert len(header) <= 80


def test_mistakes(cli: Cli, file: Path, tmp_path: Path) -> None:
    def wrong(*arguments: object) -> str:
        return cli("audit", "leakage", file, *QUICK, "--out", tmp_path / "out", *arguments).error()

    assert "did you mean 'b'" in wrong("--site", "bb")
    assert "only target" in wrong("--site", "a")
    assert "site 'b' has only 18 training samples" in wrong("--batch", "64")
    assert "'--batch'" in wrong("--batch", "0")
    assert "'--iterations'" in wrong("--iterations", "0")
    assert "did you mean 'both'" in wrong("--attack", "bth")
    assert "training.lrr" in wrong("training.lrr=1")
    assert "BatchNorm" in wrong("model.batch_norm=true")
    assert "there is no file" in wrong("--model", tmp_path / "none")
    assert "cannot read the experiment file" in cli("audit", "leakage", tmp_path / "none.yaml").error()
    assert "cannot make the folder" in cli("audit", "leakage", file, *QUICK, "--out", file).error()
    assert "No such command" in cli("audit", "leakag", file).error()
    assert not list((tmp_path / "out").iterdir())


def test_interrupted(cli: Cli, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fedshift.deploy.cli import audit

    def stop(self: object, number: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(audit.Bar, "advance", stop)
    output = cli("audit", "leakage", file, "--batch", "1", "--out", tmp_path / "out")
    assert (output.code, output.out, output.err) == (130, "", "interrupted: nothing was written\n")
    assert not list((tmp_path / "out").iterdir())


def test_help(cli: Cli) -> None:
    assert "leakage" in cli("audit", "--help").out
    assert cli("audit", "leakage", "--help").code == 0
    nothing = cli("audit")
    assert (nothing.code, "Usage" in nothing.out + nothing.err) == (2, True)
