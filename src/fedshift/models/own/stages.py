"""Finds the stages of any module, from shallow to deep, in the calls of a forward pass."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor, nn

from fedshift.models.own.forward_trial import Event

ALIGNED = 3
"""Most stages that methods align by default: the deepest ones, as in CSAC."""
_BLOCKS = 4
"""Stages of a network whose blocks all have one shape, such as a transformer."""


def stages_of(events: Sequence[Event]) -> tuple[dict[str, str], tuple[str, ...]]:
    """The stages, from shallow to deep, and those that are aligned by default.

    A stage is the last map of each size, then the last vector of each width. So each step of a pyramid is one stage.
    Where all maps have one size, as in a transformer, blocks of the longest row of blocks are the stages.
    """
    maps: dict[tuple[int, ...], int] = {}
    vectors: dict[tuple[int, ...], int] = {}
    blocks = _inseparable(events)
    weighted = False  # before the first layer with weights there is nothing to align
    for time, event in enumerate(events):
        weighted = weighted or any(True for _ in event.module.parameters())
        if not weighted:
            continue
        size = _map_size(event.gave)
        if size and any(within(event.path, path) and size != given for path, given in blocks.items()):
            continue
        if size:
            maps[size] = time
            vectors.clear()  # those before the last map belong to a block, such as one that weighs channels
        elif event.gave.dim() == 2:
            vectors[tuple(event.gave.shape[1:])] = time
    times: list[int] = []
    for size in sorted(maps, key=math.prod, reverse=True):
        if not times or maps[size] > times[-1]:  # a size that came back is a side way
            times.append(maps[size])
    spatial = [events[time].path for time in times]
    if len(spatial) < ALIGNED:
        spatial = _blocks(events) or spatial
    deepest = [events[time].path for time in sorted(vectors.values())]
    stages = {path: path for path in [*spatial, *deepest]}
    return stages, tuple(dict.fromkeys(spatial or deepest))[-ALIGNED:]


def _inseparable(events: Sequence[Event]) -> dict[str, tuple[int, ...]]:
    """Modules that make one step at most from a size of maps to another, and the size that they give.

    Maps of other sizes inside them are no stages: a block may widen or reduce its maps anywhere. A `Sequential` is a
    row of steps, whatever it gives.
    """
    steps = {math.prod(event.gave.shape[2:]) for event in events if event.gave.dim() > 2}
    result: dict[str, tuple[int, ...]] = {}
    for event in events:
        read, gave = _map_size(event.read), _map_size(event.gave)
        if read and event.gave.dim() > 2 and type(event.module) is not nn.Sequential:
            low, high = sorted((math.prod(read), math.prod(gave)))
            if sum(low <= step <= high for step in steps | {high}) <= 2:
                result[event.path] = gave
    return result


def _map_size(tensor: Tensor | None) -> tuple[int, ...]:
    """The size of maps (n, c, …); empty for vectors, and for maps of one position."""
    size = tuple(tensor.shape[2:]) if tensor is not None else ()
    return size if math.prod(size) > 1 else ()


def _blocks(events: Sequence[Event]) -> list[str]:
    """Some blocks of the longest row of numbered modules that all give maps of one shape, evenly spaced."""
    rows: dict[str, list[Event]] = {}
    for event in events:
        row, _, number = event.path.rpartition(".")
        if number.isdecimal() and event.gave.dim() > 2 and any(event.module.children()):
            rows.setdefault(row, []).append(event)
    alike = [row for row in rows.values() if len({tuple(event.gave.shape) for event in row}) == 1]
    longest = max(alike, key=len, default=[])
    if len(longest) < ALIGNED:
        return []
    count = min(_BLOCKS, len(longest))
    return [longest[len(longest) * (index + 1) // count - 1].path for index in range(count)]


def within(path: str, outer: str) -> bool:
    """Whether the module at ``path`` is, or lies in, the one at ``outer``."""
    return bool(outer) and f"{path}.".startswith(f"{outer}.")
