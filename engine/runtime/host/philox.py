"""Random numbers that depend on (seed, position) and on nothing else.

Philox4x32-10 of Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011):
a keyed bijection of a counter, so that any position's number is computed without those before it, and a
kernel on another device computes the same one. Key: the 64-bit seed, low word first. Counter: the
token's position in its sequence, low word first; the upper two words are zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

_ROUNDS: Final = 10
_MULTIPLIERS: Final = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL: Final = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_WORD: Final = np.uint64(0xFFFFFFFF)
_32: Final = np.uint64(32)


def philox4x32(counter: NDArray[np.uint64], key: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """counter [4, n], key [2, n], 32-bit words in 64-bit integers -> [4, n]."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        left, right = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (right >> _32) ^ c1 ^ k0, right & _WORD, (left >> _32) ^ c3 ^ k1, left & _WORD
        k0, k1 = (k0 + _WEYL[0]) & _WORD, (k1 + _WEYL[1]) & _WORD
    return np.stack((c0, c1, c2, c3))


def uniforms(seeds: Sequence[int], positions: Sequence[int]) -> NDArray[np.float64]:
    """One number in [0, 1) per (seed, position), with all 53 bits of a double."""
    seed, position = np.array(seeds, dtype=np.uint64), np.array(positions, dtype=np.uint64)
    zero = np.zeros_like(position)
    words = philox4x32(
        np.stack((position & _WORD, position >> _32, zero, zero)), np.stack((seed & _WORD, seed >> _32))
    )
    high, low = words[0] >> np.uint64(5), words[1] >> np.uint64(6)
    return np.asarray((high * np.uint64(1 << 26) + low) * 2.0**-53, dtype=np.float64)
