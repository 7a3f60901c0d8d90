"""What a site agrees to: one request after another, who asked and when, and bounds of how it trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from loopback import SETTING, request
from test_hostile_coordinator import hello, program_of
from typer.testing import CliRunner

from fedshift.cli.app import app
from fedshift.deploy.agreed_terms import AgreedTerms, Peer, Terms
from fedshift.deploy.cli.site import agree_site
from fedshift.deploy.remote.policy import Policy, TrainingBounds
from fedshift.deploy.site_server import SiteProgram
from fedshift.errors import Refused, UserError
from fedshift.json_objects import write_object
from fedshift.models import registry as models


def wide(width: int) -> Any:
    return models.parse({"name": "mlp", "hidden": [width]})


def terms_of(folder: Path, **policy: Any) -> AgreedTerms:
    return AgreedTerms(folder, "north", Policy(**policy))


def ask(terms: AgreedTerms, width: int, run: str = "study", coordinator: str = "fl.example.org") -> str:
    """What the site says to a network; empty if it agreed."""
    try:
        with terms.asked_by(coordinator, run):
            terms.check(network=wide(width), agree=True)
    except Refused as error:
        return str(error)
    return ""


def widths(requests: Any) -> list[int]:
    return [term["hidden"][0] for request in requests for term in request.lacks.models]


@pytest.fixture
def site(tmp_path: Path) -> tuple[AgreedTerms, Path]:
    """The terms of a site that has agreed to a network of width 1, and its SITE.yaml."""
    program = program_of(tmp_path)
    assert ask(program.terms, 1) == ""
    return program.terms, program.config.path


@pytest.mark.threat("other_terms")
@pytest.mark.case("requests to agree", "a flood of 30 requests after an honest one, which is asked again")
def test_a_flood_drops_the_oldest_and_an_honest_request_is_the_newest_again(site: tuple[AgreedTerms, Path]) -> None:
    terms, _ = site
    assert "policy.models" in ask(terms, 8)
    for width in range(1000, 1030):
        ask(terms, width, run="flood")
    assert ask(terms, 8, run="honest")
    waiting = terms.requests()
    assert len(waiting) == 20
    assert widths(waiting)[0] == 8
    assert waiting[0].run == "honest"
    assert widths(waiting)[1:] == list(range(1029, 1010, -1))
    assert len({request.number for request in waiting}) == 20


@pytest.mark.case("requests to agree", "one of several is agreed to by its number, which stays the same meanwhile")
def test_requests_are_chosen_by_number(site: tuple[AgreedTerms, Path]) -> None:
    terms, path = site
    for width in (4, 5, 6):
        ask(terms, width)
    number = terms.requests()[1].number
    ask(terms, 7)  # a request that comes since moves no number
    agree_site(path, yes=True, only=[number])
    assert widths(terms.requests()) == [7, 6, 4]
    assert ask(terms, 5) == ""
    assert ask(terms, 4)
    with pytest.raises(UserError, match="--only 99"):
        agree_site(path, yes=True, only=[99])
    with pytest.raises(UserError, match="--refuse"):
        agree_site(path, yes=True, refuse=True)


@pytest.mark.case("requests to agree", "what was refused comes again at each deployment, alone and beside other terms")
def test_what_was_refused_is_not_asked_again(tmp_path: Path) -> None:
    program = program_of(tmp_path)
    assert "error" not in request(program)
    other = {"network": {"name": "mlp", "hidden": [4]}}
    assert "site agree" in request(program, do="hello", **hello(**other))["message"]
    agree_site(program.config.path, refuse=True)
    assert program.terms.requests() == ()
    for changes in (other, {**other, "seeds": [0, 7]}):
        assert "has refused" in request(program, do="hello", **hello(**changes))["message"]
    (waiting,) = program.terms.requests()  # of the second, what nobody decided about
    assert (waiting.lacks.models, [split.seed for split in waiting.lacks.splits]) == ((), [7])
    (refused,) = program.terms.refusals()
    agree_site(program.config.path, yes=True, only=[refused.number])  # minds change
    assert program.terms.refusals() == ()
    message = request(program, do="hello", **hello(**other, seeds=[0, 7]))["message"]
    assert "has refused" not in message
    assert "policy.splits" in message


@pytest.mark.case("requests to agree", "a person is shown who asked, when, for which run, and for what")
@pytest.mark.parametrize(
    ("typed", "agreed", "refused"),
    [("a\nr\nl\n", [6], [5]), ("r\na\n", [5], [6]), ("l\nl\nl\n", [], []), ("x\n\na\n", [4], []), ("", [], [])],
)
def test_a_person_decides_about_one_request_after_another(
    typed: str, agreed: list[int], refused: list[int], site: tuple[AgreedTerms, Path]
) -> None:
    terms, path = site
    for width in (4, 5, 6):
        ask(terms, width, run=f"study-{width}")
    shown = CliRunner().invoke(app, ["site", "agree", str(path)], input=typed)
    assert "fl.example.org for study-6" in shown.output
    assert "hidden [6]" in shown.output
    assert [network["hidden"][0] for network in terms.in_force().models][1:] == agreed
    assert widths(terms.refusals()) == refused
    assert set(widths(terms.requests())) == {4, 5, 6} - {*agreed, *refused}


@pytest.mark.case("requests to agree", "certificates of other sites stand apart from networks")
def test_peers_stand_apart_from_networks(site: tuple[AgreedTerms, Path]) -> None:
    terms, path = site
    terms.check_peers({"south": "a" * 64})
    ask(terms, 4)
    with pytest.raises(Refused, match=r"policy\.peers"):
        terms.check_peers({"south": "b" * 64})
    peers, network = terms.requests()
    assert (peers.lacks.models, network.lacks.peers) == ((), ())
    agree_site(path, yes=True, only=[network.number])
    assert terms.in_force().peers == (Peer(site="south", certificate="a" * 64),)
    agree_site(path, yes=True)
    assert terms.in_force().peers == (Peer(site="south", certificate="b" * 64),)


@pytest.mark.case("requests to agree", "one answer names network, splits and training options that are not agreed to")
def test_one_answer_names_all_that_is_missing(tmp_path: Path) -> None:
    program = program_of(tmp_path, training="first", smallest_group=1000)
    message = request(program, do="hello", **hello(network={"name": "linear"}, seeds=list(range(9))))["message"]
    assert "policy.smallest_group" in message
    assert "policy.splits" in message
    program = program_of(tmp_path / "other", training="first")
    assert "error" not in request(program)
    changes: dict[str, Any] = {
        "network": {"name": "mlp", "hidden": [4]},
        "seeds": [8],
        "training": {**SETTING["training"], "lr": 0.2},
    }
    message = request(program, do="hello", **hello(**changes))["message"]
    assert all(rule in message for rule in ("policy.models", "policy.splits", "policy.training"))
    (waiting,) = program.terms.requests()
    assert waiting.lacks.models
    assert waiting.lacks.splits
    assert waiting.lacks.training
    assert program.terms.in_force().splits  # of the first request; a hello that is refused agrees to nothing
    assert "error" not in request(program)


BOUNDS = {"lr": 0.1, "batch_size": 8, "rounds": 3, "mini_batches": 40, "local_epochs": 2}


@pytest.mark.threat("other_terms")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param({}, None, marks=pytest.mark.case("bounds of training", "just within all of them")),
        pytest.param({"lr": 1e4}, "lr", marks=pytest.mark.case("bounds of training", "a rate of 10,000")),
        pytest.param({"batch_size": 1}, "batch_size", marks=pytest.mark.case("bounds of training", "batches of one")),
        pytest.param({"rounds": 4}, "rounds", marks=pytest.mark.case("bounds of training", "a round more")),
        pytest.param(
            {"layer_rates": {"features": 1000}}, "lr", marks=pytest.mark.case("bounds of training", "layer_rates")
        ),
        pytest.param(
            {"envelope": {"exchange": 1, "round": 9, "progress": 0.0, "mini_batches_left": 5}},
            "rounds",
            marks=pytest.mark.case("bounds of training", "a later round than the options say"),
        ),
        pytest.param(
            {"envelope": {"exchange": 1, "round": 1, "progress": 0.0, "mini_batches_left": 41}},
            "mini_batches",
            marks=pytest.mark.case("bounds of training", "more mini-batches than allowed"),
        ),
        pytest.param(
            {"method": {"name": "fedavg", "options": {"local_epochs": 3}}},
            "local_epochs",
            marks=pytest.mark.case("bounds of training", "more passes over the data"),
        ),
    ],
)
@pytest.mark.parametrize("rule", ["bounds", "first"])
def test_training_is_bound(rule: str, changes: dict[str, Any], message: str | None, tmp_path: Path) -> None:
    """By numbers in SITE.yaml, or by the first experiment that was answered."""
    program = program_of(tmp_path, training=BOUNDS if rule == "bounds" else "first")
    plain = {**SETTING["training"], "lr": 0.1, "batch_size": 8, "rounds": 3}
    setting = {**SETTING, "training": plain, "method": {"name": "fedavg", "options": {"local_epochs": 2}}}
    envelope = {"exchange": 1, "round": 1, "progress": 0.0, "mini_batches_left": 40}
    if rule == "first":
        assert "error" not in request(program, setting=setting, envelope=envelope)
    asked = dict(changes)
    envelope = asked.pop("envelope", envelope)
    setting |= {"method": asked.pop("method", setting["method"])}
    answer = request(program, setting={**setting, "training": {**plain, **asked}}, envelope=envelope, run="other")
    if message is None:
        assert "error" not in answer, answer
        return
    assert "policy.training" in answer["message"]
    if rule == "bounds":
        assert f"{message} " in answer["message"]
        assert program.terms.requests() == ()
    else:
        (waiting,) = program.terms.requests()
        assert getattr(waiting.lacks.training[0], message) != BOUNDS[message]
        agree_site(program.config.path, yes=True)
        again = request(program, setting={**setting, "training": {**plain, **asked}}, envelope=envelope, run="third")
        assert "policy.training" not in again.get("message", "")


@pytest.mark.case("bounds of training", "none, as in every SITE.yaml of before")
def test_without_the_rule_nothing_is_bound(tmp_path: Path) -> None:
    program = program_of(tmp_path)
    assert "error" not in request(program)
    training = {**SETTING["training"], "lr": 1e-6, "batch_size": 1}
    assert "error" not in request(program, setting={**SETTING, "training": training}, run="other")
    assert program.terms.in_force().training == ()
    assert not TrainingBounds(lr=1.0).beyond(TrainingBounds())


@pytest.mark.parametrize(
    "content",
    [
        pytest.param({"models": 3}, marks=pytest.mark.case("stored agreements", "a number for a list")),
        pytest.param("[]", marks=pytest.mark.case("stored agreements", "a list")),
        pytest.param("", marks=pytest.mark.case("stored agreements", "an empty file")),
        pytest.param({"agreed": {"models": "all"}}, marks=pytest.mark.case("stored agreements", "text for networks")),
        pytest.param({"agreed": {}, "all": True}, marks=pytest.mark.case("stored agreements", "an unknown field")),
        pytest.param(
            {"agreed": {"training": [{"lr": -1}]}}, marks=pytest.mark.case("stored agreements", "a negative bound")
        ),
        pytest.param(
            '{"agreed": {}, "_sha257": ""}', marks=pytest.mark.case("stored agreements", "a damaged name of its digest")
        ),
    ],
)
def test_a_damaged_file_agrees_to_nothing(content: str | dict[str, Any], tmp_path: Path) -> None:
    if isinstance(content, str):
        (tmp_path / "agreed.json").write_text(content)
    else:
        write_object(tmp_path / "agreed.json", content)
    with pytest.raises(UserError, match=r"agreed\.json"):
        terms_of(tmp_path).check(network=wide(4), agree=True)


@pytest.mark.case("requests to agree", "names of a coordinator with 10,000 characters and control sequences")
def test_names_of_strangers_are_bound(site: tuple[AgreedTerms, Path]) -> None:
    terms, path = site
    ask(terms, 4, run="x" * 10_000, coordinator="\x1b[31m" + "y" * 10_000)
    (waiting,) = terms.requests()
    assert len(waiting.run) == len(waiting.coordinator) == 200
    assert "\x1b" not in CliRunner().invoke(app, ["site", "agree", str(path)], input="l\n").output


def test_terms_add_up() -> None:
    old, new = (Terms(peers=(Peer(site="south", certificate=name),)) for name in "ab")
    assert old.with_terms(new) == new
    assert not old.without(old)


def test_the_program_of_a_site_notes_who_asks(tmp_path: Path) -> None:
    program: SiteProgram = program_of(tmp_path)
    assert "error" not in request(program)
    request(program, setting={**SETTING, "network": {"name": "mlp", "hidden": [4]}}, run="s")
    (waiting,) = program.terms.requests()
    assert (waiting.coordinator, waiting.run) == ("someone", "s")
    assert waiting.when > 1e9
