"""What a deployed federation leaves on its disks: for its users only, encrypted if a key is set, the same bits."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import pytest
from loopback import Killed, Loopback, deploy, killed_when, model, options_of, same, simulate, site_files

from fedshift.encryption import KEY, new_key
from fedshift.errors import FedshiftError, UserError

CSAC = {"name": "csac", "acquisition_epochs": 1, "calibration_epochs": 1}
"""A method whose sites remember something."""
ENGINE = {"wire": "bf16"}  # the coordinator remembers rounding residuals


@pytest.fixture
def wide_open() -> Any:
    before = os.umask(0)
    yield
    os.umask(before)


def cut_short(folder: Path) -> dict[str, Path]:
    """Deploy until the last round's first answer; the sites' files."""
    die = killed_when(lambda site, header: header.get("envelope", {}).get("round") == 3)
    places = site_files(folder)
    with pytest.raises(Killed):
        deploy(folder, options_of(CSAC), transport=Loopback(places, die), engine=ENGINE)
    return places


def kept_files(folder: Path) -> list[Path]:
    """Checkpoints, memory and kept answers of all roles."""
    files = [*folder.glob("*/memory/**/*.safetensors"), *folder.glob("deployment/runs/**/*.safetensors")]
    assert {"checkpoint", "answer", "owed"} <= {path.name.partition("-")[0].partition(".")[0] for path in files}
    assert len(files) > 8
    return files


@pytest.mark.threat("other_user_weights")
def test_files_with_weights_are_for_their_user_only(wide_open: None, tmp_path: Path) -> None:
    cut_short(tmp_path)
    answers = list(tmp_path.glob("*/memory/*/answer-*.json"))
    assert answers
    for path in (*kept_files(tmp_path), *answers):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path


@pytest.mark.threat("taken_disk")
def test_an_encrypted_run_goes_on_to_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, _ = deploy(tmp_path / "whole", options_of(CSAC), engine=ENGINE)
    key, folder = new_key(), tmp_path / "encrypted"
    monkeypatch.setenv(KEY, key)
    places = cut_short(folder)
    assert all(path.read_bytes().startswith(b"fedshift encrypted") for path in kept_files(folder))

    monkeypatch.setenv(KEY, new_key())
    with pytest.raises(UserError, match=r"checkpoint.safetensors cannot be decrypted: .*key") as error:
        deploy(folder, options_of(CSAC), transport=Loopback(places), engine=ENGINE)
    assert "\n" not in str(error.value)

    monkeypatch.setenv(KEY, key)
    again, _ = deploy(folder, options_of(CSAC), transport=Loopback(places), engine=ENGINE)
    assert same(model(whole, "csac", "west"), model(again, "csac", "west"))


def test_a_simulation_is_encrypted_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = simulate(tmp_path / "plain", options_of(CSAC))
    monkeypatch.setenv(KEY, new_key())
    written: list[bytes] = []
    from fedshift.federation import message_files

    real = message_files.write_private

    def note_write(path: Path, data: bytes, **options: Any) -> None:
        real(path, data, **options)
        written.append(path.read_bytes()[:18])

    monkeypatch.setattr(message_files, "write_private", note_write)
    encrypted = simulate(tmp_path / "encrypted", options_of(CSAC))
    assert set(written) == {b"fedshift encrypted"}
    assert same(model(plain, "csac", "west"), model(encrypted, "csac", "west"))


def test_a_full_disk_at_a_site_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fedshift.files

    real = fedshift.files.write_bytes

    def full(path: Path, data: bytes, **how: bool) -> None:
        if "south" in path.parts and path.suffix == ".safetensors":
            raise UserError(f"cannot write {path}: No space left on device; free some space")
        real(path, data, **how)

    monkeypatch.setattr("fedshift.encryption.write_bytes", full)
    with pytest.raises(FedshiftError, match=r"site 'south' is lost \(cannot write .*No space left"):
        deploy(tmp_path, options_of({"name": "fedavg"}))
