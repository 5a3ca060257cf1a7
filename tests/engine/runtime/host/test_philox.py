"""Against the vectors that Random123 publishes (kat_vectors), and what we build on them."""

from __future__ import annotations

import numpy as np
import pytest

from engine.runtime.host.philox import philox4x32, uniforms

VECTORS = [
    # counter, key, result
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text: str) -> np.ndarray:
    return np.array([[int(word, 16)] for word in text.split()], dtype=np.uint64)


@pytest.mark.parametrize(("counter", "key", "result"), VECTORS)
def test_published_vectors(counter: str, key: str, result: str) -> None:
    assert (philox4x32(words(counter), words(key)) == words(result)).all()


def test_a_uniform_is_its_first_two_words() -> None:
    expected = ((0x6627E8D5 >> 5) * 2**26 + (0xE169C58D >> 6)) / 2**53
    assert uniforms([0], [0]).tolist() == [expected]


def test_seed_and_position_are_used_to_their_last_bit() -> None:
    pairs = [(0, 0), (1, 0), (0, 1), (1 << 32, 0), (2**64 - 1, 0), (2**63, 0), (0, 1 << 32)]
    seeds, positions = zip(*pairs, strict=True)
    together = uniforms(seeds, positions).tolist()
    assert len(set(together)) == len(pairs)
    assert together == [float(uniforms([s], [p])[0]) for s, p in pairs]


def test_uniforms_are_uniform_and_neighbours_are_unrelated() -> None:
    """Chi-square with 99 degrees of freedom (148 is its 99.9 % point), along positions and along seeds."""
    n = 20_000
    for u in (uniforms([7] * n, range(n)), uniforms(range(n), [7] * n)):
        counts = np.bincount((u * 100).astype(int), minlength=100)
        assert ((counts - n / 100) ** 2 / (n / 100)).sum() < 148
        assert abs(np.corrcoef(u[:-1], u[1:])[0, 1]) < 0.03
