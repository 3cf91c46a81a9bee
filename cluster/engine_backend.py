"""The in-process engine behind the HTTP app: `Backend` over an `EngineLoop`, for one process without Ray.

Owns the hop from the engine's thread to the event loop. Knows nothing of HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from octavo.cluster.backend import HealthReport, HealthStatus
from octavo.cluster.engine_loop import EngineLoop
from octavo.cluster.forking import TokensSoFar
from octavo.cluster.live import told_of
from octavo.protos.structured_output import StructuredOutput
from octavo.protos.types import ModelInfo, OutputDelta, Request

WORKER_ID = "engine"
"""What the only worker is called where others have names."""


class EngineBackend:
    """Implements `octavo.cluster.backend.Backend`. Closing the engine is its owner's business."""

    def __init__(self, loop: EngineLoop, model: ModelInfo) -> None:
        self.model = model
        self._loop = loop

    async def submit(self, request: Request) -> AsyncIterator[OutputDelta]:
        """See `Backend.submit`."""
        events = asyncio.get_running_loop()
        deltas: asyncio.Queue[OutputDelta] = asyncio.Queue()

        def take(delta: OutputDelta) -> None:
            events.call_soon_threadsafe(deltas.put_nowait, delta)

        self._loop.submit(request, take)
        finished = False
        try:
            while not finished:
                delta = await deltas.get()
                finished = delta.request_finished
                yield delta
        finally:
            if not finished:
                self._loop.abort(request.request_id)

    async def tokens(self, request_id: str, branch: int) -> TokensSoFar:
        """See `Backend.tokens`."""
        return TokensSoFar.of(*self._loop.parent_of(request_id, branch))

    async def compile_grammar(self, wanted: StructuredOutput) -> None:
        """See `Backend.compile_grammar`."""
        await asyncio.wrap_future(self._loop.compile_grammar(wanted))

    def stop_branch(self, request_id: str, branch: int) -> None:
        """See `Backend.stop_branch`."""
        self._loop.stop_branch(request_id, branch)

    async def timeline(self, request_id: str) -> dict[str, Any]:
        """See `Backend.timeline`."""
        return self._loop.timeline(request_id)

    async def health(self) -> HealthReport:
        error = self._loop.error
        status = HealthStatus.READY if error is None else HealthStatus.DEAD
        return HealthReport(status=status, detail="" if error is None else error.message)

    async def live(self) -> dict[str, Any]:
        live, stats, health = self._loop.live(), await self.stats(), await self.health()
        worker = {"worker_id": WORKER_ID, "status": health.status.value, **live["worker"]}
        return {**told_of(stats), "workers": [worker], "requests": live["requests"]}

    async def stats(self) -> dict[str, Any]:
        counts = self._loop.snapshot()
        return {**counts, "workers": {WORKER_ID: counts}}
