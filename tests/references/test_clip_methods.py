"""A step of the adapter on CLIP, by FedCLIP's code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from authors_numbers import Reference, compares
from tiny_clip import write_clip

from fedshift.methods.federated.fedclip import FedCLIP
from fedshift.models import registry as models
from fedshift.models.networks.clip import TextClassifier
from fedshift.weights import Weights

LAYERS = {"first": "features.adapter.weigh.0", "second": "features.adapter.weigh.2"}


@compares("federated", "fedclip_1")
def test_a_step_of_the_adapter(reference: Reference, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    folder = write_clip(tmp_path, width=4)
    fields = {"name": "clip_text", "pretrained": str(folder), "class_names": ["dog", "cat", "cup"]}
    network = models.build(models.parse(fields), (4,), 3, 0)
    assert isinstance(network.classifier, TextClassifier)
    texts = torch.nn.functional.normalize(reference.tensors["texts"].float())
    network.classifier.weight.data = reference.parameters["scale"] * texts
    method = FedCLIP()
    trained = method.adapt_network(network, 3)
    names = {f"{layer}.{part}": f"{path}.{part}" for layer, path in LAYERS.items() for part in ("weight", "bias")}
    start = Weights({ours: reference.tensors[name].float() for name, ours in names.items()})
    trained.load_state_dict(dict(start))
    batch: Any = type("Batch", (), {})()
    batch.inputs, batch.targets = reference.tensors["x"].float(), torch.tensor(reference.inputs["labels"])
    site: Any = None
    method.loss_at(site, trained, start)(batch).backward()  # type: ignore[no-untyped-call]
    for name, ours in names.items():
        gradient = trained.get_parameter(ours).grad
        assert gradient is not None
        reference.agree(name, start[ours] - reference.parameters["lr"] * gradient)
