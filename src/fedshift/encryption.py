"""Files at rest: encrypted if a key is set, readable by their user only, and with a digest that shows damage.

Checkpoints, site memory, keys and kept answers are written and read here. The key comes from the file that
``FEDSHIFT_KEY_FILE`` names, or from ``FEDSHIFT_KEY`` itself. Without either, files hold their content in
clear, behind its digest (`digests`).
"""

from __future__ import annotations

import base64
import binascii
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from fedshift.digests import REMEDY, with_digest, without_digest
from fedshift.errors import UserError
from fedshift.files import write_bytes

KEY_FILE, KEY = "FEDSHIFT_KEY_FILE", "FEDSHIFT_KEY"
"""Environment variables: the file that holds the key, or the key itself (32 bytes, base64)."""
MAGIC = b"fedshift encrypted 1\n"
"""What every encrypted file begins with."""
_SALT, _TAG = 16, 16
_PIECE = 1 << 26
"""Bytes that are encrypted at once; the library takes at most 2³¹."""


def write_private(path: Path, data: bytes, *, flush: bool = True, before: Callable[[], None] | None = None) -> None:
    """Write a file that only its user can read, whole or not at all; encrypted if a key is set.

    Args:
        path: the file. Its folder is made if necessary.
        flush: wait until it is on the disk.
        before: as in `write_bytes`.

    Raises:
        UserError: it cannot be written, or the key cannot be used.
    """
    key = present_key()
    whole = with_digest(data) if key is None else _encrypt_content(data, key, path)
    write_bytes(path, whole, private=True, flush=flush, before=before)


def read_private(path: Path, remedy: str = REMEDY, *, older: int | None = None) -> bytes:
    """Read what `write_private` wrote.

    Args:
        older: bytes of the content. A file that holds no more was written by an earlier version, without a digest.

    Raises:
        OSError: the file cannot be read.
        UserError: it is damaged; it is encrypted and there is no key, or another one; or it is not encrypted although
            a key is set.
    """
    data, key = path.read_bytes(), present_key()
    if key is not None:
        return _decrypt_content(data, key, path)
    if data.startswith(MAGIC):
        raise UserError(f"{path} is encrypted: set {KEY_FILE} to the file of its key, or {KEY} to the key")
    return data if len(data) == older else without_digest(data, path, remedy)


def write_scratch(path: Path, data: bytes) -> None:
    """Write a file that ends with this process: as `write_private` does, but not flushed and without a digest.

    UserError if it cannot be written, or the key cannot be used.
    """
    key = present_key()
    write_bytes(path, data if key is None else _encrypt_content(data, key, path), private=True, flush=False)


def read_scratch(path: Path) -> bytes:
    """Read what `write_scratch` wrote.

    OSError if the file cannot be read. UserError if it was not written with the key that is set.
    """
    data, key = path.read_bytes(), present_key()
    return data if key is None else _decrypt_content(data, key, path)


def _encrypt_content(data: bytes, key: bytes, path: Path) -> bytes:
    _check_apart(path)
    return encrypt(data, key, path.name)


def _decrypt_content(data: bytes, key: bytes, path: Path) -> bytes:
    if not data.startswith(MAGIC):
        raise UserError(
            f"{path} is not encrypted, but a key is set ({KEY_FILE} or {KEY}): go on without the key, or delete "
            "the file and run again"
        )
    return decrypt(data, key, path)


def present_key() -> bytes | None:
    """The key that is set, None if there is none. UserError if it is no key, or other users can read its file."""
    file, text = os.environ.get(KEY_FILE), os.environ.get(KEY)
    if file:
        try:
            if os.stat(file).st_mode & 0o007:
                raise UserError(f"{KEY_FILE}: every user of this machine can use {file}: chmod 600 {file}")
            text = Path(file).read_text(encoding="ascii", errors="replace")
        except OSError as error:
            raise UserError(f"{KEY_FILE}: cannot read {file}: {error.strerror}") from None
    if not text:
        return None
    try:
        key = base64.b64decode(text.strip(), validate=True)
    except (binascii.Error, ValueError):
        key = b""
    if len(key) != 32:
        raise UserError(
            f"{KEY_FILE if file else KEY} does not hold a key of 32 bytes in base64: make one with fedshift security "
            "key FILE"
        )
    return key


def new_key() -> str:
    """A new key, as text."""
    return base64.b64encode(os.urandom(32)).decode() + "\n"


def encrypt(data: bytes, key: bytes, name: str) -> bytes:
    """Encrypt with AES-256-GCM, in pieces, under a key of its own that is derived from ``key`` and a random salt.

    Args:
        key: 32 bytes.
        name: the file's name, so that no other file can take its place.

    Raises:
        UserError: the package cryptography is not installed.
    """
    salt = os.urandom(_SALT)
    cipher = _cipher(key, salt)
    view = memoryview(data)
    pieces = [view[at : at + _PIECE] for at in range(0, max(1, len(data)), _PIECE)]
    return b"".join(
        [
            MAGIC,
            salt,
            *(
                cipher.encrypt(nonce, piece, name.encode())
                for piece, nonce in zip(pieces, _nonces(len(pieces)), strict=True)
            ),
        ]
    )


def decrypt(data: bytes, key: bytes, path: Path) -> bytes:
    """The content that `encrypt` was given.

    UserError if it was encrypted with another key or under another name, or is damaged.
    """
    from cryptography.exceptions import InvalidTag

    begin = len(MAGIC) + _SALT
    view = memoryview(data)
    cipher = _cipher(key, data[len(MAGIC) : begin])
    pieces = [view[at : at + _PIECE + _TAG] for at in range(begin, len(data), _PIECE + _TAG)]
    try:
        if not pieces:
            raise InvalidTag
        return b"".join(
            cipher.decrypt(nonce, piece, path.name.encode())
            for piece, nonce in zip(pieces, _nonces(len(pieces)), strict=True)
        )
    except InvalidTag:
        raise UserError(
            f"{path} cannot be decrypted: the key that is set ({KEY_FILE} or {KEY}) is not the one it was written "
            "with, or the file is damaged"
        ) from None


def _nonces(number: int) -> Iterator[bytes]:
    """A nonce per piece: its number, and whether it is the last, so that no piece can be left out or moved."""
    for piece in range(number):
        yield piece.to_bytes(11) + bytes([piece == number - 1])


def _cipher(key: bytes, salt: bytes):  # type: ignore[no-untyped-def]
    try:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        from cryptography.hazmat.primitives.hashes import SHA256
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF
    except ImportError:
        raise UserError("encrypting files needs the package cryptography: pip install 'fedshift[deploy]'") from None
    return AESGCM(HKDF(algorithm=SHA256(), length=32, salt=salt, info=MAGIC).derive(key))


def _check_apart(path: Path) -> None:
    """Raise UserError if the key lies in the folder of the files that it protects, or below it."""
    file = os.environ.get(KEY_FILE)
    if file and Path(file).resolve().is_relative_to(path.parent.resolve()):
        raise UserError(f"{KEY_FILE}: {file} lies beside the files that it protects: put it elsewhere")
