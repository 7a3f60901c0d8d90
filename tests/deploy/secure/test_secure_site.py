"""A site that masks, and a coordinator that asks it for more than a sum: named refusals, and nothing is lost."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from asked import SETTING, call_header
from cryptography.hazmat.primitives import serialization
from federations import FOUR, call_request, certificate_of, key_card, key_of, layout_of, write_kits
from outcomes import audit
from site_yaml import site_file, write_data

from fedshift.deploy.crypto.masked_sums import KeyCard, Order, SecureSum, signed_text
from fedshift.deploy.remote.orders import (
    confirmed_of,
    order_asked,
    order_in,
    revealed_of,
    sealed_content,
    sum_asked,
    upload_of,
)  # fmt: skip
from fedshift.deploy.remote.requests import PROTOCOL, request_key
from fedshift.deploy.remote.wire import body_of, seal, unseal
from fedshift.deploy.secure.identity import Identity, signing
from fedshift.deploy.secure.site_sums import Summing, promised_masked
from fedshift.deploy.site_server import SiteProgram, open_site
from fedshift.errors import FedshiftError, Refused, UserError
from fedshift.experiment.fits.secure_sums import check_sums
from fedshift.federation.messages import Content, Update
from fedshift.federation.secure.integer_sums import Weighing, contribution
from fedshift.federation.site import Envelope
from fedshift.methods import registry
from fedshift.weights import Weights

ENVELOPE = {"exchange": 1, "round": 1, "progress": 0.0, "mini_batches_left": 500}
START = Weights({"classifier.weight": torch.zeros(3, 5), "classifier.bias": torch.zeros(3)})
OTHER = Weights({"classifier.weight": torch.ones(3, 5), "classifier.bias": torch.zeros(3)})
Answer = tuple[dict[str, Any], Mapping[str, Content]]


class Coordinator:
    """Sites with kits, and requests to them as an attacker can make them."""

    def __init__(self, folder: Path, **policy: Any) -> None:
        self.folder = folder
        write_kits(folder, list(FOUR))
        files = write_data(folder / "data", FOUR)
        self.sites = {name: open_site(site_file(folder, name, files[name], **policy)) for name in FOUR}
        self.cards = {name: self.card(name) for name in FOUR}

    def card(self, name: str) -> KeyCard:
        return key_card(name, self.ask(name, {"do": "key"})[0])

    def restart(self, name: str) -> SiteProgram:
        self.sites[name] = open_site(self.sites[name].config.path)
        return self.sites[name]

    def ask(self, site: str, header: Mapping[str, Any], content: Mapping[str, Content] | None = None) -> Answer:
        body = body_of(content or {})
        whole = {"protocol": PROTOCOL, "run": "r", **header}
        message = seal({"key": request_key(whole, body.sha256), **whole}, body)
        answer, held, _ = unseal(self.sites[site].handle(message, "coordinator"))
        return answer, held

    def to_mask(
        self, site: str, names: Sequence[str] = tuple(FOUR), weights: Weights = START, **changes: Any
    ) -> tuple[dict[str, Any], Order]:
        """The header of a request to mask, and its order. ``changes``: of the header, or of its entry ``sum``."""
        cards = {name: self.cards[name] for name in names}
        envelopes = dict.fromkeys(names, Envelope(**ENVELOPE))
        whole = sum_asked(Weighing("samples", 8, len(FOUR)), cards, envelopes).model_dump(mode="json")
        more = {name: value for name, value in changes.items() if name not in whole}
        whole |= {name: value for name, value in changes.items() if name in whole}
        program = self.sites[site]
        header = call_header(program, **{"envelope": ENVELOPE, "aggregation": "secure", **more, "sum": whole})
        sha = body_of({"weights": weights}).sha256
        return header, order_in(call_request(header), sha)[0]

    def mask(self, site: str, weights: Weights = START, **changes: Any) -> Answer:
        header, _ = self.to_mask(site, weights=weights, **changes)
        return self.ask(site, header, {"weights": weights})

    def mask_all(self, weights: Mapping[str, Weights] | None = None) -> SecureSum:
        _, order = self.to_mask("north")
        total = SecureSum(order)
        for name in FOUR:
            answer, content = self.mask(name, (weights or {}).get(name, START))
            total.add(name, upload_of(content, order, layout_of(answer).length)[0])
        return total

    def unmask(self, site: str, total: SecureSum, survivors: Sequence[str], **changes: Any) -> Answer:
        """A request for shares, with what the other survivors confirm to the site."""
        header = {"order": order_asked(total.order).model_dump(mode="json"), "answered": list(survivors)}
        codes = {}
        for other in {*survivors} & {*FOUR} - {site}:
            answer, content = self.ask(other, {"do": "confirm", **header})
            if "error" not in answer and site in survivors:
                codes[other] = confirmed_of(content, other, survivors)[site]
        return self.ask(site, {"do": "unmask", **header, **changes}, sealed_content(total.sealed_for(site), codes))


@pytest.fixture
def asking(tmp_path: Path) -> Coordinator:
    return Coordinator(tmp_path)


def test_a_sum_by_hand(asking: Coordinator) -> None:
    total = asking.mask_all()
    told = {}
    for name in ("north", "up", "east"):
        _, content = asking.unmask(name, total, total.answered)
        told[name] = revealed_of(content, total.order, total.answered)
    assert total.unmask_total(told)[0].item() == len(FOUR)
    assert total.total is not None
    assert total.total[0].item() != len(FOUR)


@pytest.mark.threat("model_alone")
def test_one_update_is_masked_once(asking: Coordinator) -> None:
    """Asked again a site gives the answer it gave, also after a restart; for another roster or content it refuses."""
    first = asking.mask("north")
    asking.restart("north")
    again = asking.mask("north")
    assert torch.equal(first[1]["sum"]["sum"], again[1]["sum"]["sum"])
    assert first[0] == again[0]
    part = {**asking.to_mask("north")[0]["part"], "number": 1}  # trained anew, and masked as before
    assert torch.equal(first[1]["sum"]["sum"], asking.mask("north", part=part)[1]["sum"]["sum"])
    for changes in ({"names": ["north", "south", "east"]}, {"weights": OTHER}, {"weighing": ["samples", 9, 4]}):
        assert re.search("masks it only once|differs by up", asking.mask("north", **changes)[0]["message"])
    slower = {**SETTING, "training": {"lr": 0.5}}
    assert "masks it only once" in asking.mask("north", setting=slower)[0]["message"]
    lines = audit(asking.sites["north"])
    assert [bool(line.get("refused")) for line in lines if line["do"] == "call"] == [False] * 3 + [True] * 4
    later = {**ENVELOPE, "exchange": 2}
    asking.mask("north", envelope=later, envelopes=dict.fromkeys(FOUR, later), checkpoint=1)
    assert "is over" in asking.mask("north")[0]["message"]
    assert not list(asking.sites["north"].config.memory.glob("r/sums/1-*-upload"))


@pytest.mark.threat("model_alone")
def test_a_site_tells_shares_of_one_kind_for_one_set_of_survivors(tmp_path: Path) -> None:
    asking = Coordinator(tmp_path, roster="any")
    total = asking.mask_all()
    three = ["east", "north", "south"]
    answer, content = asking.unmask("north", total, three)
    shares = content["shares"]
    assert answer["answers"]
    # Of a site that answered the share of its own seed, of the lost one those of its pairs: never both of one.
    assert (shares["own"].shape, shares["pairs"].shape) == ((3, 33), (3, 33))
    asking.restart("north")
    assert asking.unmask("north", total, three)[1]["shares"]["own"].equal(shares["own"])
    assert "for other sites already" in asking.unmask("north", total, total.answered)[0]["message"]
    for answered in (three[:2], [*three, "west"], [*three, "north"], ["east", "south", "up"]):
        assert "error" in asking.unmask("north", total, answered)[0]
    for name, changes in (("east", {"answered": 3}), ("east", {"answered": [3]}), ("east", {"order": None})):
        assert "request 'unmask' cannot be read" in asking.unmask(name, total, three, **changes)[0]["message"]
    order = {**order_asked(total.order).model_dump(mode="json"), "content": "0" * 64}
    assert "did not mask" in asking.unmask("east", total, three, order=order)[0]["message"]


@pytest.mark.threat("model_alone")
def test_sites_that_were_sent_different_models_unmask_nothing(asking: Coordinator) -> None:
    total = asking.mask_all({"north": OTHER})
    messages = {name: asking.unmask(name, total, total.answered)[0]["message"] for name in FOUR}
    assert "did not mask its reply for this roster and content" in messages.pop("north")
    assert all("not sealed for this sum" in message for message in messages.values())


@pytest.mark.threat("sum_of_one")
def test_how_many_sites_a_sum_has_is_the_sites_rule(tmp_path: Path) -> None:
    asking = Coordinator(tmp_path, smallest_sum=4)
    answer, _ = asking.mask("north", names=["north", "south", "east"])
    assert "at least 4 sites" in answer["message"]
    total = asking.mask_all()
    assert "at least 4 sites" in asking.unmask("north", total, ["east", "north", "south"])[0]["message"]
    assert "error" not in asking.unmask("north", total, total.answered)[0]


IDLE = {**ENVELOPE, "mini_batches_left": 0}
DONE = {**ENVELOPE, "progress": 1.0}


@pytest.mark.threat("model_alone")
@pytest.mark.parametrize(
    ("others", "message"),
    [
        ({"south": IDLE, "east": IDLE}, "at least 3 sites train, not 2"),
        ({"south": DONE}, "not asked for the same"),
        ({"north": IDLE}, "not asked for the same"),
        ({"south": {**ENVELOPE, "round": 2}}, "not asked for the same"),
        ({"west": ENVELOPE}, "not asked for the same"),
        ({"south": None}, "sum.envelopes.south: input should be"),
        ({"south": {**ENVELOPE, "progress": "1"}}, "sum.envelopes.south.progress: input should be"),
    ],
)
def test_a_site_trains_only_where_others_do(others: dict[str, Any], message: str, asking: Coordinator) -> None:
    """Who does no work contributes what it was sent, which the coordinator knows."""
    header, _ = asking.to_mask("north")
    header["sum"]["envelopes"] = {**dict.fromkeys(FOUR, ENVELOPE), **others}
    assert message in asking.ask("north", header, {"weights": START})[0]["message"]
    assert not list(asking.sites["north"].config.memory.glob("r/sums/*masked*"))


@pytest.mark.parametrize(
    "changes",
    [
        {"sum": None},
        {"sum": {}},
        {"weighing": ["norm", 1, 4]},
        {"weighing": ["samples", 1000, 4]},
        {"weighing": ["samples", 8, 3]},
        {"cards": {"north": 1}},
        {"cards": []},
        {"envelopes": [1]},
    ],
)
def test_garbage_is_refused_in_a_line(changes: dict[str, Any], asking: Coordinator) -> None:
    header, _ = asking.to_mask("north")
    whole = changes if "sum" in changes else {"sum": {**header["sum"], **changes}}
    answer, _ = asking.ask("north", {**header, **whole}, {"weights": START})
    assert "sum" in answer["message"], answer
    assert "\n" not in answer["message"]


@pytest.mark.threat("sum_overflow")
def test_what_is_too_large_for_a_sum_is_refused_and_not_clipped(asking: Coordinator) -> None:
    large = Weights({name: tensor + 1e10 for name, tensor in START.items()})
    header, _ = asking.to_mask("north")
    answer, content = asking.ask("north", header, {"weights": large})
    assert "too large for a sum" in answer["message"]
    assert not content
    assert not list(asking.sites["north"].config.memory.glob("r/sums/*masked*"))


@pytest.mark.threat("model_alone")
def test_required_means_that_no_model_leaves_alone(tmp_path: Path) -> None:
    asking = Coordinator(tmp_path, secure="required", peers=prints(tmp_path))
    header, _ = asking.to_mask("north")
    del header["sum"]
    answer, _ = asking.ask("north", header, {"weights": START})
    assert answer["error"] == "KindRefused"
    assert "policy.secure: required" in answer["message"]
    lines = audit(asking.sites["north"])
    assert "policy.secure: required" in lines[-1]["refused"]
    assert "error" not in asking.mask("north")[0]


def prints(folder: Path) -> dict[str, str]:
    write_kits(folder, list(FOUR))
    return {name: Identity.of_kit(folder / name, name).fingerprint for name in FOUR}


def forge_card(asking: Coordinator, **certificate: Any) -> KeyCard:
    """A key of the coordinator's own in the name of 'south', with a certificate that it made."""
    public = asking.cards["east"].public
    name, key = certificate.pop("name", "south"), key_of("coordinator")
    made = certificate_of(name, key, **certificate).public_bytes(serialization.Encoding.DER)
    return KeyCard("south", public, key.sign(signed_text("r", "south", public), *signing()), made)


@pytest.mark.threat("all_the_others", "sum_replaced_key")
def test_a_key_that_its_site_did_not_sign_is_refused(asking: Coordinator) -> None:
    honest = asking.cards["south"]
    of_before = key_card("south", asking.ask("south", {"do": "key", "run": "before"})[0])
    for card in (
        of_before,
        replace(honest, signature=b"none"),
        replace(honest, certificate=b"none"),
        replace(honest, public=asking.cards["east"].public),  # the signature is of another key
        replace(asking.cards["east"], site="south"),
        forge_card(asking, authority="coordinator"),
        forge_card(asking, name="north"),
        forge_card(asking, days=-1),
    ):
        asking.cards["south"] = card
        assert "the key of 'south' is not signed" in asking.mask("north")[0]["message"]
    assert asking.sites["north"].terms.in_force().peers == ()
    asking.cards["south"] = honest
    assert "error" not in asking.mask("north")[0]


@pytest.mark.threat("all_the_others")
@pytest.mark.parametrize("rule", ["seen first", "listed", "agreed"])
def test_whoever_holds_the_authority_cannot_be_the_others(rule: str, tmp_path: Path) -> None:
    """A certificate that the authority signed is not enough: it has to be the one that the site knows."""
    policy: dict[str, Any] = {
        "seen first": {},
        "listed": {
            "secure": "required",
            "peers": {name: request.upper() for name, request in prints(tmp_path).items()},
        },
        "agreed": {"secure": "required"},
    }[rule]
    asking = Coordinator(tmp_path, **policy)
    program = asking.sites["north"]
    if rule == "agreed":
        assert "has not agreed to the certificate" in asking.mask("north")[0]["message"]
        assert [len(request.lacks.peers) for request in program.terms.requests()] == [len(FOUR) - 1]
        program.terms.agree(program.terms.requests())
    assert "error" not in asking.mask("north")[0]
    asking.cards["south"] = forge_card(asking)
    answer, _ = asking.mask("north")
    assert ("policy.peers lists" if rule == "listed" else "has not agreed to the certificate") in answer["message"]
    if rule != "listed":
        assert [peer.site for request in program.terms.requests() for peer in request.lacks.peers] == ["south"]
        program.terms.agree(program.terms.requests())  # the kit was issued anew
        assert "another key than before" in asking.mask("north")[0]["message"]  # in this run, all the same
        assert [peer.site for peer in program.terms.in_force().peers].count("south") == 1


def test_a_site_without_a_kit_says_so(tmp_path: Path) -> None:
    files = write_data(tmp_path / "data", FOUR)
    program = open_site(site_file(tmp_path, "north", files["north"]))
    body = body_of({})
    header = {"do": "key", "protocol": PROTOCOL, "run": "r"}
    answer, _, _ = unseal(program.handle(seal({**header, "key": request_key(header, body.sha256)}, body), "c"))
    assert "no usable key" in answer["message"]
    assert hashlib.sha256(body.data).hexdigest() == body.sha256


@pytest.mark.parametrize(("worked", "one_set", "refused"), [(0.9, True, True), (0.4, False, True), (0.6, False, False)])
def test_a_part_of_the_work_goes_into_no_sum(worked: float, one_set: bool, refused: bool) -> None:
    site = SimpleNamespace(site="north", kept_upload=lambda order: None)
    rosters = cast(Any, SimpleNamespace(one_set=one_set))
    summing = Summing(cast(Any, site), cast(Any, None), cast(Any, None), (), "", rosters)
    runner = cast(Any, SimpleNamespace(site=SimpleNamespace(worked=worked), method=None))
    with pytest.raises(Refused if refused else AttributeError, match="a part of it only" if refused else None):
        summing.contribution(cast(Any, None), "fit", runner, {})


CSAC = {**SETTING, "method": {"name": "csac", "options": {"acquisition_steps": 2}}}


class Asking(Coordinator):
    """A coordinator that asks all sites for any call, and remembers their memory as an honest one does."""

    def __init__(self, folder: Path, **policy: Any) -> None:
        super().__init__(folder, **policy)
        self.memory: dict[str, dict[str, str]] = {}

    def header(self, site: str, call: str, exchange: int, **changes: Any) -> dict[str, Any]:
        envelope = {**ENVELOPE, "exchange": exchange}
        memory = self.memory.get(site, {})
        asked = {"setting": CSAC, "weighing": ["uniform", 0, len(FOUR)], "envelope": envelope, **changes}
        answer, _ = self.to_mask(site, envelopes=dict.fromkeys(FOUR, envelope), memory=memory, kept=memory, **asked)
        return {**answer, "call": call}

    def answers(self, call: str, content: Mapping[str, Content], exchange: int, **changes: Any) -> dict[str, Any]:
        answers = {}
        for site in FOUR:
            answers[site], _ = self.ask(site, self.header(site, call, exchange, **changes), content)
            self.memory[site] = answers[site].get("memory", self.memory.get(site, {}))
        return answers


@pytest.fixture
def asking_all(tmp_path: Path) -> Asking:
    return Asking(tmp_path)


@pytest.fixture
def acquisition(asking_all: Asking) -> Asking:
    answers = asking_all.answers("acquire", {"keep": True}, 1)
    assert all("error" not in answer for answer in answers.values()), answers
    return asking_all


@pytest.mark.threat("sum_rounded_weights")
@pytest.mark.parametrize("exponent", [26, 37, 60])
def test_weights_that_round_the_smaller_sites_away_are_refused(exponent: int, asking_all: Asking) -> None:
    """N_k / 2^37: of 12, 18, 15 and 29 samples, two would have no weight at all and the sum be of the other two."""
    answer, _ = asking_all.mask("north", weighing=["samples", exponent, len(FOUR)])
    assert "too large for a sum" in answer["message"]
    lines = audit(asking_all.sites["north"])
    assert "rounded off" in lines[-1]["failed"]
    assert not list(asking_all.sites["north"].config.memory.glob("r/sums/*masked*"))


def test_honest_weights_are_far_from_that() -> None:
    """One sample in half a million."""
    reply = Update(START, 1, 0.0)
    assert contribution(reply, Weighing.of("samples", [1, 2**19])).numbers["sum"][1].item() == 2 ** (32 - 20)
    with pytest.raises(FedshiftError, match="rounded off"):
        contribution(reply, Weighing.of("samples", [1, 2**20]))


@pytest.mark.threat("sum_held_out")
def test_sites_that_train_on_other_rows_unmask_nothing(asking_all: Asking) -> None:
    """Or the others could have next to no samples, and the sum be of one site."""
    _, order = asking_all.to_mask("north")
    total = SecureSum(order)
    for site in FOUR:
        header, _ = asking_all.to_mask(site)
        if site != "north":
            header["part"] |= {"split": {"test_fraction": 0.9, "split": "auto", "seed": 0}}
        answer, content = asking_all.ask(site, header, {"weights": START})
        assert "error" not in answer, answer
        total.add(site, upload_of(content, order, layout_of(answer).length)[0])
    assert "no majority" in asking_all.unmask("north", total, total.answered)[0]["message"]
    assert "did not mask" in asking_all.unmask("south", total, total.answered)[0]["message"]


@pytest.mark.threat("sum_kept_kinds")
def test_a_sum_lets_out_no_kind_that_the_site_keeps(asking_all: Asking) -> None:
    """Styles of single images are refused in a sum, too."""
    setting = {**SETTING, "method": {"name": "ccst", "options": {}}, "on_refusal": "leave_out"}
    answer, _ = asking_all.ask("north", asking_all.header("north", "share_styles", 1, setting=setting))
    assert (answer.get("error"), "send styles" in answer.get("message", "")) == ("KindRefused", True)
    assert promised_masked({"weights": "weights", "loss": "numbers"}) == {"sum": "masked"}


@pytest.mark.threat("sum_of_one_model")
@pytest.mark.parametrize(
    ("call", "method"),
    [
        ("acquire", {"name": "csac", "options": {"distance_power": 400.0}}),
        ("acquire", {"name": "csac", "options": {"aggregation": "similarity"}}),
        ("fit", {"name": "fedavg", "options": {"robust": {"rule": "median"}}}),
        ("fit", {"name": "alone", "options": {}}),
    ],
)
def test_a_site_masks_only_for_methods_of_sums(call: str, method: dict[str, Any], asking_all: Asking) -> None:
    answer, _ = asking_all.ask("north", asking_all.header("north", call, 1, setting={**SETTING, "method": method}))
    assert answer["error"] == "Refused"
    assert "not made of sums alone" in answer["message"]


@pytest.mark.threat("sum_of_one_model")
@pytest.mark.parametrize("power", [2.0, 2.5])
def test_a_high_power_of_the_distance_is_refused_before_training(power: float) -> None:
    """With d^400 the sum is the farthest model, and with d² no site of n has more than (n − 1)/n of it."""
    method = registry.parse({"name": "csac", "distance_power": power})
    if power <= 2:
        assert check_sums(method, 4) == ()
        return
    with pytest.raises(UserError, match="with these options it reads norms of csac's sites: choose"):
        check_sums(method, 4)


def move_mean(asking_all: Asking, by: float) -> dict[str, Content]:
    return {"mean": Weights({name: tensor + by for name, tensor in START.items()})}


@pytest.mark.threat("sum_questions")
def test_a_site_is_asked_once_about_a_model(acquisition: Asking) -> None:
    """Distances to means that a coordinator chooses, one after the other, would show the models themselves."""
    first = acquisition.answers("weigh", move_mean(acquisition, 0.1), 2)
    again = acquisition.answers("weigh", move_mean(acquisition, 0.1), 2)
    assert first == again
    for site in FOUR:
        acquisition.restart(site)
    for exchange, changes in ((2, {}), (3, {}), (3, {"setting": {**CSAC, "seed": 1}})):
        for answer in acquisition.answers("weigh", move_mean(acquisition, 0.2), exchange, **changes).values():
            assert answer["error"] == "Refused"
            assert re.search("about this model before|masks it only once", answer["message"])
    whole = Weights({name: tensor + 0.3 for name, tensor in START.items()})
    answers = acquisition.answers("calibrate", {"weights": whole, "keep": True}, 4)
    assert all("error" not in answer for answer in answers.values()), answers
    answers = acquisition.answers("weigh", move_mean(acquisition, 0.2), 4)  # about another model
    assert all("error" not in answer for answer in answers.values()), answers


@pytest.mark.threat("sum_questions")
def test_a_question_that_was_refused_was_asked(acquisition: Asking) -> None:
    """Whether an answer is too large tells of the distance: one question for each model, answered or not."""
    assert "too large for a sum" in acquisition.answers("weigh", move_mean(acquisition, 1e6), 2)["north"]["message"]
    answers = acquisition.answers("weigh", move_mean(acquisition, 0.1), 3)
    assert all("about this model before" in answer["message"] for answer in answers.values())


@pytest.mark.threat("sum_refusal_tells")
@pytest.mark.parametrize(
    ("setting", "weights", "expected"),
    [
        (SETTING, START["classifier.weight"] + 1e12, "too large for a sum"),
        ({**SETTING, "training": {"lr": 1e5}}, START["classifier.weight"], "training diverged"),
    ],
)
def test_a_refusal_tells_no_number(
    setting: dict[str, Any], weights: torch.Tensor, expected: str, asking_all: Asking
) -> None:
    """The coordinator is told what happened; how large the numbers are stands in the site's own log."""
    content = {"weights": Weights({**START, "classifier.weight": weights})}
    message = asking_all.ask("north", asking_all.header("north", "fit", 1, setting=setting), content)[0]["message"]
    assert expected in message
    assert not re.search(r"\d", message)
    lines = audit(asking_all.sites["north"])
    assert re.search(r"\d", lines[-1]["failed"])


@pytest.mark.threat("sum_refusal_tells")
def test_a_distance_that_is_too_large_is_not_told(acquisition: Asking) -> None:
    """A single site's distance to a mean of the coordinator's choice, to six digits, is what sums hide."""
    for answer in acquisition.answers("weigh", move_mean(acquisition, 1e6), 2).values():
        assert "too large for a sum" in answer["message"]
        assert not re.search(r"\d", answer["message"])


def test_orders_bind_role_and_split(asking_all: Asking) -> None:
    header, order = asking_all.to_mask("north")
    sha = body_of({"weights": START}).sha256
    for part in (
        {**header["part"], "role": "target"},
        {**header["part"], "split": {**header["part"]["split"], "seed": 1}},
    ):
        assert order_in(call_request({**header, "part": part}), sha)[0].binding != order.binding
    part_of_site = {**header["part"], "number": 1, "fingerprint": "f"}  # differ from site to site
    assert order_in(call_request({**header, "part": part_of_site}), sha)[0].binding == order.binding
