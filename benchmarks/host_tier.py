"""Time to first token of a prompt whose prefix has left the device: loaded from the host, or computed again.

    python benchmarks/host_tier.py [--rounds 5]

The default model; a prefix of 640 tokens is computed once, pushed out by another prompt that fills the pool, and asked
for again with a new last word. Both ways in turn in one process each; prints medians and ranges.
"""

from __future__ import annotations

import argparse
import statistics

import numpy as np

from octavo import Engine, SamplingParams

NUM_BLOCKS, PREFIX_TOKENS = 48, 640
ONE = SamplingParams(temperature=0, max_tokens=1)


def seconds(engine: Engine, rng: np.random.Generator) -> tuple[float, int]:
    """(time to first token, cached tokens) of the second time."""
    prefix = rng.integers(100, 40_000, PREFIX_TOKENS).tolist()
    engine.generate([prefix], ONE)
    engine.generate([rng.integers(100, 40_000, NUM_BLOCKS * 16 - 1).tolist()], ONE)
    (again,) = engine.generate([[*prefix, 7, 8, 9]], ONE)
    return again.metrics.ttft_seconds, again.metrics.cached_tokens


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    rng = np.random.default_rng(7)
    engines = {on: Engine(num_blocks=NUM_BLOCKS, host_blocks=64, host_tier=on) for on in (True, False)}
    found: dict[bool, list[float]] = {True: [], False: []}
    try:
        for _ in range(args.rounds):
            for on, engine in engines.items():
                ttft, cached = seconds(engine, rng)
                assert (cached > 0) == on, (on, cached)
                found[on].append(ttft)
    finally:
        for engine in engines.values():
            engine.close()
    for on, name in ((True, "loaded from the host"), (False, "computed again")):
        values = found[on]
        print(
            f"{name}: {statistics.median(values) * 1000:.0f} ms ({min(values) * 1000:.0f} to {max(values) * 1000:.0f})"
        )
    print(f"ratio of medians {statistics.median(found[False]) / statistics.median(found[True]):.1f}")


if __name__ == "__main__":
    main()
