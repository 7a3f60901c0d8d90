"""The options of networks that do not come with fedshift, and how such a network is made."""

from __future__ import annotations

import copy
import hashlib
import inspect
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import ConfigDict, Field, PrivateAttr
from pydantic_core import PydanticSerializationError, to_jsonable_python
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fedshift.class_registry import made_in
from fedshift.errors import UserError, nearest
from fedshift.import_paths import place_of
from fedshift.models.network import Network
from fedshift.models.network_options import NetworkOptions
from fedshift.models.own import bundles, libraries
from fedshift.models.own.forward_trial import SAMPLES, forward, one_line
from fedshift.models.own.structure import Parts, Structure, assemble, structure_of
from fedshift.trust import own_module

GIVEN = "python:"
"""Begins the names of networks that were given as objects. No other process can make them."""
Maker = Callable[..., Any]


class OwnNetwork(NetworkOptions):
    """A network of your own, or of timm, torchvision or Hugging Face (docs/own_network.md).

    It is called as ``Net(input_shape, classes, **options)`` and returns a `torch.nn.Module` that maps samples
    (n, \\*input_shape) to scores (n, classes). Every field but these is an option of the network.
    """

    model_config = ConfigDict(frozen=True, extra="allow")

    name: str = Field(
        description="file.py:Class, package.module:Class, timm:, torchvision:, hf:, monai: or smp: and a NAME, or "
        "bundle: and the folder of a bundle of MONAI"
    )
    parts: Parts = Field(
        default_factory=Parts, description="its classifier and stages, where they are not found by themselves"
    )

    _make: Maker = PrivateAttr()
    _object: Any = PrivateAttr(None)
    _sha256: str | None = PrivateAttr(None)
    _structures: dict[tuple[tuple[int, ...], int], Structure] = PrivateAttr(default_factory=dict)

    @property
    def display(self) -> str:
        origin, colon, attribute = self.name.rpartition(":")
        if origin == bundles.PREFIX:
            return f"{origin}:{Path(attribute).name}"
        return f"{Path(origin).name}{colon}{attribute}" if origin.endswith(".py") else self.name

    @property
    def options(self) -> dict[str, Any]:
        """What the network is called with beside shape and classes."""
        return dict(self.__pydantic_extra__ or {})

    @property
    def code(self) -> Any:
        return self.name if self._object is None else self._object

    def record(self) -> dict[str, Any]:
        checksum = {} if self._sha256 is None else {"sha256": self._sha256}
        return {**super().record(), "name": self.display, **checksum}

    @property
    def starts_at_random(self) -> bool:
        return self.name.partition(":")[0] in (*libraries.PRETRAINED, bundles.PREFIX) and not self.options.get(
            "pretrained"
        )

    def build(self, input_shape: tuple[int, ...], classes: int) -> Network:
        with _seed_generators():
            module = self._make_module(input_shape, classes)
        if isinstance(module, Network):
            return module
        key = tuple(input_shape), classes
        if key not in self._structures:
            self._structures[key] = structure_of(module, input_shape, classes, self.parts, self.display)
        return assemble(module, self._structures[key], classes)

    def report(self, input_shape: tuple[int, ...], classes: int) -> tuple[str, ...]:
        structure = self._structures.get((tuple(input_shape), classes))
        return structure.sentences if structure is not None else ()

    def structure(self, input_shape: tuple[int, ...], classes: int) -> dict[str, Any] | None:
        result = self._structures.get((tuple(input_shape), classes))
        return None if result is None else result.model_dump(mode="json")

    def take_structure(self, input_shape: tuple[int, ...], classes: int, known: Any) -> None:
        self._structures[tuple(input_shape), classes] = Structure.model_validate(known)

    def _make_module(self, input_shape: tuple[int, ...], classes: int) -> nn.Module:
        what = f"model '{self.display}'"
        module: Any
        try:
            module = self._make(tuple(input_shape), classes, **self.options)
        except UserError:
            raise
        except (Exception, SystemExit) as error:
            raise UserError(
                f"{what} cannot be made for samples of shape {tuple(input_shape)} and {classes} classes: "
                f"{one_line(error)}"
            ) from error
        if not isinstance(module, nn.Module):
            raise UserError(f"{what} gives {type(module).__name__}, not a torch.nn.Module")
        if not any(module.children()):
            module = nn.Sequential(module)
        if any(is_lazy(parameter) for parameter in module.parameters()):
            try:
                forward(module, torch.zeros(SAMPLES, *input_shape))
            except Exception as error:
                raise UserError(
                    f"{what} cannot read samples of shape {tuple(input_shape)}: {one_line(error)}"
                ) from error
        if not any(parameter.requires_grad for parameter in module.parameters()):
            raise UserError(f"{what} has no parameters to train")
        for name, value in module.state_dict().items():
            if not isinstance(value, Tensor):
                raise UserError(
                    f"{what} keeps '{name}', which is not a tensor, in its state: make it a plain attribute"
                )
        made: nn.Module = module
        return made


def parse(fields: Mapping[str, Any], folder: Path | None) -> OwnNetwork:
    """The network that a ``model:`` section describes, whose name has a colon.

    The code is imported here, not called.

    ``folder``: where a relative ``file.py`` is looked up first. The working directory is next. Raises UserError: the
    name leads nowhere, or the network does not take these options. Raises ValidationError: ``parts`` is wrong.
    """
    name = str(fields["name"])
    what = f"model '{name}'"
    origin, _, attribute = name.rpartition(":")
    if name.startswith(GIVEN):
        raise UserError(f"{what} was given as an object in Python, and only that process has it; write file.py:Class")
    if origin in libraries.NAMES:
        return _options(fields, name, libraries.maker(origin, attribute), None)
    if origin == bundles.PREFIX:
        bundle, maker = bundles.bundle_network(name, attribute, folder)
        return _options(fields, f"{origin}:{bundle.folder}", maker, bundle.sha256)
    try:
        module = own_module(what, origin, folder)
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{what} cannot be imported: {one_line(error)}") from error
    make: Any = getattr(module, attribute, None)
    # Of fedshift itself no function makes networks, and files would call any of them by its name.
    makes = _is_network if origin.partition(".")[0] == "fedshift" else _makes_networks
    if not makes(make) or not made_in(module, make):
        names = [key for key, value in vars(module).items() if makes(value) and made_in(module, value)]
        raise UserError(
            f"{origin} has no network '{attribute}' of its own (a class derived from torch.nn.Module, or a function); "
            f"{nearest(attribute, names)}"
        )
    whole = f"{module.__file__}:{attribute}" if origin.endswith(".py") else name
    return _options(fields, whole, make, getattr(module, "__sha256__", None))


def _makes_networks(thing: object) -> bool:
    """Whether it may be called for a network. Whatever else a module has is not called because a file names it."""
    return inspect.isfunction(thing) or _is_network(thing)


def _is_network(thing: object) -> bool:
    return isinstance(thing, type) and issubclass(thing, nn.Module)


def is_object(value: object) -> bool:
    """Whether a ``model:`` section is an object of Python, or its name is one."""
    return callable(value) or (isinstance(value, Mapping) and not isinstance(value.get("name", ""), str))


def network_of_object(section: Any) -> OwnNetwork:
    """The network that an object of Python is: a class, a function that makes a module, or a module.

    A module is the common start with the weights that it has, for every seed.

    ``section``: the object, or a ``model:`` section whose name it is. Raises UserError: it is none of these, or does
    not take these options.
    """
    fields = section if isinstance(section, Mapping) else {"name": section}
    network = _from_object(fields["name"], fields)
    network._object = fields["name"]
    return network


def _from_object(thing: Any, fields: Mapping[str, Any]) -> OwnNetwork:
    if isinstance(thing, nn.Module):
        return _options(fields, f"{GIVEN}{type(thing).__name__}", _Copies(thing), _checksum(thing))
    if not callable(thing):
        raise UserError(
            f"model: {thing!r:.80} is no network; give a name, a torch.nn.Module or a function that makes one"
        )
    path = str(getattr(thing, "__qualname__", ""))
    module = sys.modules.get(str(getattr(thing, "__module__", "")))
    file = getattr(module, "__file__", None)
    importable = getattr(module, path, None) is thing
    if importable and path.isidentifier() and file is not None:
        origin = place_of(thing)
        code = Path(file).read_bytes() if origin.startswith(f"{file}:") else None
        return _options(fields, origin, thing, None if code is None else hashlib.sha256(code).hexdigest())
    try:
        code = inspect.getsource(thing).encode()
    except (OSError, TypeError):
        raise UserError(
            f"model: the code of {thing!r:.80} cannot be read, so results could not be told apart; write it in a file"
        ) from None
    return _options(fields, f"{GIVEN}{path or type(thing).__name__}", thing, hashlib.sha256(code).hexdigest())


def is_given(options: NetworkOptions) -> bool:
    """Whether a network, or one inside it, was given as an object that only this process has."""
    return any(network.name.startswith(GIVEN) for network in options.networks())


class _Copies:
    """Makes copies of a module."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __call__(self, input_shape: tuple[int, ...], classes: int) -> nn.Module:
        return copy.deepcopy(self._module)


def _options(fields: Mapping[str, Any], name: str, make: Maker, sha256: str | None) -> OwnNetwork:
    options = OwnNetwork.model_validate({**fields, "name": name})
    try:
        # As another process reads them, so that a tuple is a list everywhere.
        plain = to_jsonable_python(options.options)
    except PydanticSerializationError as error:
        raise UserError(f"model: an option of '{options.display}' is not a plain value: {one_line(error)}") from None
    options = OwnNetwork.model_validate({"name": name, "parts": options.parts, **plain})
    options._make, options._sha256 = make, sha256
    try:
        signature = inspect.signature(make)
    except (TypeError, ValueError):  # some callables in C have none
        return options
    try:
        signature.bind((), 2, **plain)
    except TypeError as error:
        known = [key for key, value in signature.parameters.items() if value.kind is not value.VAR_KEYWORD][2:]
        hint = f"; its options: {', '.join(known)}" if known else ""
        raise UserError(
            f"model: {options.display} is called as Net(input_shape, classes, **options): {error}{hint}"
        ) from None
    return options


def _checksum(module: nn.Module) -> str:
    digest = hashlib.sha256(f"{type(module).__qualname__} {module!r}".encode())
    for name, tensor in module.state_dict().items():
        digest.update(name.encode())
        if is_lazy(tensor):
            continue  # it has no values before the first batch
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


@contextmanager
def _seed_generators() -> Iterator[None]:
    """Seed the generators of Python and NumPy as torch's is, and restore them afterwards."""
    seed = torch.initial_seed()
    # Users' code draws from NumPy's old global generator, which only these calls reach.
    python, arrays = random.getstate(), np.random.get_state()  # noqa: NPY002
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(arrays)  # noqa: NPY002
