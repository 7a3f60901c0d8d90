"""The rows on CLIP on a tiny CLIP of random weights: what they predict, what leaves a site, the same bits in a pool."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from tiny import images, network_for, run, start_of, vectors
from tiny_clip import write_clip

import fedshift
from fedshift.errors import UserError
from fedshift.experiment.config.experiment import parse
from fedshift.experiment.features import build_data
from fedshift.federation.local.in_process import LocalFederation
from fedshift.methods import registry
from fedshift.methods.federated.promptfl import Prompts
from fedshift.models import registry as models
from fedshift.models.network import Network
from fedshift.models.networks.clip import TextClassifier

transformers = pytest.importorskip("transformers")
EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "clip.yaml"
NAMES = ["dog", "cat", "cup"]
ROWS = ("zero_shot", "linear_probe", "promptfl", "fedclip")
SENT = {
    "linear_probe": {"classifier.weight": (3, 5), "classifier.bias": (3,)},
    "promptfl": {"classifier.context": (4, 24)},
    "fedclip": {
        "features.adapter.weigh.0.weight": (5, 5),
        "features.adapter.weigh.0.bias": (5,),
        "features.adapter.weigh.2.weight": (5, 5),
        "features.adapter.weigh.2.bias": (5,),
    },
}
"""All that a site sends, of features of width 5 and tokens of width 24."""


def method_of(name: str) -> Any:
    return registry.parse({"name": name, **({"context": 4} if name == "promptfl" else {})})


@pytest.mark.parametrize("name", SENT)
def test_only_what_is_trained_crosses_the_wire(name: str) -> None:
    found = [vectors("a", 20), vectors("b", 12)]
    state, where = run(method_of(name), found, {"name": "linear"}, rounds=1)
    assert isinstance(where, LocalFederation)
    assert {key: tuple(tensor.shape) for key, tensor in state.weights.items()} == SENT[name]
    model = 4 * sum(int(np.prod(shape)) for shape in SENT[name].values())
    assert where.ledger.total["up"]["weights"] == where.ledger.total["down"]["weights"] == 2 * model


def test_zero_shot_sends_and_trains_nothing() -> None:
    found = [vectors("a", 20), vectors("b", 12)]
    state, where = run(method_of("zero_shot"), found, {"name": "linear"}, rounds=2)
    assert isinstance(where, LocalFederation)
    assert state.weights == start_of(method_of("zero_shot"), found)
    assert not where.ledger.entries


def clip(found: Any) -> Network:
    """The tiny CLIP that reads these samples."""
    return models.build(network_for(method_of("fedclip"), {}, found.inputs.shape[1:]), found.inputs.shape[1:], 3, 0)


@pytest.mark.parametrize("per_class", [False, True])
def test_vectors_that_are_words_are_the_zero_shot_classifier_of_these_words(per_class: bool) -> None:
    found = vectors("a", 9)
    plain = clip(found)
    assert isinstance(plain.classifier, TextClassifier)
    encoder = plain.classifier.encoder
    method = registry.parse({"name": "promptfl", "context": 3, "per_class": per_class})
    prompts = method.adapt_network(plain, 3)
    assert isinstance(prompts.classifier, Prompts)
    table = encoder._on(torch.device("cpu"))["text"].embeddings.token_embedding.weight
    words = table[encoder.tokens(("a b c dog.",))[0, 1:4]]
    prompts.classifier.context.data.copy_(words)
    texts = TextClassifier(encoder, tuple(NAMES), "a b c {}.")
    inputs = torch.from_numpy(found.inputs)
    torch.testing.assert_close(prompts(inputs), texts(plain.features(inputs)), atol=1e-5, rtol=1e-5)


def test_another_network_is_refused_in_one_line() -> None:
    network = models.build(models.parse({"name": "linear"}), (5,), 3, 0)
    for name in ROWS:
        with pytest.raises(UserError, match=f"{name} needs CLIP: write model: {{name: frozen, ") as told:
            method_of(name).adapt_network(network, 3)
        assert "\n" not in str(told.value)


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The example as it stands, with a tiny CLIP and few small pictures in the places of its folders."""
    place = tmp_path_factory.mktemp("clip")
    if not EXAMPLE.is_file():
        pytest.skip("examples/ is not beside these tests")
    text = EXAMPLE.read_text(encoding="utf-8")
    assert len([line for line in text.splitlines() if not line.startswith("#")]) <= 12
    fields: dict[str, Any] = yaml.safe_load(text)
    for site in ("north", "south", "east"):
        made = images(site, 18, 3, 32)
        for row, (image, label) in enumerate(zip(made.inputs, made.labels % 2, strict=True)):
            folder = place / "photos" / site / ("dog", "house")[label]
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.moveaxis(np.asarray(image), 0, -1)).save(folder / f"{row}.png")
    folder = str(write_clip(place / "clip"))
    fields["data"].update(root=str(place / "photos"), size=32)
    fields["model"]["backbone"]["pretrained"] = fields["model"]["head"]["pretrained"] = folder
    fields["protocol"].update(targets=["north"], seeds=[0])
    fields["training"].update(rounds=2, batch_size=8)
    return {**fields, "device": "cpu", "engine": {"threads": 1}}


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FEDSHIFT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_the_example_runs_and_zero_shot_says_what_transformers_says(
    example: dict[str, Any], tmp_path: Path, own_cache: Path
) -> None:
    results = fedshift.run({**example, "name": "clip"}, tmp_path / "runs")
    assert [found.method for found in results.runs] == [*ROWS, "fedavg"]
    assert len(list(own_cache.glob("features-clip-*"))) == 3  # once for all rows
    folder = example["model"]["head"]["pretrained"]
    theirs = transformers.CLIPModel.from_pretrained(folder).eval()
    processor = transformers.CLIPImageProcessor(size={"height": 32, "width": 32}, do_center_crop=False)
    read = transformers.AutoTokenizer.from_pretrained(folder)(
        ["a photo of a dog.", "a photo of a house."], return_tensors="pt", padding=True
    )
    raw = parse(example).data.build().domains["north"].inputs
    pixels = processor([np.moveaxis(image, 0, -1) for image in np.asarray(raw)], return_tensors="pt")
    with torch.no_grad():
        wanted = theirs(**pixels, **read).logits_per_image
    method = registry.parse({"name": "zero_shot"})
    data = build_data(parse(example))
    network = method.adapt_network(models.build(parse(example).model, data.input_shape, 2, 0), 2)
    inputs = data.domains["north"].inputs
    assert isinstance(inputs, np.ndarray)
    with torch.no_grad():
        torch.testing.assert_close(network(torch.from_numpy(inputs)), wanted, atol=0.02, rtol=1e-3)  # 16 bits
    right = 100 * float((wanted.argmax(1).numpy() == data.domains["north"].labels).mean())
    assert results.runs[0].score() == pytest.approx(right)


def test_a_trained_row_predicts_from_its_model_file(example: dict[str, Any], tmp_path: Path, own_cache: Path) -> None:
    results = fedshift.run({**example, "methods": example["methods"][2:4], "name": "rows"}, tmp_path / "runs")
    raw = parse(example).data.build().domains["north"].inputs
    for found in results.runs:
        said = results.model(found.method, "north", 0).predict(np.asarray(raw))
        assert set(said) <= {"dog", "house"}
        right = np.mean([name == ("dog", "house")[label] for name, label in zip(
            said, parse(example).data.build().domains["north"].labels, strict=True)])  # fmt: skip
        assert 100 * right == pytest.approx(found.score())


def test_vectors_begin_small() -> None:
    """CoOp draws them from N(0, 0.02²)."""
    method = registry.parse({"name": "promptfl", "context": 30})
    context = start_of(method, [vectors("a", 20), vectors("b", 12)])["classifier.context"]
    assert context.std().item() == pytest.approx(0.02, rel=0.1)
