"""Keeps the worker actors, the coordinator's expectation and what was asked for alike.

Owns the way from one number of workers to another, for the process that owns the actors. Level, not edge: every
`poll` compares what is with what should be, so a coordinator that was restarted, and knows of no change, is told again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import ray

from octavo.cluster.coordinator import ScaleWish
from octavo.cluster.fleet import Fleet, ask_for_room, check_resources, obtainable_resources
from octavo.protos.errors import ConfigError
from octavo.worker.config import WorkerConfig

logger = logging.getLogger(__name__)

RETIRE_GRACE_SECONDS = 30.0
"""A worker too many finishes what it runs for so long; the rest goes on elsewhere."""


class Scaler:
    """`poll` now and then, from one thread; it does not wait for workers to come or go."""

    def __init__(
        self,
        coordinator: Any,
        fleet: Fleet,
        make_configs: Callable[[int], list[WorkerConfig]],
        *,
        grace_seconds: float = RETIRE_GRACE_SECONDS,
        timeout_seconds: float = 10.0,
    ) -> None:
        """`make_configs(count)`: of all workers, the present ones first and unchanged."""
        self._coordinator = coordinator
        self._fleet = fleet
        self._make_configs = make_configs
        self._grace_seconds = grace_seconds
        self._timeout_seconds = timeout_seconds
        self._retiring: tuple[Any, list[str]] | None = None
        """The call that lets workers go, and which."""

    def poll(self) -> None:
        """Take the next step. Raises `RayError` and `TimeoutError` while the coordinator does not answer."""
        if self._retiring is not None:
            self._finish_retiring(*self._retiring)
            return
        wish, expected = ray.get(self._coordinator.scaling.remote(), timeout=self._timeout_seconds)
        if sorted(expected) != sorted(self._fleet.worker_ids):
            # First of all: a wish of somebody who counts otherwise means something else.
            self._expect(self._fleet.worker_ids, 0.0)
        elif wish is not None and wish.refusal is None and wish.num_workers != len(self._fleet.worker_ids):
            self._change(wish)

    def _change(self, wish: ScaleWish) -> None:
        have = self._fleet.worker_ids
        configs = self._make_configs(wish.num_workers)
        logger.info("%d workers in place of %d: %s", wish.num_workers, len(have), wish.reason)
        if wish.num_workers > len(have):
            try:
                check_resources(configs, obtainable_resources())
            except ConfigError as error:
                ray.get(self._coordinator.refuse.remote(wish, error.message), timeout=self._timeout_seconds)
                return
            ask_for_room(configs)
            self._fleet.add([config for config in configs if config.worker_id not in have])
            self._expect(self._fleet.worker_ids, 0.0)
        else:
            kept = [config.worker_id for config in configs]
            leaving = [worker_id for worker_id in have if worker_id not in kept]
            ask_for_room(configs)
            self._retiring = (self._coordinator.expect.remote(kept, self._grace_seconds), leaving)

    def _expect(self, worker_ids: list[str], grace_seconds: float) -> None:
        ray.get(self._coordinator.expect.remote(worker_ids, grace_seconds), timeout=self._timeout_seconds)

    def _finish_retiring(self, call: Any, leaving: list[str]) -> None:
        done, _ = ray.wait([call], timeout=0)
        if not done:
            return
        self._retiring = None
        try:
            ray.get(call)
        except ray.exceptions.RayActorError:
            # The coordinator was lost meanwhile, and with it who ran there and what was asked for: those that were to
            # go are ended, and what they ran goes on elsewhere.
            logger.warning("the coordinator was lost while %s retired", ", ".join(leaving))
        self._fleet.remove(leaving)
