"""A site's budget of privacy: what it answers, what it counts, when it stops, and whose noise it uses."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from asked import SETTING, part_of, request
from loopback import Killed, Loopback, deploy, killed_at, options_of
from outcomes import model, result, same
from site_yaml import site_file, write_data

from fedshift.deploy.privacy.ledger import LEDGER, SECRET, PrivacyLedger, recover_records
from fedshift.deploy.remote.policy import PrivacyBudget
from fedshift.deploy.remote.requests import SeedSplit
from fedshift.deploy.site_file import load_site
from fedshift.deploy.site_server import SiteProgram
from fedshift.encryption import read_private
from fedshift.errors import FedshiftError, Refused, UserError
from fedshift.federation import private_training
from fedshift.functional.differential_privacy import NoisySteps, adaptive_epsilon

SITES = {"north": 40, "south": 24}
SIGMA = 3.0
PRIVATE: dict[str, Any] = {"batch_size": 8, "lr": 0.1, "privacy": {"noise_multiplier": SIGMA}}
NO_NORM = {"noise_multiplier": SIGMA, "clip_norm": 1e-44}
ASKED = {**SETTING, "training": PRIVATE, "draws": {name: {"noise_multiplier": SIGMA, "stream": ""} for name in SITES}}


@pytest.fixture(scope="module", autouse=True)
def _with_opacus() -> None:
    """Imported by the one process that runs these tests, and not by each that collects them."""
    pytest.importorskip("opacus")


def site_with_budget(folder: Path, name: str = "north", **privacy: Any) -> Path:
    """The SITE.yaml of a site with a budget; 10 at δ = 1e-5 unless ``privacy`` says otherwise."""
    site_yaml = site_file(folder, name, write_data(folder / "data", SITES)[name])
    options = yaml.safe_load(site_yaml.read_text())
    options["privacy"] = {"epsilon": 10.0, "delta": 1e-5, **privacy}
    site_yaml.write_text(yaml.safe_dump(options))
    return site_yaml


def program(folder: Path, **privacy: Any) -> SiteProgram:
    """The site, with a secret that is always the same."""
    config = load_site(site_with_budget(folder, **privacy))
    draw_secret(config.memory, bytes(range(32)))
    return SiteProgram(config)


def draw_secret(memory: Path, secret: bytes, site: str = "north") -> None:
    """Begin a site's ledger with this secret, in place of one that the system draws."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedshift.deploy.privacy.ledger.os.urandom", lambda size: secret)
        PrivacyLedger(memory, site, None).secret()


def lines(site: SiteProgram) -> list[dict[str, Any]]:
    file = site.config.memory / LEDGER
    whole = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return [line for line in whole if line["steps"]]  # the first line is the secret's


def weights_of(site: SiteProgram, header: dict[str, Any]) -> torch.Tensor:
    """What lies in the file of the answer that the site keeps."""
    from safetensors.torch import load

    assert "error" not in header, header
    (file,) = (site.config.memory / "r").glob("answer-*.safetensors")
    return torch.cat([value.flatten() for _, value in sorted(load(read_private(file)).items())])


def deploy_private(
    folder: Path, training: dict[str, Any], protocol: dict[str, Any] | None = None, change: Any = None, **privacy: Any
) -> Path:
    """The folder of the runs of an experiment over two sites with budgets."""
    options = options_of({"name": "fedavg"}, training={**PRIVATE, "rounds": 3, **training}, name="tiny")
    options |= {"protocol": protocol} if protocol else {}
    transport = Loopback({name: site_with_budget(folder, name, **privacy) for name in SITES}, change)
    return deploy(folder, options, sites=SITES, transport=transport)[0]


def test_a_deployed_run_is_private_and_counted(tmp_path: Path) -> None:
    """28 of 40 samples train in batches of 8: four steps a round. The result says what each site paid."""
    runs = deploy_private(tmp_path, {})
    record = result(runs, "fedavg", "west")["privacy"]
    assert set(record) == set(SITES)
    for name in SITES:
        ledger = PrivacyLedger(tmp_path / name / "memory", name, PrivacyBudget(epsilon=10))
        (spent,) = ledger.noisy_steps()
        assert (spent.steps, spent.noise_multiplier) == (record[name]["steps"], SIGMA)
        assert spent.sample_rate == pytest.approx(record[name]["sample_rate"])
        assert ledger.epsilon() >= adaptive_epsilon([spent], 10, 1e-5) > 0
        assert (tmp_path / name / "memory" / SECRET).stat().st_mode & 0o777 == 0o600


@pytest.mark.slow
@pytest.mark.threat("spent_budget")
def test_noise_is_of_the_secret_and_a_run_that_was_killed_repeats_it(tmp_path: Path) -> None:
    """Only the secrets differ between the first two. The third has those of the first, and is killed in round 2."""
    whole, other = (model(deploy_private(tmp_path / name, {}), "fedavg", "west") for name in ("a", "b"))
    assert not same(whole, other)
    for name in SITES:
        secret = read_private(tmp_path / "a" / name / "memory" / SECRET)
        draw_secret(tmp_path / "c" / name / "memory", secret, name)
    with pytest.raises(Killed):
        deploy_private(tmp_path / "c", {}, change=killed_at(("south", "call", 2)))
    for file in (tmp_path / "c").rglob("answer-*"):
        file.unlink()
    assert same(model(deploy_private(tmp_path / "c", {}), "fedavg", "west"), whole)
    counts = {
        folder: len((tmp_path / folder / "north" / "memory" / LEDGER).read_text().splitlines()) for folder in "ac"
    }
    assert counts["a"] == counts["c"] == 1 + 3


@pytest.mark.threat("spent_budget")
def test_a_repeated_request_repeats_its_answer_and_is_counted_once(tmp_path: Path) -> None:
    """Also where the kept answer is gone, as after a kill before it was kept; a new process of the site, too."""
    site = program(tmp_path)
    before = weights_of(site, request(site, setting=ASKED))
    (line,) = lines(site)
    assert (line["steps"], line["round"], line["call"]) == (4, 1, "fit")
    for file in (site.config.memory / "r").glob("answer-*"):
        file.unlink()
    again = SiteProgram(site.config)
    assert torch.equal(weights_of(again, request(again, setting=ASKED)), before)
    assert len(lines(site)) == 1
    (site.config.memory / SECRET).unlink()
    with pytest.raises(Refused, match="site recover"):
        SiteProgram(site.config)
    recover_records(site.config)  # another secret: other noise, which counts
    for file in (site.config.memory / "r").glob("answer-*"):
        file.unlink()
    other = SiteProgram(site.config)
    header = request(other, setting=ASKED)
    assert not torch.equal(weights_of(other, header), before)
    assert len(lines(site)) == 2


def test_another_request_has_other_noise_and_counts(tmp_path: Path) -> None:
    """The same update under two samples of noise would show what lies beneath; so each sample is paid for."""
    site = program(tmp_path)
    answers = []
    for changes in ({}, {"run": "s"}, {"setting": {**ASKED, "seed": 1}}):
        header = request(site, **{"setting": ASKED, **changes})
        assert "error" not in header, header
        answers.append(sorted(site.config.memory.rglob("answer-*.safetensors"), key=os.path.getmtime)[-1].read_bytes())
    assert (len(set(answers)), len(lines(site)), len({line["mark"] for line in lines(site)})) == (3, 3, 3)


@pytest.mark.threat("spent_budget")
def test_the_site_stops_when_its_budget_is_spent(tmp_path: Path) -> None:
    """Whatever the coordinator asks: each exchange is four steps, and what is spent never passes ε."""
    step = adaptive_epsilon([NoisySteps(SIGMA, 8 / 28, 4)], 3.0, 1e-5)
    site = program(tmp_path, epsilon=3.0)
    answers = []
    for number in range(1, 40):
        envelope = {"exchange": number, "round": number, "progress": 0.0, "mini_batches_left": 5}
        answers.append(request(site, setting=ASKED, envelope=envelope))
        if "error" in answers[-1]:
            break
    assert step < 3.0
    assert len(answers) > 2
    assert answers[-1]["error"] == "Refused"
    assert "privacy.epsilon" in answers[-1]["message"]
    assert len(lines(site)) == len(answers) - 1
    assert site.rules.ledger.epsilon() <= 3.0 < site.rules.ledger.epsilon(NoisySteps(SIGMA, 8 / 28, 4))
    reopened = SiteProgram(site.config)
    assert request(reopened, setting=ASKED, run="other")["error"] == "Refused"
    envelope = {"exchange": 1, "round": 1, "progress": 0.0, "mini_batches_left": 5}
    assert "error" not in request(reopened, setting=ASKED, envelope=envelope)  # answered and paid before


@pytest.mark.threat("spent_budget")
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"setting": SETTING}, "trains with noise only"),
        ({"setting": {**ASKED, "draws": {}}}, "how much noise"),
        ({"setting": {**ASKED, "draws": {"north": {"noise_multiplier": 1e-9, "stream": ""}}}}, "how much noise"),
        (
            {"setting": {**ASKED, "training": {**PRIVATE, "privacy": {"noise_multiplier": 3, "clip_norm": 1e-44}}}},
            "clip",
        ),
        ({"setting": {**ASKED, "network": {"name": "mlp", "batch_norm": True}}}, "BatchNorm"),
        ({"setting": {**ASKED, "method": {"name": "moon", "options": {}}}}, "cannot train privately"),
        ({"do": "measure", "round": 1, "setting": ASKED}, "measures no model"),
        ({"setting": ASKED, "run": "privacy.jsonl"}, "may not have a name"),
        ({"setting": ASKED, "run": "audit.jsonl"}, "may not have a name"),
    ],
)
def test_what_has_no_noise_is_refused(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    site = program(tmp_path)
    assert words in request(site, **changes).get("message", "")
    assert not lines(site)


def test_a_call_that_fails_is_counted(tmp_path: Path) -> None:
    """That training failed depends on samples, too; the noise that it had is paid for."""
    site = program(tmp_path)
    privacy = {"noise_multiplier": SIGMA, "clip_norm": 1e3}
    header = request(site, setting={**ASKED, "training": {**PRIVATE, "lr": 1e38, "privacy": privacy}})
    assert (header["error"], lines(site)[0]["steps"]) == ("TrainingDiverged", 4)


@pytest.mark.parametrize("fault", [MemoryError, KeyboardInterrupt])
def test_a_call_that_was_interrupted_pays_for_the_rest_when_it_is_asked_again(
    fault: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The coordinator chooses the network's size, and so when memory runs out."""
    site, summed, times = program(tmp_path), private_training.clipped_sum, 0

    def failing(*arguments: Any) -> Any:
        nonlocal times
        times += 1
        if times == 2:
            raise fault
        return summed(*arguments)

    with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
        patch.setattr(private_training, "clipped_sum", failing)
        assert request(site, setting=ASKED)["error"]
    (before,) = [line["steps"] for line in lines(site)]
    assert before < 4
    again = SiteProgram(site.config)
    assert "error" not in request(again, setting=ASKED)
    assert [line["steps"] for line in lines(site)] == [before, 4 - before]
    assert len({line["mark"] for line in lines(site)}) == 1


def test_further_steps_of_an_exchange_are_checked_and_paid(tmp_path: Path) -> None:
    ledger = PrivacyLedger(tmp_path, "north", PrivacyBudget(epsilon=1))
    ledger.pay("m", NoisySteps(SIGMA, 0.1, 1))
    ledger.check("m", NoisySteps(SIGMA, 0.1, 1))
    ledger.pay("m", NoisySteps(SIGMA, 0.1, 3))
    ledger.pay("m", NoisySteps(SIGMA, 0.1, 2))
    assert ledger.noisy_steps() == [NoisySteps(SIGMA, 0.1, 3)]
    for asked in (NoisySteps(SIGMA, 0.1, 10**6), NoisySteps(0.05, 0.1, 1)):
        with pytest.raises(Refused, match=r"privacy\.epsilon"):
            ledger.check("m", asked)
        with pytest.raises(Refused, match=r"privacy\.epsilon"):
            ledger.pay("m", asked)


def test_a_model_that_mixes_samples_is_not_measured(tmp_path: Path) -> None:
    """One sample could turn all predictions, and the noise hides one vote."""
    mixing: dict[str, Any] = {"name": "mlp", "hidden": [2], "batch_norm": True}
    for changes in ({"method": {"name": "fedbn", "options": {"unseen": "target"}}}, {"network": mixing}):
        site = program(tmp_path / next(iter(changes)), epsilon=50.0, measurement_noise=20.0)
        part = {**part_of(site), "role": "unseen", "whole": True}
        answer = request(site, do="measure", round=1, setting={**ASKED, **changes}, part=part)
        assert answer.get("error") == "Refused", answer
        assert "measures only what can train privately" in answer["message"]
        assert not lines(site)


def test_measurements_have_noise_and_are_counted(tmp_path: Path) -> None:
    """A model of zeros is right for 14 of 40 samples; each request has its own noise, a repeated one the same."""
    site = program(tmp_path, epsilon=50.0, measurement_noise=2.0)
    part = {**part_of(site), "role": "unseen", "whole": True}
    measures = [request(site, do="measure", round=round, setting=ASKED, part=part)["measures"] for round in range(30)]
    right = torch.tensor([measure["accuracy"] * 0.4 for measure in measures])
    assert 1.0 < float(right.std()) < 3.5
    assert float(right.mean()) == pytest.approx(14, abs=2)
    assert all(measure["classes"] == [None] * 3 and measure["metrics"] is None for measure in measures)
    assert request(site, do="measure", round=3, setting=ASKED, part=part)["measures"] == measures[3]
    assert len(lines(site)) == 30


@pytest.mark.threat("spent_budget")
def test_models_are_measured_until_the_budget_is_spent(tmp_path: Path) -> None:
    site = program(tmp_path, epsilon=3.0, measurement_noise=8.0)
    part = {**part_of(site), "role": "unseen", "whole": True}

    def measure_once(number: int, run: str = "r") -> Any:
        return request(site, do="measure", round=number, run=run, setting=ASKED, part=part)

    number = next(number for number in range(200) if "error" in measure_once(number))
    assert number > 2
    assert "privacy.epsilon" in measure_once(number)["message"]
    assert len(lines(site)) == number
    assert site.rules.ledger.epsilon() <= 3.0
    assert "privacy.epsilon" in measure_once(0, "another")["message"]
    assert "error" not in measure_once(0)  # answered and paid before


def test_a_result_says_how_much_noise_its_accuracies_have(tmp_path: Path) -> None:
    """Of 12 samples that a site holds out, two more or fewer may be said to be right: 17 points."""
    protocol = {"targets": ["sites"], "seeds": [0], "test_fraction": 0.3}
    runs = deploy_private(tmp_path / "a", {}, protocol, epsilon=50.0, measurement_noise=2.0)
    record = result(runs, "fedavg", "sites")["data"]
    noise = {site: pytest.approx(200 / samples) for site, samples in record["measured_samples"].items()}
    assert (record["measurement_noise"], noise["north"]) == (noise, 200 / 12)
    plain = deploy_private(tmp_path / "b", {})
    assert "measurement_noise" not in result(plain, "fedavg", "west")["data"]


def test_the_coordinator_foresees_what_sites_cannot_pay(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"'north' has spent ε = 0 of 1 .* it would be"):
        deploy_private(tmp_path / "a", {}, epsilon=1.0)
    assert not PrivacyLedger(tmp_path / "a" / "north" / "memory", "north", None).noisy_steps()
    with pytest.raises(UserError, match=r"measured at site 'north'"):
        deploy_private(tmp_path / "b", {}, {"targets": ["north"], "seeds": [0], "test_fraction": 0.3})
    with pytest.raises(UserError, match=r"write training\.privacy"):
        deploy_private(tmp_path / "c", {"privacy": None})


def test_what_a_card_tells_of_the_data(tmp_path: Path) -> None:
    """Two sites that differ in one sample tell the same: no fingerprint, no split by class, no classes."""
    site_yaml = site_with_budget(tmp_path)
    options = yaml.safe_load(site_yaml.read_text())
    del options["classes"]
    (tmp_path / "other.yaml").write_text(yaml.safe_dump(options))
    with pytest.raises(UserError, match="classes"):
        load_site(tmp_path / "other.yaml")
    site = SiteProgram(load_site(site_yaml))
    plain = SiteProgram(
        load_site(site_file(tmp_path / "plain", "north", write_data(tmp_path / "data", SITES)["north"]))
    )
    assert site.holding.fingerprint != plain.holding.fingerprint
    split = SeedSplit(test_fraction=0.3, split="auto", seed=0)
    before = site._rows(split)[0]
    site.holding.domain.labels[3] = (site.holding.domain.labels[3] + 1) % 3
    assert (site._rows(split)[0] == before).all()


def test_a_changed_ledger_is_noticed(tmp_path: Path) -> None:
    ledger = PrivacyLedger(tmp_path, "north", PrivacyBudget(epsilon=8))
    for number in range(2):
        ledger.pay(ledger.mark(number=number), NoisySteps(2.0, 0.1, 5))
    file = tmp_path / LEDGER
    with open(file, "a") as half:
        half.write('{"mark": "x')  # of a process that was killed
    assert ledger.noisy_steps() == [NoisySteps(2.0, 0.1, 10)]
    file.write_text(file.read_text().replace('"steps": 5', '"steps": 1', 1))
    with pytest.raises(FedshiftError, match="line 2"):
        ledger.pay(ledger.mark(number=2), NoisySteps(2.0, 0.1, 5))
    with pytest.raises(Refused):
        PrivacyLedger(tmp_path / "new", "north", PrivacyBudget(epsilon=0.1)).pay("m", NoisySteps(2.0, 0.1, 5))
