"""Only who knows a system's token may call its ports; over real sockets."""

import asyncio

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from octavo.cluster.coordinator_client import GrpcBackend
from octavo.cluster.coordinator_core import CoordinatorConfig, CoordinatorCore
from octavo.cluster.coordinator_servicer import CoordinatorServer
from octavo.cluster.worker_client import WorkerClient
from octavo.protos import auth, coordinator_pb2, coordinator_pb2_grpc
from octavo.protos.errors import PlanRejectedError, UnavailableError
from octavo.worker.servicer import WorkerServer

from .support import MODEL, FakeExecutor, collect, expected, make_request, run, until


class System:
    """A coordinator and a worker, both with `token`; the coordinator's calls carry it too."""

    def __init__(self, token: str) -> None:
        self.core = CoordinatorCore(CoordinatorConfig(worker_ids=("worker-0",), token=token))
        self.server = CoordinatorServer(self.core, host="127.0.0.1")
        self.worker = WorkerServer(FakeExecutor(), host="127.0.0.1", on_fatal=lambda error: None, token=token)
        self.backends: list[GrpcBackend] = []

    async def __aenter__(self):
        self.address = await self.server.start()
        self.worker_address = await self.worker.start()
        return self

    async def __aexit__(self, *_):
        for backend in self.backends:
            await backend.close()
        await self.core.close()
        await self.worker.stop()
        await self.server.stop(0)

    def backend(self, token):
        backend = GrpcBackend(MODEL, lambda: asyncio.sleep(0, self.address), token=token)
        self.backends.append(backend)
        backend.start()
        return backend


def test_with_the_token_all_is_as_ever():
    async def test():
        async with System(auth.new_token()) as system:
            system.core.announce("worker-0", system.worker_address)
            await until(lambda: system.core.health().status.accepts_requests)
            backend = system.backend(system.core.config.token)
            request = make_request("a")
            assert await collect(backend, request) == {0: expected(request)}
            assert (await backend.health()).status.alive
            assert (await backend.stats())["requests"]["finished"] == 1

    run(test())


@pytest.mark.parametrize("token", [None, "", "wrong"], ids=["none", "empty", "wrong"])
def test_without_it_no_port_answers(token):
    async def test():
        async with System(auth.new_token()) as system:
            with pytest.raises(PlanRejectedError, match="token"):
                await WorkerClient.connect(
                    system.worker_address, epoch=1, on_event=lambda: None, token=token, deadline_seconds=5
                )
            assert not system.worker.servicer.attached
            backend = system.backend(token)
            with pytest.raises(UnavailableError):
                await backend.wait_connected(0.5)
            async with grpc.aio.insecure_channel(system.address) as channel:
                stub = coordinator_pb2_grpc.CoordinatorServiceStub(channel)
                for call in (
                    stub.GetStats(coordinator_pb2.GetStatsRequest()),
                    stub.GetTokens(coordinator_pb2.GetTokensRequest(request_id="a")),
                ):
                    with pytest.raises(grpc.aio.AioRpcError) as refusal:
                        await call
                    assert refusal.value.code() is grpc.StatusCode.UNAUTHENTICATED

    run(test())


def test_health_needs_none_and_the_token_is_not_shown():
    async def test():
        async with System("secret-of-this-system") as system:
            assert "secret" not in repr(system.core.config)
            async with grpc.aio.insecure_channel(system.worker_address) as channel:
                reply = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
                assert reply.status == health_pb2.HealthCheckResponse.SERVING

    run(test())


def test_tokens_differ():
    assert auth.new_token() != auth.new_token()
    assert len(auth.new_token()) >= 32
