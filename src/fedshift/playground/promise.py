"""A promise of docs/security.md, and how it is tried."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fedshift.playground.played import Played
from fedshift.text import one_line


class Broken(Exception):
    """A promise that does not hold. The message says what happened instead."""


@dataclass(frozen=True)
class Promise:
    """Something that must not work.

    Attributes:
        who: who tries it.
        tries: what they try.
        attempt: tries it on a played federation and says in words what came of it.
            Raises Broken, or any other error, if the promise does not hold.
    """

    who: str
    tries: str
    attempt: Callable[[Played], str]


@dataclass(frozen=True)
class Outcome:
    """What came of trying a promise."""

    promise: Promise
    held: bool
    what: str


def tried(promise: Promise, played: Played) -> Outcome:
    """Try a promise."""
    try:
        return Outcome(promise, True, one_line(promise.attempt(played), 160))
    except Broken as error:
        return Outcome(promise, False, one_line(str(error)))
    except Exception as error:
        return Outcome(promise, False, one_line(f"it could not be tried: {type(error).__name__}: {error}"))


def expect(found: bool, otherwise: str) -> None:
    """Raise Broken with ``otherwise`` unless something was found."""
    if not found:
        raise Broken(otherwise)
