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
    ("section", "fields", "same"),
    [
        ("method", {"weighting": "samples"}, True),
        ("method", {"weighting": "uniform"}, False),
        ("training", {"momentum": 0.5}, True),
        ("training", {"momentum": 0.9}, False),
        ("training", {"augmentation": {"flip": 0.5, "shear": 0.0}}, True),
        ("protocol", {"base_images": "disjoint"}, True),
        ("protocol", {"base_images": "shared"}, False),
        ("model", {"dropout": 0.0}, True),
        ("model", {"dropout": 0.5}, False),
        ("data", {"root": "/elsewhere"}, True),
        ("data", {"fingerprint": "abd"}, False),
        ("engine", {"workers": 1}, True),
        ("versions", {"torch": "2"}, True),
        ("method", {"name": "fedprox"}, False),
    ],
)
def test_a_field_that_was_not_known_then_holds_its_default_and_another_value_is_another_run(
    section: str, fields: dict[str, Any], same: bool
) -> None:
    ((field, value),) = fields.items()
    difference = first_difference(comparable(SETTINGS), comparable(changed(section, **fields)))
    assert difference is None if same else difference is not None and difference[::2] == (f"{section}.{field}", value)


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


def test_options_are_compared_by_what_they_mean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A folder names code; it must not be imported because of that.
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("raise SystemExit('imported')")
    settings = {**SETTINGS, "method": {"name": "mine.py:Mine", "sha256": "1"}}
    assert comparable(settings)["method"] == settings["method"]
    strong = {"crop_scale": None, "flip": 0.5}
    old = {"method": {"name": "copa", "strong": strong}}
    new = {"method": {"name": "copa", "strong": {**strong, "flip_vertical": 0.0}}}
    assert first_difference(comparable(old), comparable(new)) is None
    turned = {"method": {"name": "copa", "strong": {**strong, "flip_vertical": 0.5}}}
    assert first_difference(comparable(old), comparable(turned)) == ("method.strong.flip_vertical", 0.0, 0.5)
    unknown = {"optimizer": "of a later version"}
    assert comparable({"method": {"name": "fedavg", "server": unknown}})["method"]["server"] == unknown
    # A list of options is compared by what each of them is, not by what was written of it.
    settings = [comparable(changed("method", local=[{"name": "label_smoothing", **more}])) for more in WRITTEN]
    assert first_difference(settings[0], settings[1]) is None
    found = first_difference(settings[0], settings[2])
    assert found[0] == "method.local"


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
