"""What a site remembers between exchanges."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from pathlib import Path

import torch
from torch import Tensor

from fedshift.errors import FedshiftError, UserError
from fedshift.federation.message_files import read_message, write_message
from fedshift.federation.messages import Content, Statistics
from fedshift.weights import Weights


class SiteMemory(MutableMapping[str, Content]):
    """Content that a site keeps between exchanges, under names that the method declares. It is never sent.

    Each entry is saved as one file of the checkpoint, written only when it changed. The file name holds the exchange
    that wrote it and a random number, so an interrupted save leaves the files of an older checkpoint as they are.
    """

    def __init__(self, declared: Iterable[str]) -> None:
        self._declared = frozenset(declared)
        self._entries: dict[str, Content] = {}
        self._files: dict[str, str] = {}

    def __getitem__(self, name: str) -> Content:
        return self._entries[name]

    def __setitem__(self, name: str, content: Content) -> None:
        if name not in self._declared:
            raise FedshiftError(f"site memory '{name}' is not declared in the method's `memory_names`")
        self._entries[name] = content
        self._files.pop(name, None)

    def __delitem__(self, name: str) -> None:
        del self._entries[name]
        self._files.pop(name, None)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def weights(self, name: str) -> Weights:
        """The entry ``name`` as `Weights`.

        Raises FedshiftError: there is no such entry, since an earlier call failed here, or it is not `Weights`.
        """
        if name not in self._entries:
            raise FedshiftError(f"site memory '{name}' is empty: the call that fills it failed at this site")
        content = self._entries[name]
        if not isinstance(content, Weights):
            raise FedshiftError(f"site memory '{name}' holds {type(content).__name__}, not Weights")
        return content

    def save(self, folder: Path, version: int) -> dict[str, str]:
        """Write the entries that changed since the last save; return entry → file name for the checkpoint."""
        for name, content in self._entries.items():
            if name not in self._files:
                # At random, so that no other file can be taken for it, such as that of another site or run.
                file = f"{name}-{version}-{secrets.token_hex(4)}.safetensors"
                write_message(folder / file, {name: content})
                self._files[name] = file
        return dict(self._files)

    def load(self, folder: Path, files: Mapping[str, str]) -> None:
        """Replace all entries by those that a checkpoint names.

        Raises UserError: a file is missing, damaged, or holds another entry.
        """
        entries: dict[str, Content] = {}
        for name, file in files.items():
            content, _ = read_message(folder / file)
            if name not in content:
                raise UserError(f"{folder / file} does not hold '{name}': delete the run's folder and run again")
            entries[name] = content[name]
        self._entries, self._files = entries, dict(files)


def optimizer_state(optimizer: torch.optim.Optimizer) -> Statistics:
    """An optimiser's momentum and moments, as named tensors."""
    state = optimizer.state_dict()["state"]
    return Statistics(
        {
            f"{number}.{key}": value.detach().cpu().clone() if isinstance(value, Tensor) else torch.tensor(value)
            for number, entry in state.items()
            for key, value in entry.items()
            if value is not None
        }
    )


def load_optimizer(optimizer: torch.optim.Optimizer, content: Content) -> None:
    """Give an optimiser the momentum and moments that `optimizer_state` took. It keeps its learning rate.

    Raises FedshiftError: the content is something else.
    """
    if not isinstance(content, Statistics):
        raise FedshiftError("an optimiser's memory must be Statistics")
    whole = optimizer.state_dict()  # with the learning rate of now, which stays
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state: dict[int, dict[str, Tensor]] = {}
    for name, tensor in content.items():
        number, _, key = name.partition(".")
        parameter = parameters[int(number)]
        if tensor.shape == parameter.shape:
            # Fused optimisers ignore strides. A tensor from a file is contiguous, the parameter may be channels-last.
            tensor = torch.empty_like(parameter, dtype=tensor.dtype).copy_(tensor)
        state.setdefault(int(number), {})[key] = tensor
    optimizer.load_state_dict({**whole, "state": state})


def begin_momentum(optimizer: torch.optim.Optimizer) -> None:
    """Give parameters that had no gradient so far a momentum of zero. Fused SGD wants it of all or of none."""
    for group in optimizer.param_groups:
        if group.get("momentum"):
            for parameter in group["params"]:
                optimizer.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter))
