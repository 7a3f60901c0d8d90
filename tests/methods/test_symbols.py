"""Options under the symbols of their papers, and what an unknown name is compared with."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from fedshift.errors import UserError, edits, nearest
from fedshift.experiment.config.error_messages import describe
from fedshift.methods import registry
from fedshift.methods.federated.fedprox import FedProx
from fedshift.methods.symbols import symbols_of

PAPERS: tuple[tuple[str, dict[str, Any], dict[str, Any]], ...] = (
    ("fedprox", {"mu": 0.3, "E": 2}, {"proximal_weight": 0.3, "local_epochs": 2}),
    ("fedprox", {"μ": 0.3}, {"proximal_weight": 0.3}),
    ("moon", {"mu": 5, "tau": 0.2}, {"contrastive_weight": 5.0, "temperature": 0.2}),
    ("fedsam", {"rho": 0.1}, {"radius": 0.1}),
    ("feddyn", {"alpha": 0.2}, {"alpha": 0.2}),
    ("mdan", {"mu": 0.1, "gamma": 5}, {"mu": 0.1, "gamma": 5.0}),
    ("shot", {"beta": 0.1, "alpha": 0.2}, {"pseudo_label_weight": 0.1, "label_smoothing": 0.2}),
    (
        "epi_fcr",
        {"lambda_1": 3, "λ_2": 4, "lambda3": 5},
        {"feature_weight": 3, "classifier_weight": 4, "random_weight": 5},
    ),
    ("m3sda", {"lambda": 0.4}, {"moment_weight": 0.4}),
)
"""Method, options in the symbols of its paper's equations, and their names here."""


@pytest.mark.parametrize(("name", "symbols", "names"), PAPERS)
def test_an_option_has_its_paper_s_symbol(name: str, symbols: dict[str, Any], names: dict[str, Any]) -> None:
    method = registry.parse({"name": name, **symbols})
    assert {field: getattr(method, field) for field in names} == names
    assert method == registry.parse({"name": name, **names})


def test_a_plug_in_and_a_server_s_optimiser_have_theirs() -> None:
    method = registry.parse(
        {
            "name": "fedavg",
            "local": [{"name": "sharpness", "rho": 0.1}],
            "server": {"optimizer": "adam", "eta": 0.3, "beta1": 0.5},
        }
    )
    written = method.model_dump(mode="json")
    assert written["local"][0]["radius"] == 0.1
    assert (written["server"]["rate"], written["server"]["beta"]) == (0.3, 0.5)


def test_a_symbol_stands_for_one_option_and_hides_none() -> None:
    for name in registry.names():
        kind = registry.method_class(name)
        assert not symbols_of(kind).keys() & kind.model_fields.keys()


def test_both_names_of_an_option_are_refused_and_an_unknown_one_is_told_the_symbols() -> None:
    for options, words in (
        ({"mu": 0.1, "proximal_weight": 0.2}, "mu is proximal_weight: write one of them"),
        ({"nu": 0.1}, "mu for proximal_weight"),
    ):
        with pytest.raises(ValidationError) as caught:
            FedProx.model_validate(options)
        assert words in describe(caught.value, "methods[0]", FedProx)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("mldg", None),
        ("coral", None),
        ("dann", None),
        ("apfl", None),
        ("fedagv", "did you mean 'fedavg'"),
        ("fedporx", "did you mean 'fedprox'"),
        ("scafold", "did you mean 'scaffold'"),
        ("fedadam", "write {name: fedavg, server: adam}"),
        ("FedYogi", "write {name: fedavg, server: yogi}"),
        ("cutmix", "write {name: fedavg, local: [cutmix]}"),
        ("krum", "write {name: fedavg, robust: krum}"),
    ],
)
def test_a_suggestion_is_near_in_spelling_or_in_meaning(name: str, hint: str | None) -> None:
    """Methods that the registry lacks are compared with those of today, so that later ones change nothing here."""
    today = ["csac", "dmg", "fedavg", "fedprox", "fedsam", "mdan", "oracle", "scaffold"]
    if hint is None:
        assert "did you mean" not in nearest(name, today)
    elif hint.startswith("did"):
        assert hint in nearest(name, today)
    else:
        with pytest.raises(UserError, match="unknown method") as caught:
            registry.method_class(name)
        assert hint in str(caught.value)


@pytest.mark.parametrize(
    ("name", "other", "number"),
    [("", "abc", 3), ("kitten", "sitting", 3), ("abcd", "acbd", 1), ("saturday", "sunday", 3), ("ca", "abc", 3)],
)
def test_edits_are_those_of_the_literature(name: str, other: str, number: int) -> None:
    """Levenshtein's examples; "ca" to "abc" is 3 in optimal string alignment and 2 in Damerau's unrestricted form."""
    assert (edits(name, other), edits(other, name)) == (number, number)
