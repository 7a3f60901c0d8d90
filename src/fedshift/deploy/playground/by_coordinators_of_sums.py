"""What a coordinator tries under secure aggregation, to see a single model; and a site, to spoil a sum.

Four sites of a project of their own answer in this process. Their kits are real: they sign keys with certificates that
the project's authority issued.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch

from fedshift.deploy.crypto.at_server import SecureSum
from fedshift.deploy.crypto.keys import KeyCard, Order, signed_text
from fedshift.deploy.crypto.orders import (
    card_entry,
    card_of,
    confirmed_of,
    order_entry,
    order_in,
    revealed_of,
    sealed_content,
    upload_of,
)
from fedshift.deploy.playground.in_process import answer_to, caught_requests, folder_of, forged, rehearse
from fedshift.deploy.playground.played import FOUR, Played, of_four
from fedshift.deploy.playground.promise import Broken, Promise, expect
from fedshift.deploy.remote.policy import AuditLog
from fedshift.deploy.remote.transport import PROTOCOL, Lost, request_key
from fedshift.deploy.remote.wire import Message, body_of, seal, unseal
from fedshift.deploy.secure.identity import Identity, signing
from fedshift.deploy.secure.rosters import ROSTERS
from fedshift.deploy.site_server import SiteProgram
from fedshift.errors import Refused, UserError
from fedshift.federation.messages import Content, Masked
from fedshift.federation.secure.sums import Layout
from fedshift.weights import Weights

Answer = tuple[dict[str, Any], Mapping[str, Content]]
SECURE: dict[str, Any] = {"engine": {"aggregation": "secure"}}
FIRST, LIAR = FOUR[0], FOUR[-1]


def required(played: Played, **policy: Any) -> Callable[[str], dict[str, Any]]:
    """SITE.yaml of sites whose models leave masked or not at all, and that know each other's certificates."""
    peers = {site: Identity.of_kit(kit, site).fingerprint for site, kit in played.sites.items()}
    send = ["masked", "numbers", "accuracy", "metrics"]
    return lambda site: {"policy": {"secure": "required", "peers": peers, "send": send, **policy}}


class Sum:
    """One sum of the four sites, of which a coordinator has what it sends in its hands."""

    def __init__(self, played: Played, name: str, *, method: str = "fedavg", call: str = "fit", **policy: Any) -> None:
        four = of_four(played)
        self.programs, self.requests = caught_requests(
            four, name, call, method, experiment=SECURE, differs=required(four, **policy)
        )
        self.header = json.loads(self.requests[FIRST].header)
        self.order = order_in(self.header, body_of(self.content(FIRST)).sha256)[0]

    def content(self, site: str) -> Mapping[str, Content]:
        """What the site is sent."""
        return unseal(self.requests[site])[1]

    def asked(self, site: str, content: Mapping[str, Content] | None = None, **changes: Any) -> dict[str, Any]:
        """The header of the site's answer to the request to mask, changed."""
        return answer_to(self.programs[site], forged(self.requests[site], content, **changes))

    def refused(self, word: str, content: Mapping[str, Content] | None = None, **changes: Any) -> str:
        """What the first site says to a request that it must refuse; it answers the genuine one afterwards."""
        answer = self.asked(FIRST, content, **changes)
        said = str(answer.get("message"))
        expect("error" in answer and word in said, f"the site answers {said}")
        genuine = self.asked(FIRST)
        expect("error" not in genuine, f"the site does not answer the genuine request either: {genuine}")
        return said

    def masked(self, contents: Mapping[str, Mapping[str, Content]] | None = None) -> SecureSum:
        """The sum of what all sites answer, each to content of its own if there is any."""
        total = SecureSum(self.order)
        for site, program in self.programs.items():
            request = forged(self.requests[site], (contents or {}).get(site))
            header, content, _ = unseal(program.handle(request, "an attacker"))
            expect("error" not in header, f"the site does not mask: {header}")
            upload, _ = upload_of(content, self.order, Layout.read(header["layout"]).length)
            total.add(site, upload)
        return total

    def unmasked_by(
        self, site: str, total: SecureSum, answered: Sequence[str], sealed: Mapping[str, bytes] | None = None
    ) -> Answer:
        """What a site answers to a request for shares, once those who answered confirmed that they did."""
        codes = {
            other: confirmed_of(content, other, answered).get(site, b"")
            for other in answered
            for header, content in [self.second("confirm", other, answered)]
            if other != site and "error" not in header
        }
        return self.second("unmask", site, answered, sealed_content(sealed or total.sealed_for(site), codes))

    def second(
        self, do: str, site: str, answered: Sequence[str], content: Mapping[str, Content] | None = None
    ) -> Answer:
        """What a site answers to a request of the second exchange."""
        body, asked = body_of(content or {}), {"do": do, "protocol": PROTOCOL, "run": self.order.run}
        asked |= {"order": order_entry(self.order), "answered": list(answered)}
        message = seal({"key": request_key(asked, body.sha256), **asked}, body)
        header, held, _ = unseal(self.programs[site].handle(message, "an attacker"))
        return header, held


def _honest(played: Played) -> str:
    four = of_four(played)
    rehearse(four, "sums", experiment=SECURE, differs=required(four))
    sent: set[str] = set()
    for site in four.sites:
        lines, _ = AuditLog.check(folder_of(four, "sums") / site / "memory" / "audit.jsonl")
        sent |= {piece["kind"] for line in lines for piece in line.get("sent", {}).values()}
    expect("masked" in sent and "weights" not in sent, f"what left the sites is {sorted(sent)}")
    return f"{len(four.sites)} sites train, and no model left one alone: {', '.join(sorted(sent))}"


def _alone(played: Played) -> str:
    return Sum(played, "alone").refused("policy.secure: required", sum=None, aggregation=None)


def _upload(played: Played) -> str:
    """The same update of the same site for two runs: masks are all that differs."""
    numbers = []
    for name in ("upload", "upload-again"):
        one = Sum(played, name)
        _, content, _ = unseal(one.programs[FIRST].handle(one.requests[FIRST], "an attacker"))
        upload = content["sum"]
        assert isinstance(upload, Masked)
        numbers.append(upload["sum"].double())
    first, second = numbers
    # An update is far below 2^62; what is random fills all 64 bits.
    expect(all(float(one.abs().median()) > 2**60 for one in numbers), "an upload has numbers of an update's size")
    expect(float((first - second).abs().median()) > 2**60, "two masked uploads of one update are alike")
    return f"{len(first)} integers that fill all 64 bits, and two uploads of one update have nothing in common"


def _roster(played: Played) -> str:
    one = Sum(played, "roster", roster="any")
    expect("error" not in one.asked(FIRST), "the site does not mask")
    return one.refused("masks it only once", **_later(one, one.order.exchange, FOUR[:3]))


def _later(one: Sum, exchange: int, names: Sequence[str] = FOUR) -> dict[str, Any]:
    """What a request to mask in another exchange says otherwise, for a sum of these sites."""
    envelope, whole = {**one.header["envelope"], "exchange": exchange}, one.header["sum"]
    cards = {site: whole["cards"][site] for site in names}
    asked = {**whole, "cards": cards, "envelopes": dict.fromkeys(names, envelope), "threshold": len(names) // 2 + 1}
    return {"envelope": envelope, "sum": asked}


def _difference(played: Played) -> str:
    """The same request, to all and then to all but one: the difference of the sums is the model of that one."""
    one = Sum(played, "difference")
    for site in FOUR:
        expect("error" not in one.asked(site), "a site does not mask")
    said = ""
    for number, names in enumerate([FOUR[:3], (*FOUR[:2], LIAR)], 2):
        for site in names:
            said = str(one.asked(site, **_later(one, number, names)).get("message"))
            expect("policy.roster" in said, f"the site answers {said}")
    return said


def _restored(played: Played) -> str:
    """The record of earlier sums is gone, as after a restore of an older copy."""
    one = Sum(played, "restored")
    expect("error" not in one.asked(FIRST), "the site does not mask")
    memory = one.programs[FIRST].config.memory
    (memory / ROSTERS).unlink()
    program = SiteProgram(one.programs[FIRST].config)
    said = str(answer_to(program, forged(one.requests[FIRST], **_later(one, 2))).get("message"))
    expect("put the file back" in said, f"the site answers {said}")
    return said


def _drawn(played: Played) -> str:
    """Other sites in each round, as many sums as there are sites: least squares would solve them."""
    four, options = of_four(played), {"protocol": {"targets": ["sites"], "seeds": [0], "test_fraction": 0.4}}
    options["protocol"]["sites_per_round"] = 3
    try:
        rehearse(four, "drawn", experiment={**SECURE, **options}, differs=required(four))
    except UserError as error:
        return str(error)
    raise Broken("a run draws sites for sums")


def _unequal(played: Played) -> str:
    """All sites are told the same: that the others may train on one mini-batch, and the first on all."""
    one = Sum(played, "unequal")
    little = {**one.header["envelope"], "mini_batches_left": 1}
    envelopes = {site: one.header["envelope"] if site == FIRST else little for site in FOUR}
    whole, said = one.header["sum"], ""
    for site in FOUR[1:]:
        said = str(one.asked(site, envelope=little, sum={**whole, "envelopes": envelopes}).get("message"))
        expect("twice that of the others" in said, f"the site answers {said}")
    return said


def _falling(played: Played) -> str:
    """All sites are told the same: that the run is nearly over for the others, whose learning rate is then about 0."""
    one = Sum(played, "falling")
    whole, late = one.header["sum"], {**one.header["envelope"], "progress": 0.999999}
    envelopes = {site: one.header["envelope"] if site == FIRST else late for site in FOUR}
    return one.refused("not asked for the same", sum={**whole, "envelopes": envelopes})


def _weighed(played: Played) -> str:
    """CSAC's sites are asked about like models, trained anew in each round, with another mean each time.

    With as many answers as there are other sites the models are solved for. So this remains where sites allow `csac`:
    here it is shown that it does, and that a site which does not allow it is asked nothing of the kind.
    """
    one, answered = Sum(played, "weighed", method="csac", call="calibrate", methods=["fedavg", "csac"]), 0
    told, first = one.content(FIRST), one.order.exchange
    weights = told["weights"]
    memory: dict[str, Any] = {}
    for number in range(len(FOUR) - 1):
        memory = _all_answer(
            one, first + 2 * number, "calibrate", {**told, "weights": _moved(weights, 1e-3 * number)}, memory
        )
        about = {"mean": _moved(weights, 0.1 * number)}
        _all_answer(one, first + 2 * number + 1, "weigh", about, memory)
        answered += 1
        again = _at(one, FIRST, first + 2 * number + 1, "weigh", memory)
        said = str(one.asked(FIRST, {"mean": _moved(weights, 9.0)}, **again).get("message"))
        expect("masks it only once" in said or "about this model" in said, f"the site answers {said}")
    other = Sum(played, "weighed-not")
    setting = {**other.header["setting"], "method": one.header["setting"]["method"]}
    refused = other.refused("policy.methods", setting=setting, call="acquire")
    return f"one question a model, so {answered} in {answered} rounds, which show all models; other sites: {refused}"


def _at(one: Sum, site: str, exchange: int, call: str, memory: Mapping[str, Any]) -> dict[str, Any]:
    """What the request for a call of another exchange says otherwise."""
    held = memory.get(site) or json.loads(one.requests[site].header)["memory"]
    return {**_later(one, exchange), "call": call, "memory": held, "kept": held}


def _all_answer(
    one: Sum, exchange: int, call: str, content: Mapping[str, Content], memory: Mapping[str, Any]
) -> dict[str, Any]:
    """Have all sites answer a call, which they must, and what each keeps then."""
    answers = {site: one.asked(site, content, **_at(one, site, exchange, call, memory)) for site in FOUR}
    expect(all("error" not in answer for answer in answers.values()), f"a site does not answer: {answers}")
    return {site: answer["memory"] for site, answer in answers.items()}


def _threshold(played: Played) -> str:
    """Fewer sites are to unmask than the site asks for, so that a site that colludes would be enough."""
    one = Sum(played, "threshold", colluders=2)
    return one.refused("policy.colluders", sum={**one.header["sum"], "threshold": 3})


def _small_sum(played: Played) -> str:
    one = Sum(played, "small")
    whole = one.header["sum"]
    two = {part: {site: whole[part][site] for site in FOUR[:2]} for part in ("cards", "envelopes")}
    return one.refused("at least 3 sites", sum={**whole, **two, "threshold": 2})


def _idle(played: Played) -> str:
    one = Sum(played, "idle")
    whole, nothing = one.header["sum"], {**one.header["envelope"], "mini_batches_left": 0}
    idle = {site: nothing if site in FOUR[2:] else envelope for site, envelope in whole["envelopes"].items()}
    return one.refused("at least 3 sites train", sum={**whole, "envelopes": idle})


def _survivors(played: Played) -> str:
    """The last site is called lost to the first, then not."""
    one = Sum(played, "survivors", roster="any")
    total, three = one.masked(), sorted(FOUR[:3])
    header, content = one.unmasked_by(FIRST, total, three)
    expect("error" not in header, f"the site does not unmask: {header}")
    shares = revealed_of(content, one.order, three)
    expect(set(shares.own) == set(three), "the site tells a share of the own seed of a site that is called lost")
    expect({lost for _, lost in shares.pairs} == {LIAR}, "the site tells seeds of two sites that both answered")
    header, _ = one.unmasked_by(FIRST, total, total.answered)
    said = str(header.get("message"))
    expect("for other sites already" in said, f"the site answers {said}")
    expect("error" not in one.unmasked_by(FIRST, total, three)[0], "the site does not repeat its answer")
    return said


def _different_survivors(played: Played) -> str:
    """Each site answers for one set only, so a coordinator that wants shares for two asks different sites."""
    one, three = Sum(played, "different-survivors", roster="any"), sorted(FOUR[:3])
    total = one.masked()
    one.second("confirm", FIRST, three)
    codes = {site: one.second("confirm", site, total.answered)[1] for site in FOUR[1:]}
    to_first = {site: confirmed_of(content, site, total.answered)[FIRST] for site, content in codes.items()}
    header, _ = one.second("unmask", FIRST, three, sealed_content(total.sealed_for(FIRST), to_first))
    said = str(header.get("message"))
    expect("no majority" in said, f"the site answers {said}")
    return said


def _different_models(played: Played) -> str:
    one = Sum(played, "different")
    other = {**one.content(FIRST), "weights": _moved(one.content(FIRST)["weights"], 1.0)}
    total = one.masked({FIRST: other})
    said = {site: str(one.unmasked_by(site, total, total.answered)[0].get("message")) for site in FOUR}
    expect("did not mask its reply for this roster and content" in said[FIRST], f"the site answers {said[FIRST]}")
    expect(all("not sealed for this sum" in said[site] for site in FOUR[1:]), f"the others answer {said}")
    return said[FOUR[1]]


def _moved(weights: Content, by: float) -> Weights:
    assert isinstance(weights, Weights)
    return Weights({name: tensor + by for name, tensor in weights.items()})


def _shares_of_another(played: Played) -> str:
    """Shares of a sum of another run, which the same sites sealed for the same site."""
    one, other = Sum(played, "shares"), Sum(played, "shares-of-another")
    total, before = one.masked(), other.masked()
    header, _ = one.unmasked_by(FIRST, total, total.answered, before.sealed_for(FIRST))
    said = str(header.get("message"))
    expect("not sealed for this sum" in said, f"the site answers {said}")
    return said


def _own_key(played: Played) -> str:
    """A key of the coordinator's in the name of another site, signed by nobody who may."""
    one = Sum(played, "own-key")
    honest = card_of(LIAR, one.header["sum"]["cards"][LIAR])
    thief = Identity.of_kit(of_four(played).sites[FOUR[1]], FOUR[1])
    public = card_of(FOUR[1], one.header["sum"]["cards"][FOUR[1]]).public
    card = KeyCard(LIAR, public, thief.sign(signed_text(one.order.run, LIAR, public)), honest.certificate)
    return one.refused("is not signed", sum=_with_card(one, card))


def _all_others(played: Played) -> str:
    """With the authority's key: a certificate in the name of another site, which signs a key of the thief's."""
    import datetime

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import rsa
    from cryptography.x509.oid import NameOID

    from fedshift.deploy.flare.authority import Authority

    four = of_four(played)
    authority = Authority.load(four.coordinator.parent / "authority", "four", lambda new: None)
    expect(authority is not None, "there is no authority")
    assert authority is not None
    issuer, now = x509.load_pem_x509_certificate(authority.certificate), datetime.datetime.now(datetime.UTC)
    key = rsa.generate_private_key(65537, 2048)
    made = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, LIAR)]))
        .issuer_name(issuer.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .sign(authority.key, hashes.SHA256())
    ).public_bytes(serialization.Encoding.DER)
    one = Sum(played, "all-others")
    public = card_of(FOUR[1], one.header["sum"]["cards"][FOUR[1]]).public
    card = KeyCard(LIAR, public, key.sign(signed_text(one.order.run, LIAR, public), *signing()), made)
    return one.refused("policy.peers lists", sum=_with_card(one, card))


def _with_card(one: Sum, card: KeyCard) -> dict[str, Any]:
    whole = one.header["sum"]
    return {**whole, "cards": {**whole["cards"], card.site: card_entry(card)}}


def _at_the_same_time(played: Played) -> str:
    """Two that answer for a site are asked for two rosters at once: one of them masks."""
    one = Sum(played, "at-once")
    fewer = replace(one.order, cards=tuple(card for card in one.order.cards if card.site != LIAR))
    site = one.programs[FIRST].sums.site(one.order.run, FOUR)

    def mask(order: Order) -> str:
        try:
            site.mask(order, torch.zeros(5, dtype=torch.int64))
        except Refused as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(2) as pool:
        said = sorted(pool.map(mask, [one.order, fewer]))
    expect(not said[0] and "masks it only once" in said[1], f"the site answers {said}")
    return said[1]


def _too_large(played: Played) -> str:
    one = Sum(played, "large")
    content = {**one.content(FIRST), "weights": _moved(one.content(FIRST)["weights"], 1e12)}
    return one.refused("too large for a sum", content)


# Sites that lie -------------------------------------------------------------------------------------------------------


def _spoiled(played: Played, name: str, do: str, spoil: Callable[[Masked], Masked]) -> list[dict[str, Any]]:
    def change(site: str, header: dict[str, Any], answer: Message | Lost) -> Message | Lost:
        if site != LIAR or header["do"] != do or not isinstance(answer, Message):
            return answer
        told, content, _ = unseal(answer)
        return seal(told, body_of({name: spoil(found) for name, found in content.items() if isinstance(found, Masked)}))

    four, engine = of_four(played), {"aggregation": "secure", "quorum": 3}
    events = rehearse(four, name, change, experiment={"engine": engine}, differs=required(four, roster="any"))
    expect(sum(event.get("what") == "round" for event in events) >= 2, "the run does not go on")
    return events


def _spoilt_upload(played: Played) -> str:
    events = _spoiled(played, "upload-spoilt", "call", lambda found: Masked({**found, "sum": torch.zeros(3)}))
    said = [event for event in events if event.get("is") in ("refused", "lost") and "reason" in event]
    expect({event["site"] for event in said} == {LIAR}, f"another site is blamed: {said}")
    return f"site '{LIAR}' refused: {said[0]['reason']}"


def _wrong_shares(played: Played) -> str:
    events = _spoiled(played, "shares-spoilt", "unmask", lambda found: Masked({**found, "own": found["own"] ^ 1}))
    blamed = [event for event in events if event.get("is") in ("refused", "lost") and "reason" in event]
    expect(not blamed, f"a site is left out of the sum: {blamed}")
    return "the shares of the others unmask the sum, and the run goes on"


COORDINATOR = "a curious coordinator"
PROMISES = (
    Promise("an honest coordinator", "reads sums of sites that send no model alone, which must work", _honest),
    Promise(COORDINATOR, "asks a site that requires masks for its model alone", _alone),
    Promise(COORDINATOR, "looks at a masked upload, and at two of one update", _upload),
    Promise(COORDINATOR, "has an update masked for two rosters", _roster),
    Promise(COORDINATOR, "has a like update masked for all sites, then for all but one", _difference),
    Promise(COORDINATOR, "asks for such a sum once a site's record of earlier sums is gone", _restored),
    Promise(COORDINATOR, "draws other sites of a sum in each round", _drawn),
    Promise(COORDINATOR, "lets one site of a sum work more than the others", _unequal),
    Promise(COORDINATOR, "lets the learning rate of the other sites of a sum fall to nothing", _falling),
    Promise(COORDINATOR, "asks sites that keep csac out about models that are made anew in each round", _weighed),
    Promise(COORDINATOR, "has fewer sites unmask than a site asks for", _threshold),
    Promise(COORDINATOR, "asks two processes of a site for two rosters at once", _at_the_same_time),
    Promise(COORDINATOR, "asks for the sum of two sites", _small_sum),
    Promise(COORDINATOR, "lets the other sites of a sum do no work", _idle),
    Promise(COORDINATOR, "names two sets of survivors, to have both kinds of shares", _survivors),
    Promise(COORDINATOR, "names each site other survivors, to have shares for two sets", _different_survivors),
    Promise(COORDINATOR, "sends the sites of a sum different models", _different_models),
    Promise(COORDINATOR, "hands on shares of another sum", _shares_of_another),
    Promise(COORDINATOR, "puts a key of its own in the place of a site's", _own_key),
    Promise(COORDINATOR, "sends a model whose sum overflows", _too_large),
    Promise("the holder of authority", "signs a certificate in the name of another site of a sum", _all_others),
    Promise("a site that lies", "sends a spoilt masked upload", _spoilt_upload),
    Promise("a site that lies", "tells wrong shares", _wrong_shares),
)
