"""A forward pass of made-up samples through any module, in which every call of its modules is seen."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fedshift.errors import UserError

SAMPLES = 2


@dataclass(frozen=True)
class Event:
    """One call of a module: its path, what it read and what it gave."""

    path: str
    module: nn.Module
    read: Tensor | None
    gave: Tensor


@dataclass(frozen=True)
class Trial:
    """A forward pass: whether the samples had to be contiguous, the samples, the scores, the calls of modules."""

    contiguous: bool
    samples: Tensor
    scores: Tensor
    events: Sequence[Event]

    @property
    def calls(self) -> Counter[str]:
        return Counter(event.path for event in self.events)


def tried(module: nn.Module, input_shape: tuple[int, ...], name: str) -> Trial:
    """Try a module on made-up samples, in evaluation mode. It does not change.

    Args:
        module: the module.
        input_shape: shape of one sample.
        name: the network's name, for messages.

    Raises:
        UserError: it cannot read such samples.
    """
    device = next((tensor.device for tensor in module.state_dict().values()), torch.device("cpu"))
    draws = torch.Generator().manual_seed(0)
    samples = torch.rand(SAMPLES, *input_shape, generator=draws, device="cpu").to(device)
    contiguous = False
    if len(input_shape) == 3:  # channels-last is faster, but a module may view its maps as if they were contiguous
        try:
            probe = copy.deepcopy(module).to(memory_format=torch.channels_last)
            # Made by a permutation, as batches are: one channel has the same layout in memory in both formats.
            last = samples.permute(0, 2, 3, 1).clone(memory_format=torch.contiguous_format)
            forward(probe, last.permute(0, 3, 1, 2))
        except Exception:  # if it fails with contiguous samples too, the error is told below
            contiguous = True
    try:
        scores, events = forward(module, samples)
    except Exception as error:
        raise UserError(
            f"model '{name}' cannot read samples of shape {tuple(input_shape)}: {one_line(error)}"
        ) from error
    return Trial(contiguous, samples, scores, events)


@torch.no_grad()
def forward(module: nn.Module, samples: Tensor) -> tuple[Tensor, list[Event]]:
    """What a module gives in evaluation mode, and every call of a module in it that gave a tensor."""
    events: list[Event] = []

    def watcher(path: str) -> Callable[[nn.Module, tuple[Any, ...], object], None]:
        def watch(called: nn.Module, read: tuple[Any, ...], gave: object) -> None:
            if isinstance(gave, Tensor):
                given = read[0] if len(read) == 1 and isinstance(read[0], Tensor) else None
                events.append(Event(path, called, given, gave))

        return watch

    handles = [part.register_forward_hook(watcher(path)) for path, part in module.named_modules()]
    try:
        with evaluating(module), torch.random.fork_rng(devices=[]):
            scores = module(samples)
    finally:
        for handle in handles:
            handle.remove()
    return scores, events


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Put a module into evaluation mode, and each of its parts back into its own mode afterwards."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training


def one_line(error: BaseException) -> str:
    """What an error of a user's own code says, in one line."""
    said = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {said}"[:300] if said else type(error).__name__
