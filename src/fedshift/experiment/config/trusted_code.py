"""The network and the method that a model file names. A file never decides which code runs: the caller does."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedshift.errors import UserError
from fedshift.methods import registry as methods
from fedshift.methods.base import Method
from fedshift.models import registry as models
from fedshift.models.network_options import NetworkOptions
from fedshift.models.own.own_network import is_object, network_of_object
from fedshift.trust import own_words


def trusted_network(record: Mapping[str, Any], own_network: Any, file: Path) -> NetworkOptions:
    """The network that a model file names, whose code is ours or ``own_network``: a name, or an object of Python.

    UserError if it needs other code, or names a network of ours and ``own_network`` is given.
    """

    def with_trusted_name(record: Mapping[str, Any]) -> dict[str, Any]:
        """The options with the name that the caller trusts, also of a network inside."""
        options = {
            key: with_trusted_name(value) if isinstance(value, Mapping) else value for key, value in record.items()
        }
        if ":" in str(options.get("name")):
            if own_network is None:
                raise UserError(
                    f"{file} is the model of a network that does not come with fedshift ('{options['name']}'): if you "
                    "trust its code, name it with --network FILE.py:Class, or from Python give it to "
                    "Model.load(path, network=…)"
                )
            trained.add((str(options["name"]).rpartition(":")[2], str(options.pop("sha256", None))))
            options["name"] = own_network
        return options

    def permit(name: str) -> None:
        if name != own_network:
            raise UserError(
                f"{file} needs the network '{name}', which does not come with fedshift: it was not imported"
            )

    trained = set[tuple[str, str]]()
    options = with_trusted_name({key: value for key, value in record.items() if key != "pretrained"})
    if own_network is not None and not trained:
        raise UserError(f"{file} is the model of '{record['name']}', which comes with fedshift: leave out --network")
    with own_words():
        result = network_of_object(options) if is_object(options) else models.parse(options, permit=permit)
    now = {
        (network.display.rpartition(":")[2], str(network.record().get("sha256")))
        for network in result.networks()
        if ":" in network.name
    }
    if trained != now:
        warnings.warn(
            f"{result.display} is not, or no longer, the code that {file} was trained with: predictions may differ",
            stacklevel=4,
        )
    return result


def trusted_method(record: Mapping[str, Any], own_method: str | Method | None, file: Path) -> Method:
    """The method that a model file names, whose code is ours or ``own_method``: a name, or the method itself.

    UserError if it needs other code.
    """
    if isinstance(own_method, Method):
        return own_method
    options = {key: value for key, value in record.items() if key != "sha256"}
    if options["name"] not in methods.METHODS:
        if own_method is None:
            raise UserError(
                f"{file} is the model of a method that does not come with fedshift ('{options['name']}'): if you trust "
                "its code, name it with --method FILE.py:Class"
            )
        options["name"] = own_method

    def permit(name: str) -> None:
        if name not in (*methods.METHODS, own_method):
            raise UserError(f"{file} needs the method '{name}', which does not come with fedshift: it was not imported")

    with own_words():
        return methods.parse(options, permit=permit)
