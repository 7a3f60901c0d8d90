"""What makes two runs the same run, over versions of fedshift that know more settings than those before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedshift.experiment.runs.run_identity import comparable, first_difference

SETTINGS: dict[str, Any] = {
    "name": "one",
    "data": {"name": "rotated_digits", "root": "/somewhere", "fingerprint": "abc"},
    "protocol": {"kind": "leave_one_out", "test_fraction": 0.3},
    "model": {"name": "mlp", "hidden": [8]},
    "training": {"rounds": 3, "mini_batches": {"a": 9}, "augmentation": {"flip": 0.5}},
    "method": {"name": "fedavg", "local_epochs": 2},
    "engine": {"workers": 2},
    "device": "cpu",
    "versions": {"torch": "1"},
}

WRITTEN: list[dict[str, Any]] = [{}, {"smoothing": 0.1}, {"smoothing": 0.2}]


def changed(section: str, **fields: Any) -> dict[str, Any]:
    return {**SETTINGS, section: {**SETTINGS[section], **fields}}


@pytest.mark.parametrize(
    ("section", "fields"),
    [
        ("method", {"weighting": "samples"}),
        ("training", {"momentum": 0.5}),
        ("training", {"augmentation": {"flip": 0.5, "shear": 0.0}}),
        ("protocol", {"base_images": "disjoint"}),
        ("model", {"dropout": 0.0}),
        ("data", {"root": "/elsewhere"}),
        ("engine", {"workers": 1}),
        ("versions", {"torch": "2"}),
    ],
)
def test_a_field_that_was_not_known_then_holds_its_default(section: str, fields: dict[str, Any]) -> None:
    assert first_difference(comparable(SETTINGS), comparable(changed(section, **fields))) is None


@pytest.mark.parametrize(
    ("section", "fields"),
    [
        ("method", {"weighting": "uniform"}),
        ("training", {"momentum": 0.9}),
        ("protocol", {"base_images": "shared"}),
        ("model", {"dropout": 0.5}),
        ("data", {"fingerprint": "abd"}),
        ("method", {"name": "fedprox"}),
    ],
)
def test_another_value_is_another_run(section: str, fields: dict[str, Any]) -> None:
    (field,) = fields
    there, here = comparable(SETTINGS), comparable(changed(section, **fields))
    found = first_difference(there, here)
    assert found is not None
    assert found[0] == f"{section}.{field}"
    assert found[2] == fields[field]


@pytest.mark.parametrize(
    ("old", "new", "same"),
    [
        ("abc", "abc-12", True),  # written before groups and splits were in it
        ("abc-12", "abc-12", True),
        ("abc-12", "abc-13", False),
        ("abc-12", "abc", False),
        ("abd", "abc-12", False),
        ("abc+def", "abc-12+def", True),  # of a deployment, a site each
        ("abc+def", "abc-12", False),
        ("abc+def-1", "abc+def-2", False),
    ],
)
def test_checksums_of_data_from_before_groups_were_in_them(old: str, new: str, same: bool) -> None:
    there, here = comparable(changed("data", fingerprint=old)), comparable(changed("data", fingerprint=new))
    found = first_difference(there, here)
    assert found == (None if same else ("data.fingerprint", old, new))


def test_a_method_of_somebody_is_compared_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder names code; it must not be imported because of that."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("raise SystemExit('imported')")
    settings = {**SETTINGS, "method": {"name": "mine.py:Mine", "sha256": "1"}}
    assert comparable(settings)["method"] == settings["method"]


def test_an_augmentation_among_a_methods_options_gets_its_later_fields() -> None:
    strong = {"crop_scale": None, "flip": 0.5}
    old = {"method": {"name": "copa", "strong": strong}}
    new = {"method": {"name": "copa", "strong": {**strong, "flip_vertical": 0.0}}}
    assert first_difference(comparable(old), comparable(new)) is None
    turned = {"method": {"name": "copa", "strong": {**strong, "flip_vertical": 0.5}}}
    assert first_difference(comparable(old), comparable(turned)) == ("method.strong.flip_vertical", 0.0, 0.5)


@pytest.mark.parametrize(
    ("option", "old", "later", "value", "other"),
    [
        ("server", {"optimizer": "momentum", "beta": 0.9, "rate": 1.0}, "nesterov", False, True),
        ("server", {"optimizer": "adam"}, "tau", 1e-3, 1e-2),
        ("average", {"kind": "swa"}, "start", 0.75, 0.5),
    ],
)
def test_an_option_of_several_kinds_gets_its_later_fields(
    option: str, old: dict[str, Any], later: str, value: Any, other: Any
) -> None:
    """A run made before its server's momentum could be Nesterov's is that of a file that says nothing of it."""

    def settings(**fields: Any) -> dict[str, Any]:
        return comparable({"method": {"name": "fedavg", option: {**old, **fields}}})

    assert first_difference(settings(), settings(**{later: value})) is None
    assert first_difference(settings(), settings(**{later: other})) == (f"method.{option}.{later}", value, other)


def test_an_option_that_cannot_be_read_is_compared_as_it_is() -> None:
    unknown = {"optimizer": "of a later version"}
    assert comparable({"method": {"name": "fedavg", "server": unknown}})["method"]["server"] == unknown


def test_plug_ins_in_a_list_have_their_defaults() -> None:
    """A list of options is compared by what each of them is, not by what was written of it."""
    settings = [comparable(changed("method", local=[{"name": "label_smoothing", **more}])) for more in WRITTEN]
    assert first_difference(settings[0], settings[1]) is None
    found = first_difference(settings[0], settings[2])
    assert found is not None
    assert found[0] == "method.local"
