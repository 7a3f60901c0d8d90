"""The search: its budget by hand, what it never reads, and a whole one that goes on where it stopped."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from small import experiment, features, save
from typer.testing import CliRunner

from fedshift.cli import search
from fedshift.cli.app import app
from fedshift.errors import UserError
from fedshift.evaluation.records import RunResult, SelectedRound
from fedshift.evaluation.stored import run_folders
from fedshift.experiment.config.experiment import Experiment, load, parse
from fedshift.experiment.features import build_data
from fedshift.experiment.plan import Plan
from fedshift.experiment.search import going_on, kept_out, on_rung, rank, rungs
from fedshift.report.search_page import Climbed, outcome

METHODS = [
    {"name": "fedavg"},
    {"name": "fedavg", "label": "useless", "local": [{"name": "label_smoothing", "smoothing": 1.0}]},
    {"name": "fedavg", "label": "diverges", "server": {"optimizer": "momentum", "rate": 1e38}},
    {"name": "fedprox"},
    {"name": "fedavg", "label": "often", "exchanges_per_epoch": 2},
]


@pytest.mark.parametrize(
    ("methods", "factor", "expected"),
    [
        (10, 3, [(10, 1 / 3), (4, 1.0)]),
        (11, 3, [(11, 1 / 9), (5, 1 / 3), (3, 1.0)]),
        (3, 2, [(3, 1.0)]),
        (17, 2, [(17, 1 / 8), (9, 1 / 4), (5, 1 / 2), (3, 1.0)]),
    ],
)
def test_rungs_by_hand(methods: int, factor: int, expected: list[tuple[int, float]]) -> None:
    """The first method is one more on each rung."""
    assert [(rung.methods, pytest.approx(rung.share)) for rung in rungs(methods, factor)] == expected


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("search")
    where = save(folder, a=features(1), b=features(2, 24, 0.3), c=features(3, 33, -0.3), z=features(4, 30, 5.0))
    whole = experiment(where, name="tiny", methods=METHODS)
    whole["protocol"] = {"kind": "leave_one_out", "targets": ["z"], "seeds": [0, 1], "test_fraction": 0.0}
    whole["training"] = {"rounds": 6, "batch_size": 8, "lr": 0.1}
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(whole))
    return path


def test_what_is_kept_out_and_who_goes_on(file: Path) -> None:
    whole = load(file)
    assert kept_out(whole, []) == ("z",)
    part = on_rung(whole, rungs(5, 2)[0], whole.methods, kept_out(whole, ["b"]), 24)
    assert (part.training.mini_batches, part.training.rounds) == (12, 3)
    plan = Plan(part, part.protocol.taking_part(build_data(part)))
    assert plan.targets == ("a", "c", "z")
    assert all("b" not in (*planned.split.train, *planned.split.measured) for planned in plan.runs)
    methods = load(file).methods
    ranking = [(methods[3], 90.0), (methods[0], 80.0), (methods[1], 70.0), (methods[2], None), (methods[4], None)]
    assert going_on(ranking, methods[0], 2) == (methods[0], methods[3])
    assert going_on(ranking, methods[0], 4) == (methods[0], methods[3], methods[1])
    assert [mean for _, mean in rank(methods, [])] == [None] * 5


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"methods": METHODS[:2]}, "at least two methods beside the first"),
        ({"protocol": {"kind": "adapt_to_one"}, "methods": [{"name": "kd3a"}]}, "use leave_one_out"),
    ],
)
def test_what_cannot_be_searched(changes: dict[str, object], words: str, file: Path) -> None:
    whole = {**yaml.safe_load(file.read_text()), **changes}
    with pytest.raises(UserError, match=words):
        kept_out(parse(whole), [])


@pytest.mark.parametrize(
    ("metric", "score", "said"),
    [
        ("accuracy", 82.0, "best: fedprox, 2.00 better than fedavg"),
        ("accuracy", 80.0, "best: fedprox, level with fedavg here"),
        ("rmse", 78.0, "best: fedprox, 2"),
        ("rmse", 82.0, "best: fedprox, which is no better than fedavg here"),
    ],
)
def test_the_best_is_said_to_be_better_only_if_it_is(metric: str, score: float, said: str, file: Path) -> None:
    """Of an error less is better."""
    whole = load(file)
    two = whole.model_copy(update={"methods": (whole.methods[0], whole.methods[3])})

    def result(method: str, value: float) -> RunResult:
        selected = {"last": {"round": 1, "accuracy": value}}
        fixed = {"target": "a", "seed": 0, "classes": ["0", "1"], "rounds": 1, "seconds": 1.0, "mini_batches": 1}
        return RunResult(method=method, selected=selected, metric=metric, threads=1, device="cpu", **fixed)

    results = (result("fedavg", 80.0), result("fedprox", score))
    assert outcome([Climbed(rungs(2, 2)[-1], two, results, two.methods)]).startswith(said)


def test_the_best_of_the_last_rung_is_chosen(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever led on the first rung, with a part of the budget, and all who went on from there are not."""
    scores = {"fedavg": (80, 80), "useless": (10, 0), "diverges": (20, 0), "fedprox": (90, 85), "often": (85, 95)}

    def train(folder: Path, errors: object, stop: object, part: Experiment) -> tuple[RunResult, ...]:
        rung = int(part.name[-1]) - 1
        names = [method.display for method in part.methods]
        assert names == (["fedavg", "fedprox", "often"] if rung else list(scores))
        return tuple(
            RunResult.model_construct(
                method=name,
                target="a",
                seed=0,
                selected={"last": SelectedRound.model_construct(accuracy=scores[name][rung])},
                metric="accuracy",
            )
            for name in names
        )

    monkeypatch.setattr(search, "_run_part", train)
    monkeypatch.setattr(search, "_show_budget", lambda *_: None)
    search.search_file(file, [], tmp_path, [], 2, False)
    chosen = load(tmp_path / "tiny-search" / "chosen.yaml")
    assert [method.display for method in chosen.methods] == ["fedavg", "often"]


@pytest.mark.slow
def test_a_whole_search(file: Path, tmp_path: Path) -> None:
    """What is useless or diverges does not win; the second call repeats no run; the chosen file can be run."""
    command = ["search", str(file), "--runs", str(tmp_path), "--factor", "2"]
    shown = CliRunner().invoke(app, [*command, "--plan"])
    assert shown.exit_code == 0, shown.output
    assert not list(tmp_path.iterdir())
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    folder = tmp_path / "tiny-search"
    found = load(folder / "chosen.yaml")
    first, best = found.methods
    assert (first.display, found.protocol) == ("fedavg", load(file).protocol)
    assert best.display in ("fedprox", "often")
    page = (folder / "search.md").read_text()
    assert "| diverges | diverged |" in page
    assert page.count("## Rung") == 2
    assert f"best: {best.display}, " in done.output
    assert {run.parent.name for run in run_folders(folder)} == {"a", "b", "c"}
    results = {path: path.stat().st_mtime_ns for path in folder.rglob("result.json")}
    again = CliRunner().invoke(app, command)
    assert again.exit_code == 0, again.output
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("result.json")} == results
