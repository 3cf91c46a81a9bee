"""LLVM instructions that the innermost products emit alike: vectors of the CPU's width, hints to the caches, and loops.

For `tile`, `decode_tile` and `lane_products`, whose sums have to stay in registers. Knows nothing of their arithmetic.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from octavo.kernels.cpu.simd import WIDTH, cgutils

FLOAT, INT, BYTE, WORD = ir.FloatType(), ir.IntType(64), ir.IntType(8), ir.IntType(32)
FLOATS, WORDS = ir.VectorType(FLOAT, WIDTH), ir.VectorType(WORD, WIDTH)


def load(builder: Any, place: Any) -> Any:
    """What stands at a pointer, of numbers of 32 bits."""
    value = builder.load(place)
    value.align = 4
    return value


def store(builder: Any, value: Any, place: Any) -> None:
    """The way back of `load`."""
    builder.store(value, place).align = 4


def floats_at(builder: Any, base: Any, offset: Any) -> Any:
    """A pointer to the vector `offset` numbers behind `base`, a pointer to float32."""
    return builder.bitcast(builder.gep(base, [offset]), FLOATS.as_pointer())


def prefetch(builder: Any, place: Any, *, write: bool = False) -> None:
    """Ask for a line, as data: into the second-level cache to read, into the first to write."""
    function = cgutils.get_or_insert_function(
        builder.module,
        ir.FunctionType(ir.VoidType(), [place.type, WORD, WORD, WORD]),
        "llvm.prefetch.p0",
    )
    builder.call(function, [place, WORD(int(write)), WORD(3 if write else 2), WORD(1)])


class Loop:
    """for index in range(0, end, step), with more values that change at each turn; `end` is at least 1.

    Made, it stands at the body's begin: emit that by `index` and `values`, then `close` it with the next values.
    """

    def __init__(self, builder: Any, end: Any, step: int, begins: list[Any]) -> None:
        self._builder, self._end, self._step = builder, end, step
        before = builder.block
        self._body, self._after = (builder.append_basic_block(name) for name in ("turn", "done"))
        builder.branch(self._body)
        builder.position_at_end(self._body)
        self.index = builder.phi(INT)
        self.index.add_incoming(INT(0), before)
        self.values = [builder.phi(begin.type) for begin in begins]
        for value, begin in zip(self.values, begins, strict=True):
            value.add_incoming(begin, before)

    def close(self, following: list[Any]) -> None:
        builder = self._builder
        index = builder.add(self.index, INT(self._step))
        self.index.add_incoming(index, builder.block)
        for value, next_value in zip(self.values, following, strict=True):
            value.add_incoming(next_value, builder.block)
        builder.cbranch(builder.icmp_signed("<", index, self._end), self._body, self._after)
        builder.position_at_end(self._after)
