"""Both guarantees at once: sites with a budget of privacy whose models leave as parts of sums."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from federations import FOUR, deploy_secure, secure_options, simulate_secure, write_kits
from loopback import Change, Loopback, killed_at, through_deaths
from outcomes import model, result, rounds_of
from site_yaml import site_file, write_data
from test_secure_deployments import fingerprints

from fedshift.deploy.privacy.ledger import LEDGER
from fedshift.deploy.remote import secure_federation
from fedshift.deploy.remote.transport import Lost
from fedshift.deploy.remote.wire import Message
from fedshift.errors import FedshiftError
from fedshift.federation.secure.integer_sums import Contribution, Weighing, contribution
from fedshift.functional.averaging import weighted_average
from fedshift.functional.differential_privacy import NoisySteps
from fedshift.weights import Weights

pytestmark = pytest.mark.skipif(find_spec("opacus") is None, reason="opacus is not installed")
PRIVATE: dict[str, Any] = {"batch_size": 8, "lr": 0.1, "privacy": {"noise_multiplier": 30.0}}
AT_SITES = {"targets": ["sites"], "seeds": [0], "test_fraction": 0.3}


def federation_with_budget(folder: Path, change: Change | None = None, **privacy: Any) -> Loopback:
    """Sites that send models masked only, and with noise only."""
    files, peers = write_data(folder / "data", FOUR), fingerprints(folder, list(FOUR))
    write_kits(folder, list(FOUR))
    rules = {"secure": "required", "peers": peers, "sections": {"privacy": {"epsilon": 30.0, "delta": 1e-5, **privacy}}}
    return Loopback({name: site_file(folder, name, files[name], **dict(rules)) for name in FOUR}, change)


def paid_calls(transport: Loopback, site: str) -> list[str]:
    file = transport.programs[site].config.memory / LEDGER
    return [call for line in file.read_text().splitlines() if (call := json.loads(line)["call"]) != "begin"]


@pytest.fixture
def contributions(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Weights, int]]:
    """The models that sites put into sums, before they become integers, and their numbers of samples."""
    contributions: list[tuple[Weights, int]] = []

    def note_contribution(reply: Any, weighing: Weighing) -> Contribution:
        contributions.append((reply.weights, reply.samples))
        return contribution(reply, weighing)

    for module in ("federation.federation", "deploy.secure.site_sums"):
        monkeypatch.setattr(f"fedshift.{module}.contribution", note_contribution)
    return contributions


def check_sum(contributions: list[tuple[Weights, int]], total: dict[str, torch.Tensor]) -> None:
    """The model is the mean of those that were put in. These are further apart than clipped gradients alone lead."""
    assert len(contributions) == len(FOUR)
    mean = weighted_average([weights for weights, _ in contributions], [samples for _, samples in contributions])
    assert all(torch.allclose(total[name], mean[name], atol=1e-6) for name in total)
    (first, rows), (second, others) = contributions[:2]
    apart = sum((first[name] - second[name]).square().sum().item() for name in first) ** 0.5
    steps = -(-rows // 8), -(-others // 8)
    assert apart > sum(number * 0.1 * samples / 8 for number, samples in zip(steps, (rows, others), strict=True))


@pytest.mark.threat("spent_budget")
def test_the_sum_has_noise_and_every_site_counts_it(contributions: list[tuple[Weights, int]], tmp_path: Path) -> None:
    """Accuracies have noise of their own, which is counted, too."""
    transport = federation_with_budget(tmp_path, measurement_noise=5.0)
    options = secure_options(training={**PRIVATE, "rounds": 1}, protocol=AT_SITES)
    runs, _ = deploy_secure(tmp_path, options, unseen={}, transport=transport)
    check_sum(contributions, model(runs, "fedavg", "sites"))
    stored = result(runs, "fedavg", "sites")
    assert (set(stored["privacy"]), set(stored["bytes_up"])) == (set(FOUR), {"masked", "accuracy"})
    assert all(paid_calls(transport, name) == ["fit", "measure"] for name in FOUR)


@pytest.mark.slow
def test_a_simulation_sums_models_with_noise(contributions: list[tuple[Weights, int]], tmp_path: Path) -> None:
    runs = simulate_secure(tmp_path, secure_options(training={**PRIVATE, "rounds": 1}))
    check_sum(contributions, model(runs, "fedavg", "west"))
    assert set(result(runs, "fedavg", "west")["privacy"]) == set(FOUR)


def spending(transport: Loopback, moment: tuple[str, str, int]) -> Change:
    """Another project at site 'up' spends what is left of its budget while an exchange is under way."""

    def change(site: str, header: dict[str, Any], answer: Message | Lost) -> Message | Lost:
        if (site, header["do"], header.get("envelope", header).get("round")) == moment:
            ledger = transport.programs["up"].rules.ledger
            for steps in (10_000, 1000, 100, 10, 1):
                measurement, number = NoisySteps(30.0, 1.0, steps), 0
                while ledger.epsilon(measurement) < 30:
                    ledger.pay(f"another {steps} {number}", measurement, call="another project")
                    number += 1
        return answer

    return change


@pytest.mark.slow
@pytest.mark.parametrize("quorum", [3, None])
def test_a_budget_that_ends_between_exchanges_costs_the_next_sum_its_site(quorum: int | None, tmp_path: Path) -> None:
    """Shares cost nothing: the sum under way is finished. In the next round the site is left out, or ends the run."""
    transport = federation_with_budget(tmp_path)
    transport.change = spending(transport, ("north", "unmask", 1))
    options = secure_options(training=PRIVATE)
    engine = {} if quorum is None else {"quorum": quorum}
    if quorum is None:
        with pytest.raises(FedshiftError, match=r"'up' has spent .*privacy\.epsilon"):
            deploy_secure(tmp_path, options, transport=transport, engine=engine)
    else:
        runs, _ = deploy_secure(tmp_path, options, transport=transport, engine=engine)
        extras = [record["extra"] for record in rounds_of(runs)[-2:]]
        assert [list(extra.get("missing", {})) for extra in extras] == [[], ["up"]]
        assert "privacy.epsilon" in extras[-1]["missing"]["up"]
    assert (paid_calls(transport, "up").count("fit"), paid_calls(transport, "north").count("fit")) == (1, 2)


@pytest.mark.slow
def test_killed_between_the_exchanges_noise_is_paid_for_once(tmp_path: Path) -> None:
    change = killed_at(("up", "call", 1), ("north", "unmask", 1), ("east", "unmask", 2))
    options = secure_options(training=PRIVATE)
    (_, transport), deaths = through_deaths(
        lambda: deploy_secure(tmp_path, options, transport=federation_with_budget(tmp_path, change))
    )
    assert deaths == 3
    assert all(paid_calls(transport, name) == ["fit", "fit"] for name in FOUR)


def test_each_site_without_a_key_counts_for_the_quorum(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[str, int, int]] = []
    where = SimpleNamespace(
        _cards={},
        _whole=False,
        _without={},
        run="r",
        transport=None,
        deadline=1.0,
        _record=lambda *_: None,
        _not_asked=lambda site: site,
        go_on_without=lambda site, asked, lost: told.append((site, asked, lost)),
    )
    silent = Lost("did not answer")
    monkeypatch.setattr(secure_federation, "ask_sites", lambda _, asked, *__: dict.fromkeys(asked, silent))
    with pytest.raises(FedshiftError, match="0 sites gave a key"):
        secure_federation.SecureFederation._fetch_keys(cast(Any, where), ["a", "b", "c"])
    assert told == [("a", 3, 1), ("b", 3, 2), ("c", 3, 3)]
