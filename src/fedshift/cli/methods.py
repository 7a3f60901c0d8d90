"""``fedshift methods``."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.markup import escape
from rich.table import Table

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
    table = Table(box=None, pad_edge=False, title="options", title_justify="left")
    for column in ("field", "default", "meaning"):
        table.add_column(column, overflow="fold")
    for field, info in method.model_fields.items():
        default = "required" if info.is_required() else str(info.get_default(call_default_factory=True))
        table.add_row(field, escape(default), escape(info.description or ""))
    console.print(table)
