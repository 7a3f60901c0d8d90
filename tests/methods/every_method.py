"""All methods of the registry, each with options that keep its run short."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import pytest

from fedshift.methods import registry
from fedshift.methods.base import Method, work_of

QUICK = ("fedavg", "scaffold", "fedbn", "fedsr", "csac", "kd3a", "deepall", "mdan", "zero_shot")
"""One method of each kind: these tests are tried of with every change, of the others with ``slow``."""


def mostly_slow(names: Iterable[str], quick: Container[str] = QUICK) -> list[Any]:
    """A test's parameters. Golden runs show a broken method with every change."""
    return [pytest.param(name, marks=() if name in quick else pytest.mark.slow) for name in names]


every_method = pytest.mark.parametrize("name", registry.names())
every_method_in_time = pytest.mark.parametrize("name", mostly_slow(registry.names()))


def method_of(name: str, **options: Any) -> Method:
    return registry.parse({"name": name, **registry.method_class(name).traits.small, **options})


def skip_without_training(method: Method) -> None:
    """Skip a test of what training does, where nobody trains."""
    if not any(work(9, 3) for work in work_of(method)):
        pytest.skip("nobody trains")
