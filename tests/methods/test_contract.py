"""What every method must keep to. Run over the registry: a new method is held to all of it by being registered."""

from __future__ import annotations

import functools
import inspect
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from every_method import every_method, every_method_in_time, method_of
from tiny import CNN, bytes_of, clip_for, domains, federation, normed_for, setting, start_of, step_on

import fedshift
from fedshift.data.site_data import SiteData
from fedshift.experiment.runs.run_folder import RunFolder
from fedshift.federation.local.in_process import LocalFederation
from fedshift.federation.messages import known_kinds
from fedshift.federation.plain_values import parse_json
from fedshift.federation.setting_json import SettingRecipe, setting_from, setting_recipe
from fedshift.methods import registry
from fedshift.methods.base import State
from fedshift.methods.on_clip import OnClip
from fedshift.methods.rounds import start_run
from fedshift.weights import Weights

KEPT: dict[str, Any] = {"momentum": 0.9, "reset_optimizer_each_round": False}
"""Momentum that sites keep, so that their memory matters where a method has a name for it."""


@dataclass(frozen=True)
class Played:
    """Two rounds. Tests read it and change nothing.

    states: the first one and those after each round. drawn: how many samples were drawn to train on.
    """

    states: list[State]
    where: LocalFederation
    drawn: int


@functools.cache
def played(name: str, normed: bool = False) -> Played:
    """Two rounds at sites that refuse what the method does not declare."""
    method = method_of(name)
    network = normed_for(method) if normed else CNN
    drawn, batch = 0, SiteData.batch

    def counted(self: SiteData, rows: torch.Tensor, *generator: torch.Generator | None) -> Any:
        nonlocal drawn
        drawn += len(rows) if generator else 0  # where none is named, it is not for training
        return batch(self, rows, *generator)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SiteData, "batch", counted)
        where = federation(
            method, network=network, refuse=sorted(set(known_kinds()) - set(method.calls.shares)), **KEPT
        )
        assert isinstance(where, LocalFederation)
        states = [start_run(method, where, start_of(method, network=network))]
        where.settle()
        for _ in range(2):
            states.append(step_on(method, where, states[-1]))
    return Played(states, where, drawn)


@every_method
def test_it_says_what_it_is(name: str) -> None:
    kind = registry.method_class(name)
    assert kind.name == name
    assert (inspect.getdoc(kind) or "").strip()
    assert kind.round.__qualname__.split(".")[0] != "Method"
    models = set() if name == "fedproto" else {"weights"}  # of which it sends none
    assert {"numbers", *models} <= set(kind().calls.shares) <= set(known_kinds())
    assert ("weights" in kind().calls.shares) == bool(models)
    assert kind.traits.pooled == ("raw_data" in kind().calls.shares)


@every_method
def test_its_file_reads_like_its_paper(name: str) -> None:
    module = sys.modules[registry.method_class(name).__module__]
    text = (module.__doc__ or "").lower()
    for part in ("setting", "wire:", "where", "should reproduce"):
        assert part in text, f"the docstring of {module.__file__} lacks '{part}': see docs/extend.md"


@every_method
def test_every_option_is_described_and_has_a_default(name: str) -> None:
    kind = registry.method_class(name)
    for field_name, field in kind.model_fields.items():
        assert field.description, f"{name}.{field_name} has no description"
        assert not field.is_required(), f"{name}.{field_name} has no default"
    method = kind()
    with pytest.raises(ValueError, match="frozen"):
        method.label = "other"  # type: ignore[misc]
    with pytest.raises(ValueError, match="Extra inputs are not permitted"):
        method_of(name, no_such_option=1)
    assert method.display == name
    assert method_of(name, label="mine").display == "mine"


@every_method_in_time
def test_another_process_can_make_its_equal(name: str) -> None:
    whole = setting(method_of(name, label="mine"), domains(), CNN, 5, refuse=["features"], lr=0.3, augmentation="ccst")
    again = setting_from(parse_json(SettingRecipe, json.dumps(setting_recipe(whole).plain()), "it"))
    assert again == whole
    assert type(again.method) is type(whole.method)
    first, second = again.build_network().state_dict(), whole.build_network().state_dict()
    assert Weights(first) == Weights(second)


@every_method_in_time
def test_it_keeps_what_every_method_promises(name: str) -> None:
    """Seeds, order, kinds, bytes, new models, work, learning: what anybody's method can be held to."""
    kind = registry.method_class(name)
    fedshift.check_method(kind, clip_for((1, 12, 12)) if issubclass(kind, OnClip) else None)


@every_method_in_time
def test_weights_keep_names_shapes_and_types(name: str) -> None:
    method = method_of(name)
    normed = normed_for(method)
    state = played(name, normed=True).states[-1]
    start = setting(method, domains(normed), normed, 8).build_network()
    network = method.evaluated_network(start, len(domains(normed)))
    state.weights.check_like(network.state_dict(), "the model after a run")


@every_method_in_time
def test_the_bytes_of_broken_mini_batches_and_of_batch_norm_are_foretold(name: str) -> None:
    """By a dry run of two samples a site, and by what the method adds to it."""
    method = method_of(name)
    network = normed_for(method)
    play = played(name, normed=True)
    foretold = bytes_of(method, play.where, network, rounds=2, trained=play.drawn)
    assert sum(play.where.ledger.total["up"].values()) == foretold.up
    assert sum(play.where.ledger.total["down"].values()) == foretold.down


@every_method_in_time
def test_memory_is_declared_and_state_survives_a_file(name: str, tmp_path: Path) -> None:
    """Saved after the start and each round, each time loaded into fresh sites: the run ends with the same bits."""
    method = method_of(name)
    play = played(name)
    folder = RunFolder(tmp_path, {"name": name})
    where = federation(method, **KEPT)
    state = start_run(method, where, start_of(method))
    for _ in range(2):
        where.settle()
        now = {"exchange": where.progress.exchange, "used": where.progress.used}
        folder.save_checkpoint(state, where.save_memory(folder.memory), now)
        found = folder.load_checkpoint()
        assert found is not None
        loaded, header = found
        assert (loaded.weights, loaded.round, dict(loaded.numbers)) == (state.weights, state.round, dict(state.numbers))
        assert dict(loaded.parts) == dict(state.parts)
        where = federation(method, **KEPT)
        where.progress.exchange, where.progress.used = header.exchange, header.used
        where.load_memory(folder.memory, header.memory)
        state = step_on(method, where, loaded)
    assert state.weights == play.states[-1].weights
    assert state.report == play.states[-1].report
    assert where.progress == play.where.progress
    assert isinstance(where, LocalFederation)
    for runner in where._runners.values():
        assert set(runner.site.memory) <= set(method.calls.kept_at_sites)
