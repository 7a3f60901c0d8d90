"""``fedshift datasets``."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from fedshift.cli.console import escape, safe_console
from fedshift.cli.fields import options_table
from fedshift.data import locate, registry
from fedshift.data.locate import data_root, find, sha256_of
from fedshift.errors import UserError
from fedshift.trust import own_words


def show_datasets(name: str | None, fetch: bool = False) -> None:
    """List all data sets, or print the manifest of one and whether its files are here; or get its files first.

    UserError if there is no such data set, or it cannot be fetched.
    """
    console = safe_console()
    if fetch:
        _fetch(console, name)
    elif name is None:
        _list_all(console)
    else:
        _describe(console, name)


def _fetch(console: Console, name: str | None) -> None:
    if name is None:
        raise UserError("--fetch needs the name of a data set: fedshift datasets heart_disease --fetch")
    written = locate.fetch(name, registry.source_class(name).manifest())
    for path in written:
        console.print(escape(f"written: {path}"))
    if not written:
        console.print("all its files are here already")


def _list_all(console: Console) -> None:
    table = Table(box=None, pad_edge=False)
    for column in ("name", "data set", "licence"):
        table.add_column(column, overflow="fold")
    for known in registry.names():
        manifest = registry.source_class(known).manifest()
        table.add_row(known, escape(manifest.title), escape(manifest.licence))
    console.print(table)


def _describe(console: Console, name: str) -> None:
    with own_words():  # who asks named it
        source = registry.source_class(name)
    manifest = source.manifest()
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    rows = {
        "data set": manifest.title,
        "source": manifest.source,
        "licence": manifest.licence,
        "how to get it": manifest.how_to_get,
        "layout": manifest.layout,
        "notes": manifest.notes,
        "samples": ", ".join(f"{domain} {count}" for domain, count in manifest.counts.items()),
    }
    for title, text in rows.items():
        if text:
            table.add_row(title, escape(text))
    for file, checksum in manifest.sha256.items():
        table.add_row(file, _state(file, checksum))
    console.print(table)
    console.print()
    console.print(options_table(source, without=("name",)))


def _state(file: str, checksum: str) -> str:
    path = find([file])
    if path is None:
        root = data_root()
        return f"not found below {escape(str(root))}" if root else "not found: FEDSHIFT_DATA is not set"
    return (
        "here, checksum as expected"
        if sha256_of(path) == checksum
        else f"here, but another version ({escape(str(path))})"
    )
