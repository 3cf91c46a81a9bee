"""Seconds from nothing to ready: `octavo serve` with two workers, stage by stage, then its end.

    python benchmarks/startup.py [--workers 2] [--repeats 3]

Run it once before, so that the model is converted and the kernels are compiled: it measures the second start. Prints
a line a run and the medians.
"""

from __future__ import annotations

import argparse
import statistics
import time

from octavo.cluster.service import Service
from octavo.cluster.service_config import ServiceConfig


def measure(num_workers: int) -> dict[str, float]:
    service = Service(ServiceConfig(num_workers=num_workers, port=0))
    try:
        service.start()
        stages = dict(service.timings)
    finally:
        began = time.monotonic()
        service.stop(grace_seconds=1.0)
    return {**stages, "stop": time.monotonic() - began}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    runs = []
    for _ in range(args.repeats):
        runs.append(measure(args.workers))
        print("  ".join(f"{stage} {seconds:.1f}" for stage, seconds in runs[-1].items()), flush=True)
    medians = {stage: statistics.median(run[stage] for run in runs) for stage in runs[0]}
    print("median:  " + "  ".join(f"{stage} {seconds:.1f}" for stage, seconds in medians.items()))


if __name__ == "__main__":
    main()
