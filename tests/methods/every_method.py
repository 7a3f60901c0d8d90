"""All methods of the registry, each with options that keep its run short."""

from __future__ import annotations

from typing import Any

import pytest

from fedshift.methods import registry
from fedshift.methods.base import Method, work_of

every_method = pytest.mark.parametrize("name", registry.names())


def method_of(name: str, **options: Any) -> Method:
    return registry.parse({"name": name, **registry.method_class(name).traits.small, **options})


def skip_without_training(method: Method) -> None:
    """Skip a test of what training does, where nobody trains."""
    if not any(work(9, 3) for work in work_of(method)):
        pytest.skip("nobody trains")
