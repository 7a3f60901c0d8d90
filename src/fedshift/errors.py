"""What a person may be told. Every message is one line: what is wrong, where, and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any


class FedshiftError(Exception):
    """A failure that is explained in one line; the command line prints it without a traceback.

    ``public`` is the line for those who may not see the data: without cells, and without the names of columns that
    nobody listed. It is the message itself unless given.
    """

    exit_code = 1

    def __init__(self, message: str = "", *, public: str | None = None) -> None:
        super().__init__(message)
        self.public = message if public is None else public


class UserError(FedshiftError):
    """A mistake of the person's: a name, a value or a file that cannot be used. Exit code 2."""

    exit_code = 2


class Refused(UserError):
    """A site's policy forbids an exchange; the message names site and rule."""


class KindRefused(Refused):
    """A site's policy does not let a kind of content out: the site may be left out where an experiment allows it."""


class TrainingDiverged(FedshiftError):
    """A loss or weight became NaN or infinite; the message names the site, the round and the learning rate."""


def nearest(name: str, known: Iterable[str]) -> str:
    """A half sentence that helps with a mistyped ``name``: the nearest of ``known``, else all of them.

    >>> nearest("fedagv", ["fedavg", "csac"])
    "did you mean 'fedavg'? known: csac, fedavg"
    """
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    listing = "known: " + (", ".join(names) if names else "none")
    return f"did you mean '{close[0]}'? {listing}" if close else listing


_AS_IN_A_FILE = {
    "tuple_type": "input should be a list, such as [a, b]",
    "dict_type": "input should be like {name: value}",
}


def in_words(fault: Mapping[str, Any]) -> str:
    """What is wrong with a field: one of pydantic's errors, in the words of an experiment's file."""
    text: str = _AS_IN_A_FILE.get(fault["type"], fault["msg"].removeprefix("Value error, "))
    return text[0].lower() + text[1:]
