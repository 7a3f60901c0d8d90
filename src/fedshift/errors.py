"""Errors that are shown to a person. Every message is one line: what is wrong, where, and what to do."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any


class FedshiftError(Exception):
    """A failure that is explained in one line. The command line prints it without a traceback.

    Args:
        message: the line.
        public: the line for people who may not see the data: without cells, and without the names of columns that
            nobody listed. By default the message itself.
    """

    exit_code = 1

    def __init__(self, message: str = "", *, public: str | None = None) -> None:
        super().__init__(message)
        self.public = message if public is None else public


class UserError(FedshiftError):
    """A user's mistake: a name, a value or a file that cannot be used. Exit code 2."""

    exit_code = 2


class Refused(UserError):
    """A site's policy forbids an exchange. The message names the site and the rule."""


class KindRefused(Refused):
    """A site's policy keeps a kind of content at the site. Where an experiment allows it, the site is left out."""


class TrainingDiverged(FedshiftError):
    """A loss exploded, or a loss or weight is NaN or infinite. The message names site, round and learning rate."""


class SitesLost(FedshiftError):
    """The process that held some sites is gone, and what they remembered with it. A run goes on from its checkpoint."""


class ReplyRefused(FedshiftError):
    """A site's reply is not what its call promises. The message names the site."""


def seconds_from(variable: str, default: float, *, zero: bool = False) -> float:
    """The seconds in a variable of the environment.

    Args:
        default: where it is not set, or empty.
        zero: whether it may be 0.

    Raises:
        UserError: it is no number, negative, or not finite.

    Example:
        >>> seconds_from("FEDSHIFT_NOT_SET", 5.0)
        5.0
    """
    text = os.environ.get(variable)
    try:
        seconds = float(text) if text else default
    except ValueError:
        seconds = -1.0
    if 0 < seconds < float("inf") or (zero and seconds == 0):
        return seconds
    least = "of at least 0" if zero else "above 0"
    raise UserError(f"{variable} is {text!r}: give seconds {least}, such as {default:g}")


_NO_MEMORY = ("allocate memory", "CUDA error: out of memory", "_STATUS_ALLOC_FAILED")
OUT_OF_MEMORY = "out of memory: take less data or a smaller model, or lower training.batch_size or engine.workers"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that there is not enough memory: Python's, NumPy's, torch's, on any device.

    Example:
        >>> is_out_of_memory(MemoryError()), is_out_of_memory(ValueError())
        (True, False)
    """
    kinds = {kind.__name__ for kind in type(error).__mro__}
    return bool(kinds & {"MemoryError", "OutOfMemoryError"}) or (
        isinstance(error, RuntimeError) and any(sign in str(error) for sign in _NO_MEMORY)
    )


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint for a mistyped ``name``: the nearest of ``known``, and the list of all. Messages append it.

    Example:
        >>> nearest("fedagv", ["fedavg", "csac"])
        "did you mean 'fedavg'? known: csac, fedavg"
    """
    names = sorted(known)
    close = [match for match in names if match.lower() == name.lower()]
    close = close or difflib.get_close_matches(name, names, n=1, cutoff=0.8)
    close = close or [
        match for match in difflib.get_close_matches(name, names, n=3, cutoff=0.5) if _is_slip(name, match)
    ]
    listing = "known: " + (", ".join(names) if names else "none")
    return f"did you mean '{close[0]}'? {listing}" if close else listing


def _is_slip(name: str, known: str) -> bool:
    """Whether a name may be a known one mistyped, shortened or lengthened: other names of as few letters are not."""
    shorter, longer = sorted((name.lower(), known.lower()), key=len)
    return edits(shorter, longer) <= max(1, len(longer) // 4) or (len(shorter) > 3 and shorter in longer)


def edits(name: str, other: str) -> int:
    """The fewest letters to insert, leave out, replace, or swap with the next, that turn one name into another.

    Source: optimal string alignment (Damerau, CACM 1964).

    Example:
        >>> edits("fedagv", "fedavg"), edits("mldg", "dmg"), edits("kitten", "sitting")
        (1, 3, 3)
    """
    before: list[int] = []
    row = list(range(len(other) + 1))
    for number, letter in enumerate(name, 1):
        above, before, row = before, row, [number]
        for index, item in enumerate(other, 1):
            costs = [row[-1] + 1, before[index] + 1, before[index - 1] + (letter != item)]
            if number > 1 and index > 1 and (letter, name[number - 2]) == (other[index - 2], item):
                costs.append(above[index - 2] + 1)
            row.append(min(costs))
    return row[-1]


_AS_IN_A_FILE = {
    "tuple_type": "input should be a list, such as [a, b]",
    "dict_type": "input should be like {name: value}",
    "model_type": "input should be like {name: value}",
    "too_short": "at least one entry is needed",
    "int_parsing": "input should be a whole number",
    "float_parsing": "input should be a number",
}


def in_words(fault: Mapping[str, Any]) -> str:
    """One of pydantic's errors in the terms of a YAML file: what is wrong with a field.

    Args:
        fault: an entry of pydantic's ``ValidationError.errors()``.

    Example:
        >>> in_words({"type": "dict_type", "msg": "Input should be a valid dictionary"})
        'input should be like {name: value}'
    """
    text: str = _AS_IN_A_FILE.get(fault["type"], fault["msg"].removeprefix("Value error, "))
    if fault["type"] == "literal_error":
        names = re.findall("'([^']*)'", fault["ctx"]["expected"])
        close = difflib.get_close_matches(str(fault.get("input")), names, n=1, cutoff=0.5)
        text += f" (did you mean '{close[0]}'?)" if close else ""
    return text[0].lower() + text[1:]
