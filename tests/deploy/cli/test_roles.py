"""``fedshift project``, ``site``, ``coordinator`` and ``deploy``: what they print, without a federation that runs."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import yaml
from calling import Cli as Command
from PIL import Image
from typer.testing import CliRunner

from fedshift.cli.app import app
from fedshift.data.domain import Domain
from fedshift.deploy.cli.play import spread
from fedshift.deploy.cli.site import _values
from fedshift.deploy.flare import roles
from fedshift.deploy.flare.deployment_folder import Deployment
from fedshift.deploy.remote.policy import AuditLog
from fedshift.deploy.secure.identity import Identity
from fedshift.errors import UserError
from fedshift.experiment.config.experiment import parse

Cli = Callable[..., tuple[int, str, str]]
Run = Callable[..., str]

INIT = ("--site", "north", "--site", "south", "--server", "localhost", "--contact", "a@example.org")


@pytest.fixture
def fedshift(cli: Command) -> Cli:
    """A command's exit code, output and errors."""

    def call(*arguments: object) -> tuple[int, str, str]:
        output = cli(*map(str, arguments))
        return output.code, output.out, output.err

    return call


@pytest.fixture
def prints(fedshift: Cli) -> Callable[..., str]:
    """What a command prints that ends well."""

    def call(*arguments: object) -> str:
        code, out, err = fedshift(*arguments)
        assert code == 0, err or out
        return out

    return call


@pytest.fixture
def mistake(fedshift: Cli) -> Callable[..., str]:
    """The line with which a command says what is wrong."""

    def call(*arguments: object) -> str:
        code, _, err = fedshift(*arguments)
        assert (code, len(err.strip().splitlines())) == (2, 1), err
        return err

    return call


@pytest.fixture(scope="module")
def provisioned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a project and its kits, of which each test has a copy: keys take long to make."""
    folder = tmp_path_factory.mktemp("provisioned")
    invoke = CliRunner().invoke
    assert invoke(app, ["project", "init", str(folder / "project.yaml"), *INIT]).exit_code == 0
    words = ["project", "provision", str(folder / "project.yaml"), "--out", str(folder / "kits"), "--no-passphrase"]
    assert invoke(app, words).exit_code == 0
    return folder


@pytest.fixture
def kits(provisioned: Path, tmp_path: Path) -> Path:
    """The folder of a provisioned project's kits."""
    shutil.copytree(provisioned, tmp_path, dirs_exist_ok=True)
    return tmp_path / "kits" / "federation"


def site_file(kits: Path, **changes: Any) -> Path:
    """North's SITE.yaml, with data beside it."""
    kit_folder = kits / "sites" / "north"
    draws = np.random.default_rng(0)
    np.savez(kit_folder / "data.npz", x=draws.normal(size=(24, 4)), y=np.arange(24) % 2)
    options = yaml.safe_load((kit_folder / "SITE.yaml").read_text())
    (kit_folder / "SITE.yaml").write_text(yaml.safe_dump({**options, "classes": ["well", "ill"], **changes}))
    return kit_folder / "SITE.yaml"


def test_init_writes_a_file_that_provisions(prints: Run, mistake: Run, tmp_path: Path) -> None:
    file = tmp_path / "project.yaml"
    assert "fedshift project provision" in prints("project", "init", file, *INIT, "--port", "9001")
    project = roles.load_project(file)
    assert (project.sites, project.port, project.server) == (("north", "south"), 9001, "localhost")
    assert "exists" in mistake("project", "init", file, *INIT)
    assert "two sites are called 'north'" in mistake("project", "init", tmp_path / "b.yaml", *INIT, "--site", "north")
    assert not (tmp_path / "b.yaml").exists()


@pytest.mark.case("stale kits", "provision after another port: each site's new kit.json is named")
def test_provision_says_who_needs_what(prints: Run, kits: Path) -> None:
    file = kits.parents[1] / "project.yaml"
    out = prints("project", "provision", file, "--out", kits.parent)
    assert all(word in out for word in ("site north", "unchanged", "secret"))
    file.write_text(file.read_text().replace("8002", "18742"))
    out = prints("project", "provision", file, "--out", kits.parent)
    for site in ("north", "south"):
        (line,) = [line for line in out.splitlines() if line.startswith(f"site {site}")]
        assert "port 8002 → 18742" in line
        assert str(kits / "sites" / site / "kit.json") in line
        assert roles.load_kit(kits / "sites" / site, "site").project.port == 18742
    assert "unchanged" not in out
    assert "localhost port 18742" in prints("site", "check", site_file(kits))


@pytest.mark.threat("copied_authority")
def test_the_authority_needs_a_passphrase_or_a_no(
    prints: Run, mistake: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, out = tmp_path / "project.yaml", ("--out", tmp_path / "kits")
    prints("project", "init", file, *INIT)
    err = mistake("project", "provision", file, *out)
    assert ("FEDSHIFT_PASSPHRASE" in err, "--no-passphrase" in err) == (True, True)
    assert not list(tmp_path.rglob("*.key"))
    monkeypatch.setenv("FEDSHIFT_PASSPHRASE", "correct horse battery")
    prints("project", "provision", file, *out)
    assert b"ENCRYPTED" in next(tmp_path.rglob("rootCA.key")).read_bytes()
    monkeypatch.delenv("FEDSHIFT_PASSPHRASE")
    err = mistake("project", "reissue", file, "north", *out)
    assert ("FEDSHIFT_PASSPHRASE" in err, "--no-passphrase" in err) == (True, False)


def test_a_kit_is_revoked_accepted_and_issued_again(prints: Run, mistake: Run, kits: Path) -> None:
    def revocations() -> dict[str, bool]:
        stored = json.loads((kits / "coordinator" / "certificates.json").read_text())
        return {site: stored[site]["revoked"] for site in ("north", "south")}

    kit = ("--kit", kits / "coordinator")
    prints("project", "revoke", "north", *kit)
    assert revocations() == {"north": True, "south": False}
    assert "unchanged" in prints("project", "revoke", "north", *kit)
    assert "revoked: north\n" in prints("coordinator", "status", *kit)
    prints("project", "accept", "north", *kit)
    assert "\nrevoked: " not in prints("coordinator", "status", *kit)
    assert revocations() == {"north": False, "south": False}
    assert "did you mean 'north'" in mistake("project", "revoke", "nroth", *kit)
    key = kits / "sites" / "north" / "flare" / "startup" / "client.key"
    before = key.read_bytes()
    prints("project", "reissue", kits.parents[1] / "project.yaml", "north", "--out", kits.parent)
    assert key.read_bytes() != before


@pytest.mark.case("revoked sites", "experiments that name a revoked or a removed site, before the coordinator runs")
@pytest.mark.case("revoked sites", "a site taken out by hand and put back is refused, and provision says so")
def test_a_site_that_is_removed_is_named_in_no_experiment(prints: Run, mistake: Run, kits: Path) -> None:
    file, kit, out = kits.parents[1] / "project.yaml", ("--kit", kits / "coordinator"), ("--out", kits.parent)
    prints("project", "revoke", "south", *kit)
    assert "accept south" in mistake("deploy", deployable(kits), *kit)
    output = prints("project", "provision", file, *out)
    assert [line for line in output.splitlines() if "revoked" in line and "accept south" in line]
    assert "accept north" not in output
    output = prints("project", "remove", file, "south", *out)
    assert roles.load_project(file).sites == ("north",)
    for part in ("certificates.json", "protocol.targets", "engine.quorum can be 1", str(kits / "sites" / "south")):
        assert part in output
    assert "removed" in mistake("deploy", deployable(kits), *kit)
    assert "revoked: " not in prints("coordinator", "status", *kit)
    assert "only site" in mistake("project", "remove", file, "north", *out)


def test_a_site_with_a_filter_of_flares_does_not_start(mistake: Run, kits: Path) -> None:
    file = site_file(kits)
    scopes = [{"name": "public", "task_result_filters": [{"name": "ExcludeVars", "args": {"exclude_vars": "x"}}]}]
    local = kits / "sites" / "north" / "flare" / "local"
    (local / "privacy.json").write_text(json.dumps({"scopes": scopes, "default_scope": "public"}))
    for command in ("start", "check"):
        err = mistake("site", command, file)
        assert ("ExcludeVars" in err, "policy.send" in err) == (True, True)


def test_site_check_says_what_leaves(prints: Run, kits: Path) -> None:
    file = site_file(kits, policy={"send": ["weights", "numbers"], "methods": ["fedavg", "csac"], "rounds_per_day": 9})
    out = prints("site", "check", file)
    never = out.partition("never leaves:")[2].splitlines()[0]
    assert ("raw_data" in never, "accuracy" in never) == (True, True)
    for line in (
        "24 samples of 4",
        "well 12, ill 12",
        "may leave: weights, numbers, masked, sealed; of at least 10 samples",
        "methods that can run: fedavg, csac; at most 9 rounds a day; at most 200 measurements a day",
        "models agreed to: none yet (rule policy.models: first)",
        "splits agreed to: none yet (rule policy.splits: 5)",
        "peers agreed to: none yet (rule policy.peers: first)",
        "secure aggregation: allowed; sums of at least 3 sites",
        f"certificate: {Identity.of_kit(kits / 'sites' / 'north', 'north').fingerprint}",
        "audit log: 0 lines, unbroken",
        "kit: project federation, valid until",
        "coordinator: cannot be reached: localhost port 8002",
    ):
        assert line in out


@pytest.mark.case("missing in a file", "site check: counted before cells are filled; codes and constants by name")
def test_site_check_says_what_is_missing_in_a_table(prints: Run, kits: Path) -> None:
    rows = ["age,chol,ca,sex,y"]
    for row in range(40):
        age, chol, ca = 40 + row, 0 if row < 10 else 200 + 3 * row, "" if row else "1"
        rows.append(f"{age},{chol},{ca},{'MF'[row % 2] if row > 1 else 'm'},{row % 2}")
    (kits / "sites" / "north" / "t.csv").write_text("\n".join(rows) + "\n")
    data = {"name": "table", "sites": {"north": "t.csv"}, "label": "y", "numeric": ["age", "chol", "ca"]}
    out = prints("site", "check", site_file(kits, data={**data, "categorical": ["sex"]}, classes=["0", "1"]))
    assert "missing in the file: ca 39 of 40; never changes: ca" in out
    assert "values: 0 missing" not in out
    assert "column 'chol' has 0 in 25 % of the rows of 'north'" in out
    assert "column 'ca' has no value, or almost none" in out


@pytest.mark.case("new kits", "a table by the lines that a new SITE.yaml has for it, uncommented")
def test_the_table_in_a_new_site_file_is_one(prints: Run, kits: Path) -> None:
    file = kits / "sites" / "north" / "SITE.yaml"
    lines = file.read_text().splitlines()
    begin = lines.index("# data:")
    end = next(index for index in range(begin + 1, len(lines)) if not lines[index].startswith("#   "))
    table = [line.removeprefix("# ") for line in lines[begin:end]]
    assert {"label", "id", "numeric", "categorical"} <= yaml.safe_load("\n".join(table))["data"].keys()
    rest = [line for line in lines[end:] if not line.startswith("  send:")]
    rest = [line.replace("  # send:", "  send:") for line in rest]
    file.write_text("\n".join(["site: north", "kit: .", *table, *rest]) + "\n")
    rows = [f"p{row},{40 + row},{120 + row % 7},{'fm'[row % 2]},{'ab'[row % 2]},{row % 2}" for row in range(60)]
    (file.parent / "patients.csv").write_text("\n".join(["patient,age,pressure,sex,ward,outcome", *rows]) + "\n")
    out = prints("site", "check", file)
    assert all(text in out for text in ("60 samples of 6", "categories of sex: f, m"))
    assert "statistics" in out.partition("may leave: ")[2].splitlines()[0]
    assert not any(text in out for text in ("p17", "it takes part in no experiment"))


@pytest.mark.case("files left out", "site check names them and what makes images dark, before anything leaves")
def test_site_check_says_what_is_left_out_of_images(prints: Run, kits: Path) -> None:
    folder = kits / "sites" / "north" / "photos" / "north"
    for label in ("well", "ill"):
        (folder / label / "old").mkdir(parents=True)
        for number in range(12):
            values = np.random.default_rng(number).integers(0, 4096, (8, 8), dtype=np.uint16)
            Image.fromarray(values).save(folder / label / f"{number}.png")
        for name in ("slide.svs", "old/a.png"):
            (folder / label / name).write_bytes(b"x")
    data = {"name": "image_folder", "root": "photos", "size": 8}
    out = prints("site", "check", site_file(kits, data=data, classes=["ill", "well"]))
    assert "2 in deeper folders (north/ill/old/a.png, north/well/old/a.png)" in out
    assert "2 of other kinds (north/ill/slide.svs, north/well/slide.svs)" in out
    assert "data.window" in out


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"site": "south"}, "'south'.*'north'"),
        ({"policy": {"send": ["wieghts"]}}, "unknown kind 'wieghts'; did you mean 'weights'"),
        ({"polcy": {}}, "polcy: there is no such field"),
        ({"classes": ["ill"]}, "classes|label"),
        ({"data": {"name": "arrays", "sites": {"north": "gone.npz"}}}, "gone.npz"),
        ({"data": "no-such"}, "unknown data set|mapping|like {name: value}"),
        ({"site": "../x"}, "letters, digits"),
    ],
)
def test_a_mistake_in_a_site_file_is_one_line(changes: Any, message: str, mistake: Run, kits: Path) -> None:
    err = mistake("site", "check", site_file(kits, **changes))
    assert re.search(message, err), err


def test_a_broken_audit_log_is_said_and_stops_the_start(fedshift: Cli, kits: Path) -> None:
    file = site_file(kits)
    log = AuditLog(file.parent / "memory" / "audit.jsonl")
    for number in (1, 2):
        log.append(do="call", run="r", round=number)
    log.path.write_text(log.path.read_text().replace('"round": 1', '"round": 7'))
    for code, _, err in (fedshift("site", "check", file), fedshift("site", "start", file)):
        assert (code, "line 1: the log was changed here" in err) == (2, True)


def test_roles_that_do_not_run(prints: Run, mistake: Run, kits: Path) -> None:
    kit, site = kits / "coordinator", kits / "sites" / "north"
    assert "coordinator: stopped" in prints("coordinator", "status", "--kit", kit)
    assert "not running" in prints("coordinator", "stop", "--kit", kit)
    assert "not running" in prints("site", "stop", site_file(kits))
    assert "no deployments" in prints("deploy", "status", "--kit", kit)
    assert "is the kit of a site" in mistake("coordinator", "status", "--kit", site)
    assert "coordinator" in mistake("coordinator", "start", "--kit", site)
    before = {file: file.read_bytes() for file in site.rglob("*") if file.is_file()}
    assert "are whole" in prints("site", "recover", site / "SITE.yaml", "--yes")
    assert {file: file.read_bytes() for file in before} == before


def deployable(folder: Path, **changes: Any) -> Path:
    file = folder / "study.yaml"
    options = {
        "data": {"name": "sites"},
        "protocol": {"targets": ["south"], "seeds": [0]},
        "model": {"name": "linear"},
        "methods": ["fedavg"],
        "engine": {"name": "flare"},
    }
    file.write_text(yaml.safe_dump({**options, **changes}))
    return file


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "fedshift coordinator start"),
        ({"engine": {"name": "local"}}, "engine: {name: flare}"),
        ({"engine": {"name": "flower"}}, "there is no engine 'flower'"),
        ({"engine": {"name": "flare", "wire": "int4"}}, "engine.wire"),
        ({"data": "rotated_digits"}, "lies on this machine"),
        ({"methods": ["deepall"]}, "all samples in one place"),
        ({"methods": ["examples/trimmed_mean.py:TrimmedMean"]}, "no code travels"),
    ],
)
def test_what_cannot_be_deployed_is_said(changes: dict[str, Any], message: str, fedshift: Cli, kits: Path) -> None:
    code, _, err = fedshift("deploy", deployable(kits, **changes), "--kit", kits / "coordinator")
    assert (code, message in err) == (2, True)


def test_a_deployed_experiment_is_not_run_here(mistake: Run, tmp_path: Path) -> None:
    assert "use fedshift deploy" in mistake("run", deployable(tmp_path), "--runs", tmp_path)
    assert "fedshift deploy" in mistake("check", deployable(tmp_path))


@pytest.mark.parametrize("content", [b"", b"no model", b"\x80\x04\x95"])
def test_what_is_no_sealed_model_is_not_opened(content: bytes, mistake: Run, kits: Path, tmp_path: Path) -> None:
    (tmp_path / "model.sealed").write_bytes(content)
    out = tmp_path / "model.safetensors"
    assert "model.sealed" in mistake("site", "open", tmp_path, site_file(kits), "--out", out)
    assert not out.exists()


def test_status_and_logs_of_a_deployment(prints: Run, mistake: Run, kits: Path) -> None:
    deployment, kit = Deployment(kits / "coordinator", "study"), ("--kit", kits / "coordinator")
    deployment.want("run")
    deployment.set_state("failed", message="site 'north' refuses (rule policy.methods: csac)", exit_code=2, request=1)
    deployment.record({"what": "round", "method": "fedavg", "target": "south", "seed": 0, "round": 3, "accuracy": 81.0})
    deployment.record({"what": "fit", "site": "north", "is": "lost", "reason": "no reply within 5 s", "round": 4})
    out = prints("deploy", "status", *kit)
    assert "study: failed, fedavg → south round 3 site 'north' refuses" in out
    assert "no reply" not in out, "it has ended"
    deployment.set_state("running", request=1)
    out = prints("deploy", "status", *kit)
    assert "study: running" in out
    assert [line for line in out.splitlines() if "north: lost" in line and "no reply within 5 s" in line]
    assert "reason=no reply within 5 s" in prints("deploy", "logs", "study", *kit)
    prints("deploy", "abort", "study", *kit)
    assert deployment.wanted["want"] == "abort"
    assert "did you mean 'study'" in mistake("deploy", "logs", "stduy", *kit)


def test_without_the_engine_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedshift.deploy.flare.kits.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"fedshift\[deploy\]"):
        roles.check_installed()


def test_try_spreads_data_so_that_each_site_has_its_own(tmp_path: Path) -> None:
    experiment = parse(
        {
            "data": {"name": "rotated_digits", "per_class": 6, "size": 8},
            "protocol": {"targets": ["D0"], "seeds": [0]},
            "model": "linear",
            "methods": ["fedavg"],
            "engine": {"aggregation": "secure"},
        }
    )
    deployed, sites = spread(experiment, tmp_path)
    assert (deployed.engine.aggregation, list(sites)) == ("secure", ["D15", "D30", "D45", "D60", "D75"])
    for name, options in sites.items():
        data: Any = options["data"]
        assert list(data["sites"]) == [name]
        with np.load(data["sites"][name]) as arrays:
            assert len(arrays["x"]) == 60
            assert "groups" in arrays
    assert json.loads(deployed.model_dump_json())["data"]["unseen"]["sites"].keys() == {"D0"}
    assert deployed.engine.name == "flare"


def test_columns_of_arrays_that_never_change_are_counted() -> None:
    inputs = np.arange(12, dtype=np.float32).reshape(4, 3)
    inputs[:, 1] = 5
    data = SimpleNamespace(columns={}, domains={"a": Domain("a", inputs, np.zeros(4, dtype=np.int64))})
    assert _values(cast(Any, data)) == "values: all are finite, 1 columns that never change"
