"""Attacks on secure sums of the literature, and those on the code: two requests at once, large rosters, bad keys."""

from __future__ import annotations

import random
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from scipy.optimize import fsolve, least_squares
from test_secure_protocol import Federation, seeds_of
from torch import Tensor

from fedshift.deploy.crypto import masked_sums
from fedshift.deploy.crypto.masked_sums import KeyCard, Revealed, SecureSite, SecureSum, signed_text
from fedshift.errors import Refused
from fedshift.experiment.fits.secure_sums import check_sums
from fedshift.federation.secure.integer_sums import SMALLEST_ROSTER
from fedshift.functional.control_variates import next_control
from fedshift.functional.divergence_weighting import distance_weighted, fused_from_sums
from fedshift.json_objects import write_object
from fedshift.methods import registry
from fedshift.weights import Weights


@pytest.fixture
def five(tmp_path: Path) -> Federation:
    return Federation(tmp_path, 5)


@pytest.mark.slow
@pytest.mark.parametrize("number", [20, 50])
def test_a_large_roster_with_as_many_lost_as_may_be(tmp_path: Path, number: int) -> None:
    where, draw = Federation(tmp_path, number), random.Random(number)
    first = draw.sample(where.names, number // 2 + 2)
    second = draw.sample(first, number // 2 + 1)
    assert torch.equal(where.sum_of(where.order(), first, second), where.plain(first))


@pytest.mark.parametrize(("number", "liars"), [(20, ["s00"]), (20, ["s00", "s07", "s10"]), (50, ["s03", "s20"])])
def test_wrong_shares_of_a_few_in_a_large_roster_are_left_out(tmp_path: Path, number: int, liars: list[str]) -> None:
    """Wherever they stand in the roster, and whatever else they tell."""
    where, draw = Federation(tmp_path, number), random.Random(number)
    order, total = where.order(), SecureSum(where.order())
    for name in where.names[:-1]:
        total.add(name, where.sites[name].mask(order, where.numbers[name]))
    told = where.tell_shares(total, total.answered)
    for name in liars:
        self_seeds, pairs = (
            {name_of_seed: b"\0" + draw.randbytes(32) for name_of_seed in part}
            for part in (told[name].self_seeds, told[name].pairs)
        )
        told[name] = Revealed({**self_seeds, "s01": told[name].self_seeds["s01"]}, {**told[name].pairs, **pairs})
    assert torch.equal(total.unmask_total(told), where.plain(where.names[:-1]))


@pytest.mark.threat("sum_predictable_masks")
def test_the_masks_of_two_sums_have_nothing_in_common(five: Federation) -> None:
    """Knowing all seeds of one sum, of the same key and roster, is of no use for the next."""
    orders = [five.order(exchange=number) for number in (1, 2)] + [five.order(content="bb")]
    seeds = [seed for order in orders for seed in seeds_of(five, order, "s00").values()]
    assert len(set(seeds)) == 3 * 4
    uploads = [five.sites["s01"].mask(order, five.numbers["s01"]) for order in orders[:2]]
    assert not set(uploads[0].commitments.values()) & set(uploads[1].commitments.values())


@pytest.mark.threat("sum_weak_key")
def test_a_key_that_makes_masks_predictable_is_refused(five: Federation) -> None:
    """A point of low order gives the same secret with every key; a site's signature does not make it a key."""
    public = bytes(32)
    card = KeyCard("s01", public, five.certificates["s01"].sign(signed_text("run", "s01", public)))
    order = five.order()
    with pytest.raises(Refused, match="the key of site 's01' is none"):
        five.sites["s00"].mask(replace(order, cards=(order.cards[0], card, *order.cards[2:])), five.numbers["s00"])


@pytest.mark.threat("sum_changed_roster")
def test_what_remains_two_rosters_differ_by_a_model(five: Federation) -> None:
    """Two sums of the same models, one site lost in the second: their difference is its model."""
    both = five.sum_of(five.order(exchange=1), five.names, five.names)
    fewer = five.sum_of(five.order(exchange=2), five.names[:4], five.names[:4])
    assert torch.equal(both - fewer, five.numbers["s04"])


@pytest.mark.threat("sum_asked_twice")
@pytest.mark.parametrize("exchange", ["mask", "confirm"])
def test_two_processes_of_a_site_do_not_answer_twice(
    five: Federation, exchange: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server asks the site twice at once: while one answer is made, the other waits, and is refused."""
    order, total = five.order(), SecureSum(five.order())
    for name in five.names if exchange == "confirm" else five.names[1:]:
        total.add(name, five.sites[name].mask(order, five.numbers[name]))
    site, twin = five.start_site("s00"), five.start_site("s00")

    def ask_once(site: SecureSite, number: int) -> object:
        if exchange == "mask":
            return site.mask(five.order(five.names[:number]), five.numbers["s00"])
        return site.confirm(order, five.names[:number])

    pool = ThreadPoolExecutor(1)
    second: list[Future[object]] = []

    def slow(file: Path, *arguments: Any, **options: Any) -> None:
        if not second and file.name.endswith(("masked.json", "confirmed.json")):
            second.append(pool.submit(ask_once, twin, 4))
            assert not wait(second, timeout=0.3).done  # it does not end before this one has
        write_object(file, *arguments, **options)

    monkeypatch.setattr(masked_sums, "write_object", slow)
    assert ask_once(site, 5)
    with pytest.raises(Refused, match=r"masks it only once|for other sites already"):
        second[0].result(timeout=10)


@pytest.mark.threat("sum_two_equations")
def test_what_remains_one_of_three_sites_takes_csac_apart() -> None:
    """From its own model, the mean A and the fused model F, which it gets, a site finds both others.

    With u_k = G_k − A and f = F − A: Σ u_k = 0 and Σ d_k u_k = f · Σ d_k. So u_2 follows from d_2 and d_3, for which
    the norms of u_2 and of u_3 = −u_1 − u_2 are two equations.
    """
    draw = torch.Generator().manual_seed(1)
    models = [torch.randn(50, generator=draw, dtype=torch.float64) for _ in range(3)]
    mean = torch.stack(models).mean(0)
    parts = [distance_weighted(Weights({"w": model}), Weights({"w": mean})) for model in models]
    weighted, distances = ({"w": torch.stack([part[side]["w"] for part in parts]).sum(0)} for side in (0, 1))
    fused = fused_from_sums(Weights({"w": mean}), weighted, distances)["w"]

    offset, toward = models[0] - mean, fused - mean
    length = offset.norm().item()

    def second(d_2: float, d_3: float) -> Tensor:
        return ((length + d_2 + d_3) * toward + (d_3 - length) * offset) / (d_2 - d_3)

    def gaps(d: npt.NDArray[np.float64]) -> list[float]:
        guess = second(*d)
        return [guess.norm().item() - d[0], (offset + guess).norm().item() - d[1]]

    starts = [(a * length, b * length) for a in np.linspace(0.5, 1.5, 5) for b in np.linspace(0.55, 1.55, 5)]
    solved = [
        solution[0] for solution in (fsolve(gaps, start, full_output=True) for start in starts) if solution[2] == 1
    ]
    candidates = {tuple(np.round(d, 6)): mean + second(*d) for d in solved if max(map(abs, gaps(d))) < 1e-6}
    assert len(candidates) <= 4  # two, each also with both sites in the other order
    for other in models[1:]:
        assert min((solution - other).abs().max().item() for solution in candidates.values()) < 1e-6


@pytest.mark.threat("sum_questions")
@pytest.mark.parametrize(("sites", "answers", "shown"), [(3, 1, False), (3, 2, True), (4, 3, True), (5, 4, True)])
def test_what_remains_a_coordinator_that_chooses_the_mean_takes_csac_apart(
    sites: int, answers: int, shown: bool
) -> None:
    """Like models that are trained again round after round, and another A for `weigh` in each: H − 1 answers do.

    An honest coordinator has one answer for each model, with A the mean: it fits infinitely many models.
    """
    draw = np.random.default_rng(0)
    models, numbers = draw.normal(size=(sites, 10)), 10
    mean = models.mean(0)
    chosen = [mean, *(mean + 0.5 * draw.normal(size=numbers) for _ in range(answers - 1))]

    def answer(of: npt.NDArray[np.float64], to: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        parts = [
            distance_weighted(Weights({"w": torch.tensor(attempt)}), Weights({"w": torch.tensor(to)})) for attempt in of
        ]
        weighted, distances = (sum(part[side]["w"].double().numpy() for part in parts) for side in (0, 1))
        return np.append(weighted, distances)

    seen = [np.round(answer(models, to) * 2**32) / 2**32 for to in chosen]

    def whole(guess: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        others = guess.reshape(sites - 1, numbers)
        return np.vstack([others, sites * mean - others.sum(0)])

    def gaps(guess: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        apart = [whole(guess) - to for to in chosen]
        lengths = [np.linalg.norm(attempt, axis=1) for attempt in apart]
        answers = [np.append(d @ attempt, d.sum()) for d, attempt in zip(lengths, apart, strict=True)]
        return np.concatenate(answers) - np.concatenate(seen)

    tries = (
        least_squares(gaps, (mean + draw.normal(size=(sites - 1, numbers))).ravel(), xtol=1e-15, ftol=1e-15, gtol=1e-15)
        for _ in range(10)
    )
    best = next(attempt for attempt in tries if attempt.cost < 1e-12)
    error = max(min(np.abs(solution - model).max() for solution in whole(best.x)) for model in models)
    assert (error < 1e-7) == shown


@pytest.mark.threat("sum_two_equations")
def test_what_remains_one_of_three_sites_takes_scaffold_apart() -> None:
    """The mean of control variates is another sum of the same models, with known factors 1/(T·η)."""
    draw = torch.Generator().manual_seed(2)
    start, *models = (Weights({"w": torch.randn(20, generator=draw, dtype=torch.float64)}) for _ in range(4))
    paths, zero = (0.3, 0.5, 0.9), Weights({"w": torch.zeros(20, dtype=torch.float64)})
    controls = [
        next_control(zero, zero, start, model_of_site, path)["w"]
        for model_of_site, path in zip(models, paths, strict=True)
    ]
    of_models, of_controls = (
        torch.stack(each).sum(0) for each in ([model_of_site["w"] for model_of_site in models], controls)
    )
    rest = of_models - models[0]["w"]
    further = 2 * start["w"] - rest
    second = (of_controls - controls[0] - further / paths[2]) / (1 / paths[1] - 1 / paths[2])  # x − y_2
    assert torch.allclose(start["w"] - second, models[1]["w"], atol=1e-9)


@pytest.mark.threat("sum_two_equations")
def test_methods_of_two_sums_warn_among_three_sites() -> None:
    for options, few in (
        ({"name": "csac"}, 3),
        ({"name": "scaffold"}, 3),
        ({"name": "styles", "method": {"name": "csac"}}, 3),
        ({"name": "csac", "aggregation": "average"}, 2),
        ({"name": "fedavg"}, 2),
    ):
        method = registry.parse(options)
        assert check_sums(method, few + 1) == ()
        if few >= SMALLEST_ROSTER:
            (warning,) = check_sums(method, few)
            assert "4 sites or more" in warning
