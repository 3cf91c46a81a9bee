"""CPU time of a step's bookkeeping for a steady batch of decodes: plan, encode, decode, commit.

    python benchmarks/scheduler_step.py [--rows 256] [--steps 300]

What a step costs besides the model: the scheduler plans, the plan goes to bytes and back, so does the result, the
scheduler commits. Both ends of the wire are counted, though on a cluster they are two processes. Must not depend on
the context. Counted is the thread's CPU time, so other work on the machine shows only through the caches. Printed
are medians and the 10th to 90th percentile over the steps.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict

import numpy as np

from octavo.protos import worker_pb2
from octavo.protos.codec import decode_plan, decode_result, encode_plan, encode_result
from octavo.protos.types import Request, SamplingParams, StepResult
from octavo.scheduler.config import SchedulerConfig
from octavo.scheduler.scheduler import Scheduler

CONTEXTS = (64, 1024, 4096)
PARTS = ("plan", "encode", "decode", "commit")


def steady_scheduler(rows: int, context: int, steps: int) -> Scheduler:
    """A scheduler with `rows` requests of `context` tokens, enough for all to decode `steps` times together."""
    budget = max(8192, rows)
    prefill_steps = -(-rows * context // (budget - rows)) + 1
    max_tokens = prefill_steps + steps
    scheduler = Scheduler(
        SchedulerConfig(
            num_blocks=rows * ((context + max_tokens) // 16 + 2),
            max_num_seqs=rows,
            max_num_batched_tokens=budget,
            max_model_len=context + max_tokens,
        )
    )
    params = SamplingParams(max_tokens=max_tokens, temperature=0)
    for i in range(rows):
        prompt = np.full(context, i, np.int32)
        scheduler.add(Request(request_id=str(i), prompt_token_ids=prompt, params=params, seed=0), 0.0)
    return scheduler


def measure(rows: int, context: int, steps: int) -> dict[str, list[float]]:
    """CPU seconds of every step by part, and their "sum"."""
    scheduler = steady_scheduler(rows, context, steps)
    clock = time.thread_time
    seconds: dict[str, list[float]] = defaultdict(list)
    while len(seconds["sum"]) < steps:
        started = clock()
        plan = scheduler.plan(0.0)
        planned = clock()
        assert plan is not None
        sent = encode_plan(plan).SerializeToString()
        plan_encoded = clock()
        received = decode_plan(worker_pb2.StepPlan.FromString(sent))
        plan_decoded = clock()
        tokens = np.full(len(received.sample_rows), 5, np.int32)
        result = StepResult(
            step_id=received.step_id, epoch=received.epoch, token_ids=tokens, step_seconds=0.01
        )
        executed = clock()
        sent = encode_result(result).SerializeToString()
        result_encoded = clock()
        result = decode_result(worker_pb2.StepResult.FromString(sent))
        result_decoded = clock()
        scheduler.commit(result, 0.0)
        committed = clock()
        if plan.num_scheduled_tokens != rows:
            continue
        parts = (
            planned - started,
            plan_encoded - planned + result_encoded - executed,
            plan_decoded - plan_encoded + result_decoded - result_encoded,
            committed - result_decoded,
        )
        for name, part in zip(PARTS, parts, strict=True):
            seconds[name].append(part)
        seconds["sum"].append(sum(parts))
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--steps", type=int, default=300)
    args = parser.parse_args()
    print(f"CPU time of a step of {args.rows} decodes, microseconds")
    print("| context |", " | ".join((*PARTS, "sum")), "|")
    print("|---" * (len(PARTS) + 2) + "|")
    for context in CONTEXTS:
        seconds = measure(args.rows, context, args.steps)
        cells = []
        for name in (*PARTS, "sum"):
            microseconds = [1e6 * value for value in seconds[name]]
            deciles = statistics.quantiles(microseconds, n=10)
            cells.append(f"{statistics.median(microseconds):.0f} ({deciles[0]:.0f} to {deciles[-1]:.0f})")
        print(f"| {context:,} |", " | ".join(cells), "|", flush=True)


if __name__ == "__main__":
    main()
