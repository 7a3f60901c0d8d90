"""One contract for every option of every method: another value gives another result, where it must matter.

That an option does the right thing is for the tests of its method. This one is run over the registry. A new method, a
new option, or a new value of one is tried by itself; where no value shows, the method's trait `tests` says which do.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import numpy as np
import pytest
import torch
from every_method import QUICK, mostly_slow
from option_cases import cases, default_of, method_of, method_tests
from test_ccst import coloured
from test_ccst_samples import vgg_files
from test_fedadg import held_out
from test_kd3a import rounds_of
from tiny import CNN, MLP, NORMED, NORMED_CNN, domains, evaluated, images, normed_for, play, run, start_of, step_on

from fedshift.data.builders.discs_and_cups import DiscsAndCups
from fedshift.federation.local.in_process import LocalFederation
from fedshift.federation.site_runner import Setting, SitePlan
from fedshift.federation.training import Training
from fedshift.methods import registry
from fedshift.methods.base import Method, State
from fedshift.methods.composition.options import Composed
from fedshift.methods.method_tests import Try
from fedshift.methods.rounds import finish_run, start_run
from fedshift.models.networks.unet import UNet
from fedshift.weights import Weights

__all__ = ["vgg_files"]  # a fixture
Result = tuple[Weights, Any, list[list[float]]]
"""Weights, what travels beside them, and what the model says of a few inputs."""


class Played:
    """The results of a run after each of its rounds, which are played when they are asked for."""

    def __init__(self, rounds: Iterable[Any]) -> None:
        self._rounds, self.results = iter(rounds), list[Any]()

    def after(self, rounds: int) -> Any:
        """The result after so many rounds; None after more than the run has."""
        while len(self.results) < rounds:
            self.results.append(next(self._rounds, None))
        return self.results[rounds - 1]

    def differs(self, other: Played) -> bool:
        """Whether some round ends differently. Those after it are not played."""
        rounds = 1
        while (here := self.after(rounds)) is not None and here == other.after(rounds):
            rounds += 1
        return bool(here != other.after(rounds))


def trained(method: Method, found: Any = None, network: dict[str, object] = CNN, **options: Any) -> Iterator[Result]:
    found = domains(network) if found is None else found
    for state, _ in play(method, found, network, **options):
        yield result_of(method, state, found, network)


def result_of(method: Method, state: State, found: Any, network: dict[str, object]) -> Result:
    model = evaluated(method, state.weights, found, network)
    shape = (4, *found[0].inputs.shape[1:])
    inputs = torch.linspace(-1, 1, int(np.prod(shape))).view(shape)
    with torch.no_grad():
        return state.weights, dict(state.parts), model(inputs).tolist()


def finished(method: Method) -> list[Result]:
    """What predicts at each site at the end of a run of one round."""
    network = normed_for(method)
    state, where = run(method, domains(network), network, rounds=1)
    finish_run(method, where, state.weights)
    return [(where.own_weights(site, state.weights), {}, []) for site in where.sources]


def three_rounds(method: Method) -> list[Result]:
    """`finished` after three rounds of more mini-batches."""
    state, where = run(method, domains(MLP), MLP, rounds=3, lr=0.2)
    finish_run(method, where, state.weights)
    return [(where.own_weights(site, state.weights), {}, []) for site in where.sources]


def masks(method: Method) -> list[Result]:
    """Two sites of segmented images."""
    data = DiscsAndCups(size=32, per_site=4).build()
    parts = [(data.domains[name], np.arange(4), number) for number, name in enumerate(("north", "east"))]
    plans = [SitePlan(part[0].name, "source", [part]) for part in parts]
    training = Training(batch_size=2, lr=0.1)
    network = UNet(levels=3, width=4)
    whole = Setting(method, training, network, data.preprocessing, (3, 32, 32), 2, 2, 0, "cpu")  # type: ignore[arg-type]
    where = LocalFederation(plans, whole, budget={"north": 9, "east": 9}, rounds=1)
    state = start_run(method, where, Weights(whole.build_network().state_dict()))
    return [(step_on(method, where, state).weights, {}, [])]


def chosen_by_held_out(method: Method) -> list[Result]:
    where, _ = held_out(method)  # type: ignore[arg-type]
    state = step_on(method, where, start_run(method, where, start_of(method, [images("a", 9)])))
    return [(state.weights, dict(state.parts), [])]


def warm(method: Method) -> list[Result]:
    states, _ = rounds_of(method)  # type: ignore[arg-type]
    return [(states[-1].weights, {}, [])]


FAST: dict[str, Any] = {"lr": 0.3, "momentum": 0.9}
SETUPS: dict[str, Callable[[Method], Iterable[Any]]] = {
    "images": trained,
    "images for long": functools.partial(trained, budget=60),
    "fast": functools.partial(trained, **FAST),
    "colour": lambda method: trained(method, [coloured(name, number) for name, number in {"a": 9, "b": 6}.items()]),
    "mlp": functools.partial(trained, network=MLP, rounds=4, budget=80, lr=0.2),
    "normed": functools.partial(trained, network=NORMED, rounds=4, budget=80, lr=0.2),
    "normed with momentum": functools.partial(trained, network=NORMED, rounds=2, momentum=0.9),
    "normed images": functools.partial(trained, network=NORMED_CNN, rounds=1),
    "finished": finished,
    "three rounds": three_rounds,
    "masks": masks,
    "held out": chosen_by_held_out,
    "kd3a": warm,
    "plan": lambda method: [[method.mini_batches(batches, rounds) for batches in (1, 5) for rounds in (1, 4)]],
}


@functools.cache
def outcome(name: str, options: str, where: str) -> Played:
    return Played(SETUPS[where](method_of(name, json.loads(options))))


def fields(name: str) -> set[str]:
    return set(registry.method_class(name).model_fields) - set(Composed.model_fields)  # every method's, tried elsewhere


CASES = [
    pytest.param(
        name, option, one, id=f"{name}-{option}-{one.where or 'usual'}", marks=() if name in QUICK else pytest.mark.slow
    )
    for name in registry.names()
    for option, tries in cases(name).items()
    for one in tries
]


@pytest.mark.parametrize("name", registry.names())
def test_every_option_has_a_case(name: str) -> None:
    without = fields(name) - cases(name).keys() - method_tests(name).elsewhere.keys()
    assert not without, f"give the trait `tests` of '{name}' values to try: MethodTests(options={{'NAME': tries(…)}})"
    unknown = (method_tests(name).elsewhere.keys() | method_tests(name).beside.keys()) - fields(name)
    assert not unknown, f"'{name}' has no such options"


@pytest.mark.parametrize("name", registry.names())
def test_every_value_that_may_be_chosen_is_tried(name: str) -> None:
    """All values of options that are one of a few."""
    for option, described in registry.method_class(name).model_fields.items():
        tried = {value for one in cases(name).get(option, ()) for value in one.values if isinstance(value, str | bool)}
        tried |= set(method_tests(name).elsewhere.get(option, ()))
        if get_origin(described.annotation) is Literal:
            assert tried == set(get_args(described.annotation)) - {default_of(name, option)}, f"`tests`: '{option}'"
        elif described.annotation is bool:
            assert tried == {not described.default}, f"`tests`: '{option}'"


@pytest.mark.parametrize(("name", "option", "one"), CASES)
def test_an_option_changes_the_result(name: str, option: str, one: Try) -> None:
    where = one.where or method_tests(name).where
    asked = [dict(one.beside), *({**one.beside, option: value} for value in one.values)]
    results = [outcome(name, json.dumps(options), where) for options in asked]
    for number, result in enumerate(results):
        for other in results[:number]:
            assert result.differs(other), (asked[number], "changes nothing")
    for options, result in zip(asked, results, strict=True):
        for found in result.results:
            if isinstance(found, tuple):
                found[0].check_finite(f"{name} {options}")


def test_a_small_product_is_not_projected() -> None:
    assert not outcome("cdan", '{"projection": "outer"}', "mlp").differs(outcome("cdan", "{}", "mlp"))


@pytest.fixture
def other_files(vgg_files: Path) -> Path:
    """Beside the published names, the same networks with other weights."""
    from safetensors.torch import load_file, save_file

    for name in ("vgg19_normalised", "adain_decoder"):
        changed = {key: value.flip(0) for key, value in load_file(vgg_files / f"{name}.safetensors").items()}
        save_file(changed, vgg_files / f"other-{name}.safetensors")
    return vgg_files


@pytest.mark.slow
@pytest.mark.parametrize("name", mostly_slow(["ccst", "styles", "pardon"], ["ccst"]))
def test_the_paper_s_style_space(name: str, other_files: Path) -> None:
    found = [images("a", 3), images("b", 2)]
    base = {"style_space": "vgg", "vgg_size": 16}
    others = [
        {"style_space": "pixel"},
        {"vgg_size": 24},
        {"vgg_encoder": "other-vgg19_normalised.safetensors"},
        {"vgg_decoder": "other-adain_decoder.safetensors"},
    ]
    results = [run(method_of(name, {**base, **more}), found, rounds=1)[0].weights for more in ({}, *others)]
    for number, result in enumerate(results):
        assert result not in results[:number]
