"""The long chaos run, which measures how long clients wait at each fault.

    python -m tests.chaos.long [--repeats 20] [--first 0] [--lease SECONDS] [--only FAULT]

40 greedy and 20 sampled streams over three workers; each fault in turn, at a random point, `--repeats` times, with the
lease that CPU workers have in production unless told otherwise. `--first` numbers the first repeat, whose number is
its seed: 20 repeats may be run in several goes. Prints a table of the longest pause between two
outputs that any of the 60 clients saw, and ends with 1 at the first stream that is not what it would have been.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time

from octavo.protos.wire import LEASE_SECONDS_CPU

from .faults import FAULTS, run_fault
from .system import System
from .traffic import Traffic, make_requests, reference

MAX_TOKENS = 160


async def measure(repeats: range, lease_seconds: float, faults: list[str]) -> dict[str, list[float]]:
    """Longest pause in seconds of each run; under "none" those of undisturbed runs."""
    requests = make_requests("calm", max_tokens=MAX_TOKENS)
    want = reference(requests)
    gaps: dict[str, list[float]] = {name: [] for name in ("none", *faults)}
    async with System(3, lease_seconds=lease_seconds) as system:
        # The first steps of three new processes are no measure of a pause.
        warm_up = Traffic(make_requests("warm up", max_tokens=MAX_TOKENS))
        warm_up.start(system.backend)
        await warm_up.finish(120)
        for repeat in repeats:
            calm = Traffic(make_requests(f"calm {repeat}", max_tokens=MAX_TOKENS))
            calm.start(system.backend)
            await calm.finish(120)
            assert calm.outputs() == want, "undisturbed"
            gaps["none"].append(calm.gap_seconds)
            for name in faults:
                outcome = await run_fault(system, name, seed=repeat, max_tokens=MAX_TOKENS)
                assert outcome.traffic.outputs() == want, f"{name}, repeat {repeat}"
                await system.idle()
                gaps[name].append(outcome.gap_seconds)
            print(
                f"repeat {repeat}: " + ", ".join(f"{name} {gap[-1]:.2f} s" for name, gap in gaps.items()),
                file=sys.stderr,
                flush=True,
            )
    return gaps


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--lease", type=float, default=LEASE_SECONDS_CPU)
    parser.add_argument("--only", choices=list(FAULTS), default=None)
    args = parser.parse_args()
    began = time.monotonic()
    try:
        repeats = range(args.first, args.first + args.repeats)
        gaps = asyncio.run(measure(repeats, args.lease, [args.only] if args.only else list(FAULTS)))
    except AssertionError as error:
        print(f"FAILED: {error}")
        return 1
    print(f"lease {args.lease:g} s, {time.monotonic() - began:.0f} s in all\n")
    print("| fault | runs | pause, median s | pause, longest s |")
    print("|---|---|---|---|")
    for name, values in gaps.items():
        print(f"| {name} | {len(values)} | {statistics.median(values):.2f} | {max(values):.2f} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
