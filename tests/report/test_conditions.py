"""What a row used is said, and a verdict ranks only rows that used the same."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from fedshift.evaluation.records import RunResult, SelectedRound
from fedshift.evaluation.stored import Order
from fedshift.report.advice.verdict import Verdict
from fedshift.report.advice.words import comparison, first_sentence, paragraphs, two_sentences
from fedshift.report.collect import Collected, FinishedRun
from fedshift.report.conditions import conditions, used_notes
from fedshift.report.report import verdict_of

AS_THEY_ARE = {"crop_ratio": [0.75, 1.33], "crop_scale": None, "shear": 0.0}
MOVED = {**AS_THEY_ARE, "shear": 0.5}


def run(
    label: str,
    accuracy: float = 70.0,
    target: str = "a",
    seed: int = 0,
    shape: tuple[int, ...] = (1, 28, 28),
    kind: str = "leave_one_out",
    augmentation: dict[str, Any] = AS_THEY_ARE,
    **method: Any,
) -> RunResult:
    options = {
        "method": {"name": label, **method},
        "training": {"augmentation": augmentation},
        "protocol": {"kind": kind},
        "model": {"name": "mnist_cnn"},
        "data": {"name": "arrays"},
    }
    return RunResult(
        method=method.pop("label", label), target=target, seed=seed, classes=["0", "1"], rounds=5, seconds=1.0,
        mini_batches=9, threads=1, device="cpu", selected={"last": SelectedRound(round=5, accuracy=accuracy)},
        bytes_up={"weights": 3_000_000}, bytes_down={"weights": 1_000_000}, options=options,
        data={"input_shape": list(shape)},
    )  # fmt: skip


RECIPE = {"augmentation": MOVED, "colour_augmentation": MOVED, "templates": 16, "momentum": 0.9, "colour_momentum": 0.5}


def recipe(label: str = "recipe", shape: tuple[int, ...] = (1, 28, 28), **method: Any) -> RunResult:
    made = run("recipe", shape=shape)
    options = {**made.options, "method": {"name": "recipe", **RECIPE, **method}}
    return made.model_copy(update={"options": options, "method": label})


@pytest.mark.parametrize(
    ("shape", "used"),
    [
        ((1, 28, 28), ("augmented images",)),
        ((3, 28, 28), ("augmented images", "the target's unlabelled samples")),
        ((20,), ("the target's unlabelled samples",)),
    ],
)
def test_the_recipe_says_what_it_used_by_the_kind_of_samples(shape: tuple[int, ...], used: tuple[str, ...]) -> None:
    assert conditions([recipe(shape=shape)])["recipe"].words == used


@pytest.mark.parametrize(
    ("result", "used"),
    [
        (run("fedavg"), ()),
        (run("fedavg", local=[{"name": "augment", "by": MOVED}]), ("augmented images",)),
        (run("fedavg", local=[{"name": "augment", "by": AS_THEY_ARE}, {"name": "dropout"}]), ()),
        (run("fedavg", augmentation=MOVED), ("augmented images",)),
        (run("fedavg", classifier_at_new_site=0), ("the target's unlabelled samples",)),
        (run("fedavg", batch_norm_at_new_site=16), ("the target's unlabelled samples",)),
        (run("silobn", unseen="target"), ("the target's unlabelled samples",)),
        (run("fedbn", unseen="mean"), ()),
        (recipe(shape=(20,)).model_copy(update={"metric": "rmse"}), ()),
        (run("deepall", augmentation=MOVED), ("pooled samples", "augmented images")),
        (recipe(shape=(20,), templates=None), ()),
        (run("kd3a", kind="adapt_to_one"), ("the target's unlabelled samples",)),
        (run("fedavg", kind="adapt_to_one"), ()),
        (run("source_only", kind="adapt_to_one"), ("pooled samples",)),
    ],
)
def test_what_other_rows_used(result: RunResult, used: tuple[str, ...]) -> None:
    found = conditions([result])[result.method]
    assert found.words == used
    assert (found.exchanges, found.sent) == (5, 4_000_000)


def test_old_records_say_the_kind_of_samples_by_network_and_data() -> None:
    for model, data, used in (
        ("mlp", "arrays", ("the target's unlabelled samples",)),
        ("mnist_cnn", "rotated_mnist", ("augmented images",)),
        ("mobilenet_v2", "pacs", ("augmented images", "the target's unlabelled samples")),
    ):
        made = recipe()
        options = {**made.options, "model": {"name": model}, "data": {"name": data}}
        assert conditions([made.model_copy(update={"options": options, "data": {}})])["recipe"].words == used


def test_images_that_were_moved_otherwise_are_unlike() -> None:
    more = run("fedavg", augmentation=MOVED).model_copy(update={"method": "more"})
    other = run("csac", augmentation={**MOVED, "shear": 0.1})
    found = conditions([more, other, recipe()])
    assert found["more"].uses == found["csac"].uses
    assert found["more"].unlike(found["csac"]) == ("with images augmented otherwise",)
    assert found["more"].unlike(found["recipe"]) == ()


def notes_on(rows: Sequence[RunResult]) -> list[str]:
    return [note.text for note in used_notes(conditions(rows), [row.method for row in rows])]


def test_the_rows_that_explain_the_recipe_stand_beside_it() -> None:
    colour = (3, 28, 28)
    local, server = [{"name": "augment", "by": MOVED}], {"optimizer": "momentum", "beta": 0.9}
    moved = run("fedavg", shape=colour, local=local, server=server, classifier_at_new_site=16)
    without = recipe("inductive", colour, templates=None)
    rows = [recipe(shape=colour), moved, without, run("fedavg", shape=colour).model_copy(update={"method": "plain"})]
    text = next(note for note in notes_on(rows) if note.startswith("Rows that explain"))
    assert "fedavg with the same images and momentum: fedavg;" in text
    assert "itself without the target's samples: inductive;" in text
    assert "deepall with the same images and samples: not run" in text
    still = run("fedavg", shape=colour, local=[{"name": "augment", "by": MOVED}], classifier_at_new_site=16)
    text = " ".join(notes_on([rows[0], still]))
    assert "fedavg with the same images and momentum: not run" in text
    assert not any("explain" in note for note in notes_on([run("fedavg"), run("csac")]))


def pooled_row(name: str, label: str = "", **method: Any) -> RunResult:
    """A finished run of three sources and a target that takes no part, 60 mini-batches together."""
    made = run(name, **method)
    training = {"augmentation": AS_THEY_ARE, "mini_batches": {"a": 30, "b": 20, "c": 10, "d": 0}}
    return made.model_copy(update={"method": label or name, "options": {**made.options, "training": training}})


def steps_said(*rows: RunResult) -> str | None:
    return next((note for note in notes_on(rows) if note.startswith("Optim")), None)


def test_a_table_says_the_steps_of_its_pooled_rows() -> None:
    deepall, masf = pooled_row("deepall"), pooled_row("masf")
    assert conditions([deepall])["deepall"].steps == 60
    assert conditions([masf])["masf"].steps == 20  # as before the record had the option: one of each of three domains
    assert conditions([run("fedavg")])["fedavg"].steps is None
    said = steps_said(deepall, masf, pooled_row("dger"), run("fedavg"))
    assert "deepall 60; masf, dger 20." in said
    assert "only those of equal steps are alike" in said
    equal = steps_said(deepall, pooled_row("masf", domain_batches="split"))
    assert "60 in every pooled row" in equal
    rounded = pooled_row("dmg").model_copy(update={"options": {**pooled_row("dmg").options, "training": {
        "augmentation": AS_THEY_ARE, "mini_batches": {"a": 30, "b": 20, "c": 11}}}})  # fmt: skip
    assert "60 to 61 in every pooled row" in str(steps_said(deepall, rounded))
    by_domain = pooled_row("deepall", "by_domain", domain_batches="full")
    assert "20 in every pooled row" in str(steps_said(by_domain, masf))
    assert steps_said(deepall, run("fedavg")) is None


def test_records_that_do_not_say_their_steps_stay_readable() -> None:
    """Of other versions, of a method from a user's file, or without the mini-batches of each site."""
    others = [
        pooled_row("masf", "older", removed_option=3),
        pooled_row("masf", "other", temperature="cold"),
        run("masf").model_copy(update={"method": "short"}),
        pooled_row("deepall"),
    ]
    assert conditions(others)["older"].steps == 20
    assert conditions(others)["other"].steps is None
    assert conditions(others)["short"].steps is None
    said = str(steps_said(*others))
    assert "older 20" in said
    assert not {"other", "short"} & set(said.replace(",", " ").split())


def judged(rows: dict[str, float], make: dict[str, dict[str, Any]]) -> Verdict:
    results = [
        run(name, mean + at + 0.1 * seed * (1 if name < "d" else -1), target, seed, **make.get(name, {}))
        for name, mean in rows.items()
        for at, target in enumerate("abcd")
        for seed in range(3)
    ]
    order = Order(methods=list(rows), targets=list("abcd"), seeds=[0, 1, 2])
    return verdict_of(
        Collected("exp", tuple(FinishedRun(Path("x"), result) for result in results), order, 0, len(results))
    )


def test_a_verdict_ranks_within_a_class_and_names_what_differs() -> None:
    found = judged({"csac": 70.0, "fedavg": 60.0, "fedprox": 50.0}, {"csac": {"augmentation": MOVED}})
    assert found.method == "csac"
    assert found.used == ("augmented images",)
    assert found.rivals == []
    assert [peer.unlike for peer in found.peers] == [("without augmented images",)] * 2
    assert not first_sentence(found).startswith("Take")
    assert "augmented images" in first_sentence(found)
    assert "without augmented images" in two_sentences(found)
    alike = judged({"csac": 70.0, "fedavg": 60.0}, {})
    assert [rival.name for rival in alike.rivals] == ["fedavg"]
    assert first_sentence(alike).startswith("Take csac")
    assert "alike" not in comparison(alike.rivals[0])
    moved = {name: {"augmentation": MOVED} for name in ("csac", "fedavg")}
    both = judged({"csac": 70.0, "fedavg": 60.0, "fedprox": 50.0}, moved)
    assert [rival.name for rival in both.rivals] == ["fedavg"]
    assert "best of those with augmented images" in first_sentence(both)


@pytest.mark.case("words of a verdict", "a difference that rounds to 0.00")
@pytest.mark.parametrize("gap", [0.0, 0.004, -0.004])
def test_ties_are_level(gap: float) -> None:
    found = judged({"csac": 70.0, "moon": 70.0 + gap}, {"moon": {}})
    rival = found.peers[0]
    rival = type(rival)(**{**rival.__dict__, "gain": gap})
    assert rival.level
    assert comparison(rival).startswith(f"level with {rival.name}")
    assert "0.00 points" not in comparison(rival)


def test_who_read_the_target_or_takes_part_is_said() -> None:
    found = judged({"csac": 70.0, "fedavg": 60.0}, {"csac": {"classifier_at_new_site": 16}})
    assert found.question.startswith("Does it work at a new site?")
    assert "csac" in found.question
    assert "fedavg" not in found.question
    assert "without labels" not in judged({"csac": 70.0, "fedavg": 60.0}, {}).question
    found = judged({"kd3a": 70.0, "fedavg": 60.0}, {name: {"kind": "adapt_to_one"} for name in ("kd3a", "fedavg")})
    assert "takes part without labels" in first_sentence(found)
    assert any("takes part without labels" in line for _, lines in paragraphs(found) for line in lines)
