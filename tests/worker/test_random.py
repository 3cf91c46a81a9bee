"""Philox against the known answers of its authors' Random123 package, and the uniforms built on it."""

import numpy as np
import pytest

from octavo.worker.random import philox4x32, seed_bits, uniforms

KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text):
    return np.array([int(word, 16) for word in text.split()], np.uint32)


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_philox_known_answers(counter, key, expected):
    assert philox4x32(words(counter), words(key)).tolist() == words(expected).tolist()


def test_philox_vectorised_equals_one_by_one():
    counters = np.stack([words(row[0]) for row in KNOWN_ANSWERS])
    keys = np.stack([words(row[1]) for row in KNOWN_ANSWERS])
    assert philox4x32(counters, keys).tolist() == [words(row[2]).tolist() for row in KNOWN_ANSWERS]


def test_uniform_is_built_from_the_first_two_words():
    # Counter 0 under key 0 is the first known answer.
    expected = ((0x6627E8D5 >> 5) * 2**26 + (0xE169C58D >> 6)) / 2**53
    zero = np.zeros(1, np.uint64)
    assert uniforms(zero, zero, zero).tolist() == [expected]


def test_d08_uniforms_depend_on_seed_branch_and_position_only():
    seeds = np.array([7, 7, 7, 8, seed_bits(-1), 7 + 2**40], np.uint64)
    branches = np.array([0, 1, 0, 0, 0, 0])
    positions = np.array([3, 3, 4, 3, 3, 3])
    together = uniforms(seeds, branches, positions)
    alone = [uniforms(seeds[i : i + 1], branches[i : i + 1], positions[i : i + 1])[0] for i in range(6)]
    assert together.tolist() == alone
    assert len(set(alone)) == 6


def test_uniforms_cover_the_unit_interval():
    count = 1 << 16
    values = uniforms(np.full(count, 42, np.uint64), np.zeros(count, np.int32), np.arange(count))
    assert values.min() >= 0.0
    assert values.max() < 1.0
    observed = np.bincount((values * 64).astype(int), minlength=64)
    chi_square = ((observed - count / 64) ** 2 / (count / 64)).sum()
    assert chi_square < 112  # 63 degrees of freedom: 0.9999 quantile


def test_uniforms_of_no_rows():
    empty = np.zeros(0, np.uint64)
    assert uniforms(empty, empty, empty).shape == (0,)
