"""What the README and the pages in docs/ say is true: examples run, files parse, commands and links exist."""

from __future__ import annotations

import math
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent, indent
from typing import Any

import numpy as np
import pytest
import torch
import typer
import yaml
from PIL import Image
from safetensors.torch import load_file

import fedshift
from fedshift.cli.app import app
from fedshift.data import registry as datasets
from fedshift.errors import UserError
from fedshift.experiment.config.experiment import load, parse
from fedshift.experiment.config.experiment_file import override_field
from fedshift.experiment.predict import load_model
from fedshift.import_paths import import_file
from fedshift.methods import registry as methods
from fedshift.methods.base import Method
from fedshift.models import registry as models
from omop import sqlite_database

ROOT = Path(__file__).resolve().parents[1]
NEEDED = {"omop": "sqlalchemy", "text": "transformers", "volumes": "monai"}
"""Packages of extras that an example uses."""
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))
OWN_METHOD = ROOT / "examples" / "trimmed_mean.py"
OWN_LOSS = ROOT / "examples" / "own_loss.py"
TABLE = ROOT / "examples" / "table.yaml"
PAGES = [page for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))) if page.is_file()]
AT_THE_ROOT = [ROOT / f"{name}.md" for name in ("CHANGELOG", "CONTRIBUTING", "SECURITY")]
RESULTS = sorted((ROOT / "benchmarks").glob("*.md"))
BASE = {"data": "rotated_digits", "model": "mnist_cnn", "methods": ["fedavg"]}
SMALL = {
    "name": "own",
    "data": {"name": "rotated_digits", "per_class": 10, "size": 8},
    "protocol": {"targets": ["D0"], "seeds": [0], "test_fraction": 0.3},
    "model": {"name": "linear"},
    "training": {"rounds": 2, "batch_size": 32, "lr": 0.1},
    "methods": [{"name": f"{OWN_METHOD}:TrimmedMean", "trim": 1}],
    "device": "cpu",
}

pytestmark = pytest.mark.skipif(len(PAGES) < 4, reason="README.md and docs/ are not beside these tests")


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), flags=re.M | re.S)


def every_block(language: str) -> list[Any]:
    return [
        pytest.param(block, id=f"{page.name}-{number}")
        for page in PAGES
        for number, block in enumerate(blocks(page, language))
    ]


def commands() -> Iterator[tuple[str, list[str]]]:
    """Every ``fedshift …`` of the pages, in bash blocks and between backticks, with the page's name."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        prose = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
        lines = [line for block in blocks(page, "bash") for line in block.splitlines()]
        for line in (*lines, *re.findall(r"`(fedshift [^`]+)`", prose)):
            words = shlex.split(line, comments=True)
            if words[:1] == ["fedshift"]:
                yield page.name, words[1:]


COMMANDS = [pytest.param(words, id=f"{page}: {' '.join(words)}") for page, words in commands()]


def own_method() -> Any:
    return import_file(str(OWN_METHOD))


# The worked example ---------------------------------------------------------------------------------------------------


def run_own_method(folder: Path, workers: int) -> dict[str, torch.Tensor]:
    results = fedshift.run({**SMALL, "engine": {"workers": workers, "threads": 1}}, folder)
    assert [run.method for run in results.runs] == ["trimmed_mean"]
    return load_file(results.folder / "trimmed_mean" / "D0" / "seed-0" / "model.safetensors")


@pytest.mark.slow
@pytest.mark.usefixtures("shared_workers")
def test_worked_example_gives_the_same_weights_in_process_and_in_a_pool(tmp_path: Path) -> None:
    alone, pool = run_own_method(tmp_path / "alone", 1), run_own_method(tmp_path / "pool", 2)
    torch.testing.assert_close(alone, pool, rtol=0, atol=0)
    records = (tmp_path / "alone" / "own" / "trimmed_mean" / "D0" / "seed-0" / "rounds.jsonl").read_text()
    assert len(records.splitlines()) == 2


def test_worked_example_trims_each_number_on_its_own(tmp_path: Path) -> None:
    for example in (OWN_METHOD, OWN_LOSS):
        assert len([line for line in example.read_text().splitlines() if line.strip()]) < 30
    trimmed_mean = own_method().trimmed_mean
    values = torch.tensor([[1.0, 900.0], [2.0, 6.0], [-500.0, 5.0], [4.0, 4.0], [6.0, -7.0]])
    assert trimmed_mean(values, 1).tolist() == pytest.approx([7 / 3, 5.0])
    assert trimmed_mean(values, 2).tolist() == [2.0, 5.0]
    assert trimmed_mean(values, 0).tolist() == pytest.approx([-487 / 5, 908 / 5])
    assert trimmed_mean(torch.tensor([3, 9, 4]), 1).tolist() == 9  # a counter
    greedy = {**SMALL, "methods": [{"name": f"{OWN_METHOD}:TrimmedMean", "trim": 3}]}
    with pytest.raises(UserError, match=r"trim: 3 at each end leaves none of 5 sites"):
        fedshift.run(greedy, tmp_path)


def test_untrimmed_example_is_the_uniform_mean_of_fedavg(tmp_path: Path) -> None:
    both = [{"name": f"{OWN_METHOD}:TrimmedMean", "trim": 0}, {"name": "fedavg", "weighting": "uniform"}]
    folder = fedshift.run({**SMALL, "methods": both, "engine": {"threads": 1}}, tmp_path).folder
    ours, theirs = (load_file(folder / name / "D0/seed-0/model.safetensors") for name in ("trimmed_mean", "fedavg"))
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=1e-4, atol=1e-6)


def test_own_loss_is_the_equation() -> None:
    logits = torch.tensor([[0.0, 0.0], [math.log(3.0), 0.0]])
    cross_entropy = (math.log(2) + math.log(4 / 3)) / 2
    entropy = (math.log(2) + math.log(4) - 0.75 * math.log(3)) / 2
    penalised = import_file(str(OWN_LOSS)).penalised
    assert penalised(logits, torch.tensor([0, 0]), 0.5).item() == pytest.approx(cross_entropy - 0.5 * entropy)


def test_own_loss_without_its_penalty_is_fedavg(tmp_path: Path) -> None:
    own = f"{OWN_LOSS}:ConfidencePenalty"
    three = [{"name": own, "beta": 0.0}, "fedavg", {"name": own, "label": "penalised", "beta": 0.5}]
    folder = fedshift.run({**SMALL, "methods": three, "engine": {"threads": 1}}, tmp_path).folder
    names = ("confidence_penalty", "fedavg", "penalised")
    ours, theirs, other = (load_file(folder / name / "D0/seed-0/model.safetensors") for name in names)
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=1e-4, atol=1e-6)
    assert any(not torch.equal(tensor, other[name]) for name, tensor in ours.items())


def test_examples_are_quoted_as_they_stand() -> None:
    source = OWN_METHOD.read_text() + OWN_LOSS.read_text()
    quoted = [block for block in blocks(ROOT / "docs" / "add_a_method.md", "python") if "(Reply)" not in block]
    assert len(quoted) >= 4
    for block in quoted:
        assert block in source
    assert yaml.safe_load(blocks(ROOT / "docs" / "running.md", "yaml")[0]) == yaml.safe_load(
        TABLE.read_text(encoding="utf-8")
    )


# Files and fragments --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", every_block("yaml"))
def test_yaml_blocks_parse(block: str) -> None:
    options = yaml.safe_load(block)
    parse({**BASE, **options}, ROOT)


@pytest.mark.parametrize("block", every_block("python"))
def test_python_blocks_compile(block: str) -> None:
    compile("def block():\n" + indent(dedent(block), "    "), "block", "exec")  # some are parts of functions


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_example_files_parse(file: Path) -> None:
    if file.stem in NEEDED:
        pytest.importorskip(NEEDED[file.stem])
    assert load(file).name == file.stem


def volumes(site: Path, draws: np.random.Generator) -> None:
    """Four volumes with their masks as NIfTI files, of 2 mm."""
    nibabel = pytest.importorskip("nibabel")
    affine = np.diag([-2.0, -2.0, 2.0, 1.0])
    for name in ("a", "b", "c", "d"):
        values = draws.normal(40, 100, (16, 16, 16)).astype(np.float32)
        for folder, content in (("images", values), ("masks/lesion", (values > 100).astype(np.float32))):
            (site / folder).mkdir(parents=True, exist_ok=True)
            nibabel.save(nibabel.Nifti1Image(content, affine), site / folder / f"{name}.nii.gz")


@pytest.fixture
def examples(tmp_path: Path) -> Path:
    """A copy of the example files and their tables, beside small made-up data of the other layouts they name."""
    folder = tmp_path / "examples"
    shutil.copytree(ROOT / "examples", folder)
    draws = np.random.default_rng(0)
    (folder / "arrays").mkdir()
    for site in ("north", "south", "east"):
        np.savez(
            folder / "arrays" / f"{site}.npz",
            x=draws.integers(0, 256, (20, 16, 16), dtype=np.uint8),
            y=np.arange(20) % 2,
        )
        for label in ("cat", "dog"):
            (folder / "photos" / site / label).mkdir(parents=True)
            for number in range(4):
                pixels = draws.integers(0, 256, (20 + number, 30, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / "photos" / site / label / f"{number}.png")
    for number, site in enumerate(("north", "south", "east")):
        sqlite_database(folder / "omop" / f"{site}.db", number)
        volumes(folder / "scans" / site, draws)
    return folder


@pytest.mark.parametrize(
    ("name", "overrides", "new_data", "samples"),
    [
        ("arrays", [], "arrays/east.npz", 20),
        ("table", [], "tables/east.csv", 58),
        ("omop", [], None, 0),
        (
            "volumes",
            ["data.size=[16,16,16]", "data.patch=[8,8,8]", "model.channels=[4,8]", "model.strides=[2]"],
            None,
            0,
        ),
        # Without the download of ImageNet's weights, and small.
        ("image_folder", ["data.size=16", "model={name: mnist_cnn}"], "photos/east", 8),
        ("own_method", ["data.per_class=10", "protocol.targets=[D0]", "model=linear"], None, 0),
        pytest.param("text", ["protocol.targets=[films]"], "reviews/films.csv", 80, marks=pytest.mark.slow),
    ],
)
def test_example_files_run(
    name: str,
    overrides: list[str],
    new_data: str | None,
    samples: int,
    examples: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if name in NEEDED:
        pytest.importorskip(NEEDED[name])
    monkeypatch.setenv("FEDSHIFT_CACHE", str(tmp_path / "cache"))
    common = ["training.rounds=1", "protocol.seeds=[0]", "engine.threads=1", "device=cpu"]
    experiment = load(examples / f"{name}.yaml", [*common, *overrides])
    results = fedshift.run(experiment, tmp_path / "runs")
    assert {run.method for run in results.runs} == {method.display for method in experiment.methods}
    if new_data is not None:
        (place,) = (results.folder / experiment.methods[0].display).glob(f"{Path(new_data).stem}/seed-0")
        model = load_model(place, own_network=experiment.model.code)
        assert len(model.predict(examples / new_data)) == samples


def test_python_block_of_the_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (block,) = blocks(ROOT / "README.md", "python")
    less = block.replace('"rounds": 40', '"rounds": 1').replace('"per_class": 45', '"per_class": 6')
    assert less.count(": 1,") + less.count(": 6}") == 2
    monkeypatch.chdir(tmp_path)  # it writes to ./runs
    names: dict[str, Any] = {}
    exec(less, names)
    rows = {(row["method"], row["target"]) for row in fedshift.results(tmp_path / "runs" / "experiment").rows()}
    shown = re.findall(r"^\| (alone|fedavg|recipe) (?:\(augmented\) )?\|", (ROOT / "README.md").read_text(), flags=re.M)
    assert rows == {(method, target) for method in shown for target in ("D0", "D75", "average")}


# Commands, names and links --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", COMMANDS)
def test_commands_exist_with_these_options(words: list[str]) -> None:
    group = typer.main.get_command(app)
    name, arguments = words[0], words[1:]
    if name.startswith("--"):  # an option of fedshift itself
        assert any(name in parameter.opts for parameter in group.params)
        return
    command = group.commands[name]  # type: ignore[attr-defined]
    if not arguments and name not in ("demo", "methods", "datasets"):
        return  # only the command's name is spoken of
    if name != "demo" and arguments[:1] and arguments[0].startswith("-"):  # only an option is named
        arguments = ["FOLDER", *arguments]
    values = command.make_context(name, arguments).params
    if name == "methods" and values["name"]:
        assert values["name"] in methods.names()
    if name == "datasets" and values["name"]:
        assert values["name"] in datasets.names()
    if name in ("run", "check"):
        file = ROOT / values["experiment"]
        options = yaml.safe_load((file if file.is_file() else TABLE).read_text())
        for override in values["overrides"] or []:
            override_field(options, override)
        parse(options, file.parent)


def test_make_targets_and_commands_exist() -> None:
    mentioned = {words[0] for _, words in commands()}
    assert mentioned >= {"run", "check", "show", "page", "methods", "datasets", "predict"}
    makefile = (ROOT / "Makefile").read_text()
    named = {target for page in PAGES for target in re.findall(r"(?:^|`)make ([a-z-]+)", page.read_text(), flags=re.M)}
    assert named >= {"demo", "test"}
    for target in named:
        assert re.search(rf"^{target}:", makefile, flags=re.M), target


@pytest.mark.parametrize("page", [*PAGES, *RESULTS, *AT_THE_ROOT], ids=lambda page: f"{page.parent.name}-{page.name}")
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if link.startswith(("http://", "https://")):
            continue
        place, _, anchor = link.partition("#")
        target = (page.parent / place) if place else page
        assert target.exists(), f"{page.name} links to {link}"
        if anchor:
            titles = re.findall(r"^#+ (.+)$", target.read_text(encoding="utf-8"), flags=re.M)
            slugs = [re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles]
            assert anchor in slugs, f"{page.name} links to {link}"


def test_design_page_lists_the_folders_that_exist() -> None:
    (tree,) = (block for block in blocks(ROOT / "docs" / "design.md", "text") if block.startswith("src/fedshift/"))
    found: list[str] = []
    above: list[str] = []
    for indent_of, name in re.findall(r"^( +)([\w]+)/ ", tree, flags=re.M):
        above = [*above[: len(indent_of) // 2 - 1], name]
        found.append("/".join(above))
    source = ROOT / "src" / "fedshift"
    assert sorted(found) == sorted(
        {path.parent.relative_to(source).as_posix() for path in source.rglob("*.py")} - {"."}
    )
    modules = {path.stem for path in source.glob("*.py")} - {"__init__", "__main__"}
    assert modules - set(re.findall(r"\w+", tree)) == set(), "a module that the page does not name"


def test_the_design_page_is_read_in_ten_minutes() -> None:
    assert len((ROOT / "docs" / "design.md").read_text(encoding="utf-8").split()) <= 1500


@pytest.mark.parametrize(("page", "fewest"), [("design", 20), ("extend", 30), ("internals", 10)])
def test_files_that_pages_for_maintainers_name_exist(page: str, fewest: int) -> None:
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    folders = ("src", "tests", "benchmarks", "docs")
    files = [path.relative_to(ROOT).as_posix() for folder in folders for path in (ROOT / folder).rglob("*.py")]
    named = set(re.findall(r"`(?:python )?([a-z_/]+\.py)(?: NAME)?`", text))
    assert len(named) > fewest
    assert [name for name in named if not any(f"/{file}".endswith(f"/{name}") for file in files)] == []


def test_pages_name_all_models_and_the_data_sets_for_own_data() -> None:
    text = (ROOT / "docs" / "your_data.md").read_text()
    for name in (*models.names(), "arrays", "image_folder", "table"):
        assert f"`{name}`" in text, f"docs/your_data.md does not name `{name}`"


def test_class_attributes_that_the_page_names_exist() -> None:
    table = (ROOT / "docs" / "add_a_method.md").read_text().partition("## Traits")[2]
    items = re.findall(r"^\* (.*)", table.partition("Annotate the return types")[0], flags=re.M)
    named = {name for item in items for name in re.findall(r"`(\w+)[`(]", item.partition(":")[0])}
    assert len(named) >= 15
    for name in named:
        assert hasattr(Method, name) or hasattr(Method.traits, name), name


MOST_IN_ALL = 37_250
"""Of `cat README.md docs/*.md benchmarks/*.md | wc -w`."""
MOST_TO_READ = 28_300
"""Of these, words that have a letter and are outside of code blocks: the aim was 30,000."""
MOST_OF_A_PAGE = 2_500


def words(page: Path) -> int:
    """As ``wc -w`` counts: prose, code, tables and their bars."""
    return len(page.read_text(encoding="utf-8").split())


def words_to_read(page: Path) -> int:
    prose = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    return sum(any(map(str.isalpha, word)) for word in prose.split())


def test_all_pages_together_are_short() -> None:
    assert sum(map(words, [*PAGES, *RESULTS])) <= MOST_IN_ALL
    assert sum(map(words_to_read, [*PAGES, *RESULTS])) <= MOST_TO_READ


@pytest.mark.parametrize("page", [*PAGES, *RESULTS], ids=lambda page: f"{page.parent.name}-{page.name}")
def test_pages_are_short(page: Path) -> None:
    assert words(page) <= MOST_OF_A_PAGE


def test_readme_is_short() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert words(ROOT / "README.md") <= 930
    assert sum(not line.startswith("|") for line in text.splitlines()) < 120  # tables grow with what they list
