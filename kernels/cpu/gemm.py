"""Products of some rows with fixed weights on the CPU, in float32 or int8 (`int8`), and what follows each of them.

A weight [N, K] is kept in panels of `PANEL` outputs, [ceil(N / PANEL), K, PANEL], so that it is read in order; of int8
weights four inputs are one word of 32 bits, and K is counted in words. A tile of up to `TILE_ROWS` rows by one panel
stays in registers while K goes by (`tile`): each weight is loaded once for its rows, from memory for the first
tile and from the second-level cache for the others. Each tile asks for a part of the panel that comes next, which keeps
memory busy while the CPU multiplies.

Every output is summed up in the same order, whatever stands beside its row: a row's result does not depend on the
batch by one bit.

The blocking is that of Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication" (2008), section 4,
with the weights in the place of their packed matrix; the rows are few and stay as they are.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import prange

from octavo.kernels.cpu.elementwise import vsilu
from octavo.kernels.cpu.memory import float32_at
from octavo.kernels.cpu.runtime import compiled
from octavo.kernels.cpu.simd import LANES, fetch_add, vload, vmul, vstore
from octavo.kernels.cpu.tile import LINE, LINES_OF_OUTPUTS, PANEL, TILE_ROWS, multiply_tile

DEPTH_MAX = 512
"""Of K at a time, so that a panel's part and the next one (128 KiB each) lie in the second-level cache. The sums of the
parts are added up: long sums of float32 lose digits."""
GROUP_MAX = 16
"""As `DEPTH_MAX`, of int8: words (four inputs each) of a row that have one scale."""
ROWS_MAX = 96
"""Of one item of work, so that its inputs lie there too."""
ITEMS_MIN = 8
"""A thread, where there are rows enough: threads that end apart wait for each other."""
ALONE_PRODUCTS = 1 << 16
"""Multiplications that take less time than waking other threads."""


@compiled()
def outputs_per_panel(silu: bool) -> int:
    """Numbers that come out of a panel."""
    return PANEL // 2 if silu else PANEL


@compiled()
def count_panels(num_outputs: int, silu: bool) -> int:
    """Panels of a weight, the last one's padding included."""
    per_panel = outputs_per_panel(silu)
    return (num_outputs + per_panel - 1) // per_panel


@compiled()
def count_parts(depth: int, most: int) -> int:
    """Parts of at most `most` words into which K is cut."""
    return (depth + most - 1) // most


@compiled()
def part_begin(part: int, parts: int, depth: int) -> int:
    """The first word of a part, and the end of the one before."""
    return part * depth // parts


@compiled()
def _finish(
    sums: Any,
    rows: int,
    out: tuple[Any, int, int],
    columns: int,
    bias: Any,
    int8: Any,
    first_output: int,
    silu: bool,
) -> None:
    """Write the `columns` outputs of a panel for `rows` rows of sums [rows, PANEL].

    out           (array, offset of the first, row stride)
    bias          float32 [panels * PANEL], from `first_output` on; an empty array for none
    int8          as in `multiply_kernel`: sums are multiplied by the outputs' scales first
    silu          the outputs are SiLU of the first half of each row times its second half
    """
    array, at, stride = out
    for row in range(rows):
        first = row * PANEL
        if int8 is not None:
            scales = float32_at(int8[2] + first_output * 4, PANEL)
            for column in range(0, PANEL, LANES):
                vstore(sums, first + column, vmul(vload(sums, first + column), vload(scales, column)))
        if bias.size > 0:
            for column in range(PANEL):
                sums[first + column] += bias[first_output + column]
        if silu:
            for column in range(0, PANEL // 2, LANES):
                gate, up = vload(sums, first + column), vload(sums, first + PANEL // 2 + column)
                vstore(sums, first + column, vmul(vsilu(gate), up))
        place = at + row * stride
        whole = columns // LANES * LANES
        for column in range(0, whole, LANES):
            vstore(array, place + column, vload(sums, first + column))
        for column in range(whole, columns):
            array[place + column] = sums[first + column]


@compiled()
def _tile_scales(int8: Any, panel: int, row: int, part: int, num_parts: int) -> Any:
    """What `multiply_tile` wants of `int8` (as in `multiply_kernel`) for a tile that begins at `row`."""
    if int8 is None:
        return None
    x_scales_at, begins_at, _ = int8
    begin_at = begins_at + (panel * num_parts + part) * PANEL * 4
    return begin_at, x_scales_at + (row * num_parts + part) * 4, num_parts * 4


@compiled()
def _multiply_item(
    rows: tuple[int, int],
    panel: int,
    next_panel: int,
    x: tuple[int, int],
    weight: tuple[int, int, int],
    out: tuple[Any, int],
    bias: Any,
    silu: bool,
    int8: Any,
    sums: Any,
) -> None:
    """Rows (begin, end) by one panel; see `multiply_kernel` for the rest. sums float32 [rows * PANEL] is scratch."""
    begin, end = rows
    weight_at, depth, num_outputs = weight
    array, out_stride = out
    per_panel = outputs_per_panel(silu)
    columns = min(per_panel, num_outputs - panel * per_panel)
    direct = int8 is None and columns == PANEL and bias.size == 0
    num_tiles = (end - begin + TILE_ROWS - 1) // TILE_ROWS
    step = (LINE + num_tiles - 1) // num_tiles
    num_parts = count_parts(depth, DEPTH_MAX if int8 is None else GROUP_MAX)
    for part in range(num_parts):
        first, last = part_begin(part, num_parts, depth), part_begin(part + 1, num_parts, depth)
        panel_at = weight_at + (panel * depth + first) * PANEL * 4
        # Of int8 parts, which are short, the next one would be asked for too late.
        if int8 is None and part + 1 < num_parts:
            ahead = panel * depth + last
        else:
            ahead = next_panel * depth + (0 if int8 is None else first)
        ahead_at = weight_at + ahead * PANEL * 4
        for tile in range(num_tiles):
            row = begin + tile * TILE_ROWS
            tile_rows = min(TILE_ROWS, end - row)
            if direct:
                to, to_stride = array.ctypes.data + (row * out_stride + panel * PANEL) * 4, out_stride
            else:
                to, to_stride = sums.ctypes.data + tile * TILE_ROWS * PANEL * 4, PANEL
            multiply_tile(
                tile_rows,
                (x[0] + (row * x[1] + first) * 4, x[1]),
                (panel_at, PANEL),
                (to, to_stride),
                last - first,
                1 if part > 0 else 0,
                (ahead_at + tile * (last - first) * LINES_OF_OUTPUTS * step, step),
                _tile_scales(int8, panel, row, part, num_parts),
            )
    if not direct:
        place = begin * out_stride + panel * per_panel
        _finish(sums, end - begin, (array, place, out_stride), columns, bias, int8, panel * PANEL, silu)


@compiled()
def _work(
    counter: Any,
    groups: tuple[int, int],
    num_rows: int,
    x: tuple[int, int],
    weight: tuple[int, int, int],
    out: tuple[Any, int],
    bias: Any,
    silu: bool,
    int8: Any,
) -> None:
    """Take items until none is left. One call a thread; `counter` [1] is shared by all."""
    num_groups, group_rows = groups
    num_items = count_panels(weight[2], silu) * num_groups
    sums = np.empty(group_rows * PANEL, np.float32)
    ticket = fetch_add(counter, 1)
    while ticket < num_items:
        # Taken early, to know which panel to ask for.
        following = fetch_add(counter, 1)
        begin = ticket % num_groups * group_rows
        if begin < num_rows:
            rows = (begin, min(begin + group_rows, num_rows))
            next_panel = min(following, num_items - 1) // num_groups
            _multiply_item(rows, ticket // num_groups, next_panel, x, weight, out, bias, silu, int8, sums)
        ticket = following


@compiled(parallel=True)
def _work_together(
    threads: int,
    counter: Any,
    groups: tuple[int, int],
    num_rows: int,
    x: tuple[int, int],
    weight: tuple[int, int, int],
    out: tuple[Any, int],
    bias: Any,
    silu: bool,
    int8: Any,
) -> None:
    for _ in prange(threads):
        _work(counter, groups, num_rows, x, weight, out, bias, silu, int8)


@compiled()
def multiply_kernel(
    num_rows: int,
    x: tuple[int, int],
    weight: tuple[int, int, int],
    out_at: int,
    bias_at: int,
    silu: bool,
    threads: int,
    int8: Any,
) -> None:
    """out [num_rows, N] = x [num_rows, K] @ weight, contiguous.

    x       (address, row stride in words)
    weight  (address of its panels, K, N), the panels on a cache line
    bias    address of float32 [panels * PANEL], 0 for none
    silu    each panel holds weights of PANEL / 2 gates, then of as many ups; out = SiLU(gate) * up
    int8    None: float32; else addresses of float32 [num_rows, groups], scales of x, of int32 [panels, groups, PANEL],
            where sums begin, and of float32 [panels * PANEL], scales of the outputs. Chosen when the caller is compiled
    """
    _, depth, num_outputs = weight
    num_panels = count_panels(num_outputs, silu)
    out = (float32_at(out_at, num_rows * num_outputs), num_outputs)
    bias = float32_at(bias_at, num_panels * PANEL if bias_at != 0 else 0)
    counter = np.zeros(1, np.int64)
    if num_rows * num_outputs * depth <= ALONE_PRODUCTS:
        threads = 1
    num_groups = max(
        (num_rows + ROWS_MAX - 1) // ROWS_MAX,
        min((threads * ITEMS_MIN + num_panels - 1) // num_panels, num_rows // (2 * TILE_ROWS)),
    )
    # Of whole tiles, the last group's rest aside.
    group_rows = ((num_rows + num_groups - 1) // num_groups + TILE_ROWS - 1) // TILE_ROWS * TILE_ROWS
    groups = (num_groups, group_rows)
    if threads == 1:
        _work(counter, groups, num_rows, x, weight, out, bias, silu, int8)
    else:
        _work_together(threads, counter, groups, num_rows, x, weight, out, bias, silu, int8)
