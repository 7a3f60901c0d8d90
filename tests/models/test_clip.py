"""CLIP from a folder, held to transformers' own CLIPModel, and one-line messages where a folder is none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_clip import write_clip

from fedshift.errors import UserError
from fedshift.models import registry
from fedshift.models.network import Network
from fedshift.models.networks import clip as module
from fedshift.models.networks.clip import TextClassifier

transformers = pytest.importorskip("transformers")
NAMES = ["dog", "old cat", "teapot"]
LEGACY = {"eos_token_id": 2}
"""As in the folders of OpenAI's weights: transformers then takes the largest token for the end."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_clip(tmp_path_factory.mktemp("clip"))


def tower(folder: Path, channels: int = 3) -> Network:
    return tower_of(folder, (channels, 32, 32)).eval()


def tower_of(folder: Path, shape: tuple[int, ...]) -> Network:
    return registry.build(registry.parse({"name": "clip", "pretrained": str(folder)}), shape, 3, 0)


def texts(folder: Path, classes: int = 3, width: int = 16, **changes: Any) -> Network:
    fields = {"name": "clip_text", "pretrained": str(folder), "class_names": NAMES, **changes}
    return registry.build(registry.parse(fields), (width,), classes, 0)


def logits(folder: Path, images: torch.Tensor, sentences: list[str]) -> torch.Tensor:
    """What transformers itself says."""
    model = transformers.CLIPModel.from_pretrained(folder).eval()
    read = transformers.AutoTokenizer.from_pretrained(folder)(sentences, return_tensors="pt", padding=True)
    with torch.no_grad():
        found: torch.Tensor = model(pixel_values=images, **read).logits_per_image
    return found


@pytest.mark.parametrize("legacy", [{}, LEGACY], ids=["end", "largest token"])
@pytest.mark.parametrize("template", ["a photo of a {}.", "{} on a table."])
def test_the_untrained_classifier_is_transformers_zero_shot(
    tmp_path: Path, template: str, legacy: dict[str, Any]
) -> None:
    folder = write_clip(tmp_path, **legacy)
    images = torch.randn(6, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    wanted = logits(folder, images, [template.format(name) for name in NAMES])
    with torch.no_grad():
        scores = texts(folder, template=template)(tower(folder).features(images))
    assert wanted.std() > 0.5
    torch.testing.assert_close(scores, wanted, atol=1e-6, rtol=1e-6)


def test_grey_images_are_read_as_colour(folder: Path) -> None:
    grey = torch.randn(2, 1, 32, 32, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(tower(folder, 1).features(grey), tower(folder).features(grey.expand(-1, 3, -1, -1)))


def test_the_embeddings_of_a_text_in_place_of_its_tokens_give_its_feature(folder: Path) -> None:
    """What CoOp calls the initialisation by words: vectors that are words' embeddings are these words."""
    classifier = texts(folder).classifier
    assert isinstance(classifier, TextClassifier)
    encoder = classifier.encoder
    sentence, other = encoder.tokens(("old cat",)), encoder.tokens(("x x cat",))
    assert sentence.shape != other.shape  # letters are tokens here
    words = encoder.tokens(("a b cat",))
    table = transformers.CLIPModel.from_pretrained(folder).text_model.embeddings.token_embedding.weight
    put_in = table[words[0, 1:3]].detach()
    torch.testing.assert_close(encoder.features(other, put_in), encoder.features(words))
    assert not torch.allclose(encoder.features(other), encoder.features(words), atol=1e-3)
    both = torch.stack([put_in, put_in])
    torch.testing.assert_close(encoder.features(other.expand(2, -1), both)[1:], encoder.features(words))


def test_copies_share_the_text_tower_and_the_state_has_none(folder: Path) -> None:
    import copy

    network = texts(folder)
    again = copy.deepcopy(network)
    assert isinstance(network.classifier, TextClassifier)
    assert isinstance(again.classifier, TextClassifier)
    assert again.classifier.encoder is network.classifier.encoder
    assert list(network.state_dict()) == ["classifier.weight", "classifier.bias"]


def test_other_weights_in_the_same_folder_are_read_anew(tmp_path: Path) -> None:
    before = texts(write_clip(tmp_path, seed=0)).classifier.weight
    after = texts(write_clip(tmp_path, seed=1)).classifier.weight
    assert not torch.equal(before, after)  # type: ignore[arg-type]


def test_mistakes_are_one_line(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(message: str, make: Any) -> None:
        with pytest.raises(UserError, match=message) as told:
            make()
        assert "\n" not in str(told.value)

    refused("no weights file at .*nowhere", lambda: texts(tmp_path / "nowhere"))
    refused("3 names for 4 classes", lambda: texts(folder, classes=4))
    refused("reads the 16 image features .* have 5 numbers", lambda: texts(folder, width=5))
    refused("at most 40 tokens, but 'a photo", lambda: texts(folder, class_names=["dog", "cat", "x" * 90]))
    refused("template needs {} once", lambda: texts(folder, template="a photo"))
    refused("32 × 32, but these are 3 × 30 × 30; .*model.size: 32", lambda: registry.build(
        registry.parse({"name": "clip", "pretrained": str(folder)}), (3, 30, 30), 3, 0))  # fmt: skip
    refused("these are 3 × 32 × 48", lambda: tower_of(folder, (3, 32, 48)))
    refused("these are 3 × 48 × 32", lambda: tower_of(folder, (3, 48, 32)))
    refused("colour or grey images .* these are 2 × 32 × 32", lambda: tower_of(folder, (2, 32, 32)))
    refused("vectors of 1280 numbers", lambda: registry.build(
        registry.parse({"name": "clip", "pretrained": str(folder)}), (1280,), 3, 0))  # fmt: skip
    for lacking, message in (
        ("tokenizer.json", "no tokenizer.json or vocab.json"),
        ("model.safetensors", "no weights file"),
    ):
        bare = write_clip(tmp_path / lacking)
        for name in [lacking, *(["vocab.json", "merges.txt"] if lacking == "tokenizer.json" else [])]:
            (bare / name).unlink()
        refused(message, lambda bare=bare: texts(bare))
    other = write_clip(tmp_path / "other")
    (other / "config.json").write_text('{"model_type": "vit"}')
    refused("kind 'vit', not clip", lambda: texts(other))
    (other / "config.json").write_text("{")
    refused(r"config.json cannot be read", lambda: texts(other))
    cut = write_clip(tmp_path / "cut")
    (cut / "config.json").write_text(
        (folder / "config.json").read_text().replace('"num_hidden_layers": 2', '"num_hidden_layers": 3')
    )
    refused("does not fit model 'clip': missing", lambda: texts(cut))
    module._model_of.cache_clear()
    module._encoder_of.cache_clear()
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    refused(r"needs the package transformers: pip install 'fedshift\[networks\]'", lambda: texts(folder))
