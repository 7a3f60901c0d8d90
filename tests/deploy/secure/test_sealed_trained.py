"""Trained models that have sealed parts: the coordinator carries, keeps and saves them, and their readers open them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from loopback import SITES, deploy, killed_at, model, options_of, result, same, simulate, through_deaths, write_data
from safetensors.torch import load_file

pytest.importorskip("cryptography")
pytest.importorskip("cryptography.hazmat.primitives.hpke")
from federations import Request, write_kits
from sealed import COPA, RUN, SEALED_ONLY, SHOT, between, options, run

from fedshift.deploy.cli.site import open_model
from fedshift.deploy.remote.policy import AuditLog
from fedshift.deploy.remote.transport import Lost
from fedshift.deploy.remote.wire import Message, unseal
from fedshift.errors import FedshiftError, UserError
from fedshift.experiment.check import check
from fedshift.experiment.config.experiment import parse
from fedshift.experiment.predict import load_model
from fedshift.federation.messages import Sealed, leaves
from fedshift.weights import Weights


def open_at_site(folder: Path, there: Path, method: str, site: str) -> dict[str, torch.Tensor]:
    """The run's model as a site opens it."""
    open_model(there / method / "east" / RUN, folder / site / "SITE.yaml", folder / f"{site}.safetensors")
    return load_file(folder / f"{site}.safetensors")


@pytest.mark.threat("kept_sealed")
@pytest.mark.parametrize(
    ("method", "readers"),
    [(SHOT, ["east"]), (COPA, [*SITES]), ({**COPA, "adaptation": True}, [*SITES])],
    ids=["shot", "copa", "copa with a target"],
)
def test_same_bits_as_the_local_engine_and_its_readers_open_it(
    method: dict[str, Any], readers: list[str], tmp_path: Path
) -> None:
    """With `shot` no model leaves any site that is not sealed, the target neither."""
    name = method["name"]
    transport = between(tmp_path, **({"send": SEALED_ONLY} if name == "shot" else {}))
    crossed: list[Any] = []

    def watch(site: str, header: dict[str, Any], answer: Message | Lost) -> Message | Lost:
        assert isinstance(answer, Message)
        crossed.extend(path for path, value in leaves(unseal(answer)[1]) if isinstance(value, Weights))
        return answer

    transport.change = watch
    there = run(tmp_path, transport, method)
    here = simulate(tmp_path, options(method), unseen={}, routing="sealed")
    folder = there / name / "east" / RUN
    assert {*crossed} == ({"features"} if name == "copa" else set())
    ours, theirs = result(here, name, "east"), result(there, name, "east")
    assert ours["selected"] == theirs["selected"]
    assert set(theirs["selected"]["last"]["sites"]) == set(readers), "the sites that measured"
    assert not (folder / "model.safetensors").exists()
    with pytest.raises(UserError, match="fedshift site open"):
        load_model(folder)
    with pytest.raises(UserError, match="fedshift site open"):
        load_model(folder / "model.sealed")
    whole = model(here, name, "east")
    for site in SITES:
        if site in readers:
            assert same(whole, open_at_site(tmp_path, there, name, site))
            load_model(tmp_path / f"{site}.safetensors")
            lines, _ = AuditLog.check(transport.programs[site].config.audit_log)
            assert any(line.get("opened") for line in lines)
        else:
            with pytest.raises(UserError, match=f"site '{site}' has no key that this model was sealed for"):
                open_at_site(tmp_path, there, name, site)
        kept = [*transport.programs[site].config.memory.glob("*/sealing"), *(tmp_path / site).glob("memory/.models/*")]
        assert len(kept) == (site in readers), "the key goes with the run, or with its model"


@pytest.mark.parametrize(
    ("method", "moments"),
    [
        (SHOT, [("south", "train_source", 0), ("east", "measure", 0), ("east", "adapt", 2), ("east", "measure", 2)]),
        (COPA, [("south", "fit", 1), ("east", "measure", 1), ("north", "fit", 2), ("north", "measure", 2)]),
    ],
    ids=["shot", "copa"],
)
def test_killed_anywhere_a_run_ends_in_the_same_bits(
    method: dict[str, Any], moments: list[tuple[str, str, int]], tmp_path: Path
) -> None:
    """Coordinator and sites begin anew each time; the third time sites have lost the answers that they kept."""
    change = killed_at(*moments, lose={3: tmp_path})

    def anew() -> Path:
        transport = between(tmp_path)
        transport.change = change
        return run(tmp_path, transport, method)

    there, deaths = through_deaths(anew)
    assert deaths == len(moments)
    here = simulate(tmp_path, options(method), unseen={}, routing="sealed")
    name = method["name"]
    assert same(model(here, name, "east"), open_at_site(tmp_path, there, name, "east"))
    assert result(here, name, "east")["selected"] == result(there, name, "east")["selected"]


@pytest.mark.parametrize(
    ("method", "lost", "wire"),
    [(COPA, ("fit", 2), "int8"), (SHOT, ("train_source", 0), "float32")],
    ids=["copa", "shot"],
)
def test_a_run_goes_on_without_a_site(method: dict[str, Any], lost: tuple[str, int], wire: str, tmp_path: Path) -> None:
    """What the site sealed in an exchange whose answer was lost is not taken for a newer model."""
    transport, name = between(tmp_path), method["name"]

    def change(site: str, header: dict[str, Any], answer: Message | Lost) -> Message | Lost:
        moment = (header.get("call"), header.get("envelope", header).get("round"))
        return Lost("the line is dead") if site == "south" and moment == lost else answer

    transport.change = change
    there = run(tmp_path, transport, method, quorum=1, patience=0.1, wire=wire)
    rounds = [json.loads(line) for line in (there / name / "east" / RUN / "rounds.jsonl").read_text().splitlines()]
    assert [list(line["extra"]["missing"]) for line in rounds if "missing" in line["extra"]] == [["south"]]
    assert all("east" in line["target_accuracy"] for line in rounds)
    whole = open_at_site(tmp_path, there, name, "east")
    if name == "shot":
        assert whole["counted"].tolist() == [1.0, 0.0]
    else:
        assert same(whole, open_at_site(tmp_path, there, name, "south"))


def test_what_the_target_refuses_to_open_ends_the_run_with_its_words(tmp_path: Path) -> None:
    """Also with a quorum, which the target is not a part of."""
    transport = between(tmp_path)

    def meddle(site: str, header: dict[str, Any], content: dict[str, Any]) -> Request | None:
        if header["do"] != "measure":
            return None
        spoilt = {"0|sealed": torch.zeros(9, dtype=torch.uint8)}
        return header, {**content, "weights": Sealed({**content["weights"], **spoilt})}

    transport.meddle = meddle
    with pytest.raises(FedshiftError, match="the sealed model of 'north' is not signed"):
        run(tmp_path, transport, SHOT, quorum=1)


# Refused before training ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ({"name": "fedavg"}, "fedavg has none: choose copa, fada, shot, kd3a"),
        ({"name": "kd3a", "robust": {"rule": "norm_clipping"}}, "robust aggregation looks at"),
        ({**SHOT, "average_rounds": 2}, "which average_rounds reads"),
        ({**COPA, "average": "swa"}, "which average reads"),
    ],
)
def test_what_it_cannot_hide_is_refused_before_training(method: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        simulate(tmp_path, options(method), unseen={}, routing="sealed")


def test_check_says_what_leaves_and_what_the_server_reads(tmp_path: Path) -> None:
    files = write_data(tmp_path / "data", SITES)
    both = {**options(SHOT), "methods": [SHOT, {**COPA, "adaptation": True}]}
    experiment = parse({**both, "data": {"name": "arrays", "sites": files}, "engine": {"routing": "sealed"}})
    result = check(experiment)
    assert [(method.shares, method.reads) for method in result.methods] == [
        (("numbers", "sealed"), "no model"),
        (("weights", "numbers", "sealed"), "feature extractors"),
    ]
    assert any("only the target can measure" in warning for warning in result.warnings)


def test_the_coordinator_cannot_measure_it_on_samples_of_its_own(tmp_path: Path) -> None:
    write_kits(tmp_path, list(SITES))
    with pytest.raises(UserError, match="on its own 'west'"):
        deploy(tmp_path, options_of(COPA), engine={"routing": "sealed"})
