"""FedCCRL: whose styles images take, and when they take none. Its loss is compared in `test_styles_of_others`."""

from __future__ import annotations

import pytest
import torch
from lost import site_of
from tiny import CNN, domains, federation, run
from torch import Tensor

from fedshift.errors import UserError
from fedshift.federation.federation import Federation
from fedshift.federation.messages import Styles
from fedshift.federation.site import Envelope, Site
from fedshift.functional.styles import channel_styles
from fedshift.methods.base import Samples
from fedshift.methods.federated import fedccrl
from fedshift.methods.federated.fedccrl import FedCCRL
from fedshift.weights import Weights

SIZES = {"a": 9, "b": 17, "c": 23}


def begun(method: FedCCRL) -> tuple[Federation, Weights, dict[str, Styles]]:
    where = federation(method, domains(CNN, SIZES), rounds=2, budget=9)
    weights = run(method, domains(CNN, SIZES), rounds=1, budget=0)[0].weights
    return where, weights, {site: method.share_styles(site_of(where, site)).styles for site in SIZES}


def ready(where: Federation, name: str, number: int = 1) -> Site:
    """A site in a round of this number, with work left."""
    site = site_of(where, name)
    site.begin(Envelope(number, number, 0.0, 9))
    return site


def test_a_site_sends_styles_of_its_images_and_takes_those_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[Tensor] = []
    plain = fedccrl.restyle
    monkeypatch.setattr(fedccrl, "restyle", lambda *given: (taken.append(given[1]), plain(*given))[1])
    method = FedCCRL(shared=0.4, augmix=False)
    where, weights, bank = begun(method)
    assert {site: len(styles["mean"]) for site, styles in bank.items()} == {"a": 3, "b": 6, "c": 9}
    site = ready(where, "a")
    rows = torch.arange(site.samples)
    known, _ = channel_styles(site.pixels(site.data.batch(rows)[0]))
    assert torch.isin(bank["a"]["mean"], known).all()
    method.fit_beside(site, weights, bank)
    others = torch.cat([bank["b"]["mean"], bank["c"]["mean"]])
    assert len(taken) > 1
    assert all(torch.isin(means, others).all() for means in taken)
    assert not torch.equal(taken[0], taken[1])  # another style for each version
    found = torch.cat(taken).unique()
    assert len(found) > len(others) / 2


def test_images_are_drawn_anew_in_each_round() -> None:
    method = FedCCRL()
    where, _, _ = begun(method)
    first, second = (method.share_styles(ready(where, "c", number)).styles["mean"] for number in (1, 2))
    assert not torch.equal(first, second)


def test_few_styles_come_more_than_once() -> None:
    bank = {"mean": torch.tensor([[0.1], [0.2], [0.3]]), "deviation": torch.tensor([[1.0], [2.0], [3.0]])}
    means, deviations, shares = FedCCRL()._draw_styles(bank, 40, torch.Generator().manual_seed(0))
    assert set(means.flatten().tolist()) == set(bank["mean"].flatten().tolist())
    torch.testing.assert_close(deviations, 10 * means)
    assert len(shares) == 40
    few, _, _ = FedCCRL()._draw_styles(bank, 3, torch.Generator().manual_seed(0))
    assert sorted(few.flatten().tolist()) == bank["mean"].flatten().tolist()


def test_a_site_sends_at_least_one_style() -> None:
    assert [FedCCRL(shared=0.1)._number_shared(number) for number in (1, 9, 10, 29)] == [1, 1, 1, 2]


def test_alone_it_keeps_its_styles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fedccrl, "restyle", None)  # which nobody calls
    method = FedCCRL(augmix=False)
    where, weights, bank = begun(method)
    update = method.fit_beside(ready(where, "a"), weights, {"a": bank["a"]})
    assert update.loss > 0


@pytest.mark.parametrize(("shape", "goes"), [((1, 8, 8), True), ((3, 8, 8), True), ((4, 8, 8), False), ((5,), False)])
def test_augmix_wants_grey_or_colour(shape: tuple[int, ...], goes: bool) -> None:
    if goes:
        assert FedCCRL().check_samples(Samples(shape)) == ()
        return
    with pytest.raises(UserError, match="fedccrl"):
        FedCCRL().check_samples(Samples(shape))
    if len(shape) == 3:
        FedCCRL(augmix=False).check_samples(Samples(shape))


def test_shares_of_styles_are_drawn_from_its_beta_distribution() -> None:
    """Of variance 1/(4(2α + 1)), Casella & Berger: nearly all of Beta(0.1, 0.1) is at the ends."""
    bank = {name: torch.ones(1, 1) for name in ("mean", "deviation")}
    for alpha in (0.1, 1.0):
        shares = FedCCRL(alpha=alpha)._draw_styles(bank, 4000, torch.Generator().manual_seed(0))[2]
        assert shares.var().item() == pytest.approx(1 / (4 * (2 * alpha + 1)), abs=0.01)
