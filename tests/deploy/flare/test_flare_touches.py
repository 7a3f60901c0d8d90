"""What our code touches of FLARE is listed, and no more of it is private than there has to be."""

from __future__ import annotations

from pathlib import Path

import pytest

list_flare = pytest.importorskip("list_flare", reason="docs/ is not beside these tests")


def test_the_list_is_that_of_the_code() -> None:
    page = list_flare.PAGE.read_text(encoding="utf-8")
    assert page == list_flare.written(page), "run: python docs/list_flare.py"


def test_nothing_else_of_flare_is_replaced_or_private() -> None:
    """Every name here breaks with a release of FLARE that nobody announces: look for a public one first."""
    touches = list_flare.touches()
    assert sum(touch.kind == "replaced" for touch in touches) <= 6
    assert sum(touch.kind == "private" for touch in touches) <= 16
    assert {touch.file for touch in touches if touch.kind in ("private", "replaced")} == {
        "flare/drivers/guarded_tcp.py",
        "flare/drivers/shared_connection.py",
        "flare/lockdown.py",
    }


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("from nvflare.recipe import SimEnv", "public"),
        ("from nvflare.apis.impl.controller import _private", "private"),
        ("from nvflare.fuel.f3.drivers.base_driver import BaseDriver", "drivers"),
        ("from nvflare.fuel.sec.authz import Person", "private"),
        ("program = 'nvflare.private.fed.app.server.server_train'", "command"),
        ("_module('private.defs')", "private"),
        ("def _changes():\n    return [(owner, 'name', 1)]", "replaced"),
    ],
)
def test_every_way_to_touch_flare_is_seen(line: str, kind: str, tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text(line)
    (touch,) = list_flare.touches(tmp_path)
    assert (touch.kind, touch.file) == (kind, "code.py")
