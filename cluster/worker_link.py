"""One worker as the coordinator sees it: its stream, its scheduler, and the loop that turns the two.

Owns the tick (commit what came back, plan and send while the pipeline has room, then hand the deltas on) and
the worker's state. Knows nothing of ingresses or of other workers. One `WorkerLink` serves one attachment; a
worker that rejoins gets a new one, with a new epoch and an empty scheduler.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

from octavo.cluster.deltas import deltas_of
from octavo.cluster.forking import TokensSoFar, parent_of
from octavo.cluster.live import LastSteps
from octavo.cluster.metrics.meter import WorkerMeter
from octavo.cluster.worker_client import WorkerClient
from octavo.protos import wire
from octavo.protos.auth import OPEN, Access
from octavo.protos.errors import OctavoError, RequestFailedError, WorkerLostError
from octavo.protos.structured_output import StructuredOutput
from octavo.protos.types import OutputDelta, StepPlan, WorkerInfo
from octavo.scheduler.config import SchedulerConfig
from octavo.scheduler.events import Event
from octavo.scheduler.scheduler import Scheduler

logger = logging.getLogger(__name__)

OVERDUE_SECONDS_MIN = 10.0
OVERDUE_FACTOR = 10.0
"""A step is overdue, and its worker lost, after ten times its predicted time, at least 10 s."""
FIRST_STEPS = 8
FIRST_STEP_SECONDS_MAX = 120.0
"""While fewer steps than this were seen there is no prediction to trust, and a kernel may yet compile."""
GRAMMARS_MAX = 256
"""As many as a worker keeps."""
_CHECK_SECONDS = 1.0

SchedulerFactory = Callable[[WorkerInfo, int], Scheduler]
"""(what the worker is, epoch) -> its scheduler."""


def scheduler_config(info: WorkerInfo, epoch: int, options: dict[str, Any]) -> SchedulerConfig:
    """The limits of one worker's scheduler: what the worker found out, and what was configured."""
    return SchedulerConfig(
        num_blocks=info.num_blocks,
        num_host_blocks=info.num_host_blocks,
        kv_bytes_per_block=info.kv_bytes_per_block,
        host_link_bytes_per_second=info.host_link_bytes_per_second,
        block_size=info.block_size,
        max_num_seqs=info.max_num_seqs,
        max_model_len=info.model.max_model_len,
        pipeline_depth=wire.PIPELINE_DEPTH,
        epoch=epoch,
        **options,
    )


class WorkerLink:
    """Runs one attached worker until it is lost or `close` is called.

    `deliver` gets the deltas of a step, all requests together, and `observe` its events before; neither may wait.
    """

    def __init__(
        self,
        worker_id: str,
        address: str,
        epoch: int,
        *,
        make_scheduler: SchedulerFactory,
        deliver: Callable[[list[OutputDelta]], None],
        clock: Callable[[], float],
        lease_seconds: float | None = None,
        observe: Callable[[list[Event]], None] = lambda events: None,
        access: Access = OPEN,
        keepalive_seconds: float = wire.KEEPALIVE_SECONDS,
    ) -> None:
        self.worker_id = worker_id
        self.address = address
        self.epoch = epoch
        self.num_steps = 0
        self.last_steps = LastSteps()
        self._make_scheduler = make_scheduler
        self._deliver = deliver
        self._observe = observe
        self._clock = clock
        self._lease_seconds = lease_seconds
        self._access = access
        self._keepalive_seconds = keepalive_seconds
        self._wake = asyncio.Event()
        self._scheduler: Scheduler | None = None
        self._meter: WorkerMeter | None = None
        """Together with the scheduler."""
        self._client: WorkerClient | None = None
        self._grammars: OrderedDict[StructuredOutput, None] = OrderedDict()
        """Those that the worker was asked for last, and has answered."""
        self._sent: deque[tuple[float, float]] = deque()
        """(when sent, seconds after which it is overdue) of the plans in flight."""

    # --- what the coordinator calls ------------------------------------------------------------------------

    @property
    def serving(self) -> bool:
        """Attached, and not lost."""
        return self._client is not None and self._client.error is None and self._scheduler is not None

    @property
    def attached_once(self) -> bool:
        """Whether there is a scheduler to ask."""
        return self._scheduler is not None

    @property
    def scheduler(self) -> Scheduler:
        """Only after `serving` was true once."""
        assert self._scheduler is not None
        return self._scheduler

    @property
    def info(self) -> WorkerInfo:
        assert self._client is not None
        return self._client.info

    @property
    def stuck(self) -> bool:
        """Lost by silence or an overdue step: its process may live on, and nothing but its end will help."""
        return self._client is not None and self._client.stuck

    @property
    def seconds_since_heard(self) -> float | None:
        return None if self._client is None else self._clock() - self._client.last_heard

    def stats(self) -> dict[str, Any]:
        """Counts now, and totals of this life. Only after `serving` was true once."""
        assert self._meter is not None
        assert self._client is not None
        return {
            **self.scheduler.snapshot(),
            **self._meter.snapshot(),
            "wire_bytes": self._client.wire_bytes.snapshot(),
            "host_memory": self._client.host_memory,
        }

    def observe(self, events: list[Event]) -> None:
        """The scheduler said `events`."""
        if self._meter is not None:
            self._meter.observe(events)
        self._observe(events)

    def wake(self) -> None:
        """The scheduler has something new to plan."""
        self._wake.set()

    def abort(self, request_id: str) -> list[OutputDelta]:
        """End a request; its blocks are free at once. Unknown ids are ignored."""
        events = self.scheduler.abort(request_id, self._clock())
        self._wake.set()
        return self._told(events)

    def stop_branch(self, request_id: str, branch: int) -> list[OutputDelta]:
        """End one branch with STOP. Its last delta, none when it has ended."""
        events = self.scheduler.abort_branch(request_id, branch, self._clock())
        self._wake.set()
        return self._told(events)

    def tokens(self, request_id: str, branch: int) -> TokensSoFar:
        """Raises as `forking.parent_of`."""
        return TokensSoFar.of(*parent_of(self.scheduler, request_id, branch))

    async def compile_grammar(self, wanted: StructuredOutput) -> None:
        """See `WorkerClient.compile_grammar`."""
        assert self._client is not None
        try:
            await self._client.compile_grammar(wanted)
        except OctavoError:
            self._note_grammar(wanted)
            raise
        self._note_grammar(wanted)

    def _note_grammar(self, wanted: StructuredOutput) -> None:
        self._grammars[wanted] = None
        self._grammars.move_to_end(wanted)
        while len(self._grammars) > GRAMMARS_MAX:
            self._grammars.popitem(last=False)

    def has_grammar(self, wanted: StructuredOutput) -> bool:
        """Whether the worker has said that it is ready, or why it is not: then a request may go there and fail."""
        return wanted in self._grammars

    async def run(self) -> OctavoError:
        """Attach and serve. Returns why it ended; raises only when cancelled."""
        try:
            self._client = await WorkerClient.connect(
                self.address,
                epoch=self.epoch,
                on_event=self._wake.set,
                lease_seconds=self._lease_seconds,
                clock=self._clock,
                access=self._access,
                keepalive_seconds=self._keepalive_seconds,
            )
            scheduler = self._make_scheduler(self._client.info, self.epoch)
            num_cached = scheduler.adopt(self._client.cached_prefixes)
            self._client.cached_prefixes.clear()
            self._meter = WorkerMeter(scheduler.config.max_num_seqs)
            self._scheduler = scheduler
            logger.info(
                "worker %s joined at %s, epoch %d, with %d blocks in use before",
                self.worker_id,
                self.address,
                self.epoch,
                num_cached,
            )
            return await self._serve(self._client, scheduler, self._meter)
        except OctavoError as error:
            return error
        except Exception as error:
            # A bug in scheduling one worker's requests must end these, not the coordinator.
            logger.critical("the loop of worker %s failed", self.worker_id, exc_info=error)
            return RequestFailedError(f"scheduling failed: {type(error).__name__}: {error}")
        finally:
            if self._client is not None:
                await self._client.close()

    # --- the loop ------------------------------------------------------------------------------------------

    async def _serve(self, client: WorkerClient, scheduler: Scheduler, meter: WorkerMeter) -> OctavoError:
        checks = asyncio.create_task(self._check_overdue(client))
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                events: list[Event] = []
                for result in client.take_results():
                    now = self._clock()
                    events += scheduler.commit(result, now)
                    meter.on_result(result, now, seconds=self._clock() - now)
                    self.last_steps.on_result(result)
                    self._sent.popleft()
                    self.num_steps += 1
                if client.error is not None:
                    self._deliver(self._told(events))
                    return client.error
                events += scheduler.expire(self._clock())
                self._fill_pipeline(client, scheduler, meter)
                if events:
                    # After sending: the worker's next step should not wait for our fan-out.
                    self._deliver(self._told(events))
        finally:
            checks.cancel()
            await asyncio.gather(checks, return_exceptions=True)

    def _told(self, events: list[Event]) -> list[OutputDelta]:
        """What callers get to see of `events`, which are observed first."""
        self.observe(events)
        return deltas_of(events)

    def _fill_pipeline(self, client: WorkerClient, scheduler: Scheduler, meter: WorkerMeter) -> None:
        while client.num_in_flight < wire.PIPELINE_DEPTH:
            began = self._clock()
            plan = scheduler.plan(began)
            if plan is None:
                return
            now = self._clock()
            meter.on_plan(plan, budget_tokens=scheduler.budget_tokens, seconds=now - began)
            self.last_steps.on_plan(plan, budget_tokens=scheduler.budget_tokens)
            self._sent.append((now, self._overdue_seconds(plan, scheduler)))
            client.send(plan)

    def _overdue_seconds(self, plan: StepPlan, scheduler: Scheduler) -> float:
        if self.num_steps < FIRST_STEPS:
            return FIRST_STEP_SECONDS_MAX
        predicted = scheduler.step_time.step_seconds(
            num_tokens=plan.num_scheduled_tokens,
            num_rows=len(plan.rows),
            context_tokens=int(plan.start_positions.sum()) + plan.num_scheduled_tokens,
        )
        return max(OVERDUE_SECONDS_MIN, OVERDUE_FACTOR * predicted)

    async def _check_overdue(self, client: WorkerClient) -> None:
        """The heartbeat says that the process lives; this, that its device moves. Wakes the loop for deadlines too."""
        while True:
            await asyncio.sleep(_CHECK_SECONDS)
            if self.scheduler.next_deadline <= self._clock():
                # The running step may take long, and nothing else wakes the loop.
                self._wake.set()
            # The heartbeat's own count of seconds: a plan that waits behind another is not late.
            if self._sent and client.progress.running_seconds > self._sent[0][1]:
                step = client.progress.running_step_id
                client.give_up(
                    WorkerLostError(
                        f"step {step} of worker {self.worker_id} is overdue after "
                        f"{client.progress.running_seconds:.1f} s"
                    )
                )
