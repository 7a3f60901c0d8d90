"""All methods of the registry, each with options that keep its run short."""

from __future__ import annotations

from typing import Any

import pytest

from fedshift.methods import registry
from fedshift.methods.base import Method

every_method = pytest.mark.parametrize("name", registry.names())


def method_of(name: str, **options: Any) -> Method:
    return registry.parse({"name": name, **registry.method_class(name).traits.small, **options})
