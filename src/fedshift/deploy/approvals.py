"""A second pair of eyes: who of a site's people approved what was asked for, by name, and signed where keys are listed.

A person signs with a key of OpenSSH (``ssh-ed25519``), of which the site's file lists the public half. Without listed
keys a name is what somebody typed: it keeps mistakes away, and nobody who types two names.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import unicodedata
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from fedshift.errors import UserError, nearest
from fedshift.extras import import_extra

KEY_KIND = "ssh-ed25519"
_WHAT = "approving with a key"


class Approval(BaseModel):
    """One person's approval. ``of``: digest of what was approved. ``signature``: base64, empty without a key."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    person: Annotated[str, Field(min_length=1, max_length=100)]
    of: str
    signature: str = ""


@dataclass(frozen=True)
class Approver:
    """A person who approves. ``sign`` makes a signature of bytes; None without a key."""

    name: str
    sign: Callable[[bytes], bytes] | None = None

    def approve(self, digest: str) -> Approval:
        """Approve what has this digest."""
        signature = "" if self.sign is None else base64.b64encode(self.sign(_signed_text(digest))).decode()
        return Approval(person=self.name, of=digest, signature=signature)


def same_person(name: str) -> str:
    """A name as it is compared: case, width of letters and spaces do not make two people of one.

    Example:
        >>> same_person("  Ana  MEYER ") == same_person("ana meyer")
        True
    """
    return " ".join(unicodedata.normalize("NFKC", name).casefold().split())


def digest_of_terms(site: str, terms: BaseModel) -> str:
    """The digest of terms at a site, which an approval is of."""
    text = json.dumps([site, terms.model_dump(mode="json")], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def public_key(text: str) -> str:
    """The key in a line of OpenSSH's, without its comment; ValueError if the line holds none."""
    kind, _, rest = text.strip().partition(" ")
    try:
        whole = base64.b64decode(rest.split(" ")[0], validate=True)
    except binascii.Error:
        whole = b""
    if kind != KEY_KIND or len(whole) != 51:
        raise ValueError(f"is not a public key '{KEY_KIND} …', such as ssh-keygen -t ed25519 writes to a file .pub")
    return f"{kind} {rest.split(' ')[0]}"


def approver(
    approvals: int, approvers: Mapping[str, str], name: str, key: Path | None, ask: Callable[[], str]
) -> Approver | None:
    """The person who approves, by the rules of a site. Returns the person; None if the rules ask for no name and none
    was given. UserError if a name or a key is needed, is not listed, or cannot be read."""
    if not name.strip():
        if approvals > 1 or approvers:
            raise UserError(f"say who you are, with --as NAME (rule policy.approvals: {approvals})")
        return None
    if not approvers:
        return Approver(" ".join(name.split()))
    listed = {same_person(item): item for item in approvers}
    if same_person(name) not in listed:
        raise UserError(f"--as: policy.approvers has no '{name}'; {nearest(name, approvers)}")
    person = listed[same_person(name)]
    if key is None:
        raise UserError(f"--key FILE: policy.approvers lists a key of '{person}': name the file of its private half")
    secret = _private_key(key, ask)
    if _line_of(secret) != approvers[person]:
        raise UserError(f"{key}: is not the key that policy.approvers lists for '{person}'")
    return Approver(person, secret.sign)


def valid_approvals(approvals: Iterable[Approval], digest: str, approvers: Mapping[str, str]) -> dict[str, Approval]:
    """By person, the approvals that count: of this digest and, where people have keys, signed with a listed one."""
    return {
        same_person(approval.person): approval
        for approval in approvals
        if approval.of == digest and (not approvers or _is_signed(approval, approvers.get(approval.person)))
    }


def _is_signed(approval: Approval, key: str | None) -> bool:
    if key is None:
        return False
    invalid = import_extra("cryptography.exceptions", extra="deploy", what=_WHAT).InvalidSignature
    keys = import_extra("cryptography.hazmat.primitives.serialization", extra="deploy", what=_WHAT)
    try:
        keys.load_ssh_public_key(key.encode()).verify(base64.b64decode(approval.signature), _signed_text(approval.of))
    except (invalid, ValueError):
        return False
    return True


def _private_key(file: Path, ask: Callable[[], str]) -> Any:
    keys = import_extra("cryptography.hazmat.primitives.serialization", extra="deploy", what=_WHAT)
    try:
        data = file.read_bytes()
        try:
            secret = keys.load_ssh_private_key(data, None)
        except (TypeError, ValueError) as error:
            if "password" not in str(error).lower():
                raise
            secret = keys.load_ssh_private_key(data, ask().encode())
        if _line_of(secret).startswith(KEY_KIND):
            return secret
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror}") from None
    except (TypeError, ValueError):
        pass
    raise UserError(f"{file}: holds no private key of kind {KEY_KIND}, or the passphrase is another one")


def _line_of(secret: Any) -> str:
    keys = import_extra("cryptography.hazmat.primitives.serialization", extra="deploy", what=_WHAT)
    return str(secret.public_key().public_bytes(keys.Encoding.OpenSSH, keys.PublicFormat.OpenSSH).decode())


def _signed_text(digest: str) -> bytes:
    return f"fedshift agreement\x1f{digest}".encode()
