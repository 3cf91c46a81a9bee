"""What stands between two matrix products, row by row: norm, activation, scaling. numba twins, float32 only.

All arguments are numbers: addresses of tensors (see `memory`), strides in elements, sizes. Each row's arithmetic is
the same whatever stands beside it and however many threads run. A call of few elements stays on the calling thread,
which would wait longer for a second one than it takes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import prange

from octavo.kernels.cpu.memory import float32_at
from octavo.kernels.cpu.runtime import compiled
from octavo.kernels.cpu.simd import (
    LANES,
    LOG2_E,
    vadd,
    vdiv,
    vexp2,
    vfma,
    vload,
    vmax,
    vmax_lanes,
    vmul,
    vsplat,
    vstore,
    vsub,
    vsum_lanes,
)

ALONE_ELEMENTS = 1 << 16
"""Up to so many elements (some 30 microseconds) the calling thread works alone."""


@compiled()
def share(part: int, parts: int, rows: int) -> tuple[int, int]:
    """Rows (begin, end) of one of `parts` threads."""
    return part * rows // parts, (part + 1) * rows // parts


@compiled()
def _norm_rows(
    rows: tuple[int, int],
    size: int,
    x: tuple[Any, int],
    weight: Any,
    eps: float,
    residual: tuple[Any, int],
    has_residual: bool,
    out: Any,
) -> None:
    whole = size // LANES * LANES
    source, source_stride = x
    for row in range(rows[0], rows[1]):
        at = row * source_stride
        squares = vsplat(np.float32(0.0))
        rest = np.float32(0.0)
        if has_residual:
            held, held_at = residual[0], row * residual[1]
            for i in range(0, whole, LANES):
                value = vadd(vload(held, held_at + i), vload(source, at + i))
                vstore(held, held_at + i, value)
                squares = vfma(value, value, squares)
            for i in range(whole, size):
                held[held_at + i] += source[at + i]
                rest += held[held_at + i] * held[held_at + i]
        else:
            held, held_at = source, at
            for i in range(0, whole, LANES):
                value = vload(held, held_at + i)
                squares = vfma(value, value, squares)
            for i in range(whole, size):
                rest += held[held_at + i] * held[held_at + i]
        mean = (vsum_lanes(squares) + rest) / np.float32(size)
        scale = np.float32(1.0) / np.sqrt(mean + np.float32(eps))
        factor = vsplat(scale)
        to = row * size
        for i in range(0, whole, LANES):
            vstore(out, to + i, vmul(vmul(vload(held, held_at + i), factor), vload(weight, i)))
        for i in range(whole, size):
            out[to + i] = held[held_at + i] * scale * weight[i]


@compiled(parallel=True)
def _norm_together(
    threads: int,
    num_rows: int,
    size: int,
    x: tuple[Any, int],
    weight: Any,
    eps: float,
    residual: tuple[Any, int],
    has_residual: bool,
    out: Any,
) -> None:
    for part in prange(threads):
        _norm_rows(share(part, threads, num_rows), size, x, weight, eps, residual, has_residual, out)


@compiled()
def rms_norm_kernel(
    num_rows: int,
    size: int,
    x_at: int,
    x_stride: int,
    weight_at: int,
    eps: float,
    residual_at: int,
    residual_stride: int,
    out_at: int,
    threads: int,
) -> None:
    """out [num_rows, size] = the norm of x's rows; residual_at 0: none, else it is added to first, in place."""
    reach = max(0, num_rows - 1)
    x = (float32_at(x_at, reach * x_stride + size), x_stride)
    residual = (float32_at(residual_at, reach * residual_stride + size), residual_stride)
    weight, out = float32_at(weight_at, size), float32_at(out_at, num_rows * size)
    has_residual = residual_at != 0
    if threads == 1 or num_rows * size <= ALONE_ELEMENTS:
        _norm_rows((0, num_rows), size, x, weight, eps, residual, has_residual, out)
    else:
        _norm_together(threads, num_rows, size, x, weight, eps, residual, has_residual, out)


@compiled()
def vsilu(x: Any) -> Any:
    """x / (1 + exp(-x)), eight lanes; NaN stays NaN."""
    # exp(-x) as a power of two below 2**128, where vexp2 is valid.
    power = vexp2(vsub(vsplat(0.0), vmax(vsplat(-127.0), vmul(x, vsplat(LOG2_E)))))
    return vdiv(x, vadd(vsplat(1.0), power))


@compiled()
def _silu_rows(rows: tuple[int, int], size: int, gate_up: tuple[Any, int], out: Any) -> None:
    source, stride = gate_up
    whole = size // LANES * LANES
    for row in range(rows[0], rows[1]):
        at, to = row * stride, row * size
        for i in range(0, whole, LANES):
            gate = vload(source, at + i)
            vstore(out, to + i, vmul(vsilu(gate), vload(source, at + size + i)))
        for i in range(whole, size):
            gate_value = source[at + i]
            out[to + i] = gate_value / (np.float32(1.0) + np.exp(-gate_value)) * source[at + size + i]


@compiled(parallel=True)
def _silu_together(threads: int, num_rows: int, size: int, gate_up: tuple[Any, int], out: Any) -> None:
    for part in prange(threads):
        _silu_rows(share(part, threads, num_rows), size, gate_up, out)


@compiled()
def silu_mul_kernel(
    num_rows: int, size: int, gate_up_at: int, gate_up_stride: int, out_at: int, threads: int
) -> None:
    """out [num_rows, size] = silu(gate) * up; gate_up's rows hold `size` gates, then `size` ups."""
    gate_up = (
        float32_at(gate_up_at, max(0, num_rows - 1) * gate_up_stride + 2 * size),
        gate_up_stride,
    )
    out = float32_at(out_at, num_rows * size)
    if threads == 1 or num_rows * size <= ALONE_ELEMENTS:
        _silu_rows((0, num_rows), size, gate_up, out)
    else:
        _silu_together(threads, num_rows, size, gate_up, out)


@compiled()
def _normalize(rows: tuple[int, int], size: int, x: Any, out: Any, peaks: Any) -> None:
    whole = size // LANES * LANES
    zero = vsplat(0.0)
    for row in range(rows[0], rows[1]):
        at = row * size
        highest = zero
        for i in range(0, whole, LANES):
            value = vload(x, at + i)
            highest = vmax(highest, vmax(value, vsub(zero, value)))
        peak = vmax_lanes(highest)
        for i in range(whole, size):
            peak = max(peak, abs(x[at + i]))
        peaks[row] = peak
        factor = np.float32(1.0) / peak if peak > 0.0 else np.float32(0.0)
        multiplier = vsplat(factor)
        for i in range(0, whole, LANES):
            vstore(out, at + i, vmul(vload(x, at + i), multiplier))
        for i in range(whole, size):
            out[at + i] = x[at + i] * factor


@compiled(parallel=True)
def _normalize_together(threads: int, num_rows: int, size: int, x: Any, out: Any, peaks: Any) -> None:
    for part in prange(threads):
        _normalize(share(part, threads, num_rows), size, x, out, peaks)


@compiled()
def normalize_rows_kernel(
    num_rows: int, size: int, x_at: int, out_at: int, peaks_at: int, threads: int
) -> None:
    """out [num_rows + 1, size] = x's rows over their largest magnitudes, peaks [num_rows]; then 1, -1, 0, 0, ...

    The last row makes the range of the whole exactly -1 to 1, whatever the others hold. A row of zeros stays so.
    """
    x, out = float32_at(x_at, num_rows * size), float32_at(out_at, (num_rows + 1) * size)
    peaks = float32_at(peaks_at, num_rows)
    if threads == 1 or num_rows * size <= ALONE_ELEMENTS:
        _normalize((0, num_rows), size, x, out, peaks)
    else:
        _normalize_together(threads, num_rows, size, x, out, peaks)
    last = num_rows * size
    out[last : last + size] = np.float32(0.0)
    out[last] = np.float32(1.0)
    out[last + 1] = np.float32(-1.0)


@compiled()
def _scale(rows: tuple[int, int], size: int, x: Any, peaks: Any, bias: Any) -> None:
    whole = size // LANES * LANES
    for row in range(rows[0], rows[1]):
        at = row * size
        multiplier = vsplat(peaks[row])
        if bias.size > 0:
            for i in range(0, whole, LANES):
                vstore(x, at + i, vfma(vload(x, at + i), multiplier, vload(bias, i)))
            for i in range(whole, size):
                x[at + i] = x[at + i] * peaks[row] + bias[i]
        else:
            for i in range(0, whole, LANES):
                vstore(x, at + i, vmul(vload(x, at + i), multiplier))
            for i in range(whole, size):
                x[at + i] *= peaks[row]


@compiled(parallel=True)
def _scale_together(threads: int, num_rows: int, size: int, x: Any, peaks: Any, bias: Any) -> None:
    for part in prange(threads):
        _scale(share(part, threads, num_rows), size, x, peaks, bias)


@compiled()
def scale_rows_kernel(num_rows: int, size: int, x_at: int, peaks_at: int, bias_at: int, threads: int) -> None:
    """x [num_rows, size] times peaks [num_rows], row by row, plus bias [size] unless bias_at is 0; in place."""
    x, peaks = float32_at(x_at, num_rows * size), float32_at(peaks_at, num_rows)
    bias = float32_at(bias_at, size if bias_at != 0 else 0)
    if threads == 1 or num_rows * size <= ALONE_ELEMENTS:
        _scale((0, num_rows), size, x, peaks, bias)
    else:
        _scale_together(threads, num_rows, size, x, peaks, bias)
