"""The protocol of a secure sum in memory: honest sites, lost ones, and those who cheat."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from scipy.optimize import fsolve, least_squares
from torch import Tensor

from fedshift.deploy.crypto import masked_sums
from fedshift.deploy.crypto.masked_sums import (
    KeyCard,
    Order,
    PrivateKey,
    Revealed,
    SecureSite,
    SecureSum,
    Upload,
    signed_text,
)
from fedshift.errors import FedshiftError, Refused
from fedshift.experiment.fits.secure_sums import check_sums
from fedshift.federation.secure.integer_sums import SMALLEST_ROSTER
from fedshift.functional.pairwise_masks import add_masks, unmask
from fedshift.functional.secret_sharing import SHARE_BYTES
from fedshift.json_objects import write_object
from fedshift.methods import registry
from fedshift.methods.federated.csac import distance_weighted, fused_from_sums
from fedshift.methods.federated.scaffold import next_control
from fedshift.weights import Weights


class Federation:
    """Sites with certificates, and a server that may do what it likes."""

    def __init__(self, folder: Path, number: int, run: str = "run") -> None:
        self.names = [f"s{index:02d}" for index in range(number)]
        self.folder, self.run = folder, run
        self.certificates = {name: Ed25519PrivateKey.generate() for name in self.names}
        self.sites = {name: self.start_site(name) for name in self.names}
        draw = random.Random(number)
        self.numbers = {name: torch.tensor([1, draw.getrandbits(60), -draw.getrandbits(60)]) for name in self.names}

    def start_site(self, name: str) -> SecureSite:
        return SecureSite(
            name, self.run, self.folder / name, self.certificates[name].sign, self._verify, smallest_sum=3
        )

    def _verify(self, card: KeyCard, text: bytes) -> bool:
        try:
            self.certificates[card.site].public_key().verify(card.signature, text)
        except (InvalidSignature, KeyError):
            return False
        return True

    def order(self, names: Sequence[str] | None = None, exchange: int = 1, content: str = "aa") -> Order:
        cards = tuple(self.sites[name].card() for name in (self.names if names is None else names))
        return Order(self.run, exchange, "fit", content, cards)

    def sum_of(self, order: Order, first: Sequence[str], second: Sequence[str]) -> Tensor:
        """Both exchanges: those that answer the first, and of these the second."""
        total = SecureSum(order)
        for name in first:
            total.add(name, self.sites[name].mask(order, self.numbers[name]))
        return total.unmask_total(self.tell_shares(total, second))

    def mask_all(self, order: Order) -> SecureSum:
        total = SecureSum(order)
        for name in self.names:
            total.add(name, self.sites[name].mask(order, self.numbers[name]))
        return total

    def tell_shares(
        self, total: SecureSum, names: Sequence[str], answered: Sequence[str] | None = None
    ) -> dict[str, Revealed]:
        """The second exchange with these sites: they confirm to each other who answered, and tell their shares."""
        answered = total.answered if answered is None else answered
        codes = {name: self.sites[name].confirm(total.order, answered) for name in names}
        return {
            name: self.sites[name].reveal(
                total.order,
                answered,
                total.sealed_for(name),
                {by: code[name] for by, code in codes.items() if by != name},
            )
            for name in names
        }

    def plain(self, names: Sequence[str]) -> Tensor:
        return sum(self.numbers[name] for name in names)


@pytest.fixture
def five(tmp_path: Path) -> Federation:
    return Federation(tmp_path, 5)


@pytest.mark.parametrize("number", [3, 4, 5, 9])
def test_the_sum_is_the_plain_one_whoever_is_lost(tmp_path: Path, number: int) -> None:
    where, draw = Federation(tmp_path, number), random.Random(number)
    least = max(3, number // 2 + 1)
    for exchange in (1, 2):
        first = draw.sample(where.names, draw.randint(least, number))
        second = draw.sample(first, draw.randint(number // 2 + 1, len(first)))
        total = where.sum_of(where.order(exchange=exchange), first, second)
        assert torch.equal(total, where.plain(first))


@pytest.mark.threat("sum_upload")
def test_an_upload_tells_nothing_and_no_two_are_alike(five: Federation) -> None:
    uploads = [five.sites["s00"].mask(five.order(exchange=number), five.numbers["s00"]).numbers for number in (1, 2)]
    assert not (uploads[0] == uploads[1]).any()
    assert not (uploads[0] == five.numbers["s00"]).any()


@pytest.mark.threat("sum_predictable_masks")
def test_self_masks_come_from_no_seed(five: Federation) -> None:
    """With the same key, order and numbers the pairwise masks are equal, and the self masks are not."""
    upload = five.sites["s00"].mask(five.order(), five.numbers["s00"]).numbers
    again = five.folder / "again"
    again.mkdir()
    (again / "key").write_bytes((five.folder / "s00" / "key").read_bytes())
    twin = SecureSite("s00", "run", again, five.certificates["s00"].sign, five._verify)
    other = twin.mask(five.order(), five.numbers["s00"]).numbers
    assert not (upload == other).any()


@pytest.mark.parametrize(("first", "second"), [(5, 2), (3, 2)])
def test_too_few_in_the_second_exchange(five: Federation, first: int, second: int) -> None:
    with pytest.raises(Refused, match="no majority"):
        five.sum_of(five.order(), five.names[:first], five.names[:second])
    with pytest.raises(Refused, match="at least 3"):
        five.sum_of(five.order(exchange=2), five.names[:2], five.names[:2])
    total = SecureSum(five.order())
    for name in five.names[:first]:
        total.add(name, five.sites[name].mask(total.order, five.numbers[name]))
    told = five.tell_shares(total, five.names[:3])
    with pytest.raises(FedshiftError, match="needs 3 of 5 sites"):
        total.unmask_total({name: told[name] for name in five.names[:second]})


def test_a_restarted_site_and_a_server_that_asks_again_end_in_the_same_bits(five: Federation) -> None:
    order = five.order()
    before = {name: five.sites[name].mask(order, five.numbers[name]) for name in five.names[:4]}
    five.sites = {name: five.start_site(name) for name in five.names}  # as after a kill of all
    assert five.order() == order
    assert all(torch.equal(five.sites[name].mask(order, torch.zeros(3, dtype=torch.int64)).numbers, upload.numbers)
               for name, upload in before.items())  # fmt: skip
    assert torch.equal(five.sum_of(order, five.names[:4], five.names[:3]), five.plain(five.names[:4]))
    five.sites = {name: five.start_site(name) for name in five.names}
    assert torch.equal(five.sum_of(order, five.names[:4], five.names[1:4]), five.plain(five.names[:4]))


@pytest.mark.threat("sum_changed_roster")
def test_one_update_is_masked_for_one_roster_only(five: Federation) -> None:
    site, numbers = five.sites["s00"], five.numbers["s00"]
    site.mask(five.order(), numbers)
    for other in (five.order(five.names[:4]), five.order(content="bb")):
        with pytest.raises(Refused, match="masks it only once"):
            site.mask(other, numbers)
        with pytest.raises(Refused, match="did not mask"):
            site.confirm(other, five.names[:4])
        with pytest.raises(Refused, match="did not mask"):
            site.reveal(other, five.names[:4], {}, {})
    site.forget_uploads(1)
    with pytest.raises(Refused, match="is over"):
        site.mask(five.order(), numbers)


@pytest.mark.threat("sum_survivor_sets")
def test_a_site_unmasks_for_one_set_of_survivors_only(five: Federation) -> None:
    total = five.mask_all(five.order())
    told = five.tell_shares(total, five.names[:4], five.names[:4])
    five.sites = {name: five.start_site(name) for name in five.names}
    assert five.tell_shares(total, five.names[:4], five.names[:4]) == told
    for answered in (five.names, five.names[:3], [*five.names[:3], five.names[4]]):
        with pytest.raises(Refused, match="for other sites already"):
            five.start_site("s00").confirm(total.order, answered)
        with pytest.raises(Refused, match="for other sites already"):
            five.start_site("s00").reveal(total.order, answered, total.sealed_for("s00"), {})


@pytest.mark.threat("sum_both_shares")
def test_no_site_tells_both_kinds_of_shares_of_one(five: Federation) -> None:
    told = five.tell_shares(five.mask_all(five.order()), five.names[:3], five.names[:3])
    assert set(told["s00"].self_seeds) == set(five.names[:3])
    assert {pair[0] for pair in told["s00"].pairs} == set(five.names[:3])
    assert {pair[1] for pair in told["s00"].pairs} == set(five.names[3:])


SETS_FOR_TWO = {"s00": "012", "s01": "013", "s02": "012", "s03": "013", "s04": "014"}
"""Site → the sites that it is told answered. Each set has a majority and the site itself; together the shares for them
would give the sum of s00 and s01, since each of the other three is left out in three sets."""


@pytest.mark.threat("model_alone", "sum_survivor_sets")
def test_different_sets_of_survivors_at_each_site_give_nothing(five: Federation) -> None:
    total = five.mask_all(five.order())
    sets = {name: [f"s0{index}" for index in places] for name, places in SETS_FOR_TWO.items()}
    codes = {name: five.sites[name].confirm(total.order, answered) for name, answered in sets.items()}
    for name, answered in sets.items():
        to_it = {by: code[name] for by, code in codes.items() if name in code}
        with pytest.raises(Refused, match="no majority"):
            five.sites[name].reveal(total.order, answered, total.sealed_for(name), to_it)


@pytest.mark.threat("sum_survivor_sets")
def test_without_confirmations_that_attack_works(five: Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    """So the test above is about an attack that is real: the server gets the sum of two sites of five."""
    monkeypatch.setattr(masked_sums.hmac, "compare_digest", lambda item, other: True)
    total = five.mask_all(five.order())
    told = {}
    for name, places in SETS_FOR_TWO.items():
        answered = [f"s0{index}" for index in places]
        told[name] = five.sites[name].reveal(
            total.order, answered, total.sealed_for(name), dict.fromkeys(answered, b"")
        )
    two = SecureSum(total.order)
    for name in ("s00", "s01"):
        two.add(name, five.sites[name].mask(total.order, five.numbers[name]))
    self_seeds = [
        two._seed(name, name, {by: shares.self_seeds[name] for by, shares in told.items()}) for name in two.answered
    ]
    pairs = {
        (name, other): two._seed(
            name, other, {by: shares.pairs[name, other] for by, shares in told.items() if (name, other) in shares.pairs}
        )
        for name in two.answered
        for other in five.names[2:]
    }
    assert two.total is not None
    unmask(two.total, self_seeds, pairs)
    assert torch.equal(two.total, five.plain(["s00", "s01"]))


@pytest.mark.threat("sum_confirmation")
@pytest.mark.parametrize("message", ["of another sum", "for another site", "of another set", "its own", "made up"])
def test_a_confirmation_counts_only_for_its_sum_its_receiver_and_its_set(five: Federation, message: str) -> None:
    totals = [five.mask_all(five.order(exchange=number)) for number in (1, 2)]
    codes = [
        {name: five.sites[name].confirm(total.order, five.names[:4]) for name in five.names[:3]} for total in totals
    ]
    sets = {
        name: five.sites[name].confirm(five.mask_all(five.order(exchange=3)).order, five.names) for name in five.names
    }
    good = {by: codes[0][by]["s00"] for by in ("s01", "s02")}
    bad = {
        "of another sum": codes[1]["s02"]["s00"],
        "for another site": codes[0]["s02"]["s01"],
        "of another set": sets["s02"]["s00"],
        "its own": codes[0]["s00"]["s02"],
        "made up": bytes(32),
    }[message]
    answer = five.sites["s00"].reveal, totals[0].order, five.names[:4], totals[0].sealed_for("s00")
    with pytest.raises(Refused, match="no majority"):
        answer[0](*answer[1:], {**good, "s02": bad})
    with pytest.raises(Refused, match="no majority"):  # nor a site twice, or one that is not in the sum
        answer[0](*answer[1:], {"s01": good["s01"], "s00": good["s01"], "s04": bytes(32), "x": good["s01"]})
    assert answer[0](*answer[1:], good).self_seeds


def seeds_of(five: Federation, order: Order, name: str) -> dict[str, bytes]:
    key = PrivateKey.of(five.folder / name / "key")
    return {card.site: key.mask_seed(order, name, card) for card in order.cards if card.site != name}


@pytest.mark.threat("sum_inconsistent_models")
def test_different_contents_give_noise(five: Federation) -> None:
    orders = {name: five.order(content="bb" if name == "s02" else "aa") for name in five.names}
    total = SecureSum(five.order())
    for name in five.names:
        total.add(name, five.sites[name].mask(orders[name], five.numbers[name]))
    for name in five.names:  # what s02 sealed, and what was sealed for it, was for another content
        codes = {
            by: five.sites[by].confirm(orders[by], total.answered).get(name, b"") for by in five.names if by != name
        }
        with pytest.raises(Refused, match="no majority" if name == "s02" else "not sealed for this sum"):
            five.sites[name].reveal(orders[name], total.answered, total.sealed_for(name), codes)
    # Nor do the pairwise masks cancel, if sites revealed all the same.
    for alike in (True, False):
        noise = torch.zeros(3, dtype=torch.int64)
        for name in five.names:
            seeds = seeds_of(five, five.order() if alike else orders[name], name)
            noise += add_masks(five.numbers[name], name, bytes(32), seeds)
        unmask(noise, [bytes(32)] * 5, {})
        assert torch.equal(noise, five.plain(five.names)) == alike


def _garbage(revealed: Revealed) -> Revealed:
    return Revealed(dict.fromkeys(revealed.self_seeds, b"\x01" * SHARE_BYTES), dict.fromkeys(revealed.pairs, b""))


@pytest.mark.threat("sum_wrong_shares")
@pytest.mark.parametrize("liars", [1, 2])
def test_wrong_shares_of_a_minority_are_left_out(five: Federation, liars: int) -> None:
    total = five.mask_all(five.order())
    told = five.tell_shares(total, five.names)
    told |= {name: _garbage(told[name]) for name in five.names[:liars]}
    assert torch.equal(total.unmask_total(told), five.plain(five.names))
    told |= {name: _garbage(told[name]) for name in five.names[:3]}
    with pytest.raises(FedshiftError, match="do not fit together"):
        total.unmask_total(told)


@pytest.mark.threat("sum_wrong_shares")
@pytest.mark.parametrize(
    "spoil",
    [
        lambda upload: replace(upload, numbers=upload.numbers[:2]),
        lambda upload: replace(upload, numbers=upload.numbers.float()),
        lambda upload: replace(upload, sealed={}),
        lambda upload: replace(upload, commitments={}),
    ],
)
def test_a_spoilt_upload_is_in_no_sum(five: Federation, spoil: Callable[[Upload], Upload]) -> None:
    order, total = five.order(), SecureSum(five.order())
    for name in five.names[:4]:
        total.add(name, five.sites[name].mask(order, five.numbers[name]))
    with pytest.raises(FedshiftError):
        total.add("s04", spoil(five.sites["s04"].mask(order, five.numbers["s04"])))
    assert torch.equal(total.unmask_total(five.tell_shares(total, total.answered)), five.plain(five.names[:4]))
    with pytest.raises(FedshiftError, match="no place"):
        total.add("s00", five.sites["s00"].mask(order, five.numbers["s00"]))


@pytest.mark.threat("sum_other_shares")
def test_shares_of_another_sum_are_refused(five: Federation) -> None:
    orders = [five.order(exchange=number) for number in (1, 2)]
    uploads = [{name: five.sites[name].mask(order, five.numbers[name]) for name in five.names} for order in orders]
    for sealed in (
        {name: uploads[0][name].sealed["s00"] for name in five.names},  # of exchange 1
        {name: uploads[1][name].sealed["s01"] for name in five.names},  # for another site
        {name: bytes(80) for name in five.names},
        {},
    ):
        codes = {name: five.sites[name].confirm(orders[1], five.names)["s00"] for name in five.names[1:]}
        with pytest.raises(Refused, match="not sealed for this sum"):
            five.sites["s00"].reveal(orders[1], five.names, sealed, codes)


def _spoilt(five: Federation, how: str) -> Order:
    order = five.order()
    card = order.cards[1]
    if how == "unsigned":
        return replace(order, cards=(order.cards[0], KeyCard("s01", card.public, bytes(64)), *order.cards[2:]))
    if how == "stolen":  # the server's own key under the name of another site
        mallory = KeyCard("s01", order.cards[2].public, order.cards[2].signature)
        return replace(order, cards=(order.cards[0], mallory, *order.cards[2:]))
    if how == "other run":
        return replace(order, run="other")
    if how == "twice":
        return replace(order, cards=(*order.cards[:2], order.cards[1], *order.cards[2:]))
    if how == "unordered":
        return replace(order, cards=order.cards[::-1])
    if how == "without it":
        return replace(order, cards=order.cards[1:])
    return replace(order, cards=order.cards[:2])


@pytest.mark.threat("sum_replaced_key")
@pytest.mark.parametrize("how", ["unsigned", "stolen", "other run", "twice", "unordered", "without it", "two sites"])
def test_an_order_that_is_wrong_is_refused(five: Federation, how: str) -> None:
    with pytest.raises(Refused):
        five.sites["s00"].mask(_spoilt(five, how), five.numbers["s00"])
    assert {file.name for file in (five.folder / "s00").iterdir()} == {"key", "lock"}  # and nothing was written down


@pytest.mark.threat("sum_replaced_key")
def test_another_key_in_the_same_run_is_refused(five: Federation) -> None:
    five.sites["s00"].mask(five.order(), five.numbers["s00"])
    (five.folder / "s01" / "key").unlink()
    five.sites["s01"] = five.start_site("s01")
    with pytest.raises(Refused, match="'s01' has another key than before"):
        five.sites["s00"].mask(five.order(exchange=2), five.numbers["s00"])
    new = five.sites["s01"].card().public  # nor may a stranger's key take the place of its own
    signature = five.certificates["s00"].sign(signed_text("run", "s00", new))
    cards = (KeyCard("s00", new, signature), *five.order(exchange=2).cards[2:])
    with pytest.raises(Refused, match="'s00' has another key"):
        five.sites["s00"].mask(replace(five.order(), cards=cards), five.numbers["s00"])


@pytest.mark.threat("sum_inconsistent_models")
def test_every_part_of_an_order_is_bound(five: Federation) -> None:
    order = five.order()
    changed: list[dict[str, Any]] = [
        {"run": "x"}, {"exchange": 2}, {"call": "x"}, {"content": "x"}, {"cards": order.cards[:4]},
    ]  # fmt: skip
    assert len({order.binding, *(replace(order, **change).binding for change in changed)}) == 6


@pytest.mark.slow
@pytest.mark.parametrize("number", [20, 50])
def test_a_large_roster_with_as_many_lost_as_may_be(tmp_path: Path, number: int) -> None:
    where, draw = Federation(tmp_path, number), random.Random(number)
    first = draw.sample(where.names, number // 2 + 2)
    second = draw.sample(first, number // 2 + 1)
    assert torch.equal(where.sum_of(where.order(), first, second), where.plain(first))


@pytest.mark.parametrize(
    ("number", "liars"),
    [(20, ["s00"]), (20, ["s00", "s07", "s10"]), pytest.param(50, ["s03", "s20"], marks=pytest.mark.slow)],
)
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
def test_two_processes_of_a_site_answer_once(five: Federation, exchange: str, monkeypatch: pytest.MonkeyPatch) -> None:
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
@pytest.mark.parametrize(
    ("sites", "answers", "shown"),
    [(3, 1, False), (3, 2, True), (4, 3, True), pytest.param(5, 4, True, marks=pytest.mark.slow)],
)
def test_what_remains_whoever_chooses_the_mean_takes_csac_apart(sites: int, answers: int, shown: bool) -> None:
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
