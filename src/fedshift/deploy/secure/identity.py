"""Signatures with the key of a kit, and whether a certificate is that of a site of the same federation."""

from __future__ import annotations

import datetime
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedshift.errors import Refused, UserError


@dataclass(frozen=True)
class Identity:
    """A site's certificate and its key, and the certificate of the authority that signed those of all sites."""

    site: str
    certificate: bytes
    """DER."""
    _key: Any
    _authority: Any

    @staticmethod
    def of_kit(kit: Path, site: str) -> Identity:
        """The identity in a site's kit; UserError if it has no usable key."""
        try:
            from cryptography import x509
            from cryptography.hazmat.primitives import serialization
        except ImportError:
            raise UserError(
                "secure aggregation needs the package cryptography: pip install 'fedshift[deploy]'"
            ) from None
        folder = kit / "flare" / "startup"
        try:
            certificate = x509.load_pem_x509_certificate((folder / "client.crt").read_bytes())
            key = serialization.load_pem_private_key((folder / "client.key").read_bytes(), None)
            authority = x509.load_pem_x509_certificate((folder / "rootCA.pem").read_bytes())
        except (OSError, ValueError, TypeError) as error:
            raise UserError(f"site '{site}': the kit in {kit} has no usable key: {error}") from None
        return Identity(site, certificate.public_bytes(serialization.Encoding.DER), key, authority)

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the own certificate, in hexadecimal."""
        return fingerprint(self.certificate)

    def sign(self, text: bytes) -> bytes:
        """A signature that the own certificate verifies."""
        signature: bytes = self._key.sign(text, *signing())
        return signature

    def check(self, site: str, certificate: bytes, text: bytes, signature: bytes, what: str = "the key") -> str:
        """Check who signed a text.

        Returns the certificate's fingerprint. The caller compares it with the one on record, since the authority could
        issue another one for the same name. Refused if the authority issued this certificate to nobody of this name, or
        its key did not sign the text. ``certificate``: DER, as it came with the signature.
        """
        from cryptography import x509
        from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
        from cryptography.x509.oid import NameOID

        try:
            issued = x509.load_der_x509_certificate(certificate)
            issued.verify_directly_issued_by(self._authority)
            names = [name.value for name in issued.subject.get_attributes_for_oid(NameOID.COMMON_NAME)]
            now = datetime.datetime.now(datetime.UTC)
            if names != [site] or not issued.not_valid_before_utc <= now <= issued.not_valid_after_utc:
                raise ValueError
            public: Any = issued.public_key()
            public.verify(signature, text, *signing())
        except (ValueError, TypeError, AttributeError, InvalidSignature, UnsupportedAlgorithm):
            raise Refused(
                f"site '{self.site}': {what} of '{site}' is not signed with a certificate that the federation's "
                "authority issued to it and that is valid today"
            ) from None
        return fingerprint(certificate)


def fingerprint(certificate: bytes) -> str:
    """SHA-256 of a certificate (DER), in hexadecimal."""
    return hashlib.sha256(certificate).hexdigest()


def signing() -> tuple[Any, Any]:
    """How kits sign: their keys are RSA."""
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import padding

    return padding.PSS(padding.MGF1(hashes.SHA256()), padding.PSS.DIGEST_LENGTH), hashes.SHA256()
