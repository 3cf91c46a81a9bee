"""The Ray shell of one worker: builds the executor, serves the step stream, says where it is.

Owns the life of the process. No token passes through Ray: after the announcement the coordinator holds a gRPC
stream to this process, and Ray only watches it and starts it anew when it ends. Knows the coordinator by one
remote method.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path

import ray

import octavo
from octavo.protos.auth import OPEN, Access
from octavo.protos.errors import StartupError
from octavo.protos.interface import LOOPBACK, Interface
from octavo.protos.types import WorkerInfo
from octavo.worker.config import WorkerConfig
from octavo.worker.servicer import StepExecutor, WorkerServer, compute_thread

logger = logging.getLogger(__name__)

ANNOUNCE_SECONDS = 0.25
"""While nobody is attached the worker says so this often."""
FAREWELL_SECONDS = 0.5
"""Between a fatal error and the end of the process: time for the stream to carry the reason away."""
REBUILD_SECONDS_MAX = 30.0
"""Longest pause between attempts to load a model that has loaded before; the device may be short of memory
until what is left of the old process is gone."""

BuildExecutor = Callable[[WorkerConfig], StepExecutor]


def build_executor(config: WorkerConfig) -> StepExecutor:
    """The real one; imported late because it brings torch and transformers."""
    from octavo.worker.build import build_executor as build

    return build(config)


def hide_checkout() -> None:
    """Take the repository root off `sys.path`.

    Ray puts the driver's working folder there. Run from a checkout, our `kernels/` would then be importable by
    its bare name, which is that of a distribution that transformers probes for.
    """
    root = Path(octavo.__file__).resolve().parent.parent
    if (root / "pyproject.toml").is_file():
        sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != root]


class WorkerActor:
    """Body of the actor. `coordinator`: name and namespace of an actor with `announce(worker_id, address, node_id)`.

    A name and not a handle: Ray keeps a handle among an actor's arguments in the object store, and an actor whose
    arguments were lost with a node cannot be started anew.
    """

    def __init__(
        self,
        config: WorkerConfig,
        coordinator: tuple[str, str],
        *,
        loopback: bool,
        build: BuildExecutor = build_executor,
        access: Access = OPEN,
    ) -> None:
        hide_checkout()
        self._access = access
        self._config = config
        self._coordinator = coordinator
        self._build = build
        self._interface = LOOPBACK if loopback else Interface.of_node(ray.util.get_node_ip_address())
        self._compute = compute_thread()
        self._server: WorkerServer | None = None
        self._is_restart = ray.get_runtime_context().was_current_actor_reconstructed
        self._started = asyncio.create_task(self._start())
        self._announcing: asyncio.Task[None] | None = None

    async def ready(self) -> WorkerInfo:
        """Waits for the model. Raises the `StartupError` that loading it raised."""
        return await asyncio.shield(self._started)

    async def pid(self) -> int:
        return os.getpid()

    async def _start(self) -> WorkerInfo:
        if self._config.num_threads is not None:
            # Ray sets this to the actor's share of CPUs; libraries read it when they are first imported.
            os.environ["OMP_NUM_THREADS"] = str(self._config.num_threads)
        executor = await self._build_patiently()
        self._server = WorkerServer(
            executor,
            interface=self._interface,
            on_fatal=self._die,
            compute=self._compute,
            access=self._access,
        )
        address = await self._server.start()
        logger.info("worker %s serves at %s", self._config.worker_id, address)
        self._announcing = asyncio.create_task(self._announce(self._server, address))
        return executor.info

    async def _build_patiently(self) -> StepExecutor:
        loop = asyncio.get_running_loop()
        pause = 1.0
        while True:
            try:
                return await loop.run_in_executor(self._compute, self._build, self._config)
            except StartupError as error:
                if not self._is_restart:
                    raise
                logger.error("worker %s could not load again: %s", self._config.worker_id, error.message)
            except Exception as error:
                if not self._is_restart:
                    raise StartupError(
                        f"worker {self._config.worker_id} could not start: {type(error).__name__}: {error}"
                    ) from error
                logger.exception("worker %s could not load again", self._config.worker_id)
            await asyncio.sleep(pause)
            pause = min(2 * pause, REBUILD_SECONDS_MAX)

    async def _announce(self, server: WorkerServer, address: str) -> None:
        node_id = ray.get_runtime_context().get_node_id()
        while True:
            if not server.servicer.attached:
                try:
                    name, namespace = self._coordinator
                    # Asks the cluster's store and blocks while it does.
                    actor = await asyncio.to_thread(ray.get_actor, name, namespace=namespace)
                    await actor.announce.remote(self._config.worker_id, address, node_id)
                except (ValueError, ray.exceptions.RayError) as error:
                    # It is being restarted; the next round finds it again.
                    logger.warning("the coordinator does not answer: %s", type(error).__name__)
            await asyncio.sleep(ANNOUNCE_SECONDS)

    def _die(self, error: BaseException) -> None:
        """A step failed in a way that leaves the device in doubt: end the process, Ray starts a clean one."""
        asyncio.get_running_loop().call_later(FAREWELL_SECONDS, os._exit, 1)
