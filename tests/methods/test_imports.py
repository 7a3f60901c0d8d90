"""The one import that the author of a method needs."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module

import pytest

from fedshift import methods


@pytest.mark.parametrize("name", methods.__all__)
def test_every_listed_name_is_there_and_is_the_one_that_the_package_uses(name: str) -> None:
    found = getattr(methods, name)
    assert getattr(import_module(found.__module__), name, found) is found
    assert name in dir(methods)


def test_type_checkers_and_programs_see_the_same_names() -> None:
    places = [name for names in methods._PLACES.values() for name in names]
    assert sorted(places) == sorted(methods.__all__)
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = methods.no_such_name


@pytest.mark.slow
def test_torch_and_the_methods_themselves_are_imported_on_demand() -> None:
    code = (
        "import sys, fedshift, fedshift.methods; assert not {'torch', 'sklearn', 'pandas'} & sys.modules.keys()\n"
        "from fedshift.methods import Method, State, Site, Update, trained_mean\n"
        "shipped = ('fedshift.methods.federated', 'fedshift.methods.pooled')\n"
        "assert not [name for name in sys.modules if name.startswith(shipped)]"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
