"""A reply that runs a generation: one JSON object, or server-sent events, and nothing for a client that left.

Owns the writing of bytes to the socket, the watch for a closed connection, and how tokens share events under load.
Knows nothing of the objects' fields (`Renderer` does). Runs as the reply itself rather than in the handler, because
only there both ends of the connection, `receive` and `send`, are at hand.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from octavo.cluster.metrics.http import HttpMetrics
from octavo.cluster.openai.config import HttpConfig
from octavo.cluster.openai.errors import JSON, as_octavo_error, envelope
from octavo.cluster.openai.generation import Generation, Update

EVENT_STREAM = "text/event-stream; charset=utf-8"
DONE = b"data: [DONE]\n\n"
PAUSE_SECONDS_MIN = 0.005
"""Shorter pauses are skipped: a step takes longer."""
CLIENT_GONE = 499
"""Status that logs and metrics show for a client that left before its answer; nobody receives it."""
SCOPE_KEY = "octavo.status"
"""Where the ASGI scope has a status that no response line told."""


def event(payload: bytes) -> bytes:
    """One event whose data is `payload`, JSON on one line."""
    return b"data: " + payload + b"\n\n"


class Renderer(Protocol):
    """Makes JSON of a generation; one for each call."""

    def first(self) -> bytes:
        """Events before any token."""
        ...

    def updates(self, updates: Sequence[Update], generation: Generation) -> bytes:
        """The events of `updates`, which `generation` has just given."""
        ...

    def last(self, generation: Generation) -> bytes:
        """Events after all tokens, to the stream's end."""
        ...

    def failed(self, error: Mapping[str, Any]) -> bytes:
        """The events of an error that cuts the stream; `error` is an envelope's, with its "status"."""
        ...

    def whole(self, updates: Sequence[Update], generation: Generation) -> bytes:
        """The one object of a call that does not stream; `updates` are merged, one a choice, all finished."""
        ...


class GenerationResponse(Response):
    """Runs `generation` while the client listens; aborts it when the client leaves or the server stops.

    Raises the generation's `OctavoError` while nothing was sent, so that it becomes a reply with its own status.
    Later it is an event, the stream's last.
    """

    def __init__(
        self,
        generation: Generation,
        renderer: Renderer,
        *,
        stream: bool,
        metrics: HttpMetrics,
        config: HttpConfig,
        arrived: float,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """`arrived` is `time.perf_counter()` when the call came."""
        super().__init__(None, headers=headers, media_type=EVENT_STREAM if stream else JSON)
        del self.headers["content-length"]  # of the empty body; this one's length comes later or never
        self._generation = generation
        self._renderer = renderer
        self._stream = stream
        self._metrics = metrics
        self._config = config
        self._arrived = arrived

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = asyncio.ensure_future(self._send_events(send) if self._stream else self._send_whole(send))
        gone = asyncio.ensure_future(_disconnect(receive))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
            else:
                scope[SCOPE_KEY] = CLIENT_GONE
        finally:
            # Also when this very task is cancelled. The abort is part of `work`'s end, so it is waited for.
            work.cancel()
            gone.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)

    async def _send_whole(self, send: Send) -> None:
        async with self._generation as generation:
            updates = await generation.all()
            body = self._renderer.whole(updates, generation)
        self._note_first_token()
        self.headers["content-length"] = str(len(body))
        await self._start(send)
        await send({"type": "http.response.body", "body": body})

    async def _send_events(self, send: Send) -> None:
        self._metrics.on_stream(1)
        try:
            async with self._generation as generation:
                # Until the first token an error still has a status of its own.
                updates = await generation.next()
                self._note_first_token()
                self.headers["cache-control"] = "no-cache"
                self.headers["x-accel-buffering"] = "no"
                await self._start(send)
                async for body in self._bodies(generation, updates):
                    await send({"type": "http.response.body", "body": body, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        finally:
            self._metrics.on_stream(-1)

    async def _bodies(self, generation: Generation, updates: Sequence[Update] | None) -> AsyncIterator[bytes]:
        """The events, those that are there at once in one piece; the last ends the stream or is an error."""
        head = self._renderer.first()
        try:
            while updates is not None:
                if body := head + self._renderer.updates(updates, generation):
                    yield body
                head = b""
                await self._wait_for_company()
                updates = await generation.next()
            tail = head + self._renderer.last(generation)
        except Exception as error:
            tail = self._renderer.failed(_told(error))
        yield tail

    async def _start(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})

    async def _wait_for_company(self) -> None:
        """Let tokens gather when more streams run than the layers below can carry one event a token for."""
        rate = self._config.stream_items_per_second
        if rate <= 0 or self._generation.finished:
            return
        pause = min(self._metrics.num_streams / rate, self._config.stream_flush_seconds_max)
        if pause >= PAUSE_SECONDS_MIN:
            await asyncio.sleep(pause)

    def _note_first_token(self) -> None:
        if self._generation.first_token_at is not None:
            self._metrics.on_first_token(self._generation.first_token_at - self._arrived)


async def _disconnect(receive: Receive) -> None:
    """Returns when the client has closed the connection. The body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _told(error: Exception) -> dict[str, Any]:
    ours = as_octavo_error(error)
    # A stream's own status was sent long ago.
    return {**envelope(ours)["error"], "status": ours.http_status}
