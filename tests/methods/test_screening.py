"""What a rule is shown of an exchange, what it makes of it, and what the method reads afterwards."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from typing import Any

import pytest
import torch

from fedshift.errors import FedshiftError
from fedshift.methods.federated.scaffold import Controlled, Scaffold
from fedshift.methods.robust import Rule, TrimmedMean, Verdict
from fedshift.methods.screening import Screening
from fedshift.weights import Weights

SEEN: list[tuple[Sequence[str], list[Weights], Weights]] = []
"""What the rule was shown."""


class Doubles(Rule):
    """Notes what it is shown, doubles every model and leaves site b out."""

    rule: str = "doubles"

    def judge(self, sites: Sequence[str], models: Iterable[Weights], centre: Weights) -> Verdict:
        SEEN.append((sites, list(models), centre))

        def replaced(site: str, model: Weights) -> Weights | None:
            return None if site == "b" else Weights({name: 2 * tensor for name, tensor in model.items()})

        return Verdict(replaced, {"out": ["b"]})


def model(*values: float) -> Weights:
    return Weights({"w": torch.tensor(values)})


def screened(screening: Screening, **replies: Controlled) -> dict[str, Controlled]:
    def answers() -> Generator[tuple[str, Controlled], None, None]:
        yield from replies.items()

    return dict(screening.screen("train", {"weights": model(1.0), "control": model(3.0)}, answers()))


@pytest.fixture
def screening() -> Any:
    SEEN.clear()
    return Screening(Doubles(), Scaffold.traits.averages, {"weights": model(7.0)})


def test_a_rule_sees_models_beside_what_was_sent_and_changes_beside_zero(screening: Screening) -> None:
    found = screened(
        screening, a=Controlled(model(2.0), 5, 0.1, model(0.5)), b=Controlled(model(4.0), 6, 0.2, model(1.5))
    )
    (sites, models, centre) = SEEN[0]
    assert list(sites) == ["a", "b"]
    assert [(one["weights/w"].item(), one["control/w"].item()) for one in models] == [(2.0, 0.5), (4.0, 1.5)]
    assert (centre["weights/w"].item(), centre["control/w"].item()) == (1.0, 0.0)
    assert found == {"a": Controlled(model(4.0), 5, 0.1, model(1.0))}


def test_what_a_rule_did_is_said_once(screening: Screening) -> None:
    screened(screening, a=Controlled(model(2.0), 5, 0.1, model(0.5)))
    assert screening.settle() == {"train": {"out": ["b"]}}
    assert screening.settle() == {}


def test_a_model_of_another_shape_reaches_no_rule(screening: Screening) -> None:
    with pytest.raises(FedshiftError, match="'a'"):
        screened(screening, a=Controlled(model(2.0, 2.0), 5, 0.1, model(0.5)))
    assert not SEEN


@pytest.mark.parametrize(("trim", "mean"), [(0, 22.6), (1, 13 / 3), (2, 2.0)])
def test_as_many_are_trimmed_as_asked(trim: int, mean: float) -> None:
    models = [Weights({"w": torch.tensor([value])}) for value in (0.0, 1.0, 10.0, 2.0, 100.0)]
    verdict = TrimmedMean(trim=trim).judge("abcde", models, models[0])
    one = verdict.replaced("a", models[0])
    assert one is not None
    assert one["w"].item() == pytest.approx(mean)
