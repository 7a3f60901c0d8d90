"""The recipe is FedAvg composed with what suits the kind of data, and with nothing else."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from tiny import CNN, MLP, run

from fedshift.data.transforms import Augmentation
from fedshift.methods import registry
from fedshift.methods.base import State, cost_of
from fedshift.methods.composition.averages import Kept
from fedshift.methods.composition.new_site import NewSite
from fedshift.methods.composition.views import AugmentOption
from fedshift.methods.federated.fedavg import FedAvg
from fedshift.methods.federated.recipe import COLOURS, SHAPES, Recipe
from fedshift.methods.rounds import play_round
from fedshift.weights import Weights

OFF = {"augmentation": "none", "momentum": 0, "dropout": 0}
MOVED = {"name": "augment", "by": SHAPES.model_dump()}
MOMENTUM = {"optimizer": "momentum", "beta": 0.9}


def trained(name: str, network: dict[str, object], **options: Any) -> Weights:
    state: State = run(registry.parse({"name": name, **options}), network=network, rounds=3)[0]
    return state.weights


@pytest.mark.parametrize("network", [CNN, MLP], ids=["images", "vectors"])
def test_with_everything_off_it_is_fedavg_of_equal_shares(network: dict[str, object]) -> None:
    assert trained("recipe", network, **OFF) == trained("fedavg", network, weighting="uniform")


def test_on_images_it_is_fedavg_on_moved_images_with_momentum_at_the_server() -> None:
    assert trained("recipe", CNN) == trained("fedavg", CNN, weighting="uniform", local=[MOVED], server=MOMENTUM)


@pytest.mark.parametrize(("channels", "augmentation", "beta"), [(1, SHAPES, 0.9), (3, COLOURS, 0.5)])
def test_images_of_one_channel_and_in_colour_have_their_own_means(
    channels: int, augmentation: Augmentation, beta: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert Recipe().at_sites((channels, 8, 8)).local == (AugmentOption(by=augmentation),)

    def one_further(self: FedAvg, federation: object, state: State) -> State:
        return state.advance(Weights({"weight": state.weights["weight"] + 1}))

    monkeypatch.setattr(FedAvg, "round", one_further)
    state = State(Weights({"weight": torch.zeros(2, channels, 1, 1)}))
    for _ in range(2):
        state = play_round(Recipe(), SimpleNamespace(), state)  # type: ignore[arg-type]
    assert state.weights["weight"].unique().tolist() == [pytest.approx(1 + (1 + beta))]


def test_on_vectors_it_is_fedavg_with_dropout() -> None:
    assert trained("recipe", MLP) == trained("fedavg", MLP, weighting="uniform", local=["dropout"])


def handed_out(method: Recipe, shape: tuple[int, ...], rounds: int) -> float:
    """The model after some rounds, whose models are 1, 2, 3 …"""
    kept = Kept()
    for number in range(1, rounds + 1):
        made = Weights({"weight": torch.full(shape, float(number))})
        kept = method.at_server(made).average.after(kept, made, number / rounds)
    mean = method.at_server(made).average.handed_out(kept, last=True) or made
    return float(mean["weight"].mean())


def test_on_vectors_the_mean_of_the_last_rounds_is_handed_out_and_on_images_the_last_model() -> None:
    assert handed_out(Recipe(), (2, 3), 8) == 7.5  # of 7 and 8
    assert handed_out(Recipe(averaged=0.5), (2, 3), 8) == 6.5
    assert handed_out(Recipe(averaged=0.0), (2, 3), 8) == 8
    assert handed_out(Recipe(average_rounds=4), (2, 3), 8) == 6.5
    assert handed_out(Recipe(), (2, 3, 1, 1), 8) == 8


def test_the_classifier_turns_at_a_new_site_for_vectors_and_images_in_colour() -> None:
    assert Recipe().at_sites((3, 8, 8)).new_site == NewSite(classifier=16)
    assert Recipe().at_sites((5,)).new_site == NewSite(classifier=16)
    assert Recipe().at_sites((1, 8, 8)).new_site == NewSite()
    assert Recipe(templates=None).at_sites((5,)).new_site == NewSite()
    assert Recipe(classifier_at_new_site=4).at_sites((5,)).new_site == NewSite(classifier=4)


def test_a_plug_in_that_is_named_takes_the_place_of_its_own() -> None:
    mine = AugmentOption(by=Augmentation(shift=0.1))
    assert Recipe(local=(mine,)).at_sites((1, 8, 8)).local == (mine,)
    assert [one.name for one in Recipe(local=(mine,)).at_sites((5,)).local] == ["dropout", "augment"]


def test_an_optimiser_of_the_server_that_is_named_takes_the_place_of_its_momentum() -> None:
    server = {"optimizer": "momentum", "beta": 0.5}
    assert trained("recipe", CNN, augmentation="none", server=server) == trained(
        "fedavg", CNN, weighting="uniform", server=server
    )


def test_its_cost_is_that_of_its_plug_ins_for_these_samples() -> None:
    assert cost_of(Recipe(), (5,)) == 1.0
    assert cost_of(Recipe(), (1, 8, 8)) > 1.0
    assert cost_of(Recipe(augmentation=Augmentation()), (1, 8, 8)) == 1.0
    assert cost_of(Recipe(colour_augmentation=Augmentation()), (3, 8, 8)) == 1.0


ROWS = {"ahead": "ahead-0.7", "four_exchanges": "four-exchanges-0.85"}


@pytest.mark.parametrize(("setting", "label"), ROWS.items())
def test_a_named_setting_is_a_row_that_was_measured(setting: str, label: str) -> None:
    file = Path(__file__).parents[3] / "benchmarks" / "experiments" / "recipe_letters.yaml"
    row = next(method for method in yaml.safe_load(file.read_text())["methods"] if method.get("label") == label)
    measured = registry.parse({name: value for name, value in row.items() if name != "label"})
    # Every site has as many letters.
    named = registry.parse({"name": "recipe", "setting": setting, "weighting": "samples"})
    assert named.model_copy(update={"setting": "paper"}) == measured
