"""Our methods in a FLARE project of one's own: its simulator and its POC mode give the bits of the local engine."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from loopback import ADAPT, options_of
from nvflare.apis.signal import Signal
from nvflare.recipe import PocEnv, ProdEnv, SimEnv
from outcomes import one_line, same
from safetensors.torch import load_file
from site_yaml import site_file, write_data

import fedshift
from fedshift.deploy.flare import in_project, roles
from fedshift.deploy.flare.in_project import ProjectCoordinator, ProjectSite
from fedshift.deploy.flare.recipe import CLASSES, FedshiftRecipe
from fedshift.errors import UserError
from fedshift.experiment.config.experiment import parse

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
SITES = ["north", "south", "east"]
needs_examples = pytest.mark.skipif(not (EXAMPLES / "flare").is_dir(), reason="examples/ is not beside these tests")


def experiment(**engine: Any) -> dict[str, Any]:
    options = options_of({"name": "fedavg"}, name="study", protocol=ADAPT)
    return {**options, "data": {"name": "sites"}, "engine": {"name": "flare", "threads": 1, **engine}}


def job(folder: Path, recipe: FedshiftRecipe) -> tuple[dict[str, Any], dict[str, Any], set[str]]:
    recipe.export(str(folder))
    root = folder / recipe.name
    server = json.loads((root / "app_server/config/config_fed_server.json").read_text())
    site = json.loads((root / "app_north/config/config_fed_client.json").read_text())
    return server, site, {path.name for path in root.rglob("*") if path.is_file()}


def test_a_job_holds_settings_and_no_code(tmp_path: Path) -> None:
    server, site, files = job(tmp_path, FedshiftRecipe(experiment(quorum=2), SITES))
    assert files == {"meta.json", "config_fed_server.json", "config_fed_client.json"}
    meta = json.loads((tmp_path / "study" / "meta.json").read_text())
    assert meta["min_clients"] == 2
    assert sorted(name for names in meta["deploy_map"].values() for name in names) == sorted(["server", *SITES])
    (workflow,), (executor,) = server["workflows"], site["executors"]
    assert [workflow["path"], executor["executor"]["path"]] == [f"{CLASSES}ProjectCoordinator", f"{CLASSES}ProjectSite"]
    assert workflow["args"]["sites"] == SITES
    assert parse(workflow["args"]["experiment"]).dump() == parse(experiment(quorum=2)).dump()


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"engine": {"name": "flare", "aggregation": "secure"}}, "engine.aggregation: secure keeps models"),
        ({"engine": {"name": "flare", "routing": "sealed"}}, "engine.routing: sealed keeps models"),
        ({"engine": {}}, "engine.name: write engine: {name: flare}"),
        ({"data": {"name": "rotated_digits"}}, "data.name: rotated_digits lies on this machine"),
        ({"protocol": {"kind": "adapt_to_one", "targets": ["easd"]}}, "no site is called 'easd'.*east"),
    ],
    ids=["sums", "seals", "engine", "data", "name"],
)
def test_what_such_a_project_cannot_promise_is_refused_in_one_line(changes: dict[str, Any], line: str) -> None:
    with one_line(line):
        FedshiftRecipe({**experiment(), **changes}, SITES)


def test_the_simulator_may_build_our_classes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVFLARE_POC_WORKSPACE", str(tmp_path / "poc"))  # otherwise FLARE writes into the home folder
    recipe = FedshiftRecipe(experiment(), SITES)
    file = tmp_path / "study" / "local" / "resources.json"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps({"class_allow_list": ["mine."], "kept": 1}))
    for _ in range(2):
        recipe.process_env(SimEnv(clients=SITES, workspace_root=str(tmp_path)))
    assert json.loads(file.read_text()) == {"class_allow_list": ["mine.", CLASSES], "kept": 1}
    with pytest.raises(UserError, match="class_allow_list"):
        recipe.process_env(PocEnv(clients=SITES, num_clients=3))
    code = tmp_path / "my_method.py"
    code.write_text("")
    recipe.add_client_file(str(code))
    recipe.process_env(PocEnv(clients=SITES, num_clients=3))  # a job with code, which FLARE lets in by another right


class Context:
    """What FLARE tells its components."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder, name

    def get_identity_name(self) -> str:
        return self.name

    def get_job_id(self) -> str:
        return "job"

    def get_workspace(self) -> Any:
        return SimpleNamespace(
            get_site_config_dir=lambda: str(self.folder), get_run_dir=lambda job: str(self.folder / job)
        )

    def get_engine(self) -> Any:
        return SimpleNamespace(register_aux_message_handler=lambda topic, handler: None)


def test_a_site_and_not_the_job_says_where_its_file_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_data(tmp_path / "data", {"north": 41})["north"]
    written = site_file(tmp_path, "north", file)
    monkeypatch.delenv("FEDSHIFT_SITE", raising=False)
    context: Any = Context(written.parent, "north")
    assert ProjectSite().open(context).config.path == written
    with pytest.raises(UserError, match="it says 'north', and FLARE calls this site 'south'"):
        ProjectSite().open(Context(written.parent, "south"))
    monkeypatch.setenv("FEDSHIFT_SITE", str(tmp_path / "{site}" / "SITE.yaml"))
    elsewhere: Any = Context(tmp_path / "nowhere", "north")
    assert ProjectSite().open(elsewhere).config.path == written


def test_an_error_ends_the_job_with_its_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reasons: list[str] = []

    def refuse(*_: Any) -> None:
        raise UserError("site 'north' refuses 'weights'")

    monkeypatch.setattr(in_project, "coordinate", refuse)
    monkeypatch.setattr(ProjectCoordinator, "system_panic", lambda self, reason, fl_ctx: reasons.append(reason))
    ProjectCoordinator({"name": "study"}, SITES).control_flow(Signal(), Context(tmp_path, "server"))
    assert reasons == ["site 'north' refuses 'weights'"]
    assert reasons[0] in (tmp_path / "job" / "fedshift" / "progress.jsonl").read_text()


def models(root: Path) -> dict[str, torch.Tensor]:
    models = {path.relative_to(path.parents[3]): load_file(path) for path in root.rglob("model.safetensors")}
    assert {run.parts[0] for run in models} == {"fedavg", "csac"}
    return {f"{run} {name}": tensor for run, model in models.items() for name, tensor in model.items()}


def simulate_run(folder: Path) -> dict[str, torch.Tensor]:
    """The models of the example's experiment with the local engine, on the same tables."""
    options = yaml.safe_load((EXAMPLES / "flare" / "study.yaml").read_text(encoding="utf-8"))
    sites = {
        site: yaml.safe_load((EXAMPLES / "flare" / site / "SITE.yaml").read_text(encoding="utf-8")) for site in SITES
    }
    data = {**sites["north"]["data"], "sites": {site: EXAMPLES / "tables" / f"{site}.csv" for site in SITES}}
    fedshift.run({**options, "name": "study", "data": data, "engine": {"threads": 1}}, folder)
    return models(folder)


@pytest.mark.slow
@needs_examples
def test_the_example_runs_in_flares_simulator_with_the_bits_of_ours(tmp_path: Path) -> None:
    for name in ("flare", "tables"):
        shutil.copytree(EXAMPLES / name, tmp_path / name)
    (tmp_path / "run").mkdir()
    words = [sys.executable, str(tmp_path / "flare" / "job.py")]
    ended = subprocess.run(words, cwd=tmp_path / "run", capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-2000:]
    assert "| csac |" in ended.stdout
    assert same(models(tmp_path / "run"), simulate_run(tmp_path / "simulated"))
    for site in SITES:  # each has a log of its own
        assert '"measure"' in (tmp_path / "flare" / site / "memory" / "audit.jsonl").read_text()


@pytest.mark.slow
@needs_examples
def test_poc_mode_gives_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FLARE's own kits, one process a role; each site's file lies among its own FLARE settings."""
    workspace, poc = tmp_path / "poc", [sys.executable, "-m", "nvflare.cli", "poc"]
    monkeypatch.setenv("HOME", str(tmp_path))  # FLARE's command writes its settings there
    monkeypatch.setenv("NVFLARE_POC_WORKSPACE", str(workspace))
    monkeypatch.delenv("FEDSHIFT_SITE", raising=False)

    def call(*words: str) -> None:
        subprocess.run([*poc, *words], check=True, timeout=300, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    call("prepare", "-c", *SITES)
    project = yaml.safe_load((workspace / "project.yml").read_text())
    next(participant for participant in project["participants"] if participant["type"] == "server")[
        "fed_learn_port"
    ] = roles.free_port()
    (tmp_path / "project.yml").write_text(yaml.safe_dump(project))
    shutil.rmtree(workspace)
    call("prepare", "-i", str(tmp_path / "project.yml"), "--force")
    kits = workspace / "example_project" / "prod_00"
    for name in ("server", *SITES):
        settings = json.loads((kits / name / "local" / "resources.json.default").read_text())
        settings["class_allow_list"].append(CLASSES)
        (kits / name / "local" / "resources.json").write_text(json.dumps(settings))
    for name in SITES:
        options = yaml.safe_load((EXAMPLES / "flare" / name / "SITE.yaml").read_text(encoding="utf-8"))
        options["data"]["sites"] = {name: str(EXAMPLES / "tables" / f"{name}.csv")}
        (kits / name / "local" / "SITE.yaml").write_text(yaml.safe_dump(options))
    try:
        call("start")
        recipe = FedshiftRecipe(EXAMPLES / "flare" / "study.yaml", SITES)
        result = recipe.execute(ProdEnv(str(kits / "admin@nvidia.com"), login_timeout=60.0)).get_result(timeout=300)
    finally:
        call("stop")
    assert result is not None
    assert same(models(Path(result)), simulate_run(tmp_path / "simulated"))
