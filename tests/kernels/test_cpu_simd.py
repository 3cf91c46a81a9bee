"""The vector operations one by one: exactness where promised, NaN and infinities where they matter."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from octavo.kernels.cpu import simd, wide
from octavo.kernels.cpu.runtime import compiled


@compiled()
def exp2_all(x, result):
    for i in range(0, x.shape[0], simd.LANES):
        simd.vstore(result, i, simd.vexp2(simd.vload(x, i)))


@compiled()
def widen_all(bits, result):
    for i in range(0, bits.shape[0], simd.LANES):
        simd.vstore(result, i, simd.vload(bits, i))


@compiled()
def lanes(source, count, result):
    simd.vstore(result, 0, simd.vload_lanes(source, 0, count))
    simd.vstore_lanes(result, 8, simd.vload(source, 0), count)


@compiled()
def reductions(rows, result):
    simd.vstore(
        result,
        0,
        simd.vsum_each(
            simd.vload(rows, 0), simd.vload(rows, 8), simd.vload(rows, 16), simd.vload(rows, 24),
            simd.vload(rows, 32), simd.vload(rows, 40), simd.vload(rows, 48), simd.vload(rows, 56),
        ),
    )  # fmt: skip
    result[8] = simd.vsum_lanes(simd.vload(rows, 0))
    result[9] = simd.vmax_lanes(simd.vload(rows, 0))


@compiled()
def transpose(source, target):
    simd.vtranspose(source, 0, 8, target, 0, 8)


@compiled()
def keep(source, first, last, result):
    simd.vstore(result, 0, simd.vkeep(simd.vload(source, 0), first, last))


@compiled()
def wide_exp2_all(x, result):
    for i in range(0, x.shape[0], simd.WIDTH):
        wide.wide_store(result, i, simd.vexp2(wide.wide_load(x, i)))


@compiled()
def between(source, low, x, high, result):
    bounds = wide.wide_load(low, 0), wide.wide_load(high, 0)
    kept = wide.wide_between(wide.wide_load(source, 0), bounds[0], wide.wide_splat(x), bounds[1])
    wide.wide_store(result, 0, kept)
    wide.wide_store(result, simd.WIDTH, wide.wide_finite_or_zero(kept))


@compiled()
def take_numbers(counter, taken):
    for i in range(taken.shape[0]):
        taken[i] = simd.fetch_add(counter, 3)


def test_exp2_is_within_two_units_in_the_last_place() -> None:
    x = np.linspace(-126.0, 127.0, 80_000, dtype=np.float32)
    result = np.empty_like(x)
    exp2_all(x, result)
    exact = np.exp2(x.astype(np.float64))
    assert np.abs((result - exact) / exact).max() < 2 * 2.0**-23
    of_wide = np.empty_like(x)
    wide_exp2_all(x, of_wide)
    np.testing.assert_array_equal(of_wide, result)


def test_exp2_at_the_edges() -> None:
    x = np.array([0.0, 1.0, -1.0, -127.0, -1e30, -np.inf, np.nan, 10.0], np.float32)
    result = np.empty_like(x)
    exp2_all(x, result)
    np.testing.assert_array_equal(result, np.array([1, 2, 0.5, 0, 0, 0, np.nan, 1024], np.float32))


@pytest.mark.parametrize(("dtype", "carrier"), [(torch.bfloat16, np.uint16), (torch.float16, np.int16)])
def test_every_half_number_widens_exactly(dtype: torch.dtype, carrier: type) -> None:
    bits = np.arange(65536, dtype=np.uint16)
    result = np.empty(65536, np.float32)
    widen_all(bits.view(carrier), result)
    expected = torch.from_numpy(bits.view(np.int16).copy()).view(dtype).float().numpy()
    np.testing.assert_array_equal(result, expected)
    assert (np.signbit(result) == np.signbit(expected))[~np.isnan(expected)].all()


@pytest.mark.parametrize("count", range(8))
def test_partial_loads_and_stores_touch_no_other_lane(count: int) -> None:
    source = np.arange(1, 9, dtype=np.float32)
    result = np.full(16, -1, np.float32)
    lanes(source, count, result)
    np.testing.assert_array_equal(result[:8], np.where(np.arange(8) < count, source, 0))
    np.testing.assert_array_equal(result[8:], np.where(np.arange(8) < count, source, -1))


def test_sums_maxima_and_transposition() -> None:
    rows = np.random.default_rng(0).integers(-50, 50, (8, 8)).astype(np.float32)
    result = np.empty(10, np.float32)
    reductions(rows.reshape(-1), result)
    np.testing.assert_array_equal(result[:8], rows.sum(1))
    assert result[8] == rows[0].sum()
    assert result[9] == rows[0].max()
    target = np.empty(64, np.float32)
    transpose(rows.reshape(-1), target)
    np.testing.assert_array_equal(target.reshape(8, 8), rows.T)


@pytest.mark.parametrize(("first", "last"), [(0, 8), (2, 5), (-7, 3), (6, 90), (3, 3), (-9, -2), (8, 12)])
def test_keep_masks_outside_the_range_even_nan(first: int, last: int) -> None:
    source = np.full(8, np.nan, np.float32)
    inside = (np.arange(8) >= first) & (np.arange(8) < last)
    source[inside] = 5.0
    result = np.empty(8, np.float32)
    keep(source, first, last, result)
    np.testing.assert_array_equal(result, np.where(inside, 5.0, -np.inf))


def test_between_masks_each_lane_by_its_own_bounds_even_nan() -> None:
    lane = np.arange(simd.WIDTH, dtype=np.float32)
    low, high = lane - 4, lane + 2
    inside = (low <= 3) & (high > 3)
    source = np.where(inside, 5.0, np.nan).astype(np.float32)
    result = np.empty(2 * simd.WIDTH, np.float32)
    between(source, low, 3.0, high, result)
    np.testing.assert_array_equal(result[: simd.WIDTH], np.where(inside, 5.0, -np.inf))
    np.testing.assert_array_equal(result[simd.WIDTH :], np.where(inside, 5.0, 0.0))


def test_fetch_add_returns_the_value_before() -> None:
    counter, taken = np.array([4]), np.empty(3, np.int64)
    take_numbers(counter, taken)
    np.testing.assert_array_equal(taken, [4, 7, 10])
    assert counter[0] == 13
