"""The ingress's side of the request stream: a `Backend` whose work happens at the coordinator.

Owns one stream for the whole process, which carries every request, and finds the coordinator again after it was
restarted. Its requests survive that: each is resumed over the new stream from what its caller has got. Knows
nothing of HTTP, and of Ray only what the `find` callable hides. All on one asyncio loop.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc

from octavo.cluster.backend import HealthReport, HealthStatus
from octavo.cluster.coordinator_servicer import decode_health
from octavo.cluster.delivered import Delivered
from octavo.cluster.forking import TokensSoFar
from octavo.cluster.metrics.wire_bytes import WireBytes
from octavo.protos import codec, coordinator_pb2, coordinator_pb2_grpc, wire
from octavo.protos.auth import OPEN, Access
from octavo.protos.errors import (
    DeadlineExceededError,
    IntegrityError,
    InvalidRequestError,
    OctavoError,
    ProtocolError,
    UnavailableError,
)
from octavo.protos.structured_output import StructuredOutput
from octavo.protos.types import ModelInfo, OutputDelta, Request

logger = logging.getLogger(__name__)

RECONNECT_SECONDS_MIN = 0.05
RECONNECT_SECONDS_MAX = 0.5
"""All clients of this process wait for it, and an attempt costs next to nothing."""
CONNECT_WAIT_SECONDS = 5.0
"""A request that comes while the stream is down waits so long for it before it is refused."""
RESUME_WAIT_SECONDS = 60.0
"""Requests that run outlive a lost coordinator for so long; then they end with an error."""
DEADLINE_GRACE_SECONDS = 0.25
"""The schedulers end what is late, and can say how far it was; who hears nothing from them ends it this much later."""
_OWN_FAULT = (grpc.StatusCode.ABORTED, grpc.StatusCode.RESOURCE_EXHAUSTED)
"""The coordinator ended the stream because of this ingress: it was replaced, or does not read. No use in going on."""

FindCoordinator = Callable[[], Awaitable[str]]
"""Where the coordinator is now, "host:port". May raise anything while there is none."""

_Item = OutputDelta | OctavoError


@dataclass(slots=True, eq=False)
class _Call:
    """One unfinished request."""

    so_far: Delivered
    replies: asyncio.Queue[_Item] = field(default_factory=asyncio.Queue)
    """Bounded by the outputs that the request may have."""
    stopping: set[int] = field(default_factory=set)
    """Branches whose text is complete; a coordinator that is lost may not have heard."""


class GrpcBackend:
    """A `Backend` over one coordinator stream. `start` it on the loop that uses it, `close` it there."""

    def __init__(
        self,
        model: ModelInfo,
        find: FindCoordinator,
        *,
        keepalive_seconds: float = wire.KEEPALIVE_SECONDS,
        deadline_seconds: float = wire.RPC_DEADLINE_SECONDS,
        resume_wait_seconds: float = RESUME_WAIT_SECONDS,
        clock: Callable[[], float] = time.monotonic,
        access: Access = OPEN,
    ) -> None:
        self.model = model
        self._find = find
        self._keepalive_seconds = keepalive_seconds
        self._deadline_seconds = deadline_seconds
        self._ingress_id = uuid.uuid4().hex
        self._resume_wait_seconds = resume_wait_seconds
        self._clock = clock
        self._access = access
        self._wire_bytes = WireBytes()
        self._lost_at = clock()
        self._calls: dict[str, _Call] = {}
        """By request id, in order of arrival. One that has its terminal reply is not in it."""
        self._commands: asyncio.Queue[coordinator_pb2.ServeRequest] | None = None
        """Of the stream that is up."""
        self._stub: coordinator_pb2_grpc.CoordinatorServiceStub | None = None
        """While the stream is up."""
        self._was_up = False
        self._up = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    # --- Backend -------------------------------------------------------------------------------------------

    async def submit(self, request: Request) -> AsyncIterator[OutputDelta]:
        """See `Backend.submit`. A lost coordinator is a pause; one that does not come back in `resume_wait_seconds` an
        `UnavailableError`."""
        request_id = request.request_id
        if request_id in self._calls:
            raise InvalidRequestError(f"request id {request_id!r} is in use", param="request_id")
        so_far = Delivered(request, self._clock())
        commands = await self._stream(so_far)
        call = self._calls[request_id] = _Call(so_far)
        commands.put_nowait(coordinator_pb2.ServeRequest(submit=codec.encode_request(request)))
        expiry = None
        if so_far.deadline is not None:
            seconds = so_far.deadline - self._clock() + DEADLINE_GRACE_SECONDS
            expiry = asyncio.get_running_loop().call_later(seconds, self._expire, request)
        try:
            while True:
                item = await call.replies.get()
                if isinstance(item, OctavoError):
                    raise item
                yield item
                if item.request_finished:
                    return
        finally:
            if expiry is not None:
                expiry.cancel()
            # Still there: the caller left before the end.
            if self._calls.get(request_id) is call:
                del self._calls[request_id]
                if self._commands is not None:
                    self._commands.put_nowait(_abort(request_id, "the caller left"))

    async def tokens(self, request_id: str, branch: int) -> TokensSoFar:
        """See `Backend.tokens`. Raises `UnavailableError` while the coordinator cannot be asked."""
        await self._stream()
        response = await self._ask(
            "GetTokens", coordinator_pb2.GetTokensRequest(request_id=request_id, branch=branch)
        )
        if response.HasField("error"):
            raise codec.decode_error(response.error)
        return TokensSoFar(
            token_ids=codec.decode_ints("token_ids", response.token_ids),
            num_prompt_tokens=response.num_prompt_tokens,
            cache_salt=response.cache_salt,
            adapter=response.adapter,
            use_prefix_cache=not response.uncached,
        )

    async def compile_grammar(self, wanted: StructuredOutput) -> None:
        """See `Backend.compile_grammar`. Raises `UnavailableError` while the coordinator cannot be asked."""
        await self._stream()
        response = await self._ask(
            "CompileGrammar",
            coordinator_pb2.CompileGrammarRequest(structured_output=codec.encode_structured_output(wanted)),
            wire.COMPILE_DEADLINE_SECONDS,
        )
        if response.HasField("error"):
            raise codec.decode_error(response.error)

    async def timeline(self, request_id: str) -> dict[str, Any]:
        """See `Backend.timeline`. Raises `UnavailableError` while the coordinator cannot be asked."""
        response = await self._ask("GetTimeline", coordinator_pb2.GetTimelineRequest(request_id=request_id))
        if response.HasField("error"):
            raise codec.decode_error(response.error)
        timeline: dict[str, Any] = json.loads(response.timeline_json)
        return timeline

    def stop_branch(self, request_id: str, branch: int) -> None:
        """See `Backend.stop_branch`. While the stream is down it is remembered."""
        call = self._calls.get(request_id)
        if call is None:
            return
        call.stopping.add(branch)
        if self._commands is not None:
            self._commands.put_nowait(_stop(request_id, branch))

    async def health(self) -> HealthReport:
        """LOADING before the coordinator was first found, DEAD while it cannot be asked."""
        if self._stub is None:
            status = HealthStatus.DEAD if self._was_up else HealthStatus.LOADING
            return HealthReport(
                status=status,
                detail=f"the coordinator cannot be reached; {len(self._calls)} requests wait for it",
            )
        try:
            return decode_health(
                await self._stub.GetHealth(
                    coordinator_pb2.GetHealthRequest(),
                    timeout=self._deadline_seconds,
                    metadata=self._access.metadata,
                )
            )
        except grpc.aio.AioRpcError as error:
            return HealthReport(
                status=HealthStatus.DEAD,
                detail=f"the coordinator does not answer: {error.details() or error.code().name}",
            )

    async def live(self) -> dict[str, Any]:
        """Raises `UnavailableError` while the coordinator cannot be asked."""
        response = await self._ask("GetLive", coordinator_pb2.GetLiveRequest())
        live: dict[str, Any] = json.loads(response.live_json)
        return live

    async def stats(self) -> dict[str, Any]:
        """Raises `UnavailableError` while the coordinator cannot be asked."""
        response = await self._ask("GetStats", coordinator_pb2.GetStatsRequest())
        stats: dict[str, Any] = json.loads(response.stats_json)
        return {**stats, "ingress_wire_bytes": self._wire_bytes.snapshot()}

    async def _ask(self, method: str, request: Any, deadline_seconds: float | None = None) -> Any:
        if self._stub is None:
            raise UnavailableError("the coordinator cannot be reached")
        try:
            return await getattr(self._stub, method)(
                request, timeout=deadline_seconds or self._deadline_seconds, metadata=self._access.metadata
            )
        except grpc.aio.AioRpcError as error:
            raise UnavailableError(
                f"the coordinator does not answer: {error.details() or error.code().name}"
            ) from None

    # --- life ----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Connect in the background and stay connected."""
        assert self._task is None, "started twice"
        self._task = asyncio.create_task(self._stay_connected())

    async def wait_connected(self, timeout_seconds: float) -> None:
        """Raises `UnavailableError` when there is no stream in time."""
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._up.wait()
        except TimeoutError:
            raise UnavailableError("the coordinator cannot be reached; try again in a few seconds") from None

    async def close(self) -> None:
        """Ends the stream; requests that are unfinished then get an `UnavailableError`."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        self._fail_all(UnavailableError("this ingress shuts down"))

    def _expire(self, request: Request) -> None:
        """Its time is up, and the coordinator has not said so: it is away, or waits for a step that takes long."""
        if self._commands is not None:
            self._commands.put_nowait(_abort(request.request_id, "its timeout has passed"))
        self._end(request.request_id, _late(request))

    async def _stream(self, so_far: Delivered | None = None) -> asyncio.Queue[coordinator_pb2.ServeRequest]:
        """Of the coordinator, once it is there. Raises `UnavailableError` when it does not come, and
        `DeadlineExceededError` when the request of `so_far` has no time to wait for it."""
        if self._commands is None:
            seconds = CONNECT_WAIT_SECONDS
            if so_far is not None and so_far.deadline is not None:
                seconds = min(seconds, max(0.0, so_far.deadline - self._clock()))
            try:
                await self.wait_connected(seconds)
            except UnavailableError:
                if so_far is not None and seconds < CONNECT_WAIT_SECONDS:
                    raise _late(so_far.request) from None
                raise
        assert self._commands is not None, "set before `_up` is"
        return self._commands

    async def _stay_connected(self) -> None:
        pause = RECONNECT_SECONDS_MIN
        told = ""
        while True:
            address = "an unknown address"
            trouble = ""
            try:
                address = await self._find()
                if await self._run_stream(address):
                    pause = RECONNECT_SECONDS_MIN
            except OctavoError as error:
                trouble = f"no coordinator at {address}: {error.message}"
            except Exception as error:
                # `find` asks a cluster that may be in any state; what matters is to ask again.
                trouble = f"no coordinator found: {type(error).__name__}: {error}"
            if trouble and trouble != told:
                logger.warning(trouble)
            told = trouble
            if self._clock() - self._lost_at > self._resume_wait_seconds:
                self._fail_all(
                    UnavailableError(f"the coordinator did not come back in {self._resume_wait_seconds:g} s")
                )
            await asyncio.sleep(pause)
            pause = min(2 * pause, RECONNECT_SECONDS_MAX)

    async def _run_stream(self, address: str) -> bool:
        """Serves one stream to its end. True if it ever was up."""
        commands: asyncio.Queue[coordinator_pb2.ServeRequest] = asyncio.Queue()
        commands.put_nowait(
            coordinator_pb2.ServeRequest(
                hello=coordinator_pb2.IngressHello(
                    protocol_version=wire.PROTOCOL_VERSION, ingress_id=self._ingress_id
                )
            )
        )
        was_up = False
        reason = "the coordinator ended the stream"
        async with self._access.channel(address, self._keepalive_seconds) as channel:
            stub = coordinator_pb2_grpc.CoordinatorServiceStub(self._wire_bytes.channel(channel))
            call = stub.Serve(_drain(commands), metadata=self._access.metadata)
            try:
                await self._check_hello(address, call)
                self._resume_all(commands)
                self._stub, self._commands = stub, commands
                self._was_up = was_up = True
                self._up.set()
                while (response := await call.read()) is not grpc.aio.EOF:
                    self._dispatch(response)
            except grpc.aio.AioRpcError as error:
                reason = f"the coordinator is lost: {error.details() or error.code().name}"
                if error.code() in _OWN_FAULT:
                    self._fail_all(UnavailableError(reason))
            finally:
                self._up.clear()
                self._stub = self._commands = None
                if was_up:
                    self._lost_at = self._clock()
                call.cancel()
        if not was_up:
            raise UnavailableError(reason)
        logger.warning("stream to the coordinator at %s ended: %s", address, reason)
        return was_up

    async def _check_hello(self, address: str, call: Any) -> None:
        try:
            async with asyncio.timeout(wire.CONNECT_DEADLINE_SECONDS):
                response = await call.read()
        except TimeoutError:
            raise UnavailableError(f"the coordinator at {address} did not answer") from None
        if response is grpc.aio.EOF or response.WhichOneof("event") != "hello":
            raise ProtocolError(f"the coordinator at {address} did not begin with a hello")
        if response.hello.protocol_version != wire.PROTOCOL_VERSION:
            raise ProtocolError(
                f"the coordinator at {address} speaks protocol {response.hello.protocol_version}, "
                f"not {wire.PROTOCOL_VERSION}"
            )
        if response.hello.HasField("model"):
            served = codec.decode_model_info(response.hello.model)
            if (served.name, served.vocab_size) != (self.model.name, self.model.vocab_size):
                raise ProtocolError(
                    f"the coordinator serves {served.name}; this ingress is for {self.model.name}"
                )

    def _dispatch(self, response: coordinator_pb2.ServeResponse) -> None:
        event = response.WhichOneof("event")
        if event == "outputs":
            for message in response.outputs.deltas:
                call = self._calls.get(message.request_id)
                # Outputs that were under way when the caller left.
                if call is not None:
                    self._take(call, codec.decode_delta(message))
        elif event == "rejection":
            self._end(response.rejection.request_id, codec.decode_error(response.rejection.error))
        else:
            raise ProtocolError(f"unexpected {event} from the coordinator")

    def _take(self, call: _Call, delta: OutputDelta) -> None:
        try:
            call.so_far.take(delta)
        except IntegrityError as error:
            self._end(delta.request_id, error)
            if self._commands is not None:
                self._commands.put_nowait(_abort(delta.request_id, error.message))
            return
        if delta.request_finished:
            self._end(delta.request_id, delta)
        else:
            call.replies.put_nowait(delta)

    def _end(self, request_id: str, reply: _Item) -> None:
        """The terminal reply of a request, unless it has had one."""
        call = self._calls.pop(request_id, None)
        if call is not None:
            call.replies.put_nowait(reply)

    def _resume_all(self, commands: asyncio.Queue[coordinator_pb2.ServeRequest]) -> None:
        """Tell a new stream of all that runs. Whatever the coordinator of the old one had made of it is void."""
        now = self._clock()
        for request_id, call in self._calls.items():
            resume = codec.encode_resume(call.so_far.request, call.so_far.resume(now))
            commands.put_nowait(coordinator_pb2.ServeRequest(resume=resume))
            for branch in sorted(call.stopping):
                if not call.so_far.has_ended(branch):
                    commands.put_nowait(_stop(request_id, branch))
        if self._calls:
            logger.warning("%d requests go on over a new stream", len(self._calls))

    def _fail_all(self, error: OctavoError) -> None:
        for request_id in list(self._calls):
            self._end(request_id, error)


def _late(request: Request) -> DeadlineExceededError:
    return DeadlineExceededError(
        f"the request did not finish within its timeout of {request.timeout_seconds:.3g} s"
    )


def _stop(request_id: str, branch: int) -> coordinator_pb2.ServeRequest:
    return _abort(request_id, "a stop string was met", branch)


def _abort(request_id: str, reason: str, branch: int | None = None) -> coordinator_pb2.ServeRequest:
    return coordinator_pb2.ServeRequest(
        abort=coordinator_pb2.Abort(request_id=request_id, reason=reason, branch=branch)
    )


async def _drain(
    commands: asyncio.Queue[coordinator_pb2.ServeRequest],
) -> AsyncIterator[coordinator_pb2.ServeRequest]:
    while True:
        yield await commands.get()
