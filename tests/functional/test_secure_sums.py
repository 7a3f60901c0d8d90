"""Fixed point, secret sharing and masks: the parts of secure aggregation that are plain arithmetic."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from fedshift.errors import FedshiftError
from fedshift.federation.secure.integer_sums import threshold
from fedshift.functional.fixed_point import from_fixed, to_fixed
from fedshift.functional.pairwise_masks import add_masks, unmask
from fedshift.functional.secret_sharing import PRIME, join_shares, split_secret

pytest.importorskip("cryptography")


def test_fixed_point_by_hand() -> None:
    numbers = to_fixed(torch.tensor([0.5, -0.75, 3.0]), terms=1)
    assert numbers.tolist() == [2**31, -3 * 2**30, 3 * 2**32]
    assert to_fixed(torch.tensor([2.0]), terms=1, weight=0.25).tolist() == [2**31]
    assert from_fixed(numbers).tolist() == [0.5, -0.75, 3.0]


def test_rounding_is_at_most_half_of_the_last_bit() -> None:
    numbers = torch.randn(1000, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    assert (from_fixed(to_fixed(numbers, terms=3)) - numbers).abs().max() <= 2**-33


@pytest.mark.parametrize("terms", [1, 3, 50])
def test_the_largest_sum_fits_and_a_larger_one_is_refused(terms: int) -> None:
    most = float(2**62 // terms) / 2**32
    for sign in (1, -1):
        one = to_fixed(torch.tensor([sign * most], dtype=torch.float64), terms)
        assert sign * sum([one] * terms).item() > 0
        assert from_fixed(sum([one] * terms)).item() == pytest.approx(sign * terms * most)
        with pytest.raises(FedshiftError, match="too large"):
            to_fixed(torch.tensor([sign * most * 1.001], dtype=torch.float64), terms)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e300])
def test_what_is_no_number_of_the_range_is_refused(value: float) -> None:
    with pytest.raises(FedshiftError):
        to_fixed(torch.tensor([0.0, value], dtype=torch.float64), terms=3)


def test_the_prime_is_one() -> None:
    odd, twos = PRIME - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    for base in range(2, 60):  # Miller and Rabin
        value = pow(base, odd, PRIME)
        assert value in (1, PRIME - 1) or any((value := value * value % PRIME) == PRIME - 1 for _ in range(twos - 1))


def test_shares_by_hand() -> None:
    # Over two places a polynomial of degree 1 with f(1) = 5, f(2) = 7 has f(0) = 3.
    given = {1: (5).to_bytes(33), 2: (7).to_bytes(33)}
    assert int.from_bytes(join_shares(given, 2)) == 3


@pytest.mark.parametrize(("holders", "threshold"), [(1, 1), (3, 2), (5, 3), (6, 4)])
def test_any_threshold_of_shares_gives_the_secret(holders: int, threshold: int) -> None:
    secret = b"\xff" * 32
    shares = split_secret(secret, holders, threshold)
    for number in range(threshold, holders + 1):
        for places in itertools.combinations(range(1, holders + 1), number):
            assert join_shares({place: shares[place - 1] for place in places}, threshold) == secret


def test_one_share_too_few_fits_every_secret() -> None:
    shares = split_secret(b"a" * 32, 3, 2)
    for other in (bytes(32), b"b" * 32):  # with share 1 alone, a line through it and any secret exists
        line = (int.from_bytes(shares[0]) - int.from_bytes(other)) % PRIME
        second = (int.from_bytes(other) + 2 * line) % PRIME
        assert join_shares({1: shares[0], 2: second.to_bytes(33)}, 2) == other
    with pytest.raises(FedshiftError, match="needs 2 shares"):
        join_shares({1: shares[0]}, 2)
    assert split_secret(b"a" * 32, 3, 2) != shares


@pytest.mark.parametrize("wrong", [bytes(33), b"\xff" * 33, b"", b"x" * 32])
def test_a_share_that_does_not_fit_is_noticed(wrong: bytes) -> None:
    shares = dict(enumerate(split_secret(b"a" * 32, 5, 3), 1)) | {5: wrong}
    with pytest.raises(FedshiftError):
        join_shares(shares, 3)


def test_masks_are_longer_than_a_piece_and_look_random() -> None:
    numbers = torch.zeros(100_003, dtype=torch.int64)
    upload = add_masks(numbers, "a", b"1" * 32, {"b": b"2" * 32})
    assert upload.unique().numel() == len(upload)
    assert abs((upload < 0).double().mean().item() - 0.5) < 0.01
    other = add_masks(numbers, "b", b"3" * 32, {"a": b"2" * 32})
    total = upload + other
    unmask(total, [b"1" * 32, b"3" * 32], {})
    assert torch.equal(total, numbers)


@pytest.mark.parametrize("number", [3, 4, 5, 6, 7])
def test_masks_come_off_for_every_set_of_survivors(number: int) -> None:
    """Every pattern that the threshold allows: who is in the sum, and whose shares are used."""
    names, draw = [f"s{place}" for place in range(number)], random.Random(number)
    own = {name: draw.randbytes(32) for name in names}
    pairs = {frozenset(pair): draw.randbytes(32) for pair in itertools.combinations(names, 2)}
    numbers = {name: torch.tensor([1, draw.getrandbits(60), -draw.getrandbits(60)]) for name in names}
    uploads = {}
    for name in names:
        seeds = {other: pairs[frozenset((name, other))] for other in names if other != name}
        uploads[name] = add_masks(numbers[name], name, own[name], seeds)
    needed = threshold(number)
    for size in range(needed, number + 1):
        for answered in itertools.combinations(names, size):
            lost = [name for name in names if name not in answered]
            between = {(name, other): pairs[frozenset((name, other))] for name in answered for other in lost}
            total = torch.stack([uploads[name] for name in answered]).sum(0)
            assert not (total == torch.stack([numbers[name] for name in answered]).sum(0)).any()
            unmask(total, [own[name] for name in answered], between)
            assert torch.equal(total, torch.stack([numbers[name] for name in answered]).sum(0))
