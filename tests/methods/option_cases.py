"""Another value for every option of every method: from its type, or what its trait `tests` says instead."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any, Literal, get_origin

from pydantic import ValidationError

from fedshift.errors import FedshiftError
from fedshift.methods import registry
from fedshift.methods.base import Method
from fedshift.methods.composition.options import Composed
from fedshift.methods.method_tests import MethodTests, Try, other_values


def method_tests(name: str) -> MethodTests:
    return registry.method_class(name).traits.tests


def method_of(name: str, options: Mapping[str, Any]) -> Method:
    """The method as its tests run it, with these options."""
    return registry.parse({"name": name, **method_tests(name).beside, **options})


def default_of(name: str, option: str) -> Any:
    described = registry.method_class(name).model_fields[option]
    return method_tests(name).beside.get(option, described.get_default(call_default_factory=True))


@functools.cache
def cases(name: str) -> dict[str, tuple[Try, ...]]:
    """What is tried of each option; those that every method has are tried elsewhere."""
    tests, fields = method_tests(name), registry.method_class(name).model_fields
    tried: dict[str, tuple[Try, ...]] = {}
    for option in sorted(fields.keys() - Composed.model_fields.keys()):
        all_elsewhere = option in tests.elsewhere and get_origin(fields[option].annotation) is not Literal
        if not all_elsewhere:
            tried[option] = tests.options.get(option) or tuple(_derived(name, option))
    return {option: tries for option, tries in tried.items() if tries}


def _derived(name: str, option: str) -> Iterator[Try]:
    annotation = registry.method_class(name).model_fields[option].annotation
    elsewhere = method_tests(name).elsewhere.get(option, ())
    values = [value for value in other_values(annotation, default_of(name, option)) if value not in elsewhere]
    if legal := tuple(value for value in values if _may_be(name, option, value)):
        yield Try(legal)


def _may_be(name: str, option: str, value: Any) -> bool:
    try:
        method_of(name, {option: value})
    except (FedshiftError, ValidationError):
        return False
    return True
