"""The coordinator's gRPC face: one stream for each ingress, and unary calls for what can be asked.

Owns the outgoing side of each ingress. All deltas that wait when the stream can take a message go as one, so
an ingress that keeps up gets one message a step and one that lags gets fewer, larger ones, up to a limit.
"""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import grpc

from octavo.cluster.advice import Advice
from octavo.cluster.backend import HealthReport, HealthStatus
from octavo.cluster.coordinator_core import CoordinatorCore
from octavo.protos import codec, coordinator_pb2, coordinator_pb2_grpc, wire
from octavo.protos.errors import OctavoError
from octavo.protos.interface import LOOPBACK, Interface
from octavo.protos.types import OutputDelta

logger = logging.getLogger(__name__)

PENDING_DELTAS_MAX = 65_536
"""An ingress that lets so many pile up has stopped reading; its stream ends and its requests with it."""

_HEALTH_TO_WIRE = {
    HealthStatus.LOADING: coordinator_pb2.HEALTH_STATUS_LOADING,
    HealthStatus.READY: coordinator_pb2.HEALTH_STATUS_READY,
    HealthStatus.DEGRADED: coordinator_pb2.HEALTH_STATUS_DEGRADED,
    HealthStatus.DRAINING: coordinator_pb2.HEALTH_STATUS_DRAINING,
    HealthStatus.DEAD: coordinator_pb2.HEALTH_STATUS_DEAD,
}
_HEALTH_FROM_WIRE = {wire_status: status for status, wire_status in _HEALTH_TO_WIRE.items()}


def encode_health(report: HealthReport) -> coordinator_pb2.GetHealthResponse:
    return coordinator_pb2.GetHealthResponse(
        status=_HEALTH_TO_WIRE[report.status],
        detail=report.detail,
        workers=(
            coordinator_pb2.WorkerHealth(
                worker_id=worker["worker_id"],
                status=_HEALTH_TO_WIRE[HealthStatus(worker["status"])],
                detail=worker["detail"],
                seconds_since_heard=worker["seconds_since_heard"],
                steps=worker["steps"],
            )
            for worker in report.workers
        ),
        advice=(coordinator_pb2.Advice(**one.as_dict()) for one in report.advice),
    )


def decode_health(message: coordinator_pb2.GetHealthResponse) -> HealthReport:
    """A status of a newer peer reads as LOADING: not known to be well."""
    return HealthReport(
        status=_HEALTH_FROM_WIRE.get(message.status, HealthStatus.LOADING),
        detail=message.detail,
        workers=tuple(
            {
                "worker_id": worker.worker_id,
                "status": _HEALTH_FROM_WIRE.get(worker.status, HealthStatus.LOADING).value,
                "detail": worker.detail,
                "seconds_since_heard": worker.seconds_since_heard
                if worker.HasField("seconds_since_heard")
                else None,
                "steps": worker.steps,
            }
            for worker in message.workers
        ),
        advice=tuple(Advice(one.code, one.reason, one.remedy) for one in message.advice),
    )


class _Ingress:
    """Outgoing side of one ingress stream; `CoordinatorCore` sees it as an `IngressSink`."""

    def __init__(self, ingress_id: str) -> None:
        self.ingress_id = ingress_id
        self.overflowed = False
        self.replaced = False
        self._deltas: list[OutputDelta] = []
        self._rejections: list[tuple[str, OctavoError]] = []
        self._ready = asyncio.Event()

    def push(self, deltas: list[OutputDelta]) -> None:
        self._deltas += deltas
        if len(self._deltas) > PENDING_DELTAS_MAX:
            self.overflowed = True
        self._ready.set()

    def reject(self, request_id: str, error: OctavoError) -> None:
        self._rejections.append((request_id, error))
        self._ready.set()

    def replace(self) -> None:
        self.replaced = True
        self._ready.set()

    async def take(self) -> list[coordinator_pb2.ServeResponse]:
        """Waits for something to send; all that is there then, the deltas as one message."""
        await self._ready.wait()
        self._ready.clear()
        deltas, self._deltas = self._deltas, []
        rejections, self._rejections = self._rejections, []
        messages = [
            coordinator_pb2.ServeResponse(
                rejection=coordinator_pb2.Rejection(request_id=request_id, error=codec.encode_error(error))
            )
            for request_id, error in rejections
        ]
        if deltas:
            messages.append(coordinator_pb2.ServeResponse(outputs=codec.encode_outputs(deltas)))
        return messages


class CoordinatorServicer(coordinator_pb2_grpc.CoordinatorServiceServicer):
    def __init__(self, core: CoordinatorCore) -> None:
        self._core = core
        self._ingresses: dict[str, _Ingress] = {}

    async def Serve(self, request_iterator: Any, context: grpc.aio.ServicerContext) -> None:
        first = await context.read()
        if first is grpc.aio.EOF or first.WhichOneof("command") != "hello" or not first.hello.ingress_id:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the first message must be IngressHello")
        if first.hello.protocol_version != wire.PROTOCOL_VERSION:
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"this coordinator speaks protocol {wire.PROTOCOL_VERSION}, not {first.hello.protocol_version}",
            )
        ingress = _Ingress(first.hello.ingress_id)
        previous = self._ingresses.get(ingress.ingress_id)
        if previous is not None:
            self._core.detach(previous)
            previous.replace()
        self._ingresses[ingress.ingress_id] = ingress
        logger.info("ingress %s joined", ingress.ingress_id)
        reader = asyncio.create_task(self._read(ingress, context))
        try:
            await context.write(coordinator_pb2.ServeResponse(hello=self._hello()))
            await self._write(ingress, reader, context)
        finally:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)
            self._core.detach(ingress)
            if self._ingresses.get(ingress.ingress_id) is ingress:
                del self._ingresses[ingress.ingress_id]
            logger.info("ingress %s left", ingress.ingress_id)

    async def GetTokens(
        self, request: coordinator_pb2.GetTokensRequest, context: grpc.aio.ServicerContext
    ) -> coordinator_pb2.GetTokensResponse:
        try:
            found = self._core.tokens(request.request_id, request.branch)
        except OctavoError as error:
            return coordinator_pb2.GetTokensResponse(error=codec.encode_error(error))
        return coordinator_pb2.GetTokensResponse(
            token_ids=codec.encode_ints(found.token_ids),
            num_prompt_tokens=found.num_prompt_tokens,
            cache_salt=found.cache_salt,
            adapter=found.adapter,
            uncached=not found.use_prefix_cache,
        )

    async def GetTimeline(
        self, request: coordinator_pb2.GetTimelineRequest, context: grpc.aio.ServicerContext
    ) -> coordinator_pb2.GetTimelineResponse:
        try:
            timeline = self._core.timeline(request.request_id)
        except OctavoError as error:
            return coordinator_pb2.GetTimelineResponse(error=codec.encode_error(error))
        return coordinator_pb2.GetTimelineResponse(timeline_json=json.dumps(timeline))

    async def GetLive(
        self, request: coordinator_pb2.GetLiveRequest, context: grpc.aio.ServicerContext
    ) -> coordinator_pb2.GetLiveResponse:
        return coordinator_pb2.GetLiveResponse(live_json=json.dumps(self._core.live()))

    async def CompileGrammar(
        self, request: coordinator_pb2.CompileGrammarRequest, context: grpc.aio.ServicerContext
    ) -> coordinator_pb2.CompileGrammarResponse:
        try:
            await self._core.compile_grammar(codec.decode_structured_output(request.structured_output))
        except OctavoError as error:
            return coordinator_pb2.CompileGrammarResponse(error=codec.encode_error(error))
        return coordinator_pb2.CompileGrammarResponse()

    async def GetStats(
        self, request: coordinator_pb2.GetStatsRequest, context: grpc.aio.ServicerContext
    ) -> coordinator_pb2.GetStatsResponse:
        return coordinator_pb2.GetStatsResponse(stats_json=json.dumps(self.stats()))

    def stats(self) -> dict[str, Any]:
        """Of the whole system, as ingresses are told."""
        return {**self._core.stats(), "ingresses": len(self._ingresses)}

    async def GetHealth(
        self, request: coordinator_pb2.GetHealthRequest, context: grpc.aio.ServicerContext
    ) -> coordinator_pb2.GetHealthResponse:
        return encode_health(self._core.health())

    def _hello(self) -> coordinator_pb2.CoordinatorHello:
        model = self._core.model
        return coordinator_pb2.CoordinatorHello(
            protocol_version=wire.PROTOCOL_VERSION,
            model=codec.encode_model_info(model) if model is not None else None,
            unfinished_requests_max=self._core.config.unfinished_requests_max,
        )

    async def _write(
        self, ingress: _Ingress, reader: asyncio.Task[None], context: grpc.aio.ServicerContext
    ) -> None:
        reader.add_done_callback(lambda _: ingress._ready.set())
        while True:
            for message in await ingress.take():
                await context.write(message)
            if ingress.overflowed:
                await context.abort(
                    grpc.StatusCode.RESOURCE_EXHAUSTED, f"{PENDING_DELTAS_MAX} outputs wait to be read"
                )
            if ingress.replaced:
                await context.abort(grpc.StatusCode.ABORTED, "a newer stream of this ingress took over")
            if reader.done():
                if (error := reader.exception()) is not None:
                    raise error
                return

    async def _read(self, ingress: _Ingress, context: grpc.aio.ServicerContext) -> None:
        while (message := await context.read()) is not grpc.aio.EOF:
            command = message.WhichOneof("command")
            if command in ("submit", "resume"):
                self._open(ingress, message)
            elif command == "abort":
                if message.abort.HasField("branch"):
                    self._core.stop_branch(message.abort.request_id, message.abort.branch, ingress)
                else:
                    self._core.abort(message.abort.request_id, ingress)
            else:
                await context.abort(
                    grpc.StatusCode.INVALID_ARGUMENT, f"unexpected {command} on a request stream"
                )

    def _open(self, ingress: _Ingress, message: coordinator_pb2.ServeRequest) -> None:
        try:
            if message.WhichOneof("command") == "submit":
                request_id = message.submit.request_id
                self._core.submit(codec.decode_request(message.submit), ingress)
            else:
                request_id = message.resume.request.request_id
                self._core.resume(*codec.decode_resume(message.resume), ingress)
        except OctavoError as error:
            ingress.reject(request_id, error)


class CoordinatorServer:
    """A gRPC server with the coordinator service, at a free port. Started and stopped on one loop."""

    def __init__(self, core: CoordinatorCore, *, interface: Interface = LOOPBACK) -> None:
        """Callers must have the access of `core.config`."""
        self._servicer = CoordinatorServicer(core)
        self._access = core.config.access
        self._interface = interface
        self._server = self._access.server(core.config.keepalive_seconds)

    async def start(self) -> str:
        """Returns the address, "host:port"."""
        coordinator_pb2_grpc.add_CoordinatorServiceServicer_to_server(self._servicer, self._server)
        address = self._access.listen(self._server, self._interface)
        await self._server.start()
        return address

    def stats(self) -> dict[str, Any]:
        """See `CoordinatorServicer.stats`."""
        return self._servicer.stats()

    async def stop(self, grace_seconds: float = 1.0) -> None:
        """Streams that are open after the grace time are cut."""
        await self._server.stop(grace_seconds)
