"""Networks that do not come with fedshift, deployed: no code travels, and a site trains those that it lists."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from loopback import Loopback, deploy, options_of, simulate
from outcomes import alike, model, same
from site_yaml import site_file, table_files, write_data

from fedshift.deploy.remote.policy import Policy
from fedshift.errors import UserError
from tried import slow_after

SITES = {"north": 21, "south": 17}
CODE = """
import sys
from torch import nn

sys.imported_by_site = True

class Net(nn.Sequential):
    def __init__(self, input_shape, classes, width=4):
        super().__init__(nn.Linear(input_shape[0], width), nn.ReLU(), nn.Linear(width, classes))
"""
LISTED = {"name": "others_networks:Net", "width": 5}


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package with a network, installed but not imported."""
    (tmp_path / "others_networks.py").write_text(CODE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "others_networks", raising=False)
    monkeypatch.delattr(sys, "imported_by_site", raising=False)


@pytest.mark.slow
@pytest.mark.usefixtures("package")
def test_a_listed_network_trains_as_in_a_simulation(tmp_path: Path) -> None:
    options = options_of({"name": "fedavg"}, model=LISTED)
    deployed, _ = deploy(tmp_path, options, sites=SITES, models=[LISTED])
    simulated = simulate(tmp_path, options, SITES)
    assert alike(deployed, simulated)


@pytest.mark.threat("code_or_method")
@pytest.mark.usefixtures("package")
@pytest.mark.parametrize("models", slow_after(1, ["first", "all", [{"name": "mlp"}], [{**LISTED, "width": 6}]]))
def test_a_site_refuses_what_it_does_not_list(models: Any, tmp_path: Path) -> None:
    files = write_data(tmp_path / "data", SITES)
    places = {
        site: site_file(tmp_path, site, files[site], models=models if site == "south" else [LISTED]) for site in SITES
    }
    with pytest.raises(UserError, match=r"site 'south' .*policy\.models"):
        deploy(tmp_path, options_of({"name": "fedavg"}, model=LISTED), sites=SITES, transport=Loopback(places))


@pytest.mark.threat("code_or_method")
@pytest.mark.usefixtures("package")
@pytest.mark.parametrize("models", ["first", "all"])
def test_nothing_is_imported_that_is_not_listed(models: Any) -> None:
    with pytest.raises(UserError, match=r"policy\.models"):
        Policy(models=models).permit_network("north", LISTED["name"])
    assert not hasattr(sys, "imported_by_site")


def test_a_file_is_not_deployed(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(CODE)
    with pytest.raises(UserError, match="no code travels"):
        deploy(tmp_path, options_of({"name": "fedavg"}, model={"name": f"{tmp_path}/own.py:Net"}), sites=SITES)
    (tmp_path / "spleen" / "configs").mkdir(parents=True)
    with pytest.raises(UserError, match="no code travels"):
        deploy(tmp_path, options_of({"name": "fedavg"}, model={"name": f"bundle:{tmp_path}/spleen"}), sites=SITES)
    with pytest.raises(ValueError, match=r"package\.module:Class"):
        Policy(models=({"name": f"{tmp_path}/own.py:Net"},))


@pytest.mark.slow  # the import of peft takes seconds
def test_sites_train_adapters_as_in_a_simulation(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    training: dict[str, Any] = {"rounds": 2, "batch_size": 8, "lr": 0.1, "class_weights": {"0": 3}}
    training["adapters"] = {"rank": 2, "second_only": True}
    options = options_of({"name": "fedavg"}, model={"name": "mlp", "hidden": [6]}, training=training)
    deployed, _ = deploy(tmp_path, options, sites=SITES)
    assert same(model(deployed, "fedavg", "west"), model(simulate(tmp_path, options, SITES), "fedavg", "west"))


BERT = {"name": "hf:bert", "vocab_size": 20, "max_position_embeddings": 8, "hidden_size": 8, "num_hidden_layers": 1}
BERT |= {"num_attention_heads": 2, "intermediate_size": 8}


@pytest.mark.slow  # the import of transformers takes seconds
def test_sites_train_on_tokens_as_in_a_simulation(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "data").mkdir()
    for number, (site, samples) in enumerate({**SITES, "west": 30}.items()):
        drawn, labels = np.random.default_rng(number), np.arange(samples) % 3
        x = drawn.integers(0, 5, (samples, 6)) + 5 * labels[:, None]
        mask = np.arange(6) < drawn.integers(3, 7, (samples, 1))
        np.savez(tmp_path / "data" / f"{site}.npz", x=x, y=labels, mask=mask)
    options = options_of("fedavg", model=BERT)
    deployed, _ = deploy(tmp_path, options, sites=SITES, models=[BERT], exposure=1)
    assert alike(deployed, simulate(tmp_path, options, SITES))


@pytest.mark.slow  # the import of transformers takes seconds
def test_sites_of_text_agree_on_its_tokenizer_without_sending_a_word(tmp_path: Path) -> None:
    """Sites send nothing for an encoding; one that has another tokenizer is told so before training."""
    tokenizers = pytest.importorskip("tokenizers")
    words = [*"abcdefgh"]
    made = {name: tmp_path / f"{name}.json" for name in ("one", "other")}
    for name, known in (("one", words), ("other", words[::-1])):
        vocabulary = {word: number for number, word in enumerate(["?", *known])}
        word_tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, "?"))
        word_tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
        word_tokenizer.save(str(made[name]))
    files = {site: tmp_path / f"{site}.csv" for site in SITES}
    for number, (site, samples) in enumerate(SITES.items()):
        drawn = np.random.default_rng(number)
        rows = [f"{' '.join(drawn.choice(words[3 * k : 3 * k + 3], 4))},{k}" for k in np.arange(samples) % 2]
        files[site].write_text("said,label\n" + "\n".join(rows) + "\n")
    section = {"name": "table", "label": "label", "text": "said", "tokenizer": str(made["one"]), "length": 6}

    def sites(of_south: str) -> Loopback:
        of_site, classes = {"south": {"tokenizer": str(made[of_south])}}, {"classes": ["0", "1"]}
        return Loopback(table_files(tmp_path, files, section, of_site, sections=classes, models=[BERT], exposure=1))

    options = options_of("fedavg", model=BERT, protocol={"targets": ["south"], "seeds": [0]})
    with pytest.raises(UserError, match="differ in how inputs are prepared"):
        deploy(tmp_path, options, sites=SITES, unseen={}, transport=sites("other"))
    deployed, _ = deploy(tmp_path, options, sites=SITES, unseen={}, transport=sites("one"))
    data = {**section, "sites": {site: str(file) for site, file in files.items()}}
    assert alike(deployed, simulate(tmp_path, options, data=data), target="south")
