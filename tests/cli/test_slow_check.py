"""`check` names the frozen network where a pre-trained one would train for hours on a processor."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from fedshift.report.check_words import _faster


@pytest.mark.parametrize(
    ("model", "hours", "device", "said"),
    [
        pytest.param(
            {"name": "resnet18", "pretrained": True},
            26.0,
            "cpu",
            True,
            marks=pytest.mark.case("long training", "ResNet-18 for 26 h on a processor"),
        ),
        ({"name": "resnet18", "pretrained": True}, 0.5, "cpu", False),
        ({"name": "resnet18", "pretrained": True}, 26.0, "cuda", False),
        ({"name": "resnet18", "pretrained": False}, 26.0, "cpu", False),
        ({"name": "mlp"}, 26.0, "cpu", False),
    ],
)
def test_a_frozen_network_is_named(model: dict[str, Any], hours: float, device: str, said: bool) -> None:
    experiment: Any = SimpleNamespace(model=SimpleNamespace(**model))
    found: Any = SimpleNamespace(device=device, methods=[SimpleNamespace(hours=hours / 2)] * 2)
    hint = _faster(experiment, found)
    assert (hint is not None) == said
    if hint is not None:
        assert "{name: frozen, backbone: {name: resnet18, pretrained: true}}" in hint
