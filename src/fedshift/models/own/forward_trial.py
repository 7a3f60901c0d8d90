"""A forward pass of made-up samples through any module, in which every call of its modules is seen; its errors."""

from __future__ import annotations

import copy
import sysconfig
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedshift.errors import FedshiftError, UserError
from fedshift.models.made_up import made_up, mark_tokens, reads_tokens, tokens
from fedshift.models.network_options import NetworkOptions

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


def try_module(module: nn.Module, input_shape: tuple[int, ...], name: str) -> Trial:
    """Try a module on made-up samples, in evaluation mode. It does not change, but is marked if it reads tokens.

    Raises UserError: it cannot read such samples.
    """
    device = next((tensor.device for tensor in module.state_dict().values()), torch.device("cpu"))
    samples = made_up(module, SAMPLES, input_shape, torch.Generator().manual_seed(0)).to(device)
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
        if len(input_shape) == 1 and not reads_tokens(module) and _takes_tokens(module, input_shape, device):
            mark_tokens(module)
            return try_module(module, input_shape, name)
        raise UserError(
            f"model '{name}' cannot read samples of shape {tuple(input_shape)}{line_of(error)}: {one_line(error)}"
        ) from error
    return Trial(contiguous, samples, scores, events)


def _takes_tokens(module: nn.Module, input_shape: tuple[int, ...], device: torch.device) -> bool:
    """Whether a module that cannot read numbers can read integers, as one that begins with an embedding."""
    try:
        forward(module, tokens(SAMPLES, input_shape).to(device))
    except Exception:
        return False
    return True


@torch.no_grad()
def forward(module: nn.Module, samples: Tensor, *, training: bool = False) -> tuple[Tensor, list[Event]]:
    """What a module gives, and every call of a module in it that gave a tensor.

    In evaluation mode, unless ``training``, which changes statistics that the module keeps.
    """
    events: list[Event] = []

    def watcher(path: str) -> Callable[[nn.Module, tuple[Any, ...], object], None]:
        def watch(called: nn.Module, read: tuple[Any, ...], gave: object) -> None:
            if isinstance(gave, Tensor):
                given = read[0] if len(read) == 1 and isinstance(read[0], Tensor) else None
                events.append(Event(path, called, given, gave))

        return watch

    handles = [part.register_forward_hook(watcher(path)) for path, part in module.named_modules()]
    try:
        with in_mode(module, training), torch.random.fork_rng(devices=[]):
            scores = module(samples)
    finally:
        for handle in handles:
            handle.remove()
    return scores, events


@contextmanager
def in_mode(module: nn.Module, training: bool) -> Iterator[None]:
    """Put a module into training or evaluation mode, and each of its parts back into its own mode afterwards."""
    modes = [(part, part.training) for part in module.modules()]
    module.train(training)
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training


def one_line(error: BaseException) -> str:
    """What an error of a user's own code says, in one line."""
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {text}"[:300] if text else type(error).__name__


@contextmanager
def told_of(options: NetworkOptions, when: str) -> Iterator[None]:
    """What fails in the block with a network that does not come with fedshift is its user's mistake, in one line.

    Errors with a network of ours pass: they are faults of fedshift, and their traceback is wanted. The error that is
    raised has the other as its cause, which Python shows with ``fedshift.run`` or ``fedshift.check``.

    ``when``: what is done in the block and fails, such as "training with it". Raises UserError: something failed. The
    message names the network and the line of its file.
    """
    try:
        yield
    except (FedshiftError, OSError, MemoryError):
        raise
    except Exception as error:
        if options.code is None:
            raise
        raise UserError(f"model '{options.display}': {when} fails{line_of(error)}: {one_line(error)}") from error


def line_of(error: Exception) -> str:
    """File and line of the user's code at which an error was raised."""
    not_theirs = (str(Path(__file__).parents[2]), sysconfig.get_path("stdlib"), "<frozen")
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith(not_theirs) and "site-packages" not in frame.filename:
            return f" ({Path(frame.filename).name}, line {frame.lineno})"
    return ""
