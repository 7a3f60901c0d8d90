"""A site that wants to harm the run: what it sends is refused, the other sites are not blamed, and the run goes on."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from loopback import ADAPT, Killed, Loopback, Without, deploy, killed_when, losing, options_of, simulate
from outcomes import alike, events, model, one_line, rounds_of, same
from site_yaml import SITES, site_file, site_files
from test_refusals import EVERYTHING
from test_refusals import images as write_images
from test_remote import METHODS

from fedshift.deploy.remote.transport import Lost
from fedshift.deploy.remote.wire import Message, body_of, seal, unseal
from fedshift.deploy.site_cards import MOST_SAMPLES
from fedshift.errors import FedshiftError, TrainingDiverged, UserError
from fedshift.federation.messages import Features, Reply, Spectra, Styles, Update
from fedshift.federation.replies import TensorCheck, checked_reply
from fedshift.methods.federated.copa import Part
from fedshift.methods.federated.shot import Adapted
from fedshift.weights import NamedTensors, Weights
from tried import slow_after

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


@pytest.mark.threat("other_shape", "claimed_samples")
@pytest.mark.parametrize(
    ("method", "call", "spoil"),
    slow_after(
        3,
        [
            ({"name": "fedavg"}, "fit", puts(weights=STRANGE)),
            ({"name": "fedavg"}, "fit", puts(weights=Weights({}))),
            ({"name": "fedavg"}, "fit", puts(samples=10**400)),
            ({"name": "fedavg"}, "fit", puts(samples=1_000_000)),
            ({"name": "fedavg"}, "fit", puts(samples=-5)),
            ({"name": "csac", **METHODS["csac"]}, "acquire", puts(weights=STRANGE)),
            ({"name": "copa"}, "fit", puts(features=STRANGE)),
            ({"name": "copa"}, "fit", puts(classifier=STRANGE)),
            ({"name": "copa"}, "fit", lambda reply_header, reply: reply.update(classifier=reply["features"])),
        ],
    ),
    ids=["sent", "nothing", "samples", "more-samples", "less-samples", "not-sent", "part", "other-part", "wrong-part"],
)
def test_the_first_reply_is_no_model_for_others(
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


@pytest.mark.threat("impossible_work")
@pytest.mark.parametrize("number", slow_after(2, [10_000, None, HUGE, 2**60, -1, True, 1.5]))
def test_mini_batches_that_cannot_be_are_refused(number: Any, tmp_path: Path) -> None:
    options = options_of({"name": "fedavg"})
    spoil = says(mini_batches=number)
    there, _ = deploy(tmp_path, options, transport=attack(tmp_path, spoil), engine={"quorum": 2})
    assert refusals(tmp_path) == {HOSTILE}
    lines = rounds_of(there)
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

    transport.programs[HOSTILE].handle = note_message
    deploy(tmp_path, options_of({"name": "fedavg"}), transport=transport)
    assert (refusals(tmp_path), [count for count in left if count is not None]) == (set(), [12, 0, 0])


@pytest.mark.parametrize("number", [HUGE, pytest.param(-(10**400), id="-huge"), 2**53 + 1])
def test_integers_that_no_float_holds_are_refused(number: int) -> None:
    content = {"weights": WHOLE, "samples": 3, "loss": 0.5}
    for name in ("samples", "loss"):
        with pytest.raises(FedshiftError, match=f"'{name}' of a Update"):
            checked_reply(Update, {**content, name: number})
    assert checked_reply(Update, content) == Update(WHOLE, 3, 0.5)


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
        ({"given": {"kind": "moments", "count": 41, "total": [1e200] * 5, "squares": [1.0] * 5}}, r"card\.given"),
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

    with one_line(f"site '{HOSTILE}': its answer cannot be read: card"):
        deploy(tmp_path, options_of({"name": "fedavg"}), transport=attack(tmp_path, without, do="hello"))


@pytest.mark.parametrize("moment", [None, "now", True, HUGE, 1e300, -1])
def test_a_clock_that_shows_no_time(moment: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"site '{HOSTILE}': its answer cannot be read: time"):
        deploy(tmp_path, options_of({"name": "fedavg"}), transport=attack(tmp_path, says(time=moment), do="hello"))


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


CNN = {"name": "mnist_cnn", "channels": [3, 4], "hidden": 6}
BAD_REPLIES_OF: dict[str, dict[str, Any]] = {
    "fedavg": {"name": "fedavg"},
    "elcfs": {"name": "elcfs", "setting": "light", "label": "elcfs"},
    "ccst": {"name": "ccst"},
    "fada": {"name": "fada", "steps_per_round": 2, "variant": "I"},
    "copa": {"name": "copa", "local_epochs": 1},
}


def change_tensor(name: str, change: Callable[[torch.Tensor], torch.Tensor], rename: str = "") -> Spoil:
    """Every tensor of a field changed, and renamed if ``rename`` is given."""

    def spoil(header: dict[str, Any], content: dict[str, Any]) -> None:
        tensors: NamedTensors = content[name]
        content[name] = type(tensors)({rename or key: change(tensor) for key, tensor in tensors.items()})

    return spoil


def to(dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda tensor: tensor.to(dtype)


def fill_with(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda tensor: torch.full_like(tensor, value) if tensor.is_floating_point() else tensor


def forge_error(error: str) -> Spoil:
    return lambda header, content: header.update(error=error, message="site 'south' refuses to send weights")


CASES: dict[str, tuple[str, str, Spoil]] = {
    "numbers without extremes": ("fedavg", "fit", change_tensor("weights", to(torch.float8_e4m3fn))),
    "half a character": ("fedavg", "fit", puts(loss="\ud800")),
    "a loss of nan": ("fedavg", "fit", puts(loss=float("nan"))),
    "a loss of infinity": ("fedavg", "fit", puts(loss=float("inf"))),
    "weights of 3e38": ("fedavg", "fit", change_tensor("weights", fill_with(3e38))),
    "a forged refusal": ("fedavg", "fit", forge_error("Refused")),
    "a forged refusal of a kind": ("fedavg", "fit", forge_error("KindRefused")),
    "more memory than there is": ("fedavg", "fit", says(memory={str(number): "" for number in range(9)})),
    "memory outside of the folder": ("fedavg", "fit", says(memory={"optimizer": "../optimizer"})),
    "memory in a file without a name": ("fedavg", "fit", says(memory={"optimizer": ""})),
    "spectra of another window": ("elcfs", "share_spectra", change_tensor("spectra", lambda t: t[..., :1, :1])),
    "spectra of fewer images": ("elcfs", "share_spectra", change_tensor("spectra", lambda t: t[:3])),
    "spectra of 3e38": ("elcfs", "share_spectra", change_tensor("spectra", fill_with(3e38))),
    "spectra of another type": ("elcfs", "share_spectra", change_tensor("spectra", to(torch.float64))),
    "another size of images": ("elcfs", "share_spectra", puts(height=5)),
    "spectra by another name": ("elcfs", "share_spectra", puts(spectra=Spectra({"x": torch.zeros(1)}))),
    "styles of two channels": ("ccst", "share_styles", change_tensor("styles", lambda t: torch.cat([t, t], 1))),
    "styles of 3e38": ("ccst", "share_styles", change_tensor("styles", fill_with(3e38))),
    "no styles": ("ccst", "share_styles", puts(styles=Styles({}))),
    "features of another width": ("fada", "begin", change_tensor("features", lambda t: t[:, :2])),
    "features of too many samples": ("fada", "go_on", change_tensor("features", lambda t: t.repeat(3, 1))),
    "features of another type": ("fada", "begin", change_tensor("features", to(torch.float64))),
    "features by another name": ("fada", "begin", change_tensor("features", lambda t: t, rename="x")),
    "features that are none": ("fada", "begin", puts(features=Features({"features": torch.zeros(())}))),
    "a classifier of 3e38": ("copa", "fit", change_tensor("classifier", fill_with(3e38))),
}


@pytest.mark.threat("broken_field", "forged_refusal", "wrong_spectra", "huge_weights")
@pytest.mark.parametrize("case", slow_after(6, CASES))
def test_a_quorum_goes_on_without_it(case: str, tmp_path: Path) -> None:
    method, call, spoil = CASES[case]
    adapts = method == "fada"
    if not adapts:
        write_images(tmp_path)
    options = options_of(
        BAD_REPLIES_OF[method],
        training={"rounds": 2, "batch_size": 8, "lr": 0.05},
        **({"protocol": ADAPT} if adapts else {"model": CNN}),
    )
    transport = attack(tmp_path, spoil, call=call, send=EVERYTHING)
    there, _ = deploy(
        tmp_path,
        options,
        transport=transport,
        engine={"quorum": 1 if adapts else 2},
        **({"unseen": {}} if adapts else {}),
    )
    target = "east" if adapts else "west"
    run = there / method / target / "seed-0"
    assert refusals(tmp_path) == {HOSTILE}
    named = [json.loads(line)["extra"] for line in (run / "rounds.jsonl").read_text().splitlines()]
    assert {site for extra in named for part in ("missing", "refused") for site in extra.get(part, {})} == {HOSTILE}
    Weights(model(there, method, target)).check_finite("the model")


def test_without_a_quorum_the_run_ends_and_names_it(tmp_path: Path) -> None:
    transport = attack(tmp_path, change_tensor("weights", fill_with(3e38)), call="fit")
    with pytest.raises(FedshiftError, match=f"site '{HOSTILE}' .*norm"):
        deploy(tmp_path, options_of({"name": "fedavg"}), transport=transport)


def test_an_answer_that_breaks_the_check_is_its_sites_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fedshift.federation import replies

    real = replies.ReplyCheck.check

    def fails(self: Any, call: str, site: str, *rest: Any) -> Any:
        if site == HOSTILE:
            raise NotImplementedError("nobody thought of this")
        return real(self, call, site, *rest)

    monkeypatch.setattr(replies.ReplyCheck, "check", fails)
    deploy(tmp_path, options_of({"name": "fedavg"}), engine={"quorum": 2})
    assert refusals(tmp_path) == {HOSTILE}


@pytest.mark.threat("claimed_samples")
def test_claimed_samples_make_no_more_rounds(tmp_path: Path) -> None:
    """A site of 41 samples that says 4,100: as many rounds as planned, and in each of them the others train."""

    def claims(header: dict[str, Any], content: dict[str, Any]) -> None:
        header["card"] |= {"samples": 4100, "rows": {"0": [2870, 1230]}}

    there, _ = deploy(tmp_path, options_of({"name": "fedavg"}), transport=attack(tmp_path, claims, do="hello"))
    lines = (there / "fedavg/west/seed-0/rounds.jsonl").read_text().splitlines()
    assert len(lines) == 3
    trained = [event for event in events(tmp_path) if event["what"] == "trained" and event["site"] != HOSTILE]
    assert len(trained) == 3 * 2
    assert all(event["mini_batches"] > 0 for event in trained)


@pytest.mark.threat("forged_refusal")
def test_a_refusal_when_the_run_is_resumed_does_not_end_it(tmp_path: Path) -> None:
    options = options_of({"name": "fedavg"})
    deploy(tmp_path, options, engine={"quorum": 2})

    def refuses(site: str, header: dict[str, Any], answer: Message | Lost) -> Message | Lost:
        if site != HOSTILE or header["do"] != "hello":
            return answer
        return seal({"error": "Refused", "message": "site 'south' refuses"}, body_of({}))

    places = {site: site_file(tmp_path, site, str(tmp_path / "data" / f"{site}.npz")) for site in SITES}
    deploy(tmp_path, options, transport=Loopback(places, refuses), engine={"quorum": 2})
    assert refusals(tmp_path) == {HOSTILE}
    with pytest.raises(FedshiftError, match=f"site '{HOSTILE}' cannot take part"):
        deploy(tmp_path, options, transport=Loopback(places, refuses))


LATER: dict[str, Callable[[Message], Message | Lost]] = {
    "late": lambda answer: Lost("no reply within 5 s"),
    "error": lambda answer: seal({"error": "FedshiftError", "message": "its disk is full"}, body_of({})),
    "diverged": lambda answer: seal({"error": "TrainingDiverged", "message": "in round 2: no number"}, body_of({})),
    "garbage": lambda answer: Message(answer.header, answer.body[:-7], answer.digest),
    "nan": lambda answer: changed_weights(answer, lambda tensor: tensor * float("nan")),
    "shape": lambda answer: changed_weights(answer, lambda tensor: tensor[:-1]),
    "other": lambda answer: seal({**unseal(answer)[0], "answers": "0" * 64}, body_of(unseal(answer)[1])),
    "fields": lambda answer: seal(unseal(answer)[0], body_of({**unseal(answer)[1], "more": 1})),
}


def changed_weights(answer: Message, change: Callable[[torch.Tensor], torch.Tensor]) -> Message:
    header, content, _ = unseal(answer)
    weights: Any = content["weights"]
    name, tensor = next(iter(weights.items()))
    return seal(header, body_of({**content, "weights": weights.merge({name: change(tensor)})}))


@pytest.mark.threat("no_message", "replayed_reply", "other_shape", "broken_field")
@pytest.mark.parametrize("how", slow_after(2, LATER))
def test_a_reply_that_cannot_be_used_is_recorded_and_the_quorum_goes_on(how: str, tmp_path: Path) -> None:
    def spoil(site: str, header: dict[str, Any], answer: Any) -> Any:
        now = site == "south" and header["do"] == "call" and header["envelope"]["round"] == 2
        return LATER[how](answer) if now else answer

    transport = Loopback(site_files(tmp_path), spoil)
    there, _ = deploy(tmp_path, options_of("fedavg"), transport=transport, engine={"quorum": 2})
    losses = [event for event in events(tmp_path) if event.get("is") in ("lost", "refused")]
    assert {(event["site"], event["round"]) for event in losses} == {("south", 2)}
    assert ("refused" in {event["is"] for event in losses}) == (how not in ("late", "error", "diverged"))
    lines = rounds_of(there)
    assert [set(line["aggregation_weights"]) for line in lines] == [set(SITES), {"north", "east"}, set(SITES)]
    assert [list(line["extra"].get("missing", {})) for line in lines] == [[], ["south"], []]


@pytest.mark.parametrize("quorum", [None, 3])
def test_training_that_went_wrong_ends_the_run_without_enough_others(quorum: int | None, tmp_path: Path) -> None:
    def spoil(site: str, header: dict[str, Any], answer: Any) -> Any:
        if site != "south" or header["do"] != "call":
            return answer
        return seal({"error": "TrainingDiverged", "message": "site 'south' in round 1: no number"}, body_of({}))

    transport = Loopback(site_files(tmp_path), spoil)
    with pytest.raises(TrainingDiverged, match="site 'south' in round 1: no number"):
        deploy(tmp_path, options_of({"name": "fedavg"}), transport=transport, engine={"quorum": quorum})


def test_a_lost_site_without_a_quorum_ends_the_run_with_a_clear_message(tmp_path: Path) -> None:
    places = site_files(tmp_path)
    with pytest.raises(FedshiftError, match=r"'south' is lost .*deploy resume.*engine\.quorum"):
        deploy(tmp_path, options_of("fedavg"), transport=Loopback(places, losing(("south", "call", None))))
    there, _ = deploy(tmp_path, options_of({"name": "fedavg"}), transport=Loopback(places))  # it is back
    assert same(
        model(there, "fedavg", "west"), model(simulate(tmp_path, options_of({"name": "fedavg"})), "fedavg", "west")
    )


def test_a_round_that_a_site_misses_ends_as_documented(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options, away = options_of("fedavg"), Loopback(site_files(tmp_path), losing(("south", "call", 2)))
    there, _ = deploy(tmp_path, options, transport=away, engine={"quorum": 2})
    monkeypatch.setattr(Without, "absent", {("south", 2)})
    monkeypatch.setattr("fedshift.experiment.runs.round_loop.LocalFederation", Without)
    here = simulate(tmp_path, options)
    assert alike(here, there)


@pytest.mark.threat("replayed_reply")
def test_a_second_reply_is_refused(tmp_path: Path) -> None:
    doubled = Loopback(
        site_files(tmp_path), lambda site, header, answer: [answer, answer] if site == "north" else answer
    )
    options = options_of({"name": "fedavg"})
    there, _ = deploy(tmp_path, options, transport=doubled)
    assert same(model(simulate(tmp_path, options), "fedavg", "west"), model(there, "fedavg", "west"))
    assert {event["what"] for event in events(tmp_path) if "second reply" in event.get("reason", "")} == {
        "fit",
        "measure",
    }


@pytest.mark.threat("replayed_reply")
def test_the_reply_of_an_earlier_round_is_refused(tmp_path: Path) -> None:
    sent: list[Any] = []

    def replay(site: str, header: dict[str, Any], answer: Any) -> Any:
        if site != HOSTILE or header["do"] != "call":
            return answer
        sent.append(answer)
        return sent[0]

    deploy(
        tmp_path, options_of({"name": "fedavg"}), transport=Loopback(site_files(tmp_path), replay), engine={"quorum": 2}
    )
    assert {(event["site"], event["round"]) for event in events(tmp_path) if event.get("is") == "refused"} == {
        (HOSTILE, 2),
        (HOSTILE, 3),
    }


def test_a_site_that_is_lost_before_the_run_goes_on_stands_in_by_its_card(tmp_path: Path) -> None:
    places = site_files(tmp_path)
    options = options_of({"name": "fedavg"})
    die = killed_when(lambda site, header: header.get("envelope", {}).get("round") == 2)
    with pytest.raises(Killed):
        deploy(tmp_path, options, transport=Loopback(places, die))
    away = Loopback(places, lambda site, header, answer: Lost("away") if site == "east" else answer)
    there, _ = deploy(tmp_path, options, transport=away, engine={"quorum": 2})
    assert (there / "fedavg/west/seed-0/result.json").exists()
    with pytest.raises(UserError, match="site 'east' cannot take part: away"):
        deploy(tmp_path / "new", options, transport=away, engine={"quorum": 2})


def test_replies_in_any_order_give_the_same_bits(tmp_path: Path) -> None:
    backwards = Loopback(site_files(tmp_path))
    backwards.backwards = True
    options = options_of({"name": "csac", "acquisition_epochs": 1, "calibration_epochs": 1})
    there, _ = deploy(tmp_path, options, transport=backwards)
    assert same(model(simulate(tmp_path, options), "csac", "west"), model(there, "csac", "west"))
