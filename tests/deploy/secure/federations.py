"""Deployed federations inside this process whose sites have kits, so that they can mask. For tests."""

from __future__ import annotations

import datetime
import functools
import json
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.x509.oid import NameOID
from loopback import Loopback, deploy, options_of, simulate

from fedshift.deploy.crypto.masked_sums import KeyAnswer, KeyCard
from fedshift.deploy.remote.requests import CallAnswer, CallRequest, request_key
from fedshift.deploy.remote.transport import Lost
from fedshift.deploy.remote.wire import Message, body_of, seal, unseal
from fedshift.deploy.secure.identity import signing
from fedshift.federation.messages import Sealed
from fedshift.federation.plain_values import parse_json
from fedshift.federation.secure.closed import Box, Package, Passage
from fedshift.federation.secure.integer_sums import Layout
from fedshift.weights import Weights


def call_request(header: Mapping[str, Any]) -> CallRequest:
    return parse_json(CallRequest, json.dumps(header), "a request")


def layout_of(answer: Mapping[str, Any]) -> Layout:
    return Layout.read(parse_json(CallAnswer, json.dumps(answer), "it").layout)


def key_card(site: str, answer: Mapping[str, Any]) -> KeyCard:
    return parse_json(KeyAnswer, json.dumps(answer), "it").of(site)


def card_entry(card: KeyCard) -> list[str]:
    entry: list[str] = KeyAnswer(card=card.entry).model_dump(mode="json")["card"]
    return entry


FOUR = {"north": 41, "south": 17, "east": 26, "up": 22}
SECURE = {"aggregation": "secure"}
Request = tuple[dict[str, Any], dict[str, Any]]
Meddle = Callable[[str, dict[str, Any], dict[str, Any]], Request | None]


@functools.cache
def key_of(name: str) -> rsa.RSAPrivateKey:
    """A key, made once; short, since it protects nothing."""
    return rsa.generate_private_key(65537, 1024)


@functools.cache
def certificate_of(name: str, key: rsa.RSAPrivateKey, authority: str = "authority", days: int = 9) -> x509.Certificate:
    """A certificate of ``name``, by an authority."""
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, authority)]))
        .public_key(key.public_key())
        .serial_number(1 + sum(name.encode()))
        .not_valid_before(now - datetime.timedelta(days=10))
        .not_valid_after(now + datetime.timedelta(days=days))
        .sign(key_of(authority), hashes.SHA256())
    )


def write_kits(folder: Path, sites: Sequence[str]) -> None:
    """The keys and certificates of sites' kits, where `loopback.site_file` puts their SITE.yaml."""
    pem = serialization.Encoding.PEM
    for name in sites:
        startup = folder / name / "flare" / "startup"
        startup.mkdir(parents=True, exist_ok=True)
        key_pem = key_of(name).private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        (startup / "client.key").write_bytes(key_pem)
        (startup / "client.crt").write_bytes(certificate_of(name, key_of(name)).public_bytes(pem))
        (startup / "rootCA.pem").write_bytes(certificate_of("authority", key_of("authority")).public_bytes(pem))


def secure_options(method: Mapping[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    options = options_of({"name": "fedavg", **(method or {})}, **changes)
    return {**options, "training": {**options["training"], "rounds": 2, **changes.get("training", {})}}


def deploy_secure(
    folder: Path, options: dict[str, Any], sites: Mapping[str, int] = FOUR, **more: Any
) -> tuple[Path, Loopback]:
    """As `loopback.deploy`, with masks."""
    write_kits(folder, list(sites))
    engine = {**SECURE, **more.pop("engine", {})}
    return deploy(folder, options, sites=sites, engine=engine, **more)


def simulate_secure(folder: Path, options: dict[str, Any], sites: Mapping[str, int] = FOUR, **engine: Any) -> Path:
    return simulate(folder, options, sites, **SECURE, **engine)


class Between(Loopback):
    """A coordinator that sends sites other requests than the method asks for, where ``meddle`` gives one."""

    meddle: Meddle = staticmethod(lambda site, header, content: None)

    def exchange(
        self, messages: Iterator[tuple[str, Message]], deadline: float, patience: Mapping[str, float]
    ) -> Generator[tuple[str, Message | Lost], None, None]:
        yield from super().exchange(
            ((site, self._change_message(site, message)) for site, message in messages), deadline, patience
        )

    def _change_message(self, site: str, message: Message) -> Message:
        header, content, _ = unseal(message)
        changed = self.meddle(site, header, dict(content))
        if changed is None:
            return message
        header, body = changed[0], body_of(changed[1])
        return seal({**header, "key": request_key(header, body.sha256)}, body)


def box_of(
    passage: Passage,
    value: Any,
    keys: Mapping[str, bytes],
    signer: str = "",
    contents: Mapping[str, Weights] | None = None,
    plain: bytes | None = None,
) -> Sealed:
    """What a call is given of a box, with anything wrong in it.

    Args:
        passage: of the box.
        value: its model, or its models by site.
        keys: reader → the public key that it is sealed for.
        signer: who signs it; the sender if empty.
        contents: what it says is in it.
        plain: what is in it instead.
    """
    models = {"": value} if isinstance(value, Weights) else value
    from fedshift.deploy.secure.site_seals import seal_for  # needs a newer cryptography than the other tests here

    told, sealed = seal_for(keys, plain or body_of({passage.field: value}).data, passage, contents or models)
    signature = key_of(signer or passage.sender).sign(Box.text_to_sign(passage, told, sealed), *signing())
    der = certificate_of(passage.sender, key_of(passage.sender)).public_bytes(serialization.Encoding.DER)
    box = Box.of(told, sealed, signature, der)
    return Sealed({**Package([], [(0, name, "") for name in models]).content, **{f"0|{k}": box[k] for k in box}})
