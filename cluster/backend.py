"""The seam between the front door and whatever runs requests: the in-process engine, or the cluster.

Owns the calls that HTTP makes and the shape of a health report. Knows nothing of HTTP, Ray or gRPC; a test's
scripted backend and the production ones are the same to the code above.
"""

from __future__ import annotations

import enum
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from octavo.cluster.advice import Advice
from octavo.cluster.forking import TokensSoFar
from octavo.protos.structured_output import StructuredOutput
from octavo.protos.types import ModelInfo, OutputDelta, Request


class HealthStatus(enum.StrEnum):
    """What a backend can do now. Health means progress: a step heartbeat, not a process that answers."""

    LOADING = "loading"
    READY = "ready"
    DEGRADED = "degraded"
    """Serves, with fewer workers than it should have."""
    DRAINING = "draining"
    """Finishes what runs and takes nothing new."""
    DEAD = "dead"

    @property
    def alive(self) -> bool:
        """Restarting the process would help nobody (`/health`)."""
        return self in (HealthStatus.READY, HealthStatus.DEGRADED, HealthStatus.DRAINING)

    @property
    def accepts_requests(self) -> bool:
        """New requests may be sent here (`/ready`)."""
        return self in (HealthStatus.READY, HealthStatus.DEGRADED)


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthReport:
    """The backend's own word on how it is."""

    status: HealthStatus
    workers: tuple[Mapping[str, Any], ...] = ()
    """One JSON-able mapping a worker: at least "worker_id" and "status"."""
    detail: str = ""
    """One sentence for a person; empty when there is nothing to say."""
    advice: tuple[Advice, ...] = ()
    """What is unwise about how it is set up or runs."""

    def as_dict(self) -> dict[str, Any]:
        """JSON-able, as `/health` sends it."""
        return {
            "status": HealthStatus(self.status).value,
            "workers": [dict(worker) for worker in self.workers],
            "detail": self.detail,
            "advice": [one.as_dict() for one in self.advice],
        }


class Backend(Protocol):
    """Runs validated requests. All calls are made on one event loop."""

    model: ModelInfo

    def submit(self, request: Request) -> AsyncIterator[OutputDelta]:
        """The deltas of `request`, all its branches mixed, until one has `request_finished`; then the end.

        Nothing happens before the first `__anext__`, which raises an `OctavoError` when the request is refused.
        A delta with an `error` ends the request. `aclose()`, or cancelling a pending `__anext__`, before the end
        aborts it and frees its blocks; after the end neither does anything.
        """
        ...

    async def tokens(self, request_id: str, branch: int) -> TokensSoFar:
        """Where one branch of an unfinished request stands, whoever submitted it.

        Raises as `forking.parent_of`.
        """
        ...

    async def compile_grammar(self, wanted: StructuredOutput) -> None:
        """Make ready what an output must match, wherever it may run, so that no step waits for it.

        Raises `InvalidRequestError` saying what is wrong with it.
        """
        ...

    def stop_branch(self, request_id: str, branch: int) -> None:
        """The text of one branch is complete: it need not be computed further, the others go on. Does not wait; a
        branch that has ended is left alone. What was under way may still come, and then that branch's end."""
        ...

    async def timeline(self, request_id: str) -> dict[str, Any]:
        """What happened to a request that runs or ended lately, JSON-able: see `timeline.Timelines.describe`.

        Raises `NotFoundError` for one that is not known.
        """
        ...

    async def health(self) -> HealthReport:
        """Answers within a second however much work is queued."""
        ...

    async def live(self) -> dict[str, Any]:
        """What the system is doing now, JSON-able: see `live.py`. Not for every step: it looks at every block."""
        ...

    async def stats(self) -> dict[str, Any]:
        """Counts and gauges by name; `cluster/metrics.py` says which become metrics."""
        ...
