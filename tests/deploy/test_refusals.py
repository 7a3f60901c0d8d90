"""A site that does not let a kind of content out: the run ends at once and says so, or goes on without it."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Optional

import numpy as np
import pytest
import torch
from loopback import Loopback, deploy, options_of
from outcomes import events, one_line
from safetensors.torch import load_file
from site_yaml import SITES, UNSEEN, site_file, write_data
from tiny import CNN, domains, plans, setting

from fedshift.errors import KindRefused, UserError
from fedshift.experiment.config.experiment import parse
from fedshift.experiment.runs.experiment_loop import run_experiment
from fedshift.federation.messages import Reply, Spectra, Styles, Update, promised_kinds
from fedshift.federation.site_runner import SiteRunner
from fedshift.methods.composition.styles import SharedStyles
from fedshift.methods.federated.ccst import CCST
from fedshift.methods.federated.elcfs import ELCFS, SharedSpectra
from fedshift.report.collect import collect
from fedshift.report.page import page
from fedshift.report.report import whole_report
from fedshift.weights import Weights

KINDS = {"elcfs": "spectra", "ccst": "styles"}
EVERYTHING = ["weights", "numbers", "accuracy", "statistics", "styles", "spectra", "features"]
LEAVE_OUT: dict[str, Any] = {"on_refusal": "leave_out", "quorum": 2}


def options(method: str, **changes: Any) -> dict[str, Any]:
    model = {"name": "mnist_cnn", "channels": [3, 4], "hidden": 6}
    return options_of({"name": method}, model=model, training={"rounds": 2, "batch_size": 8, "lr": 0.05}, **changes)


def images(folder: Path) -> dict[str, str]:
    """Made-up images at the sites of a `Loopback`, and at the one that is unseen."""
    (folder / "data").mkdir(parents=True, exist_ok=True)
    for domain in domains(CNN, {**SITES, **UNSEEN}):
        np.savez(folder / "data" / f"{domain.name}.npz", x=domain.inputs, y=domain.labels)
    return write_data(folder / "data", {**SITES, **UNSEEN})


def here(folder: Path, method: str, name: str = "runs", **engine: Any) -> Path:
    """A run in the local engine; its folder."""
    data = {"name": "arrays", "sites": images(folder), "classes": ["0", "1", "2"]}
    experiment = parse({**options(method), "data": data, "engine": {"threads": 1, **engine}})
    return run_experiment(experiment, folder / name) / method / "west" / "seed-0"


def there(folder: Path, method: str, refuse: Mapping[str, str], **engine: Any) -> Path:
    """The same run over messages; ``refuse`` stands in the sites' own policies."""
    files = images(folder)
    places = {
        site: site_file(folder, site, files[site], send=[kind for kind in EVERYTHING if kind != refuse.get(site)])
        for site in SITES
    }
    runs, _ = deploy(folder, options(method), transport=Loopback(places), engine=engine)
    return runs / method / "west" / "seed-0"


def lines(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "rounds.jsonl").read_text().splitlines()]


def model(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "model.safetensors")


def same(first: Path, second: Path) -> bool:
    left_model, two = model(first), model(second)
    return all(torch.equal(left_model[name], two[name]) for name in left_model)


@pytest.mark.threat("kept_kind")
@pytest.mark.parametrize("method", KINDS)
def test_the_run_ends_before_training_and_names_site_and_kind(method: str, tmp_path: Path) -> None:
    kind = KINDS[method]
    message = rf"engine.refuse_at: site 'south' refuses to send {kind}, which {method} shares.* leave_out"
    with pytest.raises(UserError, match=message):
        here(tmp_path, method, refuse_at={"south": [kind]})
    assert not list((tmp_path / "runs").rglob("rounds.jsonl"))
    with pytest.raises(UserError, match=rf"site 'south' .*refuses to send {kind} .*\(rule policy.send: weights"):
        there(tmp_path, method, {"south": kind})
    assert {event["what"] for event in events(tmp_path)} == {"hello"}


@pytest.mark.slow
@pytest.mark.usefixtures("shared_workers")
@pytest.mark.parametrize("method", KINDS)
def test_the_run_goes_on_without_it_and_says_so(method: str, tmp_path: Path) -> None:
    """It gives nothing, and still trains with what the others gave; in the same bits in every engine."""
    kind = KINDS[method]
    alone = here(tmp_path, method, refuse_at={"south": [kind]}, **LEAVE_OUT)
    pooled = here(tmp_path, method, "pooled", refuse_at={"south": [kind]}, workers=2, **LEAVE_OUT)
    deployed = there(tmp_path, method, {"south": kind}, **LEAVE_OUT)
    whole = here(tmp_path, method, "whole")
    assert same(alone, pooled)
    assert same(alone, deployed)
    assert not same(alone, whole)
    for run, rule in ((alone, "engine.refuse_at.south"), (pooled, "engine.refuse_at.south"), (deployed, "policy.send")):
        first, *others = lines(run)
        (reason,) = first["extra"]["refused"]["south"]
        assert f"site 'south' refuses to send {kind}" in reason
        assert f"rule {rule}" in reason
        assert set(first["extra"]["refused"]) == {"south"}
        for line in others:
            assert set(line["aggregation_weights"]) == set(SITES), "it trains all the same"
            assert "refused" not in line["extra"]
        result = json.loads((run / "result.json").read_text())
        assert any(reason in warning for warning in result["warnings"])
        left, before = (json.loads((folder / "result.json").read_text())["bytes_up"][kind] for folder in (run, whole))
        assert 0 < left < before
        assert reason in html.unescape(page(whole_report(collect(run.parents[2]))))


def test_refusals_before_an_interruption_are_in_the_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def die(*_: object) -> None:
        raise KeyboardInterrupt

    refusing: dict[str, Any] = {"refuse_at": {"south": ["styles"]}, **LEAVE_OUT}
    with monkeypatch.context() as patch:
        patch.setattr(CCST, "round", die)
        with pytest.raises(KeyboardInterrupt):
            here(tmp_path, "ccst", **refusing)
    run = here(tmp_path, "ccst", **refusing)
    assert same(run, here(tmp_path, "ccst", "other", **refusing))
    assert any("refuses to send styles" in text for text in json.loads((run / "result.json").read_text())["warnings"])


@pytest.mark.parametrize("method", KINDS)
def test_too_few_are_left(method: str, tmp_path: Path) -> None:
    kind = KINDS[method]
    two = {"south": kind, "east": kind}
    with pytest.raises(UserError, match=rf"refuses to send {kind}.*1 of 3 sites are left, engine.quorum asks for 2"):
        here(tmp_path, method, refuse_at={site: [kind] for site in two}, **LEAVE_OUT)
    with pytest.raises(UserError, match=rf"refuses to send {kind}.*1 of 3 sites are left, engine.quorum asks for 2"):
        there(tmp_path, method, two, **LEAVE_OUT)


def test_a_site_that_sends_no_model_is_left_out_of_training(tmp_path: Path) -> None:
    run = here(tmp_path, "fedavg", refuse_at={"south": ["weights"]}, **LEAVE_OUT)
    far = there(tmp_path, "fedavg", {"south": "weights"}, **LEAVE_OUT)
    assert same(run, far)
    for line in lines(run):
        assert set(line["aggregation_weights"]) == {"north", "east"}
        assert set(line["extra"]["refused"]) == {"south"}
    (only,) = (text for text in json.loads((run / "result.json").read_text())["warnings"] if "refuses" in text)
    assert "weights" in only, "said once, however many rounds"
    log = [json.loads(line) for line in (tmp_path / "south/memory/audit.jsonl").read_text().splitlines()]
    refused = [line for line in log if line.get("refused")]
    assert refused
    assert all("refuses to send weights for field 'weights' of call fit" in line["refused"] for line in refused)


def test_a_site_that_does_not_say_how_well_a_model_does_is_left_out_of_the_measurement(tmp_path: Path) -> None:
    run = there(tmp_path, "fedavg", {"south": "accuracy"}, **LEAVE_OUT)
    for line in lines(run):
        assert set(line["source_accuracy"]) == {"north", "east"}
        assert set(line["aggregation_weights"]) == set(SITES)
    assert "refuses to send accuracy" in lines(run)[0]["extra"]["refused"]["south"][0]


@pytest.mark.parametrize(
    ("method", "engine", "message"),
    [
        ("fedavg", {"on_refusal": "leave_out"}, "engine.on_refusal: leave_out needs engine.quorum"),
        ("fedavg", {"on_refusal": "go_on"}, "engine.on_refusal"),
        ("fedavg", {"refuse_at": {"sout": ["weights"]}}, "engine.refuse_at: no site is called 'sout'.*'south'"),
        ("fedavg", {"refuse_at": {"south": ["weight"]}}, "unknown kind 'weight'; did you mean 'weights'"),
        ("feddg_ga", {"aggregation": "secure"}, "reads norms of feddg_ga's sites: choose fedavg"),
        ("fedavg", {"aggregation": "masked"}, "engine.aggregation"),
        ("fedavg", {"name": "flare", "refuse_at": {"south": ["weights"]}}, "refuse_at"),
        ("deepall", {"refuse_at": {"south": ["raw_data"]}, **LEAVE_OUT}, "'south' refuses to send raw_data, which"),
    ],
)
def test_what_cannot_be(method: str, engine: dict[str, Any], message: str, tmp_path: Path) -> None:
    with one_line(message):
        here(tmp_path, method, **engine)


def test_a_target_that_is_never_asked_may_refuse(tmp_path: Path) -> None:
    assert same(here(tmp_path, "elcfs", refuse_at={"west": ["spectra"]}), here(tmp_path, "elcfs", "whole"))


@dataclass(frozen=True)
class Many(Reply):
    weights: Weights
    by_site: Mapping[str, Spectra]
    either: Weights | Styles
    perhaps: Optional[Weights]  # noqa: UP045
    word: Literal["a", "b"]
    count: int


def test_kinds_that_a_reply_promises() -> None:
    assert promised_kinds(Update) == {"weights": "weights", "samples": "numbers", "loss": "numbers"}
    assert promised_kinds(SharedSpectra)["spectra"] == "spectra"
    assert promised_kinds(SharedStyles) == {"styles": "styles"}
    assert promised_kinds(Many) == {"weights": "weights", "by_site": "spectra", "count": "numbers"}


def test_what_a_call_promises_is_refused_before_it_works(monkeypatch: pytest.MonkeyPatch) -> None:
    method = ELCFS()
    built_domains = domains(CNN, {"large": 9})
    (plan,) = plans(method, built_domains)
    runner = SiteRunner(
        replace(plan, refuse=frozenset(["spectra"])), replace(setting(method, built_domains), on_refusal="leave_out")
    )
    monkeypatch.setattr(ELCFS, "share_spectra", ELCFS.share_spectra)
    monkeypatch.setattr(ELCFS, "_half_width", lambda *_: pytest.fail("it worked"))
    with pytest.raises(KindRefused, match=r"site 'large' refuses to send spectra .* call share_spectra\), rule engine"):
        runner.run("share_spectra", runner.site.envelope, {})


def test_a_run_of_sums_records_no_site_by_itself(tmp_path: Path) -> None:
    run = here(tmp_path, "fedavg", aggregation="secure")
    for line in lines(run):
        assert (list(line["losses"]), line["aggregation_weights"]) == (["all sites"], {})
        assert line["bytes"]["up"]["masked"] > 2 * line["bytes"]["down"]["weights"]
        assert "weights" not in line["bytes"]["up"]
    with pytest.raises(UserError, match="aggregation"):  # not a continuation of the same run
        here(tmp_path, "fedavg")
