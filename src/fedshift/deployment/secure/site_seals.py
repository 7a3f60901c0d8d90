"""What a deployed site does with models that pass from site to site: it seals its own, and opens those of others."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedshift.deployment.agreed_terms import AgreedTerms
from fedshift.deployment.secure.site_sums import SiteSums
from fedshift.deployment.site_file import SiteConfig
from fedshift.deployment.site_requests import narrowed, plain_name
from fedshift.errors import FedshiftError, Refused
from fedshift.federation.exchange import Routed
from fedshift.federation.messages import Content, Reply, Sealed, decode, leaves, reply_content
from fedshift.federation.remote.policy import SEALED
from fedshift.federation.remote.wire import Message, body_of, seal, widened
from fedshift.federation.replies.checks import ReplyCheck, reply_type
from fedshift.federation.reply_bounds import About
from fedshift.federation.secure.keys import KeyCard
from fedshift.federation.secure.orders import card_entry, card_of
from fedshift.federation.secure.sealing import (
    Passage,
    SealingKey,
    key_text,
    parts_of,
    seal_for,
    sealed_content,
)
from fedshift.federation.site_runner import SiteRunner
from fedshift.files import write_bytes
from fedshift.methods.base import Method
from fedshift.weights import Weights

FOLDER = "sealing"
"""In the site's memory of a run: its key, and the card of it."""


class SiteSeals:
    """The part of a site's program that knows of sealed models.

    Args:
        config: the site's file.
        terms: what the site has agreed to, such as the certificates of other sites.
        sums: has the identity of the site's kit.
    """

    def __init__(self, config: SiteConfig, terms: AgreedTerms, sums: SiteSums) -> None:
        self.name = config.file.site
        self._memory, self._terms, self._sums = config.memory, terms, sums

    def key(self, header: Mapping[str, Any], content: Mapping[str, Any], entry: dict[str, Any]) -> Message:
        """Answer with the signed key of a run, which is made if the run has none here."""
        run, identity = header["run"], self._sums.identity
        public, file = SealingKey.of(self._folder(run) / "key").public, self._folder(run) / "card.json"
        # No two signatures are alike, and a request that is asked again has to have the same card in it.
        card = card_of(self.name, json.loads(file.read_text())) if file.exists() else None
        if card is None or (card.public, card.certificate) != (public, identity.certificate):
            signature = identity.sign(key_text(run, self.name, public))
            card = KeyCard(self.name, public, signature, identity.certificate)
            write_bytes(file, json.dumps(card_entry(card)).encode(), private=True)
        entry["key"] = public.hex()
        return seal({"answers": header["key"], "card": card_entry(card)}, body_of({}))

    def _folder(self, run: Any) -> Path:
        return self._memory / plain_name(run) / FOLDER

    # At the sender ----------------------------------------------------------------------------------------------------

    def begun(self, header: Mapping[str, Any], method: Method, entry: dict[str, Any]) -> Sealing | None:
        """What a request says of sealing its reply; None if it does not ask for that.

        Raises:
            Refused: the reply is not one that is only handed on, or the receiver's key is not signed by that site.
        """
        if "seal" not in header:
            return None
        way = method.call_owner(header["step"]).routed.get(header["step"])
        if way is None:
            raise Refused(f"site '{self.name}': what call {header['step']} sends is not only handed on to another site")
        try:
            receiver = str(header["seal"]["for"])
            card = card_of(receiver, header["seal"]["card"])
        except (KeyError, TypeError, FedshiftError):
            raise Refused(f"site '{self.name}': a request to seal does not say for whom") from None
        if receiver == self.name:
            raise Refused(f"site '{self.name}' is asked to seal a model for itself")
        text = key_text(header["run"], receiver, card.public)
        self._known(receiver, card.certificate, text, card.signature)
        entry["sealed_for"] = receiver
        return Sealing(self.name, self._sums, card, way)

    def _known(self, site: str, certificate: bytes, text: bytes, signature: bytes, what: str = "the key") -> None:
        """Raise Refused unless a site signed a text with the certificate that this site has on record for it."""
        self._terms.check_peers({site: self._sums.identity.check(site, certificate, text, signature, what)})

    # At the receiver --------------------------------------------------------------------------------------------------

    def opened(
        self,
        header: Mapping[str, Any],
        runner: SiteRunner,
        method: Method,
        content: Mapping[str, Content],
        entry: dict[str, Any],
    ) -> Mapping[str, Content]:
        """The content of a request with its sealed models opened.

        Raises:
            Refused: one was not sealed by its sender for this site and this exchange, or is no model of this run.
        """
        places = [path.split("/")[0] for path, value in leaves(content) if isinstance(value, Sealed)]
        if not places:
            return content
        call = header["step"]
        ways = method.call_owner(call).routed
        made, way = next(((made, way) for made, way in ways.items() if way.to == call), ("", None))
        models = content.get(way.argument) if way is not None else None
        if way is None or {*places} != {way.argument} or not isinstance(models, Mapping) or isinstance(models, Sealed):
            raise Refused(f"site '{self.name}': call {call} is not given sealed models in '{places[0]}'")
        key, exchange = SealingKey.of(self._folder(header["run"]) / "key"), int(header["envelope"]["exchange"]) - 1
        check = _check_of(runner, header)
        found: dict[str, Any] = {}
        for sender, value in models.items():
            passage = Passage(header["run"], exchange, made, way.field, sender, self.name)
            found[sender] = self._open(value, passage, key, check, reply_type(method, made), content)
        entry["opened"] = list(found)
        return {**content, way.argument: found}

    def _open(
        self,
        value: Any,
        passage: Passage,
        key: SealingKey,
        check: ReplyCheck,
        kind: type[Reply],
        content: Mapping[str, Content],
    ) -> Weights:
        try:
            sealed, signature, certificate = parts_of(value, *check.size)
            plain = key.open(sealed, passage)
            self._known(passage.sender, certificate, passage.signed_text(sealed), signature, "the sealed model")
            inner, packed = decode(plain, check.most_tensors({}))
            model = widened(inner, packed.get("packed"), check.most_tensors({})).get(passage.field)
            if not isinstance(model, Weights):
                raise FedshiftError("it is no model")
            # A call that is given a model under the same name as the one that is handed on trains from the same.
            check.check_model(passage.call, kind, passage.field, model, content)
        except Refused:
            raise
        except FedshiftError as error:
            raise Refused(f"site '{self.name}': the model that '{passage.sender}' sealed for it: {error}") from None
        return model


class Sealing:
    """One request to a site that asks for a sealed reply."""

    def __init__(self, name: str, sums: SiteSums, card: KeyCard, way: Routed) -> None:
        self.way = way
        self._name, self._sums, self._card = name, sums, card

    def promised(self, kinds: Mapping[str, str]) -> dict[str, str]:
        """The kinds of a reply's fields as they leave."""
        return {**kinds, self.way.field: SEALED}

    def sealed(
        self, reply: Reply, header: Mapping[str, Any], runner: SiteRunner, sent: Mapping[str, Content]
    ) -> dict[str, Content]:
        """A reply with its model sealed, after the check that the server makes of replies that it can read.

        Raises:
            FedshiftError: the reply is not what the call promises.
        """
        call, found = header["step"], reply_content(reply)
        try:
            _check_of(runner, header).check(call, self._name, type(reply), found, sent)
        except FedshiftError as error:
            raise type(error)(f"site '{self._name}': its reply to call {call}: {error}") from None
        exchange, field = int(header["envelope"]["exchange"]), self.way.field
        passage = Passage(header["run"], exchange, call, field, self._name, self._card.site)
        plain = narrowed(runner.site.memory, header, {field: found[field]}).data
        sealed = seal_for(self._card.public, plain, passage)
        identity = self._sums.identity
        signature = identity.sign(passage.signed_text(sealed))
        return {**found, field: sealed_content(sealed, signature, identity.certificate)}


def _check_of(runner: SiteRunner, header: Mapping[str, Any]) -> ReplyCheck:
    site = runner.site
    shape = tuple(header["setting"]["input_shape"])
    return ReplyCheck(runner.method, {site.name: About(site.network, site.samples, shape, site.classes, site.training)})
