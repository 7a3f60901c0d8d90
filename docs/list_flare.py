"""What our code touches of NVIDIA FLARE, and whether FLARE tells users to: the table of docs/flare.md.

python docs/list_flare.py                       # writes it, with what is private or replaced; a test compares
python docs/list_flare.py src/fedshift/deploy   # prints all
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE, PAGE = ROOT / "src" / "fedshift" / "deploy", ROOT / "docs" / "flare.md"
BEGIN, END = "<!-- python docs/list_flare.py -->\n", "<!-- end -->"
# What FLARE's examples and documentation have users import: NVIDIA/NVFlare @ f3b7c1bf, examples/, docs/.
PUBLIC = ("apis", "app_common", "app_opt", "client", "collab", "fuel.flare_api", "job_config", "lighter", "recipe")
# docs/user_guide/admin_guide/configurations/communication_configuration.rst: drivers of one's own.
DRIVER = ("fuel.f3.comm_error", "fuel.f3.drivers")
# docs/system_architecture/system_architecture.rst: with what a server and a client run.
COMMANDS = ("private.fed.app.server.server_train", "private.fed.app.client.client_train")
_FRAGILE = ("private", "replaced")
KINDS = ("public", "drivers", "command", "private", "replaced")
_NAME = re.compile(r"nvflare\.(\w+(?:\.\w+)+)")


@dataclass(frozen=True, order=True)
class Touch:
    """A name of FLARE's that a file of ours uses."""

    kind: str
    file: str
    name: str


def kind_of(module: str, name: str = "") -> str:
    """Of which kind a name is; ``module`` without ``nvflare.``."""

    def within(packages: tuple[str, ...]) -> bool:
        return any(module == package or module.startswith(f"{package}.") for package in packages)

    if module in COMMANDS:
        return "command"
    if name.startswith("_"):
        return "private"
    return "public" if within(PUBLIC) else "drivers" if within(DRIVER) else "private"


def touches(source: Path = SOURCE) -> list[Touch]:
    """Every name of FLARE's that a file below ``source`` uses, once per file."""
    found = {touch for path in source.rglob("*.py") for touch in _touches_of(path, path.relative_to(source).as_posix())}
    return sorted(found)


def _touches_of(path: Path, file: str) -> Iterator[Touch]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("nvflare."):
            module = node.module.removeprefix("nvflare.")
            for alias in node.names:
                yield Touch(kind_of(module, alias.name), file, alias.name)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and (text := _NAME.fullmatch(node.value)):
            yield Touch(kind_of(text[1]), file, text[1].rpartition(".")[2])
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "_module":
            module = str(ast.literal_eval(node.args[0]))
            yield Touch(kind_of(module), file, module)
        elif isinstance(node, ast.FunctionDef) and node.name == "_changes":
            yield from (Touch("replaced", file, name) for name in _replaced(node))


def _replaced(function: ast.FunctionDef) -> Iterator[str]:
    """What a function's list of ``(owner, name, value)`` replaces."""
    for node in ast.walk(function):
        if isinstance(node, ast.Return) and isinstance(node.value, ast.List):
            for one in node.value.elts:
                if isinstance(one, ast.Tuple) and isinstance(one.elts[1], ast.Constant):
                    yield str(one.elts[1].value)


def table(found: list[Touch], kinds: tuple[str, ...] = KINDS) -> str:
    """A row per kind, of ``kinds``, and file; the last counts all."""
    rows = sorted({(KINDS.index(one.kind), one.file) for one in found if one.kind in kinds})
    lines = ["| of FLARE | names | in |", "|---|---|---|"]
    for kind, file in rows:
        names = [one.name for one in found if (one.kind, one.file) == (KINDS[kind], file)]
        lines.append(f"| {KINDS[kind]} | {', '.join(f'`{name}`' for name in names)} | `{file}` |")
    count = {kind: sum(one.kind == kind for one in found) for kind in KINDS}
    lines.append(f"| **in all** | {', '.join(f'{number} {kind}' for kind, number in count.items())} | |")
    return "\n".join(lines) + "\n"


def written(page: str) -> str:
    """The page with the table as it should be."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n{table(touches(), _FRAGILE)}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    if len(sys.argv) > 1:  # another checkout, to compare
        print(table(touches(Path(sys.argv[1]))))
    else:
        PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
