"""A coordinator with fake workers and ingresses in one process, over real sockets."""

from octavo.cluster.backend import HealthStatus
from octavo.cluster.coordinator_client import GrpcBackend
from octavo.cluster.coordinator_config import CoordinatorConfig
from octavo.cluster.coordinator_core import CoordinatorCore
from octavo.cluster.coordinator_servicer import CoordinatorServer
from octavo.worker.servicer import WorkerServer

from .support import MODEL, FakeExecutor, until, worker_info


class Cluster:
    """A coordinator, `num_workers` fake workers, and ingresses as they are asked for."""

    model = MODEL

    def __init__(self, num_workers=1, *, info=None, step_seconds=0.0, budget=512, **config):
        self.worker_ids = tuple(f"worker-{number}" for number in range(num_workers))
        options = {"max_num_batched_tokens": budget, **config.pop("scheduler_options", {})}
        self.config = CoordinatorConfig(
            worker_ids=self.worker_ids, scheduler_options=options, **{"lease_seconds": 1.0, **config}
        )
        self.info = info or {}
        self.budget = budget
        self.step_seconds = step_seconds
        self.servers = {}
        self.executors = {}
        self.addresses = {}
        self.backends = []
        self.stuck = []

    async def __aenter__(self):
        await self.start_coordinator()
        for worker_id in self.worker_ids:
            await self.start_worker(worker_id)
        await until(lambda: self.core.health().status is HealthStatus.READY)
        return self

    async def __aexit__(self, *_):
        for executor in self.executors.values():
            self.release(executor)
        for backend in self.backends:
            await backend.close()
        await self.core.close()
        for server in self.servers.values():
            await server.stop()
        await self.server.stop(0)

    async def start_coordinator(self):
        self.core = CoordinatorCore(self.config, on_stuck=self.stuck.append)
        self.server = CoordinatorServer(self.core)
        self.address = await self.server.start()

    def make_executor(self, worker_id):
        return FakeExecutor(
            worker_info(worker_id, **self.info), budget=self.budget, step_seconds=self.step_seconds
        )

    async def start_worker(self, worker_id):
        executor = self.make_executor(worker_id)
        server = WorkerServer(executor, on_fatal=lambda error: None, heartbeat_seconds=0.05)
        self.executors[worker_id], self.servers[worker_id] = executor, server
        self.addresses[worker_id] = await server.start()
        self.core.announce(worker_id, self.addresses[worker_id])

    async def kill_worker(self, worker_id):
        self.release(self.executors[worker_id])
        await self.servers.pop(worker_id).stop()

    def release(self, executor):
        """Let its running step end."""
        executor.gate.set()

    async def backend(self, **options):
        async def find():
            return self.address

        backend = GrpcBackend(self.model, find, **options)
        backend.start()
        await backend.wait_connected(10)
        self.backends.append(backend)
        return backend

    def scheduler(self, worker_id="worker-0"):
        return self.core._slots[worker_id].link.scheduler

    async def idle(self):
        """Rule R2, once nothing is unfinished."""
        await until(lambda: self.core.num_unfinished == 0)
        for worker_id in self.worker_ids:
            await until(lambda worker_id=worker_id: not self.scheduler(worker_id).has_work)
            self.scheduler(worker_id).check_integrity()
            snapshot = self.scheduler(worker_id).snapshot()
            assert snapshot["running"] == snapshot["waiting"] == snapshot["blocks_used"] == 0
