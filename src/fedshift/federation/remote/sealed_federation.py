"""A remote federation that hands models from site to site without reading them.

What a method declares in `Method.routed` comes sealed for its receiver. The method's server code gets a `Closed` in
the model's place, which it can only hand on.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from dataclasses import replace
from typing import Any, NoReturn

from fedshift.errors import FedshiftError
from fedshift.federation.exchange import Answer, Missing, Request
from fedshift.federation.messages import Content, PerSite, Reply, Sealed
from fedshift.federation.remote.remote_federation import RemoteFederation
from fedshift.federation.remote.transport import Lost, ask_plain
from fedshift.federation.replies.layouts import Layout
from fedshift.federation.secure.orders import card_entry, card_of
from fedshift.federation.secure.sealing import parts_of
from fedshift.weights import NamedTensors, Weights


class Closed:
    """A model that is sealed for another site. Server code can hand it on and do nothing else with it."""

    def __init__(self, sealed: Sealed) -> None:
        self._sealed = sealed

    def __getattr__(self, name: str) -> NoReturn:
        self._refuse()

    def __getitem__(self, name: object) -> NoReturn:
        self._refuse()

    def __iter__(self) -> NoReturn:
        self._refuse()

    def __len__(self) -> NoReturn:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise FedshiftError("this model is sealed for another site: the method may only hand it on, not read it")


class SealedFederation(RemoteFederation):
    """Sites behind a `Transport`. What others send to the target is sealed with the target's own key.

    Args:
        arguments: as for `RemoteFederation`.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._card: list[str] | None = None
        self._seals = False
        """Whether the requests that are being written ask for sealed replies."""

    def deliver(self, call: str, requests: Iterator[Request]) -> Generator[Answer[Any] | Missing, None, None]:
        self._seals = call in self.method.call_owner(call).routed
        try:
            if self._seals and self._card is None:
                self._card = self._fetch_card()
            yield from super().deliver(call, requests)
        finally:
            self._seals = False

    def reply_of(
        self, kind: type[Reply], call: str, request: Request, header: Mapping[str, Any], content: Mapping[str, Any]
    ) -> tuple[Reply, Layout | None]:
        way = self.method.call_owner(call).routed.get(call)
        if way is None:
            return super().reply_of(kind, call, request, header, content)
        sealed = content.get(way.field)
        parts_of(sealed, *self.checks.size)
        assert isinstance(sealed, Sealed)  # as `parts_of` made sure
        # The rest is checked as always, with a model in the place of the one that only its receiver can check.
        before = request.content.get(way.field)
        stands_in = before if isinstance(before, Weights) else self.checks.start
        reply, _ = super().reply_of(kind, call, request, header, {**content, way.field: stands_in})
        return replace(reply, **{way.field: Closed(sealed)}), None

    def _content_for(self, site: str, name: str, value: Content | PerSite) -> Content:
        sent: Content = _carried(super()._content_for(site, name, value))
        return sent

    def _common(self, site: str) -> dict[str, Any]:
        more = {"seal": {"for": self.targets[0], "card": self._card}} if self._seals else {}
        return {**super()._common(site), "routing": "sealed", **more}

    def _fetch_card(self) -> list[str]:
        """The target's key, as it signed it.

        Raises:
            FedshiftError: it gives none.
        """
        (target,) = self.targets
        answer = ask_plain(self.transport, "sealing_key", self.run, {target: {}}, self.deadline).get(target)
        if answer is None or isinstance(answer, Lost):
            reason = "did not answer" if answer is None else answer.reason
            raise FedshiftError(
                f"site '{target}' gives no key to seal models for it: {reason}; when that is put right, continue with "
                "fedshift deploy resume"
            )
        return card_entry(card_of(target, answer.get("card")))


def _carried(value: Any) -> Any:
    """Content as it is sent: closed models stay sealed."""
    if isinstance(value, Closed):
        return value._sealed
    if isinstance(value, Mapping) and not isinstance(value, NamedTensors):
        return {name: _carried(one) for name, one in value.items()}
    return value
