"""Write the lists of methods: ``python docs/list_methods.py``.

What a method is stands in its class (`fedshift.methods.traits`). Made from it are ``src/fedshift/methods/index.json``,
which `fedshift methods` reads without torch, and the tables of methods in README.md and docs/, between two marks.
`tests/methods/test_index.py` compares all of them. The list of all fields (`list_fields`) is written, too.
"""

from __future__ import annotations

import importlib
import inspect
import json
import pkgutil
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import list_fields

import fedshift.methods.federated
import fedshift.methods.pooled
from fedshift.methods.base import Method, reads_of
from fedshift.methods.composition.options import robust_rules
from fedshift.methods.index import GROUPS, Entry
from fedshift.methods.robust import RULES

ROOT = Path(__file__).resolve().parents[1]
INDEX = ROOT / "src" / "fedshift" / "methods" / "index.json"
_MARK = "<!-- methods {} -->\n"
_END = "<!-- end -->"
_MOST_NAMED = 7


def classes() -> list[type[Method]]:
    """The class of every method, a group after the other, in each the oldest first."""
    listed: list[type[Method]] = []
    for package in (fedshift.methods.federated, fedshift.methods.pooled):
        for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            kinds = [kind for kind in vars(importlib.import_module(module.name)).values() if inspect.isclass(kind)]
            made = [kind for kind in kinds if issubclass(kind, Method) and kind.__module__ == module.name]
            listed += [kind for kind in made if kind.traits.group is not None]
    groups: list[Any] = list(GROUPS)
    return sorted(listed, key=lambda kind: (groups.index(kind.traits.group), _year(kind), kind.name))


def _year(kind: type[Method]) -> int:
    years = re.findall(r"\b\d{4}\b", kind.traits.citation)
    if not years:
        raise ValueError(f"{kind.__module__}: {kind.__name__}.traits.citation has no year")
    return int(years[-1])


def entry_of(kind: type[Method]) -> Entry:
    """The entry of a class."""
    method, traits = kind(), kind.traits
    if traits.group is None:
        raise ValueError(f"{kind.__module__}: {kind.__name__}.traits has no group")
    sends = traits.sends or ("**all training samples**" if traits.pooled else "a model")
    kept = f"; at its site stays {traits.keeps}" if traits.keeps else ""
    return Entry(
        class_path=f"{kind.__module__}:{kind.__name__}",
        group=traits.group,
        advice=traits.advice,
        scenario=traits.scenario,
        sends=sends + (", also the target's" if traits.pooled and traits.needs_target else "") + kept,
        shares=method.calls.shares,
        citation=traits.citation,
        settings=tuple(traits.settings),
        reads=reads_of(method),
        reads_sealed=traits.reads_sealed,
        rules=robust_rules(method),
        server=bool(method.traits.averages),
        local=method.traits.takes_plug_ins,
        tasks=method.traits.tasks,
        needs_classes=traits.needs_classes,
    )


def index() -> str:
    """The text of ``index.json``."""
    methods = {kind.name: asdict(entry_of(kind)) for kind in classes()}
    return json.dumps({"rules": list(RULES), "methods": methods}, indent=1, ensure_ascii=False) + "\n"


def families() -> str:
    """The table of the README: what methods are for, and what may leave a site at most."""
    rows = []
    for group, title in GROUPS.items():
        kinds = [kind for kind in classes() if kind.traits.group == group]
        names = ", ".join(f"`{kind.name}`" for kind in kinds[:_MOST_NAMED])
        more = f" and {len(kinds) - _MOST_NAMED} more" if len(kinds) > _MOST_NAMED else ""
        purpose, _, meaning = title.partition(": ")
        rows.append(f"| {purpose} | {meaning} | {names}{more} |\n")
    return "| family | | methods |\n|---|---|---|\n" + "".join(rows)


def by_group() -> str:
    """The table of the documentation site: what methods are for, what leaves a site, and what the server reads."""
    entries = {kind.name: entry_of(kind) for kind in classes()}
    titles = {group: title.partition(":")[0] for group, title in GROUPS.items()}
    rows = [((titles[entry.group], entry.sends, _reads(entry)), name) for name, entry in entries.items()]
    return _table(("methods", "for", "what leaves a site", "server reads"), rows)


def _reads(entry: Entry) -> str:
    return entry.reads + (f"; with `routing: sealed` {entry.reads_sealed}" if entry.reads_sealed else "")


def screened() -> str:
    """The table of docs/robust_aggregation.md: which rules go with a method that averages, and what they see."""
    usual = ("all", "models")
    rows = [((_rules(kind()), _seen(kind())), kind.name) for kind in classes() if kind.traits.averages]
    others = [row for row in rows if row[0] != usual]
    return _table(("methods", "rules", "what a rule sees"), others) + f"| all others | {' | '.join(usual)} |\n"


def _rules(method: Method) -> str:
    rules = robust_rules(method)
    return "all" if rules == tuple(RULES) else ", ".join(f"`{rule}`" for rule in rules) or "none"


def _seen(method: Method) -> str:
    parts = []
    for averaged in method.traits.averages.values():
        fields = " and ".join("models" if field == "weights" else f"`{field}`" for field in averaged.fields)
        fields += " together" if len(averaged.fields) > 1 else ""
        fields += f", `{'`, `'.join(averaged.changes)}` measured from zero" if averaged.changes else ""
        parts.append(fields + (" of sites without labels" if averaged.at == "targets" else ""))
    return "; ".join(dict.fromkeys(parts))


def _table(head: Iterable[str], rows: Iterable[tuple[tuple[str, ...], str]]) -> str:
    """Rows of the same cells are one, with the names of all in its first cell."""
    together: dict[tuple[str, ...], list[str]] = {}
    for cells, name in rows:
        together.setdefault(cells, []).append(f"`{name}`")
    head = tuple(head)
    lines = [" | ".join(head), "|".join("---" for _ in head)]
    lines += [" | ".join((", ".join(names), *cells)) for cells, names in together.items()]
    return "".join(f"| {line} |\n" if "---" not in line else f"|{line}|\n" for line in lines)


TABLES: Mapping[str, tuple[tuple[str, Callable[[], str]], ...]] = {
    "README.md": (("families", families),),
    "docs/robust_aggregation.md": (("screened", screened),),
}
"""The pages with tables: the name of the mark and what stands below it."""


def filled(page: str) -> str:
    """The text of a page with its tables as they should be.

    Raises:
        ValueError: a mark is missing.
    """
    text = (ROOT / page).read_text(encoding="utf-8")
    for name, table in TABLES[page]:
        before, mark, after = text.partition(_MARK.format(name))
        _, end, after = after.partition(_END)
        if not (mark and end):
            raise ValueError(f"{page} lacks {_MARK.format(name).strip()} … {_END}")
        text = before + mark + table() + end + after
    return text


def main() -> None:
    """Write all of them."""
    INDEX.write_text(index(), encoding="utf-8")
    list_fields.FILE.write_text(list_fields.text(), encoding="utf-8")
    for page in TABLES:
        (ROOT / page).write_text(filled(page), encoding="utf-8")


if __name__ == "__main__":
    main()
