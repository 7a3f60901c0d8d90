"""The one import that the author of a method needs, and what is imported by what."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module

import pytest

from fedshift import methods


@pytest.mark.parametrize("name", methods.__all__)
def test_every_listed_name_is_there_and_is_the_one_that_the_package_uses(name: str) -> None:
    found = getattr(methods, name)
    assert getattr(import_module(found.__module__), name, found) is found
    assert name in dir(methods)


def test_type_checkers_and_programs_see_the_same_names() -> None:
    places = [name for names in methods._PLACES.values() for name in names]
    assert sorted(places) == sorted(methods.__all__)
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = methods.no_such_name


LIGHT = """
import inspect, sys, fedshift, fedshift.methods
from fedshift.models import registry
registry.names()
assert not {"torch", "sklearn", "pandas"} & sys.modules.keys()

from fedshift.methods import Method, State, Site, Update, trained_mean
shipped = ("fedshift.methods.federated", "fedshift.methods.pooled")
assert not [name for name in sys.modules if name.startswith(shipped)]

from fedshift.models.networks import vision
registry.build(registry.parse({"name": "mnist_cnn"}), (1, 28, 28), 10, 0)
assert "torchvision" not in sys.modules
"""
"""Torch is imported by networks alone, methods on demand, and torchvision by its own networks."""
IN_A_USERS_PROCESS = """
import sys, torch
from fedshift.federation.training import Training
from fedshift.models.pretrained import light_torchvision
light_torchvision()
Training().build_optimizer(torch.nn.Linear(2, 2).parameters(), 0.1).zero_grad()
assert sys.modules["torch._dynamo"] is torch._dynamo
assert torch._dynamo.__file__.startswith(torch.__path__[0])
"""
WITHOUT_COMPILER = """
import torch
from fedshift.extras import runs_program
runs_program("test")
from fedshift.federation.training import Training
from fedshift.models.pretrained import light_torchvision
network = light_torchvision().models.get_model("resnet18", weights=None).fc
for name in ("sgd", "adam"):
    optimizer = Training(optimizer=name).build_optimizer(network.parameters(), 0.1)
    optimizer.zero_grad()
    network(torch.ones(1, 512)).sum().backward()
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
assert inspect.getmodule(torch.optim.SGD) is sys.modules["torch.optim.sgd"]
assert not {"torch._dynamo.utils", "sympy"} & sys.modules.keys()
assert light_torchvision().ops.roi_align.__globals__["is_compile_supported"]("cpu") in (True, False)
assert sys.modules["torch._dynamo"] is torch._dynamo
assert torch._dynamo.__file__
optimizer.zero_grad()
assert torch.optim.Optimizer.zero_grad.__wrapped__.__dynamo_disable.__module__.startswith("torch._dynamo")
"""
"""150 MB of every process; who needs the compiler, in torch or torchvision, finds it then."""


@pytest.mark.slow
def test_what_is_heavy_is_imported_on_demand() -> None:
    subprocess.run([sys.executable, "-c", LIGHT + WITHOUT_COMPILER], check=True)


@pytest.mark.slow
def test_no_module_of_torch_is_replaced_in_a_users_process() -> None:
    subprocess.run([sys.executable, "-c", IN_A_USERS_PROCESS], check=True)
