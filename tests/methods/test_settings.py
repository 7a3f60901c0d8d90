"""Named settings: one mechanism, the same for every method."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from fedshift.errors import UserError
from fedshift.experiment.config.experiment import method_record, parse
from fedshift.experiment.runs.run_identity import comparable, first_difference
from fedshift.methods import registry
from fedshift.methods.composition.options import described_setting
from fedshift.methods.federated.fedavg import FedAvg
from fedshift.methods.settings import PAPER, setting_name


class Released(FedAvg):
    """FedAvg with a second setting, for these tests."""

    traits = FedAvg.traits.derive(settings={"released": {"weighting": "uniform", "local_epochs": 3}})


def test_the_papers_values_are_the_default() -> None:
    assert Released().setting == PAPER
    assert (Released().weighting, Released().local_epochs) == ("samples", 1)


def test_a_named_setting_brings_its_options_and_options_beside_it_win() -> None:
    method = Released.model_validate({"setting": "released", "local_epochs": 7})
    assert (method.weighting, method.local_epochs) == ("uniform", 7)


def test_an_unknown_setting_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValidationError, match="released"):
        Released.model_validate({"setting": "relesed"})
    options = {"data": "rotated_digits", "model": "mnist_cnn", "methods": [{"name": "fedavg", "setting": "released"}]}
    with pytest.raises(UserError, match="paper"):
        parse(options)


def test_what_is_dumped_can_be_read_again_in_another_process() -> None:
    method = Released.model_validate({"setting": "released", "local_epochs": 7})
    assert Released.model_validate(method.model_dump(mode="json")) == method


def test_two_settings_of_a_method_stand_side_by_side_without_labels() -> None:
    assert Released().display == "fedavg"
    assert Released.model_validate({"setting": "released"}).display == "fedavg-released"
    assert Released.model_validate({"setting": "released", "label": "mine"}).display == "mine"


def test_a_setting_is_described_by_what_a_record_holds() -> None:
    kind, settings = Released, Released.traits.settings
    assert setting_name(kind, settings, {"weighting": "samples", "local_epochs": 1}) == "paper"
    assert setting_name(kind, settings, {"weighting": "uniform", "local_epochs": 3}) == "released"
    assert setting_name(kind, settings, {"weighting": "uniform", "local_epochs": 4}) == "released with local_epochs 4"
    assert described_setting(Released(local_epochs=2)) == "paper with local_epochs 2"


def test_a_run_is_the_same_run_whatever_name_its_options_were_asked_by() -> None:
    asked = comparable({"method": {**method_record(FedAvg(weighting="uniform")), "setting": "released"}})
    spelt = comparable({"method": method_record(FedAvg(weighting="uniform"))})
    assert first_difference(asked, spelt) is None


@pytest.mark.parametrize("name", registry.names())
def test_every_setting_of_every_method_differs_from_the_papers_and_from_the_others(name: str) -> None:
    kind = registry.method_class(name)
    seen: list[dict[str, object]] = []
    for setting in kind.traits.settings:
        required = (
            {"method": "fedavg"}
            if kind.model_fields.get("method") and kind.model_fields["method"].is_required()
            else {}
        )
        options = kind.model_validate({**required, "setting": setting}).model_dump(
            mode="json", exclude={"setting", "label"}
        )
        assert options not in seen
        assert setting_name(kind, kind.traits.settings, options) == setting
        seen.append(options)
