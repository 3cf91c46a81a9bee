"""A long run of the seeded simulation, for nights and releases.

    python -m tests.scheduler.nightly --steps 1000000 [--first-seed 100000]

Runs one random life of a scheduler after another until so many steps have been committed, with every invariant
checked after every call. Ends at the first seed that fails, and prints the line that replays it.
"""

from __future__ import annotations

import argparse
import sys
import time

from .test_simulation import simulate


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--first-seed", type=int, default=100_000)
    args = parser.parse_args()
    steps, seed, began, told = 0, args.first_seed, time.monotonic(), time.monotonic()
    totals: dict[str, int] = {}
    while steps < args.steps:
        try:
            harness = simulate(seed)
        except Exception as error:
            print(f"seed {seed} failed: {type(error).__name__}: {error}")
            print(
                f'replay: python -c "from tests.scheduler.test_simulation import simulate; simulate({seed})"'
            )
            return 1
        steps += len(harness.plans)
        for event in harness.events:
            name = type(event).__name__
            totals[name] = totals.get(name, 0) + 1
        seed += 1
        if time.monotonic() - told > 30:
            told = time.monotonic()
            print(
                f"{steps:,} of {args.steps:,} steps, {seed - args.first_seed:,} seeds",
                file=sys.stderr,
                flush=True,
            )
    minutes = (time.monotonic() - began) / 60
    print(
        f"{steps:,} steps in {seed - args.first_seed:,} seeds from {args.first_seed}, {minutes:.1f} min, no fault"
    )
    print("  ".join(f"{name} {count:,}" for name, count in sorted(totals.items())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
