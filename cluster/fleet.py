"""The worker actors: how many, on what, and whether they came up.

Owns their creation and their end. Ray watches them and starts a new process for each that ends; the new one
announces itself to the coordinator as the first did, so nothing here needs to notice.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

import ray

from octavo.cluster.coordinator import COORDINATOR_NAME, NAMESPACE, worker_actor_name
from octavo.protos.auth import OPEN, Access
from octavo.protos.errors import ConfigError, OctavoError, StartupError
from octavo.protos.types import WorkerInfo
from octavo.worker.actor import BuildExecutor, WorkerActor, build_executor
from octavo.worker.config import WorkerConfig

logger = logging.getLogger(__name__)

CPU_SHARE = 0.9
"""Of its threads, what a CPU worker claims from Ray: coordinator, proxies and ingresses run beside it."""
GPU_WORKER_CPUS = 0.5
_POLL_SECONDS = 0.2

OnReady = Callable[[WorkerInfo], None]


def worker_resources(config: WorkerConfig) -> dict[str, float]:
    """What Ray reserves for one worker."""
    if config.device == "cpu":
        return {"num_cpus": max(0.1, CPU_SHARE * (config.num_threads or 1)), "num_gpus": 0}
    return {"num_cpus": GPU_WORKER_CPUS, "num_gpus": 1}


class Fleet:
    """One actor for each configuration. Blocking calls: used by the process that starts the system."""

    def __init__(
        self,
        configs: Sequence[WorkerConfig],
        *,
        loopback: bool,
        build: BuildExecutor = build_executor,
        access: Access = OPEN,
    ) -> None:
        """`access`: what the coordinator must show to the workers."""
        self._access = access
        self._loopback = loopback
        self._build = build
        self._actors: dict[str, Any] = {}
        self.add(configs)

    @property
    def worker_ids(self) -> list[str]:
        return list(self._actors)

    def add(self, configs: Sequence[WorkerConfig]) -> None:
        """Start one more worker for each; they announce themselves once they have loaded."""
        # Ray's own annotations do not follow an actor class through `options`.
        actor_class: Any = ray.remote(WorkerActor)
        for config in configs:
            self._actors[config.worker_id] = actor_class.options(
                name=worker_actor_name(config.worker_id),
                namespace=NAMESPACE,
                max_restarts=-1,
                # One worker a node before the second anywhere: they are the ones that compute.
                scheduling_strategy="SPREAD",
                **worker_resources(config),
            ).remote(
                config,
                (COORDINATOR_NAME, NAMESPACE),
                loopback=self._loopback,
                build=self._build,
                access=self._access,
            )

    def remove(self, worker_ids: Collection[str]) -> None:
        """End these for good. The coordinator has let them go before."""
        for worker_id in worker_ids:
            ray.kill(self._actors.pop(worker_id), no_restart=True)

    def wait_ready(self, timeout_seconds: float, on_ready: OnReady = lambda info: None) -> list[WorkerInfo]:
        """Waits until every worker has loaded its model.

        Raises the `StartupError` of the first that could not, `ConfigError` when the cluster has no room for one,
        and `StartupError` when the time is up.
        """
        deadline = time.monotonic() + timeout_seconds
        waiting = {actor.ready.remote(): worker_id for worker_id, actor in self._actors.items()}
        infos = []
        while waiting:
            done, _ = ray.wait(list(waiting), num_returns=1, timeout=_POLL_SECONDS)
            for reference in done:
                info = self._result(waiting.pop(reference), reference)
                infos.append(info)
                on_ready(info)
            if time.monotonic() > deadline:
                missing = ", ".join(sorted(waiting.values()))
                raise StartupError(
                    f"{missing} did not start within {timeout_seconds:g} s; the cluster offers "
                    f"{ray.available_resources()} beside what runs"
                )
        return infos

    def kill(self) -> None:
        """End all workers for good."""
        for actor in self._actors.values():
            ray.kill(actor, no_restart=True)

    @staticmethod
    def _result(worker_id: str, reference: Any) -> WorkerInfo:
        try:
            info: WorkerInfo = ray.get(reference)
            return info
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, OctavoError):
                raise error.cause from None
            raise StartupError(f"worker {worker_id} could not start: {error.cause}") from error
        except ray.exceptions.RayActorError as error:
            raise StartupError(f"worker {worker_id} ended while it started: {error}") from error


def check_resources(configs: Sequence[WorkerConfig], offered: dict[str, float]) -> None:
    """Raise `ConfigError` when a cluster that offers so many "CPU" and "GPU" can never hold all workers."""
    for ray_name, option in (("GPU", "num_gpus"), ("CPU", "num_cpus")):
        need = sum(worker_resources(config)[option] for config in configs)
        if need > offered.get(ray_name, 0.0):
            raise ConfigError(
                f"{len(configs)} workers need {need:g} {ray_name}; the cluster has {offered.get(ray_name, 0.0):g}",
                param="num_workers",
            )


def obtainable_resources() -> dict[str, float]:
    """What the cluster has, or could have where an autoscaler may add nodes to it."""
    from ray._private.state import state

    offered: dict[str, float] = ray.cluster_resources()
    # No public call tells what an autoscaler may add; Ray's own libraries ask this one.
    for name, most in (state.get_max_resources_from_cluster_config() or {}).items():
        offered[name] = max(offered.get(name, 0.0), float(most))
    return offered


def ask_for_room(configs: Sequence[WorkerConfig]) -> None:
    """Tell the cluster's autoscaler, if there is one, what these workers need together: it adds nodes at once, and
    may take away those that are no longer needed."""
    from ray.autoscaler.sdk import request_resources

    ray_names = {"num_cpus": "CPU", "num_gpus": "GPU"}
    needs = [worker_resources(config) for config in configs]
    request_resources(
        bundles=[{ray_names[name]: count for name, count in one.items() if count} for one in needs]
    )
