"""The commands that list methods, data sets, networks and the fields of an experiment file, or describe one of them."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Annotated

import typer


def names_of(folder: str) -> Callable[[], list[str]]:
    """What a shell offers after ``fedshift methods``, ``datasets`` or ``models``: the names in that folder's list."""

    def names() -> list[str]:
        return list(importlib.import_module(f"fedshift.{folder}.registry").names())

    return names


def methods(
    name: Annotated[
        str | None, typer.Argument(help="A method.", metavar="[NAME]", autocompletion=names_of("methods"))
    ] = None,
) -> None:
    """List the methods, or describe one: its paper, what leaves a site, its options."""
    from fedshift.cli.methods import show_methods

    show_methods(name)


def datasets(
    name: Annotated[
        str | None, typer.Argument(help="A data set.", metavar="[NAME]", autocompletion=names_of("data"))
    ] = None,
    fetch: Annotated[
        bool, typer.Option("--fetch", help="Download its files to FEDSHIFT_DATA, if it is free to have.")
    ] = False,
) -> None:
    """List the data sets, or describe one: source, licence, layout, how to get it, whether its files are here."""
    from fedshift.cli.datasets import show_datasets

    show_datasets(name, fetch)


def models(
    name: Annotated[
        str | None, typer.Argument(help="A network.", metavar="[NAME]", autocompletion=names_of("models"))
    ] = None,
) -> None:
    """List the networks, or describe one and its options."""
    from fedshift.cli.fields import show_models

    show_models(name)


def fields(
    section: Annotated[
        str | None, typer.Argument(help="protocol, training, engine or evaluation.", metavar="[SECTION]")
    ] = None,
) -> None:
    """List the fields of an experiment's sections protocol, training, engine and evaluation."""
    from fedshift.cli.fields import show_fields

    show_fields(section)
