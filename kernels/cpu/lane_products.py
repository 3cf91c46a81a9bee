"""The two matrix products of attention for many rows of queries, each in a lane of its own.

Scores stand as [keys, rows]: keys and values are read as they lie, each number for all rows at once, and the softmax
of a row stays in its lane. Rows stand in panels, [panels, depth, PANEL], of which a product takes as many vectors as it
has rows: all at once, or one after the other, which is as fast with 16 lanes.

Written as LLVM instructions, like `tile`, and for the same reason.
"""

from __future__ import annotations

from typing import Any

from numba import types

from octavo.kernels.cpu.emit import FLOAT, INT, Loop, floats_at, load, store
from octavo.kernels.cpu.runtime import compiled
from octavo.kernels.cpu.simd import HAS_AVX512, WIDTH, floats, intrinsic, multiply_add, splat

VECTORS = 4 if HAS_AVX512 else 3
"""Vectors of a panel, at most. With `TOGETHER` 16 of 32 registers hold sums, or 12 of 16."""
PANEL = VECTORS * WIDTH
"""Rows of queries of a panel."""
TOGETHER = 4
"""Keys of a score product, or numbers of each value, that are multiplied at once; lengths are multiples of it."""


def _make_product(vectors: int, by_column: bool) -> Any:
    """sums[4, lanes] = x[4, depth] @ panel[depth, lanes], of arguments (x, stride of x, panel, sums, depth, shrink).

    All but the stride and depth are addresses; panel and sums have rows of `PANEL`. by_column: x[i, k] lies at
    k * stride + i, instead of at i * stride + k, and sums begin as shrink[lanes] times what is there.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x_at, stride, panel_at, sums_at, depth, shrink_at = args
        x, panel, sums, shrink = (
            builder.inttoptr(at, FLOAT.as_pointer()) for at in (x_at, panel_at, sums_at, shrink_at)
        )

        def vector_at(base: Any, offset: int) -> Any:
            return floats_at(builder, base, INT(offset))

        row_step, step = (INT(1), stride) if by_column else (stride, INT(1))
        zeros = [floats(0.0, WIDTH)] * (TOGETHER * vectors)
        loop = Loop(builder, depth, 1, [x, panel, *zeros])
        x_k, panel_k, *totals = loop.values
        lanes = [load(builder, vector_at(panel_k, v * WIDTH)) for v in range(vectors)]
        following = []
        for i in range(TOGETHER):
            number = builder.load(builder.gep(x_k, [builder.mul(row_step, INT(i))]))
            factor = splat(builder, number, WIDTH)
            own = totals[i * vectors : (i + 1) * vectors]
            following += [
                multiply_add(builder, factor, lane, total) for lane, total in zip(lanes, own, strict=True)
            ]
        loop.close([builder.gep(x_k, [step]), builder.gep(panel_k, [INT(PANEL)]), *following])

        kept = [load(builder, vector_at(shrink, v * WIDTH)) for v in range(vectors)] if by_column else []
        for number, value in enumerate(following):
            i, v = divmod(number, vectors)
            place = vector_at(sums, i * PANEL + v * WIDTH)
            if by_column:
                value = multiply_add(builder, load(builder, place), kept[v], value)
            store(builder, value, place)
        return context.get_dummy_value()

    def typed(
        typing_context: Any, x_at: Any, stride: Any, panel_at: Any, sums_at: Any, depth: Any, shrink_at: Any
    ) -> Any:
        return types.none(*[types.intp] * 6), generate

    return intrinsic(typed)


_score_panel, _score_vector = _make_product(VECTORS, False), _make_product(1, False)
_add_panel, _add_vector = _make_product(VECTORS, True), _make_product(1, True)


@compiled()
def score_keys(
    vectors: int, keys: tuple[int, int], queries_at: int, scores_at: int, num_keys: int, depth: int
) -> None:
    """scores[num_keys, lanes] = keys[num_keys, depth] @ queries[depth, lanes], of `vectors` of a panel.

    keys = (address, stride in numbers); queries and scores are addresses of rows of `PANEL`.
    """
    keys_at, stride = keys
    for _ in range(0, num_keys, TOGETHER):
        if vectors == VECTORS:
            _score_panel(keys_at, stride, queries_at, scores_at, depth, 0)
        else:
            for lanes in range(0, vectors * WIDTH * 4, WIDTH * 4):
                _score_vector(keys_at, stride, queries_at + lanes, scores_at + lanes, depth, 0)
        keys_at += TOGETHER * stride * 4
        scores_at += TOGETHER * PANEL * 4


@compiled()
def add_values(
    vectors: int,
    values: tuple[int, int],
    weights_at: int,
    output_at: int,
    shrink_at: int,
    num_keys: int,
    depth: int,
) -> None:
    """output[depth, lanes] = shrink[lanes] * output + values[num_keys, depth].T @ weights[num_keys, lanes].

    Of `vectors` of a panel, like `score_keys`.
    """
    values_at, stride = values
    for _ in range(0, depth, TOGETHER):
        if vectors == VECTORS:
            _add_panel(values_at, stride, weights_at, output_at, num_keys, shrink_at)
        else:
            for lanes in range(0, vectors * WIDTH * 4, WIDTH * 4):
                weights, output, shrink = weights_at + lanes, output_at + lanes, shrink_at + lanes
                _add_vector(values_at, stride, weights, output, num_keys, shrink)
        values_at += TOGETHER * 4
        output_at += TOGETHER * PANEL * 4
