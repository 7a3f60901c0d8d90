"""Files at rest: what `write_private` promises with and without a key."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedshift import encryption
from fedshift.encryption import KEY, KEY_FILE, new_key, read_private, write_private
from fedshift.errors import UserError

CONTENT = bytes(range(256)) * 5


@pytest.fixture
def key(monkeypatch: pytest.MonkeyPatch) -> str:
    text = new_key()
    monkeypatch.setenv(KEY, text)
    return text


@pytest.fixture
def wide_open() -> Iterator[None]:
    """A umask that hides nothing."""
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.mark.threat("other_user_weights")
@pytest.mark.parametrize("encrypted", [False, True])
def test_only_the_user_reads_it_whatever_the_umask(
    encrypted: bool, wide_open: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if encrypted:
        monkeypatch.setenv(KEY, new_key())
    left = tmp_path / f".file.{os.getpid()}.part"
    left.touch(mode=0o644)  # as a process that was killed may leave it
    write_private(tmp_path / "file", CONTENT)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o600
    assert read_private(tmp_path / "file") == CONTENT
    assert (CONTENT in (tmp_path / "file").read_bytes()) is not encrypted


@pytest.mark.parametrize("length", [0, 1, 99, 100, 101, 1280])
def test_there_and_back_in_pieces(length: int, key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encryption, "_PIECE", 100)
    write_private(tmp_path / "file", CONTENT[:length])
    assert CONTENT[:length][:20] not in (tmp_path / "file").read_bytes() or length < 2
    assert read_private(tmp_path / "file") == CONTENT[:length]


@pytest.mark.threat("taken_disk")
def test_whatever_is_changed_is_noticed(key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any byte, the end, whole pieces left out or moved, and another file in its place."""
    monkeypatch.setattr(encryption, "_PIECE", 100)
    file = tmp_path / "file"
    write_private(file, CONTENT[:250])
    whole = file.read_bytes()
    begin = len(whole) - 250 - 3 * 16
    pieces = [whole[begin : begin + 116], whole[begin + 116 : begin + 232], whole[begin + 232 :]]
    spoiled = [bytes([*whole[:at], whole[at] ^ 1, *whole[at + 1 :]]) for at in range(len(whole))]
    spoiled += [whole[:length] for length in range(begin - 1, len(whole), 7)]
    spoiled += [
        whole[:begin] + b"".join(order) for order in (pieces[:2], pieces[1:], [pieces[1], pieces[0], pieces[2]])
    ]
    for data in spoiled:
        file.write_bytes(data)
        with pytest.raises(UserError, match=r"cannot be decrypted|is not encrypted"):
            read_private(file)
    (tmp_path / "other").write_bytes(whole)
    with pytest.raises(UserError, match="cannot be decrypted"):
        read_private(tmp_path / "other")


def test_two_files_of_the_same_content_do_not_look_alike(key: str, tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_private(tmp_path / name, CONTENT)
    first, second = ((tmp_path / name).read_bytes() for name in ("a", "b"))
    assert first[60:] != second[60:]


def test_keys_that_are_wrong_are_one_line(key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "runs" / "file"
    write_private(file, CONTENT)
    place = tmp_path / "key"
    place.write_text(key)
    os.chmod(place, 0o600)
    monkeypatch.setenv(KEY, "another that the file goes before")
    monkeypatch.setenv(KEY_FILE, str(place))
    assert read_private(file) == CONTENT

    def said() -> str:
        with pytest.raises(UserError) as error:
            read_private(file)
        assert "\n" not in str(error.value)
        return str(error.value)

    os.chmod(place, 0o644)
    assert "chmod 600" in said()
    os.chmod(place, 0o600)
    place.write_text(new_key())
    assert str(file) in said()
    place.write_text("short")
    assert "security key" in said()
    place.unlink()
    assert "cannot read" in said()
    monkeypatch.delenv(KEY_FILE)
    monkeypatch.delenv(KEY)
    assert "is encrypted" in said()
    file.write_bytes(CONTENT)
    monkeypatch.setenv(KEY, key)
    assert "is not encrypted" in said()


@pytest.mark.threat("taken_disk")
def test_the_key_does_not_lie_beside_what_it_protects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "run" / "deep" / "key"
    place.parent.mkdir(parents=True)
    place.write_text(new_key())
    os.chmod(place, 0o600)
    monkeypatch.setenv(KEY_FILE, str(place))
    with pytest.raises(UserError, match="put it elsewhere"):
        write_private(tmp_path / "run" / "checkpoint", CONTENT)
    write_private(tmp_path / "other" / "checkpoint", CONTENT)
