"""The methods of a search: each of an experiment's methods, with settings drawn from its spaces."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ValidationError

from fedshift.errors import UserError, nearest
from fedshift.experiment.config.error_messages import describe
from fedshift.experiment.config.experiment import Experiment, check_training
from fedshift.experiment.config.search_section import Search, Space
from fedshift.methods.base import Method
from fedshift.methods.composition.training_changes import TrainingChanges
from fedshift.methods.symbols import symbols_of


@dataclass(frozen=True)
class Drawn:
    """A method with drawn settings."""

    of: str  # the label of the method of the file
    number: int  # of the draw, from 0
    values: Mapping[str, Any]  # field → its value; empty for the method as the file has it
    method: Method  # with a label of its own


def drawn_methods(experiment: Experiment) -> tuple[Drawn, ...]:
    """All draws of all methods. A method without a space of its own is there once.

    A draw depends on the seed, the method's label, its number and the field. So further methods, fields and draws leave
    those alone that there are.

    UserError if a space is of no field, or holds a value that the field does not take.
    """
    search = checked_spaces(experiment)
    draws = [drawn for method in experiment.methods for drawn in _draws_of(search, method)]
    check_training(experiment.model_copy(update={"methods": tuple(drawn.method for drawn in draws)}))
    return tuple(draws)


def checked_spaces(experiment: Experiment) -> Search:
    """The search section, whose spaces are of methods that there are.

    UserError if there is no section, or a space of another method.
    """
    search = _of(experiment)
    labels = [method.display for method in experiment.methods]
    for path in search.spaces:
        first, _, rest = path.partition(".")
        if not rest or first not in ("training", *labels):
            hint = nearest(first, ["training", *labels])
            raise UserError(f"search.spaces.{path}: begin with training or a method's label; {hint}")
    return search


def _of(experiment: Experiment) -> Search:
    if experiment.search is None:
        raise UserError("search: this section is missing from the experiment")
    return experiment.search


def spaces_of(search: Search, method: Method) -> dict[str, tuple[str, Space]]:
    """A method's spaces: its field → the path in the file, and the space."""
    spaces = {}
    for path, space in search.spaces.items():
        first, _, rest = path.partition(".")
        if first in ("training", method.display):
            field = path if first == "training" else symbols_of(type(method)).get(rest, rest)
            spaces[field] = path, space
    return spaces


def _draws_of(search: Search, method: Method) -> list[Drawn]:
    label, spaces = method.display, spaces_of(search, method)
    draws = []
    for number in range(search.draws if spaces else 1):
        plain = not spaces or (number == 0 and search.defaults_first)
        values = {
            field: space.draw(f"{search.seed} {label} {number} {path}")
            for field, (path, space) in spaces.items()
            if not plain
        }
        draws.append(with_values(method, number, values, spaces))
    return draws


def with_values(
    method: Method, number: int, values: Mapping[str, Any], spaces: Mapping[str, tuple[str, Space]]
) -> Drawn:
    """A draw of a method.

    Args:
        values: field → its value.
        spaces: of `spaces_of`.

    Raises:
        UserError: a field is unknown, or does not take its value.
    """
    return Drawn(method.display, number, values, _with(method, values, number, spaces))


def _with(method: Method, values: Mapping[str, Any], number: int, spaces: Mapping[str, tuple[str, Space]]) -> Method:
    options = method.model_dump(mode="json")
    for field, value in values.items():
        _check_field(field, spaces[field][0], type(method))
        first, _, rest = field.partition(".")
        if rest:
            inner = options.get(first)
            options[first] = {**(inner if isinstance(inner, Mapping) else {}), rest: value}
        else:
            options[first] = value
    try:
        return type(method).model_validate({**options, "label": f"{method.display}-draw{number}"})
    except ValidationError as error:
        raise UserError(f"search.spaces: {describe(error, method.display, type(method))}") from None


def _check_field(field: str, path: str, kind: type[BaseModel]) -> None:
    first, _, rest = field.partition(".")
    known = TrainingChanges.model_fields if first == "training" and rest else kind.model_fields
    name = rest if first == "training" and rest else first
    if name not in known:
        raise UserError(f"search.spaces.{path}: there is no field '{name}'; {nearest(name, known)}")
