"""``fedshift methods``."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from fedshift.cli.console import escape, reflow, safe_console
from fedshift.cli.fields import options_table
from fedshift.methods.index import ENTRIES, GROUPS, RULES, of_group
from fedshift.methods.settings import PAPER
from fedshift.text import yaml_value
from fedshift.trust import own_words

if TYPE_CHECKING:
    from fedshift.methods.base import Method


def show_methods(name: str | None) -> None:
    """List all methods, or print one method's description and options."""
    console = safe_console()
    if name is None:
        for group, title in GROUPS.items():
            console.print(_group(title, of_group(group)))
            console.print()
        console.print(
            "`average` (swa, ema, swad) and `average_rounds` go with every method. `fedshift fields robust`, `server`, "
            "`local` and `average` have the options; docs/composition.md says how they act together.",
            markup=False,
            highlight=False,
        )
        return
    from fedshift.methods import registry  # imports torch, which the list above does not need
    from fedshift.methods.base import Method

    with own_words():  # who asks named it
        method = registry.method_class(name)
    prose = (sys.modules[method.__module__].__doc__ or "").strip()
    prose = reflow(prose, console.width) if console.is_terminal else prose
    console.print(prose, markup=False, highlight=False, soft_wrap=True)
    common = Method.model_fields.keys() & method.model_fields.keys()
    if options := method.model_fields.keys() - common:
        console.print()
        console.print(options_table(method, "options of its own", without=common))
    if method.traits.settings:
        console.print()
        console.print(_settings_table(method))
    console.print()
    console.print(options_table(method, "options of every method", without=options))


def _group(title: str, members: Iterable[str]) -> Table:
    """The methods of a group: when each pays, and below that what leaves a site and what it composes with."""
    table = Table(box=None, pad_edge=False, title=title, title_justify="left", title_style="bold", show_header=False)
    table.add_column("name", no_wrap=True)
    table.add_column("what", overflow="fold")
    for name in members:
        entry = ENTRIES[name]
        rules = "all rules" if entry.rules == RULES else ", ".join(entry.rules)
        options = [f"robust ({rules})"] if entry.rules else []
        options += ["server"] if entry.server else []
        options += ["local"] if entry.local else []
        facts = [
            entry.citation,
            "for: " + ", ".join(entry.tasks) + (f" ({entry.needs_classes})" if entry.needs_classes else ""),
            "leaves a site: " + ", ".join(entry.shares),
            f"the server reads: {entry.reads}"
            + (f"; with engine.routing: sealed {entry.reads_sealed}" if entry.reads_sealed else ""),
            "goes with: " + (", ".join(options) or "none of robust, server, local"),
            "settings: " + ", ".join((PAPER, *entry.settings)),
        ]
        table.add_row(name, Text(entry.advice).append("\n" + "; ".join(facts), style="dim"))
    return table


def _settings_table(method: type[Method]) -> Table:
    """The options that each named setting changes. The defaults are the paper's values."""
    table = Table(box=None, pad_edge=False, title="settings", title_justify="left")
    for column in ("setting", "differs from the paper's values in"):
        table.add_column(column, overflow="fold")
    for name, changed in method.traits.settings.items():
        options = method.model_validate({"setting": name}).model_dump(mode="json")
        changes = (f"{field} {yaml_value(options[field])}" for field in changed)
        table.add_row(name, escape(", ".join(changes)))
    return table
