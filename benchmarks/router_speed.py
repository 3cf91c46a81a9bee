"""What one routing decision costs among 8, 64 and 512 workers, and what asking every worker's own tree would cost.

    python benchmarks/router_speed.py

Prompts of 12,000 tokens, of which 6,000 stand in the trees of many workers; blocks of 16; half of the workers are busy.
Processor time of one thread, so that what else runs on the machine does not count.
"""

from __future__ import annotations

import gc
import random
import statistics
import time

import numpy as np

from octavo.protos.types import Request, SamplingParams, StepResult
from octavo.scheduler.config import SchedulerConfig
from octavo.scheduler.router import Router
from octavo.scheduler.scheduler import Scheduler
from octavo.scheduler.step_time import StepTimeModel

NUM_PREFIXES, PREFIX_TOKENS, OWN_TOKENS = 20, 6000, 6000


def make_request(number: int, rng: random.Random) -> Request:
    prefix, own = rng.randrange(NUM_PREFIXES) * 100_000, 10_000_000 + number * 10_000
    tokens = np.concatenate([np.arange(prefix, prefix + PREFIX_TOKENS), np.arange(own, own + OWN_TOKENS)])
    return Request(
        request_id=str(number),
        prompt_token_ids=tokens.astype(np.int32),
        params=SamplingParams(max_tokens=8),
        seed=0,
    )


def run(scheduler: Scheduler) -> None:
    while scheduler.has_work:
        plan = scheduler.plan(0.0)
        if plan is None:
            return
        tokens = np.ones(len(plan.sample_rows), np.int32)
        scheduler.commit(StepResult(step_id=plan.step_id, epoch=plan.epoch, token_ids=tokens), 0.0)


def main() -> None:
    for num_workers in (8, 64, 512):
        rng = random.Random(1)
        config = SchedulerConfig(num_blocks=4000, max_num_batched_tokens=16_384, max_model_len=32_768)
        workers = {
            f"w{i:03}": Scheduler(config, StepTimeModel.of_coefficients(0.01, 1e-4, 1e-5, 1e-7))
            for i in range(num_workers)
        }
        router = Router()
        # Every worker has done a few requests and half of them are busy with one more.
        for number in range(4 * num_workers):
            worker_id, _ = router.route(make_request(number, rng), workers, 0.0)
            if number < 3 * num_workers or number % 2:
                run(workers[worker_id])
        gc.collect()
        routed, asked = [], []
        for number in range(10_000, 10_200):
            request = make_request(number, rng)
            begin = time.thread_time()
            worker_id, _ = router.route(request, workers, 0.0)
            routed.append(time.thread_time() - begin)
            run(workers[worker_id])
            begin = time.thread_time()
            for scheduler in workers.values():
                scheduler.cached_tokens_of(request)
            asked.append(time.thread_time() - begin)
        print(
            f"{num_workers:4} workers: route() {1e6 * statistics.median(routed):6.0f} us median, "
            f"{1e6 * sorted(routed)[-3]:6.0f} us p99; asking every tree {1e6 * statistics.median(asked):7.0f} us; "
            f"index {router.index_bytes / 1e6:.0f} MB"
        )


if __name__ == "__main__":
    main()
