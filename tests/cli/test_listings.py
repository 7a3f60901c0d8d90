"""What the command line says of itself: help, methods, data sets and the fields of an experiment."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from calling import Cli

from fedshift.cli.console import reflow


def test_help(cli: Cli) -> None:
    text = cli("--help").out
    for command in ("run", "check", "table", "methods", "datasets", "demo", "predict"):
        assert command in text
        assert cli(command, "--help").code == 0
    nothing = cli()
    assert (nothing.code, "Usage" in nothing.out + nothing.err) == (2, True)


def test_methods(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "250")
    listed = cli("methods")
    assert listed.code == 0
    for name in ("deepall", "fedavg", "fedprox", "csac"):
        assert any(line.split()[:1] == [name] for line in listed.out.splitlines()), name
        one = cli("methods", name).out
        assert "Where papers and code differ" in one or "Where the paper" in one
        assert "label" in one
    csac = cli("methods", "csac").out
    for word in ("acquisition_epochs", "alignment_weight", "λ", "0.6", "divergence"):
        assert word in csac, word
    assert "shapley, leave_one_out, samples, h_divergence, information_gain" in cli("methods", "kd3a").out


def test_datasets(cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("FEDSHIFT_DATA", raising=False)
    listed = cli("datasets").out
    for name in ("rotated_digits", "rotated_mnist", "five_digits", "pacs", "image_folder", "arrays", "table"):
        assert any(line.split()[:1] == [name] for line in listed.splitlines()), name
        assert cli("datasets", name).code == 0
    mnist = cli("datasets", "rotated_mnist").out
    for word in ("Ghifary", "layout", "angles", "per_class", "M75 1000", "FEDSHIFT_DATA is not set"):
        assert word in mnist, word
    from fedshift.data.registry import source_class

    manifest = source_class("rotated_mnist").manifest()
    monkeypatch.setenv("FEDSHIFT_DATA", str(tmp_path))
    assert "not found below" in cli("datasets", "rotated_mnist").out
    file = tmp_path / next(iter(manifest.sha256))
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(b"something else")
    assert "another version" in cli("datasets", "rotated_mnist").out


def test_fields_of_every_section(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    whole = cli("fields").out
    for field in ("wrong_labels_rule", "labelled_test_fraction", "clip_norm", "lr_schedule", "crop_scale", "refuse_at"):
        assert field in whole
    training = cli("fields", "training").out
    assert "inverse_power" in training
    assert "wrong_labels" not in training
    assert "did you mean 'training'" in cli("fields", "trainin").error()
    assert "fedshift models NAME" in cli("fields", "model").error()


def test_a_description_fits_a_narrow_terminal() -> None:
    from fedshift.methods.federated import csac

    prose = (csac.__doc__ or "").strip()
    for width in (60, 80, 100):
        lines = reflow(prose, width).splitlines()
        assert max(map(len, lines)) <= width
        assert " ".join(lines).split() == prose.split(), "every word, in its order"
        before = [line for line in prose.splitlines() if re.match(r" *\d+\. |    \S+ = ", line)]
        starts = [line[:20] for line in lines]
        assert len(before) > 12
        assert [line for line in before if line[:20] not in starts] == []
    items = [line for line in reflow(prose, 60).splitlines() if re.match(r" *\d+\. ", line)]
    assert [int(line.split(".")[0]) for line in items] == list(range(1, len(items) + 1))
    wide = reflow(prose, 120)
    assert wide == prose, "nothing changes where there is room"
    paragraph = next(part for part in prose.split("\n\n") if part.startswith("``setting: practical"))
    assert len(reflow(paragraph, 1000).splitlines()) == 1
