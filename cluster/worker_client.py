"""The coordinator's side of one worker's step stream.

Owns the channel, the plans that are out, and the judgement that the worker is lost. Knows nothing of
scheduling: plans go in, results come out, in order. All on one asyncio loop, and `send` never waits.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import grpc

from octavo.cluster.metrics.wire_bytes import WireBytes
from octavo.protos import codec, wire, worker_pb2, worker_pb2_grpc
from octavo.protos.auth import OPEN, Access
from octavo.protos.errors import OctavoError, PlanRejectedError, ProtocolError, WorkerLostError
from octavo.protos.structured_output import StructuredOutput
from octavo.protos.types import CachedPrefix, StepPlan, StepResult, WorkerInfo

logger = logging.getLogger(__name__)

_LEASE_TICKS = 10
"""The lease is counted in so many ticks of this loop. A loop that stalls counts one tick, not its length, so
that a busy coordinator does not take its own sleep for the worker's silence."""

_REFUSALS = (
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.UNAUTHENTICATED,
)


@dataclass(frozen=True, slots=True)
class Progress:
    """What the last message said of the device."""

    finished_step_id: int = 0
    running_step_id: int = 0
    """0: idle."""
    running_seconds: float = 0.0


def _from_status(address: str, error: grpc.aio.AioRpcError) -> OctavoError:
    detail = error.details() or error.code().name
    if error.code() in _REFUSALS:
        return PlanRejectedError(f"the worker at {address} refused: {detail}")
    return WorkerLostError(f"the stream to the worker at {address} broke: {detail}")


class WorkerClient:
    """One attached stream. Made by `connect`; ends with `close`, or by itself when the worker is lost.

    `on_event` is called on the loop whenever a result has arrived or `error` has been set.
    """

    def __init__(
        self,
        address: str,
        epoch: int,
        on_event: Callable[[], None],
        *,
        lease_seconds: float | None,
        keepalive_seconds: float,
        clock: Callable[[], float],
        access: Access,
    ) -> None:
        self.address = address
        self.epoch = epoch
        self.error: OctavoError | None = None
        """Set once, when the stream is over."""
        self.stuck = False
        """It is over because of silence or an overdue step: the process may live on and should be ended."""
        self.progress = Progress()
        self.host_memory: dict[str, int] | None = None
        """Bytes, "total" and "available", of the worker's machine; None: not heard yet."""
        self.wire_bytes = WireBytes()
        self.last_heard = clock()
        self.cached_prefixes: list[CachedPrefix] = []
        """What the worker had in its blocks when it was attached to."""
        self._info: WorkerInfo | None = None
        self._on_event = on_event
        self._clock = clock
        self._lease_seconds = lease_seconds
        self._silent_ticks = 0
        self._num_in_flight = 0
        self._outgoing: asyncio.Queue[worker_pb2.StepRequest] = asyncio.Queue()
        self._results: deque[StepResult] = deque()
        self._tasks: list[asyncio.Task[None]] = []
        self._channel = access.channel(address, keepalive_seconds)
        self._metadata = access.metadata
        self._stub = worker_pb2_grpc.WorkerServiceStub(self.wire_bytes.channel(self._channel))
        self._call = self._stub.Step(self._commands(), metadata=self._metadata)

    @classmethod
    async def connect(
        cls,
        address: str,
        *,
        epoch: int,
        on_event: Callable[[], None],
        lease_seconds: float | None = None,
        deadline_seconds: float = wire.CONNECT_DEADLINE_SECONDS,
        keepalive_seconds: float = wire.KEEPALIVE_SECONDS,
        clock: Callable[[], float] = time.monotonic,
        access: Access = OPEN,
    ) -> WorkerClient:
        """Attach to the worker at "host:port" for `epoch`. `lease_seconds` None: by its device.

        Raises `PlanRejectedError` when it has seen this epoch or a later one, or asks for another token, and
        `WorkerLostError` when it cannot be reached in time, or shows no certificate where one is asked for.
        """
        client = cls(
            address,
            epoch,
            on_event,
            lease_seconds=lease_seconds,
            keepalive_seconds=keepalive_seconds,
            clock=clock,
            access=access,
        )
        try:
            async with asyncio.timeout(deadline_seconds):
                hello = await client._attach()
        except TimeoutError:
            await client.close()
            raise WorkerLostError(
                f"the worker at {address} did not answer in {deadline_seconds:g} s"
            ) from None
        except BaseException:
            await client.close()
            raise
        client._start(hello)
        return client

    @property
    def info(self) -> WorkerInfo:
        assert self._info is not None, "set by connect"
        return self._info

    @property
    def num_in_flight(self) -> int:
        """Plans sent whose results have not arrived."""
        return self._num_in_flight

    def send(self, plan: StepPlan) -> None:
        """Queue a plan for the wire. Plans run in the order of these calls."""
        assert self._num_in_flight < wire.PLANS_IN_FLIGHT_MAX
        self._num_in_flight += 1
        self._outgoing.put_nowait(worker_pb2.StepRequest(plan=codec.encode_plan(plan)))

    async def compile_grammar(self, wanted: StructuredOutput) -> None:
        """Have the worker make `wanted` ready. Raises `InvalidRequestError` saying what is wrong with it, and
        `WorkerLostError` when there is no answer."""
        request = worker_pb2.CompileGrammarRequest(structured_output=codec.encode_structured_output(wanted))
        try:
            response = await self._stub.CompileGrammar(
                request, timeout=wire.COMPILE_DEADLINE_SECONDS, metadata=self._metadata
            )
        except grpc.aio.AioRpcError as error:
            raise _from_status(self.address, error) from None
        if response.HasField("error"):
            raise codec.decode_error(response.error)

    def take_results(self) -> list[StepResult]:
        """Results that arrived since the last call, in order of their plans."""
        taken = list(self._results)
        self._results.clear()
        return taken

    def give_up(self, error: OctavoError) -> None:
        """Judge the worker stuck, for a reason that the stream does not show."""
        self.stuck = self.error is None
        self._lose(error)

    async def close(self) -> None:
        """End the stream. The worker keeps its rows until the next epoch attaches."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._call.cancel()
        await self._channel.close()

    async def _commands(self) -> AsyncIterator[worker_pb2.StepRequest]:
        yield worker_pb2.StepRequest(
            attach=worker_pb2.Attach(protocol_version=wire.PROTOCOL_VERSION, epoch=self.epoch)
        )
        while True:
            yield await self._outgoing.get()

    async def _attach(self) -> worker_pb2.Hello:
        try:
            response = await self._call.read()
        except grpc.aio.AioRpcError as error:
            raise _from_status(self.address, error) from None
        if response is grpc.aio.EOF:
            raise WorkerLostError(f"the worker at {self.address} ended the stream before its hello")
        if response.WhichOneof("event") == "error":
            raise codec.decode_error(response.error)
        if response.WhichOneof("event") != "hello":
            raise ProtocolError(f"the worker at {self.address} did not begin with a hello")
        if response.hello.protocol_version != wire.PROTOCOL_VERSION:
            raise ProtocolError(
                f"the worker at {self.address} speaks protocol {response.hello.protocol_version}, "
                f"not {wire.PROTOCOL_VERSION}"
            )
        hello: worker_pb2.Hello = response.hello
        return hello

    def _start(self, hello: worker_pb2.Hello) -> None:
        self._info = codec.decode_worker_info(hello.info)
        self.cached_prefixes = list(map(codec.decode_cached_prefix, hello.cached_prefixes))
        lease = self._lease_seconds or wire.lease_seconds(self._info.device)
        self.last_heard = self._clock()
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._watch(lease))]

    async def _read(self) -> None:
        try:
            while True:
                response = await self._call.read()
                if response is grpc.aio.EOF:
                    raise WorkerLostError(f"the worker at {self.address} ended its stream")
                self._silent_ticks = 0
                self.last_heard = self._clock()
                self._take(response)
        except grpc.aio.AioRpcError as error:
            self._lose(_from_status(self.address, error))
        except OctavoError as error:
            self._lose(error)

    def _take(self, response: worker_pb2.StepResponse) -> None:
        event = response.WhichOneof("event")
        if event == "result":
            if self._num_in_flight == 0:
                raise ProtocolError(f"the worker at {self.address} answered a plan that was not sent")
            result = codec.decode_result(response.result)
            self._num_in_flight -= 1
            self._results.append(result)
            self._on_event()
            self.progress = Progress(result.step_id)
        elif event == "heartbeat":
            beat = response.heartbeat
            self.progress = Progress(beat.finished_step_id, beat.running_step_id, beat.running_seconds)
            if beat.host_memory_bytes:
                self.host_memory = {
                    "total": beat.host_memory_bytes,
                    "available": beat.host_memory_available_bytes,
                }
        elif event == "error":
            raise codec.decode_error(response.error)
        else:
            raise ProtocolError(f"unexpected {event} from the worker at {self.address}")

    async def _watch(self, lease_seconds: float) -> None:
        while self._silent_ticks <= _LEASE_TICKS:
            await asyncio.sleep(lease_seconds / _LEASE_TICKS)
            self._silent_ticks += 1
        self.give_up(WorkerLostError(f"the worker at {self.address} was silent for {lease_seconds:g} s"))

    def _lose(self, error: OctavoError) -> None:
        if self.error is None:
            self.error = error
            self._call.cancel()
            self._on_event()
