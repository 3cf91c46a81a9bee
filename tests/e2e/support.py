"""The served system in one process: worker, coordinator and HTTP over real sockets, without Ray."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

import uvicorn

from octavo.cluster.backend import HealthStatus
from octavo.cluster.coordinator_client import GrpcBackend
from octavo.cluster.coordinator_config import CoordinatorConfig
from octavo.cluster.coordinator_core import CoordinatorCore
from octavo.cluster.coordinator_servicer import CoordinatorServer
from octavo.cluster.openai.app import create_app
from octavo.cluster.openai.config import HttpConfig
from octavo.cluster.tokenizer import Tokenizer
from octavo.protos import wire
from octavo.worker.servicer import WorkerServer


@dataclass
class Served:
    core: CoordinatorCore
    backend: GrpcBackend
    url: str
    executor: Any

    async def idle_stats(self) -> dict[str, Any]:
        """The only worker's counts, once nothing runs (rule R2)."""
        for _ in range(200):
            stats = self.core.stats()["workers"]["worker-0"]
            if not (stats["running"] or stats["waiting"] or stats["blocks_used"]):
                return stats
            await asyncio.sleep(0.02)
        raise AssertionError(f"not idle: {stats}")


@contextlib.asynccontextmanager
async def served(
    executor: Any,
    tokenizer: Tokenizer,
    *,
    http: HttpConfig | None = None,
    keepalive_seconds: float = wire.KEEPALIVE_SECONDS,
    heartbeat_seconds: float = wire.HEARTBEAT_SECONDS,
    lease_seconds: float = 60.0,
    **scheduler_options: Any,
) -> AsyncIterator[Served]:
    """`executor` behind gRPC, a coordinator and an HTTP port of its own."""
    config = CoordinatorConfig(
        worker_ids=("worker-0",),
        scheduler_options=scheduler_options,
        lease_seconds=lease_seconds,
        keepalive_seconds=keepalive_seconds,
    )
    core = CoordinatorCore(config)
    coordinator = CoordinatorServer(core)
    address = await coordinator.start()
    worker = WorkerServer(
        executor,
        on_fatal=lambda error: None,
        keepalive_seconds=keepalive_seconds,
        heartbeat_seconds=heartbeat_seconds,
    )
    core.announce("worker-0", await worker.start())

    async def find() -> str:
        return address

    backend = GrpcBackend(executor.info.model, find, keepalive_seconds=keepalive_seconds)
    backend.start()
    await backend.wait_connected(10)
    app = create_app(backend, tokenizer, http)
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning"))
    serving = asyncio.create_task(server.serve())
    try:
        while not server.started or core.health().status is not HealthStatus.READY:
            await asyncio.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        if app.state.jobs is not None:
            app.state.jobs.start()
        yield Served(core, backend, f"http://127.0.0.1:{port}", executor)
    finally:
        server.should_exit = True
        await serving
        if app.state.jobs is not None:
            await app.state.jobs.close()
        await backend.close()
        await core.close()
        await worker.stop()
        await coordinator.stop(0)


class Background:
    """The served system on a loop of its own, so that clients may block and do not hold it up. `scheduler`: fields of
    `SchedulerConfig`; `http`: of `HttpConfig`."""

    def __init__(
        self,
        executor: Any,
        tokenizer: Tokenizer,
        *,
        scheduler: Mapping[str, Any] | None = None,
        **http: Any,
    ) -> None:
        self._executor, self._tokenizer = executor, tokenizer
        self._http = HttpConfig(**http)
        self._scheduler = {"max_num_batched_tokens": 256, **(scheduler or {})}
        self._up = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()))

    async def _main(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        async with served(self._executor, self._tokenizer, http=self._http, **self._scheduler) as self.system:
            self._up.set()
            await self._stop.wait()

    def __enter__(self) -> Background:
        self._thread.start()
        assert self._up.wait(60)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(60)

    def idle_stats(self) -> dict[str, Any]:
        return asyncio.run_coroutine_threadsafe(self.system.idle_stats(), self._loop).result(30)
