"""What a deployed site does with sealed models: it seals its own for their readers, and opens those of others.

It also seals for itself what the coordinator keeps for it, and opens the trained model that is made of sealed parts.

```text
            source                             coordinator                    target
once a run                                  ── asks ─────────────────────▶  key pair
                                            ◀──────────────── key, signature
each round  checks whose key it is        ◀─ what to train, key, signature
            trains, checks its model
            seals it, signs               ── carries ───────────────────▶  opens, checks who signed
                                                                             checks the model, trains
kd3a, fada                                  ◀──────────── its own model, in clear
shot                                        ◀── its own models, sealed for itself
                                            ── keeps, gives back ────────▶  opens them, measures
```

Each reader makes one X25519 key per run, and signs run, name and key with the key of its site's kit. A sender checks
the certificate as for sums. A model is encrypted with a key that is used once (ChaCha20-Poly1305), and that key is
sealed for each reader with HPKE (RFC 9180: X25519, HKDF-SHA256, ChaCha20-Poly1305), both from the package
`cryptography`. It opens only for the run, exchange, call, field, sender and readers that it was sealed for, all of
which the sender signs; so neither the coordinator nor another reader can replace it.

* **Checks.** The sender checks its model before sealing, as the server would, and each reader what it opens: names
  and shapes, finite numbers, the distance to the start. It refuses a wrong one and names its sender; if the target
  does, the run ends. Names, shapes and types are told in clear.
* **The server's code** has tensors with names and shapes and no numbers; whatever would read a number ends the run.
* **Other rounds.** A model that is handed on must be of the exchange before. Each reader notes how new the parts of a
  model were, and refuses older ones later, parts of different calls, and another order than that of their sites.
* **The same run in clear.** A site notes that a run has sealed models, and refuses requests of it that are not sealed
  or of another method.
* **Measuring** is at the sites that can open the model. With `shot` that is the target alone: no accuracy at the
  sources, no round selected by it. A `copa` whose target lies at the coordinator is refused.
* **Logs.** A sender's says for whom (`sealed_for`), a reader's whose models it opened (`opened`).
* **Killed and resumed**: other bytes, the same bits at the end. A reader that gives no key is waited for.
* **Cost**: for twelve million numbers on one core 0.07 s to seal and sign and 0.1 s to open.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, RootModel
from torch import Tensor

from fedshift.deploy.agreed_terms import AgreedTerms
from fedshift.deploy.crypto.masked_sums import KeyAnswer, KeyCard, RunKey
from fedshift.deploy.json_files import read_stored
from fedshift.deploy.remote.policy import SEALED
from fedshift.deploy.remote.requests import (
    Asked,
    CallRequest,
    KeyRequest,
    MeasureRequest,
    PredictRequest,
    RunRequest,
    run_name,
)
from fedshift.deploy.remote.transport import answer_of
from fedshift.deploy.remote.wire import Message, Wire, widen
from fedshift.deploy.secure.site_sums import SiteSums
from fedshift.deploy.site_file import SiteConfig
from fedshift.deploy.site_requests import narrow_reply
from fedshift.errors import FedshiftError, Refused, UserError
from fedshift.federation.exchange import Routed
from fedshift.federation.messages import Content, Reply, Sealed, decode, leaves, reply_content
from fedshift.federation.plain_values import Closed
from fedshift.federation.replies import About, ReplyCheck, reply_type
from fedshift.federation.secure.closed import Box, Package, Passage, bytes_of, most_bytes
from fedshift.federation.site_runner import Setting, SiteRunner
from fedshift.federation.training import Training
from fedshift.json_objects import write_object
from fedshift.methods.base import Method
from fedshift.models.network import Network
from fedshift.weights import Weights

try:
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
    from cryptography.hazmat.primitives.hpke import AEAD, KDF, KEM, Suite
except ImportError:
    raise UserError(
        "engine.routing: sealed needs the package cryptography, 47 or later: pip install 'fedshift[deploy]'"
    ) from None

_SUITE = Suite(KEM.X25519, KDF.HKDF_SHA256, AEAD.CHACHA20_POLY1305)
_KEY = 32
_NONCE = bytes(12)
"""The key of a box is used once, so its nonce need not differ."""


class SealingKey(RunKey):
    """The key of a run that others seal models with for one site."""

    def open(self, box: Box, reader: str) -> bytes:
        """Decrypt what is in a box; Refused if it was changed, or sealed with another key or for another passage."""
        way = box.passage
        try:
            public, wrapped = box.keys.get(reader, (b"", b""))
            if public != self.public:
                raise ValueError
            secret = _SUITE.decrypt(wrapped, self._key, info=_purpose(way, reader))
            return ChaCha20Poly1305(secret).decrypt(_NONCE, bytes_of(box.content["sealed"]), way.text)
        except (InvalidTag, ValueError):
            raise Refused(
                f"site '{reader}': the model of '{way.sender}' was not sealed for this site's key, or it was changed"
            ) from None


def key_text(run: str, site: str, public: bytes) -> bytes:
    """What a site signs of its key."""
    return json.dumps(["fedshift sealing key 1", run, site, public.hex()]).encode()


def seal_for(
    keys: Mapping[str, bytes], plain: bytes, passage: Passage, models: Mapping[str, Weights]
) -> tuple[bytes, bytes]:
    """Encrypt models with a key that is used once, and that key for each reader. Returns what the box says of itself,
    and what is sealed. Refused if a key is none. ``models``: the models by site, whose looks are told in clear."""
    secret = os.urandom(_KEY)
    wrapped: dict[str, tuple[bytes, bytes]] = {}
    for reader, public in keys.items():
        try:
            reader_key = X25519PublicKey.from_public_bytes(public)
            wrapped[reader] = public, _SUITE.encrypt(secret, reader_key, info=_purpose(passage, reader))
        except ValueError:  # a point of low order, or of another length
            raise Refused(f"site '{passage.sender}': the key of '{reader}' is none") from None
    return Box.description(passage, wrapped, models), ChaCha20Poly1305(secret).encrypt(_NONCE, plain, passage.text)


def _purpose(passage: Passage, reader: str) -> bytes:
    """What the key of a box is sealed for."""
    return passage.text + json.dumps(reader).encode()


_REMEDY = "restore it, or run again under another name: without it, this site could take an older model for a newer one"
_MOST_NOTED = 16
"""Notes that are kept for each sender, newest last. A few suffice: a killed coordinator repeats one round at most."""


class _MethodNoted(Closed):
    """The digest of the method of a run that has sealed models."""

    method: str


class _Newest(RootModel[dict[str, tuple[tuple[float, int], ...]]]):
    """By sender: the positions at which the site had models of it, and the exchanges from which they were."""

    model_config = ConfigDict(frozen=True, strict=True)


class Boxes:
    """The boxes of one run at one site."""

    def __init__(self, name: str, folder: Path, terms: AgreedTerms, sums: SiteSums) -> None:
        self.name, self.folder = name, folder
        self._terms, self._sums = terms, sums
        self.newest = folder / "newest.json"

    @cached_property
    def key(self) -> SealingKey:
        """The site's key of the run."""
        return SealingKey.of(self.folder / "key")

    def check_signed(self, site: str, certificate: bytes, text: bytes, signature: bytes, what: str = "the key") -> None:
        """Raise Refused unless a site signed a text with the certificate that this site has on record for it."""
        result = self._sums.identity.check(site, certificate, text, signature, what)
        if site != self.name:
            self._terms.check_peers({site: result})
        elif certificate != self._sums.identity.certificate:
            raise Refused(f"site '{site}': {what} of '{site}' is signed with another certificate than its own")

    # What the run is --------------------------------------------------------------------------------------------------

    def check_setting(self, request: RunRequest) -> None:
        """Raise Refused if this run had sealed models before, and a request is of another method or not sealed.

        Otherwise it could have the site send what others sealed for it, and what it keeps.
        """
        noted = read_stored(_MethodNoted, self.folder / "method.json", _REMEDY)
        if noted is not None and (noted.method != _method_in(request) or request.routing != "sealed"):
            raise Refused(
                f"site '{self.name}': run '{request.run}' has sealed models here, and this request is not sealed or "
                f"is of another method; if a new run has the name of an old one, remove {self.folder.parent}"
            )

    def note_setting(self, request: RunRequest) -> None:
        """Write down that this run has sealed models, and of which method."""
        if not (self.folder / "method.json").exists():
            write_object(self.folder / "method.json", {"method": _method_in(request)}, private=True)

    # Who sealed it, and when ------------------------------------------------------------------------------------------

    def only(self, value: Any, sender: str, most: int) -> Box:
        """The box of a single model in a request; Refused if it is no such box."""
        try:
            package = Package.read(value, most)
            if len(package.boxes) != 1 or package.places != [(0, "", "")]:
                raise FedshiftError("it holds no single model")
        except FedshiftError as error:
            raise Refused(f"site '{self.name}': the model of '{sender}' that it is given: {error}") from None
        return package.boxes[0]

    def check_way(self, box: Box, run: str, sender: str, call: str, field: str, exchange: int | None) -> None:
        """Raise Refused unless a box is what a site sealed in this run and call, and in an exchange if one is given."""
        passage, due = box.passage, box.passage.exchange if exchange is None else exchange
        wanted = (run, sender, call, field, due)
        if (passage.run, passage.sender, passage.call, passage.field, passage.exchange) != wanted:
            raise Refused(
                f"site '{self.name}': this request should hold the model of '{sender}' from exchange {due}, call "
                f"{call}, run '{run}', but holds that of '{passage.sender}' from exchange {passage.exchange}, call "
                f"{passage.call}, run '{passage.run}'"
            )

    def check_newer(self, exchanges: Mapping[str, int], position: float) -> None:
        """Raise Refused if a model is older than one that this site had at an earlier position.

        A site that was missing has an older model, so the age alone says nothing. A round that is repeated after a kill
        has the position that it had before. ``exchanges``: in which each site sealed its model; under no name, the
        newest of the trained model.
        """
        noted = self._notes()
        for sender, exchange in exchanges.items():
            before = max((newest for at, newest in noted.get(sender, ()) if at < position), default=exchange)
            if exchange < before:
                whose = f"model of '{sender}'" if sender else "trained model"
                raise Refused(
                    f"site '{self.name}': the {whose} in this request is from exchange {exchange}, but this site had "
                    f"one from exchange {before} before: it belongs to an earlier round"
                )

    def check_whole(self, package: Package, position: float) -> dict[str, int]:
        """Check the sealed parts of a trained model; return the exchange in which each sender sealed its part. Refused
        if they are not of one call, not in order, or older than this site had them before."""
        ways = [box.passage for box in package.boxes]
        sites, senders = package.sites_in_order(), [way.sender for way in ways]
        if len({(way.run, way.call) for way in ways}) != 1 or len({*senders}) != len(ways):
            raise Refused(f"site '{self.name}': the sealed parts of a model are not of one exchange of the run")
        if sites != sorted({*sites}):
            raise Refused(f"site '{self.name}': the sealed parts of a model are not in the order of their sites")
        exchanges = {way.sender: way.exchange for way in ways}
        exchanges[""] = max(exchanges.values())
        self.check_newer(exchanges, position)
        return exchanges

    def note(self, exchanges: Mapping[str, int], position: float) -> None:
        """Write down from which exchange each sender's model was, at a position."""
        noted = self._notes()
        for sender, exchange in exchanges.items():
            known = noted.setdefault(sender, [])
            if not known or known[-1][1] < exchange:
                noted[sender] = [*known, [position, exchange]][-_MOST_NOTED:]
        write_object(self.newest, noted, private=True)

    def _notes(self) -> dict[str, list[Any]]:
        noted = read_stored(_Newest, self.newest, _REMEDY)
        return {} if noted is None else {sender: list(map(list, known)) for sender, known in noted.root.items()}

    # What is in it ----------------------------------------------------------------------------------------------------

    def plain(self, box: Box, most_tensors: int | None = None) -> dict[str, Weights]:
        """The models in a box by site, after a check of who sealed it and that they look as it says."""
        way, parts = box.passage, {name: bytes_of(part) for name, part in box.content.items()}
        self.check_signed(way.sender, parts["certificate"], box.signed_text, parts["signature"], "the sealed model")
        plain = self.key.open(box, self.name)
        limits = () if most_tensors is None else (most_tensors,)
        try:
            inner, packed = decode(plain, *limits)
            value = widen(inner, packed.get("packed"), *limits).get(way.field)
            models = {"": value} if isinstance(value, Weights) else value
            if not isinstance(models, Mapping) or not all(isinstance(model, Weights) for model in models.values()):
                raise FedshiftError("it is no model")
            result = {site: model for site, model in models.items() if isinstance(model, Weights)}
            looks = {site: _looks(model) for site, model in result.items()}
            if looks != {site: _looks(model) for site, model in box.stand_ins().items()}:
                raise FedshiftError("its tensors are not those that its box declares")
        except FedshiftError as error:
            raise self._wrong(way.sender, error) from None
        return result

    def models(self, box: Box, method: Method, check: ReplyCheck, sent: Mapping[str, Content]) -> dict[str, Weights]:
        """The models in a box by site, after all checks that the server makes of those that it can read. ``sent``:
        content of the request. What was trained from a model of the same name begins there, too."""
        models = self.plain(box, check.most_tensors({}) * max(1, len(box.models)))
        way, value = box.passage, models.get("", models)
        try:
            check.check_field(way.call, reply_type(method, way.call), way.field, value, sent)
        except FedshiftError as error:
            raise self._wrong(way.sender, error) from None
        return models

    def _wrong(self, sender: str, error: FedshiftError) -> Refused:
        return Refused(f"site '{self.name}': the model that '{sender}' sealed for it: {error}")


def _method_in(request: RunRequest) -> str:
    """A digest of the method in a request."""
    method = request.setting.method.model_dump(mode="json", by_alias=True, exclude_unset=True)
    return hashlib.sha256(json.dumps(method, sort_keys=True).encode()).hexdigest()


def _looks(model: Weights) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Type and shape of each tensor."""
    return {name: (str(tensor.dtype), tuple(tensor.shape)) for name, tensor in model.items()}


FOLDER = "sealing"
"""In the site's memory of a run: its key, the key's card, and from which exchanges the models were that it opened."""
_ROUNDED = 1 / 32
"""How far rounding and its residual can move a number, as a share of the largest. 8-bit numbers have 127 steps."""
KEPT = ".models"
"""In the site's memory: the same for finished runs whose trained models are sealed. No run can have this name."""


class SiteSeals:
    """The part of a site's program that knows of sealed models."""

    def __init__(self, config: SiteConfig, terms: AgreedTerms, sums: SiteSums) -> None:
        self.name = config.file.site
        self._memory, self._terms, self._sums = config.memory, terms, sums
        self._check: tuple[str, ReplyCheck] | None = None

    def key(self, asked: Asked[KeyRequest]) -> Message:
        """Answer with the signed key of a run, which is made if the run has none here."""
        run, identity = asked.request.run, self._sums.identity
        public, file = SealingKey.of(self._folder(run) / "key").public, self._folder(run) / "card.json"
        # Signing again would give another signature, and a repeated request must be answered with the same card.
        kept = read_stored(KeyAnswer, file, f"restore it, or delete {file.parent} and run again")
        card = None if kept is None else kept.of(self.name)
        if card is None or (card.public, card.certificate) != (public, identity.certificate):
            signature = identity.sign(key_text(run, self.name, public))
            card = KeyCard(self.name, public, signature, identity.certificate)
            write_object(file, KeyAnswer(card=card.entry).model_dump(mode="json"), private=True)
        asked.entry["key"] = public.hex()
        return answer_of(asked.key, KeyAnswer(card=card.entry))

    def end(self, run: str) -> None:
        """Keep the key of a run that is over, if parts of its trained model are sealed for this site."""
        boxes = self._boxes(run)
        if boxes.newest.exists():
            kept = self._memory / KEPT / boxes.key.public.hex()
            kept.parent.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(kept, ignore_errors=True)
            boxes.folder.rename(kept)

    def _folder(self, run: str) -> Path:
        return self._memory / run_name(run) / FOLDER

    def _boxes(self, run: str) -> Boxes:
        return Boxes(self.name, self._folder(run), self._terms, self._sums)

    # At the sender ----------------------------------------------------------------------------------------------------

    def begin_sealing(self, request: CallRequest, method: Method, entry: dict[str, Any]) -> Sealing | None:
        """What a request says of sealing its reply; None if it does not ask for that. Refused if the reply is not one
        that the server leaves unread, or a reader's key is not signed by that site."""
        boxes = self._boxes(request.run)
        boxes.check_setting(request)
        if request.seal is None:
            return None
        way = method.calls.routing(request.call)
        if way is None:
            raise Refused(f"site '{self.name}': what call {request.call} sends is not only handed on to another site")
        cards = {reader: KeyCard(reader, *entry) for reader, entry in request.seal.readers.items()}
        if not cards or (way.readers == "target" and len(cards) > 1):
            raise Refused(f"site '{self.name}': a request to seal does not say for whom")
        if way.readers == "sender" and cards.keys() != {self.name}:
            raise Refused(
                f"site '{self.name}' is asked to seal for '{next(iter(cards))}' what call {request.call} seals for "
                "the site itself alone"
            )
        if way.readers == "target" and self.name in cards:
            raise Refused(
                f"site '{self.name}' is asked to seal a model for itself, as if it were another site's target"
            )
        for reader, card in cards.items():
            if reader == self.name and card.public != boxes.key.public:
                raise Refused(f"site '{self.name}' is asked to seal for a key that is said to be its own and is not")
            boxes.check_signed(reader, card.certificate, key_text(request.run, reader, card.public), card.signature)
        boxes.note_setting(request)
        entry["sealed_for"] = list(cards)
        return Sealing(self.name, self._sums, boxes, cards, way)

    # At the reader ----------------------------------------------------------------------------------------------------

    def open_content(self, asked: Asked[CallRequest], runner: SiteRunner, method: Method) -> Mapping[str, Content]:
        """The content of a request with its sealed models opened. Refused if one was not sealed by its sender for this
        site and this exchange, or is no model of this run."""
        request, content = asked.request, asked.content
        call = request.call
        given = {way.to[call]: (made, way) for made, way in method.traits.routed.items() if call in way.to}
        places = [path.split("/")[0] for path, value in leaves(content) if isinstance(value, Sealed)]
        for index in places:
            if index not in given or isinstance(content[index], Sealed):
                raise Refused(f"site '{self.name}': call {call} is not given sealed models in '{index}'")
        if not places and request.routing != "sealed":
            return content
        exchange, check = request.envelope.exchange, _check_of(runner, request)
        boxes, opened = self._boxes(request.run), dict(content)
        boxes.note_setting(request)
        newest: dict[str, int] = {}
        for argument, (made, way) in given.items():
            models = content.get(argument)
            if not isinstance(models, Mapping):
                raise Refused(f"site '{self.name}': call {call} is not given models by site in '{argument}'")
            result = {}
            for sender, value in models.items():
                if way.in_model and isinstance(value, Weights) and _is_of(check.start, value, request.wire):
                    result[sender] = value  # nobody has trained it yet
                    continue
                box = boxes.only(value, sender, _most(check, request))
                if way.in_model:
                    boxes.check_way(box, request.run, sender, made, way.field, None)
                    boxes.check_newer({sender: box.passage.exchange}, exchange)
                    newest[sender] = box.passage.exchange
                else:
                    boxes.check_way(box, request.run, sender, made, way.field, exchange - 1)
                result[sender] = boxes.models(box, method, check, content)[""]
            opened[argument] = result
            asked.entry["opened"] = list(result)
        if newest:
            boxes.note(newest, exchange)
        return opened

    def opened_model(self, asked: Asked[MeasureRequest] | Asked[PredictRequest], setting: Setting) -> Weights:
        """The model in a request to measure it, with its sealed parts opened. Refused if a part was not sealed for this
        site, or is not one of the newest model that the site knows of; FedshiftError if there is no model."""
        request, content = asked.request, asked.content
        opened_model = content.get("weights")
        if isinstance(opened_model, Weights):
            return opened_model
        if not isinstance(opened_model, Sealed):
            raise FedshiftError("a request to measure holds no weights")
        method = setting.method
        assert isinstance(method, Method)
        if self._check is None or self._check[0] != request.digest:
            about = _about(setting.build_network(), 0, request, setting.training)
            self._check = request.digest, ReplyCheck(method, {self.name: about}, all_sites=False)
        check, boxes = self._check[1], self._boxes(request.run)
        try:
            package = Package.read(opened_model, _most(check, request))
        except FedshiftError as error:
            raise Refused(f"site '{self.name}': a request to measure: {error}") from None
        for box in package.boxes:
            way = method.calls.routing(box.passage.call)
            if way is None or not way.in_model:
                raise Refused(f"site '{self.name}': a model to measure has a part that call {box.passage.call} sent")
            boxes.check_way(box, request.run, box.passage.sender, box.passage.call, way.field, None)
        position = request.at + 0.5  # after this exchange, and before the next
        newest = boxes.check_whole(package, position)
        clear = content.get("weights in clear")
        model = package.whole(
            clear if isinstance(clear, Weights) else {}, lambda box: boxes.models(box, method, check, {})
        )
        boxes.note(newest, position)
        asked.entry["opened"] = [box.passage.sender for box in package.boxes]
        return model

    def opened_file(self, content: Mapping[str, Content]) -> Weights:
        """The trained model of a run that is over, from the content of the coordinator's file.

        Refused if it was not sealed for this site, or is not the last model of the run that the site knows of;
        FedshiftError if it is no sealed model.
        """
        package = Package.read(content.get("weights"))
        keys = {box.keys[self.name][0] for box in package.boxes if self.name in box.keys}
        folders = [*self._memory.glob(f"{KEPT}/*"), *self._memory.glob(f"*/{FOLDER}")]
        result = [Boxes(self.name, folder, self._terms, self._sums) for folder in folders if (folder / "key").exists()]
        boxes = next((item for item in result if {item.key.public} == keys), None)
        if boxes is None:
            raise Refused(f"site '{self.name}' has no key that this model was sealed for")
        boxes.check_whole(package, float("inf"))
        clear = content.get("weights in clear")
        return package.whole(clear if isinstance(clear, Weights) else {}, boxes.plain)


class Sealing:
    """One request to a site that asks for a sealed reply."""

    def __init__(self, name: str, sums: SiteSums, boxes: Boxes, cards: Mapping[str, KeyCard], way: Routed) -> None:
        self._name, self._sums, self._boxes, self._cards, self._way = name, sums, boxes, cards, way

    def sealed_kinds(self, kinds: Mapping[str, str]) -> dict[str, str]:
        """The kinds of a reply's fields as they leave."""
        return {**kinds, self._way.field: SEALED}

    def seal_reply(
        self, reply: Reply, request: CallRequest, runner: SiteRunner, sent: Mapping[str, Content]
    ) -> dict[str, Content]:
        """A reply with its models sealed, after the check that the server makes of replies that it can read."""
        call, result = request.call, reply_content(reply)
        try:
            _check_of(runner, request).check(call, self._name, type(reply), result, sent)
        except FedshiftError as error:
            raise type(error)(f"site '{self._name}': its reply to call {call}: {error}") from None
        exchange, field = request.envelope.exchange, self._way.field
        passage = Passage(request.run, exchange, call, field, self._name, tuple(sorted(self._cards)))
        value: Any = result[field]
        models: dict[str, Weights] = {"": value} if isinstance(value, Weights) else dict(value)
        plain = narrow_reply(runner.site.memory, request, {field: value}).data
        keys = {reader: card.public for reader, card in self._cards.items()}
        text, sealed = seal_for(keys, plain, passage, models)
        identity = self._sums.identity
        signature = identity.sign(Box.text_to_sign(passage, text, sealed))
        if self._way.in_model and self._name in self._cards:
            self._boxes.note({"": exchange}, exchange)
        return {**result, field: Box.of(text, sealed, signature, identity.certificate)}


def _check_of(runner: SiteRunner, request: RunRequest) -> ReplyCheck:
    site = runner.site
    about = _about(site.network, site.samples, request, site.training)
    return ReplyCheck(runner.method, {site.name: about}, all_sites=False)


def _about(network: Network, samples: int, request: RunRequest, training: Training) -> About:
    return About(network, samples, request.setting.input_shape, request.setting.classes, training)


def _most(check: ReplyCheck, request: RunRequest) -> int:
    return most_bytes(check.size, request.setting.sources)


def _is_of(start: Weights, model: Weights, wire: Wire) -> bool:
    """Whether a model is a part of the one that the run starts from, up to the rounding of the wire."""
    first = next(iter(model), "")
    prefixes = [name.removesuffix(first) for name in start if first and name.endswith(first)]
    return any(_is_like(model, {name: start.get(f"{prefix}{name}") for name in model}, wire) for prefix in prefixes)


def _is_like(model: Weights, other: Mapping[str, Tensor | None], wire: Wire) -> bool:
    result = {name: tensor for name, tensor in other.items() if tensor is not None}
    looks_alike = [item.shape for item in model.values()] == [result[name].shape for name in model if name in result]
    if wire == "float32" or not looks_alike:
        return model.equal(result)
    largest = max(float(item.abs().max()) for item in result.values() if item.numel())
    return all(bool((item - result[name]).abs().max() <= _ROUNDED * largest) for name, item in model.items())
