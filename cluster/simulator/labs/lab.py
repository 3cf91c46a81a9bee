"""What a lab returns, and how it drives one scheduler in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from typing import Any

import numpy as np

from octavo.cluster.simulator.fleet import END_OF_TIME
from octavo.cluster.simulator.worker import SimulatedWorker
from octavo.protos.types import Request, SamplingParams
from octavo.scheduler.config import SchedulerConfig
from octavo.scheduler.events import Event
from octavo.scheduler.scheduler import Scheduler
from octavo.scheduler.step_time import StepTimeModel


@dataclass(frozen=True)
class LabResult:
    """`figures` are what `--json` prints; `parameters` all that they follow from."""

    title: str
    parameters: dict[str, Any]
    figures: dict[str, Any]
    text: str
    """Three sentences."""
    svg: str = field(repr=False)


def request(name: str, num_prompt_tokens: int, num_output_tokens: int, *, n: int = 1, at: int = 0) -> Request:
    """A prompt that shares nothing with those of another `at`."""
    first = 1_000_000 * at
    return Request(
        request_id=name,
        prompt_token_ids=np.arange(first, first + num_prompt_tokens, dtype=np.int32),
        params=SamplingParams(n=n, max_tokens=num_output_tokens),
        seed=0,
    )


@dataclass
class Drive:
    """A run of one scheduler: what happened and how long each step took."""

    scheduler: Scheduler
    events: list[Event] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)


def drive(
    config: SchedulerConfig,
    device: StepTimeModel,
    arrivals: Iterable[tuple[float, Request]],
    *,
    prepare: Callable[[Scheduler], None] = lambda scheduler: None,
    watch: Callable[[float, Scheduler], None] = lambda now, scheduler: None,
    end: float = END_OF_TIME,
) -> Drive:
    """Run requests that come at given times, in order, until all have ended or `end`; `watch` sees the scheduler after
    each arrival."""
    scheduler = Scheduler(config, StepTimeModel.of_coefficients(*device.coefficients))
    prepare(scheduler)
    run = Drive(scheduler)
    worker = SimulatedWorker(
        scheduler,
        device,
        on_events=run.events.extend,
        on_steps=lambda seconds, count, rows: run.step_seconds.extend([seconds / count] * count),
    )
    for now, group in groupby(arrivals, key=itemgetter(0)):
        worker.run_until(now)
        for _, one in group:
            scheduler.add(one, now)
        worker.wake(now)
        watch(now, scheduler)
    worker.run_until(end)
    return run
