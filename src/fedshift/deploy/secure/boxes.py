"""Opens what was sealed for a site in one run, after it has checked who sealed it, when, and for what."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, RootModel

from fedshift.deploy.agreed_terms import AgreedTerms
from fedshift.deploy.crypto.sealing import SealingKey
from fedshift.deploy.json_files import read_stored
from fedshift.deploy.remote.requests import RunRequest
from fedshift.deploy.remote.wire import widen
from fedshift.deploy.secure.site_sums import SiteSums
from fedshift.errors import FedshiftError, Refused
from fedshift.federation.exchange import Routed
from fedshift.federation.messages import Content, decode
from fedshift.federation.plain_values import Closed
from fedshift.federation.replies import ReplyCheck, reply_type
from fedshift.federation.secure.closed import Box, Package, bytes_of
from fedshift.json_objects import write_object
from fedshift.methods.base import Method
from fedshift.weights import Weights

_REMEDY = "restore it, or run again under another name: without it, this site could take an older model for a newer one"
_MOST_NOTED = 16
"""Notes that are kept for each sender, newest last. A few suffice: a killed coordinator repeats one round at most."""


@dataclass(frozen=True)
class Way:
    """The call that makes models which a method routes, and how."""

    call: str
    routed: Routed


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

    def check_way(self, box: Box, run: str, sender: str, way: Way, exchange: int | None) -> None:
        """Raise Refused unless a box is what a site sealed in this run and call, and in an exchange if one is given."""
        passage, due = box.passage, box.passage.exchange if exchange is None else exchange
        wanted = (run, sender, way.call, way.routed.field, due)
        if (passage.run, passage.sender, passage.call, passage.field, passage.exchange) != wanted:
            raise Refused(
                f"site '{self.name}': this request should hold the model of '{sender}' from exchange {due}, call "
                f"{way.call}, run '{run}', but holds that of '{passage.sender}' from exchange {passage.exchange}, call "
                f"{passage.call}, run '{passage.run}'"
            )

    def check_newer(self, exchanges: Mapping[str, int], position: float) -> None:
        """Raise Refused if a model is older than one that this site had at an earlier position.

        A site that was missing has an older model, so the age alone says nothing. A round that is repeated after a kill
        has the position that it had before.

        Args:
            exchanges: in which each site sealed its model; under no name, the newest of the trained model.
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
        """Check the sealed parts of a trained model; return the exchange in which each sender sealed its part.

        Raises:
            Refused: they are not of one call, not in order, or older than this site had them before.
        """
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
        """The models in a box by site, after all checks that the server makes of those that it can read.

        Args:
            sent: content of the request. What was trained from a model of the same name begins there, too.
        """
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
