"""Who may call a system's ports: who knows its token and, with mTLS, holds a certificate; over real sockets."""

import asyncio
import contextlib
import socket
import stat

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from octavo.cluster import ray_access
from octavo.cluster.coordinator_client import GrpcBackend
from octavo.cluster.coordinator_config import CoordinatorConfig
from octavo.cluster.coordinator_core import CoordinatorCore
from octavo.cluster.coordinator_servicer import CoordinatorServer
from octavo.cluster.service_config import ServiceConfig
from octavo.cluster.worker_client import WorkerClient
from octavo.protos import auth, coordinator_pb2, coordinator_pb2_grpc
from octavo.protos.auth import Access
from octavo.protos.errors import ConfigError, PlanRejectedError, UnavailableError, WorkerLostError
from octavo.protos.interface import Interface
from octavo.protos.tls import TlsFiles
from octavo.worker.servicer import WorkerServer

from .certificates import Authority
from .support import MODEL, FakeExecutor, collect, expected, make_request, run, until


class System:
    """A coordinator and a worker that share `access`. Ingresses bring their own."""

    def __init__(self, access: Access) -> None:
        self.core = CoordinatorCore(CoordinatorConfig(worker_ids=("worker-0",), access=access))
        self.server = CoordinatorServer(self.core)
        self.worker = WorkerServer(FakeExecutor(), on_fatal=lambda error: None, access=access)
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

    def backend(self, access):
        backend = GrpcBackend(MODEL, lambda: asyncio.sleep(0, self.address), access=access)
        self.backends.append(backend)
        backend.start()
        return backend

    async def attach(self, access):
        return await WorkerClient.connect(
            self.worker_address, epoch=1, on_event=lambda: None, access=access, deadline_seconds=5
        )

    async def check_serves(self, access):
        self.core.announce("worker-0", self.worker_address)
        await until(lambda: self.core.health().status.accepts_requests)
        backend = self.backend(access)
        request = make_request("a")
        assert await collect(backend, request) == {0: expected(request)}
        assert (await backend.health()).status.alive
        assert (await backend.stats())["requests"]["finished"] == 1


def test_with_the_token_all_is_as_ever():
    async def test():
        access = Access(auth.new_token())
        async with System(access) as system:
            await system.check_serves(access)

    run(test())


@pytest.mark.parametrize("token", [None, "", "wrong"], ids=["none", "empty", "wrong"])
def test_without_it_no_port_answers(token):
    async def test():
        async with System(Access(auth.new_token())) as system:
            with pytest.raises(PlanRejectedError, match="token"):
                await system.attach(Access(token))
            assert not system.worker.servicer.attached
            backend = system.backend(Access(token))
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
        async with System(Access("secret-of-this-system")) as system:
            assert "secret" not in repr(system.core.config)
            async with grpc.aio.insecure_channel(system.worker_address) as channel:
                reply = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
                assert reply.status == health_pb2.HealthCheckResponse.SERVING

    run(test())


def test_tokens_differ():
    assert auth.new_token() != auth.new_token()
    assert len(auth.new_token()) >= 32


class TestMutualTls:
    def test_with_certificates_of_one_authority_all_is_as_ever(self, tmp_path):
        async def test():
            access = Access(auth.new_token(), Authority(tmp_path).issue())
            async with System(access) as system:
                await system.check_serves(access)

        run(test())

    @pytest.mark.parametrize("who", ["in the clear", "of another authority", "of another name", "anonymous"])
    def test_whoever_has_none_is_not_heard_though_it_knows_the_token(self, tmp_path, who):
        async def test():
            token, authority = auth.new_token(), Authority(tmp_path)
            stranger = Authority(tmp_path, "stranger").issue()
            ours = authority.issue()
            # Of another name is the server here; the client sees it.
            served = authority.issue("somebody") if who == "of another name" else ours
            tls = {
                "in the clear": None,
                "of another authority": TlsFiles(stranger.cert, stranger.key, authority.path),
                "of another name": ours,
                "anonymous": ours,
            }[who]
            async with System(Access(token, served)) as system:
                access = Access(token, tls)
                if who == "anonymous":
                    credentials = grpc.ssl_channel_credentials((tmp_path / "authority.pem").read_bytes())
                    options = (("grpc.ssl_target_name_override", auth.TLS_NAME),)
                    async with grpc.aio.secure_channel(system.address, credentials, options) as channel:
                        stub = coordinator_pb2_grpc.CoordinatorServiceStub(channel)
                        with pytest.raises(grpc.aio.AioRpcError):
                            await stub.GetHealth(
                                coordinator_pb2.GetHealthRequest(), metadata=access.metadata, timeout=5
                            )
                    return
                with pytest.raises(WorkerLostError):
                    await system.attach(access)
                backend = system.backend(access)
                with pytest.raises(UnavailableError):
                    await backend.wait_connected(0.5)
                assert not system.worker.servicer.attached

        run(test())

    def test_all_three_files_or_none_and_each_must_be_there(self, tmp_path):
        files = Authority(tmp_path).issue()
        options = {"tls_cert": files.cert, "tls_key": files.key, "tls_ca": files.authority}
        assert ServiceConfig(**options).tls_files == files
        assert ServiceConfig().tls_files is None
        for name in options:
            for wrong in (None, "/does/not/exist"):
                with pytest.raises(ConfigError) as refusal:
                    ServiceConfig(**{**options, name: wrong})
                assert refusal.value.param == name


class TestInterfaces:
    """What is listened at, by the sockets themselves."""

    def test_nothing_but_loopback_unless_it_is_asked_for(self):
        async def test():
            before = set(_listening())
            async with System(Access()):
                opened = set(_listening()) - before
                assert len(opened) == 2
                assert {host for host, _ in opened} == {"127.0.0.1"}

        run(test())

    def test_a_node_listens_at_its_own_address_or_as_its_environment_says(self):
        assert Interface.of_node("10.0.0.7", {}) == Interface("10.0.0.7", "10.0.0.7")
        moved = Interface.of_node("10.0.0.7", {"OCTAVO_NODE_ADDRESS": "192.168.1.7"})
        assert moved == Interface("192.168.1.7", "192.168.1.7")
        behind = {"OCTAVO_NODE_ADDRESS": "192.168.1.7", "OCTAVO_BIND_ADDRESS": "10.0.0.7"}
        assert Interface.of_node("10.0.0.7", behind) == Interface("10.0.0.7", "192.168.1.7")
        assert Interface("::", "fd00::7").address(80) == "[fd00::7]:80"
        assert Interface("::", "fd00::7").any_port == "[::]:0"
        with pytest.raises(ConfigError, match="OCTAVO_NODE_ADDRESS"):
            Interface.of_node("10.0.0.7", {"OCTAVO_NODE_ADDRESS": "0.0.0.0"})

    def test_what_is_advertised_may_differ_from_what_is_listened_at(self):
        async def test():
            core = CoordinatorCore(CoordinatorConfig(worker_ids=("worker-0",)))
            server = CoordinatorServer(core, interface=Interface("127.0.0.1", "127.0.0.2"))
            before = set(_listening())
            address = await server.start()
            ((host, port),) = set(_listening()) - before
            assert host == "127.0.0.1"
            assert address == f"127.0.0.2:{port}"
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.2", port), timeout=1):
                raise AssertionError("listens at an address that it was not told to")
            await server.stop(0)

        run(test())


def _listening():
    connections = psutil.Process().net_connections("inet")
    # gRPC's sockets speak both families.
    return [
        (one.laddr.ip.removeprefix("::ffff:"), one.laddr.port)
        for one in connections
        if one.status == psutil.CONN_LISTEN
    ]


class TestRayToken:
    @pytest.fixture(autouse=True)
    def home(self, tmp_path, monkeypatch):
        monkeypatch.setenv("HOME", str(tmp_path))
        for name in (ray_access.MODE_VARIABLE, *ray_access.TOKEN_VARIABLES):
            # Set first, so that what the call sets is undone too.
            monkeypatch.setenv(name, "")
            monkeypatch.delenv(name)
        return tmp_path

    def test_a_local_ray_asks_for_a_token_that_only_its_user_can_read(self):
        ray_access.require_token()
        path = ray_access.token_path()
        token = path.read_text()
        assert len(token) == 64
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        path.chmod(0o644)
        ray_access.require_token()
        assert path.read_text() == token
        assert stat.S_IMODE(path.stat().st_mode) == 0o600

    def test_what_the_environment_says_is_left_alone(self, monkeypatch):
        monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
        ray_access.require_token()
        monkeypatch.setenv("RAY_AUTH_MODE", "token")
        monkeypatch.setenv("RAY_AUTH_TOKEN", "t" * 64)
        ray_access.require_token()
        assert not ray_access.token_path().exists()
