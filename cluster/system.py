"""Coordinator and workers as actors of the process that makes them: what is behind HTTP, on any Ray cluster.

Owns their creation, their number and their end. `service.py` makes them for `octavo serve`, `serve_app.py` inside Ray
Serve. They end with this process, whatever ends it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from octavo.cluster.backend import HealthReport
from octavo.cluster.coordinator import COORDINATOR_NAME, NAMESPACE, Coordinator
from octavo.cluster.coordinator_config import CoordinatorConfig
from octavo.cluster.fleet import Fleet, check_resources, obtainable_resources
from octavo.cluster.scaling import Scaler
from octavo.cluster.service_config import ServiceConfig
from octavo.protos.auth import Access
from octavo.protos.errors import StartupError
from octavo.protos.types import WorkerInfo
from octavo.worker.actor import BuildExecutor, build_executor

logger = logging.getLogger(__name__)

CALL_SECONDS = 10.0
"""Control calls to actors."""


class System:
    """Connect to Ray first. Blocking calls, from one thread."""

    def __init__(
        self,
        config: ServiceConfig,
        *,
        access: Access,
        loopback: bool,
        build: BuildExecutor = build_executor,
    ) -> None:
        """Ask Ray for all actors; `wait_ready` says when they are there. `loopback`: only this machine may call them.

        Raises `ConfigError` for what this cluster cannot give and `StartupError` when an Octavo runs in it.
        """
        offered = ray.cluster_resources()
        cores = int(offered.get("CPU", 1))
        device = config.device
        if device == "auto":
            device = "cuda" if offered.get("GPU", 0) >= config.num_workers else "cpu"
        configs = config.worker_configs(cores=cores, device=device)
        check_resources(configs, obtainable_resources())
        coordinator_config = CoordinatorConfig(
            worker_ids=tuple(worker.worker_id for worker in configs),
            scheduler_options=config.scheduler_options(device),
            seed=config.seed,
            router_policy=config.router_policy,
            setup_advice=config.setup_advice(),
            recording=config.recording,
            otlp_endpoint=config.otlp_endpoint,
            access=access,
        )
        try:
            self._coordinator: Any = (
                ray.remote(Coordinator)
                .options(
                    name=COORDINATOR_NAME,
                    namespace=NAMESPACE,
                    max_restarts=-1,
                    num_cpus=0,
                    # Beside its owner, this process, without which it ends anyway: no other node's loss is its own.
                    scheduling_strategy=NodeAffinitySchedulingStrategy(
                        ray.get_runtime_context().get_node_id(), soft=False
                    ),
                )
                .remote(coordinator_config, loopback=loopback, autoscaling=config.autoscaling())
            )
        except ValueError as error:
            raise StartupError(f"another Octavo runs in this Ray cluster: {error}") from error
        self._fleet = Fleet(configs, loopback=loopback, build=build, access=access)
        self._scaler = Scaler(
            self._coordinator,
            self._fleet,
            lambda count: config.worker_configs(cores=cores, device=device, count=count),
        )

    def wait_ready(
        self, timeout_seconds: float, on_ready: Callable[[WorkerInfo], None] = lambda info: None
    ) -> list[WorkerInfo]:
        """See `Fleet.wait_ready`."""
        return self._fleet.wait_ready(timeout_seconds, on_ready)

    def poll(self) -> HealthReport:
        """Add workers or let them go, as was asked for; returns how all are. Raises `RayError` and `TimeoutError` while
        the coordinator does not answer."""
        self._scaler.poll()
        report: HealthReport = ray.get(self._coordinator.health.remote(), timeout=CALL_SECONDS)
        return report

    def want(self, num_workers: int) -> None:
        """Ask for so many workers; `poll` carries it out. Raises `ConfigError` for less than one."""
        ray.get(self._coordinator.want.remote(num_workers), timeout=CALL_SECONDS)

    def stats(self) -> dict[str, Any]:
        """See `CoordinatorCore.stats`."""
        stats: dict[str, Any] = ray.get(self._coordinator.stats.remote(), timeout=CALL_SECONDS)
        return stats

    def drain(self, grace_seconds: float) -> None:
        """Refuse new requests and let running ones finish for so long."""
        try:
            left = ray.get(
                self._coordinator.drain.remote(grace_seconds), timeout=grace_seconds + CALL_SECONDS
            )
            if left:
                logger.warning("%d requests did not finish within %g s", left, grace_seconds)
        except (ray.exceptions.RayError, TimeoutError) as error:
            logger.warning("the coordinator could not be drained: %s", type(error).__name__)

    def kill(self) -> None:
        """End all actors for good."""
        self._fleet.kill()
        ray.kill(self._coordinator, no_restart=True)
