"""A promise of docs/threats.md, and how it is tried."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec

from fedshift.deploy.playground.played import Played
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
        needs: a package that it takes, and the extra of fedshift that brings it.
    """

    who: str
    tries: str
    attempt: Callable[[Played], str]
    needs: tuple[str, str] | None = None


@dataclass(frozen=True)
class Outcome:
    """What came of trying a promise. ``held`` is None where it was not tried, since a package is not installed."""

    promise: Promise
    held: bool | None
    what: str


def tried(promise: Promise, played: Played) -> Outcome:
    """Try a promise."""
    if promise.needs is not None and find_spec(promise.needs[0]) is None:
        return Outcome(promise, None, f"not tried: pip install 'fedshift[{promise.needs[1]}]'")
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
