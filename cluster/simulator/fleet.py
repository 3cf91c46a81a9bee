"""A trace through a whole fleet in virtual time: the Router and Schedulers of production, simulated workers.

Arrivals are the only things that workers have in common, so the fleet moves from one to the next: every worker takes
in what has ended by then, and the router sees all of them at that very moment. A fleet that scales itself stops at
every second in between, too, for its policy to look.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from octavo.cluster.simulator.hardware import Device
from octavo.cluster.simulator.history import system
from octavo.cluster.simulator.traces import Trace, TraceRequest
from octavo.cluster.simulator.worker import SimulatedWorker
from octavo.protos.errors import ConfigError, OverloadedError, RequestTooLargeError
from octavo.protos.types import Request, SamplingParams
from octavo.scheduler.autoscaling import Autoscaler, AutoscalingConfig, FleetLoad
from octavo.scheduler.config import SchedulerConfig
from octavo.scheduler.events import (
    Admitted,
    Event,
    Finished,
    Repredicted,
    RepredictionCause,
    TokensOut,
)
from octavo.scheduler.router import Routed, Router
from octavo.scheduler.scheduler import Scheduler

END_OF_TIME = 1e9
"""Seconds; later than anything ends."""
WAITING_MAX = 1_000_000
"""A simulated queue holds whatever comes, so that saturation shows as waiting."""
SCALING_PERIOD_SECONDS = 1.0
"""Between two looks of the policy at a fleet that scales itself."""


@dataclass(frozen=True, kw_only=True)
class FleetConfig:
    """Raises `ConfigError` naming the option."""

    device: Device
    num_workers: int = 1
    policy: str = "predicted_ttft"
    block_size: int = 16
    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 256
    max_model_len: int = 131_072
    pipeline_depth: int = 2
    host_blocks: int = 0
    prefix_cache: bool = True
    preemption: str = "auto"
    system: str = "octavo"
    """One of `history.SYSTEMS`: how much of the history of such servers is switched on."""
    itl_target: float | None = None
    kv_tokens: int | None = None
    """Instead of the device's."""
    seed: int = 0
    collapse: bool = True
    """Take many decode steps at once where nothing is decided; the result is the same."""
    autoscaling: AutoscalingConfig | None = None
    """None: always `num_workers`; else so many at the beginning."""
    worker_start_seconds: float = 60.0
    """From asking for a worker to its first step."""

    def __post_init__(self) -> None:
        if self.num_workers < 1:
            raise ConfigError(f"workers must be at least 1, got {self.num_workers}", param="workers")
        if system(self.system).reserves and not self.reservations:
            raise ConfigError(
                f"system {self.system} reserves max_model_len ({self.max_model_len}) tokens for each request, and a "
                f"worker has {self.pool_tokens}",
                param="max_model_len",
            )
        if not self.worker_start_seconds >= 0:
            raise ConfigError(
                f"worker_start_seconds must be at least 0, got {self.worker_start_seconds!r}",
                param="worker_start_seconds",
            )
        self.scheduler_config()

    @property
    def pool_tokens(self) -> int:
        return self.kv_tokens or self.device.kv_tokens

    @property
    def reservations(self) -> int:
        """Requests that run at once on a worker where each has room for the longest."""
        return min(self.max_num_seqs, self.pool_tokens // self.max_model_len)

    def scheduler_config(self) -> SchedulerConfig:
        block_size = self.max_model_len if system(self.system).reserves else self.block_size
        options: dict[str, Any] = {
            "num_blocks": max(1, self.pool_tokens // block_size),
            "block_size": block_size,
            "max_num_seqs": self.max_num_seqs,
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "max_model_len": self.max_model_len,
            "pipeline_depth": self.pipeline_depth,
            "preemption": self.preemption,
            "num_host_blocks": self.host_blocks,
            "kv_bytes_per_block": self.device.kv_bytes_per_token * block_size,
            "host_link_bytes_per_second": self.device.host_link_bytes_per_second,
            "prefix_cache": self.prefix_cache,
            "itl_target": self.itl_target,
            "max_waiting": WAITING_MAX,
            "max_waiting_tokens": WAITING_MAX * self.max_model_len,
        }
        return SchedulerConfig(**options | system(self.system).scheduler)


@dataclass(slots=True)
class Outcome:
    """What became of one request. Times in seconds, -1 where there is none."""

    at_seconds: float
    num_prompt_tokens: int
    num_output_tokens: int
    worker: int = -1
    predicted_ttft_seconds: float = -1.0
    foreseen_cached_tokens: int = 0
    """When it was routed: cached then, or promised by its turn."""
    predicted_cached_tokens: int = 0
    """By its reservation at its turn: what was cached when it was routed, as changed by `repredictions`."""
    repredictions: tuple[RepredictionCause, ...] = ()
    index_exact: bool = True
    """What the index knew of its worker then was what that worker's own tree held, block for block."""
    cached_tokens: int = 0
    """When it was admitted."""
    ttft_seconds: float = -1.0
    total_seconds: float = -1.0
    num_preemptions: int = 0

    @property
    def itl_seconds(self) -> float:
        """Mean time between its tokens; 0 for a single one."""
        if self.num_output_tokens < 2:
            return 0.0
        return (self.total_seconds - self.ttft_seconds) / (self.num_output_tokens - 1)


@dataclass(frozen=True, slots=True)
class SizeChange:
    """From `at_seconds` on so many workers are wanted."""

    at_seconds: float
    num_workers: int
    reason: str


@dataclass(slots=True)
class RunRecord:
    """What a run leaves: outcomes in order of arrival, and what its steps were."""

    config: FleetConfig
    trace_name: str
    outcomes: list[Outcome]
    refused: int = 0
    step_seconds: array[float] = field(default_factory=lambda: array("d"))
    step_tokens: array[float] = field(default_factory=lambda: array("d"))
    """Tokens that came at intervals of so many `step_seconds`."""
    busy_seconds: list[float] = field(default_factory=list)
    end_seconds: float = 0.0
    index_bytes: int = 0
    schedulers: list[dict[str, Any]] = field(default_factory=list)
    """Each worker's `Scheduler.snapshot()` at its end."""
    size_changes: list[SizeChange] = field(default_factory=list)
    worker_seconds: float = 0.0
    """Of all workers together, from when each was asked for until it went."""


@dataclass(slots=True)
class _Life:
    """Of one worker, in seconds."""

    asked_at: float
    ready_at: float
    leaving: bool = False
    """It takes nothing new."""
    gone_at: float = END_OF_TIME


class Simulation:
    """One run. `on_progress(done)` after each arrival."""

    def __init__(
        self, config: FleetConfig, trace: Trace, *, on_progress: Callable[[int], None] = lambda done: None
    ) -> None:
        self._config = config
        self._trace = trace
        self._on_progress = on_progress
        self._router = Router(config.seed, policy=system(config.system).policy or config.policy)
        self._record = RunRecord(config, trace.name, [])
        self._open: dict[str, Outcome] = {}
        self.workers: dict[str, SimulatedWorker] = {}
        """All that ever were."""
        self._lives: dict[str, _Life] = {}
        self._position: dict[str, int] = {}
        self._autoscaler = None if config.autoscaling is None else Autoscaler(config.autoscaling)
        first = trace.requests[0].at_seconds if trace.requests else 0.0
        self._next_look = first
        for _ in range(config.num_workers):
            self._add_worker(first, first)
        self.schedulers = {name: worker.scheduler for name, worker in self.workers.items()}
        """Of the workers that take requests."""

    def run(self) -> RunRecord:
        for number, one in enumerate(self._trace.requests):
            self._look_until(one.at_seconds)
            self._run_workers(one.at_seconds)
            self._arrive(number, one)
            self._on_progress(number + 1)
        while self._autoscaler is not None and self._open:
            self._look_until(self._next_look)
        self._run_workers(END_OF_TIME)
        record = self._record
        end = record.end_seconds
        record.worker_seconds = sum(min(life.gone_at, end) - life.asked_at for life in self._lives.values())
        record.busy_seconds = [worker.busy_seconds for worker in self.workers.values()]
        record.schedulers = [worker.scheduler.snapshot() for worker in self.workers.values()]
        record.index_bytes = self._router.index_bytes
        assert not self._open, "a request has neither ended nor been refused"
        return record

    def _run_workers(self, now: float) -> None:
        for worker in self.workers.values():
            if worker.next_seconds <= now:
                worker.run_until(now)

    # --- a fleet that scales itself ------------------------------------------------------------------------

    def _add_worker(self, asked_at: float, ready_at: float) -> None:
        config = self._config
        most = config.autoscaling.workers_max if config.autoscaling else config.num_workers
        position = len(self.workers)
        name = f"w{position:0{len(str(max(most, config.num_workers) - 1))}}"
        self.workers[name] = SimulatedWorker(
            Scheduler(config.scheduler_config(), config.device.step_time()),
            config.device.step_time(),
            on_events=self._take,
            on_steps=self._count_steps,
            collapse=config.collapse,
        )
        self._lives[name] = _Life(asked_at, ready_at)
        self._position[name] = position

    def _look_until(self, now: float) -> None:
        while self._autoscaler is not None and self._next_look <= now:
            self._run_workers(self._next_look)
            self._scale(self._autoscaler, self._next_look)
            self._next_look += SCALING_PERIOD_SECONDS

    def _scale(self, autoscaler: Autoscaler, now: float) -> None:
        """Who has loaded joins, who leaves goes once it has nothing left, and the policy is asked for a number."""
        for name, life in self._lives.items():
            if life.leaving and life.gone_at == END_OF_TIME and not self.workers[name].scheduler.has_work:
                life.gone_at = now
        self._join_ready(now)
        expected = [life for life in self._lives.values() if not life.leaving]
        stats = [worker.scheduler.stats for worker in self.workers.values()]
        load = FleetLoad.of(
            self._router.outlook(self.schedulers),
            num_expected=len(expected),
            num_serving=len(self.schedulers),
            prompt_tokens=sum(one.scheduled_tokens - one.sampled_tokens for one in stats),
            preemptions=sum(sum(one.preemptions.values()) for one in stats),
        )
        decision = autoscaler.observe(load, now)
        if decision.num_workers == len(expected):
            return
        self._record.size_changes.append(SizeChange(now, decision.num_workers, decision.reason))
        for life in expected[decision.num_workers :]:
            life.leaving = True
        for _ in range(decision.num_workers - len(expected)):
            self._add_worker(now, now + self._config.worker_start_seconds)
        self._join_ready(now)

    def _join_ready(self, now: float) -> None:
        self.schedulers = {
            name: self.workers[name].scheduler
            for name, life in self._lives.items()
            if life.ready_at <= now and not life.leaving
        }

    # --- requests ------------------------------------------------------------------------------------------

    def _arrive(self, number: int, one: TraceRequest) -> None:
        request = Request(
            request_id=str(number),
            prompt_token_ids=one.prompt(number),
            params=SamplingParams(max_tokens=one.num_output_tokens),
            seed=0,
        )
        outcome = Outcome(one.at_seconds, one.num_prompt_tokens, one.num_output_tokens)
        try:
            worker_id, events = self._router.route(request, self.schedulers, one.at_seconds)
        except (RequestTooLargeError, OverloadedError):
            self._record.refused += 1
            return
        routed = events[0]
        assert isinstance(routed, Routed)
        outcome.worker = self._position[worker_id]
        outcome.predicted_ttft_seconds = routed.scores[0].ttft_seconds
        outcome.foreseen_cached_tokens = routed.scores[0].expected_tokens
        outcome.predicted_cached_tokens = routed.scores[0].cached_tokens
        in_blocks = routed.scores[0].cached_tokens // self._config.block_size
        outcome.index_exact = routed.scores[0].indexed_blocks == in_blocks
        self._record.outcomes.append(outcome)
        self._open[request.request_id] = outcome
        self.workers[worker_id].wake(one.at_seconds)

    def _take(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, TokensOut):
                if event.metrics is not None:
                    self._open[event.request_id].ttft_seconds = event.metrics.ttft_seconds
            elif isinstance(event, Finished):
                outcome = self._open.pop(event.request_id)
                assert event.metrics is not None
                outcome.total_seconds = event.metrics.total_seconds
                outcome.num_preemptions = event.metrics.num_preemptions
                self._record.end_seconds = max(self._record.end_seconds, event.time)
            elif isinstance(event, Repredicted):
                outcome = self._open[event.request_id]
                if event.causes:
                    outcome.predicted_cached_tokens = event.found_tokens
                outcome.repredictions = event.causes
            elif isinstance(event, Admitted):
                self._open[event.request_id].cached_tokens = event.cached_tokens

    def _count_steps(self, seconds: float, count: int, rows: int) -> None:
        self._record.step_seconds.append(seconds / count)
        self._record.step_tokens.append(count * rows)


def quantile(values: list[float], share: float) -> float:
    """The smallest value that `share` of all do not exceed; 0 of none."""
    return float(np.quantile(values, share, method="inverted_cdf")) if values else 0.0
