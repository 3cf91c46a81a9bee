"""The Ray shell of the coordinator: a named actor that Ray starts anew whenever it ends.

Owns the life of the process and the few control calls that go through Ray (who is where, how is everybody,
end well). Tokens never do: they go over the gRPC server that it starts.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, replace
from typing import Any

import ray

from octavo.cluster.backend import HealthReport
from octavo.cluster.coordinator_config import CoordinatorConfig
from octavo.cluster.coordinator_core import CoordinatorCore
from octavo.cluster.coordinator_servicer import CoordinatorServer
from octavo.cluster.metrics.exposition import Family, backend_families
from octavo.cluster.metrics.ray_export import keep_publishing
from octavo.cluster.node_watch import leaving_nodes
from octavo.protos.errors import ConfigError, UnavailableError
from octavo.protos.interface import LOOPBACK, Interface
from octavo.scheduler.autoscaling import Autoscaler, AutoscalingConfig

logger = logging.getLogger(__name__)

NAMESPACE = "octavo"
"""Ray namespace of all our actors."""
COORDINATOR_NAME = "octavo-coordinator"
FLUSH_SECONDS = 0.5
"""After a drain: time for the last outputs to reach clients before anything is torn down."""
LOOK_SECONDS = 1.0
"""Between two looks at the cluster's nodes and at how many workers there should be."""
REFUSED_SECONDS = 60.0
"""After a number of workers was refused, before the policy asks for it again: room may have come."""


async def find_coordinator(timeout_seconds: float = 5.0) -> str:
    """Address of the running coordinator, "host:port". Raises `UnavailableError` while there is none."""

    async def ask() -> str:
        # get_actor asks the cluster's store and blocks while it does.
        actor = await asyncio.to_thread(ray.get_actor, COORDINATOR_NAME, namespace=NAMESPACE)
        address: str = await actor.address.remote()
        return address

    try:
        async with asyncio.timeout(timeout_seconds):
            return await ask()
    except (ValueError, ray.exceptions.RayError, TimeoutError) as error:
        raise UnavailableError(f"the coordinator is not there: {type(error).__name__}") from error


@dataclass(frozen=True, slots=True)
class ScaleWish:
    """So many workers are asked for."""

    num_workers: int
    refusal: str | None = None
    reason: str = "it was asked for"


class Coordinator:
    """Body of the actor."""

    def __init__(
        self, config: CoordinatorConfig, *, loopback: bool, autoscaling: AutoscalingConfig | None = None
    ) -> None:
        """`autoscaling`: let the number of workers follow the load."""
        interface = LOOPBACK if loopback else Interface.of_node(ray.util.get_node_ip_address())
        self._core = CoordinatorCore(config, on_stuck=self._on_stuck)
        self._server = CoordinatorServer(self._core, interface=interface)
        self._started = asyncio.create_task(self._server.start())
        self._publishing = asyncio.create_task(keep_publishing(self._families))
        self._kills: set[asyncio.Task[None]] = set()
        self._wish: ScaleWish | None = None
        self._autoscaler = None if autoscaling is None else Autoscaler(autoscaling)
        self._refused_at = -REFUSED_SECONDS
        self._looking = asyncio.create_task(self._look())
        self._looking.add_done_callback(_tell_end)

    async def address(self) -> str:
        """Where ingresses connect, "host:port"."""
        return await asyncio.shield(self._started)

    async def announce(self, worker_id: str, address: str, node_id: str) -> None:
        """See `CoordinatorCore.announce`."""
        self._core.announce(worker_id, address, node_id)

    async def health(self) -> HealthReport:
        return self._core.health()

    async def stats(self) -> dict[str, Any]:
        return self._core.stats()

    async def _families(self) -> list[Family]:
        return backend_families(self._server.stats())

    async def want(self, num_workers: int) -> None:
        """Somebody asks for so many workers. Raises `ConfigError` for less than one, and while their number follows the
        load. Whoever owns the workers reads it from `scaling` and acts."""
        if num_workers < 1:
            raise ConfigError(f"at least 1 worker is needed, got {num_workers}", param="workers")
        if self._autoscaler is not None:
            limits = self._autoscaler.config
            raise ConfigError(
                f"the number of workers follows the load, between {limits.workers_min} and {limits.workers_max}",
                param="workers",
            )
        self._wish = ScaleWish(num_workers)

    async def refuse(self, wish: ScaleWish, reason: str) -> None:
        """What was asked for cannot be."""
        if self._wish == wish:
            self._wish = replace(wish, refusal=reason)
            self._refused_at = time.monotonic()

    async def scaling(self) -> tuple[ScaleWish | None, list[str]]:
        """What was asked for since this process started, and the workers that should be there."""
        return self._wish, self._core.expected_workers

    async def expect(self, worker_ids: list[str], grace_seconds: float) -> None:
        """See `CoordinatorCore.expect`."""
        await self._core.expect(worker_ids, grace_seconds)

    async def drain(self, grace_seconds: float) -> int:
        """See `CoordinatorCore.drain`; then waits until the last outputs have gone out."""
        left = await self._core.drain(grace_seconds)
        await asyncio.sleep(FLUSH_SECONDS)
        return left

    async def _look(self) -> None:
        while True:
            try:
                nodes = await asyncio.to_thread(leaving_nodes)
            except Exception as error:
                # Ray has no one type for a store that does not answer; the next look asks again.
                logger.warning("which nodes are drained is not known: %s", error)
            else:
                self._core.leave_nodes(nodes)
            if self._autoscaler is not None:
                self._follow_load(self._autoscaler)
            await asyncio.sleep(LOOK_SECONDS)

    def _follow_load(self, autoscaler: Autoscaler) -> None:
        now = time.monotonic()
        decision = autoscaler.observe(self._core.load(), now)
        if decision.num_workers == len(self._core.expected_workers):
            self._wish = None
        elif self._wish is None or self._wish.num_workers != decision.num_workers:
            self._wish = ScaleWish(decision.num_workers, reason=decision.reason)
        elif self._wish.refusal is not None and now - self._refused_at >= REFUSED_SECONDS:
            self._wish = replace(self._wish, refusal=None)

    def _on_stuck(self, worker_id: str) -> None:
        task = asyncio.create_task(asyncio.to_thread(_end_worker, worker_id))
        self._kills.add(task)
        task.add_done_callback(self._kills.discard)


def _tell_end(looking: asyncio.Task[None]) -> None:
    """It ends by a bug only, and nobody awaits it."""
    if not looking.cancelled():
        logger.critical("nodes and load are no longer looked at", exc_info=looking.exception())


def worker_actor_name(worker_id: str) -> str:
    return f"octavo-{worker_id}"


def _end_worker(worker_id: str) -> None:
    """End a process whose device hangs; Ray starts a new one in its place."""
    try:
        actor = ray.get_actor(worker_actor_name(worker_id), namespace=NAMESPACE)
        ray.kill(actor, no_restart=False)
    except (ValueError, ray.exceptions.RayError) as error:
        logger.warning("worker %s could not be ended: %s", worker_id, error)
