"""``fedshift methods``."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.table import Table

from fedshift.cli.fields import options_table
from fedshift.methods import registry


def show_methods(name: str | None) -> None:
    """List all methods, or print one method's description and options."""
    console = Console()
    if name is None:
        table = Table(box=None, pad_edge=False)
        for column in ("name", "for", "leaves a site", "source"):
            table.add_column(column, overflow="fold")
        for known in registry.names():
            method = registry.method_class(known)
            setting = method.setting + (", pooled" if method.pooled else "")
            table.add_row(known, setting, ", ".join(method.shares), method.citation)
        console.print(table)
        return
    method = registry.method_class(name)
    console.print((sys.modules[method.__module__].__doc__ or "").strip(), markup=False, highlight=False, soft_wrap=True)
    console.print()
    console.print(options_table(method))
