"""A fourth site, without labels, joins three: it gets model, predictions and estimate, and sends nothing of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml
from loopback import Loopback, deploy, events, forge, model, options_of, result, same, site_file
from safetensors.torch import load_file

import fedshift
from fedshift.data.domain import Preprocessing
from fedshift.deploy.remote.policy import AuditLog
from fedshift.deploy.remote.requests import InputsRequest
from fedshift.deploy.remote.transport import stamp
from fedshift.deploy.remote.wire import Message, body_of, seal, unseal
from fedshift.deploy.site_estimates import SiteEstimates
from fedshift.deploy.site_file import load_site, read_holding
from fedshift.errors import Refused, UserError
from fedshift.evaluation.estimate.combination import TURNED_VALUES

LABELLED = {"north": 90, "south": 80, "east": 100}
SEND = ["weights", "numbers", "accuracy", "metrics", "confidences", "statistics"]
PROTOCOL = {"kind": "leave_one_out", "seeds": [0], "test_fraction": 0.3}


def samples(seed: int, n: int) -> tuple[np.ndarray, np.ndarray]:  # type: ignore[type-arg]
    draw = np.random.default_rng(seed)
    x = draw.normal(size=(n, 5)).astype(np.float32)
    return x, (x[:, 0] + 0.5 * draw.normal(size=n) > 0).astype(np.int64) + (x[:, 1] > 1)


def received(folder: Path) -> dict[str, Any]:
    """The estimate that the fourth site made."""
    run = next((folder / "va" / "received").iterdir())
    estimate: dict[str, Any] = json.loads((run / "estimate.json").read_text())
    return estimate


def messages(folder: Path) -> list[str]:
    """What the coordinator warned of."""
    return [event.get("message", "") for event in events(folder)]


def files(folder: Path, classes: int = 3, few: int = 0, shift: float = 0.0) -> dict[str, str]:
    """``few``: how many samples of the fourth site have a label; ``shift``: of its inputs, with as much noise."""
    folder.mkdir(parents=True, exist_ok=True)
    for seed, (site, n) in enumerate({**LABELLED, "va": 70}.items()):
        x, y = samples(seed, n)
        if site == "va" and shift:
            x = (x + shift * np.random.default_rng(9).normal(size=x.shape) + shift).astype(np.float32)
        known = np.arange(n) % 70 < few if site == "va" else np.ones(n, dtype=bool)
        held = {"y": np.where(known, np.minimum(y, classes - 1), -1)} if known.any() else {}
        np.savez(folder / f"{site}.npz", x=x, **held)
    return {site: str(folder / f"{site}.npz") for site in (*LABELLED, "va")}


def places(
    folder: Path, held: dict[str, str], without: dict[str, Any] | None = None, labels: str = "none", **policy: Any
) -> dict[str, Path]:
    site_files = {site: site_file(folder, site, held[site], **{"send": SEND, **policy}) for site in LABELLED}
    site_files["va"] = site_file(folder, "va", held["va"], **(without or {}))
    options = yaml.safe_load(site_files["va"].read_text())
    options["data"]["site_labels"] = {"va": labels}
    site_files["va"].write_text(yaml.safe_dump(options))
    return site_files


def both(
    folder: Path,
    method: Any,
    protocol: dict[str, Any],
    classes: int = 3,
    few: int = 0,
    shift: float = 0.0,
    send: list[str] = SEND,
    **engine: Any,
) -> tuple[Path, fedshift.api.Results, Loopback]:
    """The runs of a deployment of four sites, and the same in a simulation."""
    held, labels = files(folder / "data", classes, few, shift), "few" if few else "none"
    options = options_of(method, protocol=protocol, evaluation={"resamples": 0})
    options["methods"] = method if isinstance(method, list) else [method]
    at = places(folder, held, labels=labels, send=send)
    for path in at.values():
        path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), "classes": [*"012"[:classes]]}))
    transport = Loopback(at)
    deployed, _ = deploy(folder, options, sites={**LABELLED, "va": 70}, unseen={}, transport=transport, engine=engine)
    data = {"name": "arrays", "sites": held, "classes": [*"012"[:classes]], "site_labels": {"va": labels}}
    simulated = fedshift.run({**options, "data": data, "engine": {"threads": 1, **engine}}, folder / "simulated")
    return deployed, simulated, transport


def test_it_ends_as_the_simulation_does(tmp_path: Path) -> None:
    deployed, simulated, transport = both(tmp_path, "fedavg", PROTOCOL)
    for site in (*LABELLED, "va"):
        assert same(model(deployed, "fedavg", site), model(simulated.folder, "fedavg", site))
    run = next((tmp_path / "va" / "received").iterdir())
    assert same(load_file(run / "model.safetensors"), model(simulated.folder, "fedavg", "va"))
    told = pd.read_parquet(run / "predictions.parquet")
    expected = simulated.predictions("va")
    assert set(told["part"]) == {"unlabelled"}
    assert np.allclose(told[["score_0", "score_2"]], expected[["score_0", "score_2"]], atol=1e-7)
    # The simulation reads the other sites' samples' scores; this site was told sums alone.
    (here,) = simulated.estimates["va"]["fedavg"]
    there = json.loads((run / "estimate.json").read_text())
    assert (there["sites"], there["samples"]) == (3, 70)
    assert not there["abstain"]
    assert [there[name] for name in ("estimate", "low", "high")] == pytest.approx([here.estimate, here.low, here.high])
    assert (there["harmful"], there["reasons"]) == (here.harmful, list(here.reasons))
    right = 100 * (told["predicted"].astype(int) == samples(3, 70)[1]).mean()
    assert there["low"] <= right <= there["high"]
    # What the model file says is enough to predict there.
    again = fedshift.Model.load(run / "model.safetensors").predict_proba(samples(3, 70)[0])
    assert np.allclose(told[["score_0", "score_1", "score_2"]], again, atol=1e-6)

    lines, _ = AuditLog.check(tmp_path / "va" / "memory" / "audit.jsonl")
    assert [line["do"] for line in lines] == ["hello", *["end"] * 3, "predict", "end", "estimate", "end"]
    assert {kind["kind"] for line in lines for kind in line.get("sent", {}).values()} == {"numbers"}  # of its card
    lines, _ = AuditLog.check(tmp_path / "north" / "memory" / "audit.jsonl")
    assert [line["sent"] for line in lines if line["do"] == "reading"] == [{"reading": {"kind": "confidences"}}]
    assert not list((tmp_path / "north" / "memory").glob("*.scores")), "forgotten when all is over"
    noted = result(deployed, "fedavg", "va")
    assert noted["without_labels"] == {"va": {"samples": 70, "unlike": None, "unusual": None, "at_site": True}}
    assert noted["bytes_by_site"]["sites"]["va"]["up"] == {}
    assert noted["bytes_by_site"]["sites"]["va"]["down"].keys() == {"weights"}
    assert result(deployed, "fedavg", "north")["bytes_by_site"]["sites"]["north"]["up"]["confidences"] > 0
    assert [event["is"] for event in events(tmp_path) if event["what"] == "estimate"] == ["made"]
    output = fedshift.results(deployed).markdown()
    assert "va has no labels, so it is not measured" in output
    assert "the site keeps it beside its predictions" in output
    assert transport.asked.count(("va", "fit")) == 0


@pytest.mark.parametrize("shift", [0.0, 3.0])
def test_sums_of_inputs_give_the_estimate_of_samples(shift: float, tmp_path: Path) -> None:
    """As where the simulation looks at all samples again. Only the warning reads less: not how far the nearest are."""
    deployed, simulated, _ = both(tmp_path, "fedavg", PROTOCOL, shift=shift, send=[*SEND, "moments"])
    x = np.load(tmp_path / "data" / "va.npz")["x"]
    here = simulated.estimate(x, target="va")
    there = received(tmp_path)
    assert here.looked_at
    assert there["looked_at"]
    for name in ("estimate", "low", "high", "usual", "unexplained", "far"):
        value = getattr(here, name)
        assert there[name] == (value if value is None else pytest.approx(value, abs=1e-3))
    assert there["abstain"] is here.abstain
    assert there["harmful"] is here.harmful is (shift > 0)
    assert any("it read sums of the left-out sites' inputs" in reason for reason in there["reasons"])
    for site in LABELLED:
        lines, _ = AuditLog.check(tmp_path / site / "memory" / "audit.jsonl")
        kinds = {line["do"]: {kind["kind"] for kind in line.get("sent", {}).values()} for line in lines}
        assert (kinds["inputs"], kinds["reading"]) == ({"moments"}, {"confidences"})
    counted = result(deployed, "fedavg", "north")["bytes_by_site"]["sites"]
    assert [counted[site]["up"].get("moments", 0) for site in LABELLED] == [0, 128, 128]  # a count and 15 sums
    lines, _ = AuditLog.check(tmp_path / "va" / "memory" / "audit.jsonl")
    assert "inputs" not in {line["do"] for line in lines}
    assert [event["is"] for event in events(tmp_path) if event["what"] == "estimate"] == ["inputs"] * 4 + ["made"]


@pytest.mark.parametrize("kind", ["leave_one_out", "adapt_to_one"])
def test_few_labels_measure_and_train_nothing(kind: str, tmp_path: Path) -> None:
    method = "fedavg" if kind == "leave_one_out" else "kd3a"
    protocol = {"kind": kind, "targets": "all", "seeds": [0], "test_fraction": 0.3}
    deployed, simulated, _ = both(tmp_path, method, protocol, few=20)
    for site in (*LABELLED, "va"):
        assert same(model(deployed, method, site), model(simulated.folder, method, site))
    noted, there = result(deployed, method, "va"), result(simulated.folder, method, "va")
    assert noted["data"]["measured_samples"] == {"va": 20}
    assert noted["data"]["unlabelled_samples"] == ({} if kind == "leave_one_out" else {"va": 50})
    assert noted["data"]["unlabelled_samples"] == there["data"]["unlabelled_samples"]
    assert noted["selected"] == there["selected"]
    told = pd.read_parquet(next((tmp_path / "va" / "received").iterdir()) / "predictions.parquet")
    measured = told[told["part"] == "target"]
    assert sorted(told["row"]) == list(range(70))
    right = (measured["predicted"].astype(int) == samples(3, 70)[1][:20]).mean()
    assert noted["selected"]["last"]["accuracy"] == pytest.approx(100 * right)
    expected = simulated.predictions("va")
    for estimate in (told, expected):
        estimate.sort_values("row", inplace=True)
    assert np.allclose(told[["score_0", "score_2"]], expected[["score_0", "score_2"]], atol=1e-7)
    lines, _ = AuditLog.check(tmp_path / "va" / "memory" / "audit.jsonl")
    assert {kind["kind"] for line in lines for kind in line.get("sent", {}).values()} >= {"numbers", "accuracy"}
    assert not [line for line in lines if "sums" in line.get("sent", {})], "they are of use to other sites alone"
    assert "va" in fedshift.results(deployed).markdown()


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("kind", ["leave_one_out", "adapt_to_one"])
def test_few_labels_train_and_measure_nothing(kind: str, scaled: bool, tmp_path: Path) -> None:
    """One file, two kits: what has no label is a target, what has one is a source. Each gives sums of its own rows."""
    method, labelled = "fedavg" if kind == "leave_one_out" else "kd3a", "va.labelled"
    protocol = {"kind": kind, "targets": "all", "seeds": [0], "test_fraction": 0.3}
    held = files(tmp_path / "data", few=30)
    options = options_of(method, protocol=protocol, evaluation={"resamples": 0})  # type: ignore[arg-type]
    options["methods"] = [method]
    at = places(tmp_path, held, labels="few_train")
    at[labelled] = site_file(tmp_path, labelled, held["va"], send=SEND)
    options_of_va = yaml.safe_load(at["va"].read_text())
    at[labelled].write_text(yaml.safe_dump({**yaml.safe_load(at[labelled].read_text()), "data": options_of_va["data"]}))
    for path in at.values() if scaled else ():
        written = yaml.safe_load(path.read_text())
        written["data"]["standardise"] = True
        written["policy"]["send"] = SEND
        path.write_text(yaml.safe_dump(written))
    sites, transport = {**LABELLED, "va": 70, labelled: 30}, Loopback(at)
    (tmp_path / "data" / f"{labelled}.npz").touch()
    deployed, _ = deploy(tmp_path, options, sites=sites, unseen={}, transport=transport)
    data = {"name": "arrays", "sites": held, "classes": [*"012"], "site_labels": {"va": "few_train"}}
    data |= {"standardise": True} if scaled else {}
    simulated = fedshift.run({**options, "data": data, "engine": {"threads": 1}}, tmp_path / "simulated")
    for site in (*LABELLED, "va"):
        assert same(model(deployed, method, site), model(simulated.folder, method, site))
    noted, there = result(deployed, method, "va"), result(simulated.folder, method, "va")
    for part in ("training_samples", "held_out_samples", "unlabelled_samples", "measured_samples"):
        assert noted["data"][part] == there["data"][part]
    assert noted["data"]["measured_samples"] == {}
    assert not (deployed / method / labelled).exists(), "it is no target"
    told = pd.read_parquet(next((tmp_path / "va" / "received").iterdir()) / "predictions.parquet")
    assert (set(told["part"]), len(told)) == ({"unlabelled"}, 40)
    wrong = {**options, "name": "other", "protocol": {**protocol, "targets": [labelled]}}
    with pytest.raises(UserError, match="holds the labels that train: name the site itself"):
        deploy(tmp_path / "wrong", wrong, sites=sites, unseen={}, transport=transport)


def test_auroc_and_the_rates_at_the_threshold_are_those_of_the_simulation(tmp_path: Path) -> None:
    _, simulated, _ = both(tmp_path, "fedavg", PROTOCOL, classes=2)
    (here,) = simulated.estimates["va"]["fedavg"]
    run = next((tmp_path / "va" / "received").iterdir())
    there = json.loads((run / "estimate.json").read_text())
    assert there["threshold"] == here.threshold != 0.5
    for name, measure in here.measures.items():
        assert measure.estimate is not None
        told = [there["measures"][name][part] for part in ("estimate", "low", "high")]
        assert told == pytest.approx([measure.estimate, measure.low, measure.high])


def test_the_coordinator_knows_whose_model_should_answer(tmp_path: Path) -> None:
    """As in a simulation, by what adapting gained at the sites with labels; nothing of the fourth site is asked."""
    protocol = {"kind": "adapt_to_one", "targets": "all", "seeds": [0], "test_fraction": 0.3}
    deployed, simulated, _ = both(tmp_path, ["fedavg", {"name": "shot", "bottleneck": 4}], protocol)
    choice, same_there = fedshift.results(deployed).choice("va"), simulated.choice("va")
    assert (choice.method, choice.common, choice.why) == (same_there.method, "fedavg", same_there.why)
    assert choice.gains["shot"] == pytest.approx(same_there.gains["shot"])
    assert f"At va the model of {choice.method} should answer" in fedshift.results(deployed).markdown()


@pytest.mark.parametrize("method", ["kd3a", {"name": "shot", "bottleneck": 4}, "recipe_unlabelled"])
def test_it_trains_where_a_method_takes_it(method: Any, tmp_path: Path) -> None:
    protocol = {"kind": "adapt_to_one", "targets": ["va"], "seeds": [0], "test_fraction": 0.3}
    deployed, simulated, _ = both(tmp_path, method, protocol)
    name = method if isinstance(method, str) else method["name"]
    assert same(model(deployed, name, "va"), model(simulated.folder, name, "va"))
    noted = result(deployed, name, "va")
    assert noted["data"]["unlabelled_samples"] == {"va": 70}
    assert noted["rounds"] == simulated.collected.unmeasured[0].result.rounds
    run = next((tmp_path / "va" / "received").iterdir())
    assert len(pd.read_parquet(run / "predictions.parquet")) == 70
    there = json.loads((run / "estimate.json").read_text())
    assert there["abstain"]
    assert "too few sites" in there["reasons"][0]


def table_site(folder: Path, site: str, frame: pd.DataFrame, **data: Any) -> Path:
    site_yaml = folder / site / "SITE.yaml"
    site_yaml.parent.mkdir(parents=True)
    frame.to_csv(site_yaml.parent / "t.csv", index=False)
    source = {"name": "table", "sites": {site: "t.csv"}, "label": "ill", "numeric": ["a", "b"], "categorical": ["sex"]}
    options = {"site": site, "data": {**source, **data}, "classes": ["no", "yes"], "device": "cpu", "threads": 1}
    site_yaml.write_text(yaml.safe_dump({**options, "policy": {"send": SEND}}))
    return site_yaml


def patients(seed: int, months: bool = False, sex: tuple[str, str] = ("f", "m")) -> pd.DataFrame:
    draw = np.random.default_rng(seed)
    a, b = draw.normal(60, 9, 80), draw.normal(size=80)
    ill = np.where(a + 9 * b + draw.normal(0, 4, 80) > 60, "yes", "no")
    return pd.DataFrame({"a": 12 * a if months else a, "b": b, "sex": draw.choice(sex, 80), "ill": ill})


@pytest.mark.parametrize(
    ("va", "reason"),
    [
        (patients(3), None),
        (patients(3, months=True), "column 'a'"),
        (patients(3, sex=("F", "M")), "column 'sex': 100 % of the rows have an unknown category ('F', 'M'"),
        (patients(3).assign(a=60.0, b=0.0, sex="f"), "the model says the same of every sample"),
        (patients(3).head(12), None),
        (pd.concat([patients(3).head(40), patients(4, months=True).head(40)]), "column 'a': 50 % of the rows"),
    ],
)
def test_a_table_is_guarded_where_it_lies(va: pd.DataFrame, reason: str | None, tmp_path: Path) -> None:
    site_files = {site: table_site(tmp_path, site, patients(seed)) for seed, site in enumerate(LABELLED)}
    site_files["va"] = table_site(tmp_path, "va", va.drop(columns="ill"), site_labels={"va": "none"})
    options = options_of("fedavg", protocol=PROTOCOL, evaluation={"resamples": 0})  # type: ignore[arg-type]
    deploy(tmp_path, options, sites={**LABELLED, "va": len(va)}, unseen={}, transport=Loopback(site_files))
    run = next((tmp_path / "va" / "received").iterdir())
    there = json.loads((run / "estimate.json").read_text())
    assert there["abstain"] is (reason is not None)
    assert reason is None or any(reason in text for text in there["reasons"])
    if len(va) < 20:
        assert there["high"] - there["low"] > 30


@pytest.mark.parametrize("months", [False, True])
def test_sums_of_a_tables_inputs_are_in_the_encoding_of_each_run(months: bool, tmp_path: Path) -> None:
    """One site alone has a category, so what a run encodes depends on whom it leaves out."""
    frames = {site: patients(seed) for seed, site in enumerate((*LABELLED, "va"))}
    frames["north"].loc[:29, "sex"] = "x"
    frames["east"].loc[:9, "a"] = np.nan
    if months:
        frames["va"] = frames["va"].assign(b=3 * frames["va"]["b"] + 5)
    places = {
        site: table_site(tmp_path, site, frame, **({"site_labels": {"va": "none"}} if site == "va" else {}))
        for site, frame in frames.items()
    }
    for site in LABELLED:
        options = yaml.safe_load(places[site].read_text())
        options["policy"] = {"send": [*SEND, "moments"], "smallest_group": 1}
        places[site].write_text(yaml.safe_dump(options))
    options = options_of("fedavg", protocol=PROTOCOL, evaluation={"resamples": 0})  # type: ignore[arg-type]
    deploy(tmp_path, options, sites={**LABELLED, "va": 80}, unseen={}, transport=Loopback(places))
    held = {site: str(place.parent / "t.csv") for site, place in places.items()}
    data = {"name": "table", "sites": held, "label": "ill", "numeric": ["a", "b"], "categorical": ["sex"]}
    whole = {**options, "methods": ["fedavg"], "data": {**data, "site_labels": {"va": "none"}}}
    simulated = fedshift.run({**whole, "engine": {"threads": 1}}, tmp_path / "simulated")
    here, there = simulated.estimate(frames["va"].drop(columns="ill"), target="va"), received(tmp_path)
    assert here.looked_at is there["looked_at"] is True
    for name in ("estimate", "low", "high"):
        value = getattr(here, name)
        assert there[name] == (value if value is None else pytest.approx(value, abs=1e-3))
    assert there["harmful"] is here.harmful


@pytest.mark.parametrize("keep", [["south"], ["south", "east"]])
def test_sums_of_inputs_are_those_of_the_sites_that_tell_them(keep: list[str], tmp_path: Path) -> None:
    """Of two or more: else scores alone are read, and the estimate says so."""
    held = files(tmp_path / "data")
    at = places(tmp_path, held, send=[*SEND, "moments"])
    for site in keep:
        strict = yaml.safe_load(at[site].read_text())
        strict["policy"]["send"] = SEND
        at[site].write_text(yaml.safe_dump(strict))
    transport = Loopback(at)
    options = options_of("fedavg", protocol=PROTOCOL, evaluation={"resamples": 0})  # type: ignore[arg-type]
    deploy(tmp_path, options, sites={**LABELLED, "va": 70}, unseen={}, transport=transport)
    there, enough = received(tmp_path), len(keep) == 1
    assert there["looked_at"] is enough
    how = "none come from 'south'" if enough else "rests on scores alone"
    assert any(how in reason for reason in there["reasons"])
    rest = "the moments of other sites" if enough else "scores alone"
    assert any("'south' sends no moments" in text and rest in text for text in messages(tmp_path))
    asked = LABELLED.keys() - set(keep) if enough else set()
    assert {site for site, do in transport.asked if do == "inputs"} == asked


@pytest.mark.parametrize("mirrored", [False, True])
def test_mirrored_columns_get_no_estimate(mirrored: bool, tmp_path: Path) -> None:
    """Their scores look usual, so it is the sides of the means on which values lie that tell."""
    held = files(tmp_path / "data")
    for site, path in held.items():
        with np.load(path) as stored:
            arrays = {name: np.exp(array) if name == "x" else array for name, array in stored.items()}
        if mirrored and site == "va":
            arrays["x"] = 2 * arrays["x"].mean(axis=0) - arrays["x"]
        np.savez(path, **arrays)
    options = options_of("fedavg", protocol=PROTOCOL, evaluation={"resamples": 0})  # type: ignore[arg-type]
    at = places(tmp_path, held, send=[*SEND, "moments"])
    deploy(tmp_path, options, sites={**LABELLED, "va": 70}, unseen={}, transport=Loopback(at))
    there = received(tmp_path)
    data = {"name": "arrays", "sites": held, "classes": [*"012"], "site_labels": {"va": "none"}}
    simulated = fedshift.run({**options, "data": data, "engine": {"threads": 1}}, tmp_path / "simulated")
    here = simulated.estimate(np.load(held["va"])["x"], target="va")
    for reasons in (there["reasons"], here.reasons):
        assert any(reason == TURNED_VALUES for reason in reasons) is mirrored
    if mirrored:
        assert (there["abstain"], here.abstain, there["too_unlike"], here.too_unlike) == (True,) * 4
        assert there["harmful"] is here.harmful is True


def test_copies_count_once_where_only_sums_are_known(tmp_path: Path) -> None:
    """As in a simulation: ten rows that stand there seven times each are ten rows."""
    held = files(tmp_path / "data")
    x = np.tile(np.load(held["va"])["x"][:10], (7, 1))
    np.savez(held["va"], x=x)
    options = options_of("fedavg", protocol=PROTOCOL, evaluation={"resamples": 0})  # type: ignore[arg-type]
    at = places(tmp_path, held, send=[*SEND, "moments"])
    deploy(tmp_path, options, sites={**LABELLED, "va": 70}, unseen={}, transport=Loopback(at))
    there = received(tmp_path)
    assert any("70 count as 10 different ones" in reason for reason in there["reasons"])
    data = {"name": "arrays", "sites": held, "classes": [*"012"], "site_labels": {"va": "none"}}
    simulated = fedshift.run({**options, "data": data, "engine": {"threads": 1}}, tmp_path / "simulated")
    here = simulated.estimate(x, target="va")
    for name in ("estimate", "low", "high"):
        value = getattr(here, name)
        assert there[name] == (value if value is None else pytest.approx(value, abs=1e-3))


@pytest.mark.threat("site_without_labels")
@pytest.mark.parametrize("which", ["policy", "budget", "secure", "few"])
def test_sums_of_inputs_leave_only_as_the_policy_says(which: str, tmp_path: Path) -> None:
    policy = {
        "policy": {"send": SEND},
        "budget": {"send": [*SEND, "moments"]},
        "secure": {"send": [*SEND, "moments"], "secure": "required"},
        "few": {"send": [*SEND, "moments"], "smallest_group": 91},
    }[which]
    site_yaml = site_file(tmp_path, "north", files(tmp_path / "data")["north"], **policy)
    budget = {"privacy": {"epsilon": 5.0, "measurement_noise": 5.0}} if which == "budget" else {}
    site_yaml.write_text(yaml.safe_dump({**yaml.safe_load(site_yaml.read_text()), **budget}))
    program = Loopback({"north": site_yaml}).programs["north"]
    header = stamp(InputsRequest(run="r", preprocessing=Preprocessing(kind="features")), body_of({}))[1]
    answer = unseal(program.handle(header, "an attacker"))[0]
    assert answer["error"].endswith("Refused")
    assert "inputs" not in answer
    lines, _ = AuditLog.check(tmp_path / "north" / "memory" / "audit.jsonl")
    assert [("sent" in line, "refused" in line) for line in lines] == [(False, True)]


@pytest.mark.threat("site_without_labels")
@pytest.mark.parametrize("preprocessing", [{"kind": "features", "shape": (7,)}, {"kind": "image", "shape": (3, 8, 8)}])
def test_sums_of_inputs_are_of_the_sites_own_samples(preprocessing: dict[str, Any], tmp_path: Path) -> None:
    """Whatever shape is asked for: five sums of five columns, with values of few rows told as the usual one."""
    held = files(tmp_path / "data")
    x = np.array(np.load(held["north"])["x"])
    x[:, 4] = np.arange(90) == 33  # one patient
    np.savez(held["north"], x=x, y=np.load(held["north"])["y"])
    site_yaml = site_file(tmp_path, "north", held["north"], send=[*SEND, "moments"], smallest_group=10)
    program = Loopback({"north": site_yaml}).programs["north"]
    request = InputsRequest(run="r", preprocessing=Preprocessing(**preprocessing))
    answer = unseal(program.handle(stamp(request, body_of({}))[1], "an attacker"))[0]
    assert answer["inputs"]["samples"] == 90
    np.testing.assert_allclose(answer["inputs"]["total"], [*x[:, :4].sum(axis=0, dtype=np.float64), 0.0], rtol=1e-6)
    np.testing.assert_allclose(answer["inputs"]["squares"][:4], np.square(x[:, :4].astype(np.float64)).sum(axis=0))


@pytest.mark.parametrize("longer", [0, 1])
def test_false_sums_of_inputs_leave_an_estimate(longer: int, tmp_path: Path) -> None:
    """Of a site that lies about how many values there are, or how large they are."""

    def spoil(site: str, header: dict[str, Any], answer: Any) -> Any:
        answer_header, content, _ = unseal(answer)
        if site == "north" and header["do"] == "inputs":
            false = {"samples": 9, "total": [1e29] * (5 + longer), "squares": [1e59] * (5 + longer)}
            return seal({**answer_header, "inputs": false}, body_of(content))
        return answer

    transport = Loopback(places(tmp_path, files(tmp_path / "data"), send=[*SEND, "moments"]), spoil)
    options = options_of("fedavg", protocol=PROTOCOL, evaluation={"resamples": 0})  # type: ignore[arg-type]
    deploy(tmp_path, options, sites={**LABELLED, "va": 70}, unseen={}, transport=transport)
    there = received(tmp_path)
    assert there["sites"] == 3
    assert there["looked_at"] is (not longer)
    assert there["estimate"] is None or 0 <= there["low"] <= there["estimate"] <= there["high"] <= 100


def test_few_labels_of_a_table_train(tmp_path: Path) -> None:
    """Its two parts give sums and categories of their own rows, as in a simulation."""
    frames = {site: patients(seed) for seed, site in enumerate((*LABELLED, "va"))}
    frames["va"].loc[30:, "ill"] = ""
    frames["va"].loc[40:45, "a"] = np.nan
    site_files = {site: table_site(tmp_path, site, frames[site]) for site in LABELLED}
    site_files["va"] = table_site(tmp_path, "va", frames["va"], site_labels={"va": "few_train"})
    site_files["va.labelled"] = table_site(tmp_path, "va.labelled", frames["va"], site_labels={"va": "few_train"})
    written = yaml.safe_load(site_files["va.labelled"].read_text())
    written["data"]["sites"] = {"va": "t.csv"}
    for path, expected in (
        (site_files["va.labelled"], written),
        *((other_path, None) for other_path in site_files.values()),
    ):
        options = expected or yaml.safe_load(path.read_text())
        path.write_text(yaml.safe_dump({**options, "policy": {"send": SEND, "smallest_group": 1}}))
    options = options_of("fedavg", protocol=PROTOCOL, evaluation={"resamples": 0})  # type: ignore[arg-type]
    sites = {**LABELLED, "va": 80, "va.labelled": 30}
    deployed, _ = deploy(tmp_path, options, sites=sites, unseen={}, transport=Loopback(site_files))
    held = {site: str(site_files[site].parent / "t.csv") for site in (*LABELLED, "va")}
    data = {"name": "table", "sites": held, "label": "ill", "numeric": ["a", "b"], "categorical": ["sex"]}
    whole = {**data, "site_labels": {"va": "few_train"}}
    simulated = fedshift.run({**options, "data": whole, "engine": {"threads": 1}}, tmp_path / "simulated")
    for site in (*LABELLED, "va"):
        assert same(model(deployed, "fedavg", site), model(simulated.folder, "fedavg", site))


@pytest.mark.threat("site_without_labels")
def test_a_coordinator_gets_nothing_that_it_may_not(tmp_path: Path) -> None:
    """It asks for measures, for training with labels, for sums, and a labelled site for more than one reading."""
    held = files(tmp_path / "data")
    transport, caught = Loopback(places(tmp_path, held)), dict[tuple[str, str], Message]()

    handle = {site: program.handle for site, program in transport.programs.items()}
    for site, program in transport.programs.items():

        def listen(message: Message, coordinator: str, site: str = site) -> Message:
            caught.setdefault((site, json.loads(message.header)["do"]), message)
            return handle[site](message, coordinator)

        program.handle = listen  # type: ignore[method-assign]
    options = options_of("fedavg", protocol={**PROTOCOL, "targets": "all"}, evaluation={"resamples": 0})  # type: ignore[arg-type]
    deploy(tmp_path, options, sites={**LABELLED, "va": 70}, unseen={}, transport=transport)

    def answer_of(site: str, message: Message, **changes: Any) -> str:
        return str(unseal(handle[site](forge(message, **changes), "an attacker"))[0].get("message"))

    predict, hello = caught["va", "predict"], caught["va", "hello"]
    assert unseal(handle["va"](hello, "a coordinator"))[0]["card"]["unlabelled"] is True
    assert "has no labels (its data.site_labels) and measures no model" in answer_of("va", predict, do="measure")
    whole = {"part": "target", "sums": True}
    assert "measures no model" in answer_of("va", caught["north", "measure"], whole=whole)
    header = unseal(caught["north", "call"])[0]
    for role in ("source", "unseen"):
        part = {**header["part"], "role": role, "fingerprint": transport.programs["va"].holding.fingerprint}
        assert "trains as a target only" in answer_of("va", caught["north", "call"], part=part)
    assert "has no scores" in answer_of("va", caught["north", "reading"]) or "refuses" in answer_of(
        "va", caught["north", "reading"]
    )
    assert "has labels" in answer_of("north", predict)
    assert "has labels" in answer_of("north", caught["va", "estimate"])
    # Of one run a site gives one reading, and none where its policy does not let it out.
    for do in ("predict", "estimate"):
        for field in ("metadata", "known"):
            assert "Traceback" not in answer_of("va", caught["va", do], **{field: [["x"]]})
    strict = places(tmp_path / "strict", held, send=["weights", "numbers", "accuracy", "metrics"])
    north = Loopback({"north": strict["north"]}).programs["north"]
    refused = unseal(north.handle(forge(caught["north", "measure"], whole=whole), "an attacker"))[0]
    assert "refuses to send confidences" in refused["message"]
    assert (
        "refuses to send confidences" in unseal(north.handle(caught["north", "reading"], "an attacker"))[0]["message"]
    )


@pytest.mark.threat("site_without_labels")
def test_a_second_reading_of_other_sums_is_refused(tmp_path: Path) -> None:
    held, told = files(tmp_path / "data"), []

    def ask_again(site: str, header: dict[str, Any], answer: Any) -> Any:
        if header["do"] == "reading" and site == "north":
            others = {**header["sums"], "cost": 0.0}
            message = seal({**header, "sums": others}, body_of({}))
            again = forge(message, sums=others)
            told.append(unseal(transport.programs[site].handle(again, "an attacker"))[0].get("message"))
            told.append(unseal(transport.programs[site].handle(seal(header, body_of({})), "again"))[0].get("message"))
        return answer

    transport = Loopback(places(tmp_path, held), ask_again)
    options = options_of("fedavg", protocol=PROTOCOL, evaluation={"resamples": 0})  # type: ignore[arg-type]
    deploy(tmp_path, options, sites={**LABELLED, "va": 70}, unseen={}, transport=transport)
    assert told == ["site 'north' gives one reading of its scores in a run, and gave it", None]


def test_impossible_sums_make_no_case(tmp_path: Path) -> None:
    """A site that lies about its sums in a way that shows is no case, and the estimate rests on the others."""

    def spoil(site: str, header: dict[str, Any], answer: Any) -> Any:
        answer_header, content, _ = unseal(answer)
        if site == "north" and header["do"] == "reading":
            answer_header["reading"]["parts"]["transport"] = 7.0
            return seal(answer_header, body_of(content))
        return answer

    transport = Loopback(places(tmp_path, files(tmp_path / "data")), spoil)
    options = options_of("fedavg", protocol=PROTOCOL, evaluation={"resamples": 0})  # type: ignore[arg-type]
    deploy(tmp_path, options, sites={**LABELLED, "va": 70}, unseen={}, transport=transport)
    run = next((tmp_path / "va" / "received").iterdir())
    assert json.loads((run / "estimate.json").read_text())["sites"] == 2
    assert any("'north' is no case" in event.get("message", "") for event in events(tmp_path))


def test_without_confidences_there_is_no_estimate(tmp_path: Path) -> None:
    transport = Loopback(places(tmp_path, files(tmp_path / "data"), send=["weights", "numbers", "accuracy", "metrics"]))
    options = options_of("fedavg", protocol=PROTOCOL, evaluation={"resamples": 0})  # type: ignore[arg-type]
    deploy(tmp_path, options, sites={**LABELLED, "va": 70}, unseen={}, transport=transport)
    run = next((tmp_path / "va" / "received").iterdir())
    assert "too few sites" in json.loads((run / "estimate.json").read_text())["reasons"][0]
    assert any("'north' sends no confidences" in event.get("message", "") for event in events(tmp_path))


def test_what_a_site_says_of_its_labels_is_held_to(tmp_path: Path) -> None:
    held = files(tmp_path / "data")
    site_yaml = site_file(tmp_path, "va", held["north"])
    options = yaml.safe_load(site_yaml.read_text())

    def read(**changes: Any) -> Any:
        labels = changes.pop("site_labels", {"va": "none"})
        site_yaml.write_text(yaml.safe_dump({**options, "data": {**options["data"], "site_labels": labels}, **changes}))
        return read_holding(load_site(site_yaml))

    (warning,) = read().data.warnings
    assert "has labels in an array y, which are not read, since data.site_labels says none" in warning
    assert (read().domain.labels == -1).all()
    with pytest.raises(UserError, match="every sample of 'va' has a label: leave it out"):
        read(site_labels={"va": "few"})
    with pytest.raises(UserError, match="there is no site 'west'"):
        read(site_labels={"west": "none"})
    with pytest.raises(UserError, match="list all classes of the federation"):
        read(classes=None)
    with pytest.raises(UserError, match="received: a folder outside that of memory"):
        read(received="memory/here")
    options["site"] = "elsewhere"
    with pytest.raises(UserError, match="domain: say which part of the file this site holds: va or va"):
        read(site_labels={"va": "few_train"})


def test_a_site_with_a_budget_of_privacy_sends_no_sums_without_noise(tmp_path: Path) -> None:
    site_yaml = site_file(tmp_path, "north", files(tmp_path / "data")["north"], send=SEND)
    written = yaml.safe_load(site_yaml.read_text())
    site_yaml.write_text(yaml.safe_dump({**written, "privacy": {"epsilon": 5.0, "measurement_noise": 5.0}}))
    with pytest.raises(Refused, match="sends no confidences without noise"):
        SiteEstimates(load_site(site_yaml)).check_gives(masked=True)
