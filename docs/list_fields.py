"""Write ``known_fields.json``: the fields of an experiment file, which are checked before torch is imported.

`python docs/list_methods.py` writes it with the other lists; `tests/experiment/config/test_known_fields.py` compares.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from fedshift.data import registry as data_sets
from fedshift.experiment.config.engine_section import ENGINES
from fedshift.experiment.config.error_messages import section_in
from fedshift.experiment.config.experiment import Experiment
from fedshift.experiment.protocols.index import PROTOCOLS
from fedshift.methods import registry as methods
from fedshift.methods.composition.training_changes import OF_THE_EXPERIMENT, TrainingChanges
from fedshift.methods.symbols import symbols_in_words, symbols_of
from fedshift.models import registry as networks

FILE = Path(__file__).resolve().parents[1] / "src" / "fedshift" / "experiment" / "config" / "known_fields.json"


def text() -> str:
    """The text of the file."""
    kinds: dict[str, Any] = {}
    whole = {
        "experiment": list(Experiment.model_fields),
        "sections": {
            name: _number(kind, kinds)
            for name, field in Experiment.model_fields.items()
            if (kind := section_in(field.annotation)) is not None and name not in ("data", "model", "methods")
        },
        "named": {
            "data": {name: _number(data_sets.source_class(name), kinds) for name in data_sets.names()},
            "model": {name: _number(networks.options_class(name), kinds) for name in networks.names()},
            "methods": {name: _number(methods.method_class(name), kinds) for name in methods.names()},
            "protocol": {name: _number(kind, kinds) for name, kind in PROTOCOLS.items()},
            "engine": {name: _number(kind, kinds) for name, kind in ENGINES.items()},
        },
        "kinds": [kind for _, kind in sorted(kinds.values(), key=lambda pair: pair[0])],
    }
    return (
        json.dumps(whole, indent=None, ensure_ascii=False, separators=(",", ":")).replace('{"fields"', '\n{"fields"')
        + "\n"
    )


def _number(kind: type[BaseModel], kinds: dict[str, Any]) -> int:
    """The number of a class of fields; classes of the same fields are one."""
    fields = {name: section_in(info.annotation) for name, info in kind.model_fields.items()}
    about: dict[str, Any] = {
        "fields": {
            name: None if inner is None or _is_open(inner) or _of_many(kind, name) else _number(inner, kinds)
            for name, inner in fields.items()
        }
    }
    about |= {"symbols": list(symbols_of(kind)), "in_words": symbols_in_words(kind)} if symbols_of(kind) else {}
    about |= {"told_elsewhere": list(OF_THE_EXPERIMENT)} if kind is TrainingChanges else {}
    written = json.dumps(about)
    return int(kinds.setdefault(written, (len(kinds), about))[0])


def _of_many(kind: type[BaseModel], name: str) -> bool:
    """Whether a field maps names of the user's own to sections."""
    annotation: Any = kind.model_fields[name].annotation
    return getattr(annotation, "__origin__", None) in (dict, Mapping)


def _is_open(kind: type[BaseModel]) -> bool:
    """Whether a class says not itself which fields there are: a base, or one that takes any."""
    return kind.model_config.get("extra") != "forbid" or set(kind.model_fields) <= {"name"}
