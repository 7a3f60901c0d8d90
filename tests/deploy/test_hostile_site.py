"""A site that wants to harm the run: what it sends is refused, the other sites are not blamed, and the run goes on."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from loopback import ADAPT, UNSEEN, Loopback, deploy, events, model, options_of, same, site_files
from test_refusals import images as write_images
from test_remote import METHODS
from tiny import normed_for

from fedshift.deploy.remote.wire import Message, body_of, seal, unseal
from fedshift.deploy.site_cards import MOST_SAMPLES
from fedshift.errors import FedshiftError, UserError
from fedshift.federation.messages import KINDS, Reply, Update
from fedshift.federation.replies import TensorCheck, checked_reply
from fedshift.methods import registry
from fedshift.methods.federated.copa import Part
from fedshift.methods.federated.shot import Adapted
from fedshift.methods.on_clip import OnClip
from fedshift.weights import Weights

HOSTILE = "north"
"""The first site that is asked: nobody has said before how an answer looks."""
HUGE = pytest.param(10**400, id="huge")
STRANGE = Weights({"x": torch.zeros(1)})
Spoil = Callable[[dict[str, Any], dict[str, Any]], None]


def attack(folder: Path, spoil: Spoil, do: str = "call", call: str | None = None, **policy: Any) -> Loopback:
    """Sites of which one changes the header and content of what it answers to requests to ``do`` something."""

    def change(site: str, header: dict[str, Any], answer: Any) -> Any:
        if site != HOSTILE or header["do"] != do or call not in (None, header.get("call")):
            return answer
        answer_header, content, _ = unseal(answer)
        spoil(answer_header, content)
        return seal(answer_header, body_of(content))

    return Loopback(site_files(folder, **policy), change)


def refusals(folder: Path) -> set[str]:
    return {event["site"] for event in events(folder) if event.get("is") in ("refused", "lost")}


def puts(**content: Any) -> Spoil:
    return lambda header, reply: reply.update(content)


def says(**header: Any) -> Spoil:
    return lambda reply_header, content: reply_header.update(header)


# Models --------------------------------------------------------------------------------------------------------------


@pytest.mark.threat("other_shape", "claimed_samples")
@pytest.mark.parametrize(
    ("method", "call", "spoil"),
    [
        ({"name": "fedavg"}, "fit", puts(weights=STRANGE)),
        ({"name": "fedavg"}, "fit", puts(weights=Weights({}))),
        ({"name": "fedavg"}, "fit", puts(samples=10**400)),
        ({"name": "fedavg"}, "fit", puts(samples=1_000_000)),
        ({"name": "fedavg"}, "fit", puts(samples=-5)),
        ({"name": "csac", **METHODS["csac"]}, "acquire", puts(weights=STRANGE)),
        ({"name": "copa"}, "fit", puts(features=STRANGE)),
        ({"name": "copa"}, "fit", puts(classifier=STRANGE)),
        (
            {"name": "copa"},
            "fit",
            lambda reply_header, reply: reply.update(classifier=reply["features"]),
        ),
    ],
    ids=["sent", "nothing", "samples", "more-samples", "less-samples", "not-sent", "part", "other-part", "wrong-part"],
)
def test_the_first_reply_does_not_say_how_the_others_must_be(
    method: dict[str, Any], call: str, spoil: Spoil, tmp_path: Path
) -> None:
    """Refused in every exchange of the call, and nobody else is."""
    deploy(tmp_path, options_of(method), transport=attack(tmp_path, spoil, call=call), engine={"quorum": 2})
    assert refusals(tmp_path) == {HOSTILE}


def test_a_target_cannot_send_a_part_of_a_model(tmp_path: Path) -> None:
    def less(header: dict[str, Any], content: dict[str, Any]) -> None:
        content["models"] = {source: model.select("classifier") for source, model in content["models"].items()}

    protocol = {**ADAPT, "targets": [HOSTILE]}
    for call in ("receive_and_adapt", "adapt"):  # the models come, or are there already
        folder = tmp_path / call
        with pytest.raises(FedshiftError, match=rf"site '{HOSTILE}' is lost .*'models/east' holds"):
            deploy(
                folder,
                options_of({"name": "shot"}, protocol=protocol),
                unseen={},
                transport=attack(folder, less, call=call),
            )


DEPLOYED = [
    name
    for name in registry.names()
    if not registry.method_class(name).traits.pooled and not registry.method_class(name).traits.keeps
    if not issubclass(registry.method_class(name), OnClip)  # a site reads no folder that a coordinator names
]


@pytest.mark.parametrize("name", DEPLOYED)
def test_no_honest_reply_is_refused(name: str, tmp_path: Path) -> None:
    asked = {"name": name, **registry.method_class(name).traits.small}
    method = registry.parse(asked)
    write_images(tmp_path)
    options = options_of(
        asked,
        model=normed_for(method),
        training={"rounds": 2, "batch_size": 8, "lr": 0.05},
        **({"protocol": ADAPT} if method.traits.needs_target else {}),
    )
    unseen = {} if method.traits.needs_target else UNSEEN
    deploy(tmp_path, options, unseen=unseen, send=[*KINDS, "numbers", "accuracy"], engine={"quorum": 1})
    assert refusals(tmp_path) == set()


LIKE = {"features.weight": torch.zeros(2, 3), "classifier.heads.0.weight": torch.zeros(4, 2)}
WHOLE = Weights(LIKE)
HEAD = Weights({"weight": torch.ones(4, 2)})


def layouts(check: TensorCheck, kind: type[Reply], sent: dict[str, Any], **replies: dict[str, Any]) -> dict[str, Any]:
    """Why replies are refused, by site, as an exchange finds out."""
    reasons, left = {}, {}
    for site, content in replies.items():
        try:
            layout = check.check("call", kind, content, sent)
        except FedshiftError as error:
            reasons[site] = str(error)
        else:
            if layout is not None:
                left[site] = layout
    return reasons | check.odd_ones("call", left, len(replies))


@pytest.mark.threat("other_shape")
def test_what_was_sent_says_how_replies_must_be() -> None:
    part = Weights({"features.weight": torch.ones(2, 3)})
    other = Weights({"features.weight": torch.ones(2, 3, dtype=torch.float64)})
    replies = {"a": {"weights": WHOLE}, "b": {"weights": part}, "c": {"weights": other}, "d": {"weights": WHOLE}}
    reasons = layouts(TensorCheck(LIKE), Update, {"weights": part}, **replies)
    assert reasons == dict.fromkeys("acd", "'weights' holds other tensors than the site was sent")


@pytest.mark.parametrize("order", ["abc", "bca", "cab"])
def test_most_sites_say_what_nobody_was_sent(order: str) -> None:
    replies = {"a": {"weights": STRANGE}, "b": {"weights": WHOLE}, "c": {"weights": WHOLE}}
    check = TensorCheck(LIKE)
    replies = {site: replies[site] for site in order}
    assert layouts(check, Update, {}, **replies) == {"a": "'weights' holds other tensors than most sites'"}
    # And it holds later, when those that said so are away.
    assert layouts(check, Update, {}, a=replies["a"]) == {"a": "'weights' holds other tensors than in replies before"}
    assert not layouts(check, Update, {}, b=replies["b"])


def test_between_two_sites_the_network_tells() -> None:
    strange, head, whole = {"classifier": STRANGE}, {"classifier": HEAD}, {"classifier": WHOLE}
    assert set(layouts(TensorCheck(LIKE), Part, {}, a=strange, b=head)) == {"a"}
    assert set(layouts(TensorCheck(LIKE), Part, {}, a=strange, b=whole)) == {"a"}
    assert not layouts(TensorCheck(LIKE), Part, {}, a=head, b=head)


@pytest.mark.threat("other_shape")
def test_where_nothing_tells_nobody_is_believed() -> None:
    other = {"classifier": Weights({"y": torch.zeros(2)})}
    reasons = layouts(TensorCheck(LIKE), Part, {}, a={"classifier": STRANGE}, b=other)
    assert set(reasons) == {"a", "b"}
    assert "no majority" in reasons["a"]


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"features.weight": torch.zeros(2, 3)}, "a part of the network's tensors"),
        ({**LIKE, "more": torch.zeros(1)}, "or others beside them"),
        ({**LIKE, "features.weight": torch.zeros(3, 2)}, "tensor 'features.weight' is .*3, 2.*the network's is .*2, 3"),
    ],
)
def test_models_that_nobody_was_sent_are_whole(tensors: dict[str, torch.Tensor], message: str) -> None:
    for kind, content in ((Update, {"weights": Weights(tensors)}), (Adapted, {"models": {"a": Weights(tensors)}})):
        with pytest.raises(FedshiftError, match=message):
            TensorCheck(LIKE).check("call", kind, content, {})


# Numbers -------------------------------------------------------------------------------------------------------------


@pytest.mark.threat("impossible_work")
@pytest.mark.parametrize("number", [HUGE, 2**60, 10_000, -1, True, 1.5, None])
def test_mini_batches_that_cannot_be_are_refused(number: Any, tmp_path: Path) -> None:
    options = options_of({"name": "fedavg"})
    spoil = says(mini_batches=number)
    there, _ = deploy(tmp_path, options, transport=attack(tmp_path, spoil), engine={"quorum": 2})
    assert refusals(tmp_path) == {HOSTILE}
    lines = [json.loads(line) for line in (there / "fedavg/west/seed-0/rounds.jsonl").read_text().splitlines()]
    assert len(lines) == 3
    assert {site for line in lines for site in line["aggregation_weights"]} == {"south", "east"}


def test_a_site_may_use_up_all_that_it_had_left(tmp_path: Path) -> None:
    def all_of_it(header: dict[str, Any], content: dict[str, Any]) -> None:
        header["mini_batches"] = left[-1]

    left: list[int] = []
    transport = attack(tmp_path, all_of_it)
    handle = transport.programs[HOSTILE].handle

    def note_message(message: Message, coordinator: str) -> Message:
        header = json.loads(message.header)
        left.append(header.get("envelope", {}).get("mini_batches_left"))
        return handle(message, coordinator)

    transport.programs[HOSTILE].handle = note_message  # type: ignore[method-assign]
    deploy(tmp_path, options_of({"name": "fedavg"}), transport=transport)
    assert refusals(tmp_path) == set()
    assert [count for count in left if count is not None] == [12, 0, 0]


@pytest.mark.parametrize("number", [HUGE, pytest.param(-(10**400), id="-huge"), 2**53 + 1])
def test_integers_that_no_float_holds_are_refused(number: int) -> None:
    content = {"weights": WHOLE, "samples": 3, "loss": 0.5}
    for name in ("samples", "loss"):
        with pytest.raises(FedshiftError, match=f"'{name}' of a Update"):
            checked_reply(Update, {**content, name: number})
    assert checked_reply(Update, content) == Update(WHOLE, 3, 0.5)


# Before training -----------------------------------------------------------------------------------------------------


def table(categories: list[str], **changes: Any) -> dict[str, Any]:
    """What a site gives of a table with one numeric and one categorical column."""
    sums = {"count": [41], "total": [1.0], "squares": [1.0], "any_missing": [False]}
    return {"kind": "table", "numeric": ["a"], "categorical": ["b"], **sums, "categories": [categories], **changes}


@pytest.mark.threat("impossible_work")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rows": {"0": [10**11, 1]}}, r"card\.rows"),
        ({"rows": {"0": [40, 2]}}, "rows of seed 0 are 40 and 2, of 41 samples"),
        ({"rows": {"0": [-1, 1]}}, "rows"),
        ({"rows": {"0": [10**400, 1]}}, "rows"),
        ({"rows": {"0": [12]}}, "rows"),
        ({"rows": {"0": ["12", 1]}}, "rows"),
        ({"rows": {"1": [12, 1]}}, "lacks the rows of seed 0"),
        ({"rows": {}}, "lacks the rows of seed 0"),
        ({"samples": MOST_SAMPLES + 1}, r"card\.samples"),
        ({"samples": 0}, r"card\.samples"),
        ({"samples": True}, r"card\.samples"),
        ({"shape": [0]}, r"card\.shape"),
        ({"shape": []}, r"card\.shape"),
        ({"shape": [2**20, 2**20]}, "more than 2147483648 numbers"),
        ({"type": "object"}, r"card\.type"),
        ({"preprocessing": {"kind": "shell"}}, r"card\.preprocessing"),
        ({"preprocessing": {"kind": "features", "shape": [10**9]}}, "preprocessing"),
        ({"classes": ["x" * 1000, "1", "2"]}, r"card\.classes"),
        ({"classes": [0, 1, 2]}, r"card\.classes"),
        ({"classes": ["a\nError: all is lost", "1", "2"]}, "sites differ in classes"),
        ({"classes": ["\ud800", "1", "2"]}, "header cannot be read"),
        ({"fingerprint": ["a"]}, r"card\.fingerprint"),
        ({"versions": {"torch": 2}}, r"card\.versions"),
        ({"grouped": "yes"}, r"card\.grouped"),
        ({"given": {"kind": "moments"}}, r"card\.given"),
        (
            {"given": {"kind": "moments", "count": 41, "total": [1e200] * 5, "squares": [1.0] * 5}},
            r"card\.given",
        ),
        ({"given": {"kind": "moments", "count": 41, "total": [1.0] * 4, "squares": [1.0] * 4}}, "one sum for each"),
        (
            {"given": {"kind": "moments", "count": 206, "total": [1.0] * 5, "squares": [1.0] * 5}},
            "more values than there are in 41 samples",
        ),
        ({"given": table(["x\n" * 20_000]), "preprocessing": {"kind": "table"}}, r"card\.given"),
        ({"given": table([str(n) for n in range(100_001)]), "preprocessing": {"kind": "table"}}, "100000 categories"),
        ({"given": table(["f"], count=[42]), "preprocessing": {"kind": "table"}}, "more values than there are samples"),
        ({"given": table(["f"], total=[]), "preprocessing": {"kind": "table"}}, "one entry per numeric column"),
        ({"given": table(["f"]), "preprocessing": {"kind": "features"}}, "given is of the kind table"),
        ({"given": table(["f"]), "preprocessing": {"kind": "table"}}, "sites differ in how inputs are prepared"),
        ({"more": 1}, "no such field"),
    ],
)
def test_a_card_that_cannot_be_ends_with_one_line(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    transport = attack(tmp_path, lambda header, content: header["card"].update(changes), do="hello")
    with pytest.raises(UserError, match=rf"'{HOSTILE}'.*{message}|{message}.*'{HOSTILE}'") as told:
        deploy(tmp_path, options_of({"name": "fedavg"}), transport=transport)
    assert "\n" not in str(told.value)
    assert len(str(told.value)) < 600
    assert {what for _, what in transport.asked} == {"hello"}


@pytest.mark.parametrize("card", [None, [], "card", 3, {}])
def test_no_card_at_all(card: Any, tmp_path: Path) -> None:
    def without(header: dict[str, Any], content: dict[str, Any]) -> None:
        header.pop("card") if card is None else header.update(card=card)

    with pytest.raises(UserError, match=f"site '{HOSTILE}': its answer cannot be read: card") as told:
        deploy(tmp_path, options_of({"name": "fedavg"}), transport=attack(tmp_path, without, do="hello"))
    assert "\n" not in str(told.value)


@pytest.mark.parametrize("moment", [None, "now", True, HUGE, 1e300, -1])
def test_a_clock_that_shows_no_time(moment: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"site '{HOSTILE}': its answer cannot be read: time"):
        deploy(tmp_path, options_of({"name": "fedavg"}), transport=attack(tmp_path, says(time=moment), do="hello"))


def test_without_an_attack_the_bits_are_the_same(tmp_path: Path) -> None:
    options = options_of({"name": "copa"})
    there, _ = deploy(tmp_path / "a", options, transport=attack(tmp_path / "a", lambda header, content: None))
    again, _ = deploy(tmp_path / "b", options)
    assert same(model(there, "copa", "west"), model(again, "copa", "west"))


@pytest.mark.parametrize(("asked", "agreed"), [(2, True), (3, True), (4, False), (5, False)])
def test_two_that_answer_alike_decide_for_later_if_they_are_most_of_those_asked(asked: int, agreed: bool) -> None:
    check = TensorCheck(LIKE)
    layout = check.check("call", Part, {"classifier": HEAD}, {})
    assert layout is not None
    assert not check.odd_ones("call", {"a": layout, "b": layout}, asked)
    if agreed:
        with pytest.raises(FedshiftError):
            check.check("call", Part, {"classifier": WHOLE}, {})
    else:
        assert check.check("call", Part, {"classifier": WHOLE}, {}) is not None
