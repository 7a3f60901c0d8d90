"""Random numbers from a secret."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedshift.functional.secret_noise import SecretStream, normal, uniform

pytest.importorskip("cryptography")
KEY = bytes(range(32))


def test_uniform_numbers_are_the_key_stream() -> None:
    """The 53 upper bits of each eight bytes, in the order of the stream, however it is cut."""
    import hashlib
    import hmac

    from cryptography.hazmat.primitives.ciphers import Cipher
    from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20

    key = hmac.new(KEY, b"noise", hashlib.sha256).digest()
    stream = Cipher(ChaCha20(key, bytes(16)), mode=None).encryptor().update(bytes(80))
    expected = [(int.from_bytes(stream[at : at + 8], "little") >> 11) / 2**53 for at in range(0, 80, 8)]
    one = SecretStream(KEY, "noise")
    assert torch.cat([one.uniform(3), one.uniform(7)]).tolist() == expected


def test_noise_is_standard_normal_and_uniform() -> None:
    noise = normal((401, 101), SecretStream(KEY, "n")).numpy()
    assert noise.shape == (401, 101)
    assert noise.mean() == pytest.approx(0, abs=0.02)
    assert noise.std() == pytest.approx(1, abs=0.02)
    assert np.mean(np.abs(noise) < 1) == pytest.approx(0.6827, abs=0.01)
    assert abs(np.corrcoef(noise.flat[:20_000], noise.flat[-20_000:])[0, 1]) < 0.03  # sine and cosine of one pair
    drawn = uniform(10_000, SecretStream(KEY, "u")).numpy()
    assert np.histogram(drawn, bins=5, range=(0, 1))[0] == pytest.approx([2000] * 5, abs=200)
