"""A fourth site, without labels, joins three: it gets model, predictions and estimate, and sends nothing of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml
from asked import answer_to, forge
from loopback import Loopback, deploy, options_of
from outcomes import alike, audit, events, model, result, same
from safetensors.torch import load_file
from site_yaml import edit, site_file, table_files

import fedshift
from fedshift.data.domain import Preprocessing
from fedshift.deploy.remote.requests import InputsRequest
from fedshift.deploy.remote.transport import stamp
from fedshift.deploy.remote.wire import Message, body_of, seal, unseal
from fedshift.deploy.site_estimates import SiteEstimates
from fedshift.deploy.site_file import load_site, read_holding
from fedshift.deploy.site_server import open_site
from fedshift.errors import Refused, UserError
from fedshift.evaluation.estimate.combination import TURNED_VALUES
from tried import slow_after

LABELLED = {"north": 90, "south": 80, "east": 100}
LEFT_OUT = {**LABELLED, "va": 70}

SEND = ["weights", "numbers", "accuracy", "metrics", "confidences", "statistics"]
PROTOCOL = {"kind": "leave_one_out", "seeds": [0], "test_fraction": 0.3}
OPTIONS = options_of("fedavg", protocol=PROTOCOL, evaluation={"resamples": 0})


def samples(seed: int, n: int) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(seed)
    x = draw.normal(size=(n, 5)).astype(np.float32)
    return x, (x[:, 0] + 0.5 * draw.normal(size=n) > 0).astype(np.int64) + (x[:, 1] > 1)


def run_of(folder: Path) -> Path:
    """What the fourth site was given and made of a run."""
    return next((folder / "va" / "received").iterdir())


def received(folder: Path) -> dict[str, Any]:
    """The estimate that the fourth site made."""
    estimate: dict[str, Any] = json.loads((run_of(folder) / "estimate.json").read_text())
    return estimate


def predicted(folder: Path) -> pd.DataFrame:
    return pd.read_parquet(run_of(folder) / "predictions.parquet")


def deploy_at(folder: Path, at: Any, options: Any = OPTIONS, change: Any = None, **more: int) -> tuple[Path, Loopback]:
    transport = Loopback(at, change)
    return deploy(folder, options, sites={**LEFT_OUT, **more}, unseen={}, transport=transport)[0], transport


def messages(folder: Path) -> list[str]:
    """What the coordinator warned of."""
    return [event.get("message", "") for event in events(folder)]


def files(folder: Path, classes: int = 3, few: int = 0, shift: float = 0.0) -> dict[str, str]:
    """``few``: how many samples of the fourth site have a label; ``shift``: of its inputs, with as much noise."""
    folder.mkdir(parents=True, exist_ok=True)
    for seed, (site, n) in enumerate(LEFT_OUT.items()):
        x, y = samples(seed, n)
        if site == "va" and shift:
            x = (x + shift * np.random.default_rng(9).normal(size=x.shape) + shift).astype(np.float32)
        known = np.arange(n) % 70 < few if site == "va" else np.ones(n, dtype=bool)
        labels = {"y": np.where(known, np.minimum(y, classes - 1), -1)} if known.any() else {}
        np.savez(folder / f"{site}.npz", x=x, **labels)
    return {site: str(folder / f"{site}.npz") for site in LEFT_OUT}


def places(folder: Path, held: dict[str, str], labels: str = "none", **policy: Any) -> dict[str, Path]:
    site_files = {site: site_file(folder, site, held[site], **{"send": SEND, **policy}) for site in LABELLED}
    site_files["va"] = edit(site_file(folder, "va", held["va"]), "data", site_labels={"va": labels})
    return site_files


def both(
    folder: Path,
    methods: Any = "fedavg",
    protocol: dict[str, Any] = PROTOCOL,
    classes: int = 3,
    few: int = 0,
    shift: float = 0.0,
    send: list[str] = SEND,
    **engine: Any,
) -> tuple[Path, fedshift.api.Results, Loopback]:
    """The runs of a deployment of four sites, and the same in a simulation."""
    held, labels, names = files(folder / "data", classes, few, shift), "few" if few else "none", [*"012"[:classes]]
    options = {**OPTIONS, "protocol": protocol, "methods": methods if isinstance(methods, list) else [methods]}
    at = {site: edit(path, classes=names) for site, path in places(folder, held, labels, send=send).items()}
    transport = Loopback(at)
    deployed, _ = deploy(folder, options, sites=LEFT_OUT, unseen={}, transport=transport, engine=engine)
    data = {"name": "arrays", "sites": held, "classes": names, "site_labels": {"va": labels}}
    simulated = fedshift.run({**options, "data": data, "engine": {"threads": 1, **engine}}, folder / "simulated")
    return deployed, simulated, transport


def check_scores(frame: pd.DataFrame, other: pd.DataFrame) -> None:
    assert np.allclose(frame[["score_0", "score_2"]], other[["score_0", "score_2"]], atol=1e-7)


def test_it_ends_as_the_simulation_does(tmp_path: Path) -> None:
    deployed, simulated, transport = both(tmp_path)
    assert all(alike(deployed, simulated.folder, target=site) for site in LEFT_OUT)
    at_site = run_of(tmp_path) / "model.safetensors"
    assert same(load_file(at_site), model(simulated.folder, target="va"))
    predictions = predicted(tmp_path)
    assert set(predictions["part"]) == {"unlabelled"}
    check_scores(predictions, simulated.predictions("va"))
    # The simulation reads the other sites' samples' scores; this site was told sums alone.
    (here,) = simulated.estimates["va"]["fedavg"]
    there = received(tmp_path)
    assert (there["sites"], there["samples"], there["abstain"]) == (3, 70, False)
    assert [there[name] for name in ("estimate", "low", "high")] == pytest.approx([here.estimate, here.low, here.high])
    assert (there["harmful"], there["reasons"]) == (here.harmful, list(here.reasons))
    right = 100 * (predictions["predicted"].astype(int) == samples(3, 70)[1]).mean()
    assert there["low"] <= right <= there["high"]
    # What the model file says is enough to predict there.
    again = fedshift.Model.load(at_site).predict_proba(samples(3, 70)[0])
    assert np.allclose(predictions[["score_0", "score_1", "score_2"]], again, atol=1e-6)

    lines = audit(tmp_path / "va")
    assert [line["do"] for line in lines] == ["hello", *["end"] * 3, "predict", "end", "estimate", "end"]
    assert {kind["kind"] for line in lines for kind in line.get("sent", {}).values()} == {"numbers"}  # of its card
    readings = [line["sent"] for line in audit(tmp_path / "north") if line["do"] == "reading"]
    assert readings == [{"reading": {"kind": "confidences"}}]
    assert not list((tmp_path / "north" / "memory").glob("*.scores")), "forgotten when all is over"
    stored = result(deployed, target="va")
    assert stored["without_labels"] == {"va": {"samples": 70, "unlike": None, "unusual": None, "at_site": True}}
    counted = stored["bytes_by_site"]["sites"]["va"]
    assert (counted["up"], counted["down"].keys()) == ({}, {"weights"})
    assert result(deployed, target="north")["bytes_by_site"]["sites"]["north"]["up"]["confidences"] > 0
    assert [event["is"] for event in events(tmp_path) if event["what"] == "estimate"] == ["made"]
    output = fedshift.results(deployed).markdown()
    assert "va has no labels, so it is not measured" in output
    assert "the site keeps it beside its predictions" in output
    assert transport.asked.count(("va", "fit")) == 0


def check_estimate(here: Any, there: dict[str, Any], *names: str) -> None:
    assert here.looked_at is there["looked_at"] is True
    for name in ("estimate", "low", "high", *names):
        value = getattr(here, name)
        assert there[name] == (value if value is None else pytest.approx(value, abs=1e-3))
    assert (there["abstain"], there["harmful"]) == (here.abstain, here.harmful)


@pytest.mark.slow
@pytest.mark.parametrize("shift", [0.0, 3.0])
def test_sums_of_inputs_give_the_estimate_of_samples(shift: float, tmp_path: Path) -> None:
    """As where the simulation looks at all samples again. Only the warning reads less: not how far the nearest are."""
    deployed, simulated, _ = both(tmp_path, shift=shift, send=[*SEND, "moments"])
    there = received(tmp_path)
    here = simulated.estimate(np.load(tmp_path / "data" / "va.npz")["x"], target="va")
    check_estimate(here, there, "usual", "unexplained", "far")
    assert here.harmful is (shift > 0)
    assert any("it read sums of the left-out sites' inputs" in reason for reason in there["reasons"])
    for site in LABELLED:
        kinds = {
            line["do"]: {kind["kind"] for kind in line.get("sent", {}).values()} for line in audit(tmp_path / site)
        }
        assert (kinds["inputs"], kinds["reading"]) == ({"moments"}, {"confidences"})
    counted = result(deployed, target="north")["bytes_by_site"]["sites"]
    assert [counted[site]["up"].get("moments", 0) for site in LABELLED] == [0, 128, 128]  # a count and 15 sums
    assert "inputs" not in {line["do"] for line in audit(tmp_path / "va")}
    assert [event["is"] for event in events(tmp_path) if event["what"] == "estimate"] == ["inputs"] * 4 + ["made"]


KINDS = {"leave_one_out": "fedavg", "adapt_to_one": "kd3a"}


def protocol_of(kind: str, *targets: str) -> dict[str, Any]:
    return {"kind": kind, "targets": [*targets] or "all", "seeds": [0], "test_fraction": 0.3}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_few_labels_measure_and_train_nothing(kind: str, tmp_path: Path) -> None:
    method = KINDS[kind]
    deployed, simulated, _ = both(tmp_path, method, protocol_of(kind), few=20)
    assert all(alike(deployed, simulated.folder, method, site) for site in LEFT_OUT)
    stored, there = result(deployed, method, "va"), result(simulated.folder, method, "va")
    assert stored["data"]["measured_samples"] == {"va": 20}
    unlabelled = stored["data"]["unlabelled_samples"]
    assert unlabelled == there["data"]["unlabelled_samples"] == ({} if kind == "leave_one_out" else {"va": 50})
    assert stored["selected"] == there["selected"]
    predictions, expected = (frame.sort_values("row") for frame in (predicted(tmp_path), simulated.predictions("va")))
    assert list(predictions["row"]) == list(range(70))
    measured = predictions[predictions["part"] == "target"]
    right = (measured["predicted"].astype(int) == samples(3, 70)[1][:20]).mean()
    assert stored["selected"]["last"]["accuracy"] == pytest.approx(100 * right)
    check_scores(predictions, expected)
    lines = audit(tmp_path / "va")
    assert {kind["kind"] for line in lines for kind in line.get("sent", {}).values()} >= {"numbers", "accuracy"}
    assert not [line for line in lines if "sums" in line.get("sent", {})], "they are of use to other sites alone"
    assert "va" in fedshift.results(deployed).markdown()


@pytest.mark.slow
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_few_labels_train_and_measure_nothing(kind: str, scaled: bool, tmp_path: Path) -> None:
    """One file, two kits: what has no label is a target, what has one is a source. Each gives sums of its own rows."""
    method, labelled = KINDS[kind], "va.labelled"
    held = files(tmp_path / "data", few=30)
    options = {**OPTIONS, "protocol": protocol_of(kind), "methods": [method]}
    at = places(tmp_path, held, "few_train")
    section = {"name": "arrays", "sites": {"va": held["va"]}, "site_labels": {"va": "few_train"}}
    at[labelled] = site_file(tmp_path, labelled, section, send=SEND)
    for path in at.values() if scaled else ():
        edit(edit(path, "data", standardise=True), "policy", send=SEND)
    deployed, transport = deploy_at(tmp_path, at, options, **{labelled: 30})
    data = {**section, "sites": held, "classes": [*"012"], **({"standardise": True} if scaled else {})}
    simulated = fedshift.run({**options, "data": data, "engine": {"threads": 1}}, tmp_path / "simulated")
    assert all(alike(deployed, simulated.folder, method, site) for site in LEFT_OUT)
    stored, there = result(deployed, method, "va"), result(simulated.folder, method, "va")
    for part in ("training_samples", "held_out_samples", "unlabelled_samples", "measured_samples"):
        assert stored["data"][part] == there["data"][part]
    assert stored["data"]["measured_samples"] == {}
    assert not (deployed / method / labelled).exists(), "it is no target"
    predictions = predicted(tmp_path)
    assert (set(predictions["part"]), len(predictions)) == ({"unlabelled"}, 40)
    wrong = {**options, "name": "other", "protocol": protocol_of(kind, labelled)}
    with pytest.raises(UserError, match="name the site itself"):
        deploy(tmp_path / "wrong", wrong, sites={**LEFT_OUT, labelled: 30}, unseen={}, transport=transport)


@pytest.mark.slow
def test_auroc_and_the_rates_at_the_threshold_are_those_of_the_simulation(tmp_path: Path) -> None:
    _, simulated, _ = both(tmp_path, classes=2)
    (here,) = simulated.estimates["va"]["fedavg"]
    there = received(tmp_path)
    assert there["threshold"] == here.threshold != 0.5
    for name, measure in here.measures.items():
        assert measure.estimate is not None
        values = [there["measures"][name][part] for part in ("estimate", "low", "high")]
        assert values == pytest.approx([measure.estimate, measure.low, measure.high])


@pytest.mark.slow
def test_the_coordinator_knows_whose_model_should_answer(tmp_path: Path) -> None:
    """As in a simulation, by what adapting gained at the sites with labels; nothing of the fourth site is asked."""
    methods = ["fedavg", {"name": "shot", "bottleneck": 4}]
    deployed, simulated, _ = both(tmp_path, methods, protocol_of("adapt_to_one"))
    choice, same_there = fedshift.results(deployed).choice("va"), simulated.choice("va")
    assert (choice.method, choice.common, choice.why) == (same_there.method, "fedavg", same_there.why)
    assert choice.gains["shot"] == pytest.approx(same_there.gains["shot"])
    assert f"At va the model of {choice.method} should answer" in fedshift.results(deployed).markdown()


@pytest.mark.parametrize("method", slow_after(1, ["kd3a", {"name": "shot", "bottleneck": 4}, "recipe_unlabelled"]))
def test_it_trains_where_a_method_takes_it(method: Any, tmp_path: Path) -> None:
    deployed, simulated, _ = both(tmp_path, method, protocol_of("adapt_to_one", "va"))
    name = method if isinstance(method, str) else method["name"]
    assert alike(deployed, simulated.folder, name, "va")
    stored = result(deployed, name, "va")
    assert stored["data"]["unlabelled_samples"] == {"va": 70}
    assert (stored["rounds"], len(predicted(tmp_path))) == (simulated.collected.unmeasured[0].result.rounds, 70)
    assert received(tmp_path)["abstain"]
    assert "too few sites" in received(tmp_path)["reasons"][0]


TABLE: dict[str, Any] = {"name": "table", "label": "ill", "numeric": ["a", "b"], "categorical": ["sex"]}


def table_sites(folder: Path, frames: dict[str, pd.DataFrame], labels: str = "none", **policy: Any) -> dict[str, Path]:
    """Sites with a table each, of which those named va say which labels they have."""
    tables = {site: folder / f"{site}.csv" for site in frames}
    for site, frame in frames.items():
        frame.to_csv(tables[site], index=False)
    of_site = {
        site: {"sites": {"va": str(tables[site])}, "site_labels": {"va": labels}} for site in frames if "va" in site
    }
    policy = {"send": SEND, **policy}
    return table_files(folder, tables, TABLE, of_site, sections={"classes": ["no", "yes"]}, **policy)


def simulated_tables(folder: Path, at: dict[str, Path], labels: str) -> fedshift.api.Results:
    data = {**TABLE, "sites": {site: str(folder / f"{site}.csv") for site in LEFT_OUT}, "site_labels": {"va": labels}}
    return fedshift.run({**OPTIONS, "data": data, "engine": {"threads": 1}}, folder / "simulated")


def patients(seed: int, months: bool = False, sex: tuple[str, str] = ("f", "m")) -> pd.DataFrame:
    draw = np.random.default_rng(seed)
    a, b = draw.normal(60, 9, 80), draw.normal(size=80)
    ill = np.where(a + 9 * b + draw.normal(0, 4, 80) > 60, "yes", "no")
    return pd.DataFrame({"a": 12 * a if months else a, "b": b, "sex": draw.choice(sex, 80), "ill": ill})


@pytest.mark.parametrize(
    ("va", "reason"),
    slow_after(
        1,
        [
            (patients(3), None),
            (patients(3, months=True), "column 'a'"),
            (patients(3, sex=("F", "M")), "column 'sex': 100 % of the rows have an unknown category ('F', 'M'"),
            (patients(3).assign(a=60.0, b=0.0, sex="f"), "the model says the same of every sample"),
            (patients(3).head(12), None),
            (pd.concat([patients(3).head(40), patients(4, months=True).head(40)]), "column 'a': 50 % of the rows"),
        ],
    ),
)
def test_a_table_is_guarded_where_it_lies(va: pd.DataFrame, reason: str | None, tmp_path: Path) -> None:
    frames = {site: patients(seed) for seed, site in enumerate(LABELLED)}
    deploy_at(tmp_path, table_sites(tmp_path, {**frames, "va": va.drop(columns="ill")}, smallest_group=10))
    there = received(tmp_path)
    assert there["abstain"] is (reason is not None)
    assert reason is None or any(reason in text for text in there["reasons"])
    assert len(va) >= 20 or there["high"] - there["low"] > 30


@pytest.mark.slow
@pytest.mark.parametrize("months", [False, True])
def test_sums_of_a_tables_inputs_are_in_the_encoding_of_each_run(months: bool, tmp_path: Path) -> None:
    """One site alone has a category, so what a run encodes depends on whom it leaves out."""
    frames = {site: patients(seed) for seed, site in enumerate(LEFT_OUT)}
    frames["north"].loc[:29, "sex"] = "x"
    frames["east"].loc[:9, "a"] = np.nan
    if months:
        frames["va"] = frames["va"].assign(b=3 * frames["va"]["b"] + 5)
    at = table_sites(tmp_path, frames, send=[*SEND, "moments"])
    deploy_at(tmp_path, at)
    simulated = simulated_tables(tmp_path, at, "none")
    check_estimate(simulated.estimate(frames["va"].drop(columns="ill"), target="va"), received(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("keep", slow_after(1, [["south"], ["south", "east"]]))
def test_sums_of_inputs_are_those_of_the_sites_that_tell_them(keep: list[str], tmp_path: Path) -> None:
    """Of two or more: else scores alone are read, and the estimate says so."""
    at = places(tmp_path, files(tmp_path / "data"), send=[*SEND, "moments"])
    for site in keep:
        edit(at[site], "policy", send=SEND)
    _, transport = deploy_at(tmp_path, at)
    there, enough = received(tmp_path), len(keep) == 1
    assert there["looked_at"] is enough
    how = "none come from 'south'" if enough else "rests on scores alone"
    assert any(how in reason for reason in there["reasons"])
    rest = "the moments of other sites" if enough else "scores alone"
    assert any("'south' sends no moments" in text and rest in text for text in messages(tmp_path))
    asked = LABELLED.keys() - set(keep) if enough else set()
    assert {site for site, do in transport.asked if do == "inputs"} == asked


@pytest.mark.slow
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
    deploy_at(tmp_path, places(tmp_path, held, send=[*SEND, "moments"]))
    there = received(tmp_path)
    data = {"name": "arrays", "sites": held, "classes": [*"012"], "site_labels": {"va": "none"}}
    simulated = fedshift.run({**OPTIONS, "data": data, "engine": {"threads": 1}}, tmp_path / "simulated")
    here = simulated.estimate(np.load(held["va"])["x"], target="va")
    for reasons in (there["reasons"], here.reasons):
        assert any(reason == TURNED_VALUES for reason in reasons) is mirrored
    if mirrored:
        assert (there["abstain"], here.abstain, there["too_unlike"], here.too_unlike) == (True,) * 4
        assert there["harmful"] is here.harmful is True


@pytest.mark.slow
def test_copies_count_once_where_only_sums_are_known(tmp_path: Path) -> None:
    """As in a simulation: ten rows that stand there seven times each are ten rows."""
    held = files(tmp_path / "data")
    x = np.tile(np.load(held["va"])["x"][:10], (7, 1))
    np.savez(held["va"], x=x)
    deploy_at(tmp_path, places(tmp_path, held, send=[*SEND, "moments"]))
    there = received(tmp_path)
    assert any("70 count as 10 different ones" in reason for reason in there["reasons"])
    data = {"name": "arrays", "sites": held, "classes": [*"012"], "site_labels": {"va": "none"}}
    simulated = fedshift.run({**OPTIONS, "data": data, "engine": {"threads": 1}}, tmp_path / "simulated")
    here = simulated.estimate(x, target="va")
    for name in ("estimate", "low", "high"):
        value = getattr(here, name)
        assert there[name] == (value if value is None else pytest.approx(value, abs=1e-3))


@pytest.mark.threat("site_without_labels")
@pytest.mark.parametrize(
    ("policy", "privacy"),
    [
        ({"send": SEND}, None),
        ({}, {"epsilon": 5.0, "measurement_noise": 5.0}),
        ({"secure": "required"}, None),
        ({"smallest_group": 91}, None),
    ],
    ids=["policy", "budget", "secure", "few"],
)
def test_sums_of_inputs_leave_only_as_the_policy_says(policy: Any, privacy: Any, tmp_path: Path) -> None:
    policy = {"send": [*SEND, "moments"], **policy}
    sections = {"sections": {"privacy": privacy}} if privacy else {}
    site_yaml = site_file(tmp_path, "north", files(tmp_path / "data")["north"], **policy, **sections)
    answer = asked_inputs(site_yaml, Preprocessing(kind="features"))
    assert answer["error"].endswith("Refused")
    assert "inputs" not in answer
    assert [("sent" in line, "refused" in line) for line in audit(tmp_path / "north")] == [(False, True)]


def asked_inputs(site_yaml: Path, preprocessing: Preprocessing) -> dict[str, Any]:
    program = open_site(site_yaml)
    return answer_to(program, stamp(InputsRequest(run="r", preprocessing=preprocessing), body_of({}))[1])


@pytest.mark.threat("site_without_labels")
@pytest.mark.parametrize("preprocessing", [{"kind": "features", "shape": (7,)}, {"kind": "image", "shape": (3, 8, 8)}])
def test_sums_of_inputs_are_of_the_sites_own_samples(preprocessing: dict[str, Any], tmp_path: Path) -> None:
    """Whatever shape is asked for: five sums of five columns, with values of few rows told as the usual one."""
    file = files(tmp_path / "data")["north"]
    with np.load(file) as arrays:
        x, y = np.array(arrays["x"]), arrays["y"]
    x[:, 4] = np.arange(90) == 33  # one patient
    np.savez(file, x=x, y=y)
    site_yaml = site_file(tmp_path, "north", file, send=[*SEND, "moments"], smallest_group=10)
    sums = asked_inputs(site_yaml, Preprocessing(**preprocessing))["inputs"]
    assert sums["samples"] == 90
    np.testing.assert_allclose(sums["total"], [*x[:, :4].sum(axis=0, dtype=np.float64), 0.0], rtol=1e-6)
    np.testing.assert_allclose(sums["squares"][:4], np.square(x[:, :4].astype(np.float64)).sum(axis=0))


@pytest.mark.slow
@pytest.mark.parametrize("longer", slow_after(1, [0, 1]))
def test_false_sums_of_inputs_leave_an_estimate(longer: int, tmp_path: Path) -> None:
    """Of a site that lies about how many values there are, or how large they are."""

    def spoil(site: str, header: dict[str, Any], answer: Any) -> Any:
        answer_header, content, _ = unseal(answer)
        if site != "north" or header["do"] != "inputs":
            return answer
        false = {"samples": 9, "total": [1e29] * (5 + longer), "squares": [1e59] * (5 + longer)}
        return seal({**answer_header, "inputs": false}, body_of(content))

    deploy_at(tmp_path, places(tmp_path, files(tmp_path / "data"), send=[*SEND, "moments"]), change=spoil)
    there = received(tmp_path)
    assert (there["sites"], there["looked_at"]) == (3, not longer)
    assert there["estimate"] is None or 0 <= there["low"] <= there["estimate"] <= there["high"] <= 100


@pytest.mark.slow
def test_impossible_sums_make_no_case(tmp_path: Path) -> None:
    """A site that lies about its sums in a way that shows is no case, and the estimate rests on the others."""

    def spoil(site: str, header: dict[str, Any], answer: Any) -> Any:
        answer_header, content, _ = unseal(answer)
        if site != "north" or header["do"] != "reading":
            return answer
        answer_header["reading"]["parts"]["transport"] = 7.0
        return seal(answer_header, body_of(content))

    deploy_at(tmp_path, places(tmp_path, files(tmp_path / "data")), change=spoil)
    assert received(tmp_path)["sites"] == 2
    assert any("'north' is no case" in text for text in messages(tmp_path))


@pytest.mark.slow
def test_few_labels_of_a_table_train(tmp_path: Path) -> None:
    """Its two parts give sums and categories of their own rows, as in a simulation."""
    frames = {site: patients(seed) for seed, site in enumerate(LEFT_OUT)}
    frames["va"].loc[30:, "ill"] = ""
    frames["va"].loc[40:45, "a"] = np.nan
    at = table_sites(tmp_path, {**frames, "va.labelled": frames["va"]}, "few_train")
    deployed, _ = deploy_at(tmp_path, at, **{"va.labelled": 30})
    simulated = simulated_tables(tmp_path, at, "few_train")
    assert all(alike(deployed, simulated.folder, target=site) for site in LEFT_OUT)


@pytest.mark.threat("site_without_labels")
def test_a_coordinator_gets_nothing_that_it_may_not(tmp_path: Path) -> None:
    """It asks for measures, for training with labels, for sums, and a labelled site for more than one reading."""
    held, caught = files(tmp_path / "data"), dict[tuple[str, str], Message]()
    transport = Loopback(places(tmp_path, held))
    handle = {site: program.handle for site, program in transport.programs.items()}
    for site, program in transport.programs.items():

        def listen(message: Message, coordinator: str, site: str = site) -> Message:
            caught.setdefault((site, json.loads(message.header)["do"]), message)
            return handle[site](message, coordinator)

        program.handle = listen
    options = {**OPTIONS, "protocol": protocol_of("leave_one_out")}
    deploy(tmp_path, options, sites=LEFT_OUT, unseen={}, transport=transport)

    def answer_of(site: str, asked: tuple[str, str], **changes: Any) -> str:
        return str(unseal(handle[site](forge(caught[asked], **changes), "an attacker"))[0].get("message"))

    assert unseal(handle["va"](caught["va", "hello"], "a coordinator"))[0]["card"]["unlabelled"] is True
    assert "has no labels (its data.site_labels)" in answer_of("va", ("va", "predict"), do="measure")
    whole = {"part": "target", "sums": True}
    assert "measures no model" in answer_of("va", ("north", "measure"), whole=whole)
    header = unseal(caught["north", "call"])[0]
    for role in ("source", "unseen"):
        part = {**header["part"], "role": role, "fingerprint": transport.programs["va"].holding.fingerprint}
        assert "trains as a target only" in answer_of("va", ("north", "call"), part=part)
    reading = answer_of("va", ("north", "reading"))
    assert "has no scores" in reading or "refuses" in reading
    for do in ("predict", "estimate"):
        assert "has labels" in answer_of("north", ("va", do))
        for field in ("metadata", "known"):
            assert "Traceback" not in answer_of("va", ("va", do), **{field: [["x"]]})
    # A site gives no reading where its policy does not let it out.
    strict = places(tmp_path / "strict", held, send=["weights", "numbers", "accuracy", "metrics"])
    north = open_site(strict["north"])
    for request in (forge(caught["north", "measure"], whole=whole), caught["north", "reading"]):
        assert "refuses to send confidences" in answer_to(north, request)["message"]


@pytest.mark.slow
@pytest.mark.threat("site_without_labels")
def test_a_second_reading_of_other_sums_is_refused(tmp_path: Path) -> None:
    answers: list[str | None] = []

    def ask_again(site: str, header: dict[str, Any], answer: Any) -> Any:
        if header["do"] == "reading" and site == "north":
            same_again = seal(header, body_of({}))
            others = forge(same_again, sums={**header["sums"], "cost": 0.0})
            answers.extend(answer_to(transport.programs[site], asked).get("message") for asked in (others, same_again))
        return answer

    transport = Loopback(places(tmp_path, files(tmp_path / "data")), ask_again)
    deploy(tmp_path, OPTIONS, sites=LEFT_OUT, unseen={}, transport=transport)
    assert answers == ["site 'north' gives one reading of its scores in a run, and gave it", None]


@pytest.mark.slow
def test_without_confidences_there_is_no_estimate(tmp_path: Path) -> None:
    deploy_at(tmp_path, places(tmp_path, files(tmp_path / "data"), send=["weights", "numbers", "accuracy", "metrics"]))
    assert "too few sites" in received(tmp_path)["reasons"][0]
    assert any("'north' sends no confidences" in text for text in messages(tmp_path))


def test_what_a_site_says_of_its_labels_is_held_to(tmp_path: Path) -> None:
    held = files(tmp_path / "data")
    site_yaml = site_file(tmp_path, "va", held["north"])
    options = yaml.safe_load(site_yaml.read_text())

    def read(labels: dict[str, str], **changes: Any) -> Any:
        site_yaml.write_text(yaml.safe_dump({**options, "data": {**options["data"], "site_labels": labels}, **changes}))
        return read_holding(load_site(site_yaml))

    none = {"va": "none"}
    (warning,) = read(none).data.warnings
    assert "has labels in an array y, which are not read" in warning
    assert (read(none).domain.labels == -1).all()
    wrong: list[tuple[dict[str, str], dict[str, Any], str]] = [
        ({"va": "few"}, {}, "every sample of 'va' has a label"),
        ({"west": "none"}, {}, "no site 'west'"),
        (none, {"classes": None}, "list all classes"),
        (none, {"received": "memory/here"}, "received: a folder outside"),
        ({"va": "few_train"}, {"site": "elsewhere"}, "domain: .* va or va"),
    ]
    for labels, changes, message in wrong:
        with pytest.raises(UserError, match=message):
            read(labels, **changes)


def test_a_site_with_a_budget_of_privacy_sends_no_sums_without_noise(tmp_path: Path) -> None:
    budget = {"privacy": {"epsilon": 5.0, "measurement_noise": 5.0}}
    site_yaml = site_file(tmp_path, "north", files(tmp_path / "data")["north"], sections=budget, send=SEND)
    with pytest.raises(Refused, match="no confidences without noise"):
        SiteEstimates(load_site(site_yaml)).check_gives(masked=True)
