"""The graphics cards of this machine, and which process trains on which: a child sees its own in its environment.

A card is given by ``CUDA_VISIBLE_DEVICES``, so a child calls it ``cuda`` whichever it is, and nothing that a run writes
down holds a number of a card.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import BeforeValidator

from fedshift.errors import UserError

VISIBLE = "CUDA_VISIBLE_DEVICES"
PRETENDED = "FEDSHIFT_PRETENDED_CARDS"
"""The seam for tests: free GiB of cards that are not there, such as ``24,24,8``. They are the processor."""


@dataclass(frozen=True)
class Card:
    """A graphics card."""

    entry: str  # its name in ``CUDA_VISIBLE_DEVICES``
    device: str  # what this process calls it
    alone: str  # what a process calls it that sees no other
    free: int  # bytes of its memory that are free
    kind: str  # its model


def _check_device(device: object) -> object:
    """A list of cards as a tuple; what is no list is a device's name."""
    if isinstance(device, str):
        return device
    if not isinstance(device, list | tuple) or not device:
        raise ValueError("write the name of a device, all, or a list of cards such as [cuda:0, cuda:1]")
    wrong = [name for name in device if not (isinstance(name, str) and re.fullmatch(r"cuda:\d+", name))]
    if wrong:
        raise ValueError(f"{wrong[0]!r} in a list is no card: write cuda:0, cuda:1 and so on")
    if len(set(device)) < len(device):
        raise ValueError("a card is in the list twice: several processes share one by themselves")
    return tuple(device)


Device = Annotated[str | tuple[str, ...], BeforeValidator(_check_device)]
"""A device's name; ``all``, every card that this process sees; or names of cards."""


def kind_of(device: str) -> str:
    """A device without its number.

    Example:
        >>> kind_of("cuda:1"), kind_of("cpu")
        ('cuda', 'cpu')
    """
    return device.partition(":")[0]


def cards_of(device: Device) -> tuple[Card, ...]:
    """The cards that ``all`` or a list names; none for the name of one device. Raises UserError: a card is not here."""
    if isinstance(device, str) and device != "all":
        return ()
    here = cards_here()
    if not here:
        raise UserError("device: there is no CUDA card here; write auto or cpu")
    if isinstance(device, str):
        return here
    by_name = {f"cuda:{number}": card for number, card in enumerate(here)}
    for name in device:
        if name not in by_name:
            raise UserError(f"device: '{name}' is not here: the cards are {', '.join(by_name)}; or write all")
    return tuple(by_name[name] for name in device)


def resolve_device(name: Device) -> str:
    """The device of that name. ``auto`` is the first accelerator, or the CPU; of several cards, that with most memory.

    Raises UserError: this machine does not have the device.
    """
    if cards := cards_of(name):
        return dealt(cards, 1)[0].device
    assert isinstance(name, str)
    if name == "auto":
        if torch.cuda.is_available():
            return "cuda"
        return "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        torch.zeros(1, device=name).item()
    except (RuntimeError, AssertionError, NotImplementedError):
        raise UserError(f"device: '{name}' is not available here; write auto or cpu") from None
    return name


def dealt(cards: Sequence[Card], processes: int) -> list[Card]:
    """The card of each process: each next one goes where the most free memory is left to it.

    Example:
        >>> large, small = (Card(name, "cuda", "cuda", free, "") for name, free in (("a", 80), ("b", 30)))
        >>> [card.entry for card in dealt([large, small], 4)]
        ['a', 'a', 'b', 'a']
    """
    there = [0] * len(cards)
    hands = []
    for _ in range(processes):
        best = max(range(len(cards)), key=lambda index: (cards[index].free / (there[index] + 1), -there[index], -index))
        there[best] += 1
        hands.append(cards[best])
    return hands


def shares(cards: Sequence[Card], runs: int, workers: int) -> list[tuple[Card, ...]]:
    """The cards of each of ``runs`` processes that have ``workers`` worker processes each; none without cards."""
    if not cards:
        return [()] * runs
    slots = dealt(cards, runs * workers)
    return [tuple(dict.fromkeys(slots[number::runs])) for number in range(runs)]


def environment(cards: Sequence[Card]) -> dict[str, str]:
    """The variable by which a child sees these cards alone; none without cards."""
    return {VISIBLE: ",".join(card.entry for card in cards)} if cards else {}


def cards_here() -> tuple[Card, ...]:
    """Every card that this process sees, in the order of their numbers."""
    pretended = os.environ.get(PRETENDED)
    if pretended:
        return _pretended_cards(pretended)
    if not torch.cuda.is_available():
        return ()
    count = torch.cuda.device_count()
    free = _free_memory() if count > 1 else {}
    return tuple(_card(number, count, free) for number in range(count))


def _card(number: int, count: int, free: Mapping[str, int]) -> Card:
    about = torch.cuda.get_device_properties(number)
    # Numbers follow CUDA's own order, which may be another than that of nvidia-smi: only the identifier is sure. One
    # card alone may be a part of a card, whose name only the caller knows.
    named = getattr(about, "uuid", None)  # torch says it from 2.5 on
    entry = f"GPU-{named}" if count > 1 and named else _visible(number)
    return Card(entry, f"cuda:{number}", "cuda", free.get(entry, about.total_memory), about.name)


def _visible(number: int) -> str:
    """What the environment calls the card of a number."""
    entries = os.environ.get(VISIBLE, "").split(",")
    return entries[number] if entries[0] and number < len(entries) else str(number)


def _free_memory() -> dict[str, int]:
    """Free bytes by a card's identifier. torch would need a context on each card to say it, of half a GB."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return {}
    query = [program, "--query-gpu=uuid,memory.free", "--format=csv,noheader,nounits"]
    try:
        lines = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout.splitlines()
        return {name.strip(): int(mebibytes) << 20 for name, mebibytes in (line.split(",") for line in lines)}
    except (OSError, subprocess.SubprocessError, ValueError):
        return {}


def _pretended_cards(free: str) -> tuple[Card, ...]:
    every = {str(number): float(gibibytes) for number, gibibytes in enumerate(free.split(","))}
    visible = os.environ.get(VISIBLE, ",".join(every)).split(",")
    return tuple(Card(entry, "cpu", "cpu", int(every[entry] * 2**30), "pretended") for entry in visible)
