"""The in-process driver: one thread that turns one scheduler and one worker, with neither Ray nor gRPC.

Owns the loop plan, execute, commit (DESIGN §1) and hands each request's deltas to whoever submitted it. All
calls are thread-safe and none waits for a step. Knows nothing of text.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol

from octavo.cluster.deltas import deltas_of
from octavo.cluster.forking import parent_of
from octavo.cluster.live import LastSteps, describe_worker
from octavo.cluster.metrics.meter import WorkerMeter
from octavo.cluster.timeline import Timelines
from octavo.protos.errors import OctavoError, RequestFailedError, UnavailableError
from octavo.protos.structured_output import StructuredOutput
from octavo.protos.types import FinishReason, Int32Array, OutputDelta, Request, StepPlan, StepResult
from octavo.scheduler.events import Event
from octavo.scheduler.scheduler import Scheduler

logger = logging.getLogger(__name__)

CLOSE_SECONDS_MAX = 30.0
"""How long `close` waits for the step that is running."""

Sink = Callable[[OutputDelta], None]
"""Gets the deltas of one request, on the loop's thread. Must not wait."""


class StepExecutor(Protocol):
    """What the loop needs of a worker; `octavo.worker.executor.Executor` is one."""

    def execute(self, plan: StepPlan) -> StepResult: ...

    def check_integrity(self) -> None: ...

    def compile_grammar(self, wanted: StructuredOutput) -> Future[Any]: ...


class EngineLoop:
    """Runs until `close`. `scheduler` must have `pipeline_depth` 1 and is only touched on the loop's thread."""

    def __init__(
        self, scheduler: Scheduler, executor: StepExecutor, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        assert scheduler.config.pipeline_depth == 1
        self._scheduler = scheduler
        self._executor = executor
        self._clock = clock
        self._timelines = Timelines(clock)
        self._last_steps = LastSteps()
        self._meter = WorkerMeter(scheduler.config.max_num_seqs)
        self._lock = threading.Lock()
        """Held around every touch of the scheduler, never around a step."""
        self._work = threading.Condition(self._lock)
        self._sinks: dict[str, Sink] = {}
        self._outbox: deque[OutputDelta] = deque()
        self._abandoned: deque[str] = deque()
        self._closing = False
        self._error: OctavoError | None = None
        self._thread = threading.Thread(target=self._run, name="octavo-engine", daemon=True)
        self._thread.start()

    def submit(self, request: Request, sink: Sink) -> None:
        """Queue a request; `sink` gets its deltas, the last with `request_finished`.

        Raises what `Scheduler.add` raises, or `UnavailableError` after `close` or a fatal error.
        """
        with self._work:
            self._check_open()
            self._observe(self._scheduler.add(request, self._clock()))
            self._sinks[request.request_id] = sink
            self._work.notify()

    def compile_grammar(self, wanted: StructuredOutput) -> Future[Any]:
        """Make ready what an output must match, beside the steps. The future raises what is wrong with it."""
        return self._executor.compile_grammar(wanted)

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> None:
        """End a request; its sink gets the last delta. Ids that have ended are ignored."""
        with self._work:
            self._outbox += self._told(self._scheduler.abort(request_id, self._clock(), reason))
            self._work.notify()

    def abandon(self, request_id: str) -> None:
        """`abort` at the next turn, without taking the lock: for finalizers, which the garbage collector may run on
        the thread that holds it."""
        self._abandoned.append(request_id)

    def stop_branch(self, request_id: str, branch: int) -> None:
        """End one branch whose text has met a stop string; its sink gets that branch's last delta."""
        with self._work:
            self._outbox += self._told(self._scheduler.abort_branch(request_id, branch, self._clock()))
            self._work.notify()

    def parent_of(self, request_id: str, branch: int) -> tuple[Request, Int32Array]:
        """See `forking.parent_of`."""
        with self._lock:
            return parent_of(self._scheduler, request_id, branch)

    def timeline(self, request_id: str) -> dict[str, Any]:
        """See `Timelines.describe`."""
        with self._lock:
            return self._timelines.describe(request_id)

    def live(self) -> dict[str, Any]:
        """A worker as `live.describe_worker` has it, and the latest requests."""
        with self._lock:
            worker = describe_worker(self._scheduler, self._last_steps)
            return {"worker": worker, "requests": self._timelines.latest()}

    @property
    def error(self) -> OctavoError | None:
        """What ended the loop, if anything has."""
        return self._error

    def snapshot(self) -> dict[str, Any]:
        """Counts now, and totals so far."""
        with self._lock:
            return {**self._scheduler.snapshot(), **self._meter.snapshot()}

    def check_integrity(self) -> None:
        """Raise `IntegrityError` on a broken invariant of the scheduler's or the worker's ledger."""
        with self._lock:
            self._scheduler.check_integrity()
            if not self._scheduler.num_in_flight:
                self._executor.check_integrity()

    def close(self) -> None:
        """Abort what is unfinished and end the thread. May be called twice."""
        with self._work:
            self._closing = True
            self._work.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join(CLOSE_SECONDS_MAX)

    def _check_open(self) -> None:
        if self._error is not None:
            raise UnavailableError(f"the engine has failed: {self._error.message}")
        if self._closing:
            raise UnavailableError("the engine is closed")

    def _run(self) -> None:
        try:
            while self._step():
                pass
            error: OctavoError = UnavailableError("the engine was closed")
        except Exception as cause:
            logger.critical("the engine's loop failed", exc_info=cause)
            error = (
                cause
                if isinstance(cause, OctavoError)
                else RequestFailedError(f"a step failed: {type(cause).__name__}: {cause}")
            )
            self._error = error
        with self._lock:
            events: list[Event] = []
            for request_id in self._scheduler.unfinished():
                events += self._scheduler.abort(request_id, self._clock(), FinishReason.ERROR)
            deltas = self._told(events, error)
        self._deliver(deltas)

    def _step(self) -> bool:
        """One turn: wait for work, plan, execute, commit, deliver. False when it is time to end."""
        with self._work:
            while not (self._closing or self._outbox or self._scheduler.has_work):
                self._work.wait()
            if self._closing:
                return False
            # While any of these runs the loop turns, so none waits for long.
            while self._abandoned:
                self._outbox += self._told(self._scheduler.abort(self._abandoned.popleft(), self._clock()))
            self._outbox += self._told(self._scheduler.expire(self._clock()))
            began = self._clock()
            plan = self._scheduler.plan(began)
            if plan is not None:
                budget = self._scheduler.budget_tokens
                self._meter.on_plan(plan, budget_tokens=budget, seconds=self._clock() - began)
                self._last_steps.on_plan(plan, budget_tokens=budget)
            outbox, self._outbox = self._outbox, deque()
        self._deliver(outbox)
        if plan is None:
            # Only deltas to hand out. Without rows to run there is no request left, so the next turn waits.
            return True
        result = self._executor.execute(plan)
        with self._lock:
            now = self._clock()
            events = self._scheduler.commit(result, now)
            self._meter.on_result(result, now, seconds=self._clock() - now)
            self._last_steps.on_result(result)
            deltas = self._told(events)
        self._deliver(deltas)
        return True

    def _told(self, events: list[Event], error: OctavoError | None = None) -> list[OutputDelta]:
        """What callers get to see of `events`, which are observed first. Under the lock."""
        self._observe(events)
        return deltas_of(events, error)

    def _observe(self, events: list[Event]) -> None:
        self._timelines.observe(events)
        self._meter.observe(events)

    def _deliver(self, deltas: list[OutputDelta] | deque[OutputDelta]) -> None:
        for delta in deltas:
            sink = self._sinks.get(delta.request_id)
            if sink is None:
                continue
            if delta.request_finished:
                del self._sinks[delta.request_id]
            try:
                sink(delta)
            except Exception:
                logger.exception("a sink of request %s failed", delta.request_id)
