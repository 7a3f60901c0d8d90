"""``fedshift project``, ``site``, ``coordinator`` and ``deploy``: what they print, without a federation that runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import yaml
from calling import Cli as Command
from PIL import Image

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

pytest.importorskip("nvflare", reason="NVIDIA FLARE is not installed: pip install -e '.[deploy]'")

INIT = ("--site", "north", "--site", "south", "--server", "localhost", "--contact", "a@example.org")


@pytest.fixture
def fedshift(cli: Command) -> Cli:
    """A command's exit code, output and errors."""

    def call(*arguments: str) -> tuple[int, str, str]:
        output = cli(*arguments)
        return output.code, output.out, output.err

    return call


@pytest.fixture
def kits(fedshift: Cli, tmp_path: Path) -> Path:
    """The folder of a provisioned project's kits."""
    file = tmp_path / "project.yaml"
    assert fedshift("project", "init", str(file), *INIT)[0] == 0
    assert fedshift("project", "provision", str(file), "--out", str(tmp_path / "kits"), "--no-passphrase")[0] == 0
    return tmp_path / "kits" / "federation"


def site_file(kits: Path, **changes: Any) -> Path:
    """North's SITE.yaml, with data beside it."""
    kit_folder = kits / "sites" / "north"
    draws = np.random.default_rng(0)
    np.savez(kit_folder / "data.npz", x=draws.normal(size=(24, 4)), y=np.arange(24) % 2)
    options = yaml.safe_load((kit_folder / "SITE.yaml").read_text())
    (kit_folder / "SITE.yaml").write_text(yaml.safe_dump({**options, "classes": ["well", "ill"], **changes}))
    return kit_folder / "SITE.yaml"


def test_init_writes_a_file_that_provisions(fedshift: Cli, tmp_path: Path) -> None:
    file = tmp_path / "project.yaml"
    code, out, _ = fedshift("project", "init", str(file), *INIT, "--port", "9001")
    assert code == 0
    assert "fedshift project provision" in out
    project = roles.load_project(file)
    assert (project.sites, project.port, project.server) == (("north", "south"), 9001, "localhost")
    code, _, err = fedshift("project", "init", str(file), *INIT)
    assert (code, "exists" in err) == (2, True)
    code, _, err = fedshift("project", "init", str(tmp_path / "b.yaml"), *INIT, "--site", "north")
    assert (code, "two sites are called 'north'" in err) == (2, True)
    assert not (tmp_path / "b.yaml").exists()


def test_provision_says_what_to_do_with_kits(fedshift: Cli, kits: Path) -> None:
    code, out, _ = fedshift("project", "provision", str(kits.parents[1] / "project.yaml"), "--out", str(kits.parent))
    assert code == 0
    assert "site north" in out
    assert "unchanged" in out
    assert "secret" in out


@pytest.mark.case("stale kits", "provision after another port: each site's new kit.json is named")
def test_provision_says_who_needs_what_when_the_coordinator_moves(fedshift: Cli, kits: Path) -> None:
    file = kits.parents[1] / "project.yaml"
    file.write_text(file.read_text().replace("8002", "18742"))
    code, out, err = fedshift("project", "provision", str(file), "--out", str(kits.parent))
    assert code == 0, err
    for site in ("north", "south"):
        (line,) = [line for line in out.splitlines() if line.startswith(f"site {site}")]
        assert "port 8002 → 18742" in line
        assert str(kits / "sites" / site / "kit.json") in line
        assert roles.load_kit(kits / "sites" / site, "site").project.port == 18742
    assert "unchanged" not in out
    code, out, _ = fedshift("site", "check", str(site_file(kits)))
    assert "localhost port 18742" in out


@pytest.mark.threat("copied_authority")
def test_the_authority_needs_a_passphrase_or_a_decision(
    fedshift: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "project.yaml"
    assert fedshift("project", "init", str(file), *INIT)[0] == 0
    words = ("project", "provision", str(file), "--out", str(tmp_path / "kits"))
    code, _, err = fedshift(*words)
    assert (code, "FEDSHIFT_PASSPHRASE" in err, "--no-passphrase" in err) == (2, True, True)
    assert err.count("\n") == 1
    assert not list(tmp_path.rglob("*.key"))
    monkeypatch.setenv("FEDSHIFT_PASSPHRASE", "correct horse battery")
    assert fedshift(*words)[0] == 0
    assert b"ENCRYPTED" in next(tmp_path.rglob("rootCA.key")).read_bytes()
    monkeypatch.delenv("FEDSHIFT_PASSPHRASE")
    code, _, err = fedshift("project", "reissue", str(file), "north", "--out", str(tmp_path / "kits"))
    assert (code, "FEDSHIFT_PASSPHRASE" in err, "--no-passphrase" in err) == (2, True, False)


def test_a_kit_is_revoked_accepted_and_issued_again(fedshift: Cli, kits: Path) -> None:
    def revocations() -> dict[str, bool]:
        stored = json.loads((kits / "coordinator" / "certificates.json").read_text())
        return {site: stored[site]["revoked"] for site in ("north", "south")}

    kit = ("--kit", str(kits / "coordinator"))
    assert fedshift("project", "revoke", "north", *kit)[0] == 0
    assert revocations() == {"north": True, "south": False}
    assert "unchanged" in fedshift("project", "revoke", "north", *kit)[1]
    assert "revoked: north\n" in fedshift("coordinator", "status", *kit)[1]
    assert fedshift("project", "accept", "north", *kit)[0] == 0
    assert "\nrevoked: " not in fedshift("coordinator", "status", *kit)[1]
    assert revocations() == {"north": False, "south": False}
    code, _, err = fedshift("project", "revoke", "nroth", *kit)
    assert (code, "did you mean 'north'" in err) == (2, True)
    file, key = str(kits.parents[1] / "project.yaml"), kits / "sites" / "north" / "flare" / "startup" / "client.key"
    before = key.read_bytes()
    assert fedshift("project", "reissue", file, "north", "--out", str(kits.parent))[0] == 0
    assert key.read_bytes() != before


@pytest.mark.case("revoked sites", "experiments that name a revoked or a removed site, before the coordinator runs")
def test_a_site_that_is_removed_is_named_in_no_experiment(fedshift: Cli, kits: Path) -> None:
    file, kit = str(kits.parents[1] / "project.yaml"), ("--kit", str(kits / "coordinator"))
    assert fedshift("project", "revoke", "south", *kit)[0] == 0
    code, _, err = fedshift("deploy", str(deployable(kits)), *kit)
    assert (code, "accept south" in err) == (2, True)
    code, out, _ = fedshift("project", "remove", file, "south", "--out", str(kits.parent))
    assert (code, roles.load_project(Path(file)).sites) == (0, ("north",))
    for part in ("certificates.json", "protocol.targets", "engine.quorum can be 1", str(kits / "sites" / "south")):
        assert part in out
    code, _, err = fedshift("deploy", str(deployable(kits)), *kit)
    assert (code, "removed" in err, err.count("\n")) == (2, True, 1)
    assert "revoked: " not in fedshift("coordinator", "status", *kit)[1]
    code, _, err = fedshift("project", "remove", file, "north", "--out", str(kits.parent))
    assert (code, "only site" in err) == (2, True)


@pytest.mark.case("revoked sites", "a site taken out by hand and put back is refused, and provision says so")
def test_provision_says_which_kit_is_refused(fedshift: Cli, kits: Path) -> None:
    file, out = str(kits.parents[1] / "project.yaml"), ("--out", str(kits.parent))
    assert fedshift("project", "revoke", "south", "--kit", str(kits / "coordinator"))[0] == 0
    output = fedshift("project", "provision", file, *out)[1]
    assert [line for line in output.splitlines() if "revoked" in line and "accept south" in line]
    assert "accept north" not in output


def test_a_site_with_a_filter_of_flares_does_not_start(fedshift: Cli, kits: Path) -> None:
    file = site_file(kits)
    scopes = [{"name": "public", "task_result_filters": [{"name": "ExcludeVars", "args": {"exclude_vars": "x"}}]}]
    local = kits / "sites" / "north" / "flare" / "local"
    (local / "privacy.json").write_text(json.dumps({"scopes": scopes, "default_scope": "public"}))
    for command in ("start", "check"):
        code, _, err = fedshift("site", command, str(file))
        assert (code, "ExcludeVars" in err, "policy.send" in err) == (2, True, True)
        assert err.count("\n") == 1


def test_site_check_says_what_leaves(fedshift: Cli, kits: Path) -> None:
    file = site_file(kits, policy={"send": ["weights", "numbers"], "methods": ["fedavg", "csac"], "rounds_per_day": 9})
    code, out, _ = fedshift("site", "check", str(file))
    assert code == 0, out
    assert "24 samples of 4" in out
    assert "well 12, ill 12" in out
    assert "may leave: weights, numbers, masked, sealed; of at least 10 samples" in out
    assert "raw_data" in out.partition("never leaves:")[2].splitlines()[0]
    assert "accuracy" in out.partition("never leaves:")[2].splitlines()[0]
    assert "methods that can run: fedavg, csac; at most 9 rounds a day; at most 200 measurements a day" in out
    assert "models agreed to: none yet (rule policy.models: first)" in out
    assert "splits agreed to: none yet (rule policy.splits: 5)" in out
    assert "peers agreed to: none yet (rule policy.peers: first)" in out
    assert "secure aggregation: allowed; sums of at least 3 sites" in out
    assert f"certificate: {Identity.of_kit(kits / 'sites' / 'north', 'north').fingerprint}" in out
    assert "audit log: 0 lines, unbroken" in out
    assert "kit: project federation, valid until" in out
    assert "coordinator: cannot be reached: localhost port 8002" in out


@pytest.mark.case("missing in a file", "site check: counted before cells are filled; codes and constants by name")
def test_site_check_says_what_is_missing_in_a_table(fedshift: Cli, kits: Path) -> None:
    rows = ["age,chol,ca,sex,y"]
    for row in range(40):
        age, chol, ca = 40 + row, 0 if row < 10 else 200 + 3 * row, "" if row else "1"
        rows.append(f"{age},{chol},{ca},{'MF'[row % 2] if row > 1 else 'm'},{row % 2}")
    (kits / "sites" / "north" / "t.csv").write_text("\n".join(rows) + "\n")
    data = {"name": "table", "sites": {"north": "t.csv"}, "label": "y", "numeric": ["age", "chol", "ca"]}
    code, out, err = fedshift(
        "site", "check", str(site_file(kits, data={**data, "categorical": ["sex"]}, classes=["0", "1"]))
    )
    assert code == 0, err
    assert "missing in the file: ca 39 of 40; never changes: ca" in out
    assert "values: 0 missing" not in out
    assert "column 'chol' has 0 in 25 % of the rows of 'north'" in out
    assert "column 'ca' has no value, or almost none" in out


@pytest.mark.case("new kits", "a table by the lines that a new SITE.yaml has for it, uncommented")
def test_the_table_in_a_new_site_file_is_one(fedshift: Cli, kits: Path) -> None:
    file = kits / "sites" / "north" / "SITE.yaml"
    lines = file.read_text().splitlines()
    begin = lines.index("# data:")
    end = next(index for index in range(begin + 1, len(lines)) if not lines[index].startswith("#   "))
    table = [line.removeprefix("# ") for line in lines[begin:end]]
    names = yaml.safe_load("\n".join(table))["data"].keys()
    assert {"label", "id", "numeric", "categorical"} <= names
    kept = [line for line in lines[end:] if not line.startswith("  send:")]
    kept = [line.replace("  # send:", "  send:") for line in kept]
    file.write_text("\n".join(["site: north", "kit: .", *table, *kept]) + "\n")
    rows = [f"p{row},{40 + row},{120 + row % 7},{'fm'[row % 2]},{'ab'[row % 2]},{row % 2}" for row in range(60)]
    (file.parent / "patients.csv").write_text("\n".join(["patient,age,pressure,sex,ward,outcome", *rows]) + "\n")
    code, out, err = fedshift("site", "check", str(file))
    assert code == 0, err
    assert "60 samples of 6" in out
    assert "categories of sex: f, m" in out
    assert "statistics" in out.partition("may leave: ")[2].splitlines()[0]
    assert "p17" not in out
    assert "it takes part in no experiment" not in out


@pytest.mark.case("files left out", "site check names them and what makes images dark, before anything leaves")
def test_site_check_says_what_is_left_out_of_images(fedshift: Cli, kits: Path) -> None:
    folder = kits / "sites" / "north" / "photos" / "north"
    for label in ("well", "ill"):
        (folder / label / "old").mkdir(parents=True)
        for number in range(12):
            values = np.random.default_rng(number).integers(0, 4096, (8, 8), dtype=np.uint16)
            Image.fromarray(values).save(folder / label / f"{number}.png")
        (folder / label / "slide.svs").write_bytes(b"x")
        (folder / label / "old" / "a.png").write_bytes(b"x")
    data = {"name": "image_folder", "root": "photos", "size": 8}
    code, out, err = fedshift("site", "check", str(site_file(kits, data=data, classes=["ill", "well"])))
    assert code == 0, err
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
def test_a_mistake_in_a_site_file_is_one_line(changes: dict[str, Any], message: str, fedshift: Cli, kits: Path) -> None:
    import re

    code, _, err = fedshift("site", "check", str(site_file(kits, **changes)))
    assert code == 2, err
    assert re.search(message, err), err
    assert len(err.strip().splitlines()) == 1, err


def test_a_broken_audit_log_is_said_and_stops_the_start(fedshift: Cli, kits: Path) -> None:
    file = site_file(kits)
    log = AuditLog(file.parent / "memory" / "audit.jsonl")
    log.append(do="call", run="r", round=1)
    log.append(do="call", run="r", round=2)
    text = log.path.read_text()
    log.path.write_text(text.replace('"round": 1', '"round": 7'))
    code, _, err = fedshift("site", "check", str(file))
    assert (code, "the log was changed here" in err) == (2, True)
    code, _, err = fedshift("site", "start", str(file))
    assert code == 2
    assert "line 1: the log was changed here" in err


def test_roles_that_do_not_run(fedshift: Cli, kits: Path) -> None:
    kit = str(kits / "coordinator")
    assert "coordinator: stopped" in fedshift("coordinator", "status", "--kit", kit)[1]
    for stopped in (
        fedshift("coordinator", "stop", "--kit", kit),
        fedshift("site", "stop", str(site_file(kits))),
    ):
        assert (stopped[0], "not running" in stopped[1]) == (0, True)
    code, _, err = fedshift("coordinator", "status", "--kit", str(kits / "sites" / "north"))
    assert (code, "is the kit of a site" in err) == (2, True)
    assert "no deployments" in fedshift("deploy", "status", "--kit", kit)[1]


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
    code, _, err = fedshift("deploy", str(deployable(kits, **changes)), "--kit", str(kits / "coordinator"))
    assert code == 2
    assert message in err


def test_a_deployed_experiment_is_not_run_here(fedshift: Cli, tmp_path: Path) -> None:
    code, _, err = fedshift("run", str(deployable(tmp_path)), "--runs", str(tmp_path))
    assert (code, "use fedshift deploy" in err) == (2, True)
    code, _, err = fedshift("check", str(deployable(tmp_path)))
    assert (code, "fedshift deploy" in err) == (2, True)


def test_a_role_is_started_with_its_own_kit(fedshift: Cli, kits: Path) -> None:
    code, _, err = fedshift("coordinator", "start", "--kit", str(kits / "sites" / "north"))
    assert (code, "coordinator" in err, err.count("\n")) == (2, True, 1)


def test_a_whole_site_has_nothing_to_recover(fedshift: Cli, kits: Path) -> None:
    before = {file: file.read_bytes() for file in (kits / "sites" / "north").rglob("*") if file.is_file()}
    code, out, _ = fedshift("site", "recover", str(kits / "sites" / "north" / "SITE.yaml"), "--yes")
    assert (code, "are whole" in out) == (0, True)
    assert {file: file.read_bytes() for file in before} == before


@pytest.mark.parametrize("content", [b"", b"no model", b"\x80\x04\x95"])
def test_what_is_no_sealed_model_is_not_opened(content: bytes, fedshift: Cli, kits: Path, tmp_path: Path) -> None:
    (tmp_path / "model.sealed").write_bytes(content)
    out = tmp_path / "model.safetensors"
    code, _, err = fedshift("site", "open", str(tmp_path), str(site_file(kits)), "--out", str(out))
    assert (code, "model.sealed" in err, err.count("\n"), out.exists()) == (2, True, 1, False)


def test_status_and_logs_of_a_deployment(fedshift: Cli, kits: Path) -> None:
    deployment = Deployment(kits / "coordinator", "study")
    deployment.want("run")
    deployment.set_state("failed", message="site 'north' refuses (rule policy.methods: csac)", exit_code=2, request=1)
    deployment.record({"what": "round", "method": "fedavg", "target": "south", "seed": 0, "round": 3, "accuracy": 81.0})
    deployment.record({"what": "fit", "site": "north", "is": "lost", "reason": "no reply within 5 s", "round": 4})
    kit = str(kits / "coordinator")
    code, out, _ = fedshift("deploy", "status", "--kit", kit)
    assert code == 0
    assert "study: failed, fedavg → south round 3 site 'north' refuses" in out
    assert "no reply" not in out, "it has ended"
    deployment.set_state("running", request=1)
    out = fedshift("deploy", "status", "--kit", kit)[1]
    assert "study: running" in out
    assert [line for line in out.splitlines() if "north: lost" in line and "no reply within 5 s" in line]
    assert "reason=no reply within 5 s" in fedshift("deploy", "logs", "study", "--kit", kit)[1]
    assert fedshift("deploy", "abort", "study", "--kit", kit)[0] == 0
    assert deployment.wanted["want"] == "abort"
    code, _, err = fedshift("deploy", "logs", "stduy", "--kit", kit)
    assert (code, "did you mean 'study'" in err) == (2, True)


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
    assert deployed.engine.aggregation == "secure"
    assert list(sites) == ["D15", "D30", "D45", "D60", "D75"]
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
