"""A step of the adapter on CLIP, by FedCLIP's code; a step of vectors in front of names, by CoOp's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from authors_numbers import Reference, compares
from tiny_clip import write_clip

from fedshift.data.domain import Preprocessing
from fedshift.data.tasks.objective import objective_of
from fedshift.methods.federated.fedclip import FedCLIP
from fedshift.methods.federated.promptfl import PromptFL, Prompts
from fedshift.models import registry as models
from fedshift.models.network import Network
from fedshift.models.networks.clip import TextClassifier, TextEncoder, UnitLength
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


TOWER = {
    "query": "self_attn.q_proj",
    "key": "self_attn.k_proj",
    "value": "self_attn.v_proj",
    "out": "self_attn.out_proj",
    "norm1": "layer_norm1",
    "norm2": "layer_norm2",
    "first": "mlp.fc1",
    "second": "mlp.fc2",
}
"""Their names of a layer's parts → transformers'."""


def coop_encoder(reference: Reference) -> TextEncoder:
    """The reference's text tower as transformers builds it, and a tokenizer that knows the reference's texts."""
    transformers = pytest.importorskip("transformers")
    tensors = {name: tensor.float() for name, tensor in reference.tensors.items()}
    known, width = tensors["tokens"].shape
    config = transformers.CLIPTextConfig(
        vocab_size=known, hidden_size=width, intermediate_size=4 * width, num_hidden_layers=1,
        num_attention_heads=reference.parameters["heads"], max_position_embeddings=len(tensors["positions"]),
        projection_dim=tensors["projection"].shape[1], hidden_act="quick_gelu",
        bos_token_id=known - 2, eos_token_id=known - 1, pad_token_id=0,
    )  # fmt: skip
    tower = transformers.CLIPTextModelWithProjection(config)
    weights = {
        "embeddings.token_embedding.weight": tensors["tokens"],
        "embeddings.position_embedding.weight": tensors["positions"],
        **{f"final_layer_norm.{part}": tensors[f"final.{part}"] for part in ("weight", "bias")},
        **{
            f"encoder.layers.0.{theirs}.{part}": tensors[f"{name}.{part}"]
            for name, theirs in TOWER.items()
            for part in ("weight", "bias")
        },
    }
    tower.text_model.load_state_dict(weights)
    tower.text_projection.weight.data = tensors["projection"].t()
    model: Any = type("Model", (), {})()
    model.config = type("Config", (), {"projection_dim": config.projection_dim, "text_config": config})
    model.logit_scale = torch.tensor(reference.parameters["scale"]).log()
    model.text_model, model.text_projection = tower.text_model, tower.text_projection
    words = " ".join(["x"] * reference.tensors["context"].shape[-2])  # CoOp writes X, which its tokenizer reads as x
    known_texts = {
        f"{words} {name}.": ids for name, ids in zip(reference.inputs["names"], reference.inputs["tokens"], strict=True)
    }
    return TextEncoder(model, lambda text: {"input_ids": known_texts[text]}, "CoOp's")


@compares("federated", "promptfl_1", "promptfl_2")
def test_a_step_of_the_vectors(reference: Reference) -> None:
    pytest.importorskip("transformers")
    context = reference.tensors["context"].float()
    texts: Any = type("Texts", (), {"encoder": coop_encoder(reference), "names": tuple(reference.inputs["names"])})()
    prompts = Prompts(texts, context.shape[-2], reference.parameters["per_class"])
    prompts.context.data.copy_(context)
    width = reference.tensors["x"].shape[1]
    network = Network(
        UnitLength(),
        prompts,
        embedding_size=width,
        classes=3,
        stages={"input": "features"},
        alignment_stages=("input",),
    )
    batch: Any = type("Batch", (), {})()
    batch.inputs, batch.targets = reference.tensors["x"].float(), torch.tensor(reference.inputs["labels"])
    reference.agree("logits", network(batch.inputs))
    site: Any = type("Site", (), {"objective": objective_of(Preprocessing(kind="features"))})()
    loss = PromptFL().loss_at(site, network, Weights(dict(network.state_dict())))(batch)
    loss.backward()  # type: ignore[no-untyped-call]
    reference.agree("loss", loss)
    assert prompts.context.grad is not None
    reference.agree("context", context - reference.parameters["lr"] * prompts.context.grad)
