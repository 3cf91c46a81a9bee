"""What a coordinator is told once: frozen, validated, and sent to its actor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from octavo.cluster.advice import Advice
from octavo.protos import wire
from octavo.protos.auth import OPEN, Access
from octavo.protos.errors import ConfigError
from octavo.scheduler.router import check_policy

UNFINISHED_REQUESTS_MAX = 8192
"""All ingresses together. One more is an `OverloadedError`."""


@dataclass(frozen=True, kw_only=True)
class CoordinatorConfig:
    """Raises `ConfigError` naming the option."""

    worker_ids: tuple[str, ...]
    """Workers that should be there; health is degraded while one is not."""
    scheduler_options: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `SchedulerConfig` that are configured, not discovered."""
    unfinished_requests_max: int = UNFINISHED_REQUESTS_MAX
    lease_seconds: float | None = None
    """How long a worker may be silent; None: by its device."""
    worker_wait_seconds: float = 120.0
    """How long accepted requests wait for a worker while there is none: a lost one must load again."""
    keepalive_seconds: float = wire.KEEPALIVE_SECONDS
    """Of every connection of the coordinator, to workers and from ingresses."""
    seed: int = 0
    router_policy: str = "predicted_ttft"
    """One of `ROUTER_POLICIES`; `docs/routing.md` compares them."""
    recording: str | None = None
    """Append every call and decision to this file (`recording.py`)."""
    setup_advice: tuple[Advice, ...] = ()
    """What was found against the options before the start."""
    otlp_endpoint: str | None = None
    """Where traces go; None: nowhere."""
    access: Access = OPEN
    """How workers are called, and what ingresses must show."""

    def __post_init__(self) -> None:
        if not self.worker_ids or len(set(self.worker_ids)) != len(self.worker_ids):
            raise ConfigError("worker_ids must be at least one, each once", param="worker_ids")
        if self.unfinished_requests_max < 1:
            raise ConfigError(
                f"unfinished_requests_max must be at least 1, got {self.unfinished_requests_max}",
                param="unfinished_requests_max",
            )
        if not self.worker_wait_seconds > 0:
            raise ConfigError(
                f"worker_wait_seconds must be above 0, got {self.worker_wait_seconds}",
                param="worker_wait_seconds",
            )
        check_policy(self.router_policy)
