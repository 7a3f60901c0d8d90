"""What lies in examples/deploy: units, containers, a chart, a SITE.yaml; what can be tried without their programs."""

from __future__ import annotations

import http.client
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from calling import Cli

ROOT = Path(__file__).resolve().parents[3]
UNITS = sorted((ROOT / "examples" / "deploy").glob("*.service"))
EXAMPLES = ROOT / "examples" / "deploy"
DEPLOY = ROOT / "examples" / "deploy"
CONTAINERS = (ROOT / "Containerfile", DEPLOY / "Containerfile", DEPLOY / "predict" / "Containerfile")

pytestmark = pytest.mark.skipif(not UNITS, reason="examples/ is not beside these tests")


def command_of(text: str) -> list[str]:
    (line,) = re.findall(r"^ExecStart=(.*)$", text, flags=re.M)
    return shlex.split(line)


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_systemd_finds_nothing_wrong(unit: Path, tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("the command systemd-analyze is not there")
    text = unit.read_text(encoding="utf-8")
    (tmp_path / unit.name).write_text(text.replace(command_of(text)[0], "/bin/true"), encoding="utf-8")
    process = subprocess.run(
        ["systemd-analyze", "verify", str(tmp_path / unit.name)], capture_output=True, text=True, timeout=60
    )
    assert (process.returncode, process.stdout + process.stderr) == (0, "")


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_the_command_of_a_unit_is_one_of_ours(unit: Path, cli: Cli) -> None:
    pytest.importorskip("nvflare", reason="NVIDIA FLARE is not installed: pip install -e '.[deploy]'")
    text = unit.read_text(encoding="utf-8")
    program, *words = command_of(text)
    assert Path(program).name == "fedshift"
    assert "/srv/fedshift" in cli(*words).error()  # understood, and there is no such kit here
    (writable,) = re.findall(r"^ReadWritePaths=(.*)$", text, flags=re.M)
    assert any(word.startswith(writable) for word in words)


@pytest.mark.parametrize("file", CONTAINERS, ids=lambda file: file.parent.name)
def test_the_container_takes_the_package_and_nothing_that_lies_beside_it(file: Path) -> None:
    """Kits and data in the folder must not get into a layer, where deleting them later leaves them."""
    lines = file.read_text(encoding="utf-8").splitlines()
    sources = [word for line in lines if line.startswith("COPY ") for word in line.split()[1:-1]]
    assert sorted(sources) == ["README.md", "constraints.txt", "pyproject.toml", "src"]
    assert all((ROOT / source).exists() for source in sources)
    assert lines.index("USER fedshift") > max(number for number, line in enumerate(lines) if line.startswith("RUN "))


def test_a_site_of_twelve_lines_is_watched_logged_proxied_and_agreed_to_by_two(tmp_path: Path) -> None:
    """The example as it is, but for the ports of this test."""
    pytest.importorskip("nvflare", reason="NVIDIA FLARE is not installed: pip install -e '.[deploy]'")
    for package in ("prometheus_client", "opentelemetry.exporter.otlp.proto.http"):
        pytest.importorskip(package, reason="not installed: pip install -e '.[monitoring]'")
    from test_sinks import Collector

    from fedshift.deploy.chained_log import append_line
    from fedshift.deploy.flare import roles
    from fedshift.deploy.flare.kits import Kit, Project
    from fedshift.deploy.flare.service import Service
    from fedshift.deploy.site_file import load_site

    text, port, collector = (EXAMPLES / "SITE.yaml").read_text(encoding="utf-8"), roles.free_port(), Collector()
    assert len(text.splitlines()) <= 12
    file = tmp_path / "SITE.yaml"
    file.write_text(text.replace("9464", str(port)).replace("http://127.0.0.1:4318/v1/logs", collector.url))
    policy = load_site(file).file.policy
    assert (policy.approvals, list(policy.approvers)) == (2, ["ana", "ben"])
    options = {"name": "p", "contact": "a@example.org", "server": "fl.example.org", "sites": ("north",)}
    service = Service(Kit(tmp_path, "site", "north", Project.model_validate(options)), file)
    assert service._proxy == "http://proxy.north.example.org:3128"
    (tmp_path / "memory").mkdir()
    append_line(tmp_path / "memory" / "audit.jsonl", {"do": "hello"})
    monitor, forwarding = service._monitor(), service._forward_logs()
    assert monitor is not None
    assert forwarding is not None
    way = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    way.request("GET", "/metrics")
    assert 'fedshift_requests_total{do="hello",outcome="answered"} 1.0' in way.getresponse().read().decode()
    way.request("GET", "/healthz")
    assert json.loads(way.getresponse().read())["state"] == "starting"
    way.close()
    service.stopping.set()
    forwarding.join(timeout=10)
    monitor.shutdown()
    monitor.server_close()
    collector.server.shutdown()
    collector.server.server_close()
    assert json.loads(collector.got[0]["line"])["do"] == "hello"


@pytest.mark.slow
def test_the_compose_file_is_one(cli: Cli) -> None:
    """By Compose's own schema; its command is one of ours, and its probe asks the port of the example."""
    pytest.importorskip("check_jsonschema", reason="check-jsonschema is not installed")
    file = EXAMPLES / "compose.yaml"
    words = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", str(file)]
    process = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert process.returncode == 0, process.stdout
    site = yaml.safe_load(file.read_text(encoding="utf-8"))["services"]["site"]
    assert "/kit" in cli(*site["command"]).error()
    assert str(yaml.safe_load((EXAMPLES / "SITE.yaml").read_text())["monitor"]) in site["healthcheck"]["test"][-1]


@pytest.mark.parametrize("values", [{}, {"role": "coordinator", "kit": "k"}, {"monitor": 0, "data": ""}])
def test_the_chart_makes_what_kubernetes_takes(values: dict[str, Any], cli: Cli) -> None:
    """By Helm's own code, and by the schemas of Kubernetes; make chart installs both."""
    helm = pytest.importorskip("helm_python", reason="helm-python-sdk is not installed: make chart")
    schemas = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed: make chart")
    lint = helm.lint(str(EXAMPLES / "chart"), values, strict=True)
    assert (lint["errors"], lint["messages"]) == ([], [])
    with helm.Chart.load(str(EXAMPLES / "chart")) as chart:
        made = [
            manifest
            for text in chart.render(values=values, name="north").values()
            for manifest in yaml.safe_load_all(text)
        ]
        with pytest.raises(helm.HelmError):
            chart.render(values={"role": "pigeon"}, name="north")
    assert [manifest["kind"] for manifest in made] == ["StatefulSet", "Service", "NetworkPolicy"]
    for manifest in made:
        schemas.validate(manifest, schemas.latest_version(), strict=True)
    (container,) = made[0]["spec"]["template"]["spec"]["containers"]
    assert "/kit" in cli(*container["args"]).error()
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert ("readinessProbe" in container) == (values.get("monitor") != 0)
    assert bool(made[2]["spec"]["ingress"]) == (values.get("role") == "coordinator")
