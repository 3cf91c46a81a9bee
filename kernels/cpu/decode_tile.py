"""The products inside attention for the few rows that a sequence has at a decode.

Each key and value is used by these rows alone, so memory decides. A block is therefore read in the order in which it
lies, a whole vector of each line at a time, and for each vector a part of the block that is wanted next is asked for:
blocks lie anywhere, which no prefetcher of the CPU foresees. Reading four keys side by side, with the same hints, took
a third longer.

Written as LLVM instructions, as in `tile`. Every element is summed up in the same order, whatever the number of rows.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types

from octavo.kernels.cpu.emit import BYTE, FLOAT, INT, WORD, Loop, floats_at, load, prefetch, store
from octavo.kernels.cpu.runtime import compiled
from octavo.kernels.cpu.simd import HAS_AVX512, WIDTH, floats, intrinsic, multiply_add, splat

_KEYS = 4
"""Whose scores are summed up lane by lane together: four of float32 are what is stored at once."""
_STRIP = 4
STRIP = _STRIP * WIDTH
"""Elements of a value whose sums stay in registers."""
ROWS = 4 if HAS_AVX512 else 3
"""That stay in registers: 16 of 32 hold sums, or 12 of 16."""


def _shuffle(builder: Any, a: Any, b: Any, lanes: list[int]) -> Any:
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(WORD, len(lanes)), lanes))


def _sum_each(builder: Any, vectors: list[Any]) -> Any:
    """[sum of the lanes of each of four vectors]."""
    low = [lane + lane % 2 * (WIDTH - 1) for lane in range(WIDTH)]
    a, b = (
        builder.fadd(_shuffle(builder, x, y, low), _shuffle(builder, x, y, [lane + 1 for lane in low]))
        for x, y in (vectors[:2], vectors[2:])
    )
    low = [lane if lane % 4 < 2 else lane - 2 + WIDTH for lane in range(WIDTH)]
    total = builder.fadd(_shuffle(builder, a, b, low), _shuffle(builder, a, b, [lane + 2 for lane in low]))
    lanes = WIDTH
    while lanes > _KEYS:
        lanes //= 2
        halves = (list(range(lanes)), list(range(lanes, 2 * lanes)))
        low_half, high_half = (_shuffle(builder, total, total, half) for half in halves)
        total = builder.fadd(low_half, high_half)
    return total


def _make_dot(rows: int) -> Any:
    """scores[rows, keys] = queries[rows, depth] @ block[keys, depth].T; see `dot_few` for the arguments."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        queries_at, queries_stride, block_at, block_stride, scores_at, scores_stride, *rest = args
        keys, depth, ahead_at, ahead_step = rest
        queries, block, scores = (
            builder.inttoptr(at, FLOAT.as_pointer()) for at in (queries_at, block_at, scores_at)
        )
        query_rows = [builder.gep(queries, [builder.mul(queries_stride, INT(row))]) for row in range(rows)]
        score_rows = [builder.gep(scores, [builder.mul(scores_stride, INT(row))]) for row in range(rows)]
        four = Loop(builder, keys, _KEYS, [builder.inttoptr(ahead_at, BYTE.as_pointer())])
        (ahead,) = four.values
        sums = []
        for key in range(_KEYS):
            key_at = builder.gep(block, [builder.mul(builder.add(four.index, INT(key)), block_stride)])
            one = Loop(builder, depth, WIDTH, [ahead] + [floats(0.0, WIDTH)] * rows)
            loaded = load(builder, floats_at(builder, key_at, one.index))
            prefetch(builder, one.values[0])
            totals = [
                multiply_add(builder, load(builder, floats_at(builder, row, one.index)), loaded, total)
                for row, total in zip(query_rows, one.values[1:], strict=True)
            ]
            ahead = builder.gep(one.values[0], [ahead_step])
            one.close([ahead, *totals])
            sums.append(totals)
        for row, score_row in enumerate(score_rows):
            total = _sum_each(builder, [totals[row] for totals in sums])
            place = builder.bitcast(builder.gep(score_row, [four.index]), total.type.as_pointer())
            store(builder, total, place)
        four.close([ahead])
        return context.get_dummy_value()

    def typed(
        typing_context: Any, queries_at: Any, queries_stride: Any, block_at: Any, block_stride: Any,
        scores_at: Any, scores_stride: Any, keys: Any, depth: Any, ahead_at: Any, ahead_step: Any,
    ) -> Any:  # fmt: skip
        return types.none(*[types.intp] * 10), generate

    return intrinsic(typed)


def _make_weigh(rows: int) -> Any:
    """output[rows, STRIP] += weights[rows, keys] @ block[keys, STRIP]; see `weigh_few` for the arguments."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        weights_at, weights_stride, block_at, block_stride, output_at, output_stride, *rest = args
        keys, ahead_at, ahead_step = rest
        weights, block, output = (
            builder.inttoptr(at, FLOAT.as_pointer()) for at in (weights_at, block_at, output_at)
        )
        weight_rows = [builder.gep(weights, [builder.mul(weights_stride, INT(row))]) for row in range(rows)]
        places = [
            floats_at(builder, output, builder.add(builder.mul(output_stride, INT(row)), INT(v * WIDTH)))
            for row in range(rows)
            for v in range(_STRIP)
        ]
        earlier = [load(builder, place) for place in places]
        loop = Loop(builder, keys, 1, [builder.inttoptr(ahead_at, BYTE.as_pointer()), *earlier])
        ahead, *sums = loop.values
        value_at = builder.gep(block, [builder.mul(loop.index, block_stride)])
        values = []
        for v in range(_STRIP):
            values.append(load(builder, floats_at(builder, value_at, INT(v * WIDTH))))
            prefetch(builder, ahead)
            ahead = builder.gep(ahead, [ahead_step])
        totals = []
        for row, weight_row in enumerate(weight_rows):
            weight = splat(builder, builder.load(builder.gep(weight_row, [loop.index])), WIDTH)
            for v, value in enumerate(values):
                totals.append(multiply_add(builder, weight, value, sums[row * _STRIP + v]))
        loop.close([ahead, *totals])
        for place, total in zip(places, totals, strict=True):
            store(builder, total, place)
        return context.get_dummy_value()

    def typed(
        typing_context: Any, weights_at: Any, weights_stride: Any, block_at: Any, block_stride: Any,
        output_at: Any, output_stride: Any, keys: Any, ahead_at: Any, ahead_step: Any,
    ) -> Any:  # fmt: skip
        return types.none(*[types.intp] * 9), generate

    return intrinsic(typed)


_dot_1, _dot_2, _dot_3, _dot_4 = (_make_dot(rows) for rows in range(1, 5))
_weigh_1, _weigh_2, _weigh_3, _weigh_4 = (_make_weigh(rows) for rows in range(1, 5))

At = tuple[int, int]
"""(address, row stride in elements)"""


@compiled()
def dot_few(
    rows: int, queries: At, block: At, scores: At, keys: int, depth: int, ahead: tuple[int, int]
) -> None:
    """scores[rows, keys] = queries[rows, depth] @ block[keys, depth].T; rows <= `ROWS`.

    keys   a multiple of 4; depth one of `WIDTH`
    ahead  (address, bytes): asks for a line there, and so many bytes further at each vector of `block`
    """
    q, q_step = queries
    b, b_step = block
    s, s_step = scores
    if rows == 1:
        _dot_1(q, q_step, b, b_step, s, s_step, keys, depth, ahead[0], ahead[1])
    elif rows == 2:
        _dot_2(q, q_step, b, b_step, s, s_step, keys, depth, ahead[0], ahead[1])
    elif rows == 3:
        _dot_3(q, q_step, b, b_step, s, s_step, keys, depth, ahead[0], ahead[1])
    else:
        _dot_4(q, q_step, b, b_step, s, s_step, keys, depth, ahead[0], ahead[1])


@compiled()
def weigh_few(rows: int, weights: At, block: At, output: At, keys: int, ahead: tuple[int, int]) -> None:
    """output[rows, STRIP] += weights[rows, keys] @ block[keys, STRIP]; rows <= `ROWS`, `ahead` as in `dot_few`."""
    w, w_step = weights
    b, b_step = block
    o, o_step = output
    if rows == 1:
        _weigh_1(w, w_step, b, b_step, o, o_step, keys, ahead[0], ahead[1])
    elif rows == 2:
        _weigh_2(w, w_step, b, b_step, o, o_step, keys, ahead[0], ahead[1])
    elif rows == 3:
        _weigh_3(w, w_step, b, b_step, o, o_step, keys, ahead[0], ahead[1])
    else:
        _weigh_4(w, w_step, b, b_step, o, o_step, keys, ahead[0], ahead[1])
