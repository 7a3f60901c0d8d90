"""``fedshift methods``."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from rich.table import Table

from fedshift.cli.console import escape, safe_console
from fedshift.cli.fields import options_table, written
from fedshift.methods.catalogue import ENTRIES, ROBUST, RULES, SERVER
from fedshift.methods.settings import PAPER

if TYPE_CHECKING:
    from fedshift.methods.base import Method


def show_methods(name: str | None) -> None:
    """List all methods, or print one method's description and options."""
    console = safe_console()
    if name is None:
        table = Table(box=None, pad_edge=False)
        for column in ("name", "for", "settings", "leaves a site", "robust rules", "server", "source"):
            table.add_column(column, overflow="fold")
        for known, entry in ENTRIES.items():
            settings, shares = ", ".join((PAPER, *entry.settings)), ", ".join(entry.shares)
            rules = "all" if ROBUST.get(known) == RULES else ", ".join(ROBUST.get(known, ("none",)))
            server = "yes" if known in SERVER else "no"
            table.add_row(known, entry.scenario, settings, shares, rules, server, entry.citation)
        console.print(table)
        return
    from fedshift.methods import registry  # imports torch, which the list above does not need

    method = registry.method_class(name)
    console.print((sys.modules[method.__module__].__doc__ or "").strip(), markup=False, highlight=False, soft_wrap=True)
    console.print()
    console.print(options_table(method))
    if method.settings:
        console.print()
        console.print(_settings_table(method))


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
