"""What metrics add to a step: the meter's calls beside the scheduler's plan and commit, and one scrape.

    python benchmarks/metrics_cost.py [--rows 256] [--steps 300] [--workers 64]

A steady batch of decodes, as in `scheduler_step.py`. Prints medians and the 10th to 90th percentile of CPU time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import numpy as np

from octavo.cluster.metrics.exposition import backend_families, text
from octavo.cluster.metrics.meter import WorkerMeter
from octavo.protos.types import Request, SamplingParams, StepResult
from octavo.scheduler.config import SchedulerConfig
from octavo.scheduler.scheduler import Scheduler

PARTS = {"prepare": 0.001, "forward": 0.008, "sample": 0.001}


def measure(rows: int, steps: int) -> tuple[dict[str, list[float]], Scheduler, WorkerMeter]:
    config = SchedulerConfig(
        num_blocks=rows * 70,
        max_num_seqs=rows,
        max_num_batched_tokens=max(8192, rows),
        max_model_len=3000,
    )
    scheduler, meter = Scheduler(config), WorkerMeter(rows)
    for i in range(rows):
        params = SamplingParams(max_tokens=900, temperature=0)
        request = Request(request_id=str(i), prompt_token_ids=np.full(64, i, np.int32), params=params, seed=0)
        scheduler.add(request, 0.0)
    seconds: dict[str, list[float]] = {"scheduler": [], "meter": []}
    steady, now = 0, 0.0
    while steady < steps:
        now += 0.01
        marks = [time.perf_counter()]
        plan = scheduler.plan(now)
        assert plan is not None
        marks.append(time.perf_counter())
        meter.on_plan(plan, budget_tokens=scheduler.budget_tokens, seconds=0.0002)
        marks.append(time.perf_counter())
        result = StepResult(
            step_id=plan.step_id,
            epoch=plan.epoch,
            token_ids=np.full(len(plan.sample_rows), 5, np.int32),
            step_seconds=0.01,
            parts_seconds=PARTS,
        )
        marks.append(time.perf_counter())
        events = scheduler.commit(result, now)
        marks.append(time.perf_counter())
        meter.on_result(result, now, seconds=0.0003)
        meter.observe(events)
        marks.append(time.perf_counter())
        if plan.num_scheduled_tokens == rows:
            steady += 1
            seconds["scheduler"].append(marks[1] - marks[0] + marks[4] - marks[3])
            seconds["meter"].append(marks[2] - marks[1] + marks[5] - marks[4])
    return seconds, scheduler, meter


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--workers", type=int, default=64, help="of the scrape")
    args = parser.parse_args()
    seconds, scheduler, meter = measure(args.rows, args.steps)
    for name, values in seconds.items():
        deciles = statistics.quantiles(values, n=10)
        print(
            f"{name}: {statistics.median(values) * 1e6:.0f} us a step of {args.rows} decodes "
            f"({deciles[0] * 1e6:.0f} to {deciles[-1] * 1e6:.0f})"
        )
    began = time.perf_counter()
    workers = {f"worker-{i}": {**scheduler.snapshot(), **meter.snapshot()} for i in range(args.workers)}
    gathered = time.perf_counter()
    stats = json.loads(json.dumps({"workers": workers}))
    sent = time.perf_counter()
    page = text(backend_families(stats))
    done = time.perf_counter()
    print(
        f"scrape of {args.workers} workers: {(gathered - began) * 1e3:.1f} ms to gather, "
        f"{(sent - gathered) * 1e3:.1f} ms as JSON, {(done - sent) * 1e3:.1f} ms as text, {len(page)} bytes"
    )


if __name__ == "__main__":
    main()
