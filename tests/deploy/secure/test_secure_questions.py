"""A coordinator that asks for sums in which one site stands out: what of, how often, and what refusals tell."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from federations import FOUR, call_request, layout_of
from loopback import SETTING
from test_secure_site import ENVELOPE, START, Coordinator

from fedshift.deploy.crypto.masked_sums import SecureSum
from fedshift.deploy.remote.orders import order_in, upload_of
from fedshift.deploy.remote.policy import AuditLog
from fedshift.deploy.remote.wire import body_of
from fedshift.deploy.secure.site_sums import promised_masked
from fedshift.errors import FedshiftError, UserError
from fedshift.experiment.fits.secure_sums import check_sums
from fedshift.federation.messages import Content, Update
from fedshift.federation.secure.integer_sums import Weighing, contribution
from fedshift.methods import registry
from fedshift.weights import Weights

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
        """The headers of the answers of all sites."""
        answers = {}
        for site in FOUR:
            answers[site], _ = self.ask(site, self.header(site, call, exchange, **changes), content)
            self.memory[site] = answers[site].get("memory", self.memory.get(site, {}))
        return answers


@pytest.fixture
def asking(tmp_path: Path) -> Asking:
    return Asking(tmp_path)


@pytest.fixture
def acquisition(asking: Asking) -> Asking:
    answers = asking.answers("acquire", {"keep": True}, 1)
    assert all("error" not in answer for answer in answers.values()), answers
    return asking


# How a sum is weighted, and on which samples --------------------------------------------------------------------------


@pytest.mark.threat("sum_rounded_weights")
@pytest.mark.parametrize("exponent", [26, 37, 60])
def test_weights_that_round_the_smaller_sites_away_are_refused(exponent: int, asking: Asking) -> None:
    """N_k / 2^37: of 12, 18, 15 and 29 samples, two would have no weight at all and the sum be of the other two."""
    answer, _ = asking.mask("north", weighing=["samples", exponent, len(FOUR)])
    assert "too large for a sum" in answer["message"]
    lines, _ = AuditLog.check(asking.sites["north"].config.audit_log)
    assert "rounded off" in lines[-1]["failed"]
    assert not list(asking.sites["north"].config.memory.glob("r/sums/*masked*"))


def test_honest_weights_are_far_from_that() -> None:
    """One sample in half a million."""
    reply = Update(START, 1, 0.0)
    assert contribution(reply, Weighing.of("samples", [1, 2**19])).numbers["sum"][1].item() == 2 ** (32 - 20)
    with pytest.raises(FedshiftError, match="rounded off"):
        contribution(reply, Weighing.of("samples", [1, 2**20]))


@pytest.mark.threat("sum_held_out")
def test_sites_that_train_on_other_rows_unmask_nothing(asking: Asking) -> None:
    """Or the others could have next to no samples, and the sum be of one site."""
    _, order = asking.to_mask("north")
    total = SecureSum(order)
    for site in FOUR:
        header, _ = asking.to_mask(site)
        if site != "north":
            header["part"] |= {"split": {"test_fraction": 0.9, "split": "auto", "seed": 0}}
        answer, content = asking.ask(site, header, {"weights": START})
        assert "error" not in answer, answer
        total.add(site, upload_of(content, order, layout_of(answer).length)[0])
    assert "no majority" in asking.unmask("north", total, total.answered)[0]["message"]
    assert "did not mask" in asking.unmask("south", total, total.answered)[0]["message"]


# What a sum may be of -------------------------------------------------------------------------------------------------


@pytest.mark.threat("sum_kept_kinds")
def test_a_sum_lets_out_no_kind_that_the_site_keeps(asking: Asking) -> None:
    """Styles of single images are refused in a sum, too."""
    setting = {**SETTING, "method": {"name": "ccst", "options": {}}, "on_refusal": "leave_out"}
    answer, _ = asking.ask("north", asking.header("north", "share_styles", 1, setting=setting))
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
def test_a_site_masks_only_for_methods_of_sums(call: str, method: dict[str, Any], asking: Asking) -> None:
    answer, _ = asking.ask("north", asking.header("north", call, 1, setting={**SETTING, "method": method}))
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


# How often a site is asked about its model ----------------------------------------------------------------------------


def move_mean(asking: Asking, by: float) -> dict[str, Content]:
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


# What refusals tell ---------------------------------------------------------------------------------------------------


@pytest.mark.threat("sum_refusal_tells")
@pytest.mark.parametrize(
    ("setting", "weights", "expected"),
    [
        (SETTING, START["classifier.weight"] + 1e12, "too large for a sum"),
        ({**SETTING, "training": {"lr": 1e5}}, START["classifier.weight"], "training diverged"),
    ],
)
def test_a_refusal_tells_no_number_of_a_model(
    setting: dict[str, Any], weights: torch.Tensor, expected: str, asking: Asking
) -> None:
    """The coordinator is told what happened; how large the numbers are stands in the site's own log."""
    content = {"weights": Weights({**START, "classifier.weight": weights})}
    message = asking.ask("north", asking.header("north", "fit", 1, setting=setting), content)[0]["message"]
    assert expected in message
    assert not re.search(r"\d", message)
    lines, _ = AuditLog.check(asking.sites["north"].config.audit_log)
    assert re.search(r"\d", lines[-1]["failed"])


@pytest.mark.threat("sum_refusal_tells")
def test_a_distance_that_is_too_large_is_not_told(acquisition: Asking) -> None:
    """A single site's distance to a mean of the coordinator's choice, to six digits, is what sums hide."""
    for answer in acquisition.answers("weigh", move_mean(acquisition, 1e6), 2).values():
        assert "too large for a sum" in answer["message"]
        assert not re.search(r"\d", answer["message"])


def test_orders_bind_role_and_split(asking: Asking) -> None:
    header, order = asking.to_mask("north")
    sha = body_of({"weights": START}).sha256
    for part in (
        {**header["part"], "role": "target"},
        {**header["part"], "split": {**header["part"]["split"], "seed": 1}},
    ):
        assert order_in(call_request({**header, "part": part}), sha)[0].binding != order.binding
    part_of_site = {**header["part"], "number": 1, "fingerprint": "f"}  # differ from site to site
    assert order_in(call_request({**header, "part": part_of_site}), sha)[0].binding == order.binding
