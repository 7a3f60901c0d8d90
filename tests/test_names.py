"""Names say what a value is or a function does: none is one of five vague words, no function a bare participle."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[1] / "src" / "fedshift"
VAGUE = {"found", "one", "said", "place", "own"}
IRREGULAR = {
    "begun",
    "bought",
    "built",
    "chosen",
    "done",
    "drawn",
    "fed",
    "given",
    "gone",
    "held",
    "kept",
    "known",
    "laid",
    "led",
    "left",
    "lost",
    "made",
    "meant",
    "met",
    "paid",
    "put",
    "seen",
    "sent",
    "shown",
    "spent",
    "taken",
    "told",
    "won",
    "written",
}
NOT_PARTICIPLES = {"embed", "exceed", "feed", "need", "proceed", "seed", "shed", "speed"}
STATES = {"property", "cached_property"}
"""A property that describes a state may be a participle."""

ALLOWED = {
    "federation/site.py place": "documented for authors of methods, who call it; here it is a verb",
    "methods/federated/recipe_unlabelled.py own": "a part of the network: weights in stored models have its name",
    "methods/pooled/dger.py own": "a part of the network: weights in stored checkpoints have its name",
}


def is_participle(name: str) -> bool:
    """Whether a function's name is a participle and nothing else."""
    word = name.strip("_")
    return bool(re.fullmatch(r"[a-z]{3,}ed", word) and word not in NOT_PARTICIPLES) or word in IRREGULAR


def vague(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """The line and the name of every definition that says nothing."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                state = any(ast.unparse(decorator).split(".")[-1] in STATES for decorator in node.decorator_list)
                if name.strip("_") in VAGUE or (is_participle(name) and not state):
                    yield node.lineno, name
            case ast.arg(arg=name) | ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                if name.strip("_") in VAGUE:
                    yield node.lineno, name


@pytest.mark.parametrize(
    "room", sorted(path.name for path in SOURCE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists())
)
def test_names_say_something(room: str) -> None:
    root = SOURCE / room
    wrong = []
    for path in sorted(root.rglob("*.py")) if root.is_dir() else [root]:
        file = path.relative_to(SOURCE).as_posix()
        for line, name in vague(ast.parse(path.read_text(encoding="utf-8"))):
            if f"{file} {name}" not in ALLOWED:
                wrong.append(f"{file}:{line}: {name}")
    assert not wrong, "a name should say what the value is, a function's what it does:\n" + "\n".join(wrong)


def test_exceptions_are_needed_and_words_told_apart() -> None:
    names = {
        f"{path.relative_to(SOURCE).as_posix()} {name}"
        for path in SOURCE.rglob("*.py")
        for _, name in vague(ast.parse(path.read_text(encoding="utf-8")))
    }
    assert set(ALLOWED) <= names, f"nothing has these names: {sorted(set(ALLOWED) - names)}"
    source = "def measured(found):\n    own = [one for one in found]\n    def seed(rows): self.place = 1\n"
    assert sorted(vague(ast.parse(source))) == [(1, "found"), (1, "measured"), (2, "one"), (2, "own"), (3, "place")]
