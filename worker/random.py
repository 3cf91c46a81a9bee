"""Counter-based random numbers: what a branch draws depends on its seed and place alone.

Owns Philox4x32-10 (Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC'11) in numpy.
There is no state: the number of (seed, branch, position) is a pure function, so batch, worker, preemption and
restart cannot change it. Knows nothing of requests or logits.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

UInt32Array = npt.NDArray[np.uint32]

_MULTIPLIER_0 = np.uint64(0xD2511F53)
_MULTIPLIER_1 = np.uint64(0xCD9E8D57)
_WEYL_0 = 0x9E3779B9
_WEYL_1 = 0xBB67AE85
_LOW_32 = np.uint64(0xFFFFFFFF)
_SHIFT_32 = np.uint64(32)


def philox4x32(counter: UInt32Array, key: UInt32Array, rounds: int = 10) -> UInt32Array:
    """Four random words for each counter under its key.

    counter  uint32 [..., 4]
    key      uint32 [..., 2], broadcast against the counters

    Returns uint32 [..., 4].
    """
    c0, c1, c2, c3 = np.moveaxis(counter.astype(np.uint64), -1, 0)
    key_0, key_1 = np.moveaxis(key.astype(np.uint64), -1, 0)
    for turn in range(rounds):
        # Products of two 32-bit words fit 64 bits; the key is bumped modulo 2**32 before each round but the first.
        product_0, product_1 = _MULTIPLIER_0 * c0, _MULTIPLIER_1 * c2
        bumped_0 = (key_0 + np.uint64(turn * _WEYL_0)) & _LOW_32
        bumped_1 = (key_1 + np.uint64(turn * _WEYL_1)) & _LOW_32
        c0, c1, c2, c3 = (
            (product_1 >> _SHIFT_32) ^ c1 ^ bumped_0,
            product_1 & _LOW_32,
            (product_0 >> _SHIFT_32) ^ c3 ^ bumped_1,
            product_0 & _LOW_32,
        )
    return np.stack(np.broadcast_arrays(c0, c1, c2, c3), axis=-1).astype(np.uint32)


def uniforms(
    seeds: npt.NDArray[np.uint64], branches: npt.NDArray[np.integer], positions: npt.NDArray[np.integer]
) -> npt.NDArray[np.float64]:
    """One number in [0, 1) for each (seed, branch, position), all [K]; float64, a multiple of 2**-53.

    All 53 bits are used: with 32, a token of probability below 2**-32 could never be drawn, and a vocabulary
    of 2**17 tokens has many of those.
    """
    seeds = seeds.astype(np.uint64, copy=False)
    key = np.stack([seeds & _LOW_32, seeds >> _SHIFT_32], axis=-1).astype(np.uint32)
    counter = np.zeros((len(seeds), 4), np.uint32)
    counter[:, 0] = positions
    counter[:, 1] = branches
    words = philox4x32(counter, key).astype(np.uint64)
    high, low = words[:, 0] >> np.uint64(5), words[:, 1] >> np.uint64(6)
    return (high * np.uint64(1 << 26) + low).astype(np.float64) * 2.0**-53


def seed_bits(seed: int) -> int:
    """`seed` as the unsigned 64-bit key; negative ones in two's complement."""
    return seed & 0xFFFF_FFFF_FFFF_FFFF
