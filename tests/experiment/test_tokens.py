"""Text: integers stay integers everywhere, texts become tokens by a local tokenizer, and networks of text train."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small
import torch
from calling import Cli
from small import experiment, outcome, save, write

import fedshift
from fedshift.data.inference import rows_to_predict, table_to_predict
from fedshift.data.site_data import SiteData
from fedshift.data.table_files import SiteFormat
from fedshift.errors import UserError
from fedshift.experiment.config.experiment import parse
from fedshift.experiment.predict import load_model
from fedshift.models import registry
from fedshift.models.made_up import reads_tokens

pytest.importorskip("transformers")
pytestmark = pytest.mark.slow  # the import of transformers takes seconds

BERT: dict[str, Any] = {
    "name": "hf:bert",
    "vocab_size": 40,
    "hidden_size": 8,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "max_position_embeddings": 16,
}
GOOD, BAD = ("good fine lovely great", "bad awful poor sad")
LENGTH = 8


def tokens(seed: int, samples: int = 24) -> dict[str, Any]:
    """Texts of 3 to 8 tokens, of which each class has ten of its own; the mask ends them."""
    rng = np.random.default_rng(seed)
    labels = np.arange(samples) % 3
    x = rng.integers(0, 10, (samples, LENGTH)) + 10 * labels[:, None] + 1
    mask = np.arange(LENGTH) < rng.integers(3, LENGTH + 1, (samples, 1))
    return {"x": np.where(mask, x, 0), "y": labels, "mask": mask}


def sites(folder: Path) -> dict[str, str]:
    return save(folder, a=tokens(1, 30), b=tokens(2, 24), c=tokens(3, 33))


def of_tokens(folder: Path, **changes: Any) -> dict[str, Any]:
    return experiment(sites(folder / "data"), **{"model": BERT, **changes})


def vocabulary(folder: Path) -> Path:
    """A tokenizer of the library `tokenizers`: it knows the words above, and begins each text with [CLS]."""
    tokenizers = pytest.importorskip("tokenizers")
    words = ["[PAD]", "[UNK]", "[CLS]", *f"{GOOD} {BAD} the film was".split()]
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: n for n, word in enumerate(words)}, "[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.post_processor = tokenizers.processors.TemplateProcessing(single="[CLS] $A", special_tokens=[("[CLS]", 2)])
    folder.mkdir(parents=True, exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    return folder


def reviews(folder: Path) -> dict[str, Any]:
    """A table of reviews at three sites."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, site in enumerate("abc"):
        rng = np.random.default_rng(number)
        with (folder / f"{site}.csv").open("w", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(["review", "mood"])
            for row in range(24):
                words = (GOOD if row % 2 else BAD).split()
                rows.writerow([f"the film was {' '.join(rng.choice(words, 2))}", "up" if row % 2 else "down"])
    return {
        "name": "table",
        "sites": {site: str(folder / f"{site}.csv") for site in "abc"},
        "label": "mood",
        "text": "review",
        "tokenizer": str(vocabulary(folder / "words")),
        "length": LENGTH,
    }


def test_integers_are_tokens_to_the_network_and_are_not_scaled(tmp_path: Path) -> None:
    """As stored: with -1 where the mask has 0."""
    written = tokens(1, 30)
    data = parse(of_tokens(tmp_path)).data.build()
    assert data.preprocessing.kind == "tokens"
    assert data.warnings == ()
    expected = torch.from_numpy(np.where(written["mask"], written["x"], -1))
    for cache_bytes in (0, 1 << 20):
        site = SiteData([(data.domains["a"], np.arange(30), 0)], data.preprocessing, None, cache_bytes=cache_bytes)
        found = torch.cat([batch[0] for batch in site.all_batches(7)])
        assert found.dtype == torch.int64
        assert torch.equal(found, expected)


def test_the_scores_are_those_of_the_librarys_own_network() -> None:
    """BertForSequenceClassification with input_ids and attention_mask, from the same weights."""
    transformers = pytest.importorskip("transformers")
    network = registry.build(registry.parse(BERT, permit=registry.any_code), (LENGTH,), 3, 0).eval()
    assert reads_tokens(network)
    config = transformers.BertConfig(num_labels=3, **{key: value for key, value in BERT.items() if key != "name"})
    theirs = transformers.BertForSequenceClassification(config).eval()
    weights = {name.removeprefix("features.model."): value for name, value in network.state_dict().items()}
    head = {f"classifier.{name.rpartition('.')[2]}": value for name, value in network.classifier.state_dict().items()}
    theirs.load_state_dict({name: value for name, value in weights.items() if "classifier" not in name} | head)
    written = tokens(5)
    x, mask = torch.from_numpy(written["x"]), torch.from_numpy(written["mask"]).long()
    with torch.no_grad():
        expected = theirs(input_ids=x, attention_mask=mask).logits
        found = network(torch.where(mask.bool(), x, -1))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


METHODS = ["fedavg", {"name": "csac", "acquisition_epochs": 1, "calibration_epochs": 1}, "recipe"]


@pytest.mark.usefixtures("shared_workers")
def test_processes_train_to_the_same_bits_and_the_model_predicts_and_exports(tmp_path: Path) -> None:
    options = of_tokens(tmp_path, methods=METHODS)
    for name, engine in (("one", {"threads": 1}), ("two", {"threads": 1, "workers": 2})):
        fedshift.run({**options, "engine": engine}, tmp_path / name, trust=True)
    assert outcome(tmp_path / "one") == outcome(tmp_path / "two")
    run = next((tmp_path / "one").rglob("model.safetensors")).parent
    written = tokens(1, 30)
    model = fedshift.Model.load(run, network="hf:bert")
    from_memory = model.predict_proba({"input_ids": written["x"], "attention_mask": written["mask"].astype(int)})
    np.testing.assert_array_equal(model.predict_proba(tmp_path / "data" / "a.npz"), from_memory)
    runtime = pytest.importorskip("onnxruntime")
    model.export("onnx", tmp_path / "out")
    session = runtime.InferenceSession((tmp_path / "out" / "model.onnx").read_bytes())
    samples = np.where(written["mask"], written["x"], -1)
    (found,) = session.run(None, {"samples": samples})
    plain = model.trained.scores(samples, adapted=False)
    np.testing.assert_allclose(found, plain, atol=1e-5)


def test_texts_become_the_tokenizers_ids_and_a_model_file_reads_text_alone(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    section = reviews(tmp_path / "reviews")
    data = parse(experiment({}, data=section, model=BERT)).data.build()
    made = tokenizers.Tokenizer.from_file(f"{section['tokenizer']}/tokenizer.json")
    with Path(section["sites"]["a"]).open() as file:
        texts = [row["review"] for row in csv.DictReader(file)]
    for text, row in zip(texts, data.domains["a"].inputs, strict=True):
        ids = made.encode(text).ids
        assert row.tolist() == [*ids, *[-1] * (LENGTH - len(ids))]
    options = experiment({}, data=section, model=BERT, training={"rounds": 12, "lr": 0.01, "optimizer": "adam"})
    results = fedshift.run(options, tmp_path / "runs", trust=True)
    assert (results.runs[0].score() or 0) > 90  # a bag of words tells these texts apart
    (Path(section["tokenizer"]) / "tokenizer.json").unlink()
    model = results.model("fedavg", "a", 0)
    said = model.predict(["the film was lovely great", "the film was awful sad"])
    assert said.tolist() == ["up", "down"]
    expected = ["up" if row % 2 else "down" for row in range(24)]
    assert np.mean(model.predict(Path(section["sites"]["a"])) == expected) > 0.9


def test_predictions_of_texts_have_the_names_of_rows(tmp_path: Path) -> None:
    """From the column that names rows, also where the new file calls columns otherwise or is written otherwise."""
    pytest.importorskip("tokenizers")
    section = reviews(tmp_path / "reviews")
    for file in map(Path, section["sites"].values()):
        lines = file.read_text().splitlines()
        numbered = [f"{file.stem}{row};{line.replace(',', ';')}" for row, line in enumerate(lines)]
        file.write_text("\n".join([f"nr;{lines[0].replace(',', ';')}", *numbered[1:]]))
    options = experiment({}, data={**section, "id": "nr", "separator": ";"}, model=BERT, training={"rounds": 1})
    results = fedshift.run(options, tmp_path / "runs", trust=True)
    folder = results.folder / "fedavg" / "a" / "seed-0"
    alike, other = tmp_path / "alike.csv", tmp_path / "other.csv"
    alike.write_text("nr;review\nx1;the film was lovely\nx2;the film was awful\n")
    other.write_text("number,text\nx1,the film was lovely\nx2,the film was awful\n")
    model = load_model(folder, own_network=BERT["name"])
    written = SiteFormat.model_validate({"separator": ",", "rename": {"number": "nr", "text": "review"}})
    found = []
    for file, own in ((alike, None), (other, written)):
        rows = table_to_predict(file, model.preprocessing, own)
        assert rows is not None
        found.append(rows_to_predict(model.preprocessing, rows))
    assert [names for names, _ in found] == [["x1", "x2"]] * 2
    assert np.array_equal(found[0][1], found[1][1])
    frame = pytest.importorskip("pandas").DataFrame({"nr": ["x1"], "review": ["the film was awful"]})
    rows = table_to_predict(frame, model.preprocessing)
    assert rows is not None
    assert rows_to_predict(model.preprocessing, rows)[0] == ["x1"]


def test_a_tokenizer_of_transformers_in_a_folder(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good", "bad"]))
    theirs = transformers.BertTokenizerFast(str(tmp_path / "vocab.txt"))
    folder = tmp_path / "saved"
    theirs.save_pretrained(str(folder))
    (folder / "tokenizer.json").unlink(missing_ok=True)
    (folder / "vocab.txt").write_text((tmp_path / "vocab.txt").read_text())
    from fedshift.data.text_columns import text_encoding, tokens_of

    found = tokens_of(["Good bad", "bad"], text_encoding("review", 6, folder).tokenizer, 6)
    expected = theirs(["Good bad", "bad"])["input_ids"]
    assert [[token for token in row if token >= 0] for row in found.tolist()] == expected


def test_adapters_train_on_text(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    adapters = {"rank": 2, "targets": ["query", "value"]}
    options = of_tokens(tmp_path, training={"rounds": 2, "batch_size": 8, "lr": 0.05, "adapters": adapters})
    results = fedshift.run(options, tmp_path / "runs", trust=True)
    plain = fedshift.run(of_tokens(tmp_path), tmp_path / "plain", trust=True)
    assert results.runs[0].bytes_up["weights"] < plain.runs[0].bytes_up["weights"] / 2


NET = """
from torch import nn

class Net(nn.Module):
    def __init__(self, input_shape, classes, size=40):
        super().__init__()
        self.words, self.head = nn.Embedding(size, 4), nn.Linear(4, classes)

    def forward(self, x):
        return self.head(self.words(x.clamp(min=0)).mean(1))
"""


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model": {"name": "mlp"}}, r"'mlp' reads numbers, but .* integers, which are tokens"),
        ({"model": {**BERT, "vocab_size": 20}}, r"fails on token 30, the largest of the data.*vocab_size"),
        ({"model": {**BERT, "max_position_embeddings": 4}}, r"cannot read samples of shape \(8,\)"),
        ({"model": "net.py:Net", "methods": [{"name": "fedavg", "local": ["mixup"]}]}, r"mixup calculates with"),
        ({"methods": ["kd3a"], "protocol": {"kind": "adapt_to_one", "targets": ["a"]}}, r"write mixup: 0"),
        ({"methods": ["crossgrad"]}, r"crossgrad cannot learn from tokens"),
    ],
)
def test_what_cannot_be_is_one_line_before_training(
    change: dict[str, Any], said: str, tmp_path: Path, cli: Cli
) -> None:
    (tmp_path / "net.py").write_text(NET)
    told = cli("check", write(tmp_path / "e.yaml", of_tokens(tmp_path, **change)), "--trust").error()
    assert re.search(said, told), told
    assert "\n" not in told.strip()


def test_a_mistake_in_an_own_network_names_its_line(tmp_path: Path, cli: Cli) -> None:
    (tmp_path / "net.py").write_text(NET.replace("clamp(min=0)", "clamp(min=0)[:, 99]"))
    said = cli("check", write(tmp_path / "e.yaml", of_tokens(tmp_path, model="net.py:Net")), "--trust").error()
    assert "(net.py, line 10)" in said
    assert "\n" not in said.strip()


def test_own_network_is_found_to_read_tokens_and_the_advice_on_floats_does_not_crash(tmp_path: Path, cli: Cli) -> None:
    """Tokens given as floats get advice that names integers; followed or not, no traceback comes."""
    (tmp_path / "net.py").write_text(NET)
    cli("check", write(tmp_path / "e.yaml", of_tokens(tmp_path, model="net.py:Net")), "--trust")
    written = {
        site: {**tokens(number), "x": tokens(number)["x"].astype(np.float32)} for number, site in enumerate("abc")
    }
    for arrays in written.values():
        del arrays["mask"]
    where = save(tmp_path / "floats", **written)
    (tmp_path / "long.py").write_text(NET.replace("x.clamp(min=0)", "x.long()"))
    options = experiment(where, model="long.py:Net")
    said = cli("check", write(tmp_path / "f.yaml", options), "--trust")
    assert "if they are tokens, give integers" in said.out
    options["data"]["standardise"] = True
    said = cli("check", write(tmp_path / "g.yaml", options), "--trust").error()
    assert "(long.py, line 10)" in said
    assert "\n" not in said.strip()


def test_what_tokens_are_and_what_methods_do_with_them(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"reads tokens, but .* numbers"):
        fedshift.check(experiment(small.sites(tmp_path / "x"), model=BERT), trust=True)
    options = of_tokens(tmp_path)
    options["data"]["standardise"] = True
    with pytest.raises(UserError, match="integers, which are tokens"):
        fedshift.check(options, trust=True)
    told = fedshift.check(of_tokens(tmp_path, methods=METHODS), trust=True).warnings
    assert sum("on tokens" in line for line in told) == 2
    kd3a = {"name": "kd3a", "mixup": 0}
    fedshift.check(
        of_tokens(tmp_path, methods=[kd3a], protocol={"kind": "adapt_to_one", "targets": ["a"], "seeds": [0]}),
        trust=True,
    )
    section = reviews(tmp_path)
    whole = parse(experiment({}, data=section, model=BERT)).data.model_dump(mode="json")
    assert whole["text"] == "review"
    numbers = {"name": "table", "sites": section["sites"], "label": "mood", "categorical": ["review"]}
    plain = parse(experiment({}, data=numbers)).data.model_dump(mode="json")
    assert not {"text", "tokenizer", "length", "site_labels"} & plain.keys()
    assert json.dumps(plain)
