"""The whole system as one Ray Serve application: what a Serve config names, and so `serve deploy` and KubeRay start.

    import_path: octavo.cluster.serve_app:build
    args: {model: ..., num_workers: 4}

`args` are the options of `ServiceConfig`, before those that the environment of the cluster's processes sets; Serve
itself owns `host`, `port` and the cluster. Two deployments: `ingress`
answers HTTP, and `system`, one replica, owns coordinator and workers in place of the process of `octavo serve`. When
that replica is lost Serve makes another, whose coordinator the ingresses find and resume at.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import ray

from octavo.cluster.config_sources import load_config
from octavo.cluster.ingress import HEAD_NODE, IngressConfig, ingress_application
from octavo.cluster.service_config import ServiceConfig
from octavo.cluster.system import System
from octavo.protos.auth import Access, new_token
from octavo.protos.errors import ConfigError, UnavailableError

if TYPE_CHECKING:
    from ray import serve

logger = logging.getLogger(__name__)

START_SECONDS_MAX = 1800.0
"""Fetching a large checkpoint to each node included."""
POLL_SECONDS = 2.0
RECOVERY_SECONDS_MAX = 120.0
"""How long nothing may work before Serve is asked for another replica."""
DRAIN_SECONDS = 20.0
"""When Serve ends the application."""
_SERVES_OWN = ("host", "port", "ray_address")
"""Options that have no meaning here."""


class SystemReplica:
    """Body of the `system` deployment. Ready once every worker has loaded."""

    def __init__(self, config: ServiceConfig, access: Access) -> None:
        self._system = System(config, access=access, loopback=False)
        self._system.wait_ready(
            START_SECONDS_MAX, lambda info: logger.info("%s has loaded on %s", info.worker_id, info.device)
        )
        self._last_alive = time.monotonic()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="octavo-system", daemon=True)
        self._thread.start()

    def _keep(self) -> None:
        while not self._ended.wait(POLL_SECONDS):
            try:
                if self._system.poll().status.alive:
                    self._last_alive = time.monotonic()
            except (ray.exceptions.RayError, TimeoutError) as error:
                logger.warning("the coordinator does not answer: %s", type(error).__name__)

    def check_health(self) -> None:
        """Serve calls it; raises `UnavailableError` when parts that are being restarted have had their time."""
        silent = time.monotonic() - self._last_alive
        if silent > RECOVERY_SECONDS_MAX:
            raise UnavailableError(f"nothing has worked for {silent:.0f} s")

    def __del__(self) -> None:
        # Serve calls it when the replica is told to end; the interpreter may once more.
        if not hasattr(self, "_ended") or self._ended.is_set():
            return
        self._ended.set()
        self._thread.join()
        self._system.drain(DRAIN_SECONDS)
        self._system.kill()


def build(args: Mapping[str, Any]) -> serve.Application:
    """The application of `args`. Raises `ConfigError` naming an option that is unknown or wrong."""
    from ray import serve

    for name in _SERVES_OWN:
        if name in args:
            raise ConfigError(f"{name} is Serve's to say: under http_options in its config", param=name)
    config = load_config(args)
    access = Access(new_token(), config.tls_files)
    deployment: Any = serve.deployment(
        SystemReplica,
        name="system",
        num_replicas=1,
        # The workers claim what they need; their owner only waits. It is where the proxy is, so that one node's loss
        # is as bad as another's.
        ray_actor_options={"num_cpus": 0, "resources": HEAD_NODE},
        health_check_period_s=10,
        health_check_timeout_s=30,
        graceful_shutdown_timeout_s=DRAIN_SECONDS + 10.0,
    )
    return ingress_application(
        IngressConfig(
            model=config.model,
            max_model_len=config.max_model_len,
            num_replicas=config.num_ingresses,
            http=config.http_config(),
            access=access,
        ),
        deployment.bind(config, access),
    )
