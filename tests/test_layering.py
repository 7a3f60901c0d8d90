"""The rooms of the package: who may import whom, no circles, names of files, and who knows protocols."""

from __future__ import annotations

import ast
import functools
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from fedshift.experiment.protocols.index import PROTOCOLS

SOURCE = Path(__file__).resolve().parents[1] / "src" / "fedshift"
FLOORS = (
    ("deploy",),
    ("cli", "__main__"),
    ("api", "estimator", ""),
    ("model", "report"),
    ("experiment",),
    ("methods",),
    ("federation", "onnx_model"),
    ("evaluation",),
    ("models",),
    ("data",),
    ("functional",),
    (
        "claims",
        "class_registry",
        "deploy_door",
        "digests",
        "encryption",
        "errors",
        "extras",
        "files",
        "import_paths",
        "json_objects",
        "section",
        "text",
        "trust",
        "version",
        "weights",
    ),
)
"""From the top to the bottom: a module imports from its own floor or from floors beneath it. "": the package itself."""
SAME_ROLE = ("__init__.py", "registry.py")
"""Names that say the same of each folder: its classes by name are in `registry.py`."""
SAME_SUBJECT = (
    *("__main__", "base", "index"),
    # a command and what it calls
    *("check", "estimate", "export", "features", "monitor", "predict", "search", "site"),
    # an equation and what uses it, or a feature and what it goes with
    *("cards", "exposure", "leakage", "membership", "mmd", "mixstyle", "new_site", "preparation", "site_scale"),
    *("averages", "styles"),
    # the same at a site, at the server or on the page
    *("choice", "estimates", "labelling", "metrics", "predictions"),
    # FLARE calls its jobs so, and `recipe` is a method
    "recipe",
)
"""Names of two files that are about the same; any other name is that of one file."""

FILES = sorted(path for path in SOURCE.rglob("*.py"))
MODULES = {
    path.relative_to(SOURCE).with_suffix("").as_posix().removesuffix("__init__").rstrip("/"): path for path in FILES
}
"""Every module by its path below the package, such as ``federation/site``; a package by its folder."""


@functools.cache
def trees() -> dict[str, ast.Module]:
    """Every module, parsed."""
    return {module: ast.parse(path.read_text(encoding="utf-8")) for module, path in MODULES.items()}


def floor_of(module: str) -> int:
    """The number of a module's floor, 0 at the top."""
    room = module.partition("/")[0]
    return next(number for number, rooms in enumerate(FLOORS) if room in rooms)


def imported(node: ast.AST) -> Iterator[str]:
    """The modules of this package that an import statement names."""
    names: list[str] = []
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, "imports are absolute"
        names = [f"{node.module}.{alias.name}" for alias in node.names]
    for name in names:
        parts = name.split(".")
        if parts[0] != "fedshift":
            continue
        for length in range(len(parts), 0, -1):
            module = "/".join(parts[1:length])
            if module in MODULES:
                yield module
                break


def circles(all_arrows: dict[str, set[str]]) -> list[list[str]]:
    """Groups of modules that import each other, directly or by way of others."""
    reached: dict[str, set[str]] = {}
    for module in all_arrows:
        seen: set[str] = set()
        open_ends = [module]
        while open_ends:
            for other in all_arrows[open_ends.pop()] - seen:
                seen.add(other)
                open_ends.append(other)
        reached[module] = seen
    groups = {tuple(sorted(o for o in reached[m] if m in reached[o])) for m in all_arrows if m in reached[m]}
    return [list(group) for group in sorted(groups)]


def test_every_room_has_a_floor() -> None:
    rooms = {module.partition("/")[0] for module in MODULES}
    assert rooms == {room for floor in FLOORS for room in floor}


def test_imports_run_down() -> None:
    upwards = [
        f"{module} imports {other}, which is above it"
        for module, tree in trees().items()
        for node in ast.walk(tree)
        for other in imported(node)
        if floor_of(other) < floor_of(module)
    ]
    assert upwards == []


@functools.cache
def arrows() -> dict[str, set[str]]:
    """For each module the modules that it imports, be it for types alone or in a function."""
    return {
        module: {other for node in ast.walk(tree) for other in imported(node) if other and other != module}
        for module, tree in trees().items()
        if module
    }


def inside(room: str, all_arrows: dict[str, set[str]]) -> dict[str, set[str]]:
    """The imports among the files and folders that lie directly in ``room``, a folder counted as one."""
    found: dict[str, set[str]] = {}
    for module, others in all_arrows.items():
        if module.startswith(f"{room}/"):
            name = module.removeprefix(f"{room}/").partition("/")[0]
            near = {o.removeprefix(f"{room}/").partition("/")[0] for o in others if o.startswith(f"{room}/")}
            found.setdefault(name, set()).update(near - {name})
    return found


def test_nothing_imports_itself_by_way_of_others() -> None:
    assert circles(arrows()) == []
    rooms = sorted({module.rpartition("/")[0] for module in MODULES if "/" in module})
    found = {room: circles(inside(room, arrows())) for room in rooms}
    assert {room: circle for room, circle in found.items() if circle} == {}


def test_circles_and_imports_are_found() -> None:
    """The tests above see what they look for."""
    through_a_folder = {
        "f/messages": {"f/replies/bounds"},
        "f/replies/bounds": set(),
        "f/replies/checks": {"f/messages"},
    }
    assert circles(through_a_folder) == []
    assert circles(inside("f", through_a_folder)) == [["messages", "replies"]]
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c"]]
    assert list(imported(ast.parse("from fedshift.federation import site, messages").body[0])) == [
        "federation/site",
        "federation/messages",
    ]
    assert list(imported(ast.parse("from fedshift.weights import Weights").body[0])) == ["weights"]


def test_the_library_knows_of_deployments_by_one_door() -> None:
    """No module outside `deploy/` imports it, also not by a name in a text: one module finds it, if it is there."""
    named = {
        module: node.lineno
        for module, tree in trees().items()
        if module.partition("/")[0] != "deploy"
        for node in ast.walk(tree)
        if (isinstance(node, ast.Constant) and str(node.value).startswith("fedshift.deploy"))
        or any(other.partition("/")[0] == "deploy" for other in imported(node))
    }
    assert set(named) == {"deploy_door"}


def test_two_files_of_one_name_are_about_the_same() -> None:
    counts = Counter(path.stem for path in FILES if path.name not in SAME_ROLE)
    assert {name: number for name, number in counts.items() if number > 2} == {}
    assert {name for name, number in counts.items() if number == 2} == set(SAME_SUBJECT)


def told_apart(tree: ast.AST) -> list[str]:
    """The places of a module that name a protocol's class, or compare its ``kind`` with a word."""
    kinds = set(PROTOCOLS)
    classes = {kind.__name__ for kind in PROTOCOLS.values()}
    asked = [
        node
        for call in ast.walk(tree)
        if isinstance(call, ast.Call) and ast.unparse(call.func) in ("isinstance", "issubclass")
        for node in ast.walk(call)
        if isinstance(node, ast.Name | ast.Attribute) and ast.unparse(node).rpartition(".")[2] in classes
    ]
    compared = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Compare | ast.MatchValue)
        for word in ast.walk(node)
        if isinstance(word, ast.Constant) and word.value in kinds
    ]
    return [f"line {node.lineno}: {ast.unparse(node)}" for node in (*asked, *compared)]


def test_only_a_protocol_knows_which_it_is() -> None:
    """All others ask it, so that a new protocol is one file and its place in the index."""
    also = {"functional/consensus_focus", "methods/federated/kd3a"}  # a rule of KD3A has the name of a protocol
    found = {
        module: places
        for module, tree in trees().items()
        if not module.startswith("experiment/protocols/") and module not in also and (places := told_apart(tree))
    }
    assert found == {}
    seen = "isinstance(p, (int, x.LeaveOneOut)) or p.kind == 'source_target' or p['kind'] in ('adapt_to_one', 'b')"
    assert len(told_apart(ast.parse(seen))) == 3
