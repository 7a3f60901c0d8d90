"""The order of the tests."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Federations of processes first: they wait a lot, and at the end one worker would wait for them alone."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
