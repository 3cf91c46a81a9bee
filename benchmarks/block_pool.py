"""Cost of one operation on the block pool, from 10^3 to 10^6 blocks: it must not grow with the pool.

    python benchmarks/block_pool.py [--operations 200000]

Prints nanoseconds for an allocation with its release, and for the revival of a cached block from the middle of the
free queue with its release: medians of five rounds, the pool sizes taken in turn within each round.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time

from octavo.scheduler.block_pool import BlockPool

SIZES = (1_000, 10_000, 100_000, 1_000_000)
ROUNDS = 5


def allocate_and_release(pool: BlockPool, operations: int) -> float:
    began = time.perf_counter()
    for _ in range(operations):
        pool.release((pool.allocate(),))
    return (time.perf_counter() - began) / operations


def revive_and_release(pool: BlockPool, blocks: list[int]) -> float:
    began = time.perf_counter()
    for block in blocks:
        pool.acquire(block)
        pool.release((block,))
    return (time.perf_counter() - began) / len(blocks)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--operations", type=int, default=200_000)
    args = parser.parse_args()
    rng = random.Random(1)
    pools = {
        size: BlockPool(size, is_cached=lambda block: False, on_evict=lambda block: None) for size in SIZES
    }
    touched = {size: [rng.randrange(size) for _ in range(args.operations)] for size in SIZES}
    seconds: dict[tuple[str, int], list[float]] = {}
    for _ in range(ROUNDS):
        for size, pool in pools.items():
            seconds.setdefault(("allocate", size), []).append(allocate_and_release(pool, args.operations))
            seconds.setdefault(("revive", size), []).append(revive_and_release(pool, touched[size]))
    for (name, size), values in sorted(seconds.items()):
        low, high = min(values) * 1e9, max(values) * 1e9
        print(
            f"{name:9} {size:>9,} blocks: {statistics.median(values) * 1e9:5.0f} ns ({low:.0f} to {high:.0f})"
        )


if __name__ == "__main__":
    main()
