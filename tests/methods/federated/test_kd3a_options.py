"""KD3A: what each of its options changes, and what it leaves alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from kd3a_setting import kd3a, rounds_of

from fedshift.errors import UserError
from fedshift.experiment.compatibility import check_fit
from fedshift.experiment.config.experiment import parse
from fedshift.experiment.plan import Plan
from fedshift.federation.site import Site
from fedshift.methods.federated.kd3a import Models, shares_of_round
from fedshift.weights import Weights

IDENTITIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "a label is a name": ({"label": "mine"}, {}),
    "the weight of a loss that is not there": ({"batch_norm_weight": 5.0}, {}),
    "orders of a focus that is not there": ({"focus_permutations": 2}, {"focus": "samples"}),
    "a gate that nobody asks": ({"gate_start": 0.2, "gate_end": 0.3}, {"vote": "mean", "focus": "samples"}),
}


@pytest.mark.parametrize("case", IDENTITIES)
def test_an_option_that_must_not_change_the_weights(case: str) -> None:
    changed, beside = IDENTITIES[case]
    assert rounds_of(kd3a(**{**beside, **changed}))[0][-1].weights == rounds_of(kd3a(**beside))[0][-1].weights


def test_predictions_that_are_too_many_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The epoch goes over all samples, so judging what training saw is judging them all."""
    (kept, _), _ = rounds_of(kd3a())
    monkeypatch.setattr("fedshift.methods.federated.kd3a._KEPT_BYTES", 0)
    (streamed, _), _ = rounds_of(kd3a())
    assert streamed.report["confident"] == kept.report["confident"]
    assert streamed.report["aggregation_weights"] == pytest.approx(kept.report["aggregation_weights"])
    for name, tensor in kept.weights.items():
        torch.testing.assert_close(streamed.weights[name], tensor, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("batch_norm", ["linear", "off"])
def test_batch_norm_options_of_a_network_without_it(batch_norm: str) -> None:
    (_, found), _ = rounds_of(kd3a(batch_norm=batch_norm), batch_norm=False)
    (_, default), _ = rounds_of(kd3a(), batch_norm=False)
    assert found.weights == default.weights


@pytest.mark.parametrize(
    ("options", "word"), [({"focus": "h_divergence"}, "h_divergence"), ({"batch_norm": "loss"}, "loss")]
)
def test_options_that_need_batch_norm(options: dict[str, Any], word: str) -> None:
    written = {
        "data": {"name": "rotated_digits", "per_class": 5},
        "protocol": {"kind": "adapt_to_one", "targets": ["D0"]},
        "model": {"name": "mlp", "hidden": [8]},
        "methods": ["fedavg", {"name": "kd3a", **options}],
        "device": "cpu",
    }
    experiment = parse(written)
    with pytest.raises(UserError, match=rf"^kd3a\.{next(iter(options))}: {word} .*the network has none$"):
        check_fit(Plan(experiment, experiment.data.build()))
    written["model"] = {"name": "mlp", "hidden": [8], "batch_norm": True}
    experiment = parse(written)
    check_fit(Plan(experiment, experiment.data.build()))


@pytest.mark.parametrize("confident", [0.0, 0.6, 1.0])
def test_the_target_s_share_is_the_released_one_however_sources_are_weighted(confident: float) -> None:
    """Sources of equal samples have equal shares, as those of equal focus."""
    models = Models(Weights({}), {}, {}, dict.fromkeys("abc", 20))
    site = cast(Site, SimpleNamespace(name="t", samples=7))
    found = shares_of_round(site, "samples", models, None, confident)
    assert found == pytest.approx(shares_of_round(site, "samples", models, torch.ones(3), confident))
    assert found["t"] == pytest.approx(confident / 4)
    assert sum(found.values()) == pytest.approx(1)
