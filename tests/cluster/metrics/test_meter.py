"""What a worker's meter measures, against what a plain loop over all tokens would."""

from __future__ import annotations

from bisect import bisect_left
from typing import Any

import numpy as np
import pytest

from octavo.cluster.metrics import table
from octavo.cluster.metrics.histogram import Histogram
from octavo.cluster.metrics.meter import WorkerMeter
from octavo.protos.types import Request, SamplingParams, StepResult
from octavo.scheduler.config import SchedulerConfig
from octavo.scheduler.events import Finished, Preempted, Resumed, TokensOut
from octavo.scheduler.scheduler import Scheduler

from ...scheduler.fake_worker import FakeWorker

BOUNDS = (1.0, 2.0, 5.0)


def test_a_value_on_a_bound_belongs_below_it() -> None:
    one_by_one, together = Histogram(BOUNDS), Histogram(BOUNDS)
    values = [0.0, 1.0, 1.5, 2.0, 5.0, 5.1, 900.0]
    for value in values:
        one_by_one.observe(value)
    together.observe_all(np.array(values))
    assert one_by_one.snapshot() == together.snapshot()
    assert one_by_one.snapshot() == {"counts": [2, 2, 1, 2], "sum": sum(values)}


def test_equal_values_are_taken_together() -> None:
    histogram = Histogram(BOUNDS)
    histogram.observe_all(np.full(4, 2.0))
    histogram.observe_all(np.empty(0))
    assert histogram.snapshot() == {"counts": [0, 4, 0, 0], "sum": 8.0}


class Run:
    """One scheduler with its meter, over a fake worker and a clock that steps."""

    def __init__(self, depth: int = 1, **config: Any) -> None:
        self.config = SchedulerConfig(**{"num_blocks": 64, "pipeline_depth": depth, **config})
        self.scheduler = Scheduler(self.config)
        self.meter = WorkerMeter(self.config.max_num_seqs)
        self.worker = FakeWorker(
            self.config.num_blocks,
            self.config.block_size,
            self.config.max_num_seqs,
            self.config.max_num_batched_tokens,
        )
        self.now = 0.0
        self.events: list[Any] = []
        self.plans: list[Any] = []

    def observe(self, events: list[Any]) -> None:
        self.events += events
        self.meter.observe(events)

    def add(self, request_id: str, num_prompt_tokens: int = 20, **params: Any) -> None:
        request = Request(
            request_id=request_id,
            prompt_token_ids=np.arange(num_prompt_tokens, dtype=np.int32) + 7 * len(self.events),
            params=SamplingParams(**params),
            seed=0,
        )
        self.observe(self.scheduler.add(request, self.now))

    def step(self) -> None:
        while len(self.plans) < self.config.pipeline_depth:
            plan = self.scheduler.plan(self.now)
            if plan is None:
                break
            self.meter.on_plan(plan, budget_tokens=self.scheduler.budget_tokens, seconds=0.25)
            self.plans.append(plan)
        self.now += 0.5 + 0.125 * (len(self.events) % 3)
        plan = self.plans.pop(0)
        result: StepResult = self.worker.execute(plan)
        events = self.scheduler.commit(result, self.now)
        self.meter.on_result(result, self.now, seconds=0.125)
        self.observe(events)

    def drain(self) -> None:
        while self.scheduler.has_work or self.plans:
            self.step()

    def expected_gaps(self) -> list[float]:
        """Between tokens of one branch, from the events alone."""
        last: dict[tuple[str, int], float] = {}
        gaps = []
        for event in self.events:
            if isinstance(event, TokensOut):
                key = event.request_id, event.branch
                if key in last:
                    gaps.append(event.time - last[key])
                last[key] = event.time
        return gaps


def counted(bounds: tuple[float, ...], values: list[float]) -> list[int]:
    counts = [0] * (len(bounds) + 1)
    for value in values:
        counts[bisect_left(bounds, value)] += 1
    return counts


@pytest.mark.parametrize("depth", [1, 2])
def test_times_between_tokens_are_those_of_the_events(depth: int) -> None:
    run = Run(depth)
    run.add("a", max_tokens=9)
    run.step()
    run.add("b", max_tokens=5, n=3)
    run.add("c", num_prompt_tokens=70, max_tokens=12)
    run.drain()
    gaps = run.expected_gaps()
    assert len(gaps) == 8 + 3 * 4 + 11
    told = run.meter.snapshot()["inter_token_latency"]
    assert told["sum"] == pytest.approx(sum(gaps))
    assert told["counts"] == counted(table.INTER_TOKEN_LATENCY.buckets, gaps)


def test_a_beam_search_has_no_times_between_tokens() -> None:
    run = Run()
    run.add("beam", max_tokens=4, beam_width=2, temperature=0)
    run.drain()
    assert sum(run.meter.snapshot()["inter_token_latency"]["counts"]) == 0


def test_requests_are_measured_from_their_arrival() -> None:
    run = Run(max_num_seqs=1)
    run.add("a", max_tokens=3)
    run.add("b", num_prompt_tokens=40, max_tokens=4)
    run.drain()
    told = run.meter.snapshot()
    ends = [event.metrics for event in run.events if isinstance(event, Finished)]
    assert [sum(told[key]["counts"]) for key in ("time_to_first_token", "queue_time", "request_latency")] == [
        2
    ] * 3
    assert told["time_to_first_token"]["sum"] == pytest.approx(sum(end.ttft_seconds for end in ends))
    assert told["queue_time"]["sum"] == pytest.approx(sum(end.queue_seconds for end in ends))
    assert told["request_latency"]["sum"] == pytest.approx(sum(end.total_seconds for end in ends))
    parts = told["queue_time"]["sum"] + told["prefill_time"]["sum"] + told["decode_time"]["sum"]
    assert parts == pytest.approx(told["request_latency"]["sum"])
    assert told["prompt_tokens"]["sum"] == 60
    assert told["output_tokens"]["sum"] == 7


def test_budget_and_scheduling_are_summed_over_steps() -> None:
    run = Run(max_num_batched_tokens=64)
    run.add("a", num_prompt_tokens=100, max_tokens=3)
    run.drain()
    told = run.meter.snapshot()
    steps = sum(told["step_time"]["counts"])
    counts = run.scheduler.snapshot()
    assert steps == counts["steps"] >= 4
    assert told["scheduling"] == {"plan": 0.25 * steps, "commit": 0.125 * steps}
    # The last plan only gives a row back.
    assert told["budget_tokens"] in (64 * steps, 64 * (steps - 1))
    assert counts["scheduled_tokens"] <= told["budget_tokens"]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("kind", ["recompute", "swap"])
def test_preemptions_cost_and_park(kind: str, depth: int) -> None:
    run = Run(
        depth,
        num_blocks=9,
        num_host_blocks=20,
        kv_bytes_per_block=1000,
        host_link_bytes_per_second=1e5,
        preemption=kind,
        max_model_len=200,
    )
    for name in "abc":
        run.add(name, num_prompt_tokens=30, max_tokens=40)
    run.drain()
    parked = [event for event in run.events if isinstance(event, Preempted)]
    assert parked
    told = run.meter.snapshot()
    other = {"recompute": "swap", "swap": "recompute"}[kind]
    price = {"recompute": "recompute_seconds", "swap": "swap_seconds"}[kind]
    assert told["preemption_cost"] == pytest.approx(
        {kind: sum(getattr(event, price) for event in parked), other: 0.0}
    )
    waited, since = 0.0, {}
    for event in run.events:
        if isinstance(event, Preempted):
            since[event.request_id] = event.time
        elif isinstance(event, Resumed):
            waited += event.time - since.pop(event.request_id)
    assert told["preemption_parked"] == pytest.approx({kind: waited, other: 0.0})
    # The pause counts as time between two tokens; where exactly it began is known to within a step.
    gaps, longest = run.expected_gaps(), 0.75
    assert sum(told["inter_token_latency"]["counts"]) == len(gaps)
    difference = sum(gaps) - told["inter_token_latency"]["sum"]
    assert abs(difference) <= longest * depth * len(parked)
