"""The symbols of papers as names of options: ``mu`` is FedProx's ``proximal_weight``, ``E`` the local epochs.

An option's description begins with its symbol (``μ: weight of the proximal term``), and that is all that declares it.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping
from functools import cache
from typing import Any

from pydantic import BaseModel

_SYMBOL = re.compile(r"(?:([α-ωΑ-Ω])(_\w+|[₀-₉]+)?(?=$|[ :;,(])|([A-Za-z])(?=: ))")


@cache
def symbols_of(kind: type[BaseModel]) -> Mapping[str, str]:
    """Symbol → the option that it stands for, in Latin and in Greek letters.

    A symbol that is an option's name is that option, and one that several options have is none.

    Example:
        >>> from fedshift.methods.federated.fedprox import FedProx
        >>> symbols_of(FedProx)["mu"], symbols_of(FedProx)["μ"], symbols_of(FedProx)["E"]
        ('proximal_weight', 'proximal_weight', 'local_epochs')
    """
    result: dict[str, list[str]] = {}
    for name, field in kind.model_fields.items():
        for symbol in _spellings(field.description or ""):
            result.setdefault(symbol, []).append(name)
    return {symbol: names[0] for symbol, names in result.items() if len(names) == 1 and symbol not in kind.model_fields}


def with_names(kind: type[BaseModel], options: Mapping[Any, Any]) -> dict[Any, Any]:
    """Options with names in the place of symbols. Raises ValueError: an option is given by both."""
    symbols, named = symbols_of(kind), dict[Any, Any]()
    for key, value in options.items():
        name = symbols.get(key, key)
        if name != key and name in options:
            raise ValueError(f"{key} is {name}: write one of them")
        named[name] = value
    return named


def symbols_in_words(kind: type[BaseModel]) -> str:
    """The symbols in Latin letters, for messages; "" where there are none."""
    listed = [f"{symbol} for {name}" for symbol, name in symbols_of(kind).items() if symbol.isascii()]
    return f"; or {', '.join(listed)}" if listed else ""


def _spellings(description: str) -> list[str]:
    """How a description's symbol may be written; none if it begins with no symbol."""
    match = _SYMBOL.match(description)
    if match is None:
        return []
    greek, below, latin = match.groups()
    if latin:
        return [str(latin)]
    name = unicodedata.name(greek).rpartition(" ")[2].lower().replace("lamda", "lambda")
    name = name if greek.islower() else name.capitalize()
    plain = unicodedata.normalize("NFKC", below or "")
    endings = dict.fromkeys((plain, plain.removeprefix("_") if plain[1:].isdecimal() else plain))
    return [letter + ending for letter in (name, greek) for ending in endings]
