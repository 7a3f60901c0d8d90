"""How much a method is: members of the base class, and variables of the classes beside the one value of traits."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import fedshift.methods
from fedshift.methods.base import Method
from fedshift.methods.composition.options import Composed

LARGEST = 20
MOST_VARIABLES = 60


def members() -> set[str]:
    """What an author meets on a method: functions, properties and class variables, without the options.

    Options are fields of an experiment file, each with its description there; ``model_`` names are pydantic's.
    """
    given = {name for kind in (Method, Composed) for name in (*vars(kind), *inspect.get_annotations(kind))}
    return {name for name in given - set(Method.model_fields) if not name.startswith(("_", "model_"))}


def class_variables() -> list[str]:
    """Variables of the classes in ``fedshift.methods``, but for ``traits``, those of pydantic, and fields."""
    found = []
    for path in Path(fedshift.methods.__file__).parent.rglob("*.py"):
        for kind in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(kind, ast.ClassDef):
                plain = [node.targets for node in kind.body if isinstance(node, ast.Assign)]
                declared = [node for node in kind.body if isinstance(node, ast.AnnAssign)]
                names = [target.id for targets in plain for target in targets if isinstance(target, ast.Name)]
                names += [ast.unparse(node.target) for node in declared if "ClassVar" in ast.unparse(node.annotation)]
                found += [f"{kind.name}.{name}" for name in names if name not in ("traits", "model_config")]
    return found


def test_a_method_has_few_members() -> None:
    assert len(members()) <= LARGEST, sorted(members())


def test_what_is_fixed_for_a_class_stands_in_its_traits() -> None:
    variables = class_variables()
    assert len(variables) <= MOST_VARIABLES, variables
