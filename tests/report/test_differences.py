"""The grid of differences: tested with targets as clusters and over seeds, corrected, marked."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from scipy import stats

from fedshift.evaluation.significance import cluster_test, holm
from fedshift.report import differences
from fedshift.report.collect import collect
from fedshift.report.measures import ACCURACY
from fedshift.report.page import page
from fedshift.report.pairs import HARMONIC_MEANS
from fedshift.report.report import whole_report

ACCURACIES = {
    "fedavg": {"a": (50.0, 52.0, 51.0), "b": (60.0, 61.0, 62.0)},
    "ours": {"a": (55.0, 57.1, 56.0), "b": (59.0, 63.0, 60.0)},
    "theirs": {"a": (51.0, 50.0, 53.0), "b": (60.5, 62.0, 61.0)},
}


@pytest.fixture
def folder(write_part: Callable[..., Path]) -> Path:
    for method, by_target in ACCURACIES.items():
        for target, by_seed in by_target.items():
            for seed, accuracy in enumerate(by_seed):
                part = write_part(method, target, seed, accuracy)
    return part.parents[2]


def averages(method: str) -> list[float]:
    return [sum(seed) / 2 for seed in zip(*ACCURACIES[method].values(), strict=True)]


def test_the_grid_and_what_is_printed(folder: Path) -> None:
    pairs = [("ours", "fedavg"), ("theirs", "fedavg"), ("ours", "absent")]
    ours, theirs = differences.differences(collect(folder).results, pairs)
    assert (ours.name, theirs.name) == ("ours − fedavg", "theirs − fedavg")
    reference = [stats.ttest_rel(averages(name), averages("fedavg")).pvalue for name in ("ours", "theirs")]
    assert [ours.comparison.seeds.p, theirs.comparison.seeds.p] == pytest.approx(reference)
    assert reference[0] < reference[1]
    assert ours.here == pytest.approx(min(1, 2 * reference[0]))
    assert theirs.here == pytest.approx(max(reference[1], min(1, 2 * reference[0])))
    clustered = [
        cluster_test(
            [[a - b for a, b in zip(ACCURACIES[name][at], ACCURACIES["fedavg"][at], strict=True)] for at in "ab"]
        )
        for name in ("ours", "theirs")
    ]
    assert [ours.comparison.clustered, theirs.comparison.clustered] == clustered
    assert (ours.corrected, theirs.corrected) == tuple(holm([test.p for test in clustered]))
    # At a: 5, 5.1, 5, which passes Holm's correction for two targets; at b: −1, 2, −2, which passes nothing.
    assert 2 * stats.ttest_1samp([5.0, 5.1, 5.0], 0).pvalue < differences.LEVEL
    assert (ours.marked, theirs.marked) == ({"a"}, frozenset())
    found = differences.differences(collect(folder).results, [("fedavg", "ours")])
    cells = dict(zip(differences.head(["b", "a"], ACCURACY), differences.line(found[0], ["b", "a"]), strict=True))
    assert cells["average"] == "−2.35 ± 2.69", "the means of the targets are −5.03 and 0.33"
    assert (cells["t"], cells["df"]) == ("−0.87", "1.0")
    assert cells["p"] == cells["p (Holm)"] == "0.542"
    assert (cells["seeds"], cells["p here (Holm)"]) == ("3", "0.063")
    assert cells["a"] == "−5.03 ± 0.03*"
    assert cells["b"] == "+0.33 ± 1.20"
    grid = differences.markdown(found, ["a", "missing"], ACCURACY)
    assert r"−5.03 ± 0.03\*" in grid
    assert len({line.count("|") for line in grid.splitlines()}) == 1
    assert grid.splitlines()[2].split(" | ")[-1] == "– |"


def test_one_seed_has_no_test(write_part: Callable[..., Path]) -> None:
    write_part("a", "t", 0, 60.0)
    folder = write_part("b", "t", 0, 50.0).parents[2]
    (found,) = differences.differences(collect(folder).results, [("a", "b")])
    assert found.corrected is None
    assert not found.marked
    assert differences.line(found, ["t"]) == ["a − b", "+10.00", "–", "–", "–", "–", "1", "–", "+10.00"]


def test_one_target_has_the_view_of_its_seeds_only(write_part: Callable[..., Path]) -> None:
    for method, by_seed in (("a", (60.0, 61.0, 63.0)), ("b", (50.0, 50.0, 50.0))):
        for seed, accuracy in enumerate(by_seed):
            part = write_part(method, "t", seed, accuracy)
    (found,) = differences.differences(collect(part.parents[2]).results, [("a", "b")])
    assert found.corrected is None
    assert found.here == pytest.approx(stats.ttest_1samp([10.0, 11.0, 13.0], 0).pvalue)


def test_repeats_are_named_by_what_they_are() -> None:
    assert "splits" in differences.head([], HARMONIC_MEANS["accuracy"])
    assert "split" in differences.note(HARMONIC_MEANS["accuracy"])
    assert "seeds" in differences.head([], ACCURACY)


def test_the_page_compares_every_two_methods(folder: Path) -> None:
    section = page(whole_report(collect(folder))).split('<section id="differences">')[1].split("</section>")[0]
    assert section.count("<tr>") == 1 + 3
    for name in ("ours − fedavg", "theirs − fedavg", "theirs − ours"):
        assert f">{name}<" in section
    assert "5.03 ± 0.03*" in section


@pytest.mark.parametrize(
    ("p", "differing"),
    [
        ((0.03, 0.03, 0.03), []),
        ((0.01, 0.03, 0.6), ["a"]),
        ((0.01, 0.02, None), ["a", "b"]),
        ((0.04, None, None), ["a"]),
    ],
)
def test_targets_that_differ_are_corrected_over_the_targets(p: tuple[float | None, ...], differing: list[str]) -> None:
    tests = {target: SimpleNamespace(p=value) for target, value in zip("abc", p, strict=True)}
    assert list(differences._differing_targets(cast(Any, SimpleNamespace(targets=tests)))) == differing
