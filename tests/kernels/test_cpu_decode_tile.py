"""The innermost products of decodes: right in every size, and the same for a row whatever rows are beside it."""

from __future__ import annotations

import numpy as np
import pytest

from octavo.kernels.cpu.decode_tile import ROWS, STRIP, dot_few, weigh_few
from octavo.kernels.cpu.runtime import compiled
from octavo.kernels.cpu.simd import WIDTH


@compiled()
def dot(queries, block, scores):
    rows, depth = queries.shape
    keys = block.shape[0]
    q, b, s = queries.ctypes.data, block.ctypes.data, scores.ctypes.data
    dot_few(rows, (q, depth), (b, depth), (s, keys), keys, depth, (b, 64))


@compiled()
def weigh(weights, block, output):
    rows, keys = weights.shape
    w, b, o = weights.ctypes.data, block.ctypes.data, output.ctypes.data
    weigh_few(rows, (w, keys), (b, STRIP), (o, STRIP), keys, (b, 64))


def numbers(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("keys", [4, 16, 20])
@pytest.mark.parametrize("vectors", [1, 3, 8])
def test_scores(keys: int, vectors: int) -> None:
    queries, block = numbers(ROWS, vectors * WIDTH), numbers(keys, vectors * WIDTH)
    alone = np.zeros((ROWS, keys), np.float32)
    for row in range(ROWS):
        dot(queries[row : row + 1], block, alone[row : row + 1])
    np.testing.assert_allclose(alone, queries @ block.T, atol=1e-4)
    for rows in range(2, ROWS + 1):
        together = np.zeros((rows, keys), np.float32)
        dot(queries[:rows], block, together)
        np.testing.assert_array_equal(together, alone[:rows])


@pytest.mark.parametrize("keys", [1, 4, 17])
def test_weighted_values(keys: int) -> None:
    weights, block, before = numbers(ROWS, keys), numbers(keys, STRIP), numbers(ROWS, STRIP)
    alone = before.copy()
    for row in range(ROWS):
        weigh(weights[row : row + 1], block, alone[row : row + 1])
    np.testing.assert_allclose(alone, before + weights @ block, atol=1e-4)
    for rows in range(2, ROWS + 1):
        together = before[:rows].copy()
        weigh(weights[:rows], block, together)
        np.testing.assert_array_equal(together, alone[:rows])
