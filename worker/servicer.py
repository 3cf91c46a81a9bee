"""The worker's side of the step stream: who may plan, in which order plans run, and how far the device is.

Owns the compute thread, the epoch and the heartbeats. Knows the executor by a few names and nothing of
torch, ray or blocks. One asyncio loop reads, writes and beats; it never waits for the device, since every
plan runs on the one compute thread. Fencing: a stream names an epoch; a higher one takes the worker over, and
no plan of a lower one runs or is answered after that.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from octavo.protos import codec, wire, worker_pb2, worker_pb2_grpc
from octavo.protos.auth import OPEN, Access
from octavo.protos.errors import OctavoError, PlanRejectedError, ProtocolError, WorkerLostError
from octavo.protos.interface import LOOPBACK, Interface
from octavo.protos.structured_output import StructuredOutput
from octavo.protos.types import CachedPrefix, StepPlan, StepResult, WorkerInfo
from octavo.worker.host_memory import host_memory_bytes

logger = logging.getLogger(__name__)

SERVICE_NAME = worker_pb2.DESCRIPTOR.services_by_name["WorkerService"].full_name

OVERDUE_SECONDS_MIN = 10.0
OVERDUE_FACTOR = 10.0
"""A step is overdue, and the worker not SERVING, after ten times the longest step yet, at least 10 s."""
FIRST_STEP_SECONDS_MAX = 120.0
"""Until a step has finished there is nothing to compare with, and the first may compile kernels."""


class StepExecutor(Protocol):
    """What the servicer needs of `worker/executor.py`. All calls come from one thread."""

    info: WorkerInfo
    runs_ahead: bool
    """Whether `execute` takes `following`."""

    def execute(self, plan: StepPlan, following: StepPlan | None = None) -> StepResult:
        """Run one step. Raises `PlanRejectedError`, with nothing changed, for one that breaks the ledger.

        following: the plan whose turn is next, if it is there already; its work may begin.
        """
        ...

    def cached_prefixes(self) -> list[CachedPrefix]:
        """Tokens of the rows whose KV is in whole blocks."""
        ...

    def reset(self) -> None:
        """Forget all rows, as after start. Blocks keep their content."""
        ...

    def compile_grammar(self, wanted: StructuredOutput) -> Future[Any]:
        """Make `wanted` ready beside the steps, from any thread. The future raises what is wrong with it, an
        `OctavoError`; it may be ready already."""
        ...


def compute_thread() -> ThreadPoolExecutor:
    """The one thread that touches the executor."""
    return ThreadPoolExecutor(1, thread_name_prefix="octavo-compute")


class _Session:
    """One attached stream. Lives on the loop; the compute thread reads `closed` and sets `refused` only."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.next_step_id = 1
        self.finished_step_id = 0
        self.plans_in_flight = 0
        self.waiting: deque[StepPlan] = deque()
        """Accepted plans whose turn has not come: added by the loop, taken by the compute thread."""
        self.closed = False
        self.refused = False
        """A plan was refused; those sent behind it count on it, so none of them may run."""
        self.outgoing: asyncio.Queue[worker_pb2.StepResponse | None] = asyncio.Queue()
        """Bounded by what may be in it: results of plans in flight, a heartbeat, an error, None (the end)."""

    def close(self, error: OctavoError | None = None) -> None:
        if self.closed:
            return
        self.closed = True
        if error is not None:
            self.outgoing.put_nowait(worker_pb2.StepResponse(error=codec.encode_error(error)))
        self.outgoing.put_nowait(None)


class WorkerServicer(worker_pb2_grpc.WorkerServiceServicer):
    """Serves one executor to one coordinator at a time.

    `on_fatal` is called on the loop, once, with the exception after which the executor cannot be trusted:
    anything but a refused plan. The process should end then, and its supervisor start a clean one. `compute`:
    the thread that built the executor, for what is bound to a thread (current device, number of threads).
    """

    def __init__(
        self,
        executor: StepExecutor,
        *,
        on_fatal: Callable[[BaseException], None],
        compute: ThreadPoolExecutor | None = None,
        heartbeat_seconds: float = wire.HEARTBEAT_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.executor = executor
        self._on_fatal = on_fatal
        self._heartbeat_seconds = heartbeat_seconds
        self._clock = clock
        self._compute = compute or compute_thread()
        self._session: _Session | None = None
        self._epoch = 0
        self._failed = False
        # Written by the compute thread, read by the loop: one tuple, swapped whole.
        self._running: tuple[int, float] | None = None
        self._longest_step_seconds: float | None = None

    @property
    def attached(self) -> bool:
        """Whether a coordinator holds a stream."""
        return self._session is not None and not self._session.closed

    @property
    def making_progress(self) -> bool:
        """False once the device failed or its running step is overdue."""
        running = self._running
        if self._failed:
            return False
        if running is None:
            return True
        longest = self._longest_step_seconds
        limit = (
            FIRST_STEP_SECONDS_MAX if longest is None else max(OVERDUE_SECONDS_MIN, OVERDUE_FACTOR * longest)
        )
        return self._clock() - running[1] <= limit

    async def Step(self, request_iterator: Any, context: grpc.aio.ServicerContext) -> None:
        session = await self._attach(context)
        helpers: list[asyncio.Task[None]] = []
        try:
            cached = await self._reset_rows(session)
            if not session.closed:
                await context.write(worker_pb2.StepResponse(hello=self._hello(cached)))
            helpers.append(asyncio.create_task(self._read_plans(session, context)))
            helpers.append(asyncio.create_task(self._beat(session)))
            while (response := await session.outgoing.get()) is not None:
                await context.write(response)
        finally:
            session.close()
            for helper in helpers:
                helper.cancel()
            await asyncio.gather(*helpers, return_exceptions=True)

    async def CompileGrammar(
        self, request: worker_pb2.CompileGrammarRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.CompileGrammarResponse:
        try:
            wanted = codec.decode_structured_output(request.structured_output)
            await asyncio.wrap_future(self.executor.compile_grammar(wanted))
        except OctavoError as error:
            return worker_pb2.CompileGrammarResponse(error=codec.encode_error(error))
        return worker_pb2.CompileGrammarResponse()

    async def close(self) -> None:
        """End the stream and wait for the running step."""
        if self._session is not None:
            self._session.close(WorkerLostError("the worker shuts down"))
        await asyncio.get_running_loop().run_in_executor(None, self._compute.shutdown)

    async def _attach(self, context: grpc.aio.ServicerContext) -> _Session:
        first = await context.read()
        if first is grpc.aio.EOF or first.WhichOneof("command") != "attach":
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the first message must be Attach")
        attach = first.attach
        if attach.protocol_version != wire.PROTOCOL_VERSION:
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"this worker speaks protocol {wire.PROTOCOL_VERSION}, not {attach.protocol_version}",
            )
        if attach.epoch <= self._epoch:
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"epoch {attach.epoch} is not above {self._epoch}, which this worker has seen",
            )
        self._epoch = attach.epoch
        if self._session is not None:
            self._session.close(PlanRejectedError(f"epoch {attach.epoch} took this worker over"))
        session = self._session = _Session(attach.epoch)
        return session

    def _hello(self, cached: list[CachedPrefix]) -> worker_pb2.Hello:
        return worker_pb2.Hello(
            protocol_version=wire.PROTOCOL_VERSION,
            info=codec.encode_worker_info(self.executor.info),
            heartbeat_seconds=self._heartbeat_seconds,
            plans_in_flight_max=wire.PLANS_IN_FLIGHT_MAX,
            cached_prefixes=map(codec.encode_cached_prefix, cached),
        )

    async def _reset_rows(self, session: _Session) -> list[CachedPrefix]:
        """End the branches of the epoch before; what of them is in blocks is told to the new one."""

        def reset() -> list[CachedPrefix]:
            cached = self.executor.cached_prefixes()
            self.executor.reset()
            return cached

        # Waits behind the running step and behind plans of older epochs, which no longer run.
        try:
            return await asyncio.get_running_loop().run_in_executor(self._compute, reset)
        except Exception as error:
            logger.critical("epoch %d: the rows could not be reset", session.epoch, exc_info=error)
            session.close(WorkerLostError(f"reset failed: {type(error).__name__}: {error}"))
            self._fail(error)
            return []

    async def _read_plans(self, session: _Session, context: grpc.aio.ServicerContext) -> None:
        try:
            while not session.closed:
                request = await context.read()
                if request is grpc.aio.EOF:
                    session.close()
                    return
                self._accept(session, request)
        except OctavoError as error:
            session.close(error)

    def _accept(self, session: _Session, request: worker_pb2.StepRequest) -> None:
        if request.WhichOneof("command") != "plan":
            raise ProtocolError("after Attach only plans may follow")
        plan = codec.decode_plan(request.plan)
        if plan.epoch != session.epoch:
            raise PlanRejectedError(f"a plan of epoch {plan.epoch} on the stream of epoch {session.epoch}")
        if plan.step_id != session.next_step_id:
            raise PlanRejectedError(f"step {plan.step_id} where step {session.next_step_id} was due")
        if session.plans_in_flight >= wire.PLANS_IN_FLIGHT_MAX:
            raise PlanRejectedError(f"more than {wire.PLANS_IN_FLIGHT_MAX} plans in flight")
        for new in plan.new_sequences:
            if (wanted := new.request.params.structured_output) is not None:
                # A worker that joined later, or has let it go, begins before the plan's turn comes.
                self.executor.compile_grammar(wanted)
        session.next_step_id += 1
        session.plans_in_flight += 1
        session.waiting.append(plan)
        done = asyncio.get_running_loop().run_in_executor(self._compute, self._run, session, plan)
        done.add_done_callback(lambda future: self._answer(session, plan, future))

    def _run(self, session: _Session, plan: StepPlan) -> StepResult | None:
        """On the compute thread. None: the session ended before its turn came."""
        session.waiting.popleft()
        if session.closed or session.refused:
            return None
        started = self._clock()
        self._running = (plan.step_id, started)
        try:
            if self.executor.runs_ahead and session.waiting:
                result = self.executor.execute(plan, session.waiting[0])
            else:
                result = self.executor.execute(plan)
            self._longest_step_seconds = max(self._longest_step_seconds or 0.0, self._clock() - started)
            return result
        except PlanRejectedError:
            session.refused = True
            raise
        finally:
            self._running = None

    def _answer(self, session: _Session, plan: StepPlan, future: asyncio.Future[StepResult | None]) -> None:
        session.plans_in_flight -= 1
        if future.cancelled():
            return
        error = future.exception()
        if isinstance(error, PlanRejectedError):
            logger.error("epoch %d, step %d was refused: %s", session.epoch, plan.step_id, error)
            session.close(error)
        elif error is not None:
            logger.critical("epoch %d, step %d failed", session.epoch, plan.step_id, exc_info=error)
            session.close(WorkerLostError(f"step {plan.step_id} failed: {type(error).__name__}: {error}"))
            self._fail(error)
        elif (result := future.result()) is not None and not session.closed:
            session.finished_step_id = result.step_id
            session.outgoing.put_nowait(worker_pb2.StepResponse(result=codec.encode_result(result)))

    def _fail(self, error: BaseException) -> None:
        if not self._failed:
            self._failed = True
            self._on_fatal(error)

    async def _beat(self, session: _Session) -> None:
        while not session.closed:
            # A peer that does not read would pile heartbeats up; the last one says it all.
            if session.outgoing.empty():
                running = self._running
                total, available = host_memory_bytes()
                beat = worker_pb2.Heartbeat(
                    finished_step_id=session.finished_step_id,
                    host_memory_bytes=total,
                    host_memory_available_bytes=available,
                )
                if running is not None:
                    beat.running_step_id = running[0]
                    beat.running_seconds = max(0.0, self._clock() - running[1])
                session.outgoing.put_nowait(worker_pb2.StepResponse(heartbeat=beat))
            await asyncio.sleep(self._heartbeat_seconds)


class WorkerServer:
    """A gRPC server with the step stream and the standard health service, at a free port.

    Health is SERVING, for "" and for the service's name, while the worker makes progress. Started and stopped
    on one loop.
    """

    def __init__(
        self,
        executor: StepExecutor,
        *,
        interface: Interface = LOOPBACK,
        on_fatal: Callable[[BaseException], None],
        compute: ThreadPoolExecutor | None = None,
        heartbeat_seconds: float = wire.HEARTBEAT_SECONDS,
        keepalive_seconds: float = wire.KEEPALIVE_SECONDS,
        access: Access = OPEN,
    ) -> None:
        """`access`: what a coordinator must show."""
        self.servicer = WorkerServicer(
            executor, on_fatal=on_fatal, compute=compute, heartbeat_seconds=heartbeat_seconds
        )
        self._interface = interface
        self._access = access
        self._period_seconds = heartbeat_seconds
        self._health = health.aio.HealthServicer()
        self._server = access.server(keepalive_seconds)
        self._watch: asyncio.Task[None] | None = None

    async def start(self) -> str:
        """Returns the address, "host:port"."""
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(self.servicer, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        address = self._access.listen(self._server, self._interface)
        await self._publish()
        await self._server.start()
        self._watch = asyncio.create_task(self._watch_progress())
        return address

    async def stop(self) -> None:
        """Ends the stream after the running step and frees the port."""
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        await self._health.enter_graceful_shutdown()
        await self.servicer.close()
        await self._server.stop(grace=1.0)

    async def _publish(self) -> None:
        statuses = health_pb2.HealthCheckResponse.ServingStatus
        status = statuses.SERVING if self.servicer.making_progress else statuses.NOT_SERVING
        for name in (health.OVERALL_HEALTH, SERVICE_NAME):
            await self._health.set(name, status)

    async def _watch_progress(self) -> None:
        while True:
            await asyncio.sleep(self._period_seconds)
            await self._publish()
