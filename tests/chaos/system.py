"""Workers, coordinator and ingress as processes of their own, and a supervisor that starts anew what dies.

The supervisor plays Ray's part: it sees an ended process and starts another after `RESTART_SECONDS`. It fails the run
when a process ends that nobody has killed, since nodes end by themselves only on a broken invariant.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from octavo.cluster.backend import HealthStatus
from octavo.cluster.coordinator_client import GrpcBackend
from octavo.protos.types import ModelInfo

from .node import MAX_MODEL_LEN, address_file

ROOT = Path(__file__).resolve().parents[2]
RESTART_SECONDS = 0.2
MODEL = ModelInfo(name="fake", vocab_size=64, max_model_len=MAX_MODEL_LEN, eos_token_ids=(2,))


async def open_backend(folder: Path) -> GrpcBackend:
    """A new ingress."""

    async def find() -> str:
        return address_file(folder).read_text()

    backend = GrpcBackend(MODEL, find)
    backend.start()
    await backend.wait_connected(60)
    return backend


async def until(condition: Callable[[], Any], seconds: float, what: str) -> None:
    """`condition` may return an awaitable."""
    deadline = time.monotonic() + seconds
    while True:
        value = condition()
        if asyncio.iscoroutine(value):
            value = await value
        if value:
            return
        assert time.monotonic() < deadline, f"waited {seconds:g} s in vain until {what}"
        await asyncio.sleep(0.02)


class System:
    """Use as an async context manager; `backend` is an ingress in this process."""

    backend: GrpcBackend

    def __init__(self, num_workers: int = 3, *, lease_seconds: float | None = None) -> None:
        self.num_workers = num_workers
        self._lease_seconds = lease_seconds
        self._folder_owner = tempfile.TemporaryDirectory(prefix="octavo-chaos-")
        self.folder = Path(self._folder_owner.name)
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._killed: dict[int, float] = {}
        """Process id -> seconds after which it is started anew."""
        self._supervisor: asyncio.Task[None] | None = None
        self.fault: str | None = None

    @property
    def worker_names(self) -> list[str]:
        return [f"worker-{number}" for number in range(self.num_workers)]

    async def __aenter__(self) -> System:
        for name in ("coordinator", *self.worker_names):
            self._start(name)
        self._supervisor = asyncio.create_task(self._supervise())
        try:
            await until(address_file(self.folder).exists, 60, "the coordinator is up")
            self.backend = await open_backend(self.folder)
            await self.ready(120)
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._supervisor is not None:
            self._supervisor.cancel()
        if hasattr(self, "backend"):
            await self.backend.close()
        for process in self._processes.values():
            process.kill()
            process.wait()
        self._folder_owner.cleanup()

    def start_ingress(self, num_requests: int) -> None:
        """One in a process of its own, that is not restarted."""
        self._start("ingress", "--requests", str(num_requests))

    def _start(self, name: str, *options: str) -> None:
        if name == "coordinator":
            options = ("--workers", str(self.num_workers))
            if self._lease_seconds is not None:
                options += ("--lease", str(self._lease_seconds))
        elif name != "ingress":
            options = ("--id", name)
        role = "worker" if name in self.worker_names else name
        env = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        # The nodes import `tests` from the folder they run in.
        env.pop("PYTHONSAFEPATH", None)
        with open(self.folder / f"{name}.log", "ab") as log:
            self._processes[name] = subprocess.Popen(
                [sys.executable, "-m", "tests.chaos.node", role, str(self.folder), *options],
                cwd=ROOT,
                env=env,
                stdout=log,
                stderr=log,
            )

    async def _supervise(self) -> None:
        while True:
            await asyncio.sleep(0.02)
            for name, process in list(self._processes.items()):
                if process.poll() is None:
                    continue
                if process.pid not in self._killed:
                    log = (self.folder / f"{name}.log").read_text()
                    self.fault = f"{name} ended by itself with {process.returncode}:\n{log[-3000:]}"
                    return
                if name == "ingress":
                    del self._processes[name]
                    continue
                await asyncio.sleep(self._killed[process.pid])
                self._start(name)

    # --- faults --------------------------------------------------------------------------------------------

    def kill(self, name: str, *, restart_seconds: float = RESTART_SECONDS) -> None:
        """kill -9; it is started anew."""
        process = self._processes[name]
        self._killed[process.pid] = restart_seconds
        process.send_signal(signal.SIGKILL)

    def freeze(self, name: str) -> None:
        self._processes[name].send_signal(signal.SIGSTOP)

    def wake(self, name: str) -> None:
        self._processes[name].send_signal(signal.SIGCONT)

    # --- what can be asked ---------------------------------------------------------------------------------

    async def ready(self, seconds: float = 60) -> None:
        """Until all workers serve."""

        async def check() -> bool:
            assert self.fault is None, self.fault
            return (await self.backend.health()).status is HealthStatus.READY

        await until(check, seconds, "all workers serve")

    async def worker_status(self, name: str) -> str:
        report = await self.backend.health()
        return next((worker["status"] for worker in report.workers if worker["worker_id"] == name), "unknown")

    async def idle(self, seconds: float = 20) -> None:
        """Until all workers serve and nothing runs, waits or holds a block. Invariants are checked by the nodes."""

        async def check() -> bool:
            stats = await self.backend.stats()
            held = ("unfinished", "running", "waiting", "swapped", "blocks_used")
            return not any(stats[key] for key in held)

        await self.ready()
        await until(check, seconds, "nothing is left")
        assert self.fault is None, self.fault
