"""Users' own networks: how they are named, made, recorded, refused, and what is found out about them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nets
import pytest
import torch
from torch import Tensor, nn

from fedshift.errors import UserError
from fedshift.experiment.config.experiment import parse as experiment
from fedshift.models import registry
from fedshift.models.network import Network
from fedshift.models.network_options import NetworkOptions
from fedshift.models.own.forward_trial import line_of

FILE = Path(nets.__file__)


def options(name: str, **more: Any) -> NetworkOptions:
    return registry.parse({"name": f"{FILE.name}:{name}", **more}, FILE.parent, registry.any_code)


def built(name: str, shape: tuple[int, ...], classes: int = 3, seed: int = 0, **more: Any) -> Network:
    return registry.build(options(name, **more), shape, classes, seed)


@pytest.mark.parametrize(
    ("name", "shape", "classifier", "stages", "aligned"),
    [
        ("Plain", (1, 8, 8), 6, ["bn", "conv2", "drop"], ["bn", "conv2"]),
        (
            "Pyramid",
            (3, 16, 16),
            16,
            ["stem", "blocks.0", "blocks.1", "blocks", "out.0"],
            ["blocks.0", "blocks.1", "blocks"],
        ),
        (
            "Tokens",
            (3, 16, 16),
            8,
            ["layers.0", "layers.2", "layers.3", "layers.5"],
            ["layers.2", "layers.3", "layers.5"],
        ),
        ("Volumes", (2, 6, 6, 6), 4, ["first", "second"], ["first", "second"]),
        ("made_of", (5,), 7, ["2"], ["2"]),
    ],
)
def test_parts_are_found(
    name: str, shape: tuple[int, ...], classifier: int, stages: list[str], aligned: list[str]
) -> None:
    network = built(name, shape)
    assert network.embedding_size == network.classifier.in_features == classifier
    assert list(network.stages) == stages
    assert list(network.alignment_stages) == aligned
    batch = torch.rand(4, *shape)
    logits, seen = network.eval().with_stages(batch, list(network.stages))
    assert logits.shape == (4, 3)
    assert torch.equal(logits, network.classifier(network.features(batch)))
    assert all(len(stage) == 4 for stage in seen.values())


def test_the_network_computes_what_the_module_does() -> None:
    torch.manual_seed(7)
    module = nets.Pyramid((3, 16, 16), 3)
    batch = torch.rand(4, 3, 16, 16)
    expected = module(batch)
    given = experiment(EXPERIMENT | {"model": module}).model
    network = registry.build(given, (3, 16, 16), 3, 0)
    assert torch.allclose(network(batch), expected, atol=1e-6)  # the memory formats differ
    assert isinstance(module.out[1], nn.Linear), "the user's module stays whole"


@pytest.mark.parametrize("kind", ["log_softmax", "dropout", "clipped", "twice", "tied", "skip"])
def test_a_network_without_a_classifier_trains_and_says_so(kind: str) -> None:
    network = built("Strange", (3,), kind=kind)
    network(torch.rand(4, 3)).sum().backward()
    assert any(parameter.grad is not None for parameter in network.parameters())
    assert "none found" in options_report("Strange", (3,), kind=kind)
    with pytest.raises(UserError, match=r"model\.parts\.classifier"):
        _ = network.classifier


def options_report(name: str, shape: tuple[int, ...], **more: Any) -> str:
    chosen = options(name, **more)
    registry.build(chosen, shape, 3, 0)
    return " ".join(chosen.report(shape, 3))


def test_parts_may_be_said() -> None:
    said = {"classifier": "3", "stages": {"wide": "1", "bent": "2"}, "aligned": ["wide"]}
    network = built("made_of", (5,), parts=said)
    assert network.stages == {"wide": "features.1", "bent": "features.2"}
    assert network.alignment_stages == ("wide",)
    assert built("made_of", (5,), parts={"stages": ["1", "2"]}).alignment_stages == ("1", "2")
    for parts, wrong in (
        ({"classifier": "4"}, "classifier: .*'4'"),
        ({"classifier": "1"}, "classifier: .*does not give the scores"),
        ({"stages": ["7"]}, "stages: .*'7'"),
        ({"stages": ["1"], "aligned": ["2"]}, "aligned: .*'2'"),
        ({"head": "3"}, "head: .*classifier"),
    ):
        with pytest.raises(UserError, match=rf"^model\.parts\.{wrong}"):
            built("made_of", (5,), parts=parts)


def test_views_that_need_contiguous_maps_train() -> None:
    """Batches of images come channels-last; one channel has both layouts at once."""
    network = built("Plain", (1, 8, 8)).train()
    batch = torch.rand(4, 8, 8, 1).permute(0, 3, 1, 2)
    network(batch).sum().backward()
    assert built("Pyramid", (3, 8, 8)).features.stem.weight.is_contiguous(memory_format=torch.channels_last)


def test_a_record_names_the_file_by_its_content(tmp_path: Path) -> None:
    def record(text: str) -> dict[str, Any]:
        (tmp_path / "own.py").write_text(text)
        return registry.parse({"name": "own.py:net", "width": (2, 3)}, tmp_path, registry.any_code).record()

    text = "def net(input_shape, classes, width): raise SystemExit\n"
    first, again, changed = record(text), record(text), record(text + "# more\n")
    assert first == again
    assert first["name"] == changed["name"] == "own.py:net"
    assert first["sha256"] != changed["sha256"]
    assert first["width"] == [2, 3], "plain values, as another process reads them"


def test_another_process_makes_the_same_network() -> None:
    chosen = options("Plain", width=3)
    travelled = registry.parse(chosen.model_dump(mode="json"), permit=registry.any_code)
    ours, theirs = (registry.build(one, (1, 8, 8), 3, 4).state_dict() for one in (chosen, travelled))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize(
    ("name", "more", "said"),
    [
        ("Strange", {"kind": "raises"}, "cannot be made .*ValueError: no such kind$"),
        ("Strange", {"kind": "tuple"}, r"returns tuple .*\(2, 3\)"),
        ("Strange", {"kind": "narrow"}, r"shape \(2, 2\) .*\(2, 3\)"),
        ("Strange", {"kind": "classes"}, r"\(2,\)"),
        ("Strange", {"kind": "nan"}, "NaN"),
        ("Strange", {"kind": "frozen"}, "no parameters to train"),
        ("Strange", {}, r"Net\(input_shape, classes, \*\*options\): .*'kind'"),
        ("Strange", {"kinds": "a"}, "kind"),
        ("Pyramid", {}, r"cannot read samples of shape \(4,\): RuntimeError"),
        ("nothing", {}, "gives str, not a torch.nn.Module"),
        ("Stange", {}, "no network 'Stange' of its own .*did you mean 'Strange'"),
        ("FILE", {}, "no network 'FILE' of its own"),
    ],
)
def test_faults_of_a_network_are_told_in_one_line(name: str, more: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said) as told:
        built(name, (4,), **more)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("1 / 0", "ZeroDivisionError"),
        ("def (", "cannot be imported"),
        (None, "there is no file"),
        ("import nowhere", "nowhere"),
    ],
)
def test_a_file_that_cannot_be_imported_is_told_in_one_line(text: str | None, said: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "own.py").write_text(text)
    with pytest.raises(UserError, match=said) as told:
        registry.parse({"name": "own.py:Net"}, tmp_path, registry.any_code)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize("nested", [False, True])
def test_nothing_is_imported_without_permission(nested: bool, tmp_path: Path) -> None:
    """Model files, records and requests name networks; their code runs only where somebody trusts the name."""
    (tmp_path / "own.py").write_text("raise SystemExit('imported')")
    model: dict[str, Any] = {"name": f"{tmp_path}/own.py:Net"}
    if nested:
        model = {"name": "frozen", "backbone": {"name": "resnet18", "pretrained": True}, "head": model}
    with pytest.raises(UserError, match="not imported"):
        registry.parse(model)


EXPERIMENT: dict[str, Any] = {"data": {"name": "rotated_digits"}, "methods": ["fedavg"]}


def test_objects_of_python_are_networks() -> None:
    def inner(input_shape: tuple[int, ...], classes: int) -> nn.Module:
        return nets.made_of(input_shape, classes)

    module = nets.made_of((5,), 3)
    module(torch.zeros(2, 5))
    for thing in (nets.made_of, inner, module, {"name": nets.made_of, "width": 9}):
        chosen = experiment(EXPERIMENT | {"model": thing}).model
        network = registry.build(chosen, (5,), 3, 0)
        assert network(torch.zeros(2, 5)).shape == (2, 3)
        assert network.embedding_size == (9 if isinstance(thing, dict) else 7)
    start = [registry.build(experiment(EXPERIMENT | {"model": module}).model, (5,), 3, seed) for seed in (0, 1)]
    assert torch.equal(start[0].classifier.weight, start[1].classifier.weight), "its weights are the start"
    assert start[0].classifier.weight is not start[1].classifier.weight
    other = experiment(EXPERIMENT | {"model": nets.made_of((5,), 3)}).model
    assert other.record()["sha256"] != experiment(EXPERIMENT | {"model": module}).model.record()["sha256"]


@pytest.mark.parametrize(
    ("model", "engine", "said"),
    [
        (nn.Linear(3, 2), {"workers": 2}, "file.py:Class"),
        (lambda shape, classes: nn.Linear(3, 2), {"parallel_runs": 2}, "file.py:Class"),
        ({"name": "python:Net"}, {}, "given as an object"),
        ({"name": nets.made_of, "width": Tensor}, {}, "not a plain value"),
        ({"name": 3}, {}, "3"),
        ({"name": nets.made_of, "widht": 3}, {}, "widht.*width"),
    ],
)
def test_objects_that_cannot_be_used(model: Any, engine: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=rf"model.*{said}") as told:
        experiment(EXPERIMENT | {"model": model, "engine": engine})
    assert "\n" not in str(told.value)


def test_an_error_is_at_the_innermost_line_of_the_users_code() -> None:
    names: dict[str, Any] = {}
    exec(compile("def low():\n    return 1 / 0\n\ndef high():\n    return low()\n", "/home/me/mine.py", "exec"), names)
    with pytest.raises(ZeroDivisionError) as caught:
        names["high"]()
    assert line_of(caught.value) == " (mine.py, line 2)"
