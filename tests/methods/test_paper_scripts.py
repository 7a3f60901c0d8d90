"""The scripts in examples/papers, one method each in plain PyTorch, end in the library's weights and run as they stand.

Both get the same start, mini-batches and draws; the library's are recorded. Sums are made in another order, so weights
differ by rounding: 2e-5 of float32 numbers of size 1, after as many steps as a run of these tests has.
"""

from __future__ import annotations

import copy
import importlib.util
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import tiny
import torch
from kd3a_setting import GATES, RATE, SITES, kd3a, rounds_of, shifted, warm_start
from torch import Tensor, nn

from fedshift.federation.site import Site
from fedshift.methods import masks
from fedshift.methods.federated import csac
from fedshift.methods.federated.csac import CSAC
from fedshift.methods.federated.kd3a import KD3A
from fedshift.methods.federated.mdfnet import MDFNet, _Halves

SCRIPTS = Path(__file__).resolve().parents[2] / "examples" / "papers"
pytestmark = pytest.mark.skipif(not SCRIPTS.is_dir(), reason="examples/ is not beside these tests")
ROUNDING = 2e-5
MOST_LINES = 200
SIZES = {"north": 24, "east": 16, "south": 13}

Drawn = dict[tuple[str, int], list[Tensor]]
"""Site and exchange → the rows of its mini-batches."""


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"paper_{name}", SCRIPTS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # data classes look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> Drawn:
    """The rows of all mini-batches that the library's sites draw from now on."""
    rows: Drawn = defaultdict(list)
    batches = Site.batches

    def recorded(site: Site, *arguments: Any, **options: Any) -> Iterator[Any]:
        for batch in batches(site, *arguments, **options):
            rows[site.name, site.envelope.exchange].append(batch.rows)
            yield batch

    monkeypatch.setattr(Site, "batches", recorded)
    return rows


def by_round(rows: Drawn, site: str) -> list[list[Tensor]]:
    """The rows of a site's mini-batches, exchange by exchange."""
    return [rows[key] for key in sorted(rows) if key[0] == site]


def data_of(where: Any, site: str) -> tuple[Tensor, Tensor]:
    """All inputs of a site as it trains on them, and its labels."""
    data = where._runners[site].site.data
    inputs, labels, _ = data.batch(torch.arange(data.samples))
    return inputs, labels


def check_equal(ours: Mapping[str, Tensor], library: Mapping[str, Tensor], start: Mapping[str, Tensor]) -> None:
    """Equal but for rounding; and training has moved every weight by much more than that."""
    assert ours.keys() == library.keys()
    for name, tensor in library.items():
        torch.testing.assert_close(
            ours[name], tensor, atol=ROUNDING, rtol=0, msg=lambda text, name=name: f"{name}: {text}"
        )
    moved = {name: float((tensor.double() - start[name].double()).abs().max()) for name, tensor in library.items()}
    moved = {name: gap for name, gap in moved.items() if name.endswith("weight")}  # BatchNorm hides biases before it
    assert min(moved.values()) > 10 * ROUNDING, moved


class _WithLayers(nn.Module):
    """The library's network as CSAC's script wants it: scores, and the layers that are aligned."""

    def __init__(self, network: Any) -> None:
        super().__init__()
        self.network = network

    def forward(self, inputs: Tensor) -> tuple[Tensor, list[Tensor]]:
        scores, layers = self.network.with_stages(inputs, self.network.alignment_stages)
        return scores, list(layers.values())


@pytest.mark.slow
def test_csac(drawn: Drawn, monkeypatch: pytest.MonkeyPatch) -> None:
    layers: list[nn.Module] = []
    make = csac.projection_layer

    def recorded(*arguments: Any, **options: Any) -> nn.Module:
        layers.append(make(*arguments, **options))
        layers[-1] = copy.deepcopy(kept := layers[-1])
        return kept

    monkeypatch.setattr(csac, "projection_layer", recorded)
    method, found = CSAC(acquisition_epochs=3, calibration_epochs=2), tiny.domains(tiny.CNN, SIZES)
    state, where = tiny.run(method, found, rounds=2, lr=0.1, momentum=0.9)

    paper = script("csac")
    monkeypatch.setattr(paper, "RATE", 0.1)
    monkeypatch.setattr(paper, "MOMENTUM", 0.9)
    names = list(where.sources)
    everything = {name: data_of(where, name) for name in names}
    # Four layers a site: two of the fused model, two of the local one. The first round's are the start of both.
    projections = [nn.ModuleList(layers[4 * number : 4 * number + 4]) for number in range(len(names))]

    def batches(site: int, number: int, epochs: int) -> Iterator[tuple[Tensor, Tensor]]:
        inputs, labels = everything[names[site]]
        for rows in by_round(drawn, names[site])[number]:
            yield inputs[rows], labels[rows]

    start = tiny.start_of(method, found)
    network = tiny.setting(method, found).build_network()
    fused = paper.csac(_WithLayers(network), len(names), batches, projections, rounds=2)
    check_equal({name.removeprefix("network."): tensor for name, tensor in fused.items()}, state.weights, start)


@pytest.mark.parametrize("batch_norm", [True, False])
def test_kd3a(drawn: Drawn, monkeypatch: pytest.MonkeyPatch, batch_norm: bool) -> None:
    mixtures: list[tuple[float, Tensor]] = []
    mixture = KD3A._mixture

    def recorded(method: KD3A, site: Site, size: int) -> tuple[float, Tensor]:
        mixtures.append(mixture(method, site, size))
        return mixtures[-1]

    start = warm_start(batch_norm)
    drawn.clear()
    monkeypatch.setattr(KD3A, "_mixture", recorded)
    method = kd3a()
    budget = {"north": 12, "east": 6, "south": 4, "target": 4}  # two epochs each, so that progress is that of rounds
    states, where = rounds_of(method, rounds=2, batch_norm=batch_norm, budget=budget)

    paper = script("kd3a")
    momentum = where._runners["target"].site.training.momentum
    for name, value in {
        "RATE": RATE,
        "MOMENTUM": momentum,
        "GATE": tuple(GATES.values()),
        "mixture": lambda size, _left=iter(mixtures): next(_left),
    }.items():
        monkeypatch.setattr(paper, name, value)
    names = [*where.sources, "target"]
    sources = [data_of(where, name) for name in where.sources]
    target = where._runners["target"].site.data.batch(torch.arange(14))[0]

    def batches(site: int, number: int) -> Iterator[Tensor]:
        yield from by_round(drawn, names[site])[number]

    whole = [*(shifted(name, number) for name, number in SITES.items()), shifted("target", 14)]
    network = tiny.setting(method, whole, tiny.NORMED if batch_norm else tiny.MLP).build_network()
    network.load_state_dict(dict(start))
    aggregate = paper.kd3a(network, sources, target, batches, rounds=2)
    check_equal(aggregate, states[-1].weights, start)


def test_mdfnet(drawn: Drawn, monkeypatch: pytest.MonkeyPatch) -> None:
    draws: list[Tensor] = []
    draw = masks.draws_like

    def recorded(features: Tensor) -> Tensor:
        draws.append(draw(features))
        return draws[-1]

    privates: dict[str, nn.Module] = {}
    begin = _Halves.__init__

    def kept(halves: _Halves, method: MDFNet, site: Site, weights: Any) -> None:
        begin(halves, method, site, weights)
        privates.setdefault(site.name, copy.deepcopy(halves.private))

    monkeypatch.setattr(masks, "draws_like", recorded)
    monkeypatch.setattr(_Halves, "__init__", kept)
    method, found = MDFNet(), tiny.domains(tiny.MLP, SIZES)
    state, where = tiny.run(method, found, tiny.MLP, rounds=3, lr=0.05, momentum=0.9)

    paper = script("mdfnet")
    for name, value in {"RATE": 0.05, "uniform": lambda like, _left=iter(draws): next(_left)}.items():
        monkeypatch.setattr(paper, name, value)
    start = tiny.start_of(method, found, tiny.MLP)
    network = tiny.setting(method, [*found, found[0]], tiny.MLP).build_network()
    names = [*where.sources, *where.targets]
    width, inputs = network.embedding_size, network.features.encoder[1][0].in_features
    own = {"features.encoder": "encoder", "features.mask": "mask", "classifier": "classifier"}

    def renamed(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {
            name.replace(theirs, ours, 1): tensor
            for name, tensor in weights.items()
            for theirs, ours in own.items()
            if name.startswith(theirs)
        }

    def site(name: str) -> Any:
        features, labels = data_of(where, name)
        model = paper.Shared(copy.deepcopy(network.features.encoder), width, tiny.CLASSES)
        private = paper.Private(width, method.decoder, inputs)
        private.load_state_dict(privates[name].state_dict())
        return paper.Site(features, labels if name in where.sources else None, model, private)

    def batches(place: int, number: int) -> Iterator[Tensor]:
        yield from by_round(drawn, names[place])[number]

    shared = paper.mdfnet(renamed(start), [site(name) for name in names], batches, rounds=3)
    check_equal(shared, renamed(state.weights), renamed(start))


@pytest.mark.parametrize("name", ["csac", "kd3a", "mdfnet"])
def test_a_script_is_short_and_takes_data_alone_from_the_library(name: str) -> None:
    text = (SCRIPTS / f"{name}.py").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= MOST_LINES
    imports = [line for line in text.splitlines() if "fedshift" in line and "import" in line.split()]
    assert imports == ["from fedshift.data import registry"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["csac", "kd3a", "mdfnet"])
def test_a_script_runs_as_it_stands(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With fewer rounds; what it says is an accuracy well above guessing."""
    paper = script(name)
    monkeypatch.setattr(paper, "ROUNDS", {"csac": 1, "kd3a": 6, "mdfnet": 6}[name])
    paper.main()
    last = [line for line in capsys.readouterr().out.splitlines() if "%" in line]
    assert max(float(line.split(":")[1].split("%")[0]) for line in last) > 30
