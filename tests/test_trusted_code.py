"""A file runs no code unasked: what is shown, what is refused before it is imported, and what is remembered."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

import fedshift
from fedshift import trust
from fedshift.cli.app import app
from fedshift.errors import UserError
from fedshift.import_paths import CHILD, read_source
from fedshift.methods import registry as methods
from fedshift.models import registry as models
from fedshift.trust import own_module
from tried import case

ALLOW = trust.allow
RUNS = "from pathlib import Path\nPath(__file__).with_name('ran').write_text('')\n"
NET = RUNS + (
    "from subprocess import Popen\nfrom functools import partial\nfrom torch import nn\nfrom torch.nn import Linear\n"
    "class Net(nn.Module):\n"
    "    def __init__(self, shape, classes):\n"
    "        super().__init__()\n"
    "        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, classes))\n"
    "    def forward(self, x):\n"
    "        return self.layers(x)\n"
    "def made(shape, classes):\n    return Net(shape, classes)\n"
    "halfway = partial(made)\nclass Thing:\n    def __init__(self, shape, classes): raise SystemExit\n"
)
METHOD = (
    RUNS
    + "from fedshift.methods.federated.fedavg import FedAvg\n"
    + "class Mine(FedAvg):\n    traits = FedAvg.traits.derive(name='mine')\n"
)
EXPERIMENT = """
data: {name: rotated_digits, per_class: 2, size: 8, angles: [0, 15, 30]}
protocol: {targets: [D0], seeds: [0]}
model: MODEL
methods: [METHOD]
training: {rounds: 1, batch_size: 8}
engine: {threads: 1}
device: cpu
"""


@pytest.fixture(autouse=True)
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A person who has trusted nothing, in a process that let nothing pass."""
    monkeypatch.setenv("FEDSHIFT_CONFIG", str(tmp_path / "config"))
    monkeypatch.setattr(trust, "allow", ALLOW)
    monkeypatch.setattr(trust, "_passed", {})
    monkeypatch.chdir(tmp_path)
    return tmp_path / "config" / "trusted.json"


@pytest.fixture
def experiment(tmp_path: Path) -> Path:
    """An experiment of two files beside it, a network and a method, each of which leaves a mark when it runs."""
    for name, text in (("net", NET), ("method", METHOD)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "code.py").write_text(text)
    file = tmp_path / "e.yaml"
    file.write_text(EXPERIMENT.replace("MODEL", "{name: 'net/code.py:Net'}").replace("METHOD", "method/code.py:Mine"))
    return file


def ran(folder: Path) -> list[str]:
    return sorted(mark.parent.name for mark in folder.glob("*/ran"))


def command(*words: object) -> SimpleNamespace:
    """A command of a person who is not at a terminal."""
    found = CliRunner().invoke(app, [str(word) for word in words])
    message = str(found.exception) if isinstance(found.exception, UserError) else ""
    return SimpleNamespace(
        code=getattr(found.exception, "exit_code", found.exit_code), said=found.output, error=message
    )


@pytest.mark.threat("experiment_with_code")
@pytest.mark.parametrize(
    "words",
    [
        case("code that a file names", "fedshift check", ("check",)),
        case("code that a file names", "fedshift run", ("run",)),
        case("code that a file names", "fedshift search", ("search",)),
        case("code that a file names", "fedshift features", ("features",)),
        case("code that a file names", "fedshift deploy", ("deploy",)),
        case("code that a file names", "fedshift project try", ("project", "try")),
        case("code that a file names", "fedshift audit leakage", ("audit", "leakage")),
        case("code that a file names", "audit membership", ("audit", "membership")),
    ],
)
def test_no_command_runs_the_code_of_an_experiment_unasked(words: tuple[str, ...], experiment: Path) -> None:
    """The file and its SHA-256 are said, nothing is imported, nothing is remembered, and nothing is written."""
    before = sorted(path.name for path in experiment.parent.iterdir())
    result = command(*words, experiment)
    code = read_source(str(experiment.parent / "net" / "code.py"))
    assert result.code == 2
    assert str(code.path) in result.error
    assert code.sha256 in result.error
    assert "\n" not in result.error
    assert "--trust" in result.error
    assert ran(experiment.parent) == []
    assert sorted(path.name for path in experiment.parent.iterdir()) == before


@pytest.mark.slow
def test_python_runs_the_code_of_a_file_only_if_told_to(experiment: Path) -> None:
    for attempt in (fedshift.load, fedshift.check, fedshift.run):
        with pytest.raises(UserError, match="trust=True"):
            attempt(experiment)
    assert ran(experiment.parent) == []
    assert fedshift.check(experiment, trust=True).parameters == 650
    assert ran(experiment.parent) == ["method", "net"]


def test_a_mapping_in_python_is_the_caller_s_own_word(experiment: Path, settings: Path) -> None:
    loaded = {
        "data": {"name": "rotated_digits", "per_class": 2, "size": 8},
        "protocol": {"targets": ["D0"], "seeds": [0]},
        "model": {"name": f"{experiment.parent / 'net' / 'code.py'}:Net"},
        "methods": ["fedavg"],
        "device": "cpu",
    }
    assert fedshift.check(loaded).parameters == 650
    assert not settings.exists()


def test_trust_is_said_once_and_of_this_content_alone(experiment: Path, settings: Path) -> None:
    result = command("check", experiment, "--trust")
    assert result.code == 0, result.error
    assert all(read_source(str(file)).sha256 in result.said for file in experiment.parent.glob("*/code.py"))
    assert len(json.loads(settings.read_text())) == 2
    if os.name == "posix":
        assert settings.stat().st_mode & 0o77 == 0
    trust._passed.clear()
    again = command("check", experiment)
    assert again.code == 0
    assert "SHA-256" not in again.said

    file = experiment.parent / "net" / "code.py"
    file.write_text(NET + "# another line\n")
    trust._passed.clear()
    changed = command("check", experiment)
    assert (changed.code, "net" in changed.error, "method" in changed.error) == (2, True, False)


@pytest.mark.case("code that a file names", "a file beside it changed after it was trusted")
def test_a_file_beside_it_counts_as_its_content(tmp_path: Path) -> None:
    (tmp_path / "helper.py").write_text("SIZE = 3\n")
    (tmp_path / "mine.py").write_text("import helper\n" + METHOD.replace(RUNS, ""))
    with trust.asks(lambda code: True):
        methods.method_class("mine.py:Mine", tmp_path)
    (tmp_path / "helper.py").write_text(RUNS)
    with pytest.raises(UserError, match=r"mine\.py"):
        methods.method_class("mine.py:Mine", tmp_path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("answer", [True, False])
def test_a_person_at_a_terminal_is_asked(answer: bool, experiment: Path, settings: Path) -> None:
    asked: list[Path] = []

    def ask(code: trust.Code) -> bool:
        assert ran(experiment.parent) == []
        asked.append(code.path)
        return answer

    source = experiment.parent / "net" / "code.py"
    with trust.asks(ask):
        if answer:
            own_module("model 'code.py:Net'", "code.py", source.parent)
        else:
            with pytest.raises(UserError, match="nobody has trusted"):
                own_module("model 'code.py:Net'", "code.py", source.parent)
    assert asked == [source]
    assert (ran(experiment.parent) == ["net"]) is answer is settings.exists()


@pytest.mark.threat("experiment_with_code")
def test_what_was_shown_is_what_runs(tmp_path: Path) -> None:
    """Whoever changes the file while the person reads changes nothing."""
    file = tmp_path / "code.py"
    file.write_text("VALUE = 1\n")

    def ask(code: trust.Code) -> bool:
        file.write_text("VALUE = 2\n" + RUNS)
        return True

    with trust.asks(ask):
        assert own_module("method 'code.py:Mine'", str(file), None).VALUE == 1
    assert not (tmp_path / "ran").exists()


NAMES: list[tuple[str, Callable[[str], object]]] = [
    ("model", lambda name: models.parse({"name": name}, permit=models.any_code)),
    ("method", lambda name: methods.parse({"name": name})),
]


@pytest.mark.threat("experiment_with_code")
@pytest.mark.parametrize("parse", [one for _, one in NAMES], ids=[name for name, _ in NAMES])
@pytest.mark.parametrize(
    "name",
    [
        case("code that a file names", "subprocess:Popen", "subprocess:Popen"),
        case("code that a file names", "os:system", "os:system"),
        case("code that a file names", "idlelib.idle, by import", "idlelib.idle:x"),
        case("code that a file names", "antigravity, by import", "antigravity:x"),
        case("code that a file names", "this, by import", "this:x"),
        case("code that a file names", "torch:load", "torch:load"),
        case("code that a file names", "numpy:load", "numpy:load"),
        case("code that a file names", "yaml:unsafe_load", "yaml:unsafe_load"),
        case("code that a file names", "pytest:main", "pytest:main"),
    ],
)
def test_nothing_of_python_or_of_another_package_can_be_named(name: str, parse: Callable[[str], object]) -> None:
    """Not even by a person who trusts everything."""
    module = name.partition(":")[0]
    was = module in sys.modules
    with trust.own_words(), pytest.raises(UserError, match=module.partition(".")[0]):
        parse(name)
    assert (module in sys.modules) is was


@pytest.mark.parametrize(
    "attribute",
    [
        case("code that a file names", "a class that its module imports", "Popen"),
        case("code that a file names", "a layer that its module imports", "Linear"),
        case("code that a file names", "a builtin that its module imports", "partial"),
        case("code that a file names", "an object that can be called", "halfway"),
        case("code that a file names", "a class that is no network", "Thing"),
        case("code that a file names", "a module", "nn"),
    ],
)
def test_only_networks_that_the_file_makes_are_called(attribute: str, tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(NET)
    with trust.own_words():
        with pytest.raises(UserError, match=r"made.*Net|Net.*made"):
            models.parse({"name": f"net.py:{attribute}"}, tmp_path, models.any_code)
        for name in ("Net", "made"):
            models.build(models.parse({"name": f"net.py:{name}"}, tmp_path, models.any_code), (64,), 3, seed=0)


@pytest.mark.case("code that a file names", "a function of fedshift itself, by its module and name")
@pytest.mark.parametrize("name", ["fedshift.files:write_bytes", "fedshift.api:run", "fedshift.weights:Weights"])
def test_no_function_of_fedshift_is_called_for_a_network(name: str) -> None:
    with pytest.raises(UserError, match="has no network"):
        models.parse({"name": name}, permit=models.any_code)


@pytest.mark.slow
def test_a_module_that_is_not_installed_is_shown_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "not_installed_anywhere"
    package.mkdir()
    (package / "__init__.py").write_text(RUNS)
    (package / "networks.py").write_text(NET.replace(RUNS, ""))
    monkeypatch.syspath_prepend(tmp_path)
    name = "not_installed_anywhere.networks:Net"
    with pytest.raises(UserError, match=f"{package}.*SHA-256"):
        models.parse({"name": name}, permit=models.any_code)
    assert not (package / "ran").exists()
    with trust.asks(lambda code: code.path == package):
        models.parse({"name": name}, permit=models.any_code)
    assert (package / "ran").exists()
    trust._passed.clear()
    (package / "networks.py").write_text(NET)
    with pytest.raises(UserError, match="nobody has trusted"):
        models.parse({"name": name}, permit=models.any_code)


def test_a_package_that_requires_fedshift_is_a_plug_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trust.metadata, "packages_distributions", lambda: {"torch": ["torch"], "numpy": ["numpy"]})
    monkeypatch.setattr(trust.metadata, "requires", lambda name: {"torch": ["fedshift>=0.1"]}.get(name))
    assert trust.check_package("model 'torch:x'", "torch.nn")
    with pytest.raises(UserError, match="does not require fedshift"):
        trust.check_package("model 'numpy:x'", "numpy")
    monkeypatch.setattr(trust.metadata, "requires", lambda name: ["fedshift-like==1", "torch"])
    with pytest.raises(UserError, match="does not require fedshift"):
        trust.check_package("model 'torch:x'", "torch.nn")


def test_a_worker_imports_what_its_parent_let_pass_as_it_was_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(METHOD.replace(RUNS, ""))
    with trust.own_words():
        methods.method_class("mine.py:Mine", tmp_path)
    for name, value in {**trust.for_children(), CHILD: "1"}.items():
        monkeypatch.setenv(name, value)
    trust._passed.clear()
    assert methods.method_class("mine.py:Mine", tmp_path).__name__ == "Mine"
    file.write_text(METHOD)
    with pytest.raises(UserError, match="changed since the run began"):
        methods.method_class("mine.py:Mine", tmp_path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.case("the list of trusted code", "a damaged file")
@pytest.mark.parametrize("text", ["", "{", "[]", '{"a": "b"}', '{"a": [1]}', "\x00"])
def test_a_damaged_list_of_what_is_trusted_is_named(text: str, settings: Path, tmp_path: Path) -> None:
    settings.parent.mkdir()
    settings.write_text(text)
    (tmp_path / "mine.py").write_text(METHOD)
    with pytest.raises(UserError, match=str(settings)):
        methods.method_class("mine.py:Mine", tmp_path)
    assert not (tmp_path / "ran").exists()


def test_who_names_code_on_the_command_line_has_chosen_it(experiment: Path, settings: Path) -> None:
    result = command("methods", f"{experiment.parent / 'method' / 'code.py'}:Mine")
    assert result.code == 0, result.error
    assert not settings.exists()


@pytest.mark.slow
def test_workers_and_parallel_runs_need_no_second_yes(experiment: Path) -> None:
    words = ("run", experiment, "--trust", "engine.workers=2", "engine.parallel_runs=2")
    environment = {name: value for name, value in os.environ.items() if name != CHILD}
    done = subprocess.run(
        [sys.executable, "-m", "fedshift", *map(str, words)], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert (experiment.parent / "runs" / "e").is_dir()
