"""The innermost product of `gemm`: a few rows by one panel of a weight, its sums in registers.

Written as LLVM instructions, not as a loop that LLVM is to find the vectors in: which sums stay in registers is what
decides its speed.

There are two forms. In both a row and a panel are made of words of 32 bits, and a step takes one word of each row by
`PANEL` words of the panel: a float32 by as many, or four bytes by as many times four (VNNI).
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types

from octavo.kernels.cpu.emit import (
    BYTE,
    FLOAT,
    FLOATS,
    INT,
    WORD,
    WORDS,
    Loop,
    load,
    prefetch,
    store,
)
from octavo.kernels.cpu.runtime import compiled
from octavo.kernels.cpu.simd import HAS_AVX512, WIDTH, cgutils, floats, intrinsic, multiply_add, splat

_VECTORS = 4 if HAS_AVX512 else 2
PANEL = WIDTH * _VECTORS
"""Outputs of a panel, a multiple of 8. With `TILE_ROWS` rows 24 of 32 registers hold sums, or 12 of 16."""
TILE_ROWS = 6

LINE = 64
"""Bytes of a cache line."""
LINES_OF_OUTPUTS = PANEL * 4 // LINE
"""Cache lines that hold a panel's words of one step."""


def _vectors_at(builder: Any, address: Any, vector: Any) -> list[Any]:
    """Pointers to a panel's vectors from `address` on."""
    first = builder.inttoptr(address, vector.as_pointer())
    return [builder.gep(first, [INT(v)]) for v in range(_VECTORS)]


class _Float32:
    """x float32, panel float32 [depth, PANEL]: sums of products."""

    lane, vector = FLOAT, FLOATS

    @staticmethod
    def initial(builder: Any, int8: tuple[Any, ...]) -> list[Any]:
        return [floats(0.0, WIDTH)] * _VECTORS

    multiply = staticmethod(multiply_add)

    @staticmethod
    def finish(
        builder: Any, row: int, totals: list[Any], earlier: list[Any], int8: tuple[Any, ...]
    ) -> list[Any]:
        return [builder.fadd(sums, total) for sums, total in zip(earlier, totals, strict=True)]


class _Int8:
    """x uint8, 128 more than what is meant, and panel int8 [depth, PANEL, 4]; sums are scaled to float32 row by row.

    `int8` is (address of int32 [PANEL]: where the sums begin, address of the first row's scale, bytes to the next).
    """

    lane, vector = WORD, WORDS

    @staticmethod
    def initial(builder: Any, int8: tuple[Any, ...]) -> list[Any]:
        return [load(builder, place) for place in _vectors_at(builder, int8[0], WORDS)]

    @staticmethod
    def multiply(builder: Any, factor: Any, weight: Any, total: Any) -> Any:
        # Since LLVM 22 the factors are vectors of bytes; it takes older code, which every version reads.
        function = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(WORDS, [WORDS] * 3), "llvm.x86.avx512.vpdpbusd.512"
        )
        return builder.call(function, [total, factor, weight])

    @staticmethod
    def finish(
        builder: Any, row: int, totals: list[Any], earlier: list[Any], int8: tuple[Any, ...]
    ) -> list[Any]:
        place = builder.add(int8[1], builder.mul(int8[2], INT(row)))
        scale = splat(builder, builder.load(builder.inttoptr(place, FLOAT.as_pointer())), WIDTH)
        return [
            multiply_add(builder, builder.sitofp(total, FLOATS), scale, sums)
            for sums, total in zip(earlier, totals, strict=True)
        ]


def _generate_tile(builder: Any, form: Any, rows: int, numbers: list[Any]) -> None:
    """A tile of `rows` rows; see `multiply_tile` for the numbers, one by one. Leaves the builder where it ends."""
    (
        x_at,
        x_stride,
        panel_at,
        panel_stride,
        sums_at,
        sums_stride,
        ahead_at,
        ahead_step,
        depth,
        resume,
        *int8,
    ) = numbers
    x, panel = (builder.inttoptr(at, form.lane.as_pointer()) for at in (x_at, panel_at))
    x_rows = [builder.gep(x, [builder.mul(x_stride, INT(row))]) for row in range(rows)]
    initial = form.initial(builder, int8)
    loop = Loop(builder, depth, 1, [builder.inttoptr(ahead_at, BYTE.as_pointer()), *initial * rows])
    ahead, *totals = loop.values
    panel_k = builder.ptrtoint(builder.gep(panel, [builder.mul(loop.index, panel_stride)]), INT)
    weights = [load(builder, place) for place in _vectors_at(builder, panel_k, form.vector)]
    for part in range(LINES_OF_OUTPUTS):
        prefetch(builder, builder.gep(ahead, [builder.mul(ahead_step, INT(part))]))
    following = []
    for row, x_row in enumerate(x_rows):
        factor = splat(builder, load(builder, builder.gep(x_row, [loop.index])), WIDTH)
        own = totals[row * _VECTORS : (row + 1) * _VECTORS]
        following += [
            form.multiply(builder, factor, weight, total) for weight, total in zip(weights, own, strict=True)
        ]
    loop.close([builder.gep(ahead, [builder.mul(ahead_step, INT(LINES_OF_OUTPUTS))]), *following])

    resumes = builder.trunc(resume, ir.IntType(1))
    for row in range(rows):
        row_at = builder.add(sums_at, builder.mul(sums_stride, INT(4 * row)))
        places = _vectors_at(builder, row_at, FLOATS)
        earlier = [builder.select(resumes, load(builder, place), floats(0.0, WIDTH)) for place in places]
        own = following[row * _VECTORS : (row + 1) * _VECTORS]
        for place, value in zip(places, form.finish(builder, row, own, earlier, int8), strict=True):
            store(builder, value, place)


@intrinsic
def _tiles(
    typing_context: Any,
    rows: Any,
    x: Any,
    panel: Any,
    sums: Any,
    depth: Any,
    resume: Any,
    ahead: Any,
    int8: Any,
) -> Any:
    """The tiles of 1 to `TILE_ROWS` rows; see `multiply_tile`."""
    form = _Float32 if isinstance(int8, types.NoneType) else _Int8

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        tuples = [cgutils.unpack_tuple(builder, args[place]) for place in (1, 2, 3, 6)]
        numbers = [number for each in tuples for number in each] + [args[4], args[5]]
        if form is _Int8:
            numbers += cgutils.unpack_tuple(builder, args[7])
        done = builder.append_basic_block("done")
        blocks = [builder.append_basic_block(f"rows.{count}") for count in range(1, TILE_ROWS + 1)]
        choice = builder.switch(args[0], blocks[0])
        for count, block in enumerate(blocks, start=1):
            choice.add_case(INT(count), block)
            builder.position_at_end(block)
            _generate_tile(builder, form, count, numbers)
            builder.branch(done)
        builder.position_at_end(done)
        return context.get_dummy_value()

    pair = types.UniTuple(types.intp, 2)
    int8_type = int8 if form is _Float32 else types.UniTuple(types.intp, 3)
    intp = types.intp
    return types.none(intp, pair, pair, pair, intp, intp, pair, int8_type), generate


@compiled()
def multiply_tile(
    rows: int,
    x: tuple[int, int],
    panel: tuple[int, int],
    sums: tuple[int, int],
    depth: int,
    resume: int,
    ahead: tuple[int, int],
    int8: tuple[int, int, int] | None,
) -> None:
    """sums[rows, PANEL] = x[rows, depth] @ panel[depth, PANEL], added to what is there if `resume` is 1; rows <= 6.

    x, panel, sums  (address, row stride in words)
    ahead           (address, bytes): asks for one line after the other from there on, so many bytes further at each
    int8            None: float32; else as in `_Int8`. Chosen when the caller is compiled
    """
    _tiles(rows, x, panel, sums, depth, resume, ahead, int8)
