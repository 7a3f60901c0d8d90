"""``fedshift methods``."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

from rich.table import Table

from fedshift.cli.console import escape, safe_console
from fedshift.cli.fields import options_table, written
from fedshift.methods.advice import GROUPS
from fedshift.methods.catalogue import ENTRIES, LOCAL, ROBUST, RULES, SERVER
from fedshift.methods.settings import PAPER

if TYPE_CHECKING:
    from fedshift.methods.base import Method


def show_methods(name: str | None) -> None:
    """List all methods, or print one method's description and options."""
    console = safe_console()
    if name is None:
        for title, members in GROUPS.items():
            console.print(_group(title, members))
            console.print()
        console.print(
            "`average` (swa, ema, swad) and `average_rounds` go with every method. `fedshift fields robust`, `server`, "
            "`local` and `average` have the options; docs/composition.md says how they act together.",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
        return
    from fedshift.methods import registry  # imports torch, which the list above does not need

    method = registry.method_class(name)
    console.print((sys.modules[method.__module__].__doc__ or "").strip(), markup=False, highlight=False, soft_wrap=True)
    console.print()
    console.print(options_table(method))
    if method.settings:
        console.print()
        console.print(_settings_table(method))


def _group(title: str, members: Mapping[str, str]) -> Table:
    """The methods of a group: what they are for, what they compose with, what leaves a site."""
    table = Table(box=None, pad_edge=False, title=title, title_justify="left", title_style="bold")
    for column in ("name", "when it pays", "robust rules", "server", "local", "leaves a site", "settings", "source"):
        table.add_column(column, overflow="fold", ratio=3 if column == "when it pays" else None)
    for name, advice in members.items():
        entry = ENTRIES[name]
        table.add_row(
            name,
            advice,
            "all" if ROBUST.get(name) == RULES else ", ".join(ROBUST.get(name, ("none",))),
            "yes" if name in SERVER else "no",
            "yes" if name in LOCAL else "no",
            ", ".join(entry.shares),
            ", ".join((PAPER, *entry.settings)),
            entry.citation,
        )
    return table


def _settings_table(method: type[Method]) -> Table:
    """The options that each named setting changes. The defaults are the paper's values."""
    table = Table(box=None, pad_edge=False, title="settings", title_justify="left")
    for column in ("setting", "differs from the paper's values in"):
        table.add_column(column, overflow="fold")
    for name, changed in method.settings.items():
        options = method.model_validate({"setting": name}).model_dump(mode="json")
        changes = (f"{field} {written(options[field])}" for field in changed)
        table.add_row(name, escape(", ".join(changes)))
    return table
