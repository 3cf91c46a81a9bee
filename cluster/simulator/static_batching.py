"""Static batching, for comparison: the one system that the production scheduler cannot be made to act as.

A free worker takes the requests that have waited longest, as many as have room at the limit's length; prompts are
padded to the longest among them, and every row computes until the longest answer is complete. An answer counts as soon
as it is complete itself, which is kinder than servers of that time were.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

from octavo.cluster.simulator.fleet import FleetConfig, Outcome, RunRecord
from octavo.cluster.simulator.traces import Trace


class StaticBatching:
    """One run, as `Simulation` is one. All workers take from one queue."""

    def __init__(
        self, config: FleetConfig, trace: Trace, *, on_progress: Callable[[int], None] = lambda done: None
    ) -> None:
        self._config = config
        self._trace = trace
        self._on_progress = on_progress
        self._device = config.device.step_time()
        self._record = RunRecord(config, trace.name, [])
        self._waste = [0.0] * config.num_workers
        self._scheduled = [0] * config.num_workers

    def run(self) -> RunRecord:
        record, config = self._record, self._config
        waiting = []
        for one in self._trace.requests:
            if one.num_prompt_tokens + one.num_output_tokens > config.max_model_len:
                record.refused += 1
            else:
                waiting.append(Outcome(one.at_seconds, one.num_prompt_tokens, one.num_output_tokens))
        record.outcomes = waiting
        record.busy_seconds = [0.0] * config.num_workers
        rows = config.reservations
        free = [(0.0, worker) for worker in range(config.num_workers)]
        begin = 0
        while begin < len(waiting):
            at, worker = heapq.heappop(free)
            at = max(at, waiting[begin].at_seconds)
            end = begin + 1
            while end < min(len(waiting), begin + rows) and waiting[end].at_seconds <= at:
                end += 1
            done = self._batch(waiting[begin:end], worker, at)
            record.busy_seconds[worker] += done - at
            record.end_seconds = max(record.end_seconds, done)
            heapq.heappush(free, (done, worker))
            begin = end
            self._on_progress(begin + record.refused)
        begun = waiting[0].at_seconds if waiting else 0.0
        record.worker_seconds = config.num_workers * (record.end_seconds - begun)
        record.schedulers = [
            {"recomputed_tokens": 0, "scheduled_tokens": scheduled, "peak_waste": waste}
            for scheduled, waste in zip(self._scheduled, self._waste, strict=True)
        ]
        return record

    def _batch(self, batch: list[Outcome], worker: int, at: float) -> float:
        """Runs one batch from `at`; returns when it ends."""
        count = len(batch)
        prompt = max(one.num_prompt_tokens for one in batch)
        answer = max(one.num_output_tokens for one in batch)
        held = sum(one.num_prompt_tokens + one.num_output_tokens for one in batch)
        self._waste[worker] = max(self._waste[worker], 1 - held / (count * self._config.max_model_len))
        self._scheduled[worker] += count * (prompt + answer - 1)
        now = at + self._device.step_seconds(
            num_tokens=count * prompt, num_rows=count, context_tokens=count * prompt
        )
        for one in batch:
            one.worker, one.ttft_seconds = worker, now - one.at_seconds
        alive = sorted(batch, key=lambda one: one.num_output_tokens)
        position = 0
        for made in range(1, answer + 1):
            if made > 1:
                seconds = self._device.step_seconds(
                    num_tokens=count, num_rows=count, context_tokens=count * (prompt + made)
                )
                now += seconds
                self._record.step_seconds.append(seconds)
                self._record.step_tokens.append(count - position)
            while position < count and alive[position].num_output_tokens == made:
                alive[position].total_seconds = now - alive[position].at_seconds
                position += 1
        return now
