"""One expected worker as the coordinator keeps it over all its lives, and what all of them say of the system's health.

Health is progress: a worker is READY while its stream is up, its heartbeats come within the lease and its steps are
not overdue (`worker_client.py` and `worker_link.py` judge that), not while some process answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from octavo.cluster.advice import Advice
from octavo.cluster.backend import HealthReport, HealthStatus
from octavo.cluster.worker_link import WorkerLink


@dataclass(slots=True, eq=False)
class WorkerSlot:
    """`link` is its present life."""

    worker_id: str
    link: WorkerLink | None = None
    task: asyncio.Task[None] | None = None
    address: str | None = None
    node_id: str | None = None
    """Where it was last; None: nobody has said."""
    leaving: asyncio.Task[None] | None = None
    """Under way once its node is about to go: it takes nothing new and is started anew elsewhere."""
    ever_served: bool = False
    retiring: bool = False
    """It takes no new requests and goes once it has none."""
    detail: str = "not joined yet"
    num_losses: int = 0

    @property
    def serving(self) -> bool:
        return self.link is not None and self.link.serving

    @property
    def takes_requests(self) -> bool:
        return self.serving and not self.retiring and self.leaving is None

    @property
    def status(self) -> HealthStatus:
        if self.serving:
            return HealthStatus.READY if self.takes_requests else HealthStatus.DRAINING
        return HealthStatus.DEAD if self.ever_served else HealthStatus.LOADING

    def health(self) -> dict[str, Any]:
        """JSON-able."""
        return {
            "worker_id": self.worker_id,
            "status": self.status.value,
            "detail": self.detail,
            "seconds_since_heard": None if self.link is None else self.link.seconds_since_heard,
            "steps": 0 if self.link is None else self.link.num_steps,
        }

    def stats(self) -> dict[str, Any]:
        """Only while it serves."""
        assert self.link is not None
        return {
            **self.link.stats(),
            "device": self.link.info.device,
            "dtype": self.link.info.dtype,
            "epoch": self.link.epoch,
            "losses": self.num_losses,
        }


def count_by_status(slots: Collection[WorkerSlot]) -> dict[str, int]:
    """Every status, of which a worker can be, with how many are."""
    counts = {status.value: 0 for status in HealthStatus if status is not HealthStatus.DEGRADED}
    for slot in slots:
        counts[slot.status.value] += 1
    return counts


def report(
    slots: Collection[WorkerSlot], *, draining: bool, num_unfinished: int, advice: tuple[Advice, ...]
) -> HealthReport:
    """The whole system. Workers that retire are shown and not counted; those whose node goes are missing."""
    expected = [slot for slot in slots if not slot.retiring]
    ready = sum(slot.takes_requests for slot in expected)
    missing = ", ".join(
        f"{slot.worker_id} {slot.status.value}" for slot in expected if not slot.takes_requests
    )
    detail = f"{ready} of {len(expected)} workers serve: {missing}" if missing else ""
    if draining:
        status = HealthStatus.DRAINING
        detail = f"shutting down, {num_unfinished} requests left"
    elif ready == len(expected):
        status = HealthStatus.READY
    elif ready:
        status = HealthStatus.DEGRADED
    elif any(slot.serving for slot in slots):
        status = HealthStatus.DRAINING
    elif any(slot.ever_served for slot in slots):
        status = HealthStatus.DEAD
    else:
        status = HealthStatus.LOADING
    workers = tuple(slot.health() for slot in slots)
    return HealthReport(status=status, workers=workers, detail=detail, advice=advice)
