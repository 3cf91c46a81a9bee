"""What the prefix tree costs when nothing is shared: CPU time of the scheduler with and without it.

    python benchmarks/prefix_tree_cost.py [--requests 256] [--output-tokens 256] [--rounds 15]

`--requests` requests of distinct prompts run to their end, admission included. Two figures: the share of all plan and
commit time that is spent in the tree's calls (finding a prefix, entering blocks, forgetting them), which a busy machine
hardly disturbs, and the ratio of medians with and without the tree, in turn, which it does. Target: below 1 %.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from typing import Any

import numpy as np

from octavo.protos.types import Request, SamplingParams, StepResult
from octavo.scheduler.config import SchedulerConfig
from octavo.scheduler.scheduler import Scheduler

PROMPT_TOKENS = 128


class Stopwatch:
    """Adds up the time inside some methods of one object."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def wrap(self, owner: Any, name: str) -> None:
        method = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - start

        setattr(owner, name, timed)


def seconds_per_step(prefix_cache: bool, requests: int, output_tokens: int) -> tuple[float, float]:
    """Of scheduler time, and of that in the tree's calls."""
    config = SchedulerConfig(
        num_blocks=requests * (PROMPT_TOKENS + output_tokens) // 16 + requests,
        max_num_seqs=requests,
        max_num_batched_tokens=2048,
        prefix_cache=prefix_cache,
    )
    scheduler = Scheduler(config)
    watch = Stopwatch()
    for owner, name in (
        (scheduler.kv, "find_prefix"),
        (scheduler.kv, "publish"),
        (scheduler.kv, "_leave_device"),
    ):
        watch.wrap(owner, name)
    for i in range(requests):
        prompt = np.arange(i * 1000, i * 1000 + PROMPT_TOKENS, dtype=np.int32)
        params = SamplingParams(max_tokens=output_tokens, temperature=0)
        scheduler.add(Request(request_id=str(i), prompt_token_ids=prompt, params=params, seed=0), 0.0)
    spent, steps = 0.0, 0
    gc.collect()
    gc.disable()
    while scheduler.has_work:
        start = time.perf_counter()
        plan = scheduler.plan(0.0)
        spent += time.perf_counter() - start
        if plan is None:
            break
        tokens = np.full(len(plan.sample_rows), 5, np.int32)
        result = StepResult(step_id=plan.step_id, epoch=plan.epoch, token_ids=tokens, step_seconds=0.01)
        start = time.perf_counter()
        scheduler.commit(result, 0.0)
        spent += time.perf_counter() - start
        steps += 1
    gc.enable()
    return spent / steps, watch.seconds / steps


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--output-tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    found: dict[bool, list[float]] = {True: [], False: []}
    shares: dict[bool, list[float]] = {True: [], False: []}
    for number in range(args.rounds):
        for prefix_cache in (True, False) if number % 2 else (False, True):
            total, in_tree = seconds_per_step(prefix_cache, args.requests, args.output_tokens)
            found[prefix_cache].append(total)
            shares[prefix_cache].append(in_tree / total)
    ratios = sorted(a / b for a, b in zip(found[True], found[False], strict=True))
    for prefix_cache, name in ((False, "without"), (True, "with")):
        values = [1e6 * value for value in found[prefix_cache]]
        print(
            f"{name} the tree: {statistics.median(values):.0f} us a step ({min(values):.0f} to {max(values):.0f})"
        )
    ratio = statistics.median(found[True]) / statistics.median(found[False])
    print(f"ratio of medians {ratio:.4f}; of rounds {ratios[0]:.3f} to {ratios[-1]:.3f}")
    for prefix_cache, name in ((False, "without"), (True, "with")):
        low, *_, high = sorted(shares[prefix_cache])
        print(
            f"{name} the tree: {100 * statistics.median(shares[prefix_cache]):.2f} % of the time in its calls "
            f"({100 * low:.2f} to {100 * high:.2f})"
        )


if __name__ == "__main__":
    main()
