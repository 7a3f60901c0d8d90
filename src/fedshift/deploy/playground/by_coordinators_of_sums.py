"""What a coordinator tries under secure aggregation, to see a single model.

Four sites of a project of their own answer in this process. Their kits are real: they sign keys with certificates that
the project's authority issued.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fedshift.deploy.crypto.keys import KeyCard, signed_text
from fedshift.deploy.playground.in_process import answer_to, caught_requests, folder_of, forged, rehearse
from fedshift.deploy.playground.played import FOUR, Played, of_four
from fedshift.deploy.playground.promise import Broken, Promise, expect
from fedshift.deploy.remote.orders import key_entry, order_in
from fedshift.deploy.remote.policy import AuditLog
from fedshift.deploy.remote.requests import CallRequest
from fedshift.deploy.remote.wire import body_of, unseal
from fedshift.deploy.secure.identity import Identity, signing
from fedshift.errors import UserError
from fedshift.federation.messages import Content, Masked
from fedshift.federation.plain_values import parsed
from fedshift.weights import Weights

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
        self.request = parsed(CallRequest, self.requests[FIRST].header, "a request")
        self.order = order_in(self.request, body_of(self.content(FIRST)).sha256)[0]

    @property
    def envelope(self) -> dict[str, Any]:
        """What the first site is asked for, as the request holds it."""
        return self.request.envelope.model_dump(mode="json")

    @property
    def sum(self) -> dict[str, Any]:
        """What the request says of the sum."""
        assert self.request.sum is not None
        return self.request.sum.model_dump(mode="json")

    def content(self, site: str) -> Mapping[str, Content]:
        """What the site is sent."""
        return unseal(self.requests[site])[1]

    def asked(self, site: str, content: Mapping[str, Content] | None = None, **changes: Any) -> dict[str, Any]:
        """The header of the site's answer to the request to mask, changed."""
        return answer_to(self.programs[site], forged(self.requests[site], content, **changes))

    def refused(self, word: str, content: Mapping[str, Content] | None = None, **changes: Any) -> str:
        """What the first site says to a request that it must refuse; it answers the genuine one afterwards."""
        answer = self.asked(FIRST, content, **changes)
        text = str(answer.get("message"))
        expect("error" in answer and word in text, f"the site answers {text}")
        genuine = self.asked(FIRST)
        expect("error" not in genuine, f"the site does not answer the genuine request either: {genuine}")
        return text


def _honest(played: Played) -> str:
    four = of_four(played)
    rehearse(four, "sums", experiment=SECURE, differs=required(four))
    sent: set[str] = set()
    for site in four.sites:
        lines, _ = AuditLog.check(folder_of(four, "sums") / site / "memory" / "audit.jsonl")
        sent |= {piece["kind"] for line in lines for piece in line.get("sent", {}).values()}
    expect("masked" in sent and "weights" not in sent, f"what left the sites is {sorted(sent)}")
    return f"{len(four.sites)} sites train, and no model left one alone: {', '.join(sorted(sent))}"


def _upload(played: Played) -> str:
    """The same update of the same site for two runs: masks are all that differs."""
    numbers = []
    for name in ("upload", "upload-again"):
        number = Sum(played, name)
        _, content, _ = unseal(number.programs[FIRST].handle(number.requests[FIRST], "an attacker"))
        upload = content["sum"]
        assert isinstance(upload, Masked)
        numbers.append(upload["sum"].double())
    first, second = numbers
    # An update is far below 2^62; what is random fills all 64 bits.
    expect(all(float(number.abs().median()) > 2**60 for number in numbers), "an upload has numbers of an update's size")
    expect(float((first - second).abs().median()) > 2**60, "two masked uploads of one update are alike")
    return f"{len(first)} integers that fill all 64 bits, and two uploads of one update have nothing in common"


def _later(one: Sum, exchange: int, names: Sequence[str] = FOUR) -> dict[str, Any]:
    """What a request to mask in another exchange says otherwise, for a sum of these sites."""
    envelope, whole = {**one.envelope, "exchange": exchange}, one.sum
    cards = {site: whole["cards"][site] for site in names}
    asked = {**whole, "cards": cards, "envelopes": dict.fromkeys(names, envelope), "threshold": len(names) // 2 + 1}
    return {"envelope": envelope, "sum": asked}


def _difference(played: Played) -> str:
    """The same request, to all and then to all but one: the difference of the sums is the model of that one."""
    item = Sum(played, "difference")
    for site in FOUR:
        expect("error" not in item.asked(site), "a site does not mask")
    text = ""
    for number, names in enumerate([FOUR[:3], (*FOUR[:2], LIAR)], 2):
        for site in names:
            text = str(item.asked(site, **_later(item, number, names)).get("message"))
            expect("policy.roster" in text, f"the site answers {text}")
    return text


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
    item = Sum(played, "unequal")
    little = {**item.envelope, "mini_batches_left": 1}
    envelopes = {site: item.envelope if site == FIRST else little for site in FOUR}
    whole, text = item.sum, ""
    for site in FOUR[1:]:
        text = str(item.asked(site, envelope=little, sum={**whole, "envelopes": envelopes}).get("message"))
        expect("twice that of the others" in text, f"the site answers {text}")
    return text


def _weighed(played: Played) -> str:
    """CSAC's sites are asked about like models, trained anew in each round, with another mean each time.

    With as many answers as there are other sites the models are solved for. So this remains where sites allow `csac`:
    here it is shown that it does, and that a site which does not allow it is asked nothing of the kind.
    """
    item, answered = Sum(played, "weighed", method="csac", call="calibrate", methods=["fedavg", "csac"]), 0
    told, first = item.content(FIRST), item.order.exchange
    weights = told["weights"]
    memory: dict[str, Any] = {}
    for number in range(len(FOUR) - 1):
        memory = _all_answer(
            item, first + 2 * number, "calibrate", {**told, "weights": _moved(weights, 1e-3 * number)}, memory
        )
        about = {"mean": _moved(weights, 0.1 * number)}
        _all_answer(item, first + 2 * number + 1, "weigh", about, memory)
        answered += 1
        again = _at(item, FIRST, first + 2 * number + 1, "weigh", memory)
        text = str(item.asked(FIRST, {"mean": _moved(weights, 9.0)}, **again).get("message"))
        expect("masks it only once" in text or "about this model" in text, f"the site answers {text}")
    other = Sum(played, "weighed-not")
    setting = {**other.request.setting.plain(), "method": item.request.setting.plain()["method"]}
    refused = other.refused("policy.methods", setting=setting, call="acquire")
    return f"one question a model, so {answered} in {answered} rounds, which show all models; other sites: {refused}"


def _at(one: Sum, site: str, exchange: int, call: str, memory: Mapping[str, Any]) -> dict[str, Any]:
    """What the request for a call of another exchange says otherwise."""
    held = memory.get(site) or parsed(CallRequest, one.requests[site].header, "a request").memory
    return {**_later(one, exchange), "call": call, "memory": held, "kept": held}


def _all_answer(
    one: Sum, exchange: int, call: str, content: Mapping[str, Content], memory: Mapping[str, Any]
) -> dict[str, Any]:
    """Have all sites answer a call, which they must, and what each keeps then."""
    answers = {site: one.asked(site, content, **_at(one, site, exchange, call, memory)) for site in FOUR}
    expect(all("error" not in answer for answer in answers.values()), f"a site does not answer: {answers}")
    return {site: answer["memory"] for site, answer in answers.items()}


def _moved(weights: Content, by: float) -> Weights:
    assert isinstance(weights, Weights)
    return Weights({name: tensor + by for name, tensor in weights.items()})


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
    item = Sum(played, "all-others")
    assert item.request.sum is not None
    public = item.request.sum.cards[FOUR[1]][0]
    card = KeyCard(LIAR, public, key.sign(signed_text(item.order.run, LIAR, public), *signing()), made)
    return item.refused("policy.peers lists", sum=_with_card(item, card))


def _with_card(one: Sum, card: KeyCard) -> dict[str, Any]:
    assert one.request.sum is not None
    cards = {**one.request.sum.cards, card.site: key_entry(card)}
    return one.request.sum.model_copy(update={"cards": cards}).model_dump(mode="json")


COORDINATOR = "a curious coordinator"
PROMISES = (
    Promise("an honest coordinator", "reads sums of sites that send no model alone, which must work", _honest),
    Promise(COORDINATOR, "looks at a masked upload, and at two of one update", _upload),
    Promise(COORDINATOR, "has a like update masked for all sites, then for all but one", _difference),
    Promise(COORDINATOR, "draws other sites of a sum in each round", _drawn),
    Promise(COORDINATOR, "lets one site of a sum work more than the others", _unequal),
    Promise(COORDINATOR, "asks sites that keep csac out about models that are made anew in each round", _weighed),
    Promise("the holder of authority", "signs a certificate in the name of another site of a sum", _all_others),
)
