"""Products of some rows with fixed weights on the CPU, in float32, and what follows each of them.

A weight [N, K] is kept in panels of `PANEL` outputs, [ceil(N / PANEL), K, PANEL], so that it is read in order. A tile
of up to `TILE_ROWS` rows by one panel stays in registers while K goes by (`tile`): each weight is loaded once for all
rows of a tile, from memory for the first tile and from the second-level cache for the others. Each tile asks for a
part of the panel that comes next, which keeps memory busy while the CPU multiplies.

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
def _finish(
    sums: Any, rows: int, out: tuple[Any, int, int], columns: int, bias: tuple[Any, int], silu: bool
) -> None:
    """Write the `columns` outputs of a panel for `rows` rows of sums [rows, PANEL].

    out   (array, offset of the first, row stride)
    bias  (array, offset of the first), an empty array for none
    silu  the outputs are SiLU of the first half of each row times its second half
    """
    array, at, stride = out
    for row in range(rows):
        first = row * PANEL
        if bias[0].size > 0:
            for column in range(PANEL):
                sums[first + column] += bias[0][bias[1] + column]
        if silu:
            for column in range(0, PANEL // 2, LANES):
                gate, up = vload(sums, first + column), vload(sums, first + PANEL // 2 + column)
                vstore(sums, first + column, vmul(vsilu(gate), up))
        place = at + row * stride
        for column in range(columns):
            array[place + column] = sums[first + column]


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
    sums: Any,
) -> None:
    """Rows (begin, end) by one panel; see `multiply_kernel` for the rest. sums float32 [rows * PANEL] is scratch."""
    begin, end = rows
    weight_at, depth, num_outputs = weight
    array, out_stride = out
    per_panel = outputs_per_panel(silu)
    columns = min(per_panel, num_outputs - panel * per_panel)
    direct = columns == PANEL and bias.size == 0
    num_tiles = (end - begin + TILE_ROWS - 1) // TILE_ROWS
    step = (LINE + num_tiles - 1) // num_tiles
    num_depths = (depth + DEPTH_MAX - 1) // DEPTH_MAX
    for part in range(num_depths):
        first, last = part * depth // num_depths, (part + 1) * depth // num_depths
        panel_at = weight_at + (panel * depth + first) * PANEL * 4
        ahead_at = (
            weight_at + (panel * depth + last if part + 1 < num_depths else next_panel * depth) * PANEL * 4
        )
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
            )
    if not direct:
        place = begin * out_stride + panel * per_panel
        _finish(sums, end - begin, (array, place, out_stride), columns, (bias, panel * PANEL), silu)


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
            _multiply_item(rows, ticket // num_groups, next_panel, x, weight, out, bias, silu, sums)
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
) -> None:
    for _ in prange(threads):
        _work(counter, groups, num_rows, x, weight, out, bias, silu)


@compiled()
def multiply_kernel(
    num_rows: int,
    x: tuple[int, int],
    weight: tuple[int, int, int],
    out_at: int,
    bias_at: int,
    silu: bool,
    threads: int,
) -> None:
    """out [num_rows, N] = x [num_rows, K] @ weight, contiguous.

    x       (address, row stride in elements)
    weight  (address of its panels, K, N), the panels on a cache line
    bias    address of float32 [panels * PANEL], 0 for none
    silu    each panel holds weights of PANEL / 2 gates, then of as many ups; out = SiLU(gate) * up
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
    if threads == 1:
        _work(counter, (num_groups, group_rows), num_rows, x, weight, out, bias, silu)
    else:
        _work_together(threads, counter, (num_groups, group_rows), num_rows, x, weight, out, bias, silu)
