"""A site starts FLARE behind its lock, and a FLARE that cannot be locked down not at all."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("nvflare", reason="NVIDIA FLARE is not installed: pip install -e '.[deploy]'")

from nvflare.app_common.widgets.component_path_authorizer import ComponentPathAuthorizer
from nvflare.fuel.f3 import drivers
from nvflare.fuel.f3.drivers.driver_manager import DriverManager
from nvflare.fuel.f3.drivers.tcp_driver import TcpDriver
from nvflare.fuel.sec.authz import AuthorizationService
from nvflare.private.fed.client import fed_client_base
from nvflare.private.fed.client.admin import FedAdminAgent
from nvflare.private.fed.client.client_req_processors import ClientRequestProcessors

from fedshift.deploy.flare import kit_checks, lockdown
from fedshift.deploy.flare.dialling import DiallingTcpDriver
from fedshift.deploy.flare.lockdown import CLIENT, JOB, MODULE, Unlockable, lock_down
from fedshift.deploy.flare.service import Service
from fedshift.errors import UserError


@pytest.mark.threat("other_flare")
@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (FedAdminAgent, "_dispatch_request"),
        (ClientRequestProcessors, "request_processors"),
        (AuthorizationService, "authorize"),
        (ComponentPathAuthorizer, "_job_has_byoc"),
        (fed_client_base, "NetAgent"),
    ],
)
def test_a_flare_with_other_insides_is_not_started(
    owner: Any, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delattr(owner, name)
    replaced: list[Any] = []
    with pytest.raises(Unlockable, match="cannot be locked down"):
        lock_down(lambda *change: replaced.append(change))
    assert not replaced
    ends_in_one_line(monkeypatch, capsys, JOB, "cannot be locked down")


@pytest.mark.threat("other_flare")
def test_another_version_of_flare_is_not_started(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("nvflare.__version__", "2.10.0")
    ends_in_one_line(monkeypatch, capsys, JOB, "cannot be locked down")


def test_a_site_dials_with_our_driver_whatever_flare_registers_afterwards() -> None:
    manager = DriverManager()
    lockdown.dial_with_ours(manager)
    manager.search_folder(str(Path(drivers.__file__).parent), drivers.__package__)
    assert {manager.find_driver_class(f"{scheme}://x:1") for scheme in ("tcp", "stcp")} == {DiallingTcpDriver}
    assert manager.find_driver_class("grpc://x:1") is not None
    late = DriverManager()
    late.register(TcpDriver)
    with pytest.raises(Unlockable, match="another driver"):
        lockdown.dial_with_ours(late)


def test_only_the_two_processes_of_a_site_are_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ends_in_one_line(monkeypatch, capsys, "http.server", "none of FLARE's processes")


@pytest.mark.slow
def test_a_service_does_not_start_again_what_cannot_be_locked_down(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    kit = SimpleNamespace(role="site", name="north", folder=tmp_path, flare=tmp_path / "flare")
    service = Service(kit, tick=0.01)  # type: ignore[arg-type]
    monkeypatch.setattr(kit_checks, "check_certificates", lambda _: None)
    monkeypatch.setattr(kit_checks, "check_launcher", lambda _: None)
    monkeypatch.setattr(kit_checks, "check_reachable", lambda *_: "")
    started: list[list[str]] = []

    def start(self: Service) -> None:
        started.append([])
        self.child = subprocess.Popen([sys.executable, "-m", MODULE], stderr=subprocess.DEVNULL, text=True)

    monkeypatch.setattr(Service, "_start_child", start)
    with pytest.raises(UserError, match="cannot be locked down"):
        service.run()
    assert len(started) == 1


def test_a_site_starts_flare_behind_the_lock(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    kit = SimpleNamespace(role="site", name="north", folder=tmp_path, flare=tmp_path / "flare")
    commands: list[list[str]] = []

    def popen(command: list[str], **_: Any) -> Any:
        commands.append(command)
        return SimpleNamespace(pid=1, stdout=[])

    monkeypatch.setattr(subprocess, "Popen", popen)
    Service(kit)._start_child()  # type: ignore[arg-type]
    assert commands[0][1:5] == ["-u", "-m", MODULE, CLIENT]
    # By these two a service finds what an earlier one left behind.
    assert str(kit.flare) in commands[0]
    assert CLIENT.startswith("nvflare.private")
    assert JOB.startswith("nvflare.private")


def ends_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], module: str, message: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["lockdown", module])
    monkeypatch.setattr(lockdown.runpy, "run_module", lambda *_, **__: pytest.fail("it was started"))
    with pytest.raises(SystemExit) as raised:
        lockdown.main()
    assert raised.value.code == 2
    output = capsys.readouterr().err
    assert message in output
    assert output.count("\n") == 1
