"""CPU time of plan + commit for a steady batch of decodes, by batch size and context length.

    python benchmarks/scheduler_step.py [--rows 256] [--steps 300]

The scheduler's share of every step; must not depend on the context. Prints medians and the 10th to 90th percentile.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np

from octavo.protos.types import Request, SamplingParams, StepResult
from octavo.scheduler.config import SchedulerConfig
from octavo.scheduler.scheduler import Scheduler


def measure(rows: int, context: int, steps: int) -> tuple[list[float], list[float]]:
    config = SchedulerConfig(
        num_blocks=rows * (context // 16 + 60),
        max_num_seqs=rows,
        max_num_batched_tokens=max(8192, rows),
        max_model_len=context + 2000,
    )
    scheduler = Scheduler(config)
    for i in range(rows):
        prompt = np.full(context, i, np.int32)
        params = SamplingParams(max_tokens=900, temperature=0)
        scheduler.add(Request(request_id=str(i), prompt_token_ids=prompt, params=params, seed=0), 0.0)
    plan_seconds: list[float] = []
    commit_seconds: list[float] = []
    steady = 0
    while steady < steps:
        start = time.perf_counter()
        plan = scheduler.plan(0.0)
        planned = time.perf_counter()
        assert plan is not None
        tokens = np.full(len(plan.sample_rows), 5, np.int32)
        result = StepResult(step_id=plan.step_id, epoch=plan.epoch, token_ids=tokens, step_seconds=0.01)
        before = time.perf_counter()
        scheduler.commit(result, 0.0)
        done = time.perf_counter()
        if plan.num_scheduled_tokens == rows:
            steady += 1
            plan_seconds.append(planned - start)
            commit_seconds.append(done - before)
    return plan_seconds, commit_seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--steps", type=int, default=300)
    args = parser.parse_args()
    for context in (64, 1024, 4096):
        for name, values in zip(("plan", "commit"), measure(args.rows, context, args.steps), strict=True):
            deciles = statistics.quantiles([1e6 * value for value in values], n=10)
            print(
                f"{args.rows} rows, context {context}: {name} {statistics.median(values) * 1e6:.0f} us "
                f"({deciles[0]:.0f} to {deciles[-1]:.0f})"
            )


if __name__ == "__main__":
    main()
