"""What sites do with their samples before a method trains on them, an option of every federated method.

``prepare: styles``, or ``prepare: {name: styles, level: 2}``. The method has no code for it: the preparation has
exchanges of its own before the first round, and surrounds every call of the method at a site.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator

from fedshift.methods.choices import read_choice
from fedshift.methods.composition.styles import StylesOption

PREPARATIONS: Mapping[str, type[StylesOption]] = {"styles": StylesOption}


def _read(value: Any) -> Any:
    return read_choice(value, "name", PREPARATIONS, "preparation of samples")


PreparationOption = Annotated[StylesOption | None, BeforeValidator(_read)]
"""The field ``prepare`` of a method."""
