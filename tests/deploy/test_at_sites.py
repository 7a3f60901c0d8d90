"""Deployments of every kind of data and task: the bits of their simulations, and what sites keep and refuse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from asked import request
from loopback import ADAPT, Loopback, deploy, options_of, simulate
from outcomes import alike, one_line, result, rounds_of
from outcomes import model as model_of
from site_yaml import SITES, edit, site_file, table_files, write_data

from fedshift.deploy.cli.site import check_site
from fedshift.deploy.privacy.table_view import few_samples
from fedshift.deploy.remote.wire import Message, unseal
from fedshift.deploy.site_file import load_site, read_holding
from fedshift.deploy.site_server import SiteProgram, open_site
from fedshift.errors import UserError
from fedshift.federation.messages import leaves
from fedshift.methods import registry
from fedshift.methods.base import PERSONAL
from fedshift.methods.federated.fedper import HEAD
from fedshift.weights import Weights
from tried import slow_after

SEND = ["weights", "numbers", "accuracy", "metrics", "statistics"]
EVERY = {"targets": ["sites"], "seeds": [0], "test_fraction": 0.3}
ROWS = {"north": 41, "south": 30, "east": 26}


METHODS: list[dict[str, Any]] = [
    {"name": "fedavg"},
    {"name": "fedprox", "training": {"lr": 0.3, "batch_size": 5, "rounds": 4}},
]
TRAINED = options_of("fedavg") | {"methods": METHODS}


def agreed_training(transport: Loopback) -> tuple[Any, ...]:
    (agreed,) = transport.programs["north"].terms.in_force().training
    return agreed.lr, agreed.batch_size, agreed.rounds


@pytest.mark.parametrize("rule", ["any", "first"])
def test_each_method_trains_as_in_the_simulation(rule: str, tmp_path: Path) -> None:
    deployed, transport = deploy(tmp_path, TRAINED, training=rule)
    simulated = simulate(tmp_path, TRAINED)
    assert alike(deployed, simulated, "fedavg")
    assert alike(deployed, simulated, "fedprox")
    # Agreed to as the first: all that the experiment announced, though its first method asks for less.
    assert rule == "any" or agreed_training(transport) == (0.3, 5, 4)


def test_training_that_goes_too_far_is_refused_before_a_run(tmp_path: Path) -> None:
    """An experiment whose methods train alike announces nothing beyond its training section."""
    with pytest.raises(UserError, match=r"lr 0\.3, not at most 0\.2; batch_size 5"):
        deploy(tmp_path / "strict", TRAINED, training={"lr": 0.2, "batch_size": 8})
    _, transport = deploy(tmp_path, TRAINED | {"methods": METHODS[:1]}, training="first")
    assert agreed_training(transport) == (0.1, 8, 3)
    with pytest.raises(UserError, match="training options"):
        deploy(tmp_path / "again", TRAINED | {"name": "more"}, transport=transport)


SPLIT: dict[str, Any] = {"name": "table", "label": "ill", "numeric": ["age"], "categorical": ["sex"], "split": "part"}


def split_files(folder: Path) -> dict[str, Path]:
    files = {site: folder / f"{site}.csv" for site in ROWS}
    for number, (site, rows) in enumerate(ROWS.items()):
        draws = np.random.default_rng(number)
        lines = [
            f"{draws.normal(50, 9):.2f},{'fm'[row % 2]},{'ny'[int(draws.integers(2))]},{'train' if row % 4 else 'test'}"
            for row in range(rows)
        ]
        files[site].write_text("age,sex,ill,part\n" + "\n".join(lines) + "\n")
    return files


def split_sites(folder: Path, **policy: Any) -> dict[str, Path]:
    return table_files(folder, split_files(folder), SPLIT, sections={"classes": ["n", "y"]}, send=SEND, **policy)


@pytest.mark.parametrize(
    "protocol",
    slow_after(1, [{"targets": ["east"]}, {"targets": ["sites"]}, {"kind": "adapt_to_one", "targets": ["east"]}]),
)
def test_a_fixed_test_set_is_measured_as_in_the_simulation(protocol: dict[str, Any], tmp_path: Path) -> None:
    options, target = options_of("fedavg", protocol={**protocol, "seeds": [0]}), protocol["targets"][0]
    deployed, _ = deploy(tmp_path, options, sites=ROWS, unseen={}, transport=Loopback(split_sites(tmp_path)))
    simulated = simulate(tmp_path, options, data={**SPLIT, "sites": split_files(tmp_path)})
    assert alike(deployed, simulated, target=target, measured=True)
    measured = [site for site in result(deployed, target=target)["sites"] if site["part"] == "target"]
    assert all(site["samples"] == len(range(0, ROWS[site["site"]], 4)) for site in measured)


@pytest.mark.case("fixed splits", "a site whose fixed test set is smaller than policy.smallest_group")
def test_site_check_counts_both_sides_and_foretells_a_refusal(tmp_path: Path, capsys: Any) -> None:
    places = split_sites(tmp_path, smallest_group=10)
    check_site(places["north"])
    assert "30 samples train and 11 are a fixed test set" in capsys.readouterr().out
    config = load_site(places["east"])
    assert "no experiment" in str(few_samples(read_holding(config).domain, config.file.policy))
    assert few_samples(read_holding(load_site(places["north"])).domain, config.file.policy) is None


ARRAYS: dict[str, Any] = {"name": "arrays", "classes": ["0", "1", "2"], "standardise": "per_site"}


def deploy_scaled(folder: Path, options: dict[str, Any], unseen: dict[str, Any], **of_site: Any) -> Path:
    files = write_data(folder / "data", {**SITES, "west": 30})
    at = {site: files[site] for site in SITES}
    places = table_files(folder, at, ARRAYS, of_site, send=[*SEND, "features"])
    return deploy(folder, options, unseen=unseen, transport=Loopback(places))[0]


@pytest.mark.case("deployment", "each site in its own scale: targets that train, hold out, or are at the coordinator")
@pytest.mark.parametrize(
    ("method", "protocol", "target"),
    slow_after(
        1,
        [
            ("fedavg", {**EVERY, "targets": ["west"]}, "west"),
            ("fedavg", {**EVERY, "targets": ["east"]}, "east"),
            ("fedper", {"kind": "participants", "seeds": [0], "test_fraction": 0.3}, "sites"),
            ("kd3a", ADAPT, "east"),
        ],
    ),
)
def test_own_scales_as_in_the_simulation(tmp_path: Path, method: str, protocol: dict[str, Any], target: str) -> None:
    files = write_data(tmp_path / "data", {**SITES, **({"west": 30} if target == "west" else {})})
    options = options_of(method, protocol=protocol)
    here = simulate(tmp_path, options, data={**ARRAYS, "sites": files})
    there = deploy_scaled(tmp_path, options, {**ARRAYS, "sites": {"west": files["west"]}} if target == "west" else {})
    assert alike(here, there, method, target, measured=True)
    assert result(here, method, target)["sites"] == result(there, method, target)["sites"]
    assert result(there, method, target)["options"]["data"]["standardise"] == "per_site"
    plain = simulate(tmp_path / "plain", options, data={**ARRAYS, "standardise": False, "sites": files})
    pairs = zip(model_of(here, method, target).values(), model_of(plain, method, target).values(), strict=True)
    assert any(not np.allclose(weight, other) for weight, other in pairs)


def test_sites_and_coordinator_cannot_differ_in_the_scale(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"differ in data\.standardise"):
        deploy_scaled(tmp_path, options_of("fedavg", protocol=EVERY), {}, south={"standardise": False})
    asked = request(open_site(site_file(tmp_path, "north", {**ARRAYS, "sites": write_data(tmp_path / "data", SITES)})))
    assert "refuses another data.standardise" in asked["message"]


QUANTITY: dict[str, Any] = {"name": "table", "task": "regression", "label": "y", "numeric": ["x"]}
REGRESSION = options_of("fedavg", protocol={"targets": ["east"], "seeds": [0], "test_fraction": 0.4})


def quantity_files(folder: Path) -> dict[str, Path]:
    files = {site: folder / f"{site}.csv" for site in ROWS}
    for number, (site, rows) in enumerate(ROWS.items()):
        draws = np.random.default_rng(number)
        x = draws.normal(number, 1.0, rows)
        y = 100 * x + draws.normal(0, 10, rows)
        files[site].write_text("x,y\n" + "\n".join(f"{a},{b}" for a, b in zip(x, y, strict=True)) + "\n")
    return files


def quantity_sites(folder: Path, of_site: Any = None, **policy: Any) -> Loopback:
    places = table_files(folder, quantity_files(folder), QUANTITY, of_site, **{"send": SEND, **policy})
    return Loopback({site: edit(path, classes=None) for site, path in places.items()})


def test_a_regression_is_its_simulation(tmp_path: Path) -> None:
    """Weights are equal to the last bit, and so is the scale of the label; measures of the target's site agree."""
    deployed, _ = deploy(tmp_path, REGRESSION, sites=ROWS, unseen={}, transport=quantity_sites(tmp_path))
    simulated = simulate(tmp_path, REGRESSION, data={**QUANTITY, "sites": quantity_files(tmp_path)})
    assert alike(deployed, simulated, target="east", measured=True)
    runs = [result(folder, target="east") for folder in (deployed, simulated)]
    assert runs[0]["metric"] == "rmse"
    (here,), (there,) = ([site for site in run["sites"] if site["part"] == "target"] for run in runs)
    assert (here["values"], here["baseline"]) == (there["values"], there["baseline"])
    assert here["baseline"] > 0


@pytest.mark.parametrize(
    ("of_site", "policy", "message"),
    [({}, {"smallest_group": 15}, "smallest_group"), ({"south": {"loss": "absolute"}}, {}, "what is learned")],
)
def test_what_a_regression_needs_of_its_sites(of_site: Any, policy: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        deploy(tmp_path, REGRESSION, sites=ROWS, unseen={}, transport=quantity_sites(tmp_path, of_site, **policy))


def test_a_site_trains_on_no_other_task_than_its_own(tmp_path: Path) -> None:
    """A coordinator may choose the scale, and neither the task nor the loss."""
    held = read_holding(quantity_sites(tmp_path).programs["north"].config)
    asked = held.data.preprocessing
    assert asked.objective is not None
    scaled = asked.model_copy(update={"objective": {**asked.objective, "mean": 7.0}})
    assert held.source.encode(scaled, held.data.classes).preprocessing.objective == scaled.objective
    for objective in ({**asked.objective, "loss": "absolute"}, None):
        with pytest.raises(UserError, match="another task"):
            held.source.encode(asked.model_copy(update={"objective": objective}), held.data.classes)


OWN: dict[str, Any] = {"kind": "participants", "seeds": [0], "test_fraction": 0.3}
KEEPING = [name for name in registry.names() if PERSONAL in registry.method_class(name)().traits.memory_names]
TUNED = {"name": "fedavg", "fine_tune": {"steps": 3, "lr": 0.2}}


def accuracies(folder: Path, name: str) -> dict[str, dict[str, float]]:
    """Site → its metrics at the end of the run, with its test part."""
    return {site["site"]: site["values"] for site in result(folder, name, "sites")["sites"] if site["part"] == "target"}


@pytest.mark.parametrize("name", slow_after(1, ["fedavg", *KEEPING, "fedavg+tuned"]))
def test_own_models_are_measured_as_in_the_simulation(tmp_path: Path, name: str) -> None:
    method = TUNED if name == "fedavg+tuned" else {"name": name, **registry.method_class(name).traits.small}
    options = options_of({**method, **({"fine_tune": {"steps": 2}} if name == "fedbabu" else {})}, protocol=OWN)
    deployed, _ = deploy(tmp_path, options, unseen={}, send=SEND)
    simulated = simulate(tmp_path, options, unseen={})
    run = next(path.name for path in simulated.iterdir() if path.is_dir())
    assert alike(deployed, simulated, run, "sites")
    assert accuracies(deployed, run) == accuracies(simulated, run)
    assert accuracies(deployed, run).keys() == SITES.keys()
    of_targets = [
        [record["target_accuracy"] for record in rounds_of(folder, run, "sites")] for folder in (deployed, simulated)
    ]
    assert of_targets[0] == of_targets[1]


def test_a_classifier_of_its_own_is_in_no_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[Message] = []
    handle = SiteProgram.handle

    def note_message(self: SiteProgram, message: Message, coordinator: str) -> Message:
        answers.append(handle(self, message, coordinator))
        return answers[-1]

    monkeypatch.setattr(SiteProgram, "handle", note_message)
    deploy(tmp_path, options_of("fedper", protocol=OWN), unseen={})
    sent = [item for answer in answers for item in leaves(unseal(answer)[1]) if isinstance(item[1], Weights)]
    assert {path for path, _ in sent} == {"weights"}
    tensors = {name for _, weights in sent for name in weights}
    assert tensors
    assert not any(name.startswith(HEAD) for name in tensors)


@pytest.mark.slow
def test_what_a_site_has_not_allowed_stays(tmp_path: Path) -> None:
    """Prototypes travel where models may not; and accuracies are told, and no other metrics."""
    options = options_of("fedproto", protocol=OWN)
    deployed, _ = deploy(tmp_path, options, unseen={}, send=SEND[1:])
    assert accuracies(deployed, "fedproto") == accuracies(simulate(tmp_path, options, unseen={}), "fedproto")
    few = [kind for kind in SEND if kind != "metrics"]
    deployed, _ = deploy(tmp_path / "few", options_of("ditto", protocol=OWN), unseen={}, send=few)
    assert result(deployed, "ditto", "sites")["sites"] == []


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"protocol": {**OWN, "validation_fraction": 0.2}}, "validation_fraction"),
        ({"protocol": {**OWN, "common_tests": ["east"]}}, "common_tests"),
        ({"methods": [{"name": "fedavg", "fine_tune": {"steps": 10_000}}]}, "longer"),
        ({"protocol": {"targets": ["sites"], "seeds": [0]}}, "common model"),
    ],
)
def test_what_own_models_cannot_do_is_refused(tmp_path: Path, changes: dict[str, Any], word: str) -> None:
    with one_line(word):
        deploy(tmp_path, options_of(TUNED, **{"protocol": OWN, **changes}), unseen={})
