"""Pages made from the code: methods, data sets, networks, commands, the sections of an experiment file."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
import sys
from collections.abc import Collection, Iterable
from typing import Any

import typer
from equations import CODE, described, prose_of
from pydantic import BaseModel
from typer.cli import get_docs_for_click

import fedshift.functional
from fedshift.cli.app import app
from fedshift.data import registry as datasets
from fedshift.data.transforms import Augmentation
from fedshift.experiment.config.engine_section import ENGINES
from fedshift.experiment.config.experiment import Evaluation, Experiment
from fedshift.experiment.protocols.index import PROTOCOLS
from fedshift.federation.training import Privacy, Training
from fedshift.methods import registry as methods
from fedshift.methods.base import Method
from fedshift.methods.composition.averages import AVERAGES
from fedshift.methods.composition.local import PLUG_INS
from fedshift.methods.index import ENTRIES, GROUPS, of_group
from fedshift.methods.robust import RULES
from fedshift.methods.server import OPTIMIZERS
from fedshift.models import registry as models
from fedshift.models.adapters import Adapters
from fedshift.text import yaml_value


def method_page(name: str, results: str) -> str:
    """A method: where it is from, what leaves a site, its docstring with its equations, options, measured results."""
    kind, entry = methods.method_class(name), ENTRIES[name]
    common = Method.model_fields.keys() & kind.model_fields.keys()
    with_it = {"robust": bool(entry.rules), "server": entry.server, "local": entry.local}
    also = [what for what, goes in with_it.items() if goes]
    sealed = f" (with `engine.routing: sealed` {entry.reads_sealed})" if entry.reads_sealed else ""
    lines = [
        f"# {name}",
        f"{entry.citation}. {literal(entry.advice)}",
        f"* Scenario: {entry.scenario}",
        f"* Leaves a site: {', '.join(entry.shares)}; the server reads: {entry.reads}{sealed}",
        f"* Goes with: {', '.join(f'`{one}`' for one in also) or 'none of robust, server, local'}",
        f"* Settings: {', '.join(f'`{one}`' for one in ('paper', *entry.settings))}",
        "",
        "## Description",
        described(sys.modules[kind.__module__].__doc__ or ""),
    ]
    if own := kind.model_fields.keys() - common:
        lines += ["## Options of its own", fields(kind, without=common)]
    lines += ["## Options of every method", fields(kind, without=own)]
    lines += ["## Measured", results or "No committed result has this method."]
    return "\n\n".join(lines).replace("\n\n* ", "\n* ").replace("\n* Scenario", "\n\n* Scenario")


def methods_index() -> str:
    """The methods by group, with what each is for."""
    parts = ["# Methods", "What each is for, and the page with its equations, options and results."]
    for group, title in GROUPS.items():
        members = of_group(group)
        parts.append(f"## {title[0].upper()}{title[1:]}")
        parts.append("\n".join(f"* [{name}]({name}.md): {literal(ENTRIES[name].advice)}" for name in members))
        parts.append(tree(members, title.partition(":")[0].capitalize()))
    return "\n\n".join(parts)


def dataset_page(name: str) -> str:
    """A data set: its manifest and its options."""
    source = datasets.source_class(name)
    about = source.manifest()
    facts = {
        "Source": about.source,
        "Licence": about.licence,
        "How to get it": about.how_to_get,
        "Layout": about.layout,
        "Notes": about.notes,
        "Samples": ", ".join(f"{domain} {count}" for domain, count in about.counts.items()),
    }
    more = ", …" if any(info.is_required() for info in source.model_fields.values()) else ""
    lines = [
        f"# {name}",
        f"{literal(about.title)}. In an experiment file: `data: {{name: {name}{more}}}`.",
        *(f"**{what}:** {literal(text)}" for what, text in facts.items() if text),
    ]
    if about.sha256:
        sums = "\n".join(f"* `{file}`: `{checksum}`" for file, checksum in about.sha256.items())
        lines += ["## Files and their SHA-256", sums]
    return "\n\n".join([*lines, "## Options", fields(source, without=("name",))])


def datasets_index() -> str:
    """The data sets with their licences."""
    rows = ["| name | data set | licence |", "|---|---|---|"]
    for name in datasets.names():
        about = datasets.source_class(name).manifest()
        rows.append(f"| [{name}]({name}.md) | {cell(about.title)} | {cell(about.licence)} |")
    return "\n\n".join(["# Data sets", "\n".join(rows), tree(datasets.names())])


def networks() -> str:
    """Every network with its options."""
    parts = ["# Networks"]
    for name in models.names():
        kind = models.options_class(name)
        parts += [f"## {name}", described(inspect.getdoc(kind) or ""), fields(kind, without=("name",))]
    return "\n\n".join(parts)


def experiment_file() -> str:
    """Every section of an experiment file."""
    kinds: dict[str, type[BaseModel]] = {
        "The file": Experiment,
        **{f"protocol, kind {name}": kind for name, kind in PROTOCOLS.items()},
        "training": Training,
        "training.augmentation": Augmentation,
        "training.privacy": Privacy,
        "training.adapters": Adapters,
        **{f"engine, name {name}": kind for name, kind in ENGINES.items()},
        "evaluation": Evaluation,
        **{f"a method's server, optimizer {name}": kind for name, kind in OPTIMIZERS.items()},
        **{f"a method's average, kind {name}": kind for name, kind in AVERAGES.items()},
        **{f"a method's local, name {name}": kind for name, kind in PLUG_INS.items()},
        **{f"a method's robust, rule {name}": kind for name, kind in RULES.items()},
    }
    parts = [
        "# Experiment file",
        "The fields of `data` are on the page of each [data set](../datasets/index.md), those of `methods` on "
        "the page of each [method](../methods/index.md), those of `model` on the page of [networks](networks.md).",
    ]
    for title, kind in kinds.items():
        parts += [f"## {title}", fields(kind)]
    return "\n\n".join(parts)


def command_line() -> str:
    """Every command with its arguments and options, as ``--help`` has them."""
    command = typer.main.get_command(app)
    _give_whole_sentences(command)
    text = get_docs_for_click(obj=command, ctx=typer.Context(command, info_name="fedshift"), name="fedshift")
    return "# Command line\n\n" + text.partition("\n")[2].replace("```console", "```text").replace("<", "&lt;")


def _give_whole_sentences(command: Any) -> None:
    """Have lists of commands show the first sentence of each one's help, which click would cut off."""
    command.short_help = re.split(r"(?<=\.)\s", command.help or "")[0].replace("\n", " ")
    for member in getattr(command, "commands", {}).values():
        _give_whole_sentences(member)


def functional() -> str:
    """One section per module of equations."""
    parts = ["# fedshift.functional", "One pure function per equation."]
    for found in pkgutil.iter_modules(fedshift.functional.__path__):
        name = f"fedshift.functional.{found.name}"
        importlib.import_module(name)
        parts.append(f"## {found.name}\n\n```{{eval-rst}}\n.. automodule:: {name}\n   :members:\n```")
    return "\n\n".join(parts)


def fields(kind: type[BaseModel], without: Collection[str] = ()) -> str:
    """The fields of a model as a table: name, default, meaning."""
    rows = ["| field | default | meaning |", "|---|---|---|"]
    for name, info in kind.model_fields.items():
        if name not in without:
            default = info.get_default(call_default_factory=True)
            section = isinstance(default, BaseModel)  # which has a table of its own
            value = "required" if info.is_required() else "its defaults" if section else yaml_value(default)
            if (kind, name) == (Experiment, "name"):
                value = "the file's name"
            rows.append(f"| `{name}` | {cell(value)} | {meaning(info.description or '')} |")
    return "\n".join(rows) if len(rows) > 2 else "No options."


def meaning(description: str) -> str:
    """A description for a cell of a table, its symbols typeset; a bar would end the cell, also in backticks."""
    parts = CODE.split(prose_of(description.replace("\n", " ")))
    return "".join(part.replace("|", "\\|") if part.startswith("`") else part for part in parts)


def tree(names: Iterable[str], caption: str = "") -> str:
    """A hidden table of contents, which gives the pages their place in the site."""
    return (
        "```{toctree}\n:hidden:\n" + (f":caption: {caption}\n" if caption else "") + "\n" + "\n".join(names) + "\n```"
    )


def literal(text: str) -> str:
    """``text`` without a meaning as markup, except for its words in backticks. Options of commands get backticks."""
    parts = re.sub(r"(?<![\w`-])(--[a-z][a-z-]*)(?!`)", r"`\1`", text).split("`")
    for place in range(0, len(parts), 2):
        parts[place] = "".join(f"\\{letter}" if letter in "\\*_[]<>|#$" else letter for letter in parts[place])
    return "`".join(parts)


def cell(text: str) -> str:
    """``text`` for a cell of a table, where a bar would end the cell, also in backticks."""
    parts = literal(text).replace("\n", " ").split("`")
    return "`".join(part.replace("|", "\\|") if place % 2 else part for place, part in enumerate(parts))
