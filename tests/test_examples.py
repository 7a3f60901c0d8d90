"""The examples in docstrings run, and every public function of functional/, evaluation/ and the API has one."""

from __future__ import annotations

import doctest
import importlib
import inspect
import pkgutil
from pathlib import Path

import pytest

import fedshift
import fedshift.evaluation
import fedshift.functional

SINGLE = ("fedshift.api", "fedshift.weights", "fedshift.errors", "fedshift.files", "fedshift.import_paths")
MODULES = [
    *SINGLE,
    *(
        module.name
        for package in (fedshift.functional, fedshift.evaluation)
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    ),
]


ROOT = Path(fedshift.__file__).parent
WITH_EXAMPLES = [
    ".".join(("fedshift", *file.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")
    for file in sorted(ROOT.rglob("*.py"))
    if ">>> " in file.read_text(encoding="utf-8")
]
NEEDED = {"fedshift.functional.differential_privacy": "opacus"}
"""Packages of extras that a module's examples use."""


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_examples(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    if name in NEEDED:
        pytest.importorskip(NEEDED[name])
    found = doctest.testmod(importlib.import_module(name))
    assert not found.failed, capsys.readouterr().out


@pytest.mark.parametrize("name", MODULES)
def test_every_public_function_has_an_example(name: str) -> None:
    module = importlib.import_module(name)
    functions = [
        function
        for called, function in inspect.getmembers(module, inspect.isroutine)
        if function.__module__ == name and not called.startswith("_")
    ]
    without = [function.__name__ for function in functions if "Example:\n" not in (function.__doc__ or "")]
    assert without == []
