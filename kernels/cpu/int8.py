"""Products of int8 weights with rows that are made int8 first, on CPUs with VNNI.

A row's numbers get one scale for each of their groups of `GROUP_MAX` words (64 inputs), by which a group's sums are
multiplied before the groups are added up in float32: one number that is much larger than the others then costs its own
group digits, and no other. Sums of a group are exact. They are of bytes without sign, 128 more than what is meant, by
weights with sign, as the instruction wants it; so they begin at -128 times the sum of the group's weights.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import prange

from octavo.kernels.cpu.elementwise import ALONE_ELEMENTS, share
from octavo.kernels.cpu.gemm import GROUP_MAX, count_parts, multiply_kernel, part_begin
from octavo.kernels.cpu.memory import float32_at
from octavo.kernels.cpu.runtime import compiled
from octavo.kernels.cpu.simd import (
    LANES,
    vlarger,
    vlarger_lane,
    vload,
    vload_lanes,
    vmul,
    vsplat,
    vstore_bytes,
)
from octavo.kernels.cpu.tile import LINE

PEAK = 127
"""The largest number of a group becomes it."""
PEAK_MIN = 1e-30
"""A group without a larger number counts as zeros: the scales of smaller ones are not all finite."""


@compiled()
def _quantise_rows(
    rows: tuple[int, int], size: int, x: tuple[Any, int], out: tuple[Any, int], scales: Any
) -> None:
    """Rows (begin, end) of x, `size` numbers each, in bytes and scales.

    x       (float32 array, row stride)
    out     (uint8 array, row stride); what stands behind a row's numbers, up to 7 bytes, is left undefined
    scales  float32 [rows, groups], NaN for a group with NaN
    """
    source, stride = x
    array, out_stride = out
    depth = (size + 3) // 4
    num_groups = count_parts(depth, GROUP_MAX)
    for row in range(rows[0], rows[1]):
        at, to = row * stride, row * out_stride
        for group in range(num_groups):
            first = 4 * part_begin(group, num_groups, depth)
            last = min(4 * part_begin(group + 1, num_groups, depth), size)
            whole = first + (last - first) // LANES * LANES
            largest = vsplat(0.0)
            for i in range(first, whole, LANES):
                largest = vlarger(largest, vload(source, at + i))
            if whole < last:
                largest = vlarger(largest, vload_lanes(source, at + whole, last - whole))
            peak = vlarger_lane(largest)
            scales[row * num_groups + group] = peak * np.float32(1 / PEAK)
            factor = vsplat(np.float32(PEAK) / peak if peak > PEAK_MIN else np.float32(0.0))
            for i in range(first, whole, LANES):
                vstore_bytes(array, to + i, vmul(vload(source, at + i), factor))
            if whole < last:
                rest = vload_lanes(source, at + whole, last - whole)
                vstore_bytes(array, to + whole, vmul(rest, factor))


@compiled(parallel=True)
def _quantise_together(
    threads: int, num_rows: int, size: int, x: tuple[Any, int], out: tuple[Any, int], scales: Any
) -> None:
    for part in prange(threads):
        _quantise_rows(share(part, threads, num_rows), size, x, out, scales)


@compiled()
def _multiply_quantised(
    num_rows: int,
    quantised: tuple[Any, int],
    scales: Any,
    weight: tuple[int, int, int],
    begins_at: int,
    scales_at: int,
    out_at: int,
    bias_at: int,
    silu: bool,
    threads: int,
) -> None:
    # Threads get addresses: with the arrays, which the caller holds, they would count references to them all the time,
    # each in the other's way.
    array, stride = quantised
    int8 = (scales.ctypes.data, begins_at, scales_at)
    multiply_kernel(num_rows, (array.ctypes.data, stride // 4), weight, out_at, bias_at, silu, threads, int8)


@compiled()
def multiply_int8_kernel(
    num_rows: int,
    size: int,
    x: tuple[int, int],
    weight: tuple[int, int, int, int],
    out_at: int,
    bias_at: int,
    silu: bool,
    threads: int,
) -> None:
    """out float32 [num_rows, N] = x float32 [num_rows, size], quantised, @ weight; see `gemm.multiply_kernel`.

    x       (address, row stride in elements)
    weight  (address of int8 [panels, ceil(size / 4), PANEL, 4], address of int32 [panels, groups, PANEL]: where sums
            begin, address of float32 [panels * PANEL]: the outputs' scales, N)
    """
    panels_at, begins_at, scales_at, num_outputs = weight
    depth = (size + 3) // 4
    source = (float32_at(x[0], (num_rows - 1) * x[1] + size), x[1])
    # Each row on cache lines of its own.
    stride = (4 * depth + LANES + LINE - 1) // LINE * LINE
    quantised = (np.empty(num_rows * stride, np.uint8), stride)
    scales = np.empty(num_rows * count_parts(depth, GROUP_MAX), np.float32)
    if threads == 1 or num_rows * size <= ALONE_ELEMENTS:
        _quantise_rows((0, num_rows), size, source, quantised, scales)
    else:
        _quantise_together(threads, num_rows, size, source, quantised, scales)
    _multiply_quantised(
        num_rows,
        quantised,
        scales,
        (panels_at, depth, num_outputs),
        begins_at,
        scales_at,
        out_at,
        bias_at,
        silu,
        threads,
    )
