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

from octavo.kernels.cpu.runtime import compiled
from octavo.kernels.cpu.simd import HAS_AVX512, cgutils, intrinsic, multiply_add

_WIDTH = 16 if HAS_AVX512 else 8
_VECTORS = 4 if HAS_AVX512 else 2
PANEL = _WIDTH * _VECTORS
"""Outputs of a panel, a multiple of 8. With `TILE_ROWS` rows 24 of 32 registers hold sums, or 12 of 16."""
TILE_ROWS = 6

LINE = 64
"""Bytes of a cache line."""
LINES_OF_OUTPUTS = PANEL * 4 // LINE
"""Cache lines that hold a panel's words of one step."""

_FLOAT, _INT, _BYTE, _WORD = ir.FloatType(), ir.IntType(64), ir.IntType(8), ir.IntType(32)
_FLOATS, _WORDS = ir.VectorType(_FLOAT, _WIDTH), ir.VectorType(_WORD, _WIDTH)


def _splat(builder: Any, scalar: Any) -> Any:
    undefined = ir.Constant(ir.VectorType(scalar.type, _WIDTH), ir.Undefined)
    first = builder.insert_element(undefined, scalar, _WORD(0))
    return builder.shuffle_vector(first, undefined, ir.Constant(_WORDS, [0] * _WIDTH))


def _vectors_at(builder: Any, address: Any, vector: Any) -> list[Any]:
    """Pointers to a panel's vectors from `address` on."""
    first = builder.inttoptr(address, vector.as_pointer())
    return [builder.gep(first, [_INT(v)]) for v in range(_VECTORS)]


def _load(builder: Any, place: Any) -> Any:
    value = builder.load(place)
    value.align = 4
    return value


class _Float32:
    """x float32, panel float32 [depth, PANEL]: sums of products."""

    lane, vector = _FLOAT, _FLOATS

    @staticmethod
    def initial(builder: Any, int8: tuple[Any, ...]) -> list[Any]:
        return [ir.Constant(_FLOATS, [0.0] * _WIDTH)] * _VECTORS

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

    lane, vector = _WORD, _WORDS

    @staticmethod
    def initial(builder: Any, int8: tuple[Any, ...]) -> list[Any]:
        return [_load(builder, place) for place in _vectors_at(builder, int8[0], _WORDS)]

    @staticmethod
    def multiply(builder: Any, factor: Any, weight: Any, total: Any) -> Any:
        # Since LLVM 22 the factors are vectors of bytes; it takes older code, which every version reads.
        function = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(_WORDS, [_WORDS] * 3), "llvm.x86.avx512.vpdpbusd.512"
        )
        return builder.call(function, [total, factor, weight])

    @staticmethod
    def finish(
        builder: Any, row: int, totals: list[Any], earlier: list[Any], int8: tuple[Any, ...]
    ) -> list[Any]:
        place = builder.add(int8[1], builder.mul(int8[2], _INT(row)))
        scale = _splat(builder, builder.load(builder.inttoptr(place, _FLOAT.as_pointer())))
        return [
            multiply_add(builder, builder.sitofp(total, _FLOATS), scale, sums)
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
    vector = form.vector
    x, panel = (builder.inttoptr(at, form.lane.as_pointer()) for at in (x_at, panel_at))
    ahead = builder.inttoptr(ahead_at, _BYTE.as_pointer())
    prefetch = cgutils.get_or_insert_function(
        builder.module,
        ir.FunctionType(ir.VoidType(), [ahead.type, _WORD, _WORD, _WORD]),
        "llvm.prefetch.p0",
    )
    x_rows = [builder.gep(x, [builder.mul(x_stride, _INT(row))]) for row in range(rows)]
    initial = form.initial(builder, int8)
    before = builder.block
    loop, done = builder.append_basic_block("products"), builder.append_basic_block("store")
    builder.branch(loop)

    builder.position_at_end(loop)
    k, ahead_k = builder.phi(_INT), builder.phi(ahead.type)
    totals = [[builder.phi(vector) for _ in range(_VECTORS)] for _ in range(rows)]
    k.add_incoming(_INT(0), before)
    ahead_k.add_incoming(ahead, before)
    for row in totals:
        for total, value in zip(row, initial, strict=True):
            total.add_incoming(value, before)
    panel_k = builder.ptrtoint(builder.gep(panel, [builder.mul(k, panel_stride)]), _INT)
    weights = [_load(builder, place) for place in _vectors_at(builder, panel_k, vector)]
    for part in range(LINES_OF_OUTPUTS):
        # For reading, into the second-level cache, as data.
        place = builder.gep(ahead_k, [builder.mul(ahead_step, _INT(part))])
        builder.call(prefetch, [place, _WORD(0), _WORD(2), _WORD(1)])
    following = []
    for x_row, row in zip(x_rows, totals, strict=True):
        factor = _splat(builder, _load(builder, builder.gep(x_row, [k])))
        following.append(
            [
                form.multiply(builder, factor, weight, total)
                for weight, total in zip(weights, row, strict=True)
            ]
        )
    next_k = builder.add(k, _INT(1))
    next_ahead = builder.gep(ahead_k, [builder.mul(ahead_step, _INT(LINES_OF_OUTPUTS))])
    k.add_incoming(next_k, builder.block)
    ahead_k.add_incoming(next_ahead, builder.block)
    for row, row_following in zip(totals, following, strict=True):
        for total, value in zip(row, row_following, strict=True):
            total.add_incoming(value, builder.block)
    builder.cbranch(builder.icmp_signed("<", next_k, depth), loop, done)

    builder.position_at_end(done)
    resumes = builder.trunc(resume, ir.IntType(1))
    zero = ir.Constant(_FLOATS, [0.0] * _WIDTH)
    for number, row_following in enumerate(following):
        row_at = builder.add(sums_at, builder.mul(sums_stride, _INT(4 * number)))
        places = _vectors_at(builder, row_at, _FLOATS)
        earlier = [builder.select(resumes, _load(builder, place), zero) for place in places]
        values = form.finish(builder, number, row_following, earlier, int8)
        for place, value in zip(places, values, strict=True):
            builder.store(value, place).align = 4


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
            choice.add_case(_INT(count), block)
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
