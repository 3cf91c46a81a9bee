"""Which order of a layer's KV cache suits attention best?

    python benchmarks/kv_layout.py [--rounds 15] [--json]

Three orders of the same numbers, SmolLM2-135M's shape (9 query heads on 3 KV heads, 64 wide, float32, blocks of
16): [blocks, heads, block, dim], which Octavo uses; [blocks, block, heads, dim], a token's heads together; and
the first with each block of keys transposed to [dim, block]. Per order: the two products of attention (scores,
then weights times values; no softmax, which is the same in all) for a batch of decodes and for a chunk, from the
same inner loops as the real kernel, and the storing of a step's keys and values.

Orders take turns within each round, on one thread. Printed: the median of each, the ratio of medians to the
first order, and the middle half of the ratios of single rounds, which says how far to trust it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from octavo.kernels.cpu.products import Matrix, accumulate, dot_rows
from octavo.kernels.cpu.runtime import compiled
from octavo.kernels.cpu.simd import LANES, vtranspose
from octavo.kernels.cpu.tiles import FEW_ROWS

HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 9, 3, 64, 16
GROUP = HEADS // KV_HEADS


@dataclass(frozen=True)
class Layout:
    """Element strides of (block, head, slot, dim) for keys; values always keep dim innermost."""

    name: str
    k_strides: tuple[int, int, int, int]
    v_strides: tuple[int, int, int, int]


_PER_BLOCK = KV_HEADS * BLOCK_SIZE * HEAD_DIM
_BY_HEAD = (_PER_BLOCK, BLOCK_SIZE * HEAD_DIM, HEAD_DIM, 1)
_BY_SLOT = (_PER_BLOCK, HEAD_DIM, KV_HEADS * HEAD_DIM, 1)
_TRANSPOSED = (_PER_BLOCK, BLOCK_SIZE * HEAD_DIM, 1, BLOCK_SIZE)
LAYOUTS = (
    Layout("[blocks, heads, block, dim]", _BY_HEAD, _BY_HEAD),
    Layout("[blocks, block, heads, dim]", _BY_SLOT, _BY_SLOT),
    Layout("keys [blocks, heads, dim, block]", _TRANSPOSED, _BY_HEAD),
)


@compiled()
def transpose(keys: Matrix, transposed: Any) -> None:
    """transposed[HEAD_DIM, BLOCK_SIZE] = keys[BLOCK_SIZE, HEAD_DIM].T"""
    k, k_at, k_stride = keys
    for slot in range(0, BLOCK_SIZE, LANES):
        for d in range(0, HEAD_DIM, LANES):
            source = k_at + slot * k_stride + d
            vtranspose(k, source, k_stride, transposed, d * BLOCK_SIZE + slot, BLOCK_SIZE)


@compiled()
def products(
    queries: Any, rows: int, k: Any, k_strides: Any, v: Any, v_strides: Any, tables: Any, output: Any
) -> None:
    """Per sequence and KV head: output += (queries @ keys.T) @ values, block by block, nothing masked.

    queries, output [sequences * KV heads, rows, head_dim], flat; tables [sequences, blocks].
    """
    scores = np.zeros(rows * BLOCK_SIZE, np.float32)
    transposed = np.empty(BLOCK_SIZE * HEAD_DIM, np.float32)
    for sequence in range(tables.shape[0]):
        for head in range(KV_HEADS):
            at = (sequence * KV_HEADS + head) * rows * HEAD_DIM
            tile = (queries, at, HEAD_DIM)
            for block in tables[sequence]:
                k_at = block * k_strides[0] + head * k_strides[1]
                result = (scores, 0, BLOCK_SIZE)
                keys = (k, k_at, k_strides[2])
                if rows <= FEW_ROWS and k_strides[2] != 1:
                    dot_rows(tile, keys, result, rows, BLOCK_SIZE, HEAD_DIM, (k, k_at))
                else:
                    turned = (k, k_at, k_strides[3])
                    if k_strides[2] != 1:
                        transpose(keys, transposed)
                        turned = (transposed, 0, BLOCK_SIZE)
                    scores[:] = 0.0
                    accumulate(tile, turned, result, rows, BLOCK_SIZE, HEAD_DIM)
                values = (v, block * v_strides[0] + head * v_strides[1], v_strides[2])
                accumulate(result, values, (output, at, HEAD_DIM), rows, HEAD_DIM, BLOCK_SIZE)


@compiled()
def store(rows: Any, cache: Any, strides: Any, slots: Any) -> None:
    """cache[slot] = rows [tokens, KV heads, head_dim] in any order of the cache."""
    for token in range(slots.shape[0]):
        for head in range(KV_HEADS):
            block, slot = slots[token] // BLOCK_SIZE, slots[token] % BLOCK_SIZE
            at = block * strides[0] + head * strides[1] + slot * strides[2]
            for d in range(HEAD_DIM):
                cache[at + d * strides[3]] = rows[(token * KV_HEADS + head) * HEAD_DIM + d]


def attention_case(
    sequences: int, context: int, tokens: int, rng: np.random.Generator
) -> Callable[[Layout], None]:
    """`sequences` of `context` tokens, each with a tile of `tokens` tokens; enough caches that none stays in L2."""
    blocks = context // BLOCK_SIZE
    size = sequences * blocks * _PER_BLOCK
    k, v = (rng.standard_normal(size, np.float32) for _ in range(2))
    tables = rng.permutation(sequences * blocks).reshape(sequences, blocks)
    queries = rng.standard_normal(sequences * HEADS * tokens * HEAD_DIM, np.float32)
    output = np.zeros_like(queries)
    return lambda layout: products(
        queries, tokens * GROUP, k, layout.k_strides, v, layout.v_strides, tables, output
    )


def store_case(tokens: int, rng: np.random.Generator) -> Callable[[Layout], None]:
    """Keys and values of `tokens` tokens into scattered blocks of a pool of 64 MiB."""
    num_slots = 32768
    k, v = (np.zeros(num_slots * KV_HEADS * HEAD_DIM, np.float32) for _ in range(2))
    starts = rng.permutation(num_slots // BLOCK_SIZE)[: tokens // BLOCK_SIZE] * BLOCK_SIZE
    slots = (starts[:, None] + np.arange(BLOCK_SIZE)).reshape(-1)
    rows = rng.standard_normal(tokens * KV_HEADS * HEAD_DIM, np.float32)

    def run(layout: Layout) -> None:
        store(rows, k, layout.k_strides, slots)
        store(rows, v, layout.v_strides, slots)

    return run


def measure(run: Callable[[Layout], None], rounds: int) -> list[dict[str, Any]]:
    """Seconds of each layout, taking turns, the first to go changing from round to round."""
    seconds: list[list[float]] = [[] for _ in LAYOUTS]
    for layout in LAYOUTS:
        run(layout)
    for number in range(rounds):
        for turn in range(len(LAYOUTS)):
            which = (number + turn) % len(LAYOUTS)
            start = time.perf_counter()
            run(LAYOUTS[which])
            seconds[which].append(time.perf_counter() - start)
    results = []
    for layout, own in zip(LAYOUTS, seconds, strict=True):
        ratios = [mine / first for mine, first in zip(own, seconds[0], strict=True)]
        low, _, high = statistics.quantiles(ratios, n=4)
        median = statistics.median(own)
        results.append(
            {
                "layout": layout.name,
                "median_ms": median * 1e3,
                "fastest_ms": min(own) * 1e3,
                "ratio": median / statistics.median(seconds[0]),
                "ratio_middle_half": (low, high),
            }
        )
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15, help="rounds per case, at least 2")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    arguments = parser.parse_args()
    rng = np.random.default_rng(0)
    cases = {
        "decode, 48 sequences of 288 tokens": attention_case(48, 288, 1, rng),
        "chunk tile, 16 tokens each against 2 x 2048": attention_case(2, 2048, 16, rng),
        "store 512 tokens": store_case(512, rng),
    }
    results = {name: measure(run, arguments.rounds) for name, run in cases.items()}
    if arguments.json:
        print(json.dumps(results, indent=2))
        return
    print("| case | layout | median ms | fastest ms | ratio of medians | middle half of ratios |")
    print("|---|---|---|---|---|---|")
    for name, rows in results.items():
        for row in rows:
            low, high = row["ratio_middle_half"]
            cells = [name, row["layout"], f"{row['median_ms']:.3f}", f"{row['fastest_ms']:.3f}"]
            print("|", " | ".join([*cells, f"{row['ratio']:.2f}", f"{low:.2f} to {high:.2f}"]), "|")


if __name__ == "__main__":
    main()
