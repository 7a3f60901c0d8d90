"""One reply that is not what its call promises, whatever is wrong with it: that site's loss, and nobody else's.

The sites of these runs are real, so what one of them sends would reach the others if it were let through.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from loopback import (
    ADAPT,
    SITES,
    Killed,
    Loopback,
    Without,
    deploy,
    events,
    killed_when,
    model,
    options_of,
    same,
    simulate,
    site_file,
    site_files,
)
from test_hostile_site import HOSTILE, Spoil, attack, puts, refusals, says
from test_refusals import EVERYTHING
from test_refusals import images as write_images

from fedshift.deploy.remote.transport import Lost
from fedshift.deploy.remote.wire import Message, body_of, seal, unseal
from fedshift.errors import FedshiftError, TrainingDiverged, UserError
from fedshift.federation.messages import Features, Spectra, Styles
from fedshift.weights import NamedTensors, Weights

CNN = {"name": "mnist_cnn", "channels": [3, 4], "hidden": 6}
METHODS: dict[str, dict[str, Any]] = {
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
@pytest.mark.parametrize("case", CASES)
def test_a_quorum_goes_on_without_it(case: str, tmp_path: Path) -> None:
    method, call, spoil = CASES[case]
    adapts = method == "fada"
    if not adapts:
        write_images(tmp_path)
    options = options_of(
        METHODS[method],
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


def test_an_answer_that_breaks_the_check_itself_is_only_that_sites_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedshift.federation import replies

    real = replies.ReplyCheck.check

    def fails(self: Any, call: str, site: str, *rest: Any) -> Any:
        if site == HOSTILE:
            raise NotImplementedError("nobody thought of this")
        return real(self, call, site, *rest)

    monkeypatch.setattr(replies.ReplyCheck, "check", fails)
    deploy(tmp_path, options_of({"name": "fedavg"}), engine={"quorum": 2})
    assert refusals(tmp_path) == {HOSTILE}


# What sites say of themselves -----------------------------------------------------------------------------------------


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


@pytest.mark.threat("no_message", "replayed_reply", "other_shape", "broken_field")
@pytest.mark.parametrize("how", ["late", "error", "diverged", "garbage", "nan", "shape", "other", "fields"])
def test_a_reply_that_cannot_be_used_is_recorded_and_the_quorum_goes_on(how: str, tmp_path: Path) -> None:
    def spoil(site: str, header: dict[str, Any], answer: Any) -> Any:
        if not (site == "south" and header["do"] == "call" and header["envelope"]["round"] == 2):
            return answer
        if how == "late":
            return Lost("no reply within 5 s")
        if how == "error":
            return seal({"error": "FedshiftError", "message": "its disk is full"}, body_of({}))
        if how == "diverged":
            return seal({"error": "TrainingDiverged", "message": "site 'south' in round 2: no number"}, body_of({}))
        if how == "garbage":
            return Message(answer.header, answer.body[:-7], answer.digest)
        answer_header, content, _ = unseal(answer)
        weights = content["weights"]
        assert isinstance(weights, Weights)
        name, tensor = next(iter(weights.items()))
        if how == "nan":
            content["weights"] = weights.merge({name: tensor * float("nan")})
        elif how == "shape":
            content["weights"] = weights.merge({name: tensor[:-1]})
        elif how == "other":
            answer_header["answers"] = "0" * 64
        else:
            content["more"] = 1
        return seal(answer_header, body_of(content))

    options = options_of({"name": "fedavg"})
    there, _ = deploy(tmp_path, options, transport=Loopback(site_files(tmp_path), spoil), engine={"quorum": 2})
    losses = [event for event in events(tmp_path) if event.get("is") in ("lost", "refused")]
    assert {(event["site"], event["round"]) for event in losses} == {("south", 2)}
    assert ("refused" in {event["is"] for event in losses}) == (how not in ("late", "error", "diverged"))
    lines = [json.loads(line) for line in (there / "fedavg/west/seed-0/rounds.jsonl").read_text().splitlines()]
    assert [set(line["aggregation_weights"]) for line in lines] == [set(SITES), {"north", "east"}, set(SITES)]
    assert [list(line["extra"].get("missing", {})) for line in lines] == [[], ["south"], []]


@pytest.mark.parametrize("quorum", [None, 3])
def test_training_that_went_wrong_at_a_site_ends_the_run_without_enough_others(
    quorum: int | None, tmp_path: Path
) -> None:
    def spoil(site: str, header: dict[str, Any], answer: Any) -> Any:
        if site != "south" or header["do"] != "call":
            return answer
        return seal({"error": "TrainingDiverged", "message": "site 'south' in round 1: no number"}, body_of({}))

    transport = Loopback(site_files(tmp_path), spoil)
    with pytest.raises(TrainingDiverged, match="site 'south' in round 1: no number"):
        deploy(tmp_path, options_of({"name": "fedavg"}), transport=transport, engine={"quorum": quorum})


def test_a_lost_site_without_a_quorum_ends_the_run_with_a_clear_message(tmp_path: Path) -> None:
    def lose(site: str, header: dict[str, Any], answer: Any) -> Any:
        return Lost("no reply within 5 s") if site == "south" and header["do"] == "call" else answer

    places = site_files(tmp_path)
    with pytest.raises(FedshiftError, match=r"'south' is lost .*deploy resume.*engine\.quorum"):
        deploy(tmp_path, options_of({"name": "fedavg"}), transport=Loopback(places, lose))
    there, _ = deploy(tmp_path, options_of({"name": "fedavg"}), transport=Loopback(places))  # it is back
    assert same(
        model(there, "fedavg", "west"), model(simulate(tmp_path, options_of({"name": "fedavg"})), "fedavg", "west")
    )


def test_a_site_that_misses_a_round_leaves_the_documented_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lose(site: str, header: dict[str, Any], answer: Any) -> Any:
        late = site == "south" and header["do"] == "call" and header["envelope"]["round"] == 2
        return Lost("no reply within 5 s") if late else answer

    options = options_of({"name": "fedavg"})
    there, _ = deploy(tmp_path, options, transport=Loopback(site_files(tmp_path), lose), engine={"quorum": 2})
    monkeypatch.setattr(Without, "absent", {("south", 2)})
    monkeypatch.setattr("fedshift.experiment.runs.round_loop.LocalFederation", Without)
    here = simulate(tmp_path, options)
    assert same(model(here, "fedavg", "west"), model(there, "fedavg", "west"))


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
